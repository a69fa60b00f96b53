"""Vector instructions on pairs: packed floats, conversions from and to fp8; and v_bitop3."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from . import fp8
from .faults import Unknown
from .numbers import TABLE, bit_op3
from .operands import Source, needs_register, poison, source, view
from .text import Instruction
from .vector import computation, lanewise
from .waves import Waves

Step = Callable[[Waves], None]
_EIGHT = re.compile(r"_(fp8|bf8)(_|$)")


def decode(ins: Instruction, arch: str) -> Step | None:
    """Return what an instruction does, or None where this module does not know it."""
    return _fp8(ins, arch) if _EIGHT.search(ins.name) else _packed(ins)


def _mixed(ins: Instruction) -> Step:
    """v_fma_mix: each operand is a float, or one half of a register; the result a float or one half."""
    ins.only("op_sel", "op_sel_hi")
    halved, which = ins.bits("op_sel_hi", 0, 3), ins.bits("op_sel", 0, 3)
    target = needs_register(ins.operands[0], "v").index
    sources = [source(text, "u" if halved[n] else "f") for n, text in enumerate(ins.operands[1:])]
    if any(halved[n] and not s.keys for n, s in enumerate(sources)):
        raise Unknown(ins.text)

    def reader(n: int) -> Callable[[Waves], np.ndarray]:
        read, shift = sources[n].read, np.uint32(16 * which[n])
        if not halved[n]:
            return view(read, "f")
        return lambda w: (read(w) >> shift).astype(np.uint16).view(np.float16).astype(np.float32)

    a, b, c = (reader(n) for n in range(3))
    if ins.name == "v_fma_mix_f32":
        return lanewise(target, False, sources, lambda w: _fma(a(w), b(w), c(w)).view(np.uint32))
    shift = np.uint32(16 if "mixhi" in ins.name else 0)
    keep = np.uint32(0xFFFF if shift else 0xFFFF0000)
    fresh = np.uint32(~keep & 0xFFFFFFFF)
    old = Source(lambda w: w.v[target], lambda w: w.vu[target] & keep, (target,))

    def compute(w: Waves) -> np.ndarray:
        half = _fma(a(w), b(w), c(w)).astype(np.float16).view(np.uint16).astype(np.uint32)
        return (w.v[target] & keep) | (half << shift)

    return lanewise(
        target, False, [*sources, old], compute,
        lambda v, u: (poison([np.asarray(x) for x in u[:3]]) & fresh) | u[3],
    )  # fmt: skip


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return np.asarray(a.astype(np.float64) * b + c).astype(np.float32)


def _packed(ins: Instruction) -> Step | None:
    if ins.name.startswith("v_fma_mix"):
        return _mixed(ins)
    if ins.name == "v_bitop3_b32":
        ins.only("bitop3")
        table = ins.number("bitop3")
        sources = [source(ins.operands[n]) for n in (1, 2, 3)]
        a, b, c = (s.read for s in sources)
        return lanewise(
            needs_register(ins.operands[0], "v").index, False, sources,
            lambda w: bit_op3(np.asarray(a(w)), np.asarray(b(w)), np.asarray(c(w)), table),
        )  # fmt: skip
    if ins.name == "v_pk_ashrrev_i16":
        return _packed_shift(ins)
    if ins.name in _HALVES:
        return _packed_halves(ins, _HALVES[ins.name], ins.name.endswith("u16"))
    name = {
        "v_pk_mul_f32": "mul_f32",
        "v_pk_add_f32": "add_f32",
        "v_pk_fma_f32": "fma_f32",
        "v_pk_mov_b32": "or_b32",
    }.get(ins.name)
    if name is None:
        return None
    return _packed_pair(ins, *TABLE[name])


def _packed_pair(ins: Instruction, signature: str, function: Callable[..., np.ndarray]) -> Step:
    ins.only("op_sel", "op_sel_hi", "neg_lo", "neg_hi")
    count = len(signature) - 1
    move = ins.name == "v_pk_mov_b32"  # the low result is operand 0's chosen half, the high one operand 1's
    # A pair: element h of operand n is register index + chosen half.
    low = ins.bits("op_sel", 0, count)
    high = ins.bits("op_sel_hi", 1, count)
    target = needs_register(ins.operands[0], "v").index
    halves = []
    for which, sign in ((low, "neg_lo"), (high, "neg_hi")):
        negated = ins.bits(sign, 0, count)
        halves.append([_half(ins.operands[n + 1], which[n], bool(negated[n])) for n in range(count)])
    if move:
        halves = [[_half(ins.operands[1], low[0], False)], [_half(ins.operands[2], low[1], False)]]
        signature, function = TABLE["mov_b32"]
    reads = [[view(s.read, t) for s, t in zip(half, signature[1:], strict=False)] for half in halves]
    made = [computation(function, r, signature[0], None) for r in reads]
    keys = tuple({target, target + 1, *(k for half in halves for s in half for k in s.keys)})

    def step(w: Waves) -> None:
        clean = w.bad.isdisjoint(keys)
        undefined = None if clean else [poison([np.asarray(s.undefined(w)) for s in half]) for half in halves]
        values = [np.array(m(w)) for m in made]  # both halves are read before one is written
        for i in (0, 1):
            w.set_vector(target + i, values[i])
            if undefined is not None:
                w.set_vector_undefined(target + i, undefined[i])

    return step


def _packed_shift(ins: Instruction) -> Step:
    """Both halves of a register by one number of bits, written as a constant."""
    ins.only("op_sel_hi")
    by, at = ins.operands[1], source(ins.operands[2])
    if not by.isdecimal() or ins.bits("op_sel_hi", 1, 2) != (0, 1):
        raise Unknown(ins.text)
    bits = int(by) & 15

    def low(w: Waves) -> np.ndarray:
        return np.asarray((at.read(w) << np.uint32(16)).view(np.int32) >> np.int32(16 + bits))

    def made(w: Waves) -> np.ndarray:
        high = np.asarray(at.read(w)).view(np.int32) >> np.int32(bits)
        return (low(w).view(np.uint32) & np.uint32(0xFFFF)) | (high.view(np.uint32) & np.uint32(0xFFFF0000))

    return lanewise(needs_register(ins.operands[0], "v").index, False, [at], made)


def _packed_halves(ins: Instruction, function: Callable[..., np.ndarray], whole: bool) -> Step:
    """Two results of 16 bits, floats or ``whole`` numbers, each from a chosen half of every operand."""
    ins.only("op_sel", "op_sel_hi", *(() if whole else ("neg_lo", "neg_hi")))
    count = len(ins.operands) - 1
    made = []
    kind = np.uint16 if whole else np.float16
    sources = [source(text, "u" if whole or text.startswith("0x") else "h") for text in ins.operands[1:]]
    for option, default, sign in (("op_sel", 0, "neg_lo"), ("op_sel_hi", 1, "neg_hi")):
        which, negated = ins.bits(option, default, count), ins.bits(sign, 0, count)
        for n, text in enumerate(ins.operands[1:]):
            if which[n] and not sources[n].keys and not text.startswith("0x") and _in_doubt(text):
                raise Unknown(f"upper half of {text}")
        made.append(_halves_of(sources, which, negated, kind))

    def compute(w: Waves) -> np.ndarray:
        low, high = (
            np.asarray(function(*(read(w) for read in reads))).astype(kind).view(np.uint16).astype(np.uint32)
            for reads in made
        )
        return low | (high << np.uint32(16))

    return lanewise(needs_register(ins.operands[0], "v").index, False, sources, compute)


def _halves_of(
    sources: list[Source], which: tuple[int, ...], negated: tuple[int, ...], kind: type[np.generic]
) -> list[Callable[[Waves], np.ndarray]]:
    def one(read: Callable[[Waves], np.ndarray], half: int, negate: int) -> Callable[[Waves], np.ndarray]:
        shift, sign = np.uint32(16 * half), np.uint16(0x8000 * negate)
        return lambda w: ((read(w) >> shift).astype(np.uint16) ^ sign).view(kind)

    return [one(s.read, which[n], negated[n]) for n, s in enumerate(sources)]


def _fma16(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return a.astype(np.float64) * b + c


_HALVES: dict[str, Callable[..., np.ndarray]] = {
    "v_pk_mul_f16": np.multiply, "v_pk_add_f16": np.add, "v_pk_fma_f16": _fma16, "v_pk_max_f16": np.fmax,
    "v_pk_min_f16": np.fmin, "v_pk_max_u16": np.maximum,
}  # fmt: skip


def _half(text: str, half: int, negated: bool) -> Source:
    sign = "-" if negated else ""
    if text.startswith(("v[", "s[", "a[")):
        found = re.match(r"([vsa])\[(\d+):", text)
        assert found is not None
        return source(f"{sign}{found[1]}{int(found[2]) + half}", "f")
    if text == "vcc":
        return source(f"{sign}{('vcc_lo', 'vcc_hi')[half]}", "f")
    if half and _in_doubt(text):
        raise Unknown(f"upper half of {text}")
    return source(sign + text, "f")


def _in_doubt(text: str) -> bool:
    """Say whether the upper half of a packed constant would be in doubt: only that of 0 is not."""
    return text not in ("0", "0.0")


def _fp8(ins: Instruction, arch: str) -> Step:
    """Conversions of fp8, which is e4m3, and of bf8, which is e5m2."""
    fnuz, e5m2 = fp8.is_fnuz(arch), "bf8" in ins.name
    name = ins.name.removesuffix("_sdwa").replace("bf8", "fp8")
    ins.only("src0_sel", "op_sel")
    target = needs_register(ins.operands[0], "v").index

    def value(codes: np.ndarray) -> np.ndarray:
        return fp8.decode(codes & np.uint32(255), fnuz, e5m2)

    if name == "v_cvt_f32_fp8":
        byte = {"BYTE_0": 0, "BYTE_1": 1, "BYTE_2": 2, "BYTE_3": 3}[ins.options.get("src0_sel", "BYTE_0")]
        at = source(ins.operands[1])
        shift = np.uint32(8 * byte)
        part = at.mapped(lambda x: (x >> shift) & np.uint32(255))
        return lanewise(target, False, [part], lambda w: value(part.read(w)).view(np.uint32))
    if name == "v_cvt_pk_f32_fp8":
        word = {"WORD_0": 0, "WORD_1": 16}[ins.options.get("src0_sel", "WORD_0")]
        if ins.options.get("op_sel", "[0,0]") not in ("[0,0]",):
            word = 16 * ins.bits("op_sel", 0, 1)[0]
        at = source(ins.operands[1])

        def pair(w: Waves) -> np.ndarray:
            x = at.read(w)
            low, high = (value(x >> np.uint32(word + s)).view(np.uint32).astype(np.uint64) for s in (0, 8))
            return low | (high << np.uint64(32))

        return lanewise(target, True, [at], pair)
    if name == "v_cvt_pk_fp8_f32" and not e5m2:
        return _to_fp8(ins, target, fnuz)
    if name in _TO_HALVES and ins.operands[2:] == ("1.0",):  # the scale
        return _to_halves(ins, target, value, _TO_HALVES[name])
    raise Unknown(ins.text)


_TO_HALVES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "v_cvt_scalef32_pk_f16_fp8": lambda x: x.astype(np.float16).view(np.uint16).astype(np.uint32),
    "v_cvt_scalef32_pk_bf16_fp8": lambda x: x.view(np.uint32) >> np.uint32(16),
}
"""gfx950: two codes of one half of a word to two 16-bit values, all of which are exact."""


def _to_halves(
    ins: Instruction, target: int, value: Callable[[np.ndarray], np.ndarray],
    bits: Callable[[np.ndarray], np.ndarray],
) -> Step:  # fmt: skip
    first = 16 * ins.bits("op_sel", 0, 3)[0] if "op_sel" in ins.options else 0
    at = source(ins.operands[1])

    def made(w: Waves) -> np.ndarray:
        low, high = (bits(value(at.read(w) >> np.uint32(first + s))) for s in (0, 8))
        return low | (high << np.uint32(16))

    return lanewise(target, False, [at], made)


def _to_fp8(ins: Instruction, target: int, fnuz: bool) -> Step:
    """Two floats to one half of the target; the other half stays."""
    upper = ins.bits("op_sel", 0, 3)[2] if "op_sel" in ins.options else 0
    sources = [source(ins.operands[n], "f") for n in (1, 2)]
    a, b = (view(s.read, "f") for s in sources)
    shift, keep = np.uint32(16 * upper), np.uint32(0x0000FFFF if upper else 0xFFFF0000)

    def made(w: Waves) -> np.ndarray:
        pair = fp8.encode(a(w), fnuz) | (fp8.encode(b(w), fnuz) << np.uint32(8))
        return (w.v[target] & keep) | (pair << shift)

    old = Source(lambda w: w.v[target], lambda w: w.vu[target] & keep, (target,))
    fresh = np.uint32(~keep & 0xFFFFFFFF)
    return lanewise(
        target, False, [*sources, old], made,
        lambda v, u: (poison([np.asarray(u[0]), np.asarray(u[1])]) & fresh) | u[2],
    )  # fmt: skip
