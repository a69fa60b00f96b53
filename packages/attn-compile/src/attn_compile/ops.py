"""Registration of the operators, and the traced side of run()."""

from __future__ import annotations

from typing import Any

import torch

from attn_core import tracing
from attn_core.wrapper import AttentionWrapper

from .schema import NAMESPACE, RUN

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


def _run(
    handle: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q_scale: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    q_factor: float,
    k_factor: float,
    v_factor: float,
) -> None:
    wrapper = tracing.wrapper(handle)
    assert isinstance(wrapper, AttentionWrapper)
    wrapper._run(
        q, k, v, out, lse, lse is not None,
        q_factor if q_scale is None else q_scale,
        k_factor if k_scale is None else k_scale,
        v_factor if v_scale is None else v_scale,
    )  # fmt: skip


def _fake(*args: Any) -> None:
    """Do nothing: the operator returns nothing and allocates nothing."""


# define + impl, not custom_op: the latter costs ten times as much per call.
_LIBRARY.define(RUN.name + RUN.schema)  # type: ignore[no-untyped-call]
_LIBRARY.impl(RUN.name, _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake(f"{NAMESPACE}::{RUN.name}", _fake, lib=_LIBRARY)
run_op = getattr(getattr(torch.ops, NAMESPACE), RUN.name).default


class OpTracer:
    """Turns a traced ``run()`` into one call of :data:`run_op`."""

    def run(
        self,
        handle: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        o_dtype: torch.dtype,
        scales: tuple[tracing.Scale, tracing.Scale, tracing.Scale],
    ) -> tracing.Result:
        """Emit the operator into the graph.

        It writes fresh memory allocated in the graph, never a view and never the caller's: the one form
        that torch leaves alone. A caller's ``out`` or ``lse`` is filled by ``copy_`` afterwards.
        """
        made = torch.empty((q.shape[0], q.shape[1], v.shape[-1]), dtype=o_dtype, device=q.device)
        sums = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
        tensors = [s if isinstance(s, torch.Tensor) else None for s in scales]
        factors = [1.0 if s is None or isinstance(s, torch.Tensor) else float(s) for s in scales]
        run_op(handle, q, k, v, made, sums, *tensors, *factors)
        result = made if out is None else out.copy_(made)
        if sums is None:
            return result
        return result, sums if lse is None else lse.copy_(sums)
