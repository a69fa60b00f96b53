"""What a GPU code object says about its kernels: registers, shared memory, spills.

An AMD code object is an ELF file with a note of the vendor ``AMDGPU``, type 32, in MessagePack. The reader
knows as much of both formats as that needs and trusts nothing in them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from attn_core.errors import needs

_MAGIC = b"\x7fELF\x02\x01"  # 64 bit, little-endian
_AMDGPU = 224
_HEADER_BYTES, _SEGMENT_BYTES = 64, 56
_PT_NOTE, _METADATA = 4, 32
_VENDOR = b"AMDGPU\0"
_DEEPEST = 32
_COUNTS = {
    "vgpr": ".vgpr_count",
    "sgpr": ".sgpr_count",
    "lds": ".group_segment_fixed_size",
    "scratch": ".private_segment_fixed_size",
    "vgpr_spills": ".vgpr_spill_count",
    "sgpr_spills": ".sgpr_spill_count",
    "kernarg": ".kernarg_segment_size",
    "threads": ".max_flat_workgroup_size",
}


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel takes.

    Attributes:
        vgpr: Vector registers of a lane, accumulation registers included.
        agpr: Accumulation registers among them.
        sgpr: Scalar registers of a wave.
        lds: Shared memory of a block, bytes.
        scratch: Private memory of a lane, bytes.
        vgpr_spills: Vector registers kept in memory.
        sgpr_spills: Scalar registers kept in lanes or memory.
        kernarg: Argument block, bytes.
        threads: Threads of a block, at most.
    """

    vgpr: int
    agpr: int
    sgpr: int
    lds: int
    scratch: int
    vgpr_spills: int
    sgpr_spills: int
    kernarg: int
    threads: int


@dataclass(frozen=True, slots=True)
class CodeObject:
    """A code object's target and kernels.

    Attributes:
        arch: Processor, such as ``gfx942``, without feature suffixes.
        kernels: Resources by kernel name.
    """

    arch: str
    kernels: Mapping[str, Resources]


def read(data: bytes) -> CodeObject:
    """Read the metadata of a linked code object.

    Args:
        data: The whole file.

    Raises:
        ValueError: It is no AMD GPU code object, or is damaged.
    """
    try:
        found = _metadata(data)
        kernels = {_text(entry, ".name"): _resources(entry) for entry in _entries(found)}
        target = _text(found, "amdhsa.target")
    except (struct.error, OverflowError, UnicodeDecodeError, TypeError) as err:
        raise _bad(f"damaged: {err}") from err
    if "--" not in target:
        raise _bad(f"target {target!r}")
    return CodeObject(target.rpartition("--")[2].partition(":")[0], kernels)


def resources(data: bytes) -> Mapping[str, Resources]:
    """Return the resources of every kernel of a code object, by kernel name.

    Args:
        data: The whole file.

    Raises:
        ValueError: It is no AMD GPU code object, or is damaged.
    """
    return read(data).kernels


def _bad(got: str) -> ValueError:
    return ValueError(needs("code object", "an AMD GPU ELF file with metadata", got, "fa2.code-object"))


def _metadata(data: bytes) -> Mapping[object, object]:
    if data[: len(_MAGIC)] != _MAGIC or len(data) < _HEADER_BYTES:
        raise _bad(f"{len(data)} bytes that begin with {data[:4]!r}")
    if struct.unpack_from("<H", data, 18)[0] != _AMDGPU:
        raise _bad("an ELF file for another machine")
    for kind, vendor, body in _notes(data):
        if vendor == _VENDOR and kind == _METADATA:
            value = _Reader(body).value()
            if isinstance(value, dict):
                return value
            raise _bad("metadata that is no map")
    raise _bad("no metadata")


