"""Instructions that touch memory: global, flat, shared and scalar loads, stores and atomics."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .faults import Unknown
from .lanes import permuted
from .operands import Register, constant, needs_register, source
from .text import Instruction
from .waves import SCALAR_KEY, Waves

if TYPE_CHECKING:
    from .machine import Machine

Step = Callable[[Waves], None]
_GLOBAL = re.compile(r"(global|flat)_(load|store)_(\w+)$")
_PRIVATE = re.compile(r"scratch_(load|store)_(dword|dwordx2|dwordx3|dwordx4)$")
_COPY = re.compile(r"global_load_lds_(dword|dwordx3|dwordx4|ushort|ubyte)$")
_ATOMIC = re.compile(r"(global|flat)_atomic_(add|sub|umax|umin|smax|smin|or|and|xor|swap|inc|add_f32)(_x2)?$")
_SHARED = re.compile(
    r"ds_(read|write)(2?)(st64)?_(b\d+|u8|u16|i8|i16|u8_d16|u16_d16|u8_d16_hi|u16_d16_hi|b16_d16_hi|b8_d16_hi)$"
)
_TRANSPOSED = "ds_read_b64_tr_b16"
_SIZES = {
    "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "ubyte": 1, "sbyte": 1, "byte": 1, "ushort": 2,
    "sshort": 2, "short": 2, "short_d16": 2, "short_d16_hi": 2, "byte_d16_hi": 1, "ubyte_d16": 1,
    "ubyte_d16_hi": 1, "b8": 1, "b16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16, "u8": 1, "u16": 2,
    "i8": 1,
    "i16": 2, "u8_d16": 1, "u16_d16": 2, "u8_d16_hi": 1, "u16_d16_hi": 2, "b16_d16_hi": 2, "b8_d16_hi": 1,
}  # fmt: skip
_FLAGS = ("offset", "sc0", "sc1", "nt")
_NARROW = {1: np.uint8, 2: np.uint16}


def decode(ins: Instruction, arch: str, machine: Machine) -> Step | None:
    """Return what an instruction does, or None where this module does not know it."""
    if ins.name == "ds_bpermute_b32":
        return permuted(ins)
    if ins.name.startswith("s_load_dword"):
        return _scalar_load(ins, machine)
    if ins.name == _TRANSPOSED:
        return _transposed(ins, machine)
    for pattern, make in (
        (_PRIVATE, _private),
        (_COPY, _copy),
        (_GLOBAL, _vector_access),
        (_ATOMIC, _atomic),
        (_SHARED, _shared),
    ):
        found = pattern.match(ins.name)
        if found:
            return make(ins, found, machine)
    return None


def _scalar_load(ins: Instruction, machine: Machine) -> Step:
    count = int(ins.name.removeprefix("s_load_dword").lstrip("x") or 1)
    ins.only("offset")
    target, base = needs_register(ins.operands[0], "s").index, needs_register(ins.operands[1], "s")
    fixed, offset = constant(ins.operands[2], "u"), None
    if fixed is None:
        offset = needs_register(ins.operands[2], "s")
    more = int(fixed or 0) + ins.number("offset")

    def step(w: Waves) -> None:
        w.require_scalar(base.index, 2, "an address")
        at = w.s64[base.index // 2] + np.uint64(more)
        if offset is not None:
            w.require_scalar(offset.index, 1, "an address")
            at = at + w.s[offset.index]
        waves = np.flatnonzero(w.selected)
        words = machine.memory.load(at[waves], 4 * count, machine.block_number[waves])
        words = words.view(np.uint32).reshape(-1, count)
        w.scalars[waves[:, None], target + np.arange(count)] = words
        for i in range(target, target + count):
            if SCALAR_KEY + i in w.bad:
                w.set_scalar_undefined(i, 0)

    return step


class _Address:
    """Where each active lane of a global access points."""

    def __init__(self, vector: str, scalar: str | None, offset: int) -> None:
        self._vector = needs_register(vector, "v")
        self._wide = source(vector, "U").read if scalar in (None, "off") else None
        self._narrow = source(vector, "u").read
        self._scalar = None if scalar in (None, "off") else needs_register(scalar, "s")
        self._offset = np.uint64(offset & 0xFFFFFFFFFFFFFFFF)

    def of(self, w: Waves) -> np.ndarray:
        if self._wide is not None:
            w.require_vector(self._vector.index, 2, "an address")
            return (self._wide(w) + self._offset)[w.active]
        assert self._scalar is not None
        w.require_vector(self._vector.index, 1, "an address")
        w.require_scalar(self._scalar.index, 2, "an address")
        base = w.s64[self._scalar.index // 2][:, None]
        return (self._narrow(w).astype(np.uint64) + base + self._offset)[w.active]


def _vector_access(ins: Instruction, found: re.Match[str], machine: Machine) -> Step:
    ins.only(*_FLAGS)
    kind = found[3]
    if kind not in _SIZES:
        raise Unknown(ins.text)
    size, loads = _SIZES[kind], found[2] == "load"
    data, vector = (ins.operands[0], ins.operands[1]) if loads else (ins.operands[1], ins.operands[0])
    address = _Address(vector, ins.operands[2] if found[1] == "global" else None, ins.number("offset"))
    register = needs_register(data, "v")
    if register.count != max(1, size // 4):
        raise Unknown(ins.text)

    def load(w: Waves) -> None:
        machine.count_memory(w)
        if not w.active.any():
            return
        at = address.of(w)
        values = machine.memory.load(at, size, machine.lane_block[w.active])
        _put(w, register, kind, size, values, None)

    def store(w: Waves) -> None:
        machine.count_memory(w)
        if not w.active.any():
            return
        at = address.of(w)
        w.require_vector_bits(register.index, register.count, _stored_bits(kind, size), "a stored value")
        machine.memory.store(at, _get(w, register, kind, size), machine.lane_block[w.active])

    return load if loads else store


def _private(ins: Instruction, found: re.Match[str], machine: Machine) -> Step:
    """Memory of a lane: where spilled registers wait. Only fixed places are modelled."""
    ins.only("offset")
    loads = found[1] == "load"
    places = ins.operands[1:] if loads else (ins.operands[0], ins.operands[2])
    if set(places) != {"off"}:
        raise Unknown(ins.text)
    register = needs_register(ins.operands[0 if loads else 1], "v")
    first = ins.number("offset") // 4
    if ins.number("offset") % 4 or 4 * (first + register.count) > machine.private_bytes:
        raise Unknown(ins.text)

    def step(w: Waves) -> None:
        machine.count_memory(w)
        for n in range(register.count):
            values, undefined = machine.private[first + n]
            i = register.index + n
            if loads:
                w.set_vector(i, values)
                w.set_vector_undefined(i, undefined)
            else:
                np.copyto(values, w.v[i], where=w.active)
                np.copyto(undefined, w.vu[i], where=w.active)

    return step


def _stored_bits(kind: str, size: int) -> int:
    if size >= 4:
        return 0xFFFFFFFF
    mask = (1 << 8 * size) - 1
    return mask << 16 if kind.endswith("_hi") else mask


def _put(
    w: Waves, register: Register, kind: str, size: int, values: np.ndarray, undefined: np.ndarray | None
) -> None:
    """Write loaded values of the active lanes into registers."""
    if size >= 4:
        words = values.view(np.uint32).reshape(len(values), -1)
        lost = None if undefined is None else undefined.view(np.uint32).reshape(len(values), -1)
        for i in range(register.count):
            _put_word(w, register.index + i, words[:, i], None if lost is None else lost[:, i])
        return
    part, lost = values.view(_NARROW[size]).astype(np.uint32), None
    if undefined is not None:
        lost = undefined.view(_NARROW[size]).astype(np.uint32)
    if kind in ("sbyte", "sshort", "i8", "i16"):
        up = 32 - 8 * size
        part = (part << np.uint32(up)).view(np.int32) >> np.int32(up)
        part = part.view(np.uint32)
    if "d16" in kind:  # the other half stays
        shift, keep = (
            (np.uint32(16), np.uint32(0xFFFF))
            if kind.endswith("_hi")
            else (np.uint32(0), np.uint32(0xFFFF0000))
        )
        part = (w.v[register.index][w.active] & keep) | (part << shift)
        old = w.vu[register.index][w.active] & keep
        lost = old if lost is None else old | (lost << shift)
    _put_word(w, register.index, part, lost)


def _put_word(w: Waves, index: int, words: np.ndarray, undefined: np.ndarray | None) -> None:
    w.v[index][w.active] = words
    if undefined is not None and undefined.any():
        w.vu[index][w.active] = undefined
        w.bad.add(index)
    elif index in w.bad:
        w.set_vector_undefined(index, 0)


def _get(w: Waves, register: Register, kind: str, size: int, *, undefined: bool = False) -> np.ndarray:
    """Return the registers of the active lanes as void values."""
    bank = w.vu if undefined else w.v
    if size >= 4:
        words = np.stack(
            [bank[i][w.active] for i in range(register.index, register.index + register.count)], axis=1
        )
        return np.ascontiguousarray(words).view(f"V{size}")[:, 0]
    word = bank[register.index][w.active]
    if kind.endswith("_hi"):
        word = word >> np.uint32(16)
    return word.astype(_NARROW[size]).view(f"V{size}")


def _copy(ins: Instruction, found: re.Match[str], machine: Machine) -> Step:
    """global_load_lds: lane l's bytes go to shared memory at m0 + offset + l * size, before a wait ends."""
    ins.only(*_FLAGS)
    size = _SIZES[found[1]]
    if size < 4:
        raise Unknown(ins.text)
    offset = ins.number("offset")
    address = _Address(ins.operands[0], ins.operands[1], offset)

    def step(w: Waves) -> None:
        tickets = machine.count_memory(w)
        w.require_scalar(124, 1, "an address in shared memory")
        to = w.s[124].astype(np.int64)[:, None] + offset + np.arange(64) * size
        values = machine.memory.load(address.of(w), size, machine.lane_block[w.active])
        at = machine.shared.place(to[w.active], size, machine.lane_slot[w.active])
        ticket = np.broadcast_to(tickets[:, None], w.active.shape)[w.active]
        machine.shared.copy_in(at, values, machine.lane_wave[w.active], ticket)

    return step


