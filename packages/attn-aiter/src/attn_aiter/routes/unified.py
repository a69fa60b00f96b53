"""``unified_attention``: AITER's Triton kernel for both layouts and chain verify; path ``unified``.

Causal only, no log-sum-exp, and rows without a key come out as NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from attn_core.backend import DeviceImage, PlanResult, RunIO
from attn_core.batch import HostBatch
from attn_core.errors import Unsupported
from attn_core.problem import AttentionProblem
from attn_core.query import Query
from attn_core.reasons import Reason

from .. import codes, rows
from ..probe import AiterApi, Function
from .common import Call, fold_scales
from .tables import block_table


@dataclass(frozen=True, slots=True)
class Launch:
    """Scalars of a call.

    Attributes:
        problem: What to compute.
        function: The declared function.
        max_q: Query rows of the longest request.
        max_kv: Keys of the longest request.
        width: Columns of the page table.
    """

    path: ClassVar[str] = rows.UNIFIED
    empty: ClassVar[bool] = False
    problem: AttentionProblem
    function: Function
    max_q: int
    max_kv: int
    width: int


class Unified:
    """Paged prefill, decode and verify."""

    call = Call(
        "unified",
        (
            "q", "k", "v", "out", "cu_seqlens_q", "max_seqlen_q", "seqused_k", "max_seqlen_k",
            "softmax_scale", "causal", "window_size", "block_table", "softcap", "q_descale", "k_descale",
            "v_descale",
        ),
    )  # fmt: skip

    def missing(self, api: AiterApi) -> tuple[str, ...]:
        """Return what does not bind."""
        return self.call.missing(api)

    def plan(self, api: AiterApi, query: Query, batch: HostBatch) -> PlanResult:
        """Fix the scalars and lay out the dense page table.

        Raises:
            Unsupported: A request has more query rows than keys.
        """
        shape, page = batch.shape, query.problem.page_size
        assert page is not None
        if shape.total_q == 0:
            return PlanResult(None)
        short = batch.kv_len < batch.qo_indptr.diff()
        if bool(short.any()):
            raise Unsupported(Reason(codes.KV_SHORTER, "aiter/unified", None, "a request with fewer"))
        width = max(1, -(-shape.max_kv_len // page))
        function = api.functions[self.call.key]
        launch = Launch(query.problem, function, shape.max_q_len, shape.max_kv_len, width)
        return PlanResult(launch, {"aiter_block_table": block_table(batch, width)})

    def run(self, function: Callable[..., Any], launch: Launch, image: DeviceImage, io: RunIO) -> None:
        """Attend. AITER allocates the partial results of a split itself; they do not outlive the call."""
        logits, v_scale = fold_scales(io)
        p = launch.problem
        hnd = p.kv.order == "HND"
        # The kernel takes every stride of both caches, so the other layout is a view.
        k, v = (t.transpose(1, 2) if hnd else t for t in (io.k, io.v))
        left = p.window_left
        function(**self.call.bind(launch.function, {
            "q": io.q, "k": k, "v": v, "out": io.out, "cu_seqlens_q": image["qo_indptr"],
            "max_seqlen_q": launch.max_q, "seqused_k": image["kv_len"], "max_seqlen_k": launch.max_kv,
            "softmax_scale": p.sm_scale * logits, "causal": True,
            "window_size": (left, 0) if left >= 0 else (-1, -1),
            "block_table": image["aiter_block_table"].view(-1, launch.width), "softcap": p.logits_soft_cap,
            "q_descale": None, "k_descale": None, "v_descale": None,
        }))  # fmt: skip
        if v_scale != 1.0:
            io.out.mul_(v_scale)
