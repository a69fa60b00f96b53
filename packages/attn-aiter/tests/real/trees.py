"""Where amd-aiter's files are, without importing any of them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

VARIABLE = "ATTN_AITER_TREE"
REQUIRED = "ATTN_AITER_REQUIRED"
HOW = "uv run --isolated --group aiter pytest packages/attn-aiter/tests/real"


@dataclass(frozen=True)
class Tree:
    """An amd-aiter on disk.

    Attributes:
        root: Directory that holds ``aiter`` and ``aiter_meta``, as site-packages does.
        release: Its version.
    """

    root: Path
    release: str


def find() -> Tree | None:
    """Return what ``ATTN_AITER_TREE`` names, else what is installed, else None.

    Raises:
        ValueError: The variable names a directory without amd-aiter's metadata.
    """
    given = os.environ.get(VARIABLE)
    if given:
        for info in Path(given).glob("amd_aiter-*.dist-info"):
            return Tree(Path(given), info.name.removesuffix(".dist-info").removeprefix("amd_aiter-"))
        raise ValueError(f"{VARIABLE}: needs a directory with amd_aiter-*.dist-info, got {given}")
    try:
        found = metadata.distribution("amd-aiter")
    except metadata.PackageNotFoundError:
        return None
    return Tree(Path(str(found.locate_file(""))), found.version)


def require() -> Tree:
    """Return the tree; skip the test without one, or fail it where ``ATTN_AITER_REQUIRED`` is set."""
    found = find()
    if found is None:
        if os.environ.get(REQUIRED):
            pytest.fail(f"amd-aiter is not installed, and {REQUIRED} is set")
        pytest.skip(f"amd-aiter is not installed: {HOW}")
    return found


def script(name: str, *arguments: str, **environment: str) -> str:
    """Run a script of this folder in a process of its own and return what it printed.

    AITER changes ``sys.path``, torch's operators and its environment, and Triton decides when it is imported
    whether it interprets: none of that may reach the other tests.
    """
    here = Path(__file__).parent
    places = [str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(here / name), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places), **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout
