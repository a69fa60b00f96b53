"""Device memory of a plan's index arrays.

Eager plans each get a fresh block, so a plan in flight never loses its arrays to the next one. A
CUDA-graph wrapper keeps one block with fixed offsets, plus the caller's own buffers, for its life:
a replan changes bytes and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from .checking import dense

_ALIGN = 4  # int32 words: every array starts on 16 bytes
_PADS = tuple(torch.zeros(n, dtype=torch.int32, device="cpu") for n in range(_ALIGN))

Layout = tuple[tuple[str, int], ...]
"""Names of the arrays and their sizes in int32 words."""

Copy = tuple[torch.Tensor, torch.Tensor]
"""Destination and source."""


class Image(Mapping[str, torch.Tensor]):
    """Named int32 arrays in one block, and others beside it; views are made when first asked for.

    Attributes:
        block: Memory of the packed arrays.
    """

    __slots__ = ("_made", "_places", "block")

    def __init__(
        self,
        block: torch.Tensor,
        places: Mapping[str, tuple[int, int]],
        beside: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.block = block
        self._places = places
        self._made = dict(beside) if beside else {}

    def __getitem__(self, name: str) -> torch.Tensor:
        found = self._made.get(name)
        if found is None:
            start, words = self._places[name]
            found = self._made[name] = self.block.narrow(0, start, words)
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._places or name in self._made

    def __iter__(self) -> Iterator[str]:
        return iter({**self._places, **self._made})

    def __len__(self) -> int:
        return len(self._places.keys() | self._made.keys())


def place(layout: Layout) -> tuple[dict[str, tuple[int, int]], int]:
    """Return (start, words) of each array of a layout, and the words of the block."""
    places: dict[str, tuple[int, int]] = {}
    at = 0
    for name, words in layout:
        places[name] = (at, words)
        at += words + -words % _ALIGN
    return places, at


def pack(parts: Mapping[str, torch.Tensor], device: torch.device) -> Image:
    """Lay int32 CPU arrays out in one new host block; pinned when the device is a GPU.

    torch's pinned allocator does not hand a block out again before the copy that reads it has
    finished, so the next plan cannot overwrite an upload in flight.
    """
    pieces: list[torch.Tensor] = []
    for part in parts.values():
        pieces.append(part)
        pad = -part.numel() % _ALIGN
        if pad:
            pieces.append(_PADS[pad])
    places, words = place(tuple((name, part.numel()) for name, part in parts.items()))
    if device.type == "cuda":
        block = torch.empty(words, dtype=torch.int32, device="cpu", pin_memory=True)
        return Image(torch.cat(pieces, out=block), places)
    return Image(torch.cat(pieces), places)


def upload(packed: Image, device: torch.device, beside: Mapping[str, torch.Tensor] | None = None) -> Image:
    """Bring a packed block to fresh memory of the device in one copy (none on the CPU)."""
    block = packed.block if device.type == "cpu" else packed.block.to(device, non_blocking=True)
    return Image(block, packed._places, beside)


@dataclass(slots=True)
class GraphArena:
    """Fixed memory of a CUDA-graph wrapper.

    Attributes:
        staged: Own memory, the landing place of the one upload.
        image: What kernels read: the caller's buffer where there is one, else own memory.
        bound: The caller's buffers.
    """

    staged: Image
    image: Mapping[str, torch.Tensor]
    bound: Mapping[str, torch.Tensor]

    @classmethod
    def make(cls, layout: Layout, bound: Mapping[str, torch.Tensor], device: torch.device) -> GraphArena:
        """Allocate for fixed sizes; every address stays the same from here on."""
        places, words = place(layout)
        staged = Image(torch.zeros(words, dtype=torch.int32, device=device), places)
        return cls(staged, {**staged, **bound}, bound)

    def writes(self, packed: Image, parts: Mapping[str, torch.Tensor]) -> list[Copy]:
        """Return the copies that bring a new plan in, in order.

        Args:
            packed: The host arrays in layout order; only the last of them may be shorter than its
                place, so that one copy of a prefix uploads them all.
            parts: All new arrays, those on the device too.
        """
        block = self.staged.block
        copies: list[Copy] = []
        if packed.block.numel():
            copies.append((block[: packed.block.numel()], packed.block))
        for name, part in parts.items():
            if name in packed and name not in self.bound:
                continue
            if name in self.bound:
                dense(name, self.bound[name], "core.graph-buffer")
            where = self.image[name][: part.numel()]
            source = self.staged[name][: part.numel()] if name in packed else part
            if source.data_ptr() != where.data_ptr():
                copies.append((where, source))
        return copies
