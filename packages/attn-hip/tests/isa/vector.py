"""Vector instructions that compute lane by lane, with their modifiers."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .faults import Unknown
from .numbers import TABLE
from .operands import MaskSource, Source, bits_of, needs_register, poison, set_mask, source, view
from .sdwa import selected, stored
from .taint import RULES
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
_WIDTH = {
    "f16": "h",
    "f32": "f",
    "f64": "F",
    "i16": "j",
    "i32": "i",
    "i64": "I",
    "u16": "s",
    "u32": "u",
    "u64": "U",
}


def decode(ins: Instruction, arch: str) -> Step | None:
    """Return what an instruction does, or None where this module does not know it."""
    for known in (
        _compare,
        _compare_class,
        _select,
        _carry,
        _multiply_add64,
        _division,
        _accumulate,
    ):
        found = known(ins, arch)
        if found is not None:
            return found
    return _plain(ins)


def lanewise(
    dst: int, wide: bool, sources: list[Source], compute: Callable[[Waves], np.ndarray],
    precise: Callable[[list[np.ndarray], list[np.ndarray]], np.ndarray] | None = None,
) -> Step:  # fmt: skip
    """Return a step that writes computed bits to a register (a pair when ``wide``), undefined ones too."""
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
    compute = computation(function, reads, signature[0], _post(ins))
    if ins.name.endswith("_sdwa"):
        compute, sources = stored(ins, target, compute, sources)
    precise = RULES.get(name) if "_sdwa" not in ins.name and "clamp" not in ins.options else None
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


def computation(
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

    step = lanewise(needs_register(ins.operands[0], "v").index, True, sources, compute, RULES["mad_64"])

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
