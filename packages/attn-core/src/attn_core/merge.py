"""Merging attention states computed over disjoint sets of keys (cascade, shared prefix, split-KV).

A state is a pair ``(v, s)``: ``v`` is the attention output over some keys, ``s`` the base 2 log-sum-exp of
their scaled logits. Merging is associative and commutative, and ``(0, -inf)``, attention over no key at all,
is its identity::

    m = max_k s_k      w_k = 2 ** (s_k - m)      v = sum_k w_k v_k / sum_k w_k      s = m + log2(sum_k w_k)

All functions here work on any device, read nothing back to the host and may be called during graph capture.
There is no backward: as of attention itself, results require no gradient, whatever the arguments do.

Three values of ``s`` are special, everywhere alike:

* ``-inf``: the state is empty. Its ``v`` is not looked at (it may be NaN), and a cell (one row of one head)
  with a single non-empty state gets that state back bit for bit.
* ``+inf``: also empty. No finite logits have this log-sum-exp, while several attention libraries return it
  for rows without keys; taking it literally would give all the weight to the state that saw nothing.
* NaN: the merged ``s`` is NaN in that cell, and ``v`` too if another state had anything to merge, so that a
  fault further up is not averaged away.
"""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from . import tracing
from .checking import apart, dense
from .errors import needs

_V_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INF = float("inf")


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two attention states into a new one.

    The arithmetic is float32 (float64 if ``v_a`` is float64). Writes none of its arguments.

    Args:
        v_a: ``[seq_len, num_heads, head_dim]`` float16, bfloat16, float32 or float64, any strides.
        s_a: ``[seq_len, num_heads]`` float32, base 2 log-sum-exp; -inf for a row without keys.
        v_b: As ``v_a``: same shape, dtype and device.
        s_b: As ``s_a``.

    Returns:
        ``v`` ``[seq_len, num_heads, head_dim]`` in the dtype of ``v_a`` and ``s`` ``[seq_len, num_heads]``
        float32, both contiguous. Where both states are empty: 0 and -inf.

    Raises:
        TypeError: A dtype is not one of the above, or the two ``v`` differ in dtype.
        ValueError: Shapes or devices do not fit together.
    """
    if is_dynamo_compiling():
        return tracing.call("merge_state", v_a, s_a, v_b, s_b)  # type: ignore[no-any-return]
    _check_state("v_a", v_a, "s_a", s_a, ndim=3)
    _check_other("v_b", v_b, "s_b", s_b, like=v_a)
    v, s = _merge_two(*_leaves(v_a, s_a, v_b, s_b))
    return v.contiguous(), s.contiguous()


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """Merge ``(v_other, s_other)`` into ``(v, s)``; see :func:`merge_state`.

    Writes ``v`` and ``s`` and nothing else. ``s`` has to be float32 because the update of a converted copy
    would be lost.

    Args:
        v: ``[seq_len, num_heads, head_dim]``, updated. Any strides that do not overlap.
        s: ``[seq_len, num_heads]`` float32, updated.
        v_other: As ``v``: same shape, dtype and device.
        s_other: As ``s``.
        mask: ``[seq_len]`` bool or uint8, or None for all rows. Rows where it is False keep their bits,
            whatever the other state holds. It is read on the device, so a captured graph follows it.

    Raises:
        TypeError: A dtype does not fit; ``mask`` is not bool or uint8.
        ValueError: Shapes or devices do not fit together; ``v`` or ``s`` repeats elements (an expanded
            tensor).
    """
    if is_dynamo_compiling():
        tracing.call("merge_state_in_place", v, s, v_other, s_other, mask)
        return
    _check_state("v", v, "s", s, ndim=3)
    _check_other("v_other", v_other, "s_other", s_other, like=v)
    for name, tensor in (("v", v), ("s", s)):
        apart(name, tensor, "core.merge-overlap")
    if mask is not None:
        _check_mask(mask, v)
    v, s, v_other, s_other = _leaves(v, s, v_other, s_other)
    new_v, new_s = _merge_two(v, s, v_other, s_other)
    if mask is not None:
        mask = mask.bool()
        new_v = torch.where(mask[:, None, None], new_v, v)
        new_s = torch.where(mask[:, None], new_s, s)
    v.copy_(new_v)
    s.copy_(new_s)


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge ``num_states`` attention states of every row; see :func:`merge_state`.

    The states are along the second dimension. ``num_states`` may be 0 (the result is 0 and -inf) or 1.

    Args:
        v: ``[seq_len, num_states, num_heads, head_dim]`` float16, bfloat16, float32 or float64, any strides.
        s: ``[seq_len, num_states, num_heads]`` float32, base 2 log-sum-exp.

    Returns:
        ``v`` ``[seq_len, num_heads, head_dim]`` in the dtype given and ``s`` ``[seq_len, num_heads]``
        float32, both contiguous.

    Raises:
        TypeError: A dtype is not one of the above.
        ValueError: Shapes or devices do not fit together.
    """
    if is_dynamo_compiling():
        return tracing.call("merge_states", v, s)  # type: ignore[no-any-return]
    _check_state("v", v, "s", s, ndim=4)
    v, s = _leaves(v, s)
    if v.shape[1] == 0:
        rows, _, heads, head_dim = v.shape
        return v.new_zeros(rows, heads, head_dim), s.new_full((rows, heads), -_INF)
    lse = _canonical(s)
    top, first = lse.max(dim=1, keepdim=True)
    weight = torch.exp2(lse - _finite_shift(top))  # an empty state's weight is 0, exactly
    total = weight.sum(dim=1)
    scaled = v.to(_accumulator(v.dtype), copy=True).masked_fill_((lse == -_INF)[..., None], 0.0)
    out = scaled.mul_(weight[..., None]).sum(dim=1).div_(_nonzero(total)[..., None]).to(v.dtype)
    # 0 * x + 1 * y is y up to the sign of a zero; "bit for bit" includes it.
    alone = (lse != -_INF).sum(dim=1) == 1
    picked = v.gather(1, first[..., None].expand(-1, -1, -1, v.shape[3])).squeeze(1)
    merged_s = _finite_shift(top).squeeze(1) + torch.log2(total)
    return torch.where(alone[..., None], picked, out).contiguous(), merged_s.contiguous()


