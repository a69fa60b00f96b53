"""Vector instructions that compute lane by lane, with their modifiers."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from . import fp8
from .faults import Unknown
from .numbers import TABLE, bit_op3
from .operands import MaskSource, Source, bits_of, needs_register, poison, set_mask, source, view
from .sdwa import selected, stored
from .text import Instruction
from .waves import ALL_BITS, Waves

Step = Callable[[Waves], None]
_COMPARE = re.compile(r"v_cmp_(\w+?)_([fiu])(16|32|64)$")
_CARRY = re.compile(r"v_(add|sub|subrev|addc|subb|subbrev)_co_u32$")
_TESTS = {
    "lt": np.less, "gt": np.greater, "le": np.less_equal, "ge": np.greater_equal, "eq": np.equal,
    "ne": np.not_equal,
    "lg": lambda a, b: (a < b) | (a > b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "neq": np.not_equal,
    "nlt": lambda a, b: ~(a < b), "nle": lambda a, b: ~(a <= b),
    "ngt": lambda a, b: ~(a > b), "nge": lambda a, b: ~(a >= b),
    "u": lambda a, b: np.isnan(a) | np.isnan(b), "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
}  # fmt: skip
_FLOAT_TESTS = ("lg", "nlg", "neq", "nlt", "nle", "ngt", "nge", "u", "o")
_WIDTH = {"f16": "h", "f32": "f", "f64": "F", "i16": "j", "i32": "i", "i64": "I", "u16": "s", "u32": "u", "u64": "U"}


def decode(ins: Instruction, arch: str) -> Step | None:
    """Return what an instruction does, or None where this module does not know it."""
    for known in (_compare, _compare_class, _select, _carry, _multiply_add64, _division, _accumulate, _packed, _fp8):
        found = known(ins, arch)
        if found is not None:
            return found
    return _plain(ins)


# How undefined bits pass through operations that treat bits apart; all others spread one to the whole result.
def _precise(name: str) -> Callable[..., np.ndarray] | None:
    return {
        "mov_b32": lambda v, u: u[0],
        "mov_b64": lambda v, u: u[0],
        "accvgpr_write_b32": lambda v, u: u[0],
        "accvgpr_read_b32": lambda v, u: u[0],
        "accvgpr_mov_b32": lambda v, u: u[0],
        "not_b32": lambda v, u: u[0],
        "and_b32": lambda v, u: _and_undefined(*v, *u),
        "or_b32": lambda v, u: _and_undefined(~v[0], ~v[1], *u),
        "xor_b32": lambda v, u: u[0] | u[1],
        "or3_b32": lambda v, u: u[0] | u[1] | u[2],
        "and_or_b32": lambda v, u: _and_undefined(v[0], v[1], u[0], u[1]) | u[2],
        "lshlrev_b32": lambda v, u: _spread(u[0]) | (u[1] << (v[0] & np.uint32(31))),
        "lshrrev_b32": lambda v, u: _spread(u[0]) | (u[1] >> (v[0] & np.uint32(31))),
        "lshl_or_b32": lambda v, u: _spread(u[1]) | (u[0] << (v[1] & np.uint32(31))) | u[2],
        "bfi_b32": lambda v, u: u[0] | (v[0] & u[1]) | (~v[0] & u[2]),
        "perm_b32": lambda v, u: _spread(u[2]) | TABLE["perm_b32"][1](u[0], u[1], _constant_bytes(v[2])),
        "bfe_u32": lambda v, u: _spread(u[1]) | _spread(u[2]) | TABLE["bfe_u32"][1](u[0], v[1], v[2]),
    }.get(name)


def _and_undefined(a: np.ndarray, b: np.ndarray, ua: np.ndarray, ub: np.ndarray) -> np.ndarray:
    return (ua & ub) | (ua & b) | (ub & a)


def _spread(u: np.ndarray) -> np.ndarray:
    return np.where(np.asarray(u) != 0, ALL_BITS, np.uint32(0))


def _constant_bytes(selector: np.ndarray) -> np.ndarray:
    """Turn byte selectors that mean a constant into 12, which gives 0: a constant is defined."""
    out = np.uint32(0)
    for i in range(4):
        byte = (np.asarray(selector, np.uint32) >> np.uint32(8 * i)) & np.uint32(255)
        out = out | (np.minimum(byte, np.uint32(12)) << np.uint32(8 * i))
    return out


def lanewise(
    dst: int, wide: bool, sources: list[Source], compute: Callable[[Waves], np.ndarray],
    precise: Callable[[list[np.ndarray], list[np.ndarray]], np.ndarray] | None = None,
) -> Step:  # fmt: skip
    """Return a step that writes ``compute``'s bits to a register (a pair when ``wide``) and follows undefined bits."""
    keys = {dst, *(k for s in sources for k in s.keys)} | ({dst + 1} if wide else set())
    tracked = tuple(keys)

    def follow(w: Waves) -> np.ndarray:
        undefined = [s.undefined(w) for s in sources]
        if not any(np.any(u) for u in undefined):
            return np.uint32(0)
        if precise is not None:
            return np.array(precise([s.read(w) for s in sources], undefined))
        return poison(undefined)

    def wide_step(w: Waves) -> None:
        clean = w.bad.isdisjoint(tracked)
        undefined = None if clean else follow(w)
        value = np.asarray(compute(w))
        w.set_vector(dst, value.astype(np.uint32))
        w.set_vector(dst + 1, (value >> np.uint64(32)).astype(np.uint32))
        if undefined is not None:
            high = undefined >> np.uint64(32) if undefined.dtype == np.uint64 else undefined
            w.set_vector_undefined(dst, undefined.astype(np.uint32))
            w.set_vector_undefined(dst + 1, high.astype(np.uint32))

    def step(w: Waves) -> None:
        if w.bad.isdisjoint(tracked):
            w.set_vector(dst, compute(w))
            return
        undefined = follow(w)
        w.set_vector(dst, compute(w))
        w.set_vector_undefined(dst, undefined)

    return wide_step if wide else step