def _atomic(ins: Instruction, found: re.Match[str], machine: Machine) -> Step:
    ins.only(*_FLAGS)
    returns = "sc0" in ins.options
    operands = ins.operands[1:] if returns else ins.operands
    data = needs_register(operands[1], "v")
    address = _Address(operands[0], operands[2] if found[1] == "global" else None, ins.number("offset"))
    kind = np.dtype(np.uint64 if found[3] else np.float32 if found[2] == "add_f32" else np.uint32)
    change = _CHANGES[found[2]]
    result = needs_register(ins.operands[0], "v") if returns else None

    def step(w: Waves) -> None:
        machine.count_memory(w)
        at = address.of(w)
        w.require_vector(data.index, data.count, "a stored value")
        values = _get(w, data, "", kind.itemsize).view(kind)
        before = np.empty(len(at), kind)
        for n, place in enumerate(at):
            cell = machine.memory.atomic(int(place), kind.itemsize).view(kind)
            before[n] = cell[0]
            cell[0] = change(cell[0], values[n])
        if result is not None:
            _put(w, result, "", kind.itemsize, before.view(f"V{kind.itemsize}"), None)

    return step


_CHANGES: dict[str, Callable[[np.generic, np.generic], np.generic]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "umax": max, "umin": min, "or": lambda a, b: a | b,
    "and": lambda a, b: a & b, "xor": lambda a, b: a ^ b, "swap": lambda a, b: b,
    "add_f32": lambda a, b: a + b,
    "smax": lambda a, b: max(_signed(a), _signed(b)).view(a.dtype),
    "smin": lambda a, b: min(_signed(a), _signed(b)).view(a.dtype),
    "inc": lambda a, b: a.dtype.type(0) if a >= b else a + a.dtype.type(1),
}  # fmt: skip


