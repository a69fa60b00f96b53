"""How far a result may be from the float64 oracle."""

from __future__ import annotations

import math

import torch

from ..backend import Path
from ..problem import PosEncoding
from .cases import Case

DEFAULTS = {
    torch.float64: 1e-5,  # float32 accumulation is enough
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
}
FP8_DEFAULT = 1e-1
ROPE_FLOOR = 1e-4
"""A kernel may form its angles in float32: position 500 is then off by some 3e-5 radians."""
ROPE_ROUNDING = 2
"""It may also round what it has rotated to a 16-bit query's type, as it was rounded when it was given."""


ALIBI_FLOOR = 1e-4
"""A far key's bias is in the hundreds, where float32 has steps of 6e-5."""


def declared(path: Path) -> dict[torch.dtype, float]:
    """Return a path's own tolerances, by query type. The report prints them: they are never silent."""
    stated = getattr(path, "tolerance", None)
    return {} if stated is None else {dtype: float(value) for dtype, value in dict(stated).items()}


def tolerance_of(case: Case) -> float:
    """Return t of ``|got - want| <= t * (|want| + size)``.

    The coarser of the query's and the output's type decides. ``size`` is the size of one value, for
    the log-sum-exp 1.
    """
    p, own = case.problem, declared(case.path)
    base = own.get(p.q_dtype, DEFAULTS.get(p.q_dtype, FP8_DEFAULT))
    written = DEFAULTS.get(p.o_dtype, FP8_DEFAULT)
    if p.pos_encoding is PosEncoding.ROPE_LLAMA:
        base = max(base * (ROPE_ROUNDING if p.q_dtype.itemsize == 2 else 1), ROPE_FLOOR)
    if p.pos_encoding is PosEncoding.ALIBI:
        base = max(base, ALIBI_FLOOR)
    return max(base, written)


def compare(got: torch.Tensor, want: torch.Tensor, tolerance: float, size: float, name: str) -> str | None:
    """Return what is wrong with ``got``, or None. NaN is always wrong; an infinity must match exactly."""
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
    allowed = tolerance * (torch.where(infinite, 0.0, want.abs()) + size)
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
