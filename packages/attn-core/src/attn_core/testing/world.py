"""The tensors of a case: made request by request, then laid into memory the way the case says.

Forms: ``plain`` contiguous; ``five`` one cache ``[pages, 2, ...]``; ``pool`` one layer of a pool, as a
CacheView; ``apart`` k and v with unlike strides; ``fused`` slices of one tensor along the head axis;
``spread`` q with its heads and its head dimension spread out; ``ones`` odd strides where a dimension has
size 1; ``thin`` k and v strided over the head dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from ..problem import AttentionProblem, MaskMode, Op, PagedKV
from .axes import SINGLES
from .batches import Lengths
from .cases import Case
from .memory import Pair, fill, lay_kv, lay_q, put
from .oracle import Request, Scales
from .tables import Table, offsets, shared_tokens, table_of

SPARE_TOKENS = 5
"""Rows behind the last key of a ragged batch, which nobody owns."""
SCALES = Scales(q=0.75, k=1.25, v=1.5)
PEAKED = 3.0
"""Spread of the logits. A flat softmax would hide one wrong key in 500 behind any tolerance."""


@dataclass(slots=True)
class World:
    """Tensors and index arrays of one batch of one case.

    Attributes:
        problem: What is asked.
        lengths: The batch.
        table: Index arrays.
        requests: The same data, per request, for the oracle.
        scales: Scales that the run is given.
        q: ``[rows, num_qo_heads, head_dim_qk]``.
        kv: Keys and values in the caller's layout.
        blocks: Memory behind q, k and v, gaps and unowned slots included.
    """

    problem: AttentionProblem
    lengths: Lengths
    table: Table
    requests: list[Request]
    scales: Scales
    q: torch.Tensor
    kv: Pair
    blocks: tuple[torch.Tensor, ...] = field(repr=False)

    @property
    def k(self) -> torch.Tensor:
        """Keys as ``RunIO.k``."""
        return self._tokens_first(self.kv.k)

    @property
    def v(self) -> torch.Tensor:
        """Values as ``RunIO.v``."""
        return self._tokens_first(self.kv.v)

    def _tokens_first(self, t: torch.Tensor) -> torch.Tensor:
        # Pages keep their layout; contiguous keys reach a backend tokens first in either layout.
        return t.transpose(0, 1) if not self.problem.op.paged and self.problem.kv.order == "HND" else t

    def lay(self, spare: float = 0.0) -> None:
        """Write the requests' data; ``spare`` fills whatever belongs to no request, gaps included."""
        for block in self.blocks:
            fill(block, spare)
        row = 0
        k, v = self._slots(self.kv.k), self._slots(self.kv.v)
        for n, request in enumerate(self.requests):
            put(self.q, slice(row, row + request.q.shape[0]), request.q)
            row += request.q.shape[0]
            at = self._places(n, request.k.shape[0])
            put(k, at, request.k)
            put(v, at, request.v)

    def _slots(self, t: torch.Tensor) -> torch.Tensor:
        """View k or v as ``[pages, page_size, heads, dim]`` or ``[tokens, heads, dim]``."""
        if not self.problem.op.paged:
            return self._tokens_first(t)
        return t if self.problem.kv.order == "NHD" else t.transpose(1, 2)

    def _places(self, n: int, tokens: int) -> object:
        token = torch.arange(tokens)
        if not isinstance(self.problem.kv, PagedKV):
            return int(self.table.kv_indptr[n]) + token
        size = self.problem.kv.page_size
        pages = torch.tensor(self.table.pages[n], dtype=torch.int64)
        return pages[token // size], token % size

    def bytes(self) -> list[torch.Tensor]:
        """Return a copy of all memory behind q, k and v."""
        return [block.view(-1).view(torch.uint8).clone() if block.numel() else block for block in self.blocks]

    def alone(self, n: int) -> World:
        """Return a batch of one request over the same memory."""
        t, q_len, kv_len = self.table, self.lengths.q_len, self.lengths.kv_len
        row, kv = sum(q_len[:n]), self.kv
        first, end = int(t.kv_indptr[n]), int(t.kv_indptr[n + 1])
        if not self.problem.op.paged:
            axis = 0 if self.problem.kv.order == "NHD" else 1
            k, v = (part.narrow(axis, first, end - first) for part in (kv.k, kv.v))
            kv = Pair(k, v, (k, v), kv.blocks)
        lengths = Lengths("alone", (q_len[n],), (kv_len[n],), self.lengths.q_len_per_req)
        table = Table(
            offsets((q_len[n],)), offsets((end - first,)), t.kv_indices[first:end].clone(),
            t.kv_last_page_len[n : n + 1].clone(), [t.pages[n]], t.pool,
        )  # fmt: skip
        q = self.q[row : row + q_len[n]]
        return World(self.problem, lengths, table, [self.requests[n]], self.scales, q, kv, self.blocks)

    def mask(self) -> torch.Tensor | None:
        """Return the custom mask as ``custom_mask=`` takes it: flat, request after request."""
        if self.problem.mask is not MaskMode.CUSTOM:
            return None
        masks = [r.mask.reshape(-1) for r in self.requests if r.mask is not None]
        return torch.cat(masks) if masks else torch.zeros(0, dtype=torch.bool)

    def mask_bits(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mask as little-endian bits, each request on a byte border, and the byte offsets."""
        packed: list[int] = []
        ends = [0]
        for request in self.requests:
            assert request.mask is not None
            bits = request.mask.reshape(-1).tolist()
            for at in range(0, len(bits), 8):
                packed.append(sum(bit << n for n, bit in enumerate(bits[at : at + 8])))
            ends.append(len(packed))
        return torch.tensor(packed, dtype=torch.uint8), torch.tensor(ends, dtype=torch.int32)


def world_of(
    case: Case, lengths: Lengths | None = None, *, extreme: bool = False, pool: int | None = None
) -> World:
    """Make the tensors of a case; equal calls make equal ones.

    Args:
        case: The case.
        lengths: Another batch than the case's.
        extreme: Logits around -1e5 instead of around 0.
        pool: Pages of the cache, at least.
    """
    lengths = case.lengths if lengths is None else lengths
    p = case.problem
    table = table_of(lengths, p.page_size, pool=pool)
    make = torch.Generator().manual_seed(case.seed)
    requests = [
        _request(p, q, kv, make, extreme) for q, kv in zip(lengths.q_len, lengths.kv_len, strict=True)
    ]
    same = shared_tokens(lengths, p.page_size)
    if same:
        put(requests[1].k, slice(same), requests[0].k[:same])
        put(requests[1].v, slice(same), requests[0].v[:same])
    q, q_block = lay_q(case.form, sum(lengths.q_len), p.num_qo_heads, p.head_dim_qk, p.q_dtype, case.device)
    front, heads_at = _front(p, lengths, table)
    kv = lay_kv(
        case.form, (*front, p.head_dim_qk), (*front, p.head_dim_vo), heads_at, p.kv_dtype, case.device
    )
    scales = Scales() if case.scales == "none" else SCALES
    if p.op is Op.PREFILL_SINGLE:
        scales = Scales(1.0, scales.k, scales.v)  # this entry point takes no q_scale
    world = World(p, lengths, table, requests, scales, q, kv, (q_block, *kv.blocks))
    world.lay()
    return world


def _front(
    p: AttentionProblem, lengths: Lengths, table: Table
) -> tuple[tuple[int, int, int] | tuple[int, int], int]:
    """Return the shape of k without its head dimension, in the caller's layout, and the head axis."""
    heads = p.num_kv_heads
    if isinstance(p.kv, PagedKV):
        size = p.kv.page_size
        return ((table.pool, size, heads), 2) if p.kv.order == "NHD" else ((table.pool, heads, size), 1)
    tokens = sum(lengths.kv_len) + (0 if p.op in SINGLES else SPARE_TOKENS)
    return ((tokens, heads), 1) if p.kv.order == "NHD" else ((heads, tokens), 0)


def _request(p: AttentionProblem, q_len: int, kv_len: int, make: torch.Generator, extreme: bool) -> Request:
    q = torch.randn(q_len, p.num_qo_heads, p.head_dim_qk, generator=make)
    k = torch.randn(kv_len, p.num_kv_heads, p.head_dim_qk, generator=make)
    v = torch.randn(kv_len, p.num_kv_heads, p.head_dim_vo, generator=make)
    if extreme:
        # Logits of about -8192 * (8 .. 15). Equal keys have equal values, so how a tie is split is free.
        level = torch.randint(8, 16, (kv_len, p.num_kv_heads, 1), generator=make)
        k = -level.expand_as(k).float()
        q = torch.full_like(q, 2.0 ** round(math.log2(8192 / (p.head_dim_qk * p.sm_scale))))
        v = torch.randn(16, p.head_dim_vo, generator=make)[level[..., 0]]
    else:
        q *= PEAKED
    mask = None
    if p.mask is MaskMode.CUSTOM:
        mask = torch.rand(q_len, kv_len, generator=make) < 0.6
        mask[1::4] = False  # rows that see nothing
    return Request(q.to(p.q_dtype), k.to(p.kv_dtype), v.to(p.kv_dtype), mask)
