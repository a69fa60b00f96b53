"""Attention in float64, spelled out request by request and head by head.

Shares no code with the reference backend, which it tests too: it is given the keys and values of each
request as they were made, before they went into pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..problem import AttentionProblem, MaskMode, PosEncoding

_F64 = torch.float64


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        q: ``[q_len, num_qo_heads, head_dim_qk]``.
        k: ``[kv_len, num_kv_heads, head_dim_qk]``.
        v: ``[kv_len, num_kv_heads, head_dim_vo]``.
        mask: ``[q_len, kv_len]`` bool, True is seen, or None.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Scales:
    """Per-tensor scales of q, k and v."""

    q: float = 1.0
    k: float = 1.0
    v: float = 1.0


def attention(
    p: AttentionProblem, requests: list[Request], scales: Scales
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out ``[rows, num_qo_heads, head_dim_vo]`` and lse ``[rows, num_qo_heads]`` (base 2), float64."""
    return each_request(_one, p, requests, scales)


def each_request(
    one: Callable[[AttentionProblem, Request, Scales], tuple[torch.Tensor, torch.Tensor]],
    p: AttentionProblem,
    requests: list[Request],
    scales: Scales,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what ``one`` gives for each request, rows behind rows."""
    outs = [torch.zeros(0, p.num_qo_heads, p.head_dim_vo, dtype=_F64)]
    lses = [torch.zeros(0, p.num_qo_heads, dtype=_F64)]
    for request in requests:
        out, lse = one(p, request, scales)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def _one(p: AttentionProblem, r: Request, scales: Scales) -> tuple[torch.Tensor, torch.Tensor]:
    q_len, kv_len = r.q.shape[0], r.k.shape[0]
    q, k, v = r.q.to(_F64) * scales.q, r.k.to(_F64) * scales.k, r.v.to(_F64)
    if p.pos_encoding is PosEncoding.ROPE_LLAMA:
        q = rotate(q, range(kv_len - q_len, kv_len), p)
        k = rotate(k, range(kv_len), p)
    hidden = ~visible(p, q_len, kv_len, r.mask)
    out = torch.zeros(q_len, p.num_qo_heads, p.head_dim_vo, dtype=_F64)
    lse = torch.full((q_len, p.num_qo_heads), -math.inf, dtype=_F64)
    if q_len == 0 or kv_len == 0:
        return out, lse
    for head in range(p.num_qo_heads):
        shared = head // (p.num_qo_heads // p.num_kv_heads)
        logits = q[:, head] @ k[:, shared].T * p.sm_scale
        if p.pos_encoding is PosEncoding.ALIBI:
            logits += slope(head, p.num_qo_heads) * _distance(q_len, kv_len)
        if p.logits_soft_cap > 0:
            logits = p.logits_soft_cap * torch.tanh(logits / p.logits_soft_cap)
        logits[hidden] = -math.inf
        total = torch.logsumexp(logits, 1)
        weights = torch.exp(logits - torch.where(total.isinf(), 0.0, total)[:, None])
        out[:, head] = weights @ v[:, shared] * scales.v
        lse[:, head] = total / math.log(2)
    return out, lse


def visible(p: AttentionProblem, q_len: int, kv_len: int, mask: torch.Tensor | None) -> torch.Tensor:
    """Return which keys each row sees, ``[q_len, kv_len]`` bool, cell by cell."""
    seen = torch.ones(q_len, kv_len, dtype=torch.bool)
    for row in range(q_len):
        own = kv_len - q_len + row  # the row's own position in the sequence
        if p.mask is MaskMode.CAUSAL:
            seen[row, max(0, own + 1) :] = False
        if p.window_left >= 0:
            seen[row, : max(0, own - p.window_left)] = False
    return seen if mask is None else seen & mask


def rotate(x: torch.Tensor, positions: range, p: AttentionProblem) -> torch.Tensor:
    """Turn element i of the first half and of the second, as one complex number, by its angle, in float64."""
    half = x.shape[-1] // 2
    turn = torch.tensor([p.rope_theta ** (-i / half) / p.rope_scale for i in range(half)], dtype=_F64)
    angle = torch.tensor(list(positions), dtype=_F64)[:, None] * turn
    spun = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([spun.real, spun.imag], -1)


def _distance(q_len: int, kv_len: int) -> torch.Tensor:
    return torch.arange(kv_len, dtype=_F64)[None] - torch.arange(q_len, dtype=_F64)[:, None]


def slope(head: int, heads: int) -> float:
    """Return an ALiBi slope: of the power of two below; of the one above for the heads left over."""
    near = 1 << (heads.bit_length() - 1)
    if head < near:
        return float(2.0 ** (-8.0 * (head + 1) / near))
    return float(2.0 ** (-4.0 * (2 * (head - near) + 1) / near))
