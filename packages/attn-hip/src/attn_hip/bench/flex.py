"""Compiled FlexAttention over a paged cache, as torch's own ``PagedAttention`` sets it up."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from .cells import DIM, FLEX_PAGE, KV_HEADS
from .world import Call, World


def serves(world: World) -> bool:
    """Whether the cell is one that is asked of FlexAttention: whole pages of its own, one length, no fp8."""
    c = world.cell
    whole = len(set(c.kv_lens)) == 1 and c.kv_lens[0] % FLEX_PAGE == 0
    return c.flex and whole and c.dtype is c.kv_dtype


def paged(world: World) -> Call:
    """Compile for the cell's shape and return the call; the first one compiles, for seconds.

    Its pages are drawn at random too, and filled with the keys and values of the cell.
    """
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # at its limit of recompiles it would fall back to an unfused path in silence
    compiled = _compiled(flex_attention)
    c = world.cell
    kv_len, batch = c.kv_lens[0], c.batch
    count = batch * kv_len // FLEX_PAGE
    table = PagedAttention(count, FLEX_PAGE, batch, device="cpu")
    order = torch.randperm(count, generator=world.make).tolist()
    table.empty_pages = order
    for request in range(batch):
        table.reserve(torch.tensor(request), torch.tensor(kv_len))
    where = table.page_table[:, : kv_len // FLEX_PAGE].long()
    offset = kv_len - c.q_len

    def seen(_b: Any, _h: Any, row: Any, key: Any) -> Any:
        return key <= row + offset

    logical = create_block_mask(
        seen, batch, 1, c.q_len, kv_len, device="cpu", BLOCK_SIZE=(FLEX_PAGE, FLEX_PAGE)
    )
    mask = table.convert_logical_block_mask(logical)
    caches = [tuple(_laid(part, where, count) for part in groups[0]) for groups in world.dense]
    q = world.q.view(batch, c.q_len, c.num_qo_heads, DIM).transpose(1, 2).contiguous()

    def run(copy: int) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the compiler, on what it has itself deprecated
            out = compiled(q, *caches[copy], block_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).reshape(world.q.shape)

    return run


def _compiled(call: Any) -> Callable[..., torch.Tensor]:
    done: Callable[..., torch.Tensor] = torch.compile(call, dynamic=False)
    return done


def _laid(rows: torch.Tensor, where: torch.Tensor, count: int) -> torch.Tensor:
    """Spread ``[batch, heads, kv_len, dim]`` over pages; returns ``[1, heads, tokens, dim]``."""
    made = torch.empty(KV_HEADS, count, FLEX_PAGE, DIM, dtype=rows.dtype)
    for request, pages in enumerate(where):
        made[:, pages] = rows[request].reshape(KV_HEADS, -1, FLEX_PAGE, DIM)
    return made.view(1, KV_HEADS, count * FLEX_PAGE, DIM)
