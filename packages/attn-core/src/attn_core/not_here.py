"""Names of upstream that exist there and not here: they can be imported and say so.

A program that imports such a name at its top and never calls it works unchanged; one that calls it is told
what to use. Names that are not upstream's stay an AttributeError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .errors import needs

_SPECIFIC = "the wrappers of attn_core (a kernel for one vendor's devices)"
_ONLY_ATTENTION = "attention wrappers only (this package has no {})"
_NVFP4 = "keys and values of 8 bits or more (no NVFP4 cache here)"
OWN_KERNELS = "backend= (kernels of a caller's own are a backend plugin here)"
_NO_MODULE = "the wrappers and functions of attn_core (there is no compiled module to call)"

_MLA = """
    trtllm_batch_decode_sparse_mla_dsv4 trtllm_batch_decode_with_kv_cache_mla
    xqa_batch_decode_with_kv_cache_mla
"""
_FP4 = """
    block_scale_interleave e2m1_and_ufp8sf_scale_to_float fp4_quantize get_fp4_quantization_module
    mxfp4_dequantize mxfp4_dequantize_host mxfp4_quantize nvfp4_batched_quantize
    nvfp4_block_scale_interleave nvfp4_kv_dequantize nvfp4_kv_dequantize_paged nvfp4_kv_quantize
    nvfp4_quantize nvfp4_quantize_paged_kv_cache scaled_fp4_grouped_quantize shuffle_matrix_a
    shuffle_matrix_sf_a silu_and_mul_nvfp4_quantize
"""
_MOE = """
    B12xMoEWrapper CuteDslMoEWrapper CuteDslMxfp8Mxfp4MoEWrapper b12x_fused_moe
    cute_dsl_fused_moe_mxfp8_mxfp4 cute_dsl_fused_moe_nvfp4 cutlass_fused_moe
    reorder_rows_for_gated_act_gemm trtllm_bf16_moe trtllm_bf16_routed_moe trtllm_fp4_block_scale_moe
    trtllm_fp4_block_scale_routed_moe trtllm_fp8_block_scale_moe trtllm_fp8_block_scale_routed_moe
    trtllm_fp8_per_tensor_scale_moe trtllm_fp8_per_tensor_scale_routed_moe
"""
_OTHERS = """
    ActivationType RecurrentKDAPrefillWorkspace RoutingMethodType SfLayout TopKTieBreak
    chunk_gated_delta_rule fi_trace fused_kda_decode is_gated_activation nvfp4_attention_sm120_fwd
    nvfp4_attention_sm120_quantize_qkv packed_kda_decode recurrent_kda top_k top_k_page_table_transform
    top_k_ragged_transform top_k_varlen
