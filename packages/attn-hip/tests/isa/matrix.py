"""Matrix instructions: v_mfma_f32_{16x16xK,32x32xK} on bfloat16, half and fp8."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from . import fp8
from .faults import Unknown
from .numbers import bf16_float
from .operands import constant, needs_register
from .text import Instruction
from .waves import LANES, Waves

_NAME = re.compile(r"v_mfma_f32_(16x16|32x32)x(\d+)_?(bf16_1k|bf16|f16|fp8_fp8)$")


def decode(ins: Instruction, arch: str) -> Callable[[Waves], None] | None:
    """Return what an instruction does, or None where this module does not know it.

    Lane l holds row (of a) or column (of b) ``l % size`` and the steps ``(l // size) * per .. + per`` of k.
    It gets column ``l % size`` of the result, rows ``4 * (l // size)`` and so on, as the manuals lay it down.
    The exec mask does not count.
    """
    found = _NAME.match(ins.name)
    if found is None:
        return None
    ins.only()
    size, depth = int(found[1][:2]), int(found[2])
    groups = LANES // size
    out, a, b = (needs_register(text, "v") for text in ins.operands[:3])
    per = depth // groups
    width = 1 if found[3].startswith("fp8") else 2
    if a.count != b.count or a.count * 4 != per * width or out.count * LANES != size * size:
        raise Unknown(f"operands of {ins.text}")
    unpack = _unpacker(found[3], fp8.is_fnuz(arch))
    start = constant(ins.operands[3], "f")
    addend = None if start is not None else needs_register(ins.operands[3], "v")
    keys = (*out.keys(), *a.keys(), *b.keys(), *(addend.keys() if addend else ()))
    read = (*a.keys(), *b.keys(), *(addend.keys() if addend else ()))

    def operand(w: Waves, first: int, count: int) -> np.ndarray:
        """[waves, size, depth]"""
        raw = np.ascontiguousarray(w.vectors[first : first + count].transpose(1, 2, 0))
        x = unpack(raw)
        return x.reshape(w.count, groups, size, per).transpose(0, 2, 1, 3).reshape(w.count, size, depth)

    def step(w: Waves) -> None:
        bad = None
        if not w.bad.isdisjoint(keys):
            bad = np.zeros(w.count, bool)
            for i in read:
                bad |= (w.vu[i] != 0).any(axis=1)
        product = operand(w, a.index, a.count) @ operand(w, b.index, b.count).transpose(0, 2, 1)
        made = _spread(product, size, groups)
        if addend is None:
            assert start is not None
            made = made + start.view(np.float32)
        else:
            made = made + w.vectors[addend.index : addend.index + addend.count].view(np.float32)
        bits = made.astype(np.float32).view(np.uint32)
        np.copyto(w.vectors[out.index : out.index + out.count], bits, where=w.selected[None, :, None])
        if bad is not None:
            _mark(w, out.keys(), bad)

    return step


def _mark(w: Waves, registers: tuple[int, ...], bad: np.ndarray) -> None:
    bits = np.where(bad, np.uint32(0xFFFFFFFF), np.uint32(0))[:, None]
    for i in registers:
        np.copyto(w.vu[i], bits, where=w.selected[:, None])
        if w.vu[i][w.live].any():
            w.bad.add(i)
        else:
            w.bad.discard(i)


def _spread(product: np.ndarray, size: int, groups: int) -> np.ndarray:
    """From [waves, row, column] to [register, wave, lane]."""
    count = product.shape[0]
    if size == 16:
        return product.reshape(count, groups, 4, size).transpose(2, 0, 1, 3).reshape(4, count, LANES)
    parts = product.reshape(count, 4, groups, 4, size).transpose(1, 3, 0, 2, 4)
    return parts.reshape(16, count, LANES)


def _unpacker(kind: str, fnuz: bool) -> Callable[[np.ndarray], np.ndarray]:
    if kind.startswith("bf16"):
        return lambda raw: bf16_float(raw.view(np.uint16))
    if kind == "f16":
        return lambda raw: raw.view(np.float16).astype(np.float32)
    return lambda raw: fp8.decode(raw.view(np.uint8), fnuz)
