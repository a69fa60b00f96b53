"""``python -m attn_compile.testing.versions 2.11 2.13``: the matrix on several torch versions, a row each.

Without a version it runs on the torch that is installed. Each version gets an environment of its own from
``uv``, which downloads that torch unless it is cached.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attn_compile
import attn_core

COLUMNS = (
    "torch",
    "cells",
    "exact",
    "refused",
    "copied",
    "wrong",
    "error",
    "bad",
    "repairs",
    "guard",
    "seconds",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run; return 1 where a cell is neither exact nor refused for a defect that version is known to have."""
    parser = argparse.ArgumentParser(prog="python -m attn_compile.testing.versions", description=__doc__)
    parser.add_argument("torch", nargs="*", help="versions, 2.13 say")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--all", action="store_true", help="the full grid, not about 60 cells")
    parser.add_argument("--json", action="store_true", help="print one JSON object per version")
    given = parser.parse_args(argv)
    rows = [_elsewhere(v, given) for v in given.torch] if given.torch else [here(given.backend, given.all)]
    if given.json:
        for row in rows:
            print(json.dumps(row))
    else:
        print("  ".join(f"{name:>8}" for name in COLUMNS))
        for row in rows:
            print("  ".join(f"{row.get(name, 0)!s:>8}" for name in COLUMNS))
            for line in row["details"]:
                print(f"    {line}")
    bad = sum(int(row["bad"]) for row in rows)
    passed = sum(max(0, int(row["cells"]) - int(row["bad"])) for row in rows)
    print(f"{passed} passed, {bad} failed", file=sys.stderr)
    return int(bad > 0)


def here(backend: str, every: bool) -> dict[str, Any]:
    """Run the matrix on the torch of this process."""
    import torch

    from .. import defects, fixups, guard
    from . import matrix

    torch.set_num_threads(1)
    started, count, details = time.perf_counter(), Counter[str](), []
    cells = matrix.every() if every else matrix.cells()
    known: Counter[str] = Counter()
    for cell in cells:
        found = matrix.run(cell, backend)
        count[found.verdict] += 1
        known[found.known or ""] += 1
        if not found.good:
            count["bad"] += 1
            details.append(f"{cell}: {found.verdict} {found.detail}")
    details += [f"refused for {name}: {n}" for name, n in sorted(known.items()) if name]
    return {
        "torch": torch.__version__, "cells": len(cells), **count, "bad": count["bad"],
        "repairs": _repairs(fixups.install()), "guard": guard.state(),
        "seconds": round(time.perf_counter() - started), "details": details,
        "defects": [defect.name for defect in defects.present()],
    }  # fmt: skip


def _repairs(states: Mapping[str, str]) -> str:
    """Return ``3 of 3``, or what failed."""
    failed = [f"{name} {what}" for name, what in states.items() if what not in ("installed", "not needed")]
    return "; ".join(failed) or f"{len(states)} of {len(states)}"


def _elsewhere(version: str, given: argparse.Namespace) -> Mapping[str, Any]:
    """Run :func:`here` in an environment of its own."""
    ours = [*_requirement(attn_core), *_requirement(attn_compile)]
    command = ["uv", "run", "--no-project", "--isolated", "--with", f"torch=={version}.*", *ours]
    command += [
        "python",
        "-m",
        f"{__package__}.versions",  # __name__ is __main__ where this is run as a program
        "--json",
        "--backend",
        given.backend,
        *(["--all"] if given.all else []),
    ]
    # Wheels that pip was told to look for serve uv as well.
    links = os.environ.get("PIP_FIND_LINKS", "")
    env = {"UV_FIND_LINKS": links, **os.environ} if links else dict(os.environ)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env, check=False)
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("{"):
            row: Mapping[str, Any] = json.loads(line)
            return row
    return {"torch": version, "cells": 0, "bad": 1, "details": [f"no result, exit {done.returncode}"]}


def _requirement(module: Any) -> list[str]:
    """How to install one of our packages: from its source tree, or the release that is installed."""
    for folder in Path(module.__file__).parents:
        if (folder / "pyproject.toml").is_file():
            return ["--with-editable", str(folder)]
    from importlib.metadata import version

    name = module.__name__.replace("_", "-")
    return ["--with", f"{name}=={version(name)}"]


if __name__ == "__main__":
    sys.exit(main())
