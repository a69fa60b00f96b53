"""Every way in which a paged cache reaches a layer: who slices it, where, and out of what allocation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from attn_core import CacheView

GUARD = 64
"""Elements before and after every allocation, so that none starts at storage offset 0."""
POISON = 7e7

Made = Literal["given", "graph", "bytes"]
Allocation = tuple[torch.Tensor, torch.Tensor]
"""The whole of it, guard bands included, and the tensor inside."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One way.

    Attributes:
        shapes: Shapes of the allocations; ``P`` stands for the number of pages.
        outside: What the caller does before the compiled region; gives the region's arguments.
        inside: What happens inside it; gives what append and run() take.
        made: ``given`` when no view is made in the graph, ``graph`` when one is, ``bytes`` when one of them
            changes the dtype.
        order: NHD or HND.
        stored: Hand the caller bytes instead of elements.
    """

    shapes: tuple[tuple[int | str, ...], ...]
    outside: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]
    inside: Callable[..., Any]
    made: Made = "given"
    order: str = "NHD"
    stored: bool = False


_ONE: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]] = lambda b: tuple(b)  # noqa: E731


def _pair(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return k, v


def _same(x: Any) -> Any:
    return x


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x[0], x[1]


def _columns(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x[:, 0], x[:, 1]


def _typed(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.float32).view(2, -1, *_TAIL)


_TAIL = (4, 2, 16)
"""Page size, heads and head dimension; HND swaps the first two."""
_P, _PAGE = "P", ("P", *_TAIL)
_HND = (2, 4, 16)

LAYOUTS: dict[str, Layout] = {
    "separate": Layout((_PAGE, _PAGE), _ONE, _pair),
    "kv[:,i]": Layout(((_P, 2, *_TAIL),), lambda b: _columns(b[0]), _pair),
    "kv[i]": Layout(((2, *_PAGE),), lambda b: _halves(b[0]), _pair),
    "unbind": Layout(((2, *_PAGE),), lambda b: b[0].unbind(0), _pair),
    "one": Layout(((_P, 2, *_TAIL),), _ONE, _same),
    "one of pool": Layout(((3, _P, 2, *_TAIL),), lambda b: (b[0][1],), _same),
    "pool[1,i]": Layout(((2, 2, *_PAGE),), lambda b: _halves(b[0][1]), _pair),
    "pool[i,1]": Layout(((2, 2, *_PAGE),), lambda b: (b[0][0, 1], b[0][1, 1]), _pair),
    "HND separate": Layout(((_P, *_HND), (_P, *_HND)), _ONE, _pair, order="HND"),
    "HND kv[i]": Layout(((2, _P, *_HND),), lambda b: _halves(b[0]), _pair, order="HND"),
    "HND one": Layout(((_P, 2, *_HND),), _ONE, _same, order="HND"),
    "bytes": Layout(((2, *_PAGE),), lambda b: _halves(_typed(b[0])), _pair, stored=True),
    "view one": Layout(((_P, 2, *_TAIL),), _ONE, lambda x: CacheView.split(x, 1)),
    "view pool": Layout(((2, _P, 2, *_TAIL),), _ONE, lambda x: CacheView.split(x, 1, (0, 1))),
    "view layer": Layout(((2, _P, 2, *_TAIL),), _ONE, lambda x: CacheView(x[0], (1, 0), (1, 1)), "graph"),
    "view halves": Layout(((2, 3, *_PAGE),), _ONE, lambda x: CacheView(x, (0, 0, 0, 2), (0, 1, 0, 2))),
    "kv[:,i] inside": Layout(((_P, 2, *_TAIL),), _ONE, _columns, "graph"),
    "kv[i] inside": Layout(((2, *_PAGE),), _ONE, _halves, "graph"),
    "unbind inside": Layout(((2, *_PAGE),), _ONE, lambda x: x.unbind(0), "graph"),
    "pool[1] columns inside": Layout(((2, _P, 2, *_TAIL),), lambda b: (b[0][1],), _columns, "graph"),
    "pool[1] halves inside": Layout(((2, 2, *_PAGE),), lambda b: (b[0][1],), _halves, "graph"),
    "pool pair inside": Layout(((2, _P, 2, *_TAIL),), _ONE, lambda x: _columns(x[1]), "graph"),
    "pool one inside": Layout(((2, _P, 2, *_TAIL),), _ONE, lambda x: x[1], "graph"),
    "HND columns inside": Layout(((_P, 2, *_HND),), _ONE, _columns, "graph", order="HND"),
    "bytes inside": Layout(((2, *_PAGE),), _ONE, lambda x: _halves(_typed(x)), "bytes", stored=True),
}


def allocate(layout: Layout, pages: int, device: torch.device) -> list[Allocation]:
    """Allocate random caches inside poisoned memory; uses torch's generator."""
    made = []
    for shape in layout.shapes:
        size = torch.Size(pages if n == "P" else int(n) for n in shape)
        whole = torch.full((size.numel() + 2 * GUARD,), POISON, device=device)
        inside = whole[GUARD:-GUARD]
        inside.copy_(torch.randn(size.numel()))
        made.append((whole, inside.view(torch.uint8) if layout.stored else inside.view(size)))
    return made