def _operand(ins: Instruction, n: int, type_: str) -> Source:
    """Return operand n as a source, with the part of it that SDWA selects."""
    if "_sdwa" in ins.name:
        return selected(ins.operands[n], type_, ins.options.get(f"src{n - 1}_sel", "DWORD"))
    return source(ins.operands[n], type_)


def _plain(ins: Instruction) -> Step | None:
    name = ins.name.removeprefix("v_").removesuffix("_sdwa")
    entry = TABLE.get(name)
    if entry is None:
        return None
    signature, function = entry
    ins.only("clamp", "mul", "div", "op_sel", *SDWA_OPTIONS)
    if "op_sel" in ins.options or "div" in ins.options:
        raise Unknown(f"op_sel or div of {ins.text}")
    types = signature[1:]
    sources = [_operand(ins, n + 1, t) for n, t in enumerate(types)]
    target = needs_register(ins.operands[0], "v").index
    reads = [view(s.read, t) for s, t in zip(sources, types, strict=True)]
    compute = _computation(function, reads, signature[0], _post(ins))
    if ins.name.endswith("_sdwa"):
        compute, sources = stored(ins, target, compute, sources)
    precise = _precise(name) if "_sdwa" not in ins.name and "clamp" not in ins.options else None
    return lanewise(target, signature[0] in "UIF", sources, compute, precise)


SDWA_OPTIONS = ("dst_sel", "dst_unused", "src0_sel", "src1_sel")


def _post(ins: Instruction) -> Callable[[np.ndarray], np.ndarray] | None:
    """Return what output modifiers do to a float result."""
    factor = ins.options.get("mul")
    clamp = "clamp" in ins.options
    if factor is None and not clamp:
        return None
    if not ins.name.endswith(("f32", "f32_sdwa")) or "pk" in ins.name:
        raise Unknown(f"output modifier of {ins.text}")
    scale = np.float32(float(factor or 1))

    def change(x: np.ndarray) -> np.ndarray:
        x = x * scale
        return np.fmin(np.fmax(x, np.float32(0)), np.float32(1)) if clamp else x

    return change


def _computation(
    function: Callable[..., np.ndarray], reads: list[Callable[[Waves], np.ndarray]], result: str,
    post: Callable[[np.ndarray], np.ndarray] | None,
) -> Callable[[Waves], np.ndarray]:  # fmt: skip
    if post is not None:
        return lambda w: bits_of(post(np.asarray(function(*(r(w) for r in reads)))), result)
    if len(reads) == 1:
        (a,) = reads
        return lambda w: bits_of(function(a(w)), result)
    if len(reads) == 2:
        a, b = reads
        return lambda w: bits_of(function(a(w), b(w)), result)
    a, b, c = reads
    return lambda w: bits_of(function(a(w), b(w), c(w)), result)


