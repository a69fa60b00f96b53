"""Operands: how a register, constant or modifier of the text is read and written."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .faults import Unknown
from .waves import ALL_BITS, EXEC, M0, SCALAR_KEY, SCC, VCC, VECTORS, Waves, pack, unpack

Read = Callable[[Waves], np.ndarray]
NAMED = {"vcc": VCC, "exec": EXEC, "m0": M0, "scc": SCC, "vcc_lo": VCC, "vcc_hi": VCC + 1,
         "exec_lo": EXEC, "exec_hi": EXEC + 1}  # fmt: skip
PAIRS = ("vcc", "exec")
_ONE = re.compile(r"([vsa])(\d+)$")
_RANGE = re.compile(r"([vsa])\[(\d+):(\d+)\]$")
_INTEGER = re.compile(r"-?(0x[0-9a-fA-F]+|\d+)$")
_FLOAT = re.compile(r"-?\d+\.\d+(e[-+]?\d+)?$")
# A type is a letter: unsigned, signed and float of 32 bits; the same in capitals for 64; 16 bits.
TYPES = {
    "u": np.uint32, "i": np.int32, "f": np.float32, "U": np.uint64, "I": np.int64, "F": np.float64,
    "s": np.uint16, "j": np.int16, "h": np.float16,
}  # fmt: skip
_SIGN = {"u": 0x80000000, "f": 0x80000000, "F": 1 << 63, "U": 1 << 63, "h": 0x8000}
_CARRIER = {"h": np.uint16, "s": np.uint16, "j": np.uint16}


@dataclass(frozen=True)
class Register:
    """A run of registers; ``kind`` is ``v`` (accumulators follow the vector ones) or ``s``."""

    kind: str
    index: int
    count: int

    def keys(self) -> tuple[int, ...]:
        base = self.index + (SCALAR_KEY if self.kind == "s" else 0)
        return tuple(range(base, base + self.count))


def register(text: str) -> Register | None:
    """Read a register's name, or return None for something else."""
    if text in NAMED:
        return Register("s", NAMED[text], 2 if text in PAIRS else 1)
    found = _ONE.match(text)
    if found:
        first = last = int(found[2])
    else:
        found = _RANGE.match(text)
        if not found:
            return None
        first, last = int(found[2]), int(found[3])
    offset = VECTORS if found[1] == "a" else 0
    return Register("s" if found[1] == "s" else "v", first + offset, last - first + 1)


def needs_register(text: str, kind: str | None = None) -> Register:
    """Read a register.

    Raises:
        Unknown: It is something else.
    """
    found = register(text)
    if found is None or (kind is not None and found.kind != kind):
        raise Unknown(f"operand {text}")
    return found


def constant(text: str, type_: str) -> np.generic | None:
    """Return a constant as the bits that an operand of the type gets, or None for something else."""
    wide = type_ in "UIF"
    carrier = np.uint64 if wide else np.uint32
    if _FLOAT.match(text):
        kind = np.float64 if type_ == "F" else np.float16 if type_ == "h" else np.float32
        if wide and type_ != "F":
            raise Unknown(f"constant {text} of 64 bits")
        bits = kind(float(text)).view({8: np.uint64, 4: np.uint32, 2: np.uint16}[kind().nbytes])
        return carrier(bits)
    if not _INTEGER.match(text):
        return None
    value = int(text, 0)
    if type_ == "F" and "0x" in text:
        value <<= 32  # a literal is the upper half of a double
    elif wide and "0x" in text and not 0 <= value < 1 << 31:
        raise Unknown(f"constant {text} of 64 bits")
    return carrier(value & (0xFFFFFFFFFFFFFFFF if wide else 0xFFFFFFFF))


class Source:
    """Something that an instruction reads in every lane.

    Attributes:
        read: Returns the bits: ``[waves, 64]``, or an array that broadcasts to it.
        undefined: Returns the undefined bits likewise.
        keys: Registers behind it, as in :attr:`Waves.bad`.
    """

    def __init__(self, read: Read, undefined: Read, keys: tuple[int, ...] = ()) -> None:
        self.read = read
        self.undefined = undefined
        self.keys = keys

    def mapped(self, change: Callable[[np.ndarray], np.ndarray]) -> Source:
        """Return what ``change`` makes of the bits, and of the undefined ones."""
        read, undefined = self.read, self.undefined
        return Source(lambda w: change(read(w)), lambda w: change(undefined(w)), self.keys)


