"""The tensors of one cell, and the calls that take turns on them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

import attn_core

from .cells import DIM, KV_HEADS, PAGE, Cell

Call = Callable[[int], torch.Tensor]
"""Runs on one of the copies, by number; returns ``[rows, num_qo_heads, head_dim]``."""
Pair = tuple[torch.Tensor, torch.Tensor]
_WORKSPACE = 64 << 20
_DRAWN = 1024
"""Pages that are drawn; a larger cache repeats them, shifted."""


class World:
    """Copies of a paged cache, queries, and the same keys and values without pages.

    Attributes:
        cell: The batch.
        caches: K and V of each copy, ``[pages, page_size, num_kv_heads, head_dim]``.
        q: ``[rows, num_qo_heads, head_dim]``.
        dense: Of each copy and group of requests, K and V ``[batch, num_kv_heads, kv_len, head_dim]``.
            Requests of one length are one group, others a group each.
    """

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.make = torch.Generator().manual_seed(0)
        total = sum(cell.pages)
        self.caches = [(self._random(total), self._random(total)) for _ in range(cell.copies)]
        self.ids = torch.randperm(total, generator=self.make)
        rows = cell.batch * cell.q_len
        self.q = torch.randn(rows, cell.num_qo_heads, DIM, generator=self.make).to(cell.dtype)
        self._groups = self._grouped()
        self.dense = [self.gather(cache) for cache in self.caches]
        self._masks = [self._mask(n) for n in self._lengths()]

    def _random(self, pages: int) -> torch.Tensor:
        made = torch.empty(pages, PAGE, KV_HEADS, DIM, dtype=self.cell.kv_dtype)
        block = torch.randn(min(pages, _DRAWN), PAGE, KV_HEADS, DIM, generator=self.make).to(made.dtype)
        for at, part in enumerate(
            torch.split(made, _DRAWN)
        ):  # drawing every page anew takes longer than the runs
            part.copy_(block.roll(at, 0)[: part.shape[0]])
        return made

    def _lengths(self) -> list[int]:
        return [n for n, _, _ in self._groups]

    def _grouped(self) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """Return keys per request, page ids and queries as torch wants them, of each group."""
        c = self.cell
        q = self.q.view(c.batch, c.q_len, c.num_qo_heads, DIM).transpose(1, 2)
        if len(set(c.kv_lens)) == 1:
            return [(c.kv_lens[0], self.ids, q.contiguous())]
        ids = torch.split(self.ids, list(c.pages))
        return [(n, ids[at], q[at : at + 1].contiguous()) for at, n in enumerate(c.kv_lens)]

    def _mask(self, kv_len: int) -> torch.Tensor | None:
        """Return what is added to logits; made ahead, and none where torch can tell by itself."""
        rows = self.cell.q_len
        if not self.cell.causal or rows == kv_len:
            return None
        hidden = torch.ones(rows, kv_len, dtype=torch.bool).triu(kv_len - rows + 1)
        return torch.zeros(rows, kv_len, dtype=self.cell.dtype).masked_fill_(hidden, float("-inf"))

    def gather(self, cache: Pair) -> list[Pair]:
        """Copy the pages of every request together: what torch's own attention needs first."""
        k, v = cache
        return [(self._joined(k, ids, n), self._joined(v, ids, n)) for n, ids, _ in self._groups]

    @staticmethod
    def _joined(cache: torch.Tensor, ids: torch.Tensor, kv_len: int) -> torch.Tensor:
        per = -(-kv_len // PAGE)
        rows = cache[ids].view(-1, per * PAGE, KV_HEADS, DIM)[:, :kv_len]
        return rows.transpose(1, 2)

    def sdpa(self, groups: list[Pair]) -> torch.Tensor:
        """Run torch's attention over each group; rows as fa2 returns them."""
        outs = []
        for (k, v), (n, _, q), mask in zip(groups, self._groups, self._masks, strict=True):
            square = self.cell.causal and self.cell.q_len == n
            out = scaled_dot_product_attention(
                q, k.to(q.dtype), v.to(q.dtype), attn_mask=mask, is_causal=square, enable_gqa=True
            )
            outs.append(out.transpose(1, 2).reshape(-1, *self.q.shape[1:]))
        return outs[0] if len(outs) == 1 else torch.cat(outs)


def fa2(world: World) -> Call:
    """Plan once; the copies have the same pages."""
    c = world.cell
    pages = torch.tensor([0, *c.pages])
    indptr, ids = pages.cumsum(0).int(), world.ids.int()
    last = torch.tensor([(n - 1) % PAGE + 1 for n in c.kv_lens], dtype=torch.int32)
    workspace = torch.empty(_WORKSPACE, dtype=torch.uint8)
    out = torch.empty_like(world.q)
    heads = (c.num_qo_heads, KV_HEADS, DIM, PAGE)
    wrapper: attn_core.BatchDecodeWithPagedKVCacheWrapper | attn_core.BatchPrefillWithPagedKVCacheWrapper
    if c.op == "prefill":
        qo = torch.arange(0, (c.batch + 1) * c.q_len, c.q_len, dtype=torch.int32)
        wrapper = attn_core.BatchPrefillWithPagedKVCacheWrapper(workspace, backend="fa2")
        wrapper.plan(qo, indptr, ids, last, *heads, causal=True, q_data_type=c.dtype, kv_data_type=c.kv_dtype)
    else:
        wrapper = attn_core.BatchDecodeWithPagedKVCacheWrapper(
            workspace, use_tensor_cores=True, backend="fa2"
        )
        wrapper.plan(
            indptr, ids, last, *heads, q_len_per_req=c.q_len, q_data_type=c.dtype, kv_data_type=c.kv_dtype
        )

    def run(copy: int) -> torch.Tensor:
        wrapper.run(world.q, world.caches[copy], out=out)
        return out

    return run


def read(world: World) -> Call:
    """Sum the bytes of keys and values: the rate at which this machine can read them."""

    def run(copy: int) -> torch.Tensor:
        k, v = world.caches[copy]
        return k.view(torch.float32).sum() + v.view(torch.float32).sum()

    return run
