"""What the AMD kernels may take: a committed budget, checked by the tests and printed in the reference.

The file ``amd_budget.json`` holds, per kernel, arch and compiler, registers and shared memory, and for a few
kernels what a step of their loop executes, as counted by the interpreter of the tests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Gate:
    """A goal for all rows of a kind.

    Attributes:
        what: For the table.
        rows: ``resources`` or ``loops``.
        match: Pattern of the kernels or cases that it is about.
        value: Figure of a row.
        goal: What the figure should reach.
        at_least: Whether more is better.
    """

    what: str
    rows: str
    match: str
    value: Callable[[Row], float]
    goal: float
    at_least: bool

    def worst(self, arch: str) -> tuple[float, str]:
        """Return the worst figure of an arch by any compiler, and whose it is."""
        name = "variant" if self.rows == "resources" else "case"
        rows = [r for r in load()[self.rows] if r["arch"] == arch and re.fullmatch(self.match, r[name])]
        worst = (min if self.at_least else max)(rows, key=self.value)
        return self.value(worst), worst[name]

    def met(self, figure: float) -> bool:
        """Say whether a figure reaches the goal."""
        return figure >= self.goal if self.at_least else figure <= self.goal


def _key(name: str) -> Callable[[Row], float]:
    return lambda row: float(row[name])


_PLAIN, _FP8 = "attend_.*_(same|fp8)", ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")
_RATIO, _ISSUE = _key("matrix_over_vector"), _key("issue_over_memory")
GATES = (
    Gate("registers spilled, bytes of scratch", "resources", ".*",
         lambda row: row["vgpr_spills"] + row["sgpr_spills"] + row["scratch"], 0, False),
    Gate("waves, prefill", "resources", "attend_.*_64", _key("waves"), 2, True),
    Gate("waves, decode up to head_dim 128", "resources", f"{_PLAIN}_(64|128)_16", _key("waves"), 4, True),
    Gate("waves, decode of head_dim 256", "resources", f"{_PLAIN}_256_16", _key("waves"), 2, True),
    Gate("waves, decode with every feature", "resources", "attend_.*_any_.*_16", _key("waves"), 2, True),
    *(Gate(f"matrix/vector, prefill of head_dim {dim}", "loops", f"prefill {dim}", _RATIO, 0.8, True)
      for dim in (64, 128, 256)),
    *(Gate(f"matrix/vector, prefill of an {fp8} cache", "loops", f"prefill 128 {fp8}", _RATIO, 0.8, True)
      for fp8 in _FP8),
    Gate("issue/memory, decode of groups 4, 8 and 16", "loops", "decode 128, group.*", _ISSUE, 0.25, False),
    Gate("issue/memory, decode of head_dim 64", "loops", "decode 64.*", _ISSUE, 0.25, False),
    *(Gate(f"issue/memory, decode of an {fp8} cache", "loops", f"decode 128 {fp8},.*", _ISSUE, 0.25, False)
      for fp8 in _FP8),
    Gate("K and V by 128-bit loads, each once", "loops", ".*", _key("wide_loads"), 1, True),
    Gate("conflicts", "loops", ".*", _key("conflicts"), 1.1, False),
    Gate("exponentials per score", "loops", ".*", _key("exp_per_score"), 1, False),
)  # fmt: skip
"""What the kernels should reach; the reference says where they are."""


def _gate_row(gate: Gate) -> list[object]:
    cells: list[object] = [gate.what, f"{'>=' if gate.at_least else '<='} {gate.goal:g}"]
    for arch in LDS_BYTES:
        figure, whose = gate.worst(arch)
        cells.append(f"{figure:.3g}" if gate.met(figure) else f"**{figure:.3g}** ({whose})")
    return cells


LOOP_COUNTS = ("valu", "slow", "mfma", "lds", "memory", "barrier")
Part = str | Sequence[Sequence[object]]
"""A paragraph, or a table: its head and its rows."""


def page() -> list[Part]:
    """Return the paragraphs and tables of the reference page."""
    return [
        "What the kernels for AMD may take, by compiler (`ziglang` is LLVM 22). The tests hold every build "
        "to these numbers. Nothing here was measured on a GPU.",
        "## Goals",
        "The worst figure of any kernel by any compiler; one that misses its goal is bold. What the figures "
        "are stands with the tables below. An exponential takes the time of four vector instructions, "
        "so at head dim 64 gfx950, whose products are twice as fast, cannot reach 0.8: 0.67 with nothing "
        "but the softmax. Widening fp8 takes an instruction for every pair of elements at the least, against "
        "memory that brings twice as many.",
        [("figure", "goal", *LDS_BYTES), *map(_gate_row, GATES)],
        "## Registers and shared memory",
        "No kernel spills registers or takes scratch memory. `vgpr` counts the accumulation registers too, "
        "`agpr`; `lds` is bytes of a block; `waves` is how many one SIMD holds at once, by vector registers "
        "and shared memory.",
        *_by_build("resources", ("variant", "vgpr", "agpr", "sgpr", "lds", "waves"), "kernel"),
        "## A step of the loop",
        "Instructions of all waves of a block for 64 more keys, counted while the compiled code was "
        "interpreted. `matrix/vector` is clocks of matrix instructions over clocks of vector instructions, "
        "`issue/memory` the clocks a SIMD issues in over the clocks that reading the keys takes at the peak "
        "rate of memory; the goals' `conflicts` are the clocks of shared memory over those without bank "
        "conflicts. Clocks are those of a model: 4 for a vector instruction, 16 for a transcendental one, "
        "the peak rate for a matrix one.",
        *_by_build("loops", ("case", *LOOP_COUNTS, "matrix_over_vector", "issue_over_memory"), "case"),
    ]


def _by_build(rows: str, columns: Sequence[str], first: str) -> Iterator[Part]:
    """A heading and a table for each arch and compiler."""
    builds = dict.fromkeys((row["arch"], row["compiler"]) for row in load()[rows])
    for build in builds:
        yield f"### {rows.capitalize()}: {', '.join(build)}"
        mine = (row for row in load()[rows] if (row["arch"], row["compiler"]) == build)
        head = (first, *(name.replace("_over_", "/") for name in columns[1:]))
        yield [head, *([_figure(row[name]) for name in columns] for row in mine)]


def _figure(value: object) -> object:
    return f"{value:.2f}" if isinstance(value, float) else value


PAGES = {"amd-kernels.md": ("AMD kernels", page)}
"""Reference pages of this package: file name to title and what is on them."""
