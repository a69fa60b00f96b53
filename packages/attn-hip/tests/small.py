"""A build as small as can be: the builder's tests compile this in place of the kernels."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

UNITS = ("one.cpp", "two.cpp")
MODULE = """
#include <Python.h>
#include "two.h"
static PyModuleDef def = {PyModuleDef_HEAD_INIT, "native", 0, -1, 0, 0, 0, 0, 0};
PyMODINIT_FUNC __attribute__((visibility("default"))) PyInit_native() {
  PyObject* m = PyModule_Create(&def);
  PyModule_AddIntConstant(m, "answer", two());
  return m;
}
"""


def write_sources(place: Path) -> Path:
    place.mkdir()
    (place / "one.cpp").write_text(MODULE)
    (place / "two.cpp").write_text('#include "two.h"\nint two() { return TWO; }\n')
    (place / "two.h").write_text("#pragma once\n#define TWO 2\nint two();\n")
    (place / "unused.h").write_text("nobody includes this\n")
    return place


PROGRAM = """
import sys
from pathlib import Path
from attn_hip import build
build._SOURCES, build.UNITS = Path(sys.argv[1]), {units!r}
print(build.ensure("generic"))
"""


def start(sources: Path, **env: str) -> subprocess.Popen[str]:
    """Start a process that builds, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(units=UNITS), str(sources)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, **env},
    )  # fmt: skip


def kill(process: subprocess.Popen[str]) -> None:
    """Kill it and its children without notice."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def script(path: Path, text: str) -> Path:
    """Write a program that stands in for a compiler."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path
