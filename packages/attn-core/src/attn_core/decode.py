"""Decode entry points, under upstream's module name."""

from functools import partial
from typing import TYPE_CHECKING

from .decode_graph import CUDAGraphBatchDecodeWithPagedKVCacheWrapper
from .decode_paged import BatchDecodeWithPagedKVCacheWrapper
from .fast_plan import fast_decode_plan
from .not_here import refusing
from .single import single_decode_with_kv_cache

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
]


if not TYPE_CHECKING:
    __getattr__ = partial(refusing, "decode")
