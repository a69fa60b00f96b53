"""Attention of mixed batches under upstream's module name, and paged attention with sinks."""

from __future__ import annotations

from typing import cast

import torch

from . import tracing
from .arguments import refuse
from .attention_sink import BatchAttentionWithAttentionSinkWrapper
from .cache_view import unpack
from .errors import needs
from .kv_lengths import batch_of_lengths
from .options import Dtype, make_problem, number
from .prefill_common import mask_mode
from .problem import Op, PagedKV
from .run_options import KVCache
from .tracing import Scale
from .wrapper import OwnWorkspace


class BatchAttention(OwnWorkspace):
    """Prefill and decode requests of one batch in one call, over a paged cache.

    What :class:`~attn_core.BatchPrefillWithPagedKVCacheWrapper` computes, planned from sequence lengths; the
    workspace is its own and as large as the plan in force needs.

    Args:
        kv_layout: ``NHD`` or ``HND``.
        device: Where it works; by default the current GPU, or the CPU where there is none.
        backend: ``auto``, a backend, or a candidate ``backend/path``.
    """

    def __init__(
        self, kv_layout: str = "NHD", device: str | torch.device | None = None, backend: str = "auto"
    ) -> None:
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        super().__init__(device, kv_layout, backend)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: Dtype = torch.bfloat16,
        kv_data_type: Dtype = torch.bfloat16,
        use_profiler: bool = False,
    ) -> None:
        """Fix what the following runs compute, for one batch.

        If it raises, the previous plan stays in force. Must not be called during graph capture.

        Args:
            qo_indptr: int32 ``[batch_size + 1]``, first query row of each request.
            kv_indptr: int32 ``[batch_size + 1]``, first page of each request in ``kv_indices``.
            kv_indices: int32 page ids, at least ``kv_indptr[-1]``.
            kv_len_arr: int32 ``[batch_size]``, tokens of each request, at most what its pages hold;
                pages behind them are not read.
            num_qo_heads: Query heads, a multiple of ``num_kv_heads``.
            num_kv_heads: Key/value heads.
            head_dim_qk: Elements of a query or key head.
            head_dim_vo: Elements of a value or output head.
            page_size: Tokens per page.
            causal: Row i sees keys up to its own position, bottom-right aligned.
            sm_scale: Default ``1 / sqrt(head_dim_qk)``.
            logits_soft_cap: ``cap * tanh(x / cap)`` before the mask.
            q_data_type: Query and output type.
            kv_data_type: Cache type.
            use_profiler: Not supported.

        Raises:
            ValueError: An argument does not fit.
            TypeError: An argument has the wrong type.
            NotImplementedError: No backend serves the combination.
        """
        tracing.refuse_traced_plan(self)
        refuse(use_profiler=use_profiler)
        problem = make_problem(
            Op.PREFILL_PAGED, (num_qo_heads, num_kv_heads), (head_dim_qk, head_dim_vo), q_data_type,
            kv_data_type, None, PagedKV(page_size, self._kv_layout),
            mask_mode(causal, None, None), "NONE", -1, logits_soft_cap, sm_scale, None, None,
            True, True, None, False,
        )  # fmt: skip
        batch = batch_of_lengths(
            qo_indptr, kv_indptr, kv_indices, kv_len_arr, page_size, device=self.device
        )  # fmt: skip
        self._plan(problem, batch)

    def run(
        self,
        q: torch.Tensor,
        kv_cache: KVCache,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: torch.Tensor | None = None,
        kv_cache_sf: object | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend with the plan in force.

        Writes ``out`` and ``lse`` and nothing else; never waits for the device.

        Args:
            q: ``[qo_indptr[-1], num_qo_heads, head_dim_qk]``, any strides.
            kv_cache: As for the paged wrappers: a ``(k, v)`` pair, one tensor or a CacheView.
            out: ``[rows, num_qo_heads, head_dim_vo]`` of the query type.
            lse: float32 ``[rows, num_qo_heads]``.
            k_scale: Multiplies k; a number or a one-element tensor.
            v_scale: Multiplies the output.
            logits_soft_cap: 0 for the planned one. Another one than planned plans again for this call; one
                where none was planned is an error, as upstream.
            profiler_buffer: Not supported.
            kv_cache_sf: Not supported.

        Returns:
            ``(out, lse)``; the log-sum-exp in base 2, -inf where there is no key.

        Raises:
            ValueError: No plan, or an argument differs from what was planned.
            NotImplementedError: An argument no backend here has.
        """
        refuse(profiler_buffer=profiler_buffer, kv_cache_sf=kv_cache_sf)
        k, v = unpack(kv_cache, self._kv_layout)
        if not number("logits_soft_cap", logits_soft_cap, 0.0):
            found = self._run(q, k, v, out, lse, True, None, k_scale, v_scale)
        else:
            planned = self._planned().query.problem.logits_soft_cap
            if planned <= 0:
                raise ValueError(
                    needs("logits_soft_cap", "one given to plan()", logits_soft_cap, "core.soft-cap")
                )
            with self._for_one_call(logits_soft_cap=float(logits_soft_cap)):
                found = self._run(q, k, v, out, lse, True, None, k_scale, v_scale)
        return cast("tuple[torch.Tensor, torch.Tensor]", found)


__all__ = ["BatchAttention", "BatchAttentionWithAttentionSinkWrapper"]
