"""What a run took: instructions by class, clocks of a simple model, bank conflicts. Counts, not times."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

_SLOW = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)")
_MATRIX = re.compile(r"v_mfma_\w+?_(\d+)x(\d+)x(\d+)")
FLOP_PER_CLOCK = {"gfx942": 512, "gfx950": 1024}
"""Dense bf16 operations of one SIMD in a clock: 1307 and 2500 TFLOP/s over all of them."""
BYTES_PER_CLOCK = {"gfx942": 2.07, "gfx950": 3.26}
"""Peak memory bytes of one SIMD in a clock: 5.3 and 8 TB/s over all of them."""
_VALU, _SLOW_CLOCKS = 4, 16


def class_of(name: str) -> str:
    """Return mfma, slow (transcendental), valu, lds, memory, barrier, wait or salu."""
    if name.startswith("v_mfma"):
        return "mfma"
    if name.startswith("v_"):
        return "slow" if _SLOW.match(name) else "valu"
    if name.startswith("ds_"):
        return "lds"
    if name.startswith(("global_", "flat_", "buffer_")):
        return "memory"
    return {"s_barrier": "barrier", "s_waitcnt": "wait", "s_nop": "wait"}.get(name, "salu")


@dataclass
class Counts:
    """What the waves of a launch executed.

    Attributes:
        arch: Processor.
        names: Executed instructions by mnemonic, summed over waves.
        bank_clocks: Clocks that shared memory took by the model of banks, by mnemonic, when profiled.
        bank_ideal: The same without conflicts.
    """

    arch: str
    names: Counter[str] = field(default_factory=Counter)
    bank_clocks: Counter[str] = field(default_factory=Counter)
    bank_ideal: Counter[str] = field(default_factory=Counter)

    def __sub__(self, other: Counts) -> Counts:
        """Return what this run did more than another: the cost of the loop, when only its length differs."""
        parts = []
        for name in ("names", "bank_clocks", "bank_ideal"):
            mine = Counter(getattr(self, name))
            mine.subtract(getattr(other, name))
            parts.append(mine)
        return Counts(self.arch, *parts)

    def of(self, kind: str) -> int:
        """Return the number of instructions of a class."""
        return sum(n for name, n in self.names.items() if class_of(name) == kind)

    def matching(self, pattern: str) -> int:
        """Return the number of instructions whose mnemonic matches a pattern."""
        return sum(n for name, n in self.names.items() if re.match(pattern, name))

    @property
    def matrix_clocks(self) -> float:
        total = 0.0
        for name, n in self.names.items():
            found = _MATRIX.match(name)
            if found:
                rows, columns, depth = (int(x) for x in found.groups())
                rate = FLOP_PER_CLOCK[self.arch] * (2 if "fp8" in name else 1)
                total += n * 2 * rows * columns * depth / rate
        return total

    @property
    def vector_clocks(self) -> int:
        return self.of("valu") * _VALU + self.of("slow") * _SLOW_CLOCKS

    @property
    def issue_clocks(self) -> int:
        """Clocks of a SIMD's issue: vector work, and one slot per matrix instruction or memory access."""
        return self.vector_clocks + _VALU * (self.of("mfma") + self.of("lds") + self.of("memory"))

    def conflicts(self, pattern: str = ".*") -> float:
        """Return shared-memory clocks over those without conflicts."""
        ideal = sum(n for name, n in self.bank_ideal.items() if re.match(pattern, name))
        clocks = sum(n for name, n in self.bank_clocks.items() if re.match(pattern, name))
        return clocks / ideal if ideal else 1.0


def _groups(name: str, size: int, arch: str) -> list[np.ndarray]:
    """Return the lanes that share a clock.

    A clock serves 128 bytes. Lanes go in order, except that a 128-bit read pairs quads crosswise, as the
    vendor describes it (CK-Tile documentation, "LDS bank conflicts"); a 128-bit write takes eight in order;
    gfx950 reads 256 bytes in a clock over 64 banks, which we take to be two of those groups.
    """
    lanes = np.arange(64)
    if size == 16 and "read" in name:
        first = [[0, 1, 2, 3, 20, 21, 22, 23], [4, 5, 6, 7, 16, 17, 18, 19], [8, 9, 10, 11, 28, 29, 30, 31],
                 [12, 13, 14, 15, 24, 25, 26, 27]]  # fmt: skip
        groups = [np.array(g) + half for half in (0, 32) for g in first]
        if arch == "gfx950":
            groups = [np.concatenate(groups[i : i + 2]) for i in range(0, 8, 2)]
        return groups
    width = max(1, min(32, 128 // size))
    if arch == "gfx950" and "read" in name and size >= 8:
        width *= 2
    return [lanes[i : i + width] for i in range(0, 64, width)]


def bank_clocks(address: np.ndarray, active: np.ndarray, size: int, name: str, arch: str) -> tuple[int, int]:
    """Return the clocks of one wave's access to shared memory, with and without conflicts.

    Args:
        address: ``[64]`` byte addresses.
        active: ``[64]`` lanes that take part.
        size: Bytes of a lane.
        name: Mnemonic.
        arch: Processor.
    """
    banks = 64 if arch == "gfx950" and "read" in name else 32
    clocks = ideal = 0
    for group in _groups(name, size, arch):
        lanes = group[active[group]]
        if not len(lanes):
            continue
        words = np.unique((address[lanes][:, None] + np.arange(0, max(size, 4), 4)) // 4)
        clocks += int(np.bincount(words % banks).max())
        ideal += 1
    return clocks, ideal
