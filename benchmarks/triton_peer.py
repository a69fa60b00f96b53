"""A plain split-KV paged decode in Triton: what a kernel costs that is written in an afternoon."""
# ruff: noqa: ANN001, ANN202
# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

_STEP, _BLOCKS = 64, 132 * 4


@triton.jit
def _partial(
    q, k, v, starts, pages, lengths, out, lse, scale, heads, splits, page_stride, token_stride, head_stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    request, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + request)
    share = tl.cdiv(tl.cdiv(length, splits), STEP) * STEP
    end = tl.minimum((split + 1) * share, length)
    row, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    place = (request * heads + head * GROUP + row)[:, None]
    query = tl.load(q + place * DIM + dim[None, :], mask=row[:, None] < GROUP, other=0.0)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, DIM], tl.float32)
    first = tl.load(starts + request)
    for at in range(split * share, end, STEP):
        key = at + tl.arange(0, STEP)
        page = tl.load(pages + first + key // PAGE, mask=key < end, other=0).to(tl.int64)
        offset = (page * page_stride + key % PAGE * token_stride + head * head_stride)[:, None] + dim[None, :]
        keys = tl.load(k + offset, mask=key[:, None] < end, other=0.0)
        values = tl.load(v + offset, mask=key[:, None] < end, other=0.0)
        scores = tl.where(key[None, :] < end, tl.dot(query, tl.trans(keys)) * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(weights, 1)
        sums = sums * fade[:, None] + tl.dot(weights.to(values.dtype), values)
        top = higher
    to = (place * splits + split) * DIM + dim[None, :]
    tl.store(out + to, sums / tl.where(total == 0, 1.0, total)[:, None], mask=row[:, None] < GROUP)
    at_lse = (request * heads + head * GROUP + row) * splits + split
    tl.store(lse + at_lse, tl.where(total == 0, float("-inf"), top + tl.log2(total)), mask=row < GROUP)


@triton.jit
def _merge(partial, lse, out, splits, DIM: tl.constexpr, MOST: tl.constexpr):
    row, dim, split = tl.program_id(0), tl.arange(0, DIM), tl.arange(0, MOST)
    logs = tl.load(lse + row * splits + split, mask=split < splits, other=float("-inf"))
    weights = tl.exp2(logs - tl.max(logs, 0))
    weights = weights / tl.sum(weights, 0)
    at = (row * splits + split)[:, None] * DIM + dim[None, :]
    parts = tl.load(partial + at, mask=split[:, None] < splits, other=0.0)
    tl.store(out + row * DIM + dim, tl.sum(parts * weights[:, None], 0).to(out.dtype.element_ty))


def paged_decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, pages: torch.Tensor,
    lengths: torch.Tensor, longest: int,
) -> Callable[[], torch.Tensor]:  # fmt: skip
    """Return a call that attends; arguments as for a paged decode, with NHD pages."""
    batch, heads, dim = q.shape
    kv_heads = k.shape[2]
    splits = max(1, min(64, _BLOCKS // (batch * kv_heads), longest // (2 * _STEP)))
    if int(lengths.min()) < longest:
        splits = 16
    partial = torch.empty(batch, heads, splits, dim, dtype=torch.float32, device=q.device)
    lse = torch.empty(batch, heads, splits, dtype=torch.float32, device=q.device)
    out = torch.empty_like(q)
    first: Any = _partial
    second: Any = _merge

    def run() -> torch.Tensor:
        first[(batch, kv_heads, splits)](
            q, k, v, starts, pages, lengths, partial, lse, dim**-0.5 * 1.4426950408889634, heads, splits,
            *k.stride()[:3], GROUP=heads // kv_heads, ROWS=16, DIM=dim, PAGE=k.shape[1], STEP=_STEP,
            num_stages=3,
        )  # fmt: skip
        second[(batch * heads,)](partial, lse, out, splits, DIM=dim, MOST=triton.next_power_of_2(splits))
        return out

    return run
