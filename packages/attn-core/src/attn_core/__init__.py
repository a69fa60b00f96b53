"""Attention planning, routing and reference kernels for AMD Instinct, independent of any kernel library.

The public names are those of FlashInfer 0.6.18; modules too (``attn_core.decode``, ``.prefill``, ``.page``,
``.cascade``, ``.mla``, ``.attention``, ``.pod``, ``.sparse``, ``.quantization``, ``.sampling``). Importing
starts no compiler and touches no device; backends are discovered when the first wrapper is planned. Names are
imported, and torch with them, when they are first used: ``attn --help`` needs neither.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .attention import BatchAttention, BatchAttentionWithAttentionSinkWrapper
    from .cache_view import CacheView
    from .cascade import (
        BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
        BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
        MultiLevelCascadeAttentionWrapper,
        merge_state,
        merge_state_in_place,
        merge_states,
    )
    from .decode import (
        BatchDecodeWithPagedKVCacheWrapper,
        CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
        fast_decode_plan,
        single_decode_with_kv_cache,
    )
    from .errors import NoRoute, Unsupported
    from .mla import BatchMLAPagedAttentionWrapper
    from .page import (
        append_paged_kv_cache,
        append_paged_mla_kv_cache,
        get_batch_indices_positions,
        get_seq_lens,
    )
    from .plugins import configure
    from .pod import BatchPODWithPagedKVCacheWrapper, PODWithPagedKVCacheWrapper
    from .pool import DecodePlanPool
    from .prefill import (
        BatchPrefillWithPagedKVCacheWrapper,
        BatchPrefillWithRaggedKVCacheWrapper,
        single_prefill_with_kv_cache,
        single_prefill_with_kv_cache_return_lse,
    )
    from .quantization import packbits, segment_packbits
    from .sampling import chain_speculative_sampling
    from .sparse import BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper

__version__ = "0.1.0"

_HOMES = {
    "attention": ("BatchAttention", "BatchAttentionWithAttentionSinkWrapper"),
    "cache_view": ("CacheView",),
    "cascade": (
        "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
        "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
        "MultiLevelCascadeAttentionWrapper",
        "merge_state",
        "merge_state_in_place",
        "merge_states",
    ),
    "decode": (
        "BatchDecodeWithPagedKVCacheWrapper",
        "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
        "fast_decode_plan",
        "single_decode_with_kv_cache",
    ),
    "errors": ("NoRoute", "Unsupported"),
    "mla": ("BatchMLAPagedAttentionWrapper",),
    "page": (
        "append_paged_kv_cache",
        "append_paged_mla_kv_cache",
        "get_batch_indices_positions",
        "get_seq_lens",
    ),
    "plugins": ("configure",),
    "pod": ("BatchPODWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper"),
    "pool": ("DecodePlanPool",),
    "prefill": (
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
        "single_prefill_with_kv_cache",
        "single_prefill_with_kv_cache_return_lse",
    ),
    "quantization": ("packbits", "segment_packbits"),
    "sampling": ("chain_speculative_sampling",),
    "sparse": ("BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPODWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "BlockSparseAttentionWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "CacheView",
    "DecodePlanPool",
    "MultiLevelCascadeAttentionWrapper",
    "NoRoute",
    "PODWithPagedKVCacheWrapper",
    "Unsupported",
    "VariableBlockSparseAttentionWrapper",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
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


def __getattr__(name: str) -> object:
    if name in _HOME:
        found: object = getattr(import_module(f".{_HOME[name]}", __name__), name)
    elif name in _HOMES:
        found = import_module(f".{name}", __name__)
    else:
        found = import_module(".not_here", __name__).refusing("", name)
    globals()[name] = found  # asked once
    return found


def __dir__() -> list[str]:
    return sorted({*__all__, *_HOMES, "__version__"})