def _notes(data: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield type, vendor and body of every note."""
    (table,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    if count and size < _SEGMENT_BYTES:
        raise _bad(f"program headers of {size} bytes")
    for n in range(count):
        kind, _, at = struct.unpack_from("<IIQ", data, table + n * size)
        (length,) = struct.unpack_from("<Q", data, table + n * size + 32)
        if kind != _PT_NOTE:
            continue
        end = at + length
        if end > len(data):
            raise _bad("notes behind the end of the file")
        while at + 12 <= end:
            name_bytes, body_bytes, note = struct.unpack_from("<III", data, at)
            name, body = at + 12, at + 12 + _padded(name_bytes)
            at = body + _padded(body_bytes)
            if body + body_bytes > end:
                raise _bad("a note behind its segment's end")
            yield note, data[name : name + name_bytes], data[body : body + body_bytes]


def _padded(size: int) -> int:
    return (size + 3) & ~3


def _entries(metadata: Mapping[object, object]) -> list[Mapping[object, object]]:
    found = metadata.get("amdhsa.kernels")
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise _bad("no list of kernels")
    return found


def _text(entry: Mapping[object, object], key: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str):
        raise _bad(f"{key} = {value!r}")
    return value


def _resources(entry: Mapping[object, object]) -> Resources:
    # Compilers leave out .agpr_count where the target has none.
    counts = {name: _count(entry, key) for name, key in _COUNTS.items()}
    return Resources(agpr=_count(entry, ".agpr_count") if ".agpr_count" in entry else 0, **counts)


def _count(entry: Mapping[object, object], key: str) -> int:
    value = entry.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _bad(f"{key} = {value!r}")
    return value


class _Reader:
    """MessagePack, without extension types."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def value(self, depth: int = 0) -> object:
        if depth > _DEEPEST:
            raise _bad("metadata nested too deep")
        tag = self._number(1)
        for kinds, read in ((_SMALL, self._small), (_SIZED, self._sized), (_PLAIN, self._plain)):
            if tag in kinds:
                return read(tag, depth)
        raise _bad(f"MessagePack tag {tag:#x}")

    def _small(self, tag: int, depth: int) -> object:
        """Values whose size or number is in the tag."""
        if tag < 0x80:
            return tag
        if tag < 0x90:
            return self._map(tag & 15, depth)
        if tag < 0xA0:
            return self._list(tag & 15, depth)
        return self._string(tag & 31) if tag < 0xC0 else tag - 256

    def _sized(self, tag: int, depth: int) -> object:
        """Values that a size precedes."""
        kind, width = _SIZED[tag]
        size = self._number(width)
        if kind == "map":
            return self._map(size, depth)
        if kind == "list":
            return self._list(size, depth)
        return self._string(size) if kind == "text" else self._take(size)

    def _plain(self, tag: int, depth: int) -> object:
        kind, width = _PLAIN[tag]
        if kind == "float":
            return struct.unpack(">f" if width == 4 else ">d", self._take(width))[0]
        if kind == "int":
            return int.from_bytes(self._take(width), "big", signed=True)
        return self._number(width) if kind == "uint" else {"none": None, "no": False, "yes": True}[kind]

    def _map(self, size: int, depth: int) -> dict[object, object]:
        return {self.value(depth + 1): self.value(depth + 1) for _ in range(size)}

    def _list(self, size: int, depth: int) -> list[object]:
        return [self.value(depth + 1) for _ in range(size)]

    def _string(self, size: int) -> str:
        return self._take(size).decode()

    def _number(self, width: int) -> int:
        return int.from_bytes(self._take(width), "big")

    def _take(self, size: int) -> bytes:
        found = self._data[self._at : self._at + size]
        if len(found) != size:
            raise _bad("metadata cut short")
        self._at += size
        return found


_SMALL = frozenset((*range(0xC0), *range(0xE0, 0x100)))
_SIZED = {
    0xC4: ("bytes", 1), 0xC5: ("bytes", 2), 0xC6: ("bytes", 4),
    0xD9: ("text", 1), 0xDA: ("text", 2), 0xDB: ("text", 4),
    0xDC: ("list", 2), 0xDD: ("list", 4), 0xDE: ("map", 2), 0xDF: ("map", 4),
}  # fmt: skip
_PLAIN = {
    0xC0: ("none", 0), 0xC2: ("no", 0), 0xC3: ("yes", 0), 0xCA: ("float", 4), 0xCB: ("float", 8),
    0xCC: ("uint", 1), 0xCD: ("uint", 2), 0xCE: ("uint", 4), 0xCF: ("uint", 8),
    0xD0: ("int", 1), 0xD1: ("int", 2), 0xD2: ("int", 4), 0xD3: ("int", 8),
}  # fmt: skip
