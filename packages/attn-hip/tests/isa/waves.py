"""The state of a set of waves that run together: registers, masks, and which bits were ever written.

Every array has a place for each wave, so one numpy call serves all waves that stand at the same instruction.
"""

from __future__ import annotations

import numpy as np

from .faults import Undefined

LANES = 64
VECTORS, ACCUMULATORS = 256, 256
SCALARS = 130
VCC, M0, EXEC, SCC = 106, 124, 126, 128
SCALAR_KEY = 1000
"""Added to a scalar register's number where vector and scalar registers share a set."""
GARBAGE = 0x7FC0DEAD  # a NaN as a float, far out of bounds as an offset
ALL_BITS = np.uint32(0xFFFFFFFF)


def unpack(mask: np.ndarray) -> np.ndarray:
    """Turn ``[waves]`` 64-bit masks into ``[waves, 64]`` bools."""
    bytes_ = np.ascontiguousarray(mask).view(np.uint8).reshape(-1, 8)
    return np.unpackbits(bytes_, axis=1, bitorder="little").view(bool)


def pack(bits: np.ndarray) -> np.ndarray:
    """Turn ``[waves, 64]`` bools into ``[waves]`` 64-bit masks."""
    return np.packbits(bits, axis=1, bitorder="little").view(np.uint64)[:, 0]


class Waves:
    """Registers of ``count`` waves.

    Attributes:
        v: Views of the vector registers, then of the accumulators: ``[count, 64]`` uint32 each.
        vu: Their undefined bits.
        s: Views of the scalar registers, ``[count]`` uint32; 128 holds scc.
        s64: Views of pairs of them.
        su: Undefined bits of the scalar registers, ``[count, SCALARS]``.
        bad: Registers with an undefined bit anywhere: numbers of vector ones, ``SCALAR_KEY`` + scalar ones.
        lanes: Lanes of each wave that the exec mask has on.
        selected: Waves that stand at the present instruction.
        live: Waves that have not ended.
        active: ``lanes`` of the selected waves.
        full: Whether all lanes of all live waves are active.
        whole: Whether all live waves are selected.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        registers = VECTORS + ACCUMULATORS
        self.vectors = np.full((registers, count, LANES), GARBAGE, np.uint32)
        self.vector_undefined = np.full((registers, count, LANES), ALL_BITS)
        self.scalars = np.full((count, SCALARS), GARBAGE, np.uint32)
        self.su = np.full((count, SCALARS), ALL_BITS)
        self.v = list(self.vectors)
        self.vu = list(self.vector_undefined)
        self.s = [self.scalars[:, i] for i in range(SCALARS)]
        self.s64 = [self.scalars[:, i : i + 2].view(np.uint64)[:, 0] for i in range(0, SCALARS, 2)]
        self.column = [self.scalars[:, i : i + 1] for i in range(SCALARS)]
        self.bad = set(range(registers)) | set(range(SCALAR_KEY, SCALAR_KEY + SCALARS))
        self.live = np.ones(count, bool)
        self.selected = np.ones(count, bool)
        self.set_scalar(EXEC, np.uint32(ALL_BITS))
        self.set_scalar(EXEC + 1, np.uint32(ALL_BITS))
        self.exec_changed()

    def select(self, selected: np.ndarray) -> None:
        """Let the next instructions work on these waves only."""
        self.selected = selected
        self._refresh()

    def _refresh(self) -> None:
        self.active = self.lanes & self.selected[:, None]
        self.whole = bool((self.selected >= self.live).all())
        self.full = self.whole and bool((self.active | ~self.live[:, None]).all())

    def exec_changed(self) -> None:
        """Follow a write to the exec mask.

        Raises:
            Undefined: The mask depends on something never written.
        """
        if not self.bad.isdisjoint((SCALAR_KEY + EXEC, SCALAR_KEY + EXEC + 1)):
            self.require_scalar(EXEC, 2, "the exec mask")
        self.lanes = unpack(self.s64[EXEC // 2])
        self._refresh()

    def set_vector(self, index: int, value: np.ndarray) -> None:
        """Write a vector register in the active lanes."""
        if self.full:
            self.v[index][...] = value
        else:
            np.copyto(self.v[index], value, where=self.active)

    def set_vector_undefined(self, index: int, bits: np.ndarray | int) -> None:
        """Say which bits of the active lanes of a vector register are undefined now."""
        if self.full and isinstance(bits, int) and bits == 0:
            self.vu[index][...] = 0
            self.bad.discard(index)
            return
        np.copyto(self.vu[index], np.asarray(bits, np.uint32), where=self.active)
        # Lanes of waves that have ended count no more.
        if self.vu[index][self.live].any():
            self.bad.add(index)
        else:
            self.bad.discard(index)

    def set_scalar(self, index: int, value: np.ndarray) -> None:
        """Write a scalar register, defined, of the selected waves."""
        np.copyto(self.s[index], value, where=self.selected)
        if SCALAR_KEY + index in self.bad:
            self.set_scalar_undefined(index, 0)

    def set_scalar64(self, index: int, value: np.ndarray) -> None:
        """Write a pair of scalar registers, defined, of the selected waves."""
        np.copyto(self.s64[index // 2], value, where=self.selected)
        for i in (index, index + 1):
            if SCALAR_KEY + i in self.bad:
                self.set_scalar_undefined(i, 0)

    def set_scalar_undefined(self, index: int, bits: np.ndarray | int) -> None:
        """Say which bits of a scalar register of the selected waves are undefined now."""
        np.copyto(self.su[:, index], np.asarray(bits, np.uint32), where=self.selected)
        if self.su[self.live, index].any():
            self.bad.add(SCALAR_KEY + index)
        else:
            self.bad.discard(SCALAR_KEY + index)

    def require_vector(self, index: int, count: int, what: str) -> None:
        """Check that the active lanes of registers are defined.

        Raises:
            Undefined: One is not.
        """
        for i in range(index, index + count):
            if i in self.bad and self.vu[i][self.active].any():
                name = f"v{i}" if i < VECTORS else f"a{i - VECTORS}"
                raise Undefined(f"{what} depends on {name}, which was never written")

    def require_scalar(self, index: int, count: int, what: str) -> None:
        """Check that scalar registers of the selected waves are defined.

        Raises:
            Undefined: One is not.
        """
        for i in range(index, index + count):
            if SCALAR_KEY + i in self.bad and self.su[self.selected, i].any():
                name = {SCC: "scc", VCC: "vcc", EXEC: "exec"}.get(i, f"s{i}")
                raise Undefined(f"{what} depends on {name}, which was never written")

    def require_vector_bits(self, index: int, count: int, mask: int, what: str) -> None:
        """Check that some bits of the active lanes of registers are defined.

        Raises:
            Undefined: One is not.
        """
        for i in range(index, index + count):
            if i in self.bad and (self.vu[i][self.active] & np.uint32(mask)).any():
                self.require_vector(i, 1, what)
