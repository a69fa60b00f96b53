"""Device memory of a plan's index arrays.

Eager plans each get a fresh block, so a plan in flight never loses its arrays to the next one. A
CUDA-graph wrapper keeps one block with fixed offsets, plus the caller's own buffers, for its life:
a replan changes bytes and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from .backend import DeviceImage

_ALIGN = 4  # int32 words: every array starts on 16 bytes
_PADS = tuple(torch.zeros(n, dtype=torch.int32) for n in range(_ALIGN))

Layout = tuple[tuple[str, int], ...]
"""Names of the arrays and their sizes in int32 words."""


def pack(parts: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """Lay int32 CPU arrays out in one block; pinned when the device is a GPU.

    The block is new each time, and torch's pinned allocator does not hand one out again before the
    copy reading it has finished: the next plan cannot overwrite an upload in flight.
    """
    pieces: list[torch.Tensor] = []
    for part in parts.values():
        pieces.append(part)
        pad = -part.numel() % _ALIGN
        if pad:
            pieces.append(_PADS[pad])
    if device.type != "cuda":
        return torch.cat(pieces) if pieces else _PADS[0].clone()
    words = sum(piece.numel() for piece in pieces)
    return torch.cat(pieces, out=torch.empty(words, dtype=torch.int32, pin_memory=True))


def views(block: torch.Tensor, layout: Sequence[tuple[str, int]]) -> dict[str, torch.Tensor]:
    """Name the arrays of a block laid out by :func:`pack`."""
    sizes: list[int] = []
    for _, words in layout:
        sizes += (words, -words % _ALIGN)
    whole = block[: sum(sizes)] if block.numel() != sum(sizes) else block
    pieces = whole.split_with_sizes(sizes)[::2]
    return {name: piece for (name, _), piece in zip(layout, pieces, strict=True)}


def upload(
    block: torch.Tensor, layout: Sequence[tuple[str, int]], device: torch.device
) -> dict[str, torch.Tensor]:
    """Bring a packed block to fresh memory of the device in one copy (none on the CPU)."""
    if device.type != "cpu":
        block = block.to(device, non_blocking=True)
    return views(block, layout)


@dataclass(slots=True)
class GraphArena:
    """Fixed memory of a CUDA-graph wrapper.

    Attributes:
        block: Own memory, int32. Arrays in the order of ``layout``.
        image: What kernels read: the caller's buffer where there is one, else a view of ``block``.
        bound: The caller's buffers.
        staged: Views of ``block``, the landing place of the one upload.
    """

    block: torch.Tensor
    image: DeviceImage
    bound: Mapping[str, torch.Tensor]
    staged: Mapping[str, torch.Tensor] = field(repr=False)

    @classmethod
    def make(cls, layout: Layout, bound: Mapping[str, torch.Tensor], device: torch.device) -> GraphArena:
        """Allocate for fixed sizes; every address stays the same from here on."""
        words = sum(size + -size % _ALIGN for _, size in layout)
        block = torch.zeros(words, dtype=torch.int32, device=device)
        staged = views(block, layout)
        return cls(block, {**staged, **bound}, bound, staged)

    def writes(
        self, packed: torch.Tensor, parts: Mapping[str, torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the (destination, source) copies that bring a new plan in, in order.

        Args:
            packed: The host arrays in layout order; only the last of them may be shorter than its
                place, so that one copy of a prefix uploads them all.
            parts: All new arrays, those on the device too.
        """
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        if packed.numel():
            copies.append((self.block[: packed.numel()], packed))
        for name, part in parts.items():
            place = self.image[name][: part.numel()]
            if part.device.type != "cpu" or self.block.device.type == "cpu":
                if (name in self.bound or part.device.type != "cpu") and part.data_ptr() != place.data_ptr():
                    copies.append((place, part))
            elif name in self.bound:
                copies.append((place, self.staged[name][: part.numel()]))
        return copies
