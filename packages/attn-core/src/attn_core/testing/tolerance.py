"""How far a result may be from the float64 oracle."""

from __future__ import annotations

import math

import torch

from ..backend import Path
from ..problem import AttentionProblem, PosEncoding
from .batches import Lengths
from .cases import Case
from .oracle import slope

DEFAULTS = {
    torch.float64: 1e-5,  # float32 accumulation is enough
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
}
FP8_DEFAULT = 1e-1
ROPE_FLOOR = 1e-4
"""A kernel may form its angles in float32: position 500 is then off by some 3e-5 radians."""
_ALIBI_ROUNDINGS = 3
"""Of slope times distance, of the sum with the product, and of its scaling for an exponential to base 2."""


def declared(path: Path) -> dict[torch.dtype, float]:
    """Return a path's own tolerances, by query type. The report prints them: they are never silent."""
    stated = getattr(path, "tolerance", None)
    return {} if stated is None else {dtype: float(value) for dtype, value in dict(stated).items()}


def tolerance_of(case: Case, lengths: Lengths) -> float:
    """Return t of ``|got - want| <= t * (|want| + size)``.

    The coarser of the query's and the output's type decides. ``size`` is the size of one value, for
    the log-sum-exp 1.
    """
    p, own = case.problem, declared(case.path)
    base = own.get(p.q_dtype, DEFAULTS.get(p.q_dtype, FP8_DEFAULT))
    written = DEFAULTS.get(p.o_dtype, FP8_DEFAULT)
    if p.pos_encoding is PosEncoding.ROPE_LLAMA:
        base = max(base, ROPE_FLOOR)
    if p.pos_encoding is PosEncoding.ALIBI:
        base += alibi_rounding(p, max(lengths.kv_len, default=0))
    return max(base, written)


def alibi_rounding(p: AttentionProblem, kv_len: int) -> float:
    """Return what float32 logits with the bias of a key ``kv_len`` tokens away are off by, at most.

    A logit of size B carries an error of half a step, B * 2**-24, per rounding. Every weight is off by that
    factor then, and so is their sum: twice that in the output.
    """
    steepest = max(slope(head, p.num_qo_heads) for head in range(p.num_qo_heads))
    return 2 * _ALIBI_ROUNDINGS * steepest * kv_len * 2.0**-24


def compare(
    got: torch.Tensor,
    want: torch.Tensor,
    tolerance: float,
    size: float,
    name: str,
    slack: torch.Tensor | float = 0.0,
) -> str | None:
    """Return what is wrong with ``got``, or None. NaN is always wrong; an infinity must match exactly.

    Args:
        got: Result.
        want: Of the oracle.
        tolerance: See :func:`tolerance_of`.
        size: See there.
        name: Of the result.
        slack: What an element may be off besides; see :mod:`attn_core.testing.rounding`.
    """
    got, want = got.detach().cpu().to(torch.float64), want.to(torch.float64)
    if got.shape != want.shape:
        return f"{name}: needs shape {tuple(want.shape)}, got {tuple(got.shape)}"
    if got.numel() == 0:
        return None
    nan = got.isnan()
    if bool(nan.any()):
        return f"{name}: {int(nan.sum())} of {nan.numel()} elements are NaN or were not written, {_at(nan)}"
    infinite = want.isinf()
    wrong = (got.isinf() | infinite) & (got != want)
    if bool(wrong.any()):
        count = f"{name}: infinities differ in {int(wrong.sum())} elements"
        return f"{count}, {_at(wrong)}: {_both(got, want, wrong)}"
    error = torch.where(infinite, 0.0, (got - want).abs())
    allowed = tolerance * (torch.where(infinite, 0.0, want.abs()) + size) + slack
    bad = error > allowed
    if not bool(bad.any()):
        return None
    worst = float((error / allowed).max()) if math.isfinite(float(error.max())) else math.inf
    return (
        f"{name}: {int(bad.sum())} of {bad.numel()} elements differ from the oracle, worst {worst:.1f} times "
        f"the tolerance {tolerance:g}, {_at(bad)}: {_both(got, want, bad)}"
    )


def _at(mask: torch.Tensor) -> str:
    return f"first at {tuple(int(i) for i in mask.nonzero()[0])}"


def _both(got: torch.Tensor, want: torch.Tensor, mask: torch.Tensor) -> str:
    return f"{float(got[mask][0]):.6g} for {float(want[mask][0]):.6g}"
