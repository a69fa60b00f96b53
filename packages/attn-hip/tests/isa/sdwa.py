"""Sub-dword addressing: parts of operands and results."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .faults import Unknown
from .operands import Source, source
from .text import Instruction
from .waves import Waves

_PARTS = {
    "BYTE_0": (0, 8),
    "BYTE_1": (8, 8),
    "BYTE_2": (16, 8),
    "BYTE_3": (24, 8),
    "WORD_0": (0, 16),
    "WORD_1": (16, 16),
}


def selected(text: str, type_: str, part: str) -> Source:
    """Return a source that reads a part of a register, zero or sign extended."""
    if part == "DWORD":
        return source(text, type_)
    extend = text.startswith("sext(")
    plain = source(text.removeprefix("sext(").removesuffix(")"), "u")
    shift, width = _PARTS[part]
    if type_ in "UIF" or (type_ == "f" and width):
        raise Unknown(f"part {part} of {text} as a number of type {type_}")
    return plain.mapped(lambda x: _cut(x, shift, width, extend))


def _cut(x: np.ndarray, shift: int, width: int, extend: bool) -> np.ndarray:
    up = np.uint32(32 - width)
    moved = (x >> np.uint32(shift)) << up
    if extend:
        return (moved.view(np.int32) >> up.view(np.int32)).view(np.uint32)
    return moved >> up


def stored(
    ins: Instruction, target: int, compute: Callable[[Waves], np.ndarray], sources: list[Source]
) -> tuple[Callable[[Waves], np.ndarray], list[Source]]:
    """Return the computation with its result put where ``dst_sel`` says, and what it now reads."""
    part, rest = ins.options.get("dst_sel", "DWORD"), ins.options.get("dst_unused", "UNUSED_PAD")
    if part == "DWORD":
        return compute, sources
    shift, width = (np.uint32(x) for x in _PARTS[part])
    mask = np.uint32((1 << int(width)) - 1)
    if rest == "UNUSED_PAD":
        return lambda w: (compute(w) & mask) << shift, sources
    if rest == "UNUSED_PRESERVE":
        keep = np.uint32(~(int(mask) << int(shift)) & 0xFFFFFFFF)
        old = Source(lambda w: w.v[target], lambda w: w.vu[target] & keep, (target,))
        return lambda w: (w.v[target] & keep) | ((compute(w) & mask) << shift), [*sources, old]
    raise Unknown(f"{rest} of {ins.text}")
