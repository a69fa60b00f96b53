"""What a second rounding of rotated queries and keys does to a result: a bound from the type's own step.

A matrix unit takes operands of the query's type, so a kernel that applies RoPE rounds q and k again after it
has turned them: each element by up to half a step of the type, which has a variance of step^2 / 12. To first
order, with weights w and x = s q . k, a result is then off by

    d out = sum_j w_j (v_j - out) dx_j      d lse = log2(e) sum_j w_j dx_j      dx_j = s (dq . k_j + q . dk_j)

The roundings are independent, so the variance of either sum is a sum of squares that can be written down. A
sum of terms that are bounded like this is sub-Gaussian: it exceeds ``SIGMAS`` = 6 standard deviations with a
probability below 2 exp(-18) = 3e-8 per element.
"""

from __future__ import annotations

import math

import torch

from ..problem import AttentionProblem, PosEncoding
from .oracle import Request, Scales, each_request, rotate, visible

SIGMAS = 6
_F64 = torch.float64
Pair = tuple[torch.Tensor, torch.Tensor]


def rounds_twice(p: AttentionProblem) -> bool:
    """Say whether a kernel may round what it has rotated: it rotates, and the matrix unit takes 16 bits."""
    return p.pos_encoding is PosEncoding.ROPE_LLAMA and p.q_dtype.itemsize <= 2


def slack(p: AttentionProblem, requests: list[Request], scales: Scales) -> Pair:
    """Return what out and lse may be off for that cause, shaped as they are, float64."""
    return each_request(_one, p, requests, scales)


def _one(p: AttentionProblem, r: Request, scales: Scales) -> Pair:
    q_len, kv_len = r.q.shape[0], r.k.shape[0]
    out = torch.zeros(q_len, p.num_qo_heads, p.head_dim_vo, dtype=_F64)
    lse = torch.zeros(q_len, p.num_qo_heads, dtype=_F64)
    if q_len == 0 or kv_len == 0:
        return out, lse
    q = rotate(r.q.to(_F64), range(kv_len - q_len, kv_len), p)
    k, v = rotate(r.k.to(_F64), range(kv_len), p), r.v.to(_F64)
    hidden = ~visible(p, q_len, kv_len, r.mask)
    scale = p.sm_scale * scales.q * scales.k
    q_step, k_step = (_variance(t, torch.finfo(p.q_dtype).eps) for t in (q, k))
    for head in range(p.num_qo_heads):
        shared = head // (p.num_qo_heads // p.num_kv_heads)
        mine = (q[:, head], q_step[:, head]), (k[:, shared], k_step[:, shared])
        weights, passed = _weights(p, q[:, head] @ k[:, shared].T * scale, hidden)
        pull = weights * passed
        lse[:, head] = _spread(pull[..., None], *mine)[:, 0]
        mean = (weights @ v[:, shared])[:, None]
        out[:, head] = _spread(pull[..., None] * (v[:, shared] - mean), *mine)
    return out * (SIGMAS * scale * scales.v), lse * (SIGMAS * scale / math.log(2))


def _variance(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the variance of rounding each element to a type whose step at 1 is ``eps``."""
    return (torch.exp2(x.frexp().exponent.to(_F64) - 1) * eps).square_() / 12


def _weights(p: AttentionProblem, x: torch.Tensor, hidden: torch.Tensor) -> Pair:
    """Return the weights, and by how much a change of a product passes the soft cap."""
    passed = torch.ones_like(x)
    if p.logits_soft_cap > 0:
        bent = torch.tanh(x / p.logits_soft_cap)
        x, passed = p.logits_soft_cap * bent, 1 - bent * bent
    return x.masked_fill(hidden, -math.inf).softmax(1).nan_to_num(0.0), passed


def _spread(pull: torch.Tensor, queries: Pair, keys: Pair) -> torch.Tensor:
    """Return the standard deviation of ``sum_j pull_j dx_j / s``, ``[rows, dims]``.

    Args:
        pull: ``[rows, keys, dims]``.
        queries: Rows and the variance of their elements, ``[rows, head_dim_qk]`` each.
        keys: Keys, likewise.
    """
    (q, q_step), (k, k_step) = queries, keys
    of_q = torch.einsum("ri,rid->rd", q_step, torch.einsum("rjd,ji->rid", pull, k).square_())
    of_k = torch.einsum("rj,rjd->rd", q.square() @ k_step.T, pull.square())
    return (of_q + of_k).sqrt_()
