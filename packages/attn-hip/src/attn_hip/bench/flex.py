"""Compiled FlexAttention over a paged cache, as torch's own ``PagedAttention`` sets it up."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .cells import DIM, FLEX_PAGE, KV_HEADS
from .world import Call, World


def serves(world: World) -> bool:
    """Whether the cell is one that is asked of FlexAttention: it cannot multiply fp8."""
    c = world.cell
    return c.flex and c.dtype is c.kv_dtype


def paged(world: World) -> Call:
    """Compile for the cell's shape and return the call; the first one compiles, for seconds.

    Its pages are drawn at random too, and filled with the keys and values of the cell.
    """
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # at its limit of recompiles it would fall back to an unfused path in silence
    compiled = _compiled(flex_attention)
    c = world.cell
    batch, longest = c.batch, -(-max(c.kv_lens) // FLEX_PAGE) * FLEX_PAGE
    pages = [-(-n // FLEX_PAGE) for n in c.kv_lens]
    count = sum(pages)
    table = PagedAttention(count, FLEX_PAGE, batch, device="cpu")
    table.empty_pages = torch.randperm(count, generator=world.make).tolist()
    for request, kv_len in enumerate(c.kv_lens):
        table.reserve(torch.tensor(request), torch.tensor(kv_len))
    where = [table.page_table[request, :n].long() for request, n in enumerate(pages)]
    offset = torch.tensor(c.kv_lens) - c.q_len

    def seen(request: Any, _h: Any, row: Any, key: Any) -> Any:
        return key <= row + offset[request]

    logical = create_block_mask(
        seen, batch, 1, c.q_len, longest, device="cpu", BLOCK_SIZE=(FLEX_PAGE, FLEX_PAGE)
    )
    mask = table.convert_logical_block_mask(logical)
    caches = [
        tuple(_laid([row for pair in groups for row in pair[kind]], where, count) for kind in (0, 1))
        for groups in world.dense
    ]
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


def _laid(rows: Sequence[torch.Tensor], where: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """Spread the ``[heads, kv_len, dim]`` of each request over pages; returns ``[1, heads, tokens, dim]``."""
    made = torch.zeros(KV_HEADS, count, FLEX_PAGE, DIM, dtype=rows[0].dtype)
    for row, pages in zip(rows, where, strict=True):
        padded = torch.nn.functional.pad(row, (0, 0, 0, -row.shape[1] % FLEX_PAGE))
        made[:, pages] = padded.reshape(KV_HEADS, -1, FLEX_PAGE, DIM)
    return made.view(1, KV_HEADS, count * FLEX_PAGE, DIM)
