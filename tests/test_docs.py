"""Python in the documentation runs, and links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

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
