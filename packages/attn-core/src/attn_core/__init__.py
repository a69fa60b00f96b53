"""Attention planning, routing and reference kernels for AMD Instinct, independent of any kernel library.

The public names are those of FlashInfer 0.6.18; modules too (``attn_core.decode``, ``.prefill``,
``.page``, ``.cascade``, ``.mla``, ``.quantization``, ``.sampling``). Importing starts no compiler and touches
no device; backends are discovered when the first wrapper is planned.
"""

from .cache_view import CacheView
from .cascade import merge_state, merge_state_in_place, merge_states
from .decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
    single_decode_with_kv_cache,
)
from .errors import NoRoute, Unsupported
from .mla import BatchMLAPagedAttentionWrapper
from .page import append_paged_kv_cache, get_batch_indices_positions, get_seq_lens
from .plugins import configure
from .pool import DecodePlanPool
from .prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
)
from .quantization import packbits, segment_packbits
from .sampling import chain_speculative_sampling

__version__ = "0.1.0"

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "CacheView",
    "DecodePlanPool",
    "NoRoute",
    "Unsupported",
    "append_paged_kv_cache",
    "chain_speculative_sampling",
    "configure",
    "fast_decode_plan",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "packbits",
    "segment_packbits",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]