def _signed(x: np.generic) -> np.generic:
    return x.view(np.int64 if x.dtype.itemsize == 8 else np.int32)


def _shared(ins: Instruction, found: re.Match[str], machine: Machine) -> Step:
    ins.only("offset", "offset0", "offset1")
    kind = found[4]
    size = _SIZES[kind]
    if found[2]:
        unit = size * (64 if found[3] else 1)
        offsets = [ins.number("offset0") * unit, ins.number("offset1") * unit]
    else:
        offsets = [ins.number("offset")]
    if found[1] == "read":
        return _shared_load(ins, kind, size, offsets, machine)
    return _shared_store(ins, kind, size, offsets, machine)


def _shared_load(ins: Instruction, kind: str, size: int, offsets: list[int], machine: Machine) -> Step:
    whole, address = needs_register(ins.operands[0], "v"), needs_register(ins.operands[1], "v")
    each = max(1, size // 4)
    targets = [Register("v", whole.index + n * each, each) for n in range(len(offsets))]

    def step(w: Waves) -> None:
        at, wave = _shared_place(w, address, machine)
        made = []
        for offset in offsets:
            places = machine.shared.place(at + offset, size, machine.lane_slot[w.active])
            machine.count_banks(w, at + offset, size, ins.name)
            made.append(machine.shared.load(places, size, wave))
        for target, (values, undefined) in zip(targets, made, strict=True):
            _put(w, target, kind, size, values, undefined)

    return step


def _shared_store(ins: Instruction, kind: str, size: int, offsets: list[int], machine: Machine) -> Step:
    address = needs_register(ins.operands[0], "v")
    registers = [needs_register(text, "v") for text in ins.operands[1 : 1 + len(offsets)]]

    def step(w: Waves) -> None:
        at, wave = _shared_place(w, address, machine)
        for offset, register in zip(offsets, registers, strict=True):
            places = machine.shared.place(at + offset, size, machine.lane_slot[w.active])
            machine.count_banks(w, at + offset, size, ins.name)
            clean = w.bad.isdisjoint(register.keys())
            undefined = None if clean else _get(w, register, kind, size, undefined=True)
            machine.shared.store(places, _get(w, register, kind, size), undefined, wave)

    return step


def _shared_place(w: Waves, address: Register, machine: Machine) -> tuple[np.ndarray, np.ndarray]:
    w.require_vector(address.index, 1, "an address in shared memory")
    return w.v[address.index][w.active].astype(np.int64), machine.lane_wave[w.active]


def _transposed(ins: Instruction, machine: Machine) -> Step:
    """ds_read_b64_tr_b16 (gfx950).

    Sixteen lanes read a matrix of 4 rows by 16 halves: lanes 4j to 4j + 3 hold row j. Lane i gets column i.
    So do ROCm/rocm-systems pull request 10175 (halfword n of lane l comes from lane l // 4 % 4 + 4 * n of its
    sixteen, halfword l % 4), and so draws it the discussion of triton-lang/triton pull request 8525 (lane 0
    gets one row of what lanes 0, 4, 8 and 12 read).
    """
    ins.only("offset")
    target, address = needs_register(ins.operands[0], "v"), needs_register(ins.operands[1], "v")
    offset = ins.number("offset")

    def turn(values: np.ndarray) -> np.ndarray:
        halves = values.view(np.uint16).reshape(-1, 4, 16)  # group, row, column
        return np.ascontiguousarray(halves.transpose(0, 2, 1)).reshape(-1, 4).view("V8")[:, 0]

    def step(w: Waves) -> None:
        if not w.active[w.selected].all():
            raise Unknown(f"{ins.text} with lanes off")
        at, wave = _shared_place(w, address, machine)
        places = machine.shared.place(at + offset, 8, machine.lane_slot[w.active])
        machine.count_banks(w, at + offset, 8, ins.name)
        values, undefined = machine.shared.load(places, 8, wave)
        _put(w, target, "b64", 8, turn(values), turn(undefined))

    return step
