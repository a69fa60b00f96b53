"""Prefill and decode in one call (upstream's POD), over the wrappers for each.

Upstream runs both in one kernel, so that they share the device. Here they are two launches: the results are
the same, the overlap is not there.
"""

from __future__ import annotations

from typing import Any

import torch

from .arguments import refuse
from .checking import flag
from .decode_paged import BatchDecodeWithPagedKVCacheWrapper
from .errors import needs
from .options import Dtype, forward_changes
from .pod_batch import BatchPODWithPagedKVCacheWrapper, pod_dtypes
from .problem import check_kv_order
from .run_options import KVCache, Result
from .single import single_prefill_with_kv_cache
from .tracing import Scale


class PODWithPagedKVCacheWrapper:
    """Attention of one prefill request with keys of its own, and of a batch that decodes from a paged cache.

    Args:
        float_workspace_buffer: Scratch bytes, as for :class:`~attn_core.BatchDecodeWithPagedKVCacheWrapper`.
        kv_layout: ``NHD`` or ``HND``, of the paged cache.
        use_cuda_graph: Keep fixed buffers and the shape of the first plan of the decode part.
        paged_kv_indptr_buffer: Graph mode: int32 ``[batch_size + 1]``.
        paged_kv_indices_buffer: Graph mode: int32, as many entries as pages ever planned.
        paged_kv_last_page_len_buffer: Graph mode: int32 ``[batch_size]``.
        jit_args: Not supported.
        backend: ``auto``, a backend, or a candidate ``backend/path``.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        jit_args: list[object] | None = None,
        backend: str = "auto",
    ) -> None:
        refuse(jit_args=jit_args)
        self._decode = BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer, kv_layout, use_cuda_graph, True, paged_kv_indptr_buffer,
            paged_kv_indices_buffer, paged_kv_last_page_len_buffer, backend,
        )  # fmt: skip
        self._requested = backend

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the decode part keeps fixed buffers and a fixed shape."""
        return self._decode.is_cuda_graph_enabled

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Replace the float workspace; see the paged wrappers' method."""
        self._decode.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
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
        """Fix what the decode part computes; its arguments are those of the decode wrapper.

        Raises:
            ValueError: As there.
        """
        q_dtype, kv_dtype = pod_dtypes(q_data_type, kv_data_type, data_type)
        self._decode.plan(
            indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
            pos_encoding_mode=pos_encoding_mode, window_left=window_left,
            sm_scale=sm_scale, rope_scale=rope_scale, rope_theta=rope_theta, q_data_type=q_dtype,
            kv_data_type=kv_dtype,
        )  # fmt: skip

    begin_forward = plan

    def run(
        self,
        q_p: torch.Tensor,
        k_p: torch.Tensor,
        v_p: torch.Tensor,
        q_d: torch.Tensor,
        paged_kv_cache_d: KVCache,
        custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None,
        causal_p: bool = False,
        kv_layout_p: str = "NHD",
        pos_encoding_mode_p: str = "NONE",
        sm_scale_p: float | None = None,
        window_left_p: int = -1,
        rope_scale_p: float | None = None,
        rope_theta_p: float | None = None,
        return_lse_p: bool = False,
        custom_mask_d: torch.Tensor | None = None,
        packed_custom_mask_d: torch.Tensor | None = None,
        causal_d: bool = False,
        kv_layout_d: str = "NHD",
        pos_encoding_mode_d: str = "NONE",
        sm_scale_d: float | None = None,
        window_left_d: int = -1,
        rope_scale_d: float | None = None,
        rope_theta_d: float | None = None,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        return_lse_d: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
        *args: object,
    ) -> tuple[Any, Any]:
        """Attend with both parts.

        Args:
            q_p: ``[qo_len, num_qo_heads, head_dim]``, like all that end in ``_p`` as for
                :func:`~attn_core.single_prefill_with_kv_cache`.
            k_p: See there.
            v_p: See there.
            q_d: ``[batch_size, num_qo_heads, head_dim]``.
            paged_kv_cache_d: As for the decode wrapper's run(), in the layout given to the constructor.
            custom_mask_p: See ``q_p``.
            packed_custom_mask_p: See ``q_p``.
            causal_p: See ``q_p``.
            kv_layout_p: See ``q_p``.
            pos_encoding_mode_p: See ``q_p``.
            sm_scale_p: See ``q_p``.
            window_left_p: See ``q_p``.
            rope_scale_p: See ``q_p``.
            rope_theta_p: See ``q_p``.
            return_lse_p: Give ``(out_p, lse_p)`` in place of ``out_p``, the log-sum-exp in base 2. (Upstream
                ignores it.)
            custom_mask_d: Not supported, as the next one.
            packed_custom_mask_d: Not supported.
            causal_d: No effect: a decoding request has one row.
            kv_layout_d: The constructor decides; if it is not at its default, it must say the same, as must
                the next five of what was planned. (Upstream does without looking.)
            pos_encoding_mode_d: See ``kv_layout_d``.
            sm_scale_d: See ``kv_layout_d``.
            window_left_d: See ``kv_layout_d``.
            rope_scale_d: See ``kv_layout_d``.
            rope_theta_d: See ``kv_layout_d``.
            q_scale: Multiplies ``q_d``, the decode part's alone, like the next two.
            k_scale: Multiplies its keys.
            v_scale: Multiplies its output.
            return_lse_d: As ``return_lse_p``, of the decode part.
            use_fp16_qk_reduction: Permits a less exact sum; no backend here makes use of it.
            enable_pdl: A launch hint of upstream without meaning here.
            *args: None are taken.

        Returns:
            ``(out_p, out_d)``, shaped as ``q_p`` and ``q_d``; either is a pair ``(out, lse)`` where its lse
            was asked for.

        Raises:
            ValueError: No plan, or a tensor differs from what was planned.
            NotImplementedError: An argument no backend here has.
        """
        if args:
            raise TypeError(needs("run", "30 arguments at most", f"{len(args)} more", "core.arguments"))
        refuse(custom_mask_d=custom_mask_d, packed_custom_mask_d=packed_custom_mask_d)
        self._check_stated(
            kv_layout_d, pos_encoding_mode_d, window_left_d,
            {"sm_scale": sm_scale_d, "rope_scale": rope_scale_d, "rope_theta": rope_theta_d},
        )  # fmt: skip
        lse_p, lse_d = flag("return_lse_p", return_lse_p), flag("return_lse_d", return_lse_d)
        p: Result = single_prefill_with_kv_cache(
            q_p, k_p, v_p, custom_mask=custom_mask_p, packed_custom_mask=packed_custom_mask_p,
            causal=causal_p, kv_layout=kv_layout_p, pos_encoding_mode=pos_encoding_mode_p,
            sm_scale=sm_scale_p, window_left=window_left_p, rope_scale=rope_scale_p,
            rope_theta=rope_theta_p, return_lse=lse_p, backend=self._requested,
        )  # fmt: skip
        d: Result = self._decode.run(
            q_d, paged_kv_cache_d, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=lse_d
        )
        return p, d

    def _check_stated(
        self, kv_layout: str, pos_encoding_mode: str, window_left: int, numbers: dict[str, float | None]
    ) -> None:
        """Raise where a run states something else about the decode part than was planned."""
        planned = self._decode._planned().query.problem
        if check_kv_order(kv_layout) not in ("NHD", planned.kv.order):
            raise ValueError(needs("kv_layout_d", planned.kv.order, kv_layout, "core.pod-planned"))
        stated = forward_changes(pos_encoding_mode, window_left, None, **numbers)
        for name, value in stated.items():
            was = getattr(planned, name)
            near = isinstance(value, float) and abs(value - was) <= 1e-6 * abs(was)
            if value != was and not near:
                argument = "pos_encoding_mode" if name == "pos_encoding" else name
                raise ValueError(needs(f"{argument}_d", f"the planned {was}", value, "core.pod-planned"))

    def end_forward(self) -> None:
        """Do nothing; upstream's counterpart of ``begin_forward``."""


__all__ = ["BatchPODWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper"]
