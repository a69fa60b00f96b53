"""docs/write-a-backend.md: every code block in it is used, in order, as a reader would."""

import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from attn_core import plugins

pytest_plugins = ["pytester"]
PAGE = Path(__file__).parents[3] / "docs" / "write-a-backend.md"
BLOCK = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.M | re.S)


def _blocks():
    return [(m[1], m[2], m[3]) for m in BLOCK.finditer(PAGE.read_text(encoding="utf-8"))]


@pytest.fixture
def acme(pytester, monkeypatch):
    """The tree the page describes, as an installed package."""
    for _, title, text in _blocks():
        if title:
            place = pytester.path / title
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
    project = tomllib.loads((pytester.path / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = pytester.path / "src" / f"attn_acme-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    (group, points), *others = project["entry-points"].items()
    assert others == []
    lines = [f"{name} = {target}" for name, target in points.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]))
    (pytester.path / "src" / "attn_acme" / "__init__.py").touch()
    monkeypatch.syspath_prepend(pytester.path / "src")
    monkeypatch.setenv("ATTN_CONFIG", "")
    monkeypatch.setenv("ATTN_DISABLE_PLUGINS", "aiter,echo,hip")
    before = plugins.use(None)
    yield pytester.path
    plugins.use(before)
    for name in [name for name in sys.modules if name.partition(".")[0] == "attn_acme"]:
        del sys.modules[name]


def test_every_block_has_a_reader():
    kinds = {(kind, bool(title)) for kind, title, _ in _blocks()}
    assert kinds == {("text", False), ("toml", True), ("python", True), ("python", False), ("console", False)}
    fences = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("```")]
    assert len(fences) == 2 * len(_blocks())


def test_the_tree_is_the_files_that_follow(acme):
    tree = next(text for kind, _, text in _blocks() if kind == "text")
    listed = {line.split()[0].rstrip("/") for line in tree.splitlines()}
    written = {Path(title).name for _, title, _ in _blocks() if title} - {"attn.toml"}
    assert written | {"attn-acme", "src/attn_acme", "tests", "__init__.py"} == listed


def test_the_snippets_run_in_order(acme, monkeypatch):
    monkeypatch.chdir(acme)
    namespace = {"__name__": "page"}
    found = [text for kind, title, text in _blocks() if kind == "python" and not title]
    assert len(found) == 3
    for text in found:
        exec(compile(text, str(PAGE), "exec"), namespace)


def test_the_commands_work(acme, pytester):
    commands = [
        shlex.split(line.removeprefix("$ "))
        for kind, _, text in _blocks()
        if kind == "console"
        for line in text.splitlines()
    ]
    assert [command[0] for command in commands] == ["pytest", "attn", "attn"]
    result = pytester.runpytest_inprocess(*commands[0][1:], "-p", "no:cacheprovider")
    outcomes = result.parseoutcomes()
    assert set(outcomes) <= {"passed", "skipped"}
    assert outcomes["passed"] > 500
    result.stdout.fnmatch_lines(["candidate * on * cases *", "acme/sdpa * cpu *", "acme/sdpa covered:"])
    said = [_attn(command[1:]) for command in commands[1:]]
    assert [code for code, _ in said] == [0, 0]
    assert "acme.short-kv" in said[0][1]
    assert "core.arch" in said[1][1]


def _attn(arguments):
    testing = pytest.importorskip("typer.testing", reason="the extra cli")
    from attn_core.cli.app import app

    found = testing.CliRunner().invoke(app, arguments)
    return found.exit_code, found.output
