"""Upstream's deprecated wrappers for one prefix shared by a whole batch.

A :class:`~attn_core.MultiLevelCascadeAttentionWrapper` of two levels does the same with the prefix in the
cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from .decode_paged import BatchDecodeWithPagedKVCacheWrapper
from .merge import merge_state_in_place
from .options import Dtype
from .prefill_paged import BatchPrefillWithPagedKVCacheWrapper
from .run_options import KVCache
from .single import single_prefill_with_kv_cache

W = TypeVar("W", BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper)


class _SharedPrefix(Generic[W]):
    """What the two wrappers share."""

    _paged: Callable[..., W]

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", backend: str = "auto"
    ) -> None:
        self._unique: W = self._paged(float_workspace_buffer, kv_layout, backend=backend)
        self._kv_layout, self._requested = kv_layout, backend

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Replace the float workspace; see the paged wrappers' method."""
        self._unique.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def end_forward(self) -> None:
        """Do nothing; upstream's counterpart of ``begin_forward``."""

    def _add_prefix(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        sm_scale: float | None = None,
    ) -> torch.Tensor:
        """Merge attention over the shared keys, all of which every row sees, into that over its own."""
        shared = single_prefill_with_kv_cache(
            q, k_shared, v_shared, causal=False, kv_layout=self._kv_layout, sm_scale=sm_scale,
            backend=self._requested, return_lse=True,
        )  # fmt: skip
        (out, lse), (shared_out, shared_lse) = unique, shared
        merge_state_in_place(out, lse, shared_out, shared_lse)
        return out


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(_SharedPrefix[BatchDecodeWithPagedKVCacheWrapper]):
    """Decode for a batch whose requests all start with the same keys, kept outside the paged cache.

    Not for use during graph capture.

    Args:
        float_workspace_buffer: Scratch bytes, as for :class:`BatchDecodeWithPagedKVCacheWrapper`.
        kv_layout: ``NHD`` or ``HND``, of the cache and of the shared keys and values.
        backend: ``auto`` or a backend.
    """

    _paged = BatchDecodeWithPagedKVCacheWrapper

    def begin_forward(
        self,
        unique_kv_indptr: torch.Tensor,
        unique_kv_indices: torch.Tensor,
        unique_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: Dtype = "float16",
    ) -> None:
        """Plan the keys of each request that are not shared; see the decode wrapper's plan().

        Args:
            unique_kv_indptr: int32 ``[batch_size + 1]``, like all that follow as for that plan(), but:
            unique_kv_indices: See there.
            unique_kv_last_page_len: See there.
            num_qo_heads: See there.
            num_kv_heads: See there.
            head_dim: See there.
            page_size: See there.
            data_type: Of q and of all keys and values.
        """
        self._unique.plan(
            unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len, num_qo_heads, num_kv_heads,
            head_dim, page_size, q_data_type=data_type, kv_data_type=data_type, needs_lse=True,
        )  # fmt: skip

    def forward(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_cache: KVCache,
    ) -> torch.Tensor:
        """Attend over the shared keys and each request's own.

        Args:
            q: ``[batch_size, num_qo_heads, head_dim]``.
            k_shared: ``[shared_len, num_kv_heads, head_dim]`` (NHD; heads first in HND).
            v_shared: As ``k_shared``.
            unique_kv_cache: As for the decode wrapper's run().

        Returns:
            ``[batch_size, num_qo_heads, head_dim]``.

        Raises:
            ValueError: No plan, or a tensor does not fit.
        """
        return self._add_prefix(q, k_shared, v_shared, self._unique.run_return_lse(q, unique_kv_cache))


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(_SharedPrefix[BatchPrefillWithPagedKVCacheWrapper]):
    """Prefill for a batch whose requests all start with the same keys, kept outside the paged cache.

    Not for use during graph capture.

    Args:
        float_workspace_buffer: Scratch bytes, as for :class:`BatchPrefillWithPagedKVCacheWrapper`.
        kv_layout: ``NHD`` or ``HND``, of the cache and of the shared keys and values.
        backend: ``auto`` or a backend.
    """

    _paged = BatchPrefillWithPagedKVCacheWrapper

    def begin_forward(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        q_data_type: Dtype = "float16",
        kv_data_type: Dtype | None = None,
    ) -> None:
        """Plan the keys of each request that are not shared; see the paged prefill wrapper's plan()."""
        self._unique.plan(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
            head_dim, page_size, q_data_type=q_data_type, kv_data_type=kv_data_type, needs_lse=True,
        )  # fmt: skip

    def forward(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_cache: KVCache,
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """Attend over the shared keys and each request's own.

        Args:
            q: ``[rows, num_qo_heads, head_dim]``.
            k_shared: ``[shared_len, num_kv_heads, head_dim]`` (NHD; heads first in HND).
            v_shared: As ``k_shared``.
            unique_kv_cache: As for the paged prefill wrapper's run().
            causal: Among each request's own keys, bottom-right aligned; the shared ones are all seen.
            use_fp16_qk_reduction: Permits a less exact sum; no backend here makes use of it.
            sm_scale: Default ``1 / sqrt(head_dim)``.
            rope_scale: No effect: no position encoding is applied, as upstream.
            rope_theta: No effect, for the same reason.

        Returns:
            ``[rows, num_qo_heads, head_dim]``.

        Raises:
            ValueError: No plan, or a tensor does not fit.
        """
        unique = self._unique.forward_return_lse(q, unique_kv_cache, causal=causal, sm_scale=sm_scale)
        return self._add_prefix(q, k_shared, v_shared, unique, sm_scale)
