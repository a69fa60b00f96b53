"""Paged attention with an attention sink: one more logit per head that takes weight and brings no value."""

from __future__ import annotations

from typing import Literal, Unpack, overload

import torch

from .options import Dtype
from .prefill_paged import BatchPrefillWithPagedKVCacheWrapper
from .run_options import KVCache, Pair, PrefillRun, Result
from .wrapper import returning_lse


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """Batch attention over a paged cache whose softmax has one more logit per query head.

    With s the sink of a head, a row's weights are ``exp(x_j) / (exp(s) + sum_k exp(x_k))``, x the scaled
    logits. It is computed exactly from the output and log-sum-exp of plain attention, so every backend that
    returns the latter serves it. A row without a key gives out 0.

    Args:
        float_workspace_buffer: As for :class:`~attn_core.BatchPrefillWithPagedKVCacheWrapper`, like the
            arguments up to ``backend``.
        kv_layout: See there.
        use_cuda_graph: See there.
        qo_indptr_buf: See there.
        paged_kv_indptr_buf: See there.
        paged_kv_indices_buf: See there.
        paged_kv_last_page_len_buf: See there.
        custom_mask_buf: See there.
        mask_indptr_buf: See there.
        backend: See there.
        pos_encoding_mode: What upstream compiles for, like the rest; plan() alone decides here.
        use_fp16_qk_reduction: See ``pos_encoding_mode``.
        q_data_type: See ``pos_encoding_mode``.
        kv_data_type: See ``pos_encoding_mode``.
        head_dim_qk: See ``pos_encoding_mode``.
        head_dim_vo: See ``pos_encoding_mode``.
        window_left: See ``pos_encoding_mode``.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: Dtype = torch.bfloat16,
        kv_data_type: Dtype = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, qo_indptr_buf, paged_kv_indptr_buf,
            paged_kv_indices_buf, paged_kv_last_page_len_buf, custom_mask_buf, mask_indptr_buf, backend,
        )  # fmt: skip
        self._with_sink = True

    @overload
    def run(
        self, q: torch.Tensor, paged_kv_cache: KVCache, *args: object, return_lse: Literal[False] = False,
        **more: Unpack[PrefillRun]
    ) -> torch.Tensor: ...  # fmt: skip
    @overload
    def run(
        self, q: torch.Tensor, paged_kv_cache: KVCache, *args: object, return_lse: Literal[True],
        **more: Unpack[PrefillRun]
    ) -> Pair: ...  # fmt: skip
    @overload
    def run(
        self, q: torch.Tensor, paged_kv_cache: KVCache, *args: object, return_lse: bool,
        **more: Unpack[PrefillRun]
    ) -> Result: ...  # fmt: skip

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: KVCache,
        *args: object,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: object | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Result:
        """Attend with the plan in force and the sinks. May be captured in graph mode.

        Args:
            q: ``[qo_indptr[-1], num_qo_heads, head_dim_qk]``, any strides.
            paged_kv_cache: As for the decode wrapper. Not written.
            *args: ``sink``, float ``[num_qo_heads]``, in units of the scaled logits (natural exponent), and
                ``sm_scale``, by default the planned one.
            q_scale: As for :class:`~attn_core.BatchPrefillWithPagedKVCacheWrapper`, like all that follow but:
            k_scale: See there.
            v_scale: See there.
            out: See there.
            lse: See there; the sink is part of it.
            return_lse: See there.
            enable_pdl: See there.
            window_left: See there.
            sinks: The sink by keyword.
            kv_cache_sf: See there.
            skip_softmax_threshold_scale_factor: See there.
            use_fp16_softmax: See there.
            uses_spcompress: See there.

        Returns:
            ``out``, or ``(out, lse)``.

        Raises:
            TypeError: No sink, or more arguments than those two.
            ValueError: No plan, or a tensor differs from what was planned.
            NotImplementedError: An argument no backend here has.
        """
        return super().run(
            q, paged_kv_cache, *args, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, out=out, lse=lse,
            return_lse=return_lse, enable_pdl=enable_pdl, window_left=window_left, sinks=sinks,
            kv_cache_sf=kv_cache_sf, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            use_fp16_softmax=use_fp16_softmax, uses_spcompress=uses_spcompress,
        )  # fmt: skip

    run_return_lse = returning_lse(run)