def source(text: str, type_: str = "u") -> Source:
    """Read an operand of a vector instruction; the bits come as uint32 or uint64.

    Raises:
        Unknown: The operand is not modelled.
    """
    bits = constant(text, type_)
    if bits is not None:
        none = type(bits)(0)
        return Source(lambda w: bits, lambda w: none)
    negate = absolute = False
    if text.startswith("-"):
        negate, text = True, text[1:]
    if text.startswith("|"):
        absolute, text = True, text.strip("|")
    found = needs_register(text)
    plain = _wide(found) if type_ in "UIF" else _narrow(found)
    return _signed(plain, type_, negate, absolute) if negate or absolute else plain


def _signed(plain: Source, type_: str, negate: bool, absolute: bool) -> Source:
    if type_ not in _SIGN:
        raise Unknown(f"sign modifier on type {type_}")
    sign = (np.uint64 if type_ in "FU" else np.uint32)(_SIGN[type_])
    read = plain.read
    if absolute and negate:
        return Source(lambda w: read(w) | sign, plain.undefined, plain.keys)
    if absolute:
        return Source(lambda w: read(w) & ~sign, plain.undefined, plain.keys)
    return Source(lambda w: read(w) ^ sign, plain.undefined, plain.keys)


def _narrow(found: Register) -> Source:
    i = found.index
    if found.kind == "v":
        return Source(lambda w: w.v[i], lambda w: w.vu[i], (i,))
    return Source(lambda w: w.column[i], lambda w: w.su[:, i : i + 1], (SCALAR_KEY + i,))


def _wide(found: Register) -> Source:
    i, shift = found.index, np.uint64(32)
    if found.count != 2:
        raise Unknown(f"{found} as 64 bits")

    def joined(low: np.ndarray, high: np.ndarray) -> np.ndarray:
        return low.astype(np.uint64) | (high.astype(np.uint64) << shift)

    if found.kind == "v":
        return Source(
            lambda w: joined(w.v[i], w.v[i + 1]), lambda w: joined(w.vu[i], w.vu[i + 1]), (i, i + 1)
        )
    return Source(
        lambda w: w.s64[i // 2][:, None] if i % 2 == 0 else joined(w.column[i], w.column[i + 1]),
        lambda w: joined(w.su[:, i : i + 1], w.su[:, i + 1 : i + 2]),
        found.keys(),
    )


def view(read: Read, type_: str) -> Read:
    """Return a reader that gives the bits as numbers of the type."""
    kind = TYPES[type_]
    carrier = _CARRIER.get(type_)
    if carrier is not None:
        return lambda w: read(w).astype(carrier).view(kind)
    if type_ in "uU":
        return read
    return lambda w: read(w).view(kind)


def bits_of(value: np.ndarray, type_: str) -> np.ndarray:
    """Return numbers of the type as uint32 or uint64 bits; 16-bit results leave the upper half zero."""
    kind = TYPES[type_]
    if getattr(value, "dtype", None) != kind:
        value = np.asarray(value).astype(kind)
    carrier = _CARRIER.get(type_)
    if carrier is not None:
        return value.view(carrier).astype(np.uint32)
    return value if type_ in "uU" else value.view(np.uint64 if type_ in "IF" else np.uint32)


class MaskSource:
    """A pair of scalar registers, or a constant, read as a bool per lane."""

    def __init__(self, text: str) -> None:
        bits = constant(text, "U")
        self.keys: tuple[int, ...] = ()
        if bits is not None:
            lanes = unpack(np.array([bits], np.uint64))
            self.read: Read = lambda w: lanes
            return
        found = needs_register(text, "s")
        if found.count != 2 or found.index % 2:
            raise Unknown(f"lane mask {text}")
        self.index = found.index
        self.keys = found.keys()
        half = found.index // 2
        self.read = lambda w: unpack(w.s64[half])

    def undefined(self, w: Waves) -> np.ndarray:
        if not self.keys:
            return np.zeros((1, 64), bool)
        return unpack(np.ascontiguousarray(w.su[:, self.index : self.index + 2]).view(np.uint64)[:, 0])


def set_mask(w: Waves, index: int, lanes: np.ndarray, undefined: np.ndarray | None) -> None:
    """Write a bool per lane into a pair of scalar registers; lanes that are not active get 0."""
    w.set_scalar64(index, pack(lanes & w.active))
    if undefined is not None and undefined.any():
        bits = pack(undefined & w.active)
        w.set_scalar_undefined(index, bits.astype(np.uint32))
        w.set_scalar_undefined(index + 1, (bits >> np.uint64(32)).astype(np.uint32))
    if index == EXEC:
        w.exec_changed()


def poison(parts: list[np.ndarray]) -> np.ndarray:
    """Return all ones where any of several arrays of undefined bits has one."""
    some = parts[0] != 0
    for part in parts[1:]:
        some = some | (part != 0)
    return np.where(some, ALL_BITS, np.uint32(0))
