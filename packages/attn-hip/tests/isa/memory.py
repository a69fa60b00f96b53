"""Global and shared memory, with the checks that hardware does not make."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from .faults import OutOfBounds, Race, Unwaited

_NOBODY, _ATOMIC = 0, -1


def windows(data: np.ndarray, size: int) -> np.ndarray:
    """Return a view of bytes in which element i is the ``size`` bytes from i on."""
    return np.ndarray((max(0, len(data) - size + 1),), f"V{size}", data.data, strides=(1,))


@dataclass
class Region:
    """A registered buffer.

    Attributes:
        name: For messages.
        start: Address.
        data: Its bytes, shared with the owner.
        writable: Whether a kernel may write it.
        owner: Block + 1 that wrote each byte in this launch, or a mark.
        touched: Whether anything was written in this launch.
    """

    name: str
    start: int
    data: np.ndarray
    writable: bool
    owner: np.ndarray
    touched: bool = False

    @property
    def end(self) -> int:
        return self.start + len(self.data)


class Memory:
    """Global memory: the registered buffers and nothing else."""

    def __init__(self) -> None:
        self._regions: list[Region] = []

    def add(self, name: str, address: int, nbytes: int, *, writable: bool = True) -> None:
        """Register a buffer, which must outlive this object; ``address`` is the real one."""
        if nbytes == 0:
            return
        data = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)
        data.flags.writeable = True
        nobody = np.int32(_NOBODY)
        owner = np.full(nbytes, nobody) if writable else np.broadcast_to(nobody, nbytes)
        self._regions.append(Region(name, address, data, writable, owner))

    def remove(self, name: str) -> None:
        """Forget a buffer."""
        self._regions = [region for region in self._regions if region.name != name]

    def begin(self) -> None:
        """Start a launch: what earlier ones wrote belongs to nobody."""
        for region in self._regions:
            if region.touched:
                region.owner[:] = _NOBODY
                region.touched = False

    def load(self, address: np.ndarray, size: int, block: np.ndarray) -> np.ndarray:
        """Return ``[n]`` values of ``size`` bytes from ``[n]`` addresses; ``block`` reads."""
        out = np.empty(len(address), f"V{size}")
        for region, lanes, at in self._places(address, size, "load"):
            out[lanes] = windows(region.data, size)[at]
            if region.touched:
                self._check_owner(region, at, size, block[lanes], "reads")
        return out

    def store(self, address: np.ndarray, values: np.ndarray, block: np.ndarray) -> None:
        """Write ``[n]`` void values; of lanes with one address the last one stays."""
        size = values.dtype.itemsize
        for region, lanes, at in self._places(address, size, "store"):
            if not region.writable:
                raise OutOfBounds(f"store to {region.name}, which is read-only")
            self._check_owner(region, at, size, block[lanes], "writes")
            windows(region.data, size)[at] = values[lanes]
            for i in range(size):
                region.owner[at + i] = block[lanes] + 1
            region.touched = True
            # Blocks in lockstep may write one place by one instruction.
            self._check_owner(region, at, size, block[lanes], "writes")

    def atomic(self, address: int, size: int) -> np.ndarray:
        """Return the bytes of one atomic access, to be changed in place."""
        where = np.array([address], np.uint64)
        for region, _, at in self._places(where, size, "atomic"):
            if not region.writable:
                raise OutOfBounds(f"atomic on {region.name}, which is read-only")
            region.owner[at[0] : at[0] + size] = _ATOMIC
            return region.data[at[0] : at[0] + size]
        raise AssertionError

    def _places(
        self, address: np.ndarray, size: int, what: str
    ) -> list[tuple[Region, np.ndarray | slice, np.ndarray]]:
        """Return, per region that is meant, its lanes and their offsets."""
        if not len(address):
            return []
        low, high = int(address.min()), int(address.max()) + size
        for region in self._regions:
            if region.start <= low and high <= region.end:
                return [(region, slice(None), (address - np.uint64(region.start)).astype(np.int64))]
        found = []
        left = np.ones(len(address), bool)
        for region in self._regions:
            inside = (address >= np.uint64(region.start)) & (address <= np.uint64(max(0, region.end - size)))
            inside &= left
            if inside.any() and region.end - region.start >= size:
                found.append(
                    (
                        region,
                        np.flatnonzero(inside),
                        (address[inside] - np.uint64(region.start)).astype(np.int64),
                    )
                )
                left &= ~inside
        if left.any():
            raise OutOfBounds(self._lost(int(address[left][0]), size, what))
        return found

    def _lost(self, address: int, size: int, what: str) -> str:
        near = min(
            self._regions, key=lambda r: min(abs(address - r.start), abs(address - r.end)), default=None
        )
        if near is None:
            return f"{what} of {size} bytes at {address:#x}: nothing is registered"
        at = address - near.start
        return f"{what} of {size} bytes at byte {at} of {near.name}, which has {len(near.data)}"

    @staticmethod
    def _check_owner(region: Region, at: np.ndarray, size: int, block: np.ndarray, verb: str) -> None:
        for i in (0, size - 1):
            owner = region.owner[at + i]
            bad = (owner > 0) & (owner != block + 1)
            if bad.any():
                n = int(np.flatnonzero(bad)[0])
                raise Race(
                    f"block {int(block[n])} {verb} byte {int(at[n]) + i} of {region.name}, "
                    f"which block {int(owner[n]) - 1} wrote in this launch"
                )


class Shared:
    """Shared memory of the blocks that run together, 2 bytes a granule.

    A granule remembers which waves read and wrote it since the block's last barrier. Two waves may meet there
    only to read. Bytes remember whether they were ever written.
    """

    def __init__(self, blocks: int, size: int, waves: int) -> None:
        self.size = size
        self.pitch = max(16, (size + 15) & ~15)
        total = blocks * self.pitch
        self.data = np.full(total, 0xDE, np.uint8)
        self.undefined = np.full(total, 0xFF, np.uint8)
        self._waves = waves
        kind = np.uint16 if waves <= 8 else np.uint32
        self._half = np.iinfo(kind).bits // 2
        self._touched = np.zeros(total // 2, kind)
        self._pending = np.zeros(total // 2, np.int64)
        self._copies = False

    def barrier(self, block: int) -> None:
        """Let a block's waves pass a barrier."""
        granules = slice(block * self.pitch // 2, (block + 1) * self.pitch // 2)
        self._touched[granules] = 0

    def place(self, address: np.ndarray, size: int, block: np.ndarray) -> np.ndarray:
        """Check addresses within a block's memory and return offsets in :attr:`data`."""
        at = address.astype(np.int64)
        if len(at) and (int(at.max()) + size > self.size or int(at.min()) < 0):
            n = int(at.argmax())
            raise OutOfBounds(f"shared memory: {size} bytes at {int(at[n])} of {self.size}")
        if bool((at % min(size, 16)).any()) and size != 12:
            raise OutOfBounds(
                f"shared memory: {size} bytes at {int(at[at % min(size, 16) != 0][0])} are not aligned"
            )
        return at + block * self.pitch

    def load(self, at: np.ndarray, size: int, wave: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return ``[n]`` values and their undefined bits, ``size`` bytes each; ``wave`` is in its block."""
        self._touch(at, size, wave, writes=False)
        return windows(self.data, size)[at], windows(self.undefined, size)[at]

    def store(
        self, at: np.ndarray, values: np.ndarray, undefined: np.ndarray | None, wave: np.ndarray
    ) -> None:
        """Write ``[n]`` void values with their undefined bits."""
        size = values.dtype.itemsize
        self._touch(at, size, wave, writes=True)
        windows(self.data, size)[at] = values
        if undefined is None:
            undefined = np.zeros(len(at) * size, np.uint8).view(values.dtype)
        windows(self.undefined, size)[at] = undefined

    def copy_in(self, at: np.ndarray, values: np.ndarray, wave: np.ndarray, ticket: np.ndarray) -> None:
        """Write values that arrive later: until the wave has waited for its ticket nobody may touch them."""
        self.store(at, values, None, wave)
        for i in range(max(1, values.dtype.itemsize // 2)):
            self._pending[(at >> 1) + i] = ticket
        self._copies = True

    def arrive(self, tickets: np.ndarray) -> None:
        """Say that copies with these tickets have arrived."""
        if self._copies:
            self._pending[np.isin(self._pending, tickets)] = 0

    def waiting(self) -> np.ndarray:
        """Return the tickets of copies that are on their way."""
        return np.unique(self._pending[self._pending != 0]) if self._copies else np.empty(0, np.int64)

    def _touch(self, at: np.ndarray, size: int, wave: np.ndarray, *, writes: bool) -> None:
        granules = (at[:, None] >> 1) + np.arange(max(1, size // 2)) if size > 2 else at[:, None] >> 1
        if self._copies and self._pending[granules].any():
            raise Unwaited(f"shared memory at {int(at[0])} is touched before the copy into it was waited for")
        kind = self._touched.dtype.type
        for n in range(self._waves):
            mine = granules[wave == n] if self._waves > 1 else granules
            if not len(mine):
                continue
            before = self._touched[mine]
            write_bit, read_bit = kind(1 << n), kind(1 << (n + self._half))
            others = before & ~(write_bit | read_bit)
            if not writes:
                others &= kind((1 << self._half) - 1)
            if others.any():
                self._report(mine, others, n, writes=writes)
            self._touched[mine] = before | (write_bit if writes else read_bit)

    def _report(self, granules: np.ndarray, others: np.ndarray, wave: int, *, writes: bool) -> None:
        at = np.argwhere(others)[0]
        bits = int(others[tuple(at)])
        other = (bits & -bits).bit_length() - 1
        did = "wrote" if other < self._half else "read"
        place = int(granules[tuple(at)]) * 2 % self.pitch
        verb = "writes" if writes else "reads"
        raise Race(
            f"shared memory: wave {wave} {verb} byte {place}, which wave {other % self._half} {did} "
            "since the last barrier"
        )
