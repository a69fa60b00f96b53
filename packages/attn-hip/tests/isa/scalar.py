"""Scalar instructions: arithmetic per wave. Branches and waits are the machine's."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .faults import Unknown
from .operands import Register, constant, needs_register
from .text import Instruction
from .waves import ALL_BITS, EXEC, SCALAR_KEY, SCC, Waves

Step = Callable[[Waves], None]
Array = np.ndarray
_I64, _U64 = np.int64, np.uint64


def _wide(x: Array) -> Array:
    return np.asarray(x).astype(_I64)


def _nonzero(x: Array) -> tuple[Array, Array]:
    return x, x != 0


def _signed_overflow(total: Array) -> tuple[Array, Array]:
    return total & 0xFFFFFFFF, (total < -(2**31)) | (total >= 2**31)


def _field(x: Array, how: Array) -> tuple[Array, Array]:
    at, width = _wide(how) & 31, _wide(how) >> 16 & 127
    return _nonzero(_wide(x) >> at & ((1 << width) - 1))


def _field_signed(x: Array, how: Array) -> tuple[Array, Array]:
    at, width = _wide(how) & 31, _wide(how) >> 16 & 127
    found = _wide(x) >> at & ((1 << width) - 1)
    found = np.where((width > 0) & (found >> np.maximum(width - 1, 0) & 1 == 1), found - (1 << width), found)
    return _nonzero(found & 0xFFFFFFFF)


# Signature: result, then operands (u, i: 32 bits; U, I: 64 bits). Functions return the result, or it and scc.
_NO_FLAG: dict[str, tuple[str, Callable[..., Array]]] = {
    "mov_b32": ("uu", lambda a: a),
    "mov_b64": ("UU", lambda a: a),
    "mul_i32": ("uuu", lambda a, b: _wide(a) * _wide(b) & 0xFFFFFFFF),
    "mul_hi_u32": ("uuu", lambda a, b: np.asarray(a).astype(_U64) * np.asarray(b).astype(_U64) >> _U64(32)),
    "mul_hi_i32": ("uii", lambda a, b: _wide(a) * _wide(b) >> 32 & 0xFFFFFFFF),
    "bfm_b32": ("uuu", lambda a, b: ((1 << (_wide(a) & 31)) - 1) << (_wide(b) & 31) & 0xFFFFFFFF),
    "brev_b32": ("uu", lambda a: _reverse(a)),
    "sext_i32_i16": ("uu", lambda a: _wide(a) << 48 >> 48 & 0xFFFFFFFF),
    "sext_i32_i8": ("uu", lambda a: _wide(a) << 56 >> 56 & 0xFFFFFFFF),
    "ff1_i32_b32": ("uu", lambda a: np.where(_wide(a) == 0, 0xFFFFFFFF, _trailing(a))),
    "ff1_i32_b64": ("uU", lambda a: np.where(a == 0, _I64(0xFFFFFFFF), _trailing64(a))),
    "flbit_i32_b32": ("uu", lambda a: np.where(_wide(a) == 0, 0xFFFFFFFF, 32 - np.frexp(_wide(a) * 1.0)[1])),
    "pack_ll_b32_b16": ("uuu", lambda a, b: (_wide(a) & 0xFFFF) | (_wide(b) & 0xFFFF) << 16),
}
_FLAG: dict[str, tuple[str, Callable[..., tuple[Array, Array]]]] = {
    "add_i32": ("uii", lambda a, b: _signed_overflow(_wide(a) + _wide(b))),
    "sub_i32": ("uii", lambda a, b: _signed_overflow(_wide(a) - _wide(b))),
    "add_u32": ("uuu", lambda a, b: (_wide(a) + _wide(b) & 0xFFFFFFFF, _wide(a) + _wide(b) > 0xFFFFFFFF)),
    "sub_u32": ("uuu", lambda a, b: (_wide(a) - _wide(b) & 0xFFFFFFFF, _wide(a) < _wide(b))),
    "min_i32": ("uii", lambda a, b: (np.minimum(_wide(a), _wide(b)) & 0xFFFFFFFF, _wide(a) < _wide(b))),
    "max_i32": ("uii", lambda a, b: (np.maximum(_wide(a), _wide(b)) & 0xFFFFFFFF, _wide(a) > _wide(b))),
    "min_u32": ("uuu", lambda a, b: (np.minimum(a, b), np.less(a, b))),
    "max_u32": ("uuu", lambda a, b: (np.maximum(a, b), np.greater(a, b))),
    "abs_i32": ("ui", lambda a: _nonzero(np.abs(_wide(a)) & 0xFFFFFFFF)),
    "bfe_u32": ("uuu", _field),
    "bfe_i32": ("uuu", _field_signed),
    "lshl_b32": ("uuu", lambda a, b: _nonzero(_wide(a) << (_wide(b) & 31) & 0xFFFFFFFF)),
    "lshr_b32": ("uuu", lambda a, b: _nonzero(_wide(a) >> (_wide(b) & 31))),
    "ashr_i32": ("uiu", lambda a, b: _nonzero(_wide(a) >> (_wide(b) & 31) & 0xFFFFFFFF)),
    "lshl_b64": ("UUu", lambda a, b: _nonzero(np.asarray(a) << (np.asarray(b).astype(_U64) & _U64(63)))),
    "lshr_b64": ("UUu", lambda a, b: _nonzero(np.asarray(a) >> (np.asarray(b).astype(_U64) & _U64(63)))),
    "ashr_i64": ("IIu", lambda a, b: _nonzero(np.asarray(a) >> (np.asarray(b).astype(_I64) & 63))),
    "bcnt1_i32_b64": ("uU", lambda a: _nonzero(np.bitwise_count(a))),
    "bcnt1_i32_b32": ("uu", lambda a: _nonzero(np.bitwise_count(a))),
    **{
        f"lshl{n}_add_u32": (
            "uuu",
            lambda a, b, n=n: (
                (_wide(a) << n) + _wide(b) & 0xFFFFFFFF,
                (_wide(a) << n) + _wide(b) > 0xFFFFFFFF,
            ),
        )
        for n in (1, 2, 3, 4)
    },
}
_BITWISE: dict[str, Callable[[Array, Array], Array]] = {
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b,
    "orn2": lambda a, b: a | ~b, "nand": lambda a, b: ~(a & b), "nor": lambda a, b: ~(a | b),
    "xnor": lambda a, b: ~(a ^ b),
}  # fmt: skip
for _name, _function in _BITWISE.items():
    for _bits, _type in (("b32", "u"), ("b64", "U")):
        _FLAG[f"{_name}_{_bits}"] = (_type * 3, lambda a, b, f=_function: _nonzero(f(a, b)))
for _bits, _type in (("b32", "u"), ("b64", "U")):
    _FLAG[f"not_{_bits}"] = (_type * 2, lambda a: _nonzero(~a))
_CARRIED: dict[str, Callable[[Array, Array, Array], Array]] = {
    "addc_u32": lambda a, b, c: a + b + c,
    "subb_u32": lambda a, b, c: a - b - c,
}
_COMPARED = {"eq": np.equal, "lg": np.not_equal, "gt": np.greater, "ge": np.greater_equal, "lt": np.less,
             "le": np.less_equal}  # fmt: skip
_PRECISE = ("mov", "and", "or", "xor", "not", "andn2", "orn2")
_TYPES = {"u": np.uint32, "i": np.int32, "U": np.uint64, "I": np.int64}


def _reverse(x: Array) -> Array:
    bits = np.unpackbits(
        np.ascontiguousarray(x, np.uint32).reshape(-1, 1).view(np.uint8), axis=1, bitorder="little"
    )
    return np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(np.uint32)[:, 0]


def _trailing(x: Array) -> Array:
    low = _wide(x) & -_wide(x)
    return np.frexp(low.astype(np.float64))[1] - 1


def _trailing64(x: Array) -> Array:
    low = np.asarray(x) & (~np.asarray(x) + _U64(1))
    return np.frexp(low.astype(np.float64))[1].astype(_I64) - 1


class _Operand:
    """A scalar operand: reads ``[waves]`` or a constant."""

    def __init__(self, text: str, type_: str) -> None:
        bits = constant(text, "U" if type_ in "UI" else "u")
        self.keys: tuple[int, ...] = ()
        kind = _TYPES[type_]
        if bits is not None:
            value = bits.view(kind)
            self.read: Callable[[Waves], Array] = lambda w: value
            return
        found = needs_register(text, "s")
        self.register: Register = found
        i = found.index
        if type_ in "ui":
            self.keys = (SCALAR_KEY + i,)
            self.read = (lambda w: w.s[i]) if type_ == "u" else (lambda w: w.s[i].view(np.int32))
            return
        self.keys = (SCALAR_KEY + i, SCALAR_KEY + i + 1)
        if i % 2:
            raise Unknown(f"pair {text}")
        half = i // 2
        self.read = (lambda w: w.s64[half]) if type_ == "U" else (lambda w: w.s64[half].view(np.int64))

    def undefined(self, w: Waves) -> tuple[Array, Array]:
        """Undefined bits of the lower and the upper half."""
        zero = np.zeros(w.count, np.uint32)
        columns = [w.su[:, k - SCALAR_KEY] for k in self.keys]
        low, high = [*columns, zero, zero][:2]
        return low, high


def decode(ins: Instruction, arch: str) -> Step | None:
    """Return what an instruction does, or None where this module does not know it."""
    name = ins.name.removeprefix("s_")
    ins.only()
    for known in (_compare, _immediate, _select, _save_exec, _bit_set):
        found = known(ins, name)
        if found is not None:
            return found
    if name in _CARRIED:
        return _carried(ins, _CARRIED[name])
    if name in _NO_FLAG:
        return _arithmetic(ins, *_NO_FLAG[name], flag=False)
    return _arithmetic(ins, *_FLAG[name], flag=True) if name in _FLAG else None


def _arithmetic(ins: Instruction, signature: str, function: Callable, *, flag: bool) -> Step:
    sources = [_Operand(text, t) for text, t in zip(ins.operands[1:], signature[1:], strict=True)]
    target, wide = needs_register(ins.operands[0], "s").index, signature[0] in "UI"
    reads = [s.read for s in sources]
    keys = tuple(k for s in sources for k in s.keys)
    kind = np.uint64 if wide else np.uint32
    precise = re.match(rf"s_({'|'.join(_PRECISE)})_b", ins.name)

    def step(w: Waves) -> None:
        undefined = None if w.bad.isdisjoint(keys) else _follow(w, sources, precise[1] if precise else "")
        made = function(*(r(w) for r in reads))
        value = made[0] if flag else made
        value = np.asarray(value)
        if value.dtype != kind:
            value = value.astype(kind) if value.dtype.kind != "i" else value.astype(np.int64).astype(kind)
        (w.set_scalar64 if wide else w.set_scalar)(target, value)
        if flag:
            w.set_scalar(SCC, np.asarray(made[1]).astype(np.uint32))
        if undefined is not None:
            w.set_scalar_undefined(target, undefined[0])
            if wide:
                w.set_scalar_undefined(target + 1, undefined[1])
            if flag:
                w.set_scalar_undefined(
                    SCC, np.where((undefined[0] | undefined[1]) != 0, ALL_BITS, np.uint32(0))
                )
        if EXEC - 1 <= target <= EXEC + 1:
            w.exec_changed()

    return step


def _follow(w: Waves, sources: list[_Operand], name: str) -> tuple[Array, Array]:
    """Return the undefined bits of a result: bit by bit for moves and logic, else all or none."""
    parts = [s.undefined(w) for s in sources]
    if name in ("mov", "not", "xor"):
        low, high = (np.bitwise_or.reduce([p[i] for p in parts]) for i in (0, 1))
        return low, high
    if name:
        return _logic(w, sources, parts, name)
    some = np.zeros(w.count, bool)
    for part in parts:
        some |= (part[0] | part[1]) != 0
    both = np.where(some, ALL_BITS, np.uint32(0))
    return both, both


def _logic(
    w: Waves, sources: list[_Operand], parts: list[tuple[Array, Array]], name: str
) -> tuple[Array, Array]:
    """A defined 0 settles an and, a defined 1 an or."""
    a, b = (np.broadcast_to(np.asarray(s.read(w)).astype(np.uint64), w.count) for s in sources)
    ua, ub = (p[0].astype(np.uint64) | p[1].astype(np.uint64) << np.uint64(32) for p in parts)
    if name.startswith("or"):
        a = ~a
    if name in ("andn2", "or"):
        b = ~b
    out = (ua & ub) | (ua & b) | (ub & a)
    return out.astype(np.uint32), (out >> np.uint64(32)).astype(np.uint32)


def _carried(ins: Instruction, function: Callable[[Array, Array, Array], Array]) -> Step:
    sources = [_Operand(text, "u") for text in ins.operands[1:]]
    target = needs_register(ins.operands[0], "s").index
    keys = (*(k for s in sources for k in s.keys), SCALAR_KEY + SCC)

    def step(w: Waves) -> None:
        undefined = None if w.bad.isdisjoint(keys) else _follow(w, [*sources, _Operand("scc", "u")], "")
        total = function(*(_wide(s.read(w)) for s in sources), _wide(w.s[SCC]))
        w.set_scalar(target, (total & 0xFFFFFFFF).astype(np.uint32))
        w.set_scalar(SCC, ((total > 0xFFFFFFFF) | (total < 0)).astype(np.uint32))
        if undefined is not None:
            w.set_scalar_undefined(target, undefined[0])
            w.set_scalar_undefined(SCC, undefined[0])

    return step


def _compare(ins: Instruction, name: str) -> Step | None:
    found = re.match(r"cmp(k?)_(eq|lg|gt|ge|lt|le)_([iu])(32|64)$", name)
    if found is None:
        return None
    type_ = found[3].upper() if found[4] == "64" else found[3]
    sources = [_Operand(text, type_) for text in ins.operands]
    a, b = (s.read for s in sources)
    keys = tuple(k for s in sources for k in s.keys)
    test = _COMPARED[found[2]]

    def step(w: Waves) -> None:
        undefined = None if w.bad.isdisjoint(keys) else _follow(w, sources, "")
        w.set_scalar(SCC, np.asarray(test(a(w), b(w))).astype(np.uint32))
        if undefined is not None:
            w.set_scalar_undefined(SCC, undefined[0])

    return step


def _immediate(ins: Instruction, name: str) -> Step | None:
    """s_movk_i32, s_addk_i32, s_mulk_i32: a signed constant of 16 bits."""
    if name not in ("movk_i32", "addk_i32", "mulk_i32"):
        return None
    value = int(ins.operands[1], 0)
    value = value - 0x10000 if value >= 0x8000 else value
    target = ins.operands[0]
    if name == "movk_i32":
        return decode(Instruction("s_mov_b32", (target, str(value)), {}, ins.text), "")
    base = "s_add_i32" if name == "addk_i32" else "s_mul_i32"
    return decode(Instruction(base, (target, target, str(value)), {}, ins.text), "")


def _select(ins: Instruction, name: str) -> Step | None:
    if name not in ("cselect_b32", "cselect_b64"):
        return None
    wide = name.endswith("64")
    yes, no = (_Operand(text, "U" if wide else "u") for text in ins.operands[1:])
    target = needs_register(ins.operands[0], "s").index
    keys = (*yes.keys, *no.keys, SCALAR_KEY + SCC)

    def step(w: Waves) -> None:
        undefined = None
        if not w.bad.isdisjoint(keys):
            chosen = [
                np.where(w.s[SCC] != 0, a, b) for a, b in zip(yes.undefined(w), no.undefined(w), strict=True)
            ]
            undefined = [c | w.su[:, SCC] for c in chosen]
        value = np.where(w.s[SCC] != 0, yes.read(w), no.read(w))
        (w.set_scalar64 if wide else w.set_scalar)(target, value)
        if undefined is not None:
            for i in range(1 + wide):
                w.set_scalar_undefined(target + i, undefined[i])
        if target == EXEC:
            w.exec_changed()

    return step


def _save_exec(ins: Instruction, name: str) -> Step | None:
    found = re.match(r"(and|or|xor|andn2|orn2|nand|nor|xnor)_saveexec_b64$", name)
    if found is None:
        return None
    value = _Operand(ins.operands[1], "U")
    target, function = needs_register(ins.operands[0], "s").index, _BITWISE[found[1]]
    half = EXEC // 2

    def step(w: Waves) -> None:
        undefined = None
        if not w.bad.isdisjoint(value.keys):
            undefined = _follow(w, [value, _Operand("exec", "U")], found[1] if found[1] in _PRECISE else "")
        before = w.s64[half].copy()
        after = function(value.read(w), before)
        w.set_scalar64(target, before)
        w.set_scalar64(EXEC, after)
        w.set_scalar(SCC, (after != 0).astype(np.uint32))
        if undefined is not None:
            w.set_scalar_undefined(EXEC, undefined[0])
            w.set_scalar_undefined(EXEC + 1, undefined[1])
        w.exec_changed()

    return step


def _bit_set(ins: Instruction, name: str) -> Step | None:
    """s_bitset0_b32 and s_bitset1_b32 with a constant bit; s_bitcmp0/1_b32."""
    found = re.match(r"bitcmp([01])_b32$", name)
    if found:
        x, at = (_Operand(text, "u") for text in ins.operands)
        wanted = int(found[1])
        keys = (*x.keys, *at.keys)

        def compare(w: Waves) -> None:
            undefined = None if w.bad.isdisjoint(keys) else _follow(w, [x, at], "")
            w.set_scalar(
                SCC,
                np.asarray((_wide(x.read(w)) >> (_wide(at.read(w)) & 31) & 1) == wanted).astype(np.uint32),
            )
            if undefined is not None:
                w.set_scalar_undefined(SCC, undefined[0])

        return compare
    found = re.match(r"bitset([01])_b32$", name)
    if found is None:
        return None
    mask = 1 << (int(ins.operands[1], 0) & 31)
    target = ins.operands[0]
    base, value = ("s_or_b32", mask) if found[1] == "1" else ("s_and_b32", ~mask & 0xFFFFFFFF)
    inner = decode(Instruction(base, (target, target, str(value)), {}, ins.text), "")
    assert inner is not None

    def step(w: Waves) -> None:
        flag, undefined = w.s[SCC].copy(), w.su[:, SCC].copy()  # bitset leaves scc alone
        inner(w)
        w.set_scalar(SCC, flag)
        w.set_scalar_undefined(SCC, undefined)

    return step