def _compare(ins: Instruction, arch: str) -> Step | None:
    found = _COMPARE.match(ins.name.removesuffix("_sdwa"))
    if found is None or found[1].startswith("class"):
        return None
    test = _TESTS.get(found[1])
    if test is None or (found[2] != "f" and found[1] in _FLOAT_TESTS):
        raise Unknown(ins.text)
    ins.only("src0_sel", "src1_sel")
    type_ = _WIDTH[found[2] + found[3]]
    sources = [_operand(ins, n, type_) for n in (1, 2)]
    a, b = (view(s.read, type_) for s in sources)
    return _to_mask(needs_register(ins.operands[0], "s").index, sources, lambda w: test(a(w), b(w)))


def _compare_class(ins: Instruction, arch: str) -> Step | None:
    if not ins.name.startswith("v_cmp_class_f"):
        return None
    type_ = {"v_cmp_class_f32": "f", "v_cmp_class_f64": "F"}.get(ins.name)
    if type_ is None:
        raise Unknown(ins.text)
    ins.only()
    sources = [source(ins.operands[1], type_), source(ins.operands[2], "u")]
    number, wanted = view(sources[0].read, type_), sources[1].read
    return _to_mask(
        needs_register(ins.operands[0], "s").index, sources, lambda w: _is_class(number(w), wanted(w))
    )


