"""``flash_attn_varlen_func`` over contiguous keys: the paths ``varlen``, ``single`` and ``gather``.

Never passed: ``block_table`` (the assembly kernel has no page table and faults), and a ``min_seqlen_q`` other
than 0 (requests up to it are skipped and their rows left unwritten).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from attn_core.backend import DeviceImage, PlanResult, RunIO
from attn_core.batch import HostBatch
from attn_core.errors import Unsupported
from attn_core.problem import AttentionProblem, MaskMode
from attn_core.query import Query
from attn_core.reasons import Reason

from .. import codes
from ..gates import max_kv_len, max_q_len
from ..probe import AiterApi, Function
from ..tables import defects
from .common import Call, check_dense, clear, finish, fold_scales, window_size


@dataclass(frozen=True, slots=True)
class Launch:
    """Scalars of a call.

    Attributes:
        path: Path of this backend.
        problem: What to compute.
        function: The declared function.
        max_q: Most query rows of one request.
        max_kv: Most keys of one request; 0 when nobody has any.
        captured: The call may be replayed for another batch.
        empty: There is nothing to call the kernel for.
    """

    path: str
    problem: AttentionProblem
    function: Function
    max_q: int
    max_kv: int
    captured: bool
    empty: bool


class Varlen:
    """Keys and values as they come; ``gather`` copies them out of their pages first.

    Args:
        path: Name of the path.
        gather: Copy pages into contiguous keys and values on every run.
    """

    call = Call(
        "varlen",
        (
            "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale",
            "logits_soft_cap", "causal", "window_size", "return_lse", "out",
        ),
        ("min_seqlen_q", "dropout_p"),
    )  # fmt: skip

    def __init__(self, path: str, *, gather: bool = False) -> None:
        self.path, self.gather = path, gather

    def missing(self, api: AiterApi) -> tuple[str, ...]:
        """Return what does not bind."""
        return self.call.missing(api)

    def plan(self, api: AiterApi, query: Query, batch: HostBatch) -> PlanResult:
        """Fix the scalars; for a gather also say where each key lies.

        Raises:
            Unsupported: A request has one query row where this release computes that wrongly.
        """
        self._refuse_one_row(api, query, batch)
        shape = batch.shape
        nothing = shape.total_q == 0 or shape.total_kv == 0
        launch = Launch(
            self.path,
            query.problem,
            api.functions[self.call.key],
            max_q_len(query),
            max_kv_len(query),
            query.graph is not None,
            query.graph is None and nothing,
        )
        image = gather_image(batch, query) if self.gather else {}
        return PlanResult(launch, image)

    def _refuse_one_row(self, api: AiterApi, query: Query, batch: HostBatch) -> None:
        rows = batch.qo_indptr.diff()
        if not bool((rows == 1).any()):
            return
        for defect in defects(api.release):
            about = defect.one_row and self.path in defect.paths
            if about and defect.concerns(query.target.arch, query.problem, max_kv_len(query)):
                reason = Reason(codes.ONE_ROW, f"aiter/{self.path}", defect.limit, "a request of q_len 1")
                raise Unsupported(reason)

    def run(self, function: Callable[..., Any], launch: Launch, image: DeviceImage, io: RunIO) -> None:
        """Attend. Gathering allocates the copy of K and V, which does not outlive the call."""
        p = launch.problem
        logits, v_scale = fold_scales(io)
        check_dense("out", io.out)
        if launch.empty:
            clear(io)
            return
        k, v, cu_k = io.k, io.v, image["kv_indptr"]
        if self.gather:
            k, v, cu_k = *gather_kv(image, k, v, launch.captured), image["aiter_cu_kv"]
        returned = function(**self.call.bind(launch.function, {
            "q": io.q, "k": k, "v": v, "cu_seqlens_q": image["qo_indptr"], "cu_seqlens_k": cu_k,
            "max_seqlen_q": launch.max_q, "max_seqlen_k": launch.max_kv, "min_seqlen_q": 0, "dropout_p": 0.0,
            "softmax_scale": p.sm_scale * logits, "logits_soft_cap": p.logits_soft_cap,
            "causal": p.mask is MaskMode.CAUSAL, "window_size": window_size(p, launch.function),
            "return_lse": io.lse is not None, "out": io.out,
        }))  # fmt: skip
        finish(io, returned, v_scale)


def gather_image(batch: HostBatch, query: Query) -> dict[str, torch.Tensor]:
    """Say where each key lies: its entry in ``kv_indices`` and its place in that page.

    Page ids are not looked at, so they may be on the device. Under capture the arrays have the size of the
    capacity, and what is beyond the batch reads the first key of the first page.
    """
    page_size = query.problem.page_size
    assert page_size is not None
    kv_len = batch.kv_len.long()
    ends = kv_len.cumsum(0)
    total = batch.shape.total_kv
    capacity = total if query.graph is None else query.graph.max_pages * page_size
    position = torch.arange(total, device="cpu") - torch.repeat_interleave(ends - kv_len, kv_len)
    entry = torch.repeat_interleave(batch.kv_indptr[:-1].long(), kv_len) + position // page_size
    arrays = torch.zeros(2, capacity, dtype=torch.int32, device="cpu")
    arrays[0, :total], arrays[1, :total] = entry, position % page_size
    cu_kv = torch.zeros(kv_len.numel() + 1, dtype=torch.int32, device="cpu")
    cu_kv[1:] = ends
    return {"aiter_entry": arrays[0], "aiter_offset": arrays[1], "aiter_cu_kv": cu_kv}


def gather_kv(
    image: DeviceImage, k: torch.Tensor, v: torch.Tensor, captured: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy keys and values out of NHD pages: ``[tokens, num_kv_heads, dim]`` each."""
    pages, offset = image["kv_indices"].index_select(0, image["aiter_entry"]), image["aiter_offset"]
    if captured:  # padding of a batch without pages reads whatever the caller's index buffer holds
        pages.clamp_(0, k.shape[0] - 1)
    return k[pages, offset], v[pages, offset]
