"""The installed amd-aiter against what is recorded of it, from its files alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

from attn_aiter import probe, rows
from attn_aiter.backend import AiterBackend
from attn_aiter.probe import Install
from attn_aiter.versions import version

from .trees import Tree, require


@pytest.fixture(scope="module")
def tree() -> Tree:
    return require()


@pytest.fixture(scope="module")
def api(tree: Tree) -> probe.AiterApi:
    return probe.read(Install(tree.release, version(tree.release), tree.root))


def test_it_is_what_is_recorded(tree: Tree, api: probe.AiterApi) -> None:
    known = probe.recorded(version(tree.release))
    assert known.text == tree.release, "no recording of this release"
    assert api.functions == known.functions
    assert api.pa_v1_arguments == known.pa_v1_arguments


@pytest.mark.parametrize("path", list(rows.CAPABILITIES))
def test_every_keyword_exists_and_nothing_required_is_left_out(tree: Tree, api, path: str) -> None:
    backend = AiterBackend({"assume_version": tree.release, "min_version": "0.1.0"})
    route = backend._append if path == rows.APPEND else backend._routes[path]
    assert route.missing(api) == ()


def test_looking_finds_it_and_imports_nothing(tree: Tree) -> None:
    """As a user's process would: by metadata and find_spec, in an environment that has the package."""
    code = (
        "import sys; from attn_aiter import probe; found = probe.look()\n"
        "api = probe.read(probe.look(floor='0.1.0'))\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('aiter', 'csrc')]\n"
        "print(found.text, found.cause[0].slug, len(api.functions))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(tree.root), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [tree.release, "aiter.too-old", str(len(probe._PLACES))], done.stderr