def _is_class(x: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Bits: signalling NaN, quiet NaN, -inf, -normal, -denormal, -0, 0, denormal, normal, inf."""
    tiny = np.finfo(x.dtype).tiny
    negative, size = np.signbit(x), np.abs(x)
    kind = np.where(size == 0, 5, np.where(size < tiny, 4, np.where(np.isinf(x), 2, 3)))
    kind = np.where(negative, kind, 11 - kind)
    kind = np.where(np.isnan(x), 1, kind)
    both = np.where(np.isnan(x), 3, np.uint32(1) << kind.astype(np.uint32))
    return (both & wanted) != 0


def _to_mask(index: int, sources: list[Source], compute: Callable[[Waves], np.ndarray]) -> Step:
    keys = tuple(k for s in sources for k in s.keys)

    def step(w: Waves) -> None:
        undefined = None
        if not w.bad.isdisjoint(keys):
            undefined = np.zeros_like(w.active)
            for s in sources:
                undefined |= s.undefined(w) != 0
        set_mask(w, index, np.broadcast_to(compute(w), w.active.shape), undefined)

    return step


def _select(ins: Instruction, arch: str) -> Step | None:
    if ins.name not in ("v_cndmask_b32", "v_cndmask_b32_sdwa"):
        return None
    ins.only(*SDWA_OPTIONS)
    sdwa = ins.name.endswith("_sdwa")
    no, yes = (_operand(ins, n, "u" if sdwa else "f") for n in (1, 2))
    mask = MaskSource(ins.operands[3] if len(ins.operands) > 3 else "vcc")
    target = needs_register(ins.operands[0], "v").index

    def compute(w: Waves) -> np.ndarray:
        return np.where(mask.read(w), yes.read(w), no.read(w))

    def undefined(w: Waves) -> np.ndarray:
        picked = np.where(mask.read(w), yes.undefined(w), no.undefined(w))
        return np.where(mask.undefined(w), ALL_BITS, picked)

    both = Source(compute, undefined, (*no.keys, *yes.keys, *mask.keys))
    if sdwa:
        made, sources = stored(ins, target, compute, [both])
        return lanewise(target, False, sources, made)
    return lanewise(target, False, [both], compute, lambda v, u: u[0])


def _carry(ins: Instruction, arch: str) -> Step | None:
    found = _CARRY.match(ins.name)
    if found is None:
        return None
    ins.only()
    target, out = needs_register(ins.operands[0], "v").index, needs_register(ins.operands[1], "s").index
    sources = [source(ins.operands[n], "u") for n in (2, 3)]
    a, b = (s.read for s in sources)
    carry = MaskSource(ins.operands[4]) if len(ins.operands) > 4 else None
    keys = tuple(k for s in sources for k in s.keys) + (carry.keys if carry else ())
    kind = found[1]

    def step(w: Waves) -> None:
        undefined = None
        if not w.bad.isdisjoint((*keys, target)):
            undefined = poison([np.broadcast_to(s.undefined(w), w.active.shape) for s in sources])
            if carry is not None:
                undefined = undefined | np.where(carry.undefined(w), ALL_BITS, np.uint32(0))
        x, y = (np.asarray(r(w)).astype(np.int64) for r in (a, b))
        more = carry.read(w).astype(np.int64) if carry else 0
        total = x + y + more if kind.startswith("add") else (y - x if "rev" in kind else x - y) - more
        over = np.broadcast_to((total > 0xFFFFFFFF) | (total < 0), w.active.shape)
        w.set_vector(target, (total & 0xFFFFFFFF).astype(np.uint32))
        set_mask(w, out, over, None if undefined is None else undefined != 0)
        if undefined is not None:
            w.set_vector_undefined(target, undefined)

    return step


def _multiply_add64(ins: Instruction, arch: str) -> Step | None:
    type_ = {"v_mad_u64_u32": "u", "v_mad_i64_i32": "i"}.get(ins.name)
    if type_ is None:
        return None
    ins.only()
    # The carry, operand 1, is not modelled: reading it would find an undefined register.
    carry = needs_register(ins.operands[1], "s").index
    sources = [source(ins.operands[2], type_), source(ins.operands[3], type_), source(ins.operands[4], "U")]
    a, b, c = (view(s.read, t) for s, t in zip(sources, (type_, type_, "U"), strict=True))
    wide = np.uint64 if type_ == "u" else np.int64

    def compute(w: Waves) -> np.ndarray:
        product = np.asarray(a(w)).astype(wide) * np.asarray(b(w)).astype(wide)
        return product.astype(np.uint64) + c(w)

    step = lanewise(needs_register(ins.operands[0], "v").index, True, sources, compute)

    def both(w: Waves) -> None:
        step(w)
        w.set_scalar_undefined(carry, 0xFFFFFFFF)
        w.set_scalar_undefined(carry + 1, 0xFFFFFFFF)

    return both


def _division(ins: Instruction, arch: str) -> Step | None:
    """v_div_scale passes its operand on and says "no scaling"; v_div_fixup then makes the exact quotient."""
    type_ = {"v_div_scale_f32": "f", "v_div_scale_f64": "F"}.get(ins.name)
    if type_ is None:
        return None
    ins.only()
    out = needs_register(ins.operands[1], "s").index
    value = source(ins.operands[2], type_)
    step = lanewise(needs_register(ins.operands[0], "v").index, type_ == "F", [value], value.read)

    def both(w: Waves) -> None:
        step(w)
        w.set_scalar64(out, np.uint64(0))

    return both


def _accumulate(ins: Instruction, arch: str) -> Step | None:
    """v_fmac and v_fmaak/v_fmamk: fused multiply-add in other clothes."""
    if not ins.name.startswith(("v_fmac_", "v_fmaak_", "v_fmamk_")):
        return None
    kind = ins.name.rsplit("_", 1)[1]
    if kind not in ("f32", "f64"):
        raise Unknown(ins.text)
    ops = ins.operands if len(ins.operands) == 4 else (*ins.operands, ins.operands[0])
    return _plain(Instruction(f"v_fma_{kind}", tuple(ops), ins.options, ins.text))


def _packed(ins: Instruction, arch: str) -> Step | None:
    """v_pk_{mul,add,fma}_f32, v_pk_mov_b32 and v_bitop3."""
    if ins.name == "v_bitop3_b32":
        ins.only("bitop3")
        table = ins.number("bitop3")
        sources = [source(ins.operands[n]) for n in (1, 2, 3)]
        a, b, c = (s.read for s in sources)
        return lanewise(
            needs_register(ins.operands[0], "v").index, False, sources,
            lambda w: bit_op3(np.asarray(a(w)), np.asarray(b(w)), np.asarray(c(w)), table),
        )  # fmt: skip
    name = {"v_pk_mul_f32": "mul_f32", "v_pk_add_f32": "add_f32", "v_pk_fma_f32": "fma_f32", "v_pk_mov_b32": "or_b32"}.get(
        ins.name
    )
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
    made = [_computation(function, r, signature[0], None) for r in reads]
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
    if half and needs_zero(text):
        raise Unknown(f"upper half of {text}")
    return source(sign + text, "f")


def needs_zero(text: str) -> bool:
    """Say whether the upper half of a packed constant would be in doubt: only that of 0 is not."""
    return text not in ("0", "0.0")


def _fp8(ins: Instruction, arch: str) -> Step | None:
    if "fp8" not in ins.name:
        return None
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

