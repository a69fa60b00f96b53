"""Arithmetic of the reference backend: gather, score, mask, soften, weigh. Padded and vectorised."""

from __future__ import annotations

import math

import torch

from .backend import AppendIO, DeviceImage, RunIO
from .problem import AttentionProblem, MaskMode, PagedKV, PosEncoding

LOG2E = math.log2(math.e)
_SCORE_ELEMENTS = 8 << 20
"""Bound on the scores held at once; longer prefills are computed in blocks of query rows."""

Group = tuple[int, int, int, int, int, int, int]
"""First and end request, padded query rows, padded and least keys, first and end row of the output."""


def attend(p: AttentionProblem, group: Group, image: DeviceImage, io: RunIO) -> None:
    """Write ``io.out`` and ``io.lse`` for one group of requests (see ``reference.Launch``)."""
    first, end, q_pad, kv_pad, kv_least, row0, row1 = group
    if end == first or q_pad == 0:
        return
    qo = image["qo_indptr"][first : end + 1].long()
    kv_len = image["kv_len"][first:end].long()
    q_len = qo[1:] - qo[:-1]
    k, v = gather_kv(p, first, end, (kv_pad, kv_least), kv_len, image, io)
    if p.pos_encoding is PosEncoding.ROPE_LLAMA:
        k = rope(k, torch.arange(kv_pad, device=k.device)[None], p)
    rows = _Rows(p, first, qo, q_len, kv_len, image, io)
    block = max(1, _SCORE_ELEMENTS // max(1, (end - first) * p.num_qo_heads * kv_pad))
    done = [rows.block(at, min(at + block, q_pad), k, v) for at in range(0, q_pad, block)]
    out = torch.cat([o for o, _ in done], 1).flatten(0, 1)
    lse = torch.cat([s for _, s in done], 1).flatten(0, 1)
    _store(io, out, lse, qo, q_pad, (row0, row1))


def _store(
    io: RunIO, out: torch.Tensor, lse: torch.Tensor, qo: torch.Tensor, q_pad: int, rows: tuple[int, int]
) -> None:
    """Copy the padded rows back to the packed ones without asking the device how many there are."""
    row0, row1 = rows if rows[0] >= 0 else (0, io.out.shape[0])
    at = torch.arange(row0, row1, device=out.device)
    request = (torch.searchsorted(qo, at, right=True) - 1).clamp(0, qo.numel() - 2)
    slot = (request * q_pad + at - qo[request]).clamp(0, out.shape[0] - 1)
    io.out[row0:row1].copy_(out[slot])
    if io.lse is not None:
        io.lse[row0:row1].copy_(lse[slot])


class _Rows:
    """The query side of one group."""

    def __init__(
        self,
        p: AttentionProblem,
        first: int,
        qo: torch.Tensor,
        q_len: torch.Tensor,
        kv_len: torch.Tensor,
        image: DeviceImage,
        io: RunIO,
    ) -> None:
        self.p, self.io, self.qo, self.q_len, self.kv_len = p, io, qo, q_len, kv_len
        self.device = io.q.device
        if p.mask is MaskMode.CUSTOM:
            bits = image["custom_mask"]
            self.bits = bits if bits.numel() else bits.new_zeros(1)  # no (row, key) at all: nothing to index
            self.bit_start = image["mask_indptr"][first : first + q_len.numel()].long()
        self.slopes = (
            alibi_slopes(p.num_qo_heads, self.device) if p.pos_encoding is PosEncoding.ALIBI else None
        )

    def block(
        self, start: int, stop: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of padded rows ``start..stop``: out ``[b, rows, Hq, Dvo]``, lse ``[b, rows, Hq]``."""
        p, b, n = self.p, self.q_len.numel(), stop - start
        i = torch.arange(start, stop, device=self.device)
        at = (self.qo[:-1, None] + i).clamp(0, max(0, self.io.q.shape[0] - 1))
        q = self.io.q[at].to(work_type(p)) * self.io.q_scale
        if p.pos_encoding is PosEncoding.ROPE_LLAMA:
            q = rope(q, (self.kv_len - self.q_len)[:, None] + i, p)
        g, h = p.gqa_group_size, p.num_kv_heads
        q = q.view(b, n, h, g, p.head_dim_qk).permute(0, 2, 3, 1, 4).reshape(b, h, g * n, p.head_dim_qk)
        x = torch.matmul(q, k.permute(0, 2, 3, 1)).view(b, h * g, n, -1)
        x = self._logits(x, i, k.shape[1])
        x = x.masked_fill_(~self._visible(i, k.shape[1])[:, None], -torch.inf).mul_(LOG2E)
        top = x.amax(-1, keepdim=True) if x.shape[-1] else x.new_full((*x.shape[:-1], 1), -torch.inf)
        # A row without a key has top = -inf; subtracting that would make NaN of nothing.
        x = torch.exp2(x.sub_(top.masked_fill(top == -torch.inf, 0)))
        total = x.sum(-1, keepdim=True)
        out = torch.matmul(x.view(b, h, g * n, -1), v.permute(0, 2, 1, 3)).view(b, h * g, n, -1)
        out = torch.where(total > 0, out / total, torch.where(total == 0, 0.0, out)) * self.io.v_scale
        lse = (top + torch.log2(total)).squeeze(-1)
        return out.transpose(1, 2), lse.transpose(1, 2)

    def _logits(self, x: torch.Tensor, i: torch.Tensor, keys: int) -> torch.Tensor:
        p = self.p
        x = x.mul_(p.sm_scale).mul_(self.io.k_scale)
        if self.slopes is not None:
            distance = torch.arange(keys, device=self.device) - i[:, None]
            x = x.add_(self.slopes[:, None, None] * distance)
        if p.logits_soft_cap > 0:
            x = torch.tanh(x / p.logits_soft_cap).mul_(p.logits_soft_cap)
        return x

    def _visible(self, i: torch.Tensor, keys: int) -> torch.Tensor:
        """Which keys each row sees, ``[b, rows, keys]``."""
        p, j = self.p, torch.arange(keys, device=self.device)
        seen = (j < self.kv_len[:, None, None]).expand(-1, i.numel(), -1)
        diagonal = (self.kv_len - self.q_len)[:, None, None] + i[:, None]
        if p.mask is MaskMode.CAUSAL:
            seen = seen & (j <= diagonal)
        if p.window_left >= 0:
            seen = seen & (j + p.window_left >= diagonal)
        if p.mask is MaskMode.CUSTOM:
            bit = i[:, None] * self.kv_len[:, None, None] + j
            byte = (self.bit_start[:, None, None] + (bit >> 3)).clamp(0, max(0, self.bits.numel() - 1))
            inside = (i < self.q_len[:, None])[..., None]
            seen = seen & inside & ((self.bits[byte] >> (bit & 7).to(torch.uint8)) & 1).bool()
        return seen


def gather_kv(
    p: AttentionProblem,
    first: int,
    end: int,
    keys: tuple[int, int],
    kv_len: torch.Tensor,
    image: DeviceImage,
    io: RunIO,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the group's keys and values as float ``[b, kv_pad, heads, dim]``.

    Values beyond a length are 0: a slot there may hold NaN, and a weight of 0 does not silence it. Keys
    there are whatever was found, since the mask replaces their logits.
    """
    kv_pad, kv_least = keys
    j = torch.arange(kv_pad, device=kv_len.device)
    valid = j < kv_len[:, None]
    start = image["kv_indptr"][first:end].long()[:, None]
    if not isinstance(p.kv, PagedKV):
        token = torch.where(valid, start + j, 0)
        return _both(p, (token,), valid, kv_least, io)
    entry = torch.where(valid, start + j // p.kv.page_size, 0)
    indices = image["kv_indices"]
    page = indices[entry].long() if indices.numel() else entry
    page = torch.where(valid, page, 0)
    slot = (j % p.kv.page_size).expand_as(page)
    at = (page, slot) if p.kv.order == "NHD" else (page, slice(None), slot)
    return _both(p, at, valid, kv_least, io)


def _both(
    p: AttentionProblem, at: tuple[object, ...], valid: torch.Tensor, kv_least: int, io: RunIO
) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (_take(t, at, valid, work_type(p)) for t in (io.k, io.v))
    v[:, kv_least:].masked_fill_(~valid[:, kv_least:, None, None], 0)
    return k, v


def _take(t: torch.Tensor, at: tuple[object, ...], valid: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if t.numel() == 0:
        heads = t.shape[1] if len(at) == 3 or t.ndim == 3 else t.shape[2]
        return t.new_zeros((*valid.shape, heads, t.shape[-1]), dtype=dtype)
    bits = t.view(torch.uint8) if t.dtype.itemsize == 1 else t  # indexing knows no float8
    found = bits[at].view(t.dtype)  # type: ignore[index]
    return found.to(dtype)


def work_type(p: AttentionProblem) -> torch.dtype:
    """Return the type all arithmetic of a problem is done in."""
    return torch.float64 if torch.float64 in (p.q_dtype, p.kv_dtype) else torch.float32


def rope(x: torch.Tensor, position: torch.Tensor, p: AttentionProblem) -> torch.Tensor:
    """Rotate halves, llama style: x ``[b, n, heads, dim]``, position broadcastable to ``[b, n]``."""
    half = x.shape[-1] // 2
    power = torch.arange(half, device=x.device, dtype=torch.float64) * 2 / x.shape[-1]
    frequency = p.rope_theta**-power / p.rope_scale
    angle = (position[..., None].to(torch.float64) * frequency)[..., None, :]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def alibi_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """Slopes of ALiBi: a geometric series, interleaved with a finer one past a power of two.

    Made on the device: a list brought over from the host would stall it, and end a capture.
    """
    near = 2 ** math.floor(math.log2(heads))
    n = torch.arange(heads, device=device, dtype=torch.float64)
    power = torch.where(n < near, -8 * (n + 1) / near, -4 * (2 * (n - near) + 1) / near)
    return torch.exp2(power).float()


def append(p: AttentionProblem, io: AppendIO) -> None:
    """Write row n of key and value to position ``positions[n]`` of request ``batch_indices[n]``."""
    assert isinstance(p.kv, PagedKV)
    batch, position = io.batch_indices.long(), io.positions.long()
    owner = batch.clamp(0, max(0, io.kv_indptr.numel() - 2))
    entry = io.kv_indptr[owner].long() + position // p.kv.page_size
    keep = (batch == owner) & (position >= 0) & (entry < io.kv_indptr[owner + 1])
    page = (
        io.kv_indices[entry.clamp(0, max(0, io.kv_indices.numel() - 1))].long()
        if io.kv_indices.numel()
        else entry
    )
    keep &= (page >= 0) & (page < io.k.shape[0]) & (page < io.v.shape[0])
    page, slot = torch.where(keep, page, 0), torch.where(keep, position % p.kv.page_size, 0)
    for cache, rows in ((io.k, io.key), (io.v, io.value)):
        place = cache if p.kv.order == "NHD" else cache.transpose(1, 2)
        _scatter(place, page, slot, rows.to(cache.dtype), keep)


def _scatter(
    cache: torch.Tensor, page: torch.Tensor, slot: torch.Tensor, rows: torch.Tensor, keep: torch.Tensor
) -> None:
    if rows.shape[0] == 0 or cache.numel() == 0:
        return
    if rows.dtype.itemsize == 1:
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
    # A skipped row repeats a kept one, or rewrites what is there when none is kept: asking the device
    # which rows to drop would stall the host and end a capture.
    n = torch.arange(keep.numel(), device=keep.device)
    stand_in = torch.where(keep, n, keep.to(torch.uint8).argmax())
    page, slot, rows = page[stand_in], slot[stand_in], rows[stand_in]
    cache[page, slot] = torch.where(keep.any(), rows, cache[page, slot])
