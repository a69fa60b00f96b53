"""Memory behind the tensors of a case: contiguous blocks, strided views of them, and gaps between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..cache_view import CacheView

Cache = tuple[torch.Tensor, torch.Tensor] | torch.Tensor | CacheView
_ODD_STRIDE = 7
GUARD = 256
"""Bytes before and behind a workspace; a multiple of 16."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Keys and values.

    Attributes:
        k: View in the caller's layout.
        v: View in the caller's layout.
        cache: What the caller hands over: the pair, one tensor, or a CacheView.
        blocks: Memory behind them.
    """

    k: torch.Tensor
    v: torch.Tensor
    cache: Cache
    blocks: tuple[torch.Tensor, ...]


def lay_kv(
    form: str,
    k_shape: Sequence[int],
    v_shape: Sequence[int],
    heads_at: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Pair:
    """Allocate keys and values in one of the forms of ``world.py``. ``heads_at`` is the head axis."""

    def new(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    ks, vs = tuple(k_shape), tuple(v_shape)
    if form in ("five", "pool"):
        front = (2,) if form == "five" else (2, 2)
        whole = new(ks[0], *front, *ks[1:])
        cache: Cache = whole if form == "five" else CacheView(whole, (1, 1, 1, 0), (1, 1, 1, 1))
        k, v = whole.unbind(1) if form == "five" else whole[:, 1].unbind(1)
        return Pair(k, v, cache, (whole,))
    if form == "fused":
        return _fused(new, ks, vs, heads_at)
    if form == "apart":
        k_block, v_block = new(*ks[:-1], ks[-1] + 8), new(vs[1], vs[0], *vs[2:])
        k, v = k_block[..., : ks[-1]], v_block.transpose(0, 1)
    elif form == "thin":
        k_block, v_block = new(*ks, 2), new(*vs, 2)
        k, v = k_block[..., 0], v_block[..., 0]
    else:
        k_block, v_block = new(*ks), new(*vs)
        k, v = (odd(k_block), odd(v_block)) if form == "ones" else (k_block, v_block)
    return Pair(k, v, (k, v), (k_block, v_block))


def _fused(new: object, ks: tuple[int, ...], vs: tuple[int, ...], heads_at: int) -> Pair:
    """Slices along the head axis: of one block if sizes allow, of one each if not."""
    assert callable(new)
    heads = ks[heads_at]

    def wide(shape: tuple[int, ...], count: int) -> torch.Tensor:
        block = new(*shape[:heads_at], count, *shape[heads_at + 1 :])
        assert isinstance(block, torch.Tensor)
        return block

    if ks == vs:
        whole = wide(ks, 2 * heads + 1)
        k, v = whole.narrow(heads_at, 0, heads), whole.narrow(heads_at, heads, heads)
        return Pair(k, v, (k, v), (whole,))
    blocks = (wide(ks, heads + 1), wide(vs, heads + 1))
    k, v = (block.narrow(heads_at, 0, heads) for block in blocks)
    return Pair(k, v, (k, v), blocks)


def lay_q(
    form: str, rows: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate q ``[rows, heads, dim]``; returns the view and the block behind it."""
    shape = {"fused": (rows, heads + 3, dim), "spread": (heads, rows, 2 * dim)}.get(form, (rows, heads, dim))
    block = torch.empty(shape, dtype=dtype, device=device)
    if form == "fused":
        return block[:, :heads], block
    if form == "spread":
        return block.transpose(0, 1)[..., ::2], block
    return (odd(block) if form == "ones" else block), block


def odd(block: torch.Tensor) -> torch.Tensor:
    """Return the same elements with a meaningless stride wherever a dimension has size 1."""
    strides = [_ODD_STRIDE if size == 1 else s for size, s in zip(block.shape, block.stride(), strict=True)]
    return block.as_strided(block.shape, strides)


def lay_out(kind: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate an output full of NaN; ``strided`` leaves gaps and puts another axis outermost."""
    if kind != "strided":
        return torch.full(tuple(shape), torch.nan, dtype=dtype, device=device)
    first, second, *rest = shape
    if rest:
        rest[-1] += 8
        block = torch.full((second, first, *rest), torch.nan, dtype=dtype, device=device)
        return block.transpose(0, 1)[..., : shape[-1]]
    return torch.full((second, first), torch.nan, dtype=dtype, device=device).T


def workspace_of(size: int, byte: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a workspace of exactly ``size`` bytes, each ``byte``, and the guarded block around it."""
    block = torch.full((size + 2 * GUARD,), byte, dtype=torch.uint8, device=device)
    return block[GUARD : GUARD + size], block


def guards_hold(block: torch.Tensor, byte: int) -> bool:
    """Return whether nothing was written before or behind a workspace."""
    return bool((block[:GUARD] == byte).all()) and bool((block[-GUARD:] == byte).all())


def fill(block: torch.Tensor, value: float) -> None:
    """Fill memory with a value as its type stores it (a type without infinity stores its NaN)."""
    if block.dtype.itemsize == 1 and block.is_floating_point():
        byte = int(torch.tensor([value]).to(block.dtype).view(torch.uint8))
        block.view(torch.uint8).fill_(byte)
    else:
        block.fill_(value)


def put(view: torch.Tensor, at: object, data: torch.Tensor) -> None:
    """Write ``view[at] = data`` bit for bit; indexing knows no float8, so those go as bytes."""
    data = data.to(view.device)
    if view.dtype.itemsize == 1:
        view, data = view.view(torch.uint8), data.view(torch.uint8)
    view[at] = data  # type: ignore[index]


def as_bytes(t: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor's elements as bytes, for a comparison in which NaN equals NaN."""
    # A copy, since a lone element counts as contiguous whatever its stride.
    flat = t.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.zeros(0, dtype=torch.uint8)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have equal shape, type and bits."""
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    return torch.equal(as_bytes(a).cpu(), as_bytes(b).cpu())
