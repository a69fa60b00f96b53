"""``python -m attn_compile.testing``: run cells of the matrix and show what became of them."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence

import torch

from . import matrix


def main(argv: Sequence[str] | None = None) -> int:
    """Run; return 1 where a cell is neither exact nor refused for a known defect."""
    parser = argparse.ArgumentParser(prog="python -m attn_compile.testing", description=__doc__)
    parser.add_argument("--backend", default="auto", help="backend of run() and append (auto)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--all", action="store_true", help="the full grid, not about 60 cells")
    parser.add_argument("--share", default="1/1", metavar="I/N", help="only the I-th of N shares")
    parser.add_argument("--programs", default="", help="comma-separated; others are left out")
    parser.add_argument("--layouts", default="", help="semicolon-separated")
    parser.add_argument("--modes", default="", help="comma-separated")
    parser.add_argument("--each", action="store_true", help="a line for every cell, the exact ones too")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    part, parts = (int(n) for n in given.share.split("/"))
    chosen = _chosen(given)[part - 1 :: parts]
    count, started, bad = Counter[str](), time.perf_counter(), 0
    for cell in chosen:
        found = matrix.run(cell, given.backend, given.device)
        count[found.verdict] += 1
        if not found.good:
            bad += 1
        if given.each or found.verdict != "exact":
            print(
                f"{'BAD ' if not found.good else ''}{cell}: {found.verdict} {found.known or found.detail}",
                flush=True,
            )
    total = ", ".join(f"{n} {verdict}" for verdict, n in sorted(count.items()))
    print(f"torch {torch.__version__}: {len(chosen)} cells, {total}, {time.perf_counter() - started:.0f} s")
    print(f"{len(chosen) - bad} passed, {bad} failed")
    return int(bad > 0)


def _chosen(given: argparse.Namespace) -> list[matrix.Cell]:
    wanted = {
        "program": [p for p in given.programs.split(",") if p],
        "layout": [x for x in given.layouts.split(";") if x],
        "mode": [m for m in given.modes.split(",") if m],
    }
    every = matrix.every() if given.all or any(wanted.values()) else matrix.cells()
    return [c for c in every if all(not names or getattr(c, key) in names for key, names in wanted.items())]


if __name__ == "__main__":
    sys.exit(main())