def _leaves(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors without a gradient to keep, to be written or computed with."""
    return tuple(t.detach() if t.requires_grad or t.is_inference() else t for t in tensors)


def _merge_two(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    s_a, s_b = _canonical(s_a), _canonical(s_b)
    a_empty, b_empty = s_a == -_INF, s_b == -_INF
    shift = _finite_shift(torch.maximum(s_a, s_b))
    w_a, w_b = torch.exp2(s_a - shift), torch.exp2(s_b - shift)
    total = w_a + w_b
    acc = _accumulator(v_a.dtype)
    share_a, share_b = (w.div(_nonzero(total)).to(acc)[..., None] for w in (w_a, w_b))
    v = (v_a.to(acc) * share_a).add_(v_b.to(acc) * share_b).to(v_a.dtype)
    # One side empty: the other as it is. Both empty: zero, even if an empty side's v holds NaN.
    v = torch.where(b_empty[..., None], v_a, v)
    v = torch.where(a_empty[..., None], v_b, v).masked_fill_((a_empty & b_empty)[..., None], 0.0)
    s = torch.where(b_empty, s_a, torch.where(a_empty, s_b, shift + torch.log2(total)))
    return v, s


def _canonical(s: torch.Tensor) -> torch.Tensor:
    """Write the empty state as -inf only."""
    return s.masked_fill(s == _INF, -_INF)


def _finite_shift(top: torch.Tensor) -> torch.Tensor:
    """Return the exponents' shift: the maximum, or 0 where it is -inf (``-inf - -inf`` is NaN)."""
    return top.masked_fill(top == -_INF, 0.0)


def _nonzero(total: torch.Tensor) -> torch.Tensor:
    """Return the divisor: the sum of weights, or 1 where there is no weight at all."""
    return total.masked_fill(total == 0.0, 1.0)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_state(v_name: str, v: torch.Tensor, s_name: str, s: torch.Tensor, *, ndim: int) -> None:
    for name, tensor in ((v_name, v), (s_name, s)):
        dense(name, tensor, "core.merge-type")
    if v.dtype not in _V_DTYPES:
        raise TypeError(needs(v_name, "float16, bfloat16, float32 or float64", v.dtype, "core.merge-dtype"))
    if s.dtype != torch.float32:
        raise TypeError(needs(s_name, "float32", s.dtype, "core.merge-lse-dtype"))
    if v.dim() != ndim:
        raise ValueError(needs(v_name, f"{ndim} dimensions", f"shape {tuple(v.shape)}", "core.merge-shape"))
    if s.shape != v.shape[:-1]:
        wanted = f"shape {tuple(v.shape[:-1])} ({v_name} without head_dim)"
        raise ValueError(needs(s_name, wanted, tuple(s.shape), "core.merge-shape"))
    if s.device != v.device:
        raise ValueError(needs(s_name, f"the device of {v_name}, {v.device}", s.device, "core.merge-device"))


def _check_other(v_name: str, v: torch.Tensor, s_name: str, s: torch.Tensor, *, like: torch.Tensor) -> None:
    _check_state(v_name, v, s_name, s, ndim=3)
    if v.dtype != like.dtype:
        raise TypeError(needs(v_name, f"{like.dtype}, as the first state", v.dtype, "core.merge-dtype"))
    if v.shape != like.shape:
        wanted = f"shape {tuple(like.shape)}, as the first state"
        raise ValueError(needs(v_name, wanted, tuple(v.shape), "core.merge-shape"))
    if v.device != like.device:
        raise ValueError(needs(v_name, f"{like.device}, as the first state", v.device, "core.merge-device"))


def _check_mask(mask: torch.Tensor, v: torch.Tensor) -> None:
    if dense("mask", mask, "core.merge-mask").dtype not in (torch.bool, torch.uint8):
        raise TypeError(needs("mask", "bool or uint8", mask.dtype, "core.merge-mask"))
    if mask.shape != v.shape[:1]:
        raise ValueError(needs("mask", f"shape ({v.shape[0]},)", tuple(mask.shape), "core.merge-mask"))
    if mask.device != v.device:
        raise ValueError(needs("mask", f"the device of v, {v.device}", mask.device, "core.merge-mask"))