"""

_TABLE: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("decode", "cudnn", "cudnn.decode", ""), _SPECIFIC, "cudnn_batch_decode_with_kv_cache"),
    (("decode",), _SPECIFIC, "trtllm_batch_decode_with_kv_cache xqa_batch_decode_with_kv_cache"),
    (("decode", "mla"), _SPECIFIC, _MLA),
    (("decode", "xqa", ""), _SPECIFIC, "xqa xqa_mla"),
    (("decode", ""), "BatchMLAPagedAttentionWrapper", "BatchDecodeMlaWithPagedKVCacheWrapper"),
    (("decode",), OWN_KERNELS, "single_decode_with_kv_cache_with_jit_module"),
    (("prefill", "cudnn", "cudnn.prefill"), _SPECIFIC, "cudnn_batch_prefill_with_kv_cache"),
    (
        ("prefill",),
        _SPECIFIC,
        """
        fmha_v2_prefill_deepseek fmha_v2_prefill_sm120 fmha_varlen fmha_varlen_plan
        trtllm_batch_context_with_kv_cache trtllm_ragged_attention_deepseek
        """,
    ),
    (("prefill", ""), _SPECIFIC, "trtllm_fmha_v2_prefill trtllm_sage_attention_quantize"),
    (("prefill",), OWN_KERNELS, "single_prefill_with_kv_cache_with_jit_module"),
    (
        ("mla",),
        _SPECIFIC,
        """
        DSV4HCAMetadata MLAHeadDimensions MLALayerDimensions batch_decode_sparse_mla_dsv4
        convert_compressed_page_aligned_sparse_indices_to_hca_metadata
        """,
    ),
    (
        ("page", ""),
        _NVFP4,
        "nvfp4_quantize_append_paged_kv_cache nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
    ),
    (("quantization", "quantization.fp4_quantization", "fp4_quantization", ""), _NVFP4, _FP4),
    (
        ("quantization", "quantization.fp8_quantization", ""),
        _ONLY_ATTENTION.format("MXFP8 quantization"),
        "mxfp8_dequantize_host mxfp8_grouped_quantize mxfp8_quantize",
    ),
    (
        ("quantization", "quantization.fp8_quantization"),
        _ONLY_ATTENTION.format("group quantization"),
        "per_token_group_quant_8bit",
    ),
    (
        ("sampling", ""),
        _ONLY_ATTENTION.format("sampling functions"),
        """
        min_p_sampling_from_probs sampling_from_logits sampling_from_probs softmax top_k_mask_logits
        top_k_renorm_probs top_k_sampling_from_probs top_k_top_p_sampling_from_logits
        top_k_top_p_sampling_from_probs top_p_renorm_probs top_p_sampling_from_probs
        """,
    ),
    (
        ("sampling",),
        _ONLY_ATTENTION.format("sampling functions"),
        "get_seed_and_offset top_k_renorm_prob top_p_renorm_prob",
    ),
    (
        ("rope", ""),
        _ONLY_ATTENTION.format("rotary embedding functions"),
        """
        apply_llama31_rope apply_llama31_rope_inplace apply_llama31_rope_pos_ids
        apply_llama31_rope_pos_ids_inplace apply_rope apply_rope_inplace apply_rope_pos_ids
        apply_rope_pos_ids_inplace apply_rope_with_cos_sin_cache apply_rope_with_cos_sin_cache_inplace
        """,
    ),
    (
        ("rope",),
        _ONLY_ATTENTION.format("rotary embedding functions"),
        "mla_rope_quantize_fp8 rope_quantize_fp8 rope_quantize_fp8_append_paged_kv_cache",
    ),
    (
        ("norm", ""),
        _ONLY_ATTENTION.format("norms"),
        """
        add_rmsnorm_fp4quant fused_add_rmsnorm fused_add_rmsnorm_quant
        fused_dit_gate_residual_layernorm_gamma_beta fused_dit_gate_residual_layernorm_scale_shift
        fused_dit_residual_layernorm_scale_shift fused_qk_rmsnorm_rope fused_rmsnorm_silu
        gemma_fused_add_rmsnorm gemma_rmsnorm layernorm layernorm_quant rmsnorm rmsnorm_fp4quant
        rmsnorm_quant
        """,
    ),
    (
        ("activation", ""),
        _ONLY_ATTENTION.format("activations"),
        "gelu_and_mul gelu_tanh_and_mul silu_and_mul silu_and_mul_scaled_nvfp4_experts_quantize",
    ),
    (
        ("gemm", ""),
        _ONLY_ATTENTION.format("matrix products"),
        """
        SegmentGEMMWrapper bmm_bf16 bmm_fp8 bmm_mxfp8 mm_bf16 mm_bf16_fp4 mm_fp4 mm_fp8 mm_mxfp8
        mm_nvfp4_svdquant nvfp4_quantize_smooth prepare_bf16_fp4_weights svdquant_linear tgv_gemm_sm100
        """,
    ),
    (
        ("",),
        _ONLY_ATTENTION.format("matrix products"),
        """
        grouped_mm_bf16 grouped_mm_fp4 grouped_mm_fp8 grouped_mm_mxfp8 prepare_low_latency_gemm_weights
        """,
    ),
    (("",), _ONLY_ATTENTION.format("mixture of experts"), _MOE),
    (("",), _ONLY_ATTENTION.format("operators of this kind"), _OTHERS),
    (("triton.cascade",), "merge_states()", "variable_length_merge_states"),
    (("cascade",), _NO_MODULE, "get_cascade_module"),
    (("decode",), _NO_MODULE, "get_batch_decode_jit_module get_batch_decode_module get_single_decode_module"),
    (
        ("prefill",),
        _NO_MODULE,
        """
        get_batch_prefill_jit_module get_batch_prefill_module get_customize_batch_prefill_module
        get_single_prefill_module
        """,
    ),
    (("decode", "mla"), _NO_MODULE, "get_batch_decode_mla_module get_batch_mla_module get_mla_module"),
    (("page",), _NO_MODULE, "get_page_module"),
    (
        ("page",),
        "the wrappers (plan() takes pages of any size; there are no offsets of single keys to make)",
        "block_sparse_indices_to_vector_sparse_offsets",
    ),
    (("pod",), _NO_MODULE, "get_batch_pod_module get_pod_module"),
    (("attention",), _NO_MODULE, "get_holistic_attention_module"),
    (("sampling",), _NO_MODULE, "get_sampling_module"),
    (("quantization",), _NO_MODULE, "get_quantization_module"),
    (("activation",), _NO_MODULE, "get_act_and_mul_module"),
    (("norm",), _NO_MODULE, "get_norm_module"),
    (("rope",), _NO_MODULE, "get_rope_module"),
)

NAMES: dict[str, dict[str, str]] = {}
"""Name to what is there instead, by upstream's module; "" is the package itself."""
for _modules, _wanted, _names in _TABLE:
    for _module in _modules:
        NAMES.setdefault(_module, {}).update(dict.fromkeys(_names.split(), _wanted))


def refusing(module: str, name: str) -> Callable[..., object]:
    """Return a callable, of a class name a class, under an upstream name that raises when it is called.

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
    if name[0].isupper():
        return _Refused(name, (), {"_wanted": wanted, "__doc__": f"Raise NotImplementedError: use {wanted}."})
    return _function(name, wanted)


def _function(name: str, wanted: str) -> Callable[..., object]:
    def refused(*args: object, **kwargs: object) -> object:
        raise NotImplementedError(needs(name, wanted, "a call", "core.not-here"))

    refused.__name__ = refused.__qualname__ = name
    refused.__doc__ = f"Raise NotImplementedError: use {wanted}."
    return refused


class _Refused(type):
    """A class of upstream that is not here: fit for isinstance(), no more."""

    _wanted: str

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        _function(cls.__name__, cls._wanted)()

    def __getattr__(cls, name: str) -> Callable[..., object]:
        if name.startswith("_"):
            raise AttributeError(f"class {cls.__name__!r} has no attribute {name!r}")
        return _function(f"{cls.__name__}.{name}", cls._wanted)
