"""Compilers and build tools of this machine."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version

PROGRAMS = ("g++", "clang-19", "nvcc", "ninja", "amdclang++", "hipcc")
TIMEOUT_S = 3.0
"""Seconds a tool may take to state its version."""


def found(programs: Sequence[str] = PROGRAMS) -> list[dict[str, object]]:
    """Return name, path, version and fault of each program on PATH, and of the ``ziglang`` wheel.

    A program that does not answer in time is stopped and listed without a version.
    """
    with ThreadPoolExecutor(max_workers=len(programs)) as pool:
        rows = list(pool.map(_program, programs))
    return [*rows, _ziglang()]


def _program(name: str) -> dict[str, object]:
    path = shutil.which(name)
    row: dict[str, object] = {"name": name, "path": path, "version": None, "error": None}
    if path is None:
        return row
    try:
        ran = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        row["error"] = f"no answer to --version within {TIMEOUT_S:g} s"
    except OSError as err:
        row["error"] = f"cannot run: {err.strerror}"
    else:
        row["version"] = _version_line(ran.stdout)
        if ran.returncode:
            row["error"] = f"--version ended with status {ran.returncode}"
    return row


def _version_line(text: str) -> str | None:
    """The first line that holds a dotted number; nvcc puts its banner before it."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return next((line for line in lines if re.search(r"\d+\.\d+", line)), None)


def _ziglang() -> dict[str, object]:
    try:
        stated: str | None = version("ziglang")
    except PackageNotFoundError:
        stated = None
    return {"name": "ziglang (wheel)", "path": None, "version": stated, "error": None}
