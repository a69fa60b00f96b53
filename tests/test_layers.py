"""What the repository promises about itself: who imports whom, how long files get, what no file names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ROOT / "packages"
LAYERS = {
    "attn_core": set(),
    "attn_hip": {"attn_core"},
    "attn_aiter": {"attn_core"},
    "attn_compile": {"attn_core"},
}
"""attn_hip -> attn_core <- attn_aiter, attn_compile -> attn_core."""

# Of attn-core only: what may be imported besides the standard library.
CORE_NEEDS = {"torch", "pluggy"}
# matplotlib is no extra: `attn tune` draws where it is there, and says so where it is not.
CORE_EXTRAS = {"cli": {"typer", "rich", "matplotlib"}, "testing": {"pytest"}}

MOST_LINES = 400
SOURCES = {".py", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hip", ".hpp", ".inc", ".inl"}

FOREIGN = re.compile(
    r"""\baiter | \bfa2 | gfx[0-9a-f]{3,} | \bsm_?\d{2,} | \battn_(?:hip|aiter|compile)""",
    re.IGNORECASE | re.VERBOSE,
)
# Generic prefixes ("gfx...", "sm_...") are not names; these are, and each has its reason.
FOREIGN_ALLOWED = {
    "cli/app.py": {"aiter", "gfx942", "gfx950", "sm_90"},  # --aiter, a shorthand; examples in --help
    "compat.py": {"aiter", "fa2"},  # names that upstream and its AMD fork take, like the next two
    "compat_fork.py": {"aiter"},
    "compat_modules.py": {"fa2"},  # what upstream's helpers are called, and may say
    "cli/installed.py": {"aiter"},  # what the shorthand stands for
    "testing/checks/declared.py": {"gfx942", "gfx950", "gfx1201", "sm_90"},  # devices that are not here
}

# Put together from parts, so that this file does not name them.
HOSTS = tuple(
    ".".join(parts)
    for parts in (
        ("pypi", "org"), ("pythonhosted", "org"), ("pytorch", "org/whl"), ("npmjs", "org"),
        ("crates", "io"), ("proxy", "golang", "org"), ("conda", "anaconda", "org"),
        ("rubygems", "org"), ("repo", "radeon", "com"),
    )
)  # fmt: skip
WORKPLACE = re.compile(r"(?<![\w./-])/(?:work|root)(?![\w-])")


def package_dirs() -> list[Path]:
    return sorted(path.parent for path in PACKAGES.glob("*/pyproject.toml"))


def python_files(module: str) -> list[Path]:
    return sorted((PACKAGES / module.replace("_", "-") / "src" / module).rglob("*.py"))


def imported(text: str) -> Iterator[str]:
    """Top-level packages that a source imports: by statement, at any depth, or by name through importlib."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__", "find_spec") and isinstance(node.args[0].value, str):
                name = node.args[0].value
                if not name.startswith("."):  # one of its own
                    yield name.split(".")[0]


def words(text: str) -> Iterator[str]:
    """Identifiers and strings of a source, without comments and documentation."""
    tree = ast.parse(text)
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield value


def foreign(text: str) -> set[str]:
    return {found.lower() for word in words(text) for found in FOREIGN.findall(word)}


def betrays(text: str) -> list[str]:
    """Registry hosts and absolute paths of a workplace in a text."""
    return [host for host in HOSTS if host in text.lower()] + WORKPLACE.findall(text)


@cache
def repository() -> tuple[Path, ...]:
    """Files that are tracked, or would be: not those that git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, check=True, text=True,
    ).stdout  # fmt: skip
    return tuple(path for name in listed.split("\0") if name and (path := ROOT / name).is_file())


def test_the_layers_name_every_package():
    assert {path.name.replace("-", "_") for path in package_dirs()} == set(LAYERS)
    assert all(python_files(module) for module in LAYERS)


@pytest.mark.parametrize("module", LAYERS)
def test_imports_point_down(module):
    ours = set(LAYERS)
    for path in python_files(module):
        up = set(imported(path.read_text(encoding="utf-8"))) & ours - LAYERS[module] - {module}
        assert not up, f"{path.relative_to(ROOT)} imports {sorted(up)}"


@pytest.mark.parametrize("module", LAYERS)
def test_declared_dependencies_point_down(module):
    path = PACKAGES / module.replace("_", "-") / "pyproject.toml"
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    asked = {re.split(r"[\s\[<>=!~;]", line)[0].replace("-", "_") for line in project["dependencies"]}
    assert asked & set(LAYERS) == LAYERS[module]
    if module == "attn_core":
        assert asked == CORE_NEEDS


def test_core_imports_torch_and_pluggy_only():
    source = PACKAGES / "attn-core" / "src" / "attn_core"
    for path in python_files("attn_core"):
        inside = path.relative_to(source)
        allowed = CORE_NEEDS | {"attn_core"} | CORE_EXTRAS.get(inside.parts[0], set())
        other = set(imported(path.read_text(encoding="utf-8"))) - allowed - sys.stdlib_module_names
        assert not other, f"{inside} imports {sorted(other)}"


def test_imports_are_seen_wherever_they_are():
    text = (
        "def f():\n    import attn_hip.x as y\n    from attn_aiter import z\n    from . import attn_compile\n"
    )
    text += "    importlib.import_module('attn_compile.ops')\n"
    assert sorted(imported(text)) == ["attn_aiter", "attn_compile", "attn_hip"]


def test_no_source_is_too_long():
    roots = [*PACKAGES.glob("*/src"), ROOT / "examples", ROOT / "benchmarks"]
    long = {
        str(path.relative_to(ROOT)): lines
        for path in repository()
        if path.suffix in SOURCES and any(root in path.parents for root in roots)
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MOST_LINES
    }
    assert long == {}


def test_core_names_no_backend_and_no_architecture():
    source = PACKAGES / "attn-core" / "src" / "attn_core"
    found = {
        path.relative_to(source).as_posix(): named
        for path in python_files("attn_core")
        if (named := foreign(path.read_text(encoding="utf-8")))
    }
    assert found == FOREIGN_ALLOWED


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("x = 'gfx942'", {"gfx942"}),
        ("def f(aiter_version): ...", {"aiter"}),
        ("x.fa2 = f'sm_90a {y}'", {"fa2", "sm_90"}),
        ("import attn_hip", {"attn_hip"}),
        ("'''AITER and gfx942.'''\nx = 1\n'''fa2'''  # sm_90", set()),
        ("x = name.startswith('gfx9') or name.startswith('sm_') or obj.__aiter__", set()),
    ],
)
def test_foreign_names_are_seen_in_code_only(text, named):
    assert foreign(text) == named


def test_the_wheel_of_the_example_has_its_licence():
    example = ROOT / "examples" / "tiny_lm"
    assert (example / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("package", package_dirs(), ids=lambda path: path.name)
def test_every_package_has_its_papers(package):
    for name in ("CHANGELOG.md", "README.md", "LICENSE"):
        path = package / name
        assert path.is_file(), f"{package.name} has no {name}"
        assert path.read_text(encoding="utf-8").strip(), f"{package.name}: {name} is empty"
    module = package.name.replace("-", "_")
    assert (package / "src" / module / "py.typed").is_file()
    assert (package / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (project["license"], project["readme"]) == ("Apache-2.0", "README.md")
    assert "Typing :: Typed" in project["classifiers"]


@pytest.mark.parametrize("package", package_dirs(), ids=lambda path: path.name)
def test_a_readme_holds_in_a_wheel(package):
    """It is the page of the package's index, where no file of the source tree lies beside it."""
    links = re.findall(r"\]\(([^)]+)\)", (package / "README.md").read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link] == []


def test_no_file_names_a_registry_or_a_workplace():
    found = {}
    for path in repository():
        if path.name == "uv.lock":
            continue
        named = betrays(path.read_bytes().decode("utf-8", errors="ignore"))
        if named:
            found[str(path.relative_to(ROOT))] = named
    assert found == {}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("see https://" + HOSTS[0] + "/simple", 1),
        ("/".join(("cd ", "work", "main")), 1),
        ("/".join(("(", "root)")), 1),
        ("a/work/b ../root /workspace /worker $HOME/work https://x.y/root", 0),
    ],
)
def test_betrayals_are_seen(text, count):
    assert len(betrays(text)) == count
