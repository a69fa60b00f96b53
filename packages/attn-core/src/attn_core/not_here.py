"""Names of upstream's attention modules that exist there and not here: they can be imported and say so.

A program that imports such a name at its top and never calls it works unchanged; one that calls it is told
what to use. Names that are not upstream's stay an AttributeError.
"""

from __future__ import annotations

from collections.abc import Callable

from .errors import needs

_SPECIFIC = "the wrappers of attn_core (a kernel for one vendor's devices)"
_ONLY_ATTENTION = "attention wrappers only (this package has no {} functions)"
_NVFP4 = "keys and values of 8 bits or more (no NVFP4 cache here)"
_JIT = "backend= (kernels of a caller's own are a backend plugin here)"

_SAMPLING = (
    "min_p_sampling_from_probs",
    "sampling_from_logits",
    "sampling_from_probs",
    "softmax",
    "top_k_mask_logits",
    "top_k_renorm_probs",
    "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
)
_ROPE = (
    "apply_llama31_rope", "apply_llama31_rope_inplace", "apply_llama31_rope_pos_ids",
    "apply_llama31_rope_pos_ids_inplace", "apply_rope", "apply_rope_inplace", "apply_rope_pos_ids",
    "apply_rope_pos_ids_inplace", "apply_rope_with_cos_sin_cache", "apply_rope_with_cos_sin_cache_inplace",
    "mla_rope_quantize_fp8", "rope_quantize_fp8", "rope_quantize_fp8_append_paged_kv_cache",
)  # fmt: skip


def _all(wanted: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, wanted)


NAMES: dict[str, dict[str, str]] = {
    "decode": {
        **_all(
            _SPECIFIC, "cudnn_batch_decode_with_kv_cache", "trtllm_batch_decode_with_kv_cache",
            "xqa_batch_decode_with_kv_cache",
        ),
        "BatchDecodeMlaWithPagedKVCacheWrapper": "BatchMLAPagedAttentionWrapper",
        "single_decode_with_kv_cache_with_jit_module": _JIT,
    },
    "prefill": {
        **_all(
            _SPECIFIC, "cudnn_batch_prefill_with_kv_cache", "fmha_v2_prefill_deepseek",
            "fmha_v2_prefill_sm120", "fmha_varlen", "fmha_varlen_plan",
            "trtllm_batch_context_with_kv_cache", "trtllm_fmha_v2_prefill",
            "trtllm_ragged_attention_deepseek",
            "trtllm_sage_attention_quantize",
        ),
        "single_prefill_with_kv_cache_with_jit_module": _JIT,
    },
    "mla": _all(
        _SPECIFIC, "trtllm_batch_decode_sparse_mla_dsv4", "trtllm_batch_decode_with_kv_cache_mla",
        "xqa_batch_decode_with_kv_cache_mla",
    ),
    "page": _all(
        _NVFP4, "nvfp4_quantize_append_paged_kv_cache",
        "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    ),
    "sampling": _all(_ONLY_ATTENTION.format("sampling"), *_SAMPLING),
    "rope": _all(_ONLY_ATTENTION.format("rotary embedding"), *_ROPE),
    "xqa": _all(_SPECIFIC, "xqa", "xqa_mla"),
}  # fmt: skip
"""Name to what is there instead, by upstream's module."""

_TOP = (
    "BatchDecodeMlaWithPagedKVCacheWrapper", "cudnn_batch_decode_with_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache", "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    "trtllm_fmha_v2_prefill", "trtllm_sage_attention_quantize", "xqa", "xqa_mla", *_SAMPLING, *_ROPE[:10],
)  # fmt: skip
NAMES[""] = {name: text for names in list(NAMES.values()) for name, text in names.items() if name in _TOP}


def refusing(module: str, name: str) -> Callable[..., object]:
    """Return a callable under an upstream name that raises when it is called.

    Args:
        module: Upstream's module, "" for the package itself.
        name: The name asked for.

    Raises:
        AttributeError: Upstream has no such public name in that module, or none that is refused here.
    """
    wanted = NAMES.get(module, {}).get(name)
    if wanted is None:
        where = f"attn_core.{module}" if module else "attn_core"
        raise AttributeError(f"module {where!r} has no attribute {name!r}")

    def refused(*args: object, **kwargs: object) -> object:
        raise NotImplementedError(needs(name, wanted, "a call", "core.not-here"))

    refused.__name__ = refused.__qualname__ = name
    refused.__doc__ = f"Raise NotImplementedError: use {wanted}."
    return refused
