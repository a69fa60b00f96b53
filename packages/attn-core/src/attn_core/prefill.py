"""Prefill entry points, under upstream's module name."""

from typing import TYPE_CHECKING

from .not_here import refusing
from .prefill_paged import BatchPrefillWithPagedKVCacheWrapper
from .prefill_ragged import BatchPrefillWithRaggedKVCacheWrapper
from .single import single_prefill_with_kv_cache, single_prefill_with_kv_cache_return_lse

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        return refusing("prefill", name)
