"""Instructions that move data between the lanes of a wave."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import vector
from .faults import Unknown
from .operands import Source, needs_register, source
from .text import Instruction
from .waves import ALL_BITS, LANES, Waves

Step = Callable[[Waves], None]
_LANE = np.arange(LANES)
_ROW, _IN_ROW = _LANE & ~15, _LANE & 15
_DPP = (
    "quad_perm",
    "row_shl",
    "row_shr",
    "row_ror",
    "row_mirror",
    "row_half_mirror",
    "row_bcast",
    "row_newbcast",
)


def decode(ins: Instruction, arch: str) -> Step | None:
    """Return what an instruction does, or None where this module does not know it."""
    known = {
        "v_readfirstlane_b32": _read_first,
        "v_readlane_b32": _read_lane,
        "v_writelane_b32": _write_lane,
        "v_mbcnt_lo_u32_b32": _count_below,
        "v_mbcnt_hi_u32_b32": _count_below,
        "v_permlane16_swap_b32": _swap,
        "v_permlane32_swap_b32": _swap,
        "v_swap_b32": _swap_registers,
    }.get(ins.name)
    if known is not None:
        return known(ins)
    return _dpp(ins, arch) if ins.name.endswith("_dpp") else None


def _read_first(ins: Instruction) -> Step:
    ins.only()
    target, value = needs_register(ins.operands[0], "s").index, source(ins.operands[1])

    def step(w: Waves) -> None:
        at = np.where(w.lanes.any(axis=1), w.lanes.argmax(axis=1), 0)
        _to_scalar(w, target, value, at)

    return step


def _read_lane(ins: Instruction) -> Step:
    ins.only()
    target, value = needs_register(ins.operands[0], "s").index, source(ins.operands[1])
    lane = source(ins.operands[2])

    def step(w: Waves) -> None:
        at = np.broadcast_to(np.asarray(lane.read(w)).reshape(-1), w.count).astype(np.int64) & 63
        _to_scalar(w, target, value, at)

    return step


def _to_scalar(w: Waves, target: int, value: Source, lane: np.ndarray) -> None:
    waves = np.arange(w.count)
    shape = w.active.shape
    undefined = None
    if not w.bad.isdisjoint(value.keys):
        undefined = np.broadcast_to(value.undefined(w), shape)[waves, lane]
    w.set_scalar(target, np.broadcast_to(value.read(w), shape)[waves, lane])
    if undefined is not None:
        w.set_scalar_undefined(target, undefined)


def _write_lane(ins: Instruction) -> Step:
    """Writes one lane, whatever the exec mask."""
    ins.only()
    target, value = needs_register(ins.operands[0], "v").index, source(ins.operands[1])
    lane = int(ins.operands[2], 0)

    def step(w: Waves) -> None:
        at = np.flatnonzero(w.selected)
        count = (w.count, 1)
        w.v[target][at, lane] = np.broadcast_to(value.read(w), count)[at, 0]
        w.vu[target][at, lane] = np.broadcast_to(value.undefined(w), count)[at, 0]

    return step


def _count_below(ins: Instruction) -> Step:
    """Number of mask bits below the lane, plus an operand."""
    ins.only()
    low = "_lo_" in ins.name
    mask, more = source(ins.operands[1]), source(ins.operands[2])
    below = (np.uint64(1) << _LANE.astype(np.uint64)) - np.uint64(1)
    part = (below if low else below >> np.uint64(32)).astype(np.uint32)

    def compute(w: Waves) -> np.ndarray:
        return np.bitwise_count(mask.read(w) & part).astype(np.uint32) + more.read(w)

    return vector.lanewise(needs_register(ins.operands[0], "v").index, False, [mask, more], compute)


def _swap(ins: Instruction) -> Step:
    """gfx950: odd rows (of 16 or 32 lanes) of the first register trade places with the second's even ones."""
    ins.only()
    size = 16 if "16" in ins.name else 32
    a, b = (needs_register(text, "v").index for text in ins.operands)
    odd = (_LANE // size) % 2 == 1
    partner = np.where(odd, _LANE - size, _LANE + size)

    def trade(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.where(odd, second[:, partner], first), np.where(odd, second, first[:, partner])

    def step(w: Waves) -> None:
        if not w.active[w.selected].all():
            raise Unknown(f"{ins.text} with lanes off")
        undefined = trade(w.vu[a], w.vu[b]) if {a, b} & w.bad else None
        values = trade(w.v[a], w.v[b])
        for register, value in zip((a, b), values, strict=True):
            w.set_vector(register, value)
        if undefined is not None:
            for register, bits in zip((a, b), undefined, strict=True):
                w.set_vector_undefined(register, bits)

    return step


def _swap_registers(ins: Instruction) -> Step:
    ins.only()
    a, b = (needs_register(text, "v").index for text in ins.operands)

    def step(w: Waves) -> None:
        values, undefined = (w.v[b].copy(), w.v[a].copy()), (w.vu[b].copy(), w.vu[a].copy())
        for register, value, bits in zip((a, b), values, undefined, strict=True):
            w.set_vector(register, value)
            w.set_vector_undefined(register, bits)

    return step


def _dpp(ins: Instruction, arch: str) -> Step:
    """Any lanewise instruction whose first operand comes from other lanes."""
    kinds = [name for name in _DPP if name in ins.options]
    if len(kinds) != 1:
        raise Unknown(ins.text)
    rest = {
        k: v for k, v in ins.options.items() if k not in (kinds[0], "row_mask", "bank_mask", "bound_ctrl")
    }
    if rest:
        raise Unknown(f"options {rest} of {ins.text}")
    lane, exists = _moved(kinds[0], ins.options[kinds[0]])
    written = _masked(ins)
    zeros = "bound_ctrl" in ins.options
    operand = needs_register(ins.operands[1], "v")
    i, moved = operand.index, _Moved(operand.index, lane, exists)
    base = Instruction(ins.name.removesuffix("_dpp"), ins.operands, {}, ins.text)
    step = vector.decode(base, arch)
    if step is None:
        raise Unknown(ins.text)

    def run(w: Waves) -> None:
        valid = exists & w.lanes[:, lane]
        values, undefined, was_bad = w.v[i], w.vu[i], i in w.bad
        saved = w.active, w.full
        w.v[i], w.vu[i] = moved.of(values, valid), moved.of(undefined, valid)
        w.active = w.active & written & (valid | zeros)
        w.full = False
        try:
            step(w)
        finally:
            made, made_undefined = w.v[i], w.vu[i]
            w.v[i], w.vu[i] = values, undefined
            if target == i:  # the result overwrites the register that was moved
                np.copyto(values, made, where=w.active)
                np.copyto(undefined, made_undefined, where=w.active)
                if undefined[w.live].any():
                    w.bad.add(i)
            elif was_bad:
                w.bad.add(i)
            w.active, w.full = saved

    target = needs_register(ins.operands[0], "v").index
    return run


class _Moved:
    def __init__(self, index: int, lane: np.ndarray, exists: np.ndarray) -> None:
        self._lane = lane

    def of(self, values: np.ndarray, valid: np.ndarray) -> np.ndarray:
        return np.where(valid, values[:, self._lane], np.uint32(0))


def _masked(ins: Instruction) -> np.ndarray:
    """Lanes whose row and bank are written."""
    rows, banks = ins.number("row_mask", 15), ins.number("bank_mask", 15)
    return ((rows >> (_LANE >> 4)) & (banks >> (_LANE >> 2 & 3)) & 1).astype(bool)


def _moved(kind: str, value: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the lane that each lane reads, and whether there is one."""
    every = np.ones(LANES, bool)
    if kind == "quad_perm":
        quad = np.array([int(x) for x in value.strip("[]").split(",")])
        return (_LANE & ~3) + quad[_LANE & 3], every
    if kind == "row_mirror":
        return _ROW + 15 - _IN_ROW, every
    if kind == "row_half_mirror":
        return (_LANE & ~7) + 7 - (_LANE & 7), every
    n = int(value)
    if kind == "row_ror":
        return _ROW + ((_IN_ROW - n) & 15), every
    if kind == "row_newbcast":
        return _ROW + n, every
    if kind == "row_bcast":
        lane = _ROW - 1 if n == 15 else np.full(LANES, 31)
        exists = (_LANE >= 16) if n == 15 else (_LANE >= 32)
        return np.where(exists, lane, 0), exists
    at = _IN_ROW + (n if kind == "row_shl" else -n)
    exists = (at >= 0) & (at < 16)
    return np.where(exists, _ROW + at, 0), exists


def permuted(ins: Instruction) -> Step:
    """ds_bpermute_b32: each lane reads the lane that its address names; a lane that is off gives 0."""
    ins.only("offset")
    offset = np.uint32(ins.number("offset"))
    target = needs_register(ins.operands[0], "v").index
    address, value = source(ins.operands[1]), source(ins.operands[2])

    def lane(w: Waves) -> np.ndarray:
        at = (np.asarray(address.read(w)) + offset) >> np.uint32(2) & np.uint32(63)
        return np.broadcast_to(at, w.active.shape).astype(np.int64)

    def gather(w: Waves, bits: np.ndarray) -> np.ndarray:
        return np.take_along_axis(np.where(w.active, bits, np.uint32(0)), lane(w), axis=1)

    def undefined(w: Waves) -> np.ndarray:
        return gather(w, value.undefined(w)) | np.where(
            np.asarray(address.undefined(w)) != 0, ALL_BITS, np.uint32(0)
        )

    moved = Source(lambda w: gather(w, value.read(w)), undefined, (*address.keys, *value.keys))
    return vector.lanewise(target, False, [moved], moved.read, lambda v, u: u[0])
