"""Python in the documentation runs, and links lead somewhere."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attn_core.cli.app import app

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("packages/*/*.md"),
        *ROOT.glob("examples/**/*.md"),
    ]
)
RUN_HERE = [
    "README.md",
    "docs/plan-run.md",
    "docs/graphs.md",
    "docs/torch-compile.md",
    "docs/from-flashinfer.md",
    "packages/attn-core/README.md",
    "packages/attn-hip/README.md",
    "packages/attn-aiter/README.md",
    "packages/attn-compile/README.md",
]
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]*)(?:#([^)\s]+))?[^)]*\)")


@pytest.mark.parametrize("name", RUN_HERE)
def test_python_of_a_page_runs(name):
    """All python blocks of a page, in order, as one program."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(encoding="utf-8"), re.S)
    assert blocks
    # What Inductor calls, torch itself has deprecated.
    warn = ["-W", "error", "-W", "ignore:`torch.jit.:DeprecationWarning"]
    done = subprocess.run(
        [sys.executable, *warn, "-c", "\n".join(blocks)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" not in target:
            file = page.parent / target if target else page
            assert file.exists(), target
            assert not anchor or anchor in _anchors(file), f"{target}#{anchor}"


def _anchors(page):
    """Names of a page's headings, as they are made where Markdown pages are shown."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    titles = re.findall(r"^#+ +(.+)$", prose, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_rows_of_a_table_have_as_many_cells_as_its_head(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    for table in re.findall(r"(?:^\|.*\n)+", prose, re.M):
        cells = [len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()]
        assert len(set(cells)) == 1, table.splitlines()[next(i for i, n in enumerate(cells) if n != cells[0])]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_code_is_as_wide_as_a_page_is_shown(page):
    """Longer lines of code end in a scroll bar; a README stands beside a column of its own."""
    text = page.read_text(encoding="utf-8")
    most = 100 if page.name == "README.md" else 106
    code = "".join(re.findall(r"^```[^\n]*\n(.*?)^```", text, re.S | re.M)).splitlines()
    code += re.findall(r"^ {4}(?![-*|]).*", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M)
    assert [line for line in code if len(line) > most] == []


def test_the_map_of_modules_is_whole():
    """CONTRIBUTING names every module of the packages, and none that is gone."""
    there = {path.stem for path in ROOT.glob("packages/*/src/*/*.py") if not path.stem.startswith("__")}
    there |= {f"{path.parent.name}/" for path in ROOT.glob("packages/*/src/*/*/__init__.py")}
    chapter = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("### A call")[2]
    rows = "".join(re.findall(r"^\|.*$", chapter.partition("\n## ")[0], re.M))
    assert set(re.findall(r"`(\w+/?)`", rows)) == there | {"csrc/"}


SLOW = ("build", "selftest", "tune", "demo", "fuzz")


def _page(name):
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def _commands(name):
    """The arguments of every ``$ attn ...`` that a page shows."""
    blocks = re.findall(r"^```console\n(.*?)^```", _page(name), re.S | re.M)
    shown = re.findall(r"^\$ attn (.*)$", "".join(blocks), re.M)
    return [shlex.split(line, comments=True) for line in shown]


@pytest.mark.parametrize(
    "command",
    [c for name in ("install", "troubleshooting", "routing", "cli") for c in _commands(name)],
    ids=" ".join,
)
def test_a_command_that_is_shown_runs(command):
    """Those that would take minutes are held to the options that their help lists."""
    slow = command[0] in SLOW
    run = CliRunner().invoke(app, [command[0], "--help"] if slow else command, env={"COLUMNS": "200"})
    assert run.exit_code == 0, run.output
    assert not slow or all(word in run.output for word in command if word.startswith("--")), run.output


def test_what_troubleshooting_and_install_name_exists():
    """Codes, and variables."""
    pages = _page("troubleshooting") + _page("install")
    named = re.findall(r"`\[?((?:core|fa2|aiter|compile|cli)\.[a-z0-9-]+)\]?`", pages)
    named += re.findall(r"\bATTN_[A-Z_]+\b", pages)
    assert len(set(named)) > 40
    sources = "".join(p.read_text(encoding="utf-8") for p in ROOT.glob("packages/*/src/**/*.py"))
    assert [name for name in named if not re.search(rf"[\"'\[]{name}[\]\"']", sources)] == []
