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


def decode(ins: Instruction, arch: str) -> Step | None:
    """Return what an instruction does, or None where this module does not know it."""
    return _fp8(ins, arch) if "fp8" in ins.name else _packed(ins)


def _packed(ins: Instruction) -> Step | None:
    if ins.name == "v_bitop3_b32":
        ins.only("bitop3")
        table = ins.number("bitop3")
        sources = [source(ins.operands[n]) for n in (1, 2, 3)]
        a, b, c = (s.read for s in sources)
        return lanewise(
            needs_register(ins.operands[0], "v").index, False, sources,
            lambda w: bit_op3(np.asarray(a(w)), np.asarray(b(w)), np.asarray(c(w)), table),
        )  # fmt: skip
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
    fnuz = fp8.is_fnuz(arch)
    name = ins.name.removesuffix("_sdwa")
    ins.only("src0_sel", "op_sel")
    target = needs_register(ins.operands[0], "v").index
    if name == "v_cvt_f32_fp8":
        byte = {"BYTE_0": 0, "BYTE_1": 1, "BYTE_2": 2, "BYTE_3": 3}[ins.options.get("src0_sel", "BYTE_0")]
        at = source(ins.operands[1])
        shift = np.uint32(8 * byte)
        part = at.mapped(lambda x: (x >> shift) & np.uint32(255))
        return lanewise(target, False, [part], lambda w: fp8.decode(part.read(w), fnuz).view(np.uint32))
    if name == "v_cvt_pk_f32_fp8":
        word = {"WORD_0": 0, "WORD_1": 16}[ins.options.get("src0_sel", "WORD_0")]
        if ins.options.get("op_sel", "[0,0]") not in ("[0,0]",):
            word = 16 * ins.bits("op_sel", 0, 1)[0]
        at = source(ins.operands[1])

        def pair(w: Waves) -> np.ndarray:
            x = at.read(w)
            both = [fp8.decode((x >> np.uint32(word + s)) & np.uint32(255), fnuz) for s in (0, 8)]
            low, high = (b.view(np.uint32).astype(np.uint64) for b in both)
            return low | (high << np.uint64(32))

        return lanewise(target, True, [at], pair)
    if name == "v_cvt_pk_fp8_f32":
        return _to_fp8(ins, target, fnuz)
    raise Unknown(ins.text)


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
