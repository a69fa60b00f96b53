"""Prefill entry points, under upstream's module name."""

from functools import partial
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
    __getattr__ = partial(refusing, "prefill")
