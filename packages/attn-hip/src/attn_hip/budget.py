"""What the AMD kernels may take: a committed budget, checked by the tests and printed in the reference.

The file ``amd_budget.json`` holds, per kernel, arch and compiler, registers and shared memory, and for a few
kernels what a step of their loop executes, as counted by the interpreter of the tests.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "amd_budget.json"
LDS_BYTES = {"gfx942": 64 << 10, "gfx950": 160 << 10}
"""Shared memory of a compute unit."""
_REGISTERS, _GRANULE, _MOST_WAVES, _SIMDS = 512, 8, 8, 4
Row = Mapping[str, Any]


def waves_per_simd(arch: str, vgpr: int, lds: int, threads: int) -> int:
    """Return how many waves of a kernel one SIMD can hold at once.

    Args:
        arch: ``gfx942`` or ``gfx950``.
        vgpr: Vector registers of a lane, accumulation registers included.
        lds: Shared memory of a block, bytes.
        threads: Threads of a block.
    """
    by_registers = min(_MOST_WAVES, _REGISTERS // max(_GRANULE, -(-vgpr // _GRANULE) * _GRANULE))
    waves = threads // 64
    blocks = min(by_registers * _SIMDS // waves, LDS_BYTES[arch] // lds if lds else _MOST_WAVES * _SIMDS)
    return blocks * waves // _SIMDS


@lru_cache(maxsize=1)
def load() -> Mapping[str, Sequence[Row]]:
    """Return the budget: ``resources`` and ``loops``, lists of rows."""
    read: Mapping[str, Sequence[Row]] = json.loads(FILE.read_text(encoding="utf-8"))
    return read


def page() -> list[str]:
    """Return the paragraphs of the reference page."""
    budget = load()
    return [
        "What the kernels for AMD may take, by compiler (`ziglang` is LLVM 22). The tests hold every build "
        "to these numbers. Nothing here was measured on a GPU.",
        "## Registers and shared memory",
        "`waves` is how many waves one SIMD holds at once, by vector registers and shared memory.",
        _table(
            (
                "kernel",
                "arch",
                "compiler",
                "vgpr",
                "of them agpr",
                "sgpr",
                "lds bytes",
                "scratch",
                "spills",
                "waves",
            ),
            (
                [r[k] for k in ("variant", "arch", "compiler", "vgpr", "agpr", "sgpr", "lds", "scratch")]
                + [r["vgpr_spills"] + r["sgpr_spills"], r["waves"]]
                for r in budget["resources"]
            ),
        ),
        "## A step of the loop",
        "Instructions of all waves of a block for 64 more keys, counted while the compiled code was "
        "interpreted. `matrix/vector` is clocks of matrix instructions over clocks of vector instructions, "
        "`issue/memory` the clocks a SIMD issues in over the clocks that reading the keys takes at the peak "
        "rate of memory, `conflicts` the clocks of shared memory over those without bank conflicts. Clocks "
        "are those of a model: 4 for a vector instruction, 16 for a transcendental one, the peak rate for "
        "a matrix one.",
        _table(
            ("case", "arch", "compiler", *LOOP_COUNTS, "matrix/vector", "issue/memory", "conflicts"),
            (
                [r[k] for k in ("case", "arch", "compiler", *LOOP_COUNTS)]
                + [f"{r[k]:.2f}" for k in ("matrix_over_vector", "issue_over_memory", "conflicts")]
                for r in budget["loops"]
            ),
        ),
    ]


LOOP_COUNTS = ("valu", "slow", "mfma", "lds", "memory", "barrier")
PAGES = {"amd-kernels.md": ("AMD kernels", page)}
"""Reference pages of this package: file name to title and paragraphs."""


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [list(head), *([str(cell) for cell in row] for row in rows)]
    text = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([text[0], f"|{' --- |' * len(lines[0])}", *text[1:]])
