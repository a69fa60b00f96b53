"""POD of two batches: one that prefills and one that decodes, each over a paged cache."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch

from . import tracing
from .arguments import mask_bits
from .options import Dtype, decode_dtypes
from .planner import plan_all
from .prefill_common import mask_mode
from .prefill_paged import BatchPrefillWithPagedKVCacheWrapper
from .problem import MaskMode
from .run_options import KVCache, Result
from .tracing import Scale

Two = tuple[torch.Tensor, torch.Tensor]

_PAGED_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(BatchPrefillWithPagedKVCacheWrapper.plan).parameters.items()
    if parameter.default is not parameter.empty
}


class BatchPODWithPagedKVCacheWrapper:
    """Attention of a batch that prefills and of a batch that decodes, over the same or two paged caches.

    Args:
        float_workspace_buffer: Scratch bytes; both parts use it, one after the other.
        kv_layout: ``NHD`` or ``HND``, of both caches.
        backend: ``auto``, a backend, or a candidate ``backend/path``.
    """

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", backend: str = "auto"
    ) -> None:
        self._prefill, self._decode = (
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, backend=backend)
            for _ in range(2)
        )

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """False: the mask of the prefill part is an argument of run()."""
        return False

    def plan(
        self,
        qo_indptr_p: torch.Tensor,
        kv_indptr_p: torch.Tensor,
        kv_indices_p: torch.Tensor,
        last_page_len_p: torch.Tensor,
        qo_indptr_d: torch.Tensor,
        kv_indptr_d: torch.Tensor,
        kv_indices_d: torch.Tensor,
        last_page_len_d: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: Dtype | None = "float16",
        kv_data_type: Dtype | None = None,
        data_type: Dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Plan both parts, or neither where it raises. Must not be called during graph capture.

        Args:
            qo_indptr_p: The four index arrays of the prefilling batch, as for the paged prefill wrapper.
            kv_indptr_p: See there.
            kv_indices_p: See there.
            last_page_len_p: See there.
            qo_indptr_d: The four of the decoding batch; its rows see all keys of their request.
            kv_indptr_d: See there.
            kv_indices_d: See there.
            last_page_len_d: See there.
            num_qo_heads: Query heads of both, like all that follow.
            num_kv_heads: Key/value heads.
            head_dim: Elements per head.
            page_size: Tokens per page.
            pos_encoding_mode: 'NONE', 'ROPE_LLAMA' or 'ALIBI'.
            window_left: Keys left of a row's own position that it sees; -1 for all.
            q_data_type: Query and output type.
            kv_data_type: Cache type; the query's by default.
            data_type: Both, where they are not given.
            sm_scale: Default ``1 / sqrt(head_dim)``.
            rope_scale: Position divisor of ROPE_LLAMA, default 1.
            rope_theta: Base of ROPE_LLAMA, default 1e4.
            non_blocking: No effect: copies never block.

        Raises:
            ValueError: An argument does not fit.
            TypeError: An argument has the wrong type.
            NotImplementedError: No backend serves the combination.
        """
        tracing.refuse_traced_plan(self)
        q_dtype, kv_dtype = pod_dtypes(q_data_type, kv_data_type, data_type)
        shared: dict[str, Any] = {
            **_PAGED_DEFAULTS, "num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads,
            "head_dim_qk": head_dim, "page_size": page_size, "pos_encoding_mode": pos_encoding_mode,
            "sm_scale": sm_scale, "window_left": window_left, "rope_scale": rope_scale,
            "rope_theta": rope_theta, "q_data_type": q_dtype, "kv_data_type": kv_dtype,
        }  # fmt: skip
        parts = (
            (self._prefill, qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p),
            (self._decode, qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d),
        )
        asked = []
        for wrapper, qo_indptr, kv_indptr, kv_indices, last_page_len in parts:
            index = {
                "qo_indptr": qo_indptr, "paged_kv_indptr": kv_indptr, "paged_kv_indices": kv_indices,
                "paged_kv_last_page_len": last_page_len,
            }  # fmt: skip
            problem, batch, _ = wrapper._asked({**shared, **index})
            asked.append((wrapper, problem, batch))
        plan_all(asked)

    begin_forward = plan

    def run(
        self,
        q_p: torch.Tensor,
        paged_kv_cache_p: KVCache,
        q_d: torch.Tensor,
        paged_kv_cache_d: KVCache,
        custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None,
        causal_p: bool = False,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        return_lse: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
    ) -> Two | tuple[Two, Two]:
        """Attend with both parts.

        A mask of the prefill part that is not that of the run before plans this part again.

        Args:
            q_p: ``[qo_indptr_p[-1], num_qo_heads, head_dim]``.
            paged_kv_cache_p: As for the paged prefill wrapper's run().
            q_d: ``[qo_indptr_d[-1], num_qo_heads, head_dim]``.
            paged_kv_cache_d: As ``paged_kv_cache_p``.
            custom_mask_p: As for the paged prefill wrapper's plan(), like the next two.
            packed_custom_mask_p: See there.
            causal_p: See there.
            q_scale: Multiplies ``q_d``: like the next two, of the decode part alone, as upstream.
            k_scale: Multiplies its keys.
            v_scale: Multiplies its output.
            return_lse: Also return the log-sum-exp of each part, base 2.
            use_fp16_qk_reduction: Permits a less exact sum; no backend here makes use of it.
            enable_pdl: A launch hint of upstream without meaning here.

        Returns:
            ``(out_p, out_d)``, or ``((out_p, out_d), (lse_p, lse_d))``.

        Raises:
            ValueError: No plan, or a tensor differs from what was planned.
            NotImplementedError: An argument no backend here has.
        """
        self._mask(causal_p, custom_mask_p, packed_custom_mask_p)
        p: Result = self._prefill.run(q_p, paged_kv_cache_p, return_lse=return_lse)
        d: Result = self._decode.run(
            q_d, paged_kv_cache_d, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse
        )
        if isinstance(p, tuple) and isinstance(d, tuple):
            return (p[0], d[0]), (p[1], d[1])
        assert isinstance(p, torch.Tensor)
        assert isinstance(d, torch.Tensor)
        return p, d

    def _mask(self, causal: bool, custom: torch.Tensor | None, packed: torch.Tensor | None) -> None:
        planned = self._prefill._planned()
        mode = mask_mode(causal, custom, packed)
        if mode is planned.query.problem.mask and mode is not MaskMode.CUSTOM:
            return
        tracing.refuse_traced_plan(self)
        bits = mask_bits(custom, packed, planned.batch, self._prefill.device)
        self._prefill._plan(replace(planned.query.problem, mask=mode), planned.batch, mask=bits)

    def end_forward(self) -> None:
        """Do nothing; upstream's counterpart of ``begin_forward``."""


def pod_dtypes(q: Dtype | None, kv: Dtype | None, both: Dtype | None) -> tuple[Dtype, Dtype]:
    """Return q and kv types; ``data_type`` speaks for q too where that is at its default."""
    if both is not None and q == "float16":
        q = None
    return decode_dtypes({"q_data_type": q, "kv_data_type": kv, "data_type": both})
