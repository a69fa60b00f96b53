"""Arguments of the wrong kind, at every entry: named in the house's words, never torch's own error."""

import math

import pytest
import torch

import attn_core
from attn_core import CacheView, page, quantization, single_decode_with_kv_cache, single_prefill_with_kv_cache
from attn_core.attention import BatchAttention
from attn_core.cascade import MultiLevelCascadeAttentionWrapper
from attn_core.decode import BatchDecodeWithPagedKVCacheWrapper
from attn_core.merge import merge_state, merge_state_in_place, merge_states
from attn_core.mla import BatchMLAPagedAttentionWrapper
from attn_core.pod import BatchPODWithPagedKVCacheWrapper
from attn_core.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from attn_core.sampling import chain_speculative_sampling
from attn_core.sparse import (
    BlockSparseAttentionWrapper,
    VariableBlockSparseAttentionWrapper,
    convert_bsr_mask_layout,
)

from .kit import ints, workspace

F32 = torch.float32
FLAT = torch.ones(3)
SPARSE = torch.ones(3, dtype=torch.int32).to_sparse()
AWAY = torch.ones(1, device="meta")
TABLE = {"indptr": ints(0, 2, 3), "indices": ints(0, 2, 1), "last_page_len": ints(3, 2)}
SIZES = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 8, "page_size": 4}
QO = ints(0, 2, 3)


def rand(*shape):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1))


CACHE = rand(4, 2, 4, 2, 8)
PREFILL = {
    "qo_indptr": QO, "paged_kv_indptr": TABLE["indptr"], "paged_kv_indices": TABLE["indices"],
    "paged_kv_last_page_len": TABLE["last_page_len"], "num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 8,
    "page_size": 4, "q_data_type": F32,
}  # fmt: skip
LENGTHS = {
    "qo_indptr": QO, "kv_indptr": TABLE["indptr"], "kv_indices": TABLE["indices"], "kv_len_arr": ints(7, 2)
}  # fmt: skip
BLOCKS = {"indptr": ints(0, 2, 3), "indices": ints(0, 2, 1), "M": 5, "N": 9, "R": 3, "C": 3}
HEADS = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 8}
MAP = {
    "block_mask_map": torch.ones(2, 2, 3, dtype=torch.bool), "block_row_sz": ints(2, 3, 2, 3).view(2, 2),
    "block_col_sz": ints(3, 3, 3, 3, 3, 3).view(2, 3), **HEADS, "q_data_type": F32,
}  # fmt: skip
ROWS = {"q": rand(3, 4, 8), "k": rand(9, 2, 8), "v": rand(9, 2, 8)}
STATES = {"v_a": rand(3, 4, 8), "s_a": rand(3, 4), "v_b": rand(3, 4, 8), "s_b": rand(3, 4)}
DRAFTS = {
    "draft_probs": rand(2, 3, 5), "draft_token_ids": torch.ones(2, 3, dtype=torch.int64),
    "target_probs": rand(2, 4, 5),
}  # fmt: skip


def decode(**options):
    return BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True, **options)


def planned(wrapper, **plan):
    wrapper.plan(**plan)
    return wrapper


def paged(**more):
    return planned(BatchPrefillWithPagedKVCacheWrapper(workspace()), **{**PREFILL, **more})


def variable():
    return planned(VariableBlockSparseAttentionWrapper(workspace()), **MAP)


def decoding():
    return planned(decode(), **TABLE, **SIZES, q_data_type=F32)


# What is called (made anew for every case), and arguments that suit it.
CALLS = {
    "pool": (lambda: attn_core.DecodePlanPool, {"float_workspace_buffer": workspace(), "max_pages": 8}),
    "pool.plan": (
        lambda: attn_core.DecodePlanPool(workspace(), 8).plan,
        {**TABLE, **SIZES, "q_data_type": F32, "q_len_per_req": 1},
    ),
    "cascade.plan": (
        lambda: MultiLevelCascadeAttentionWrapper(2, workspace(4096)).plan,
        {
            "qo_indptr_arr": [ints(0, 3), QO], "paged_kv_indptr_arr": [ints(0, 1), ints(0, 1, 2)],
            "paged_kv_indices_arr": [ints(0), ints(1, 2)], "paged_kv_last_page_len": [ints(4), ints(1, 2)],
            **SIZES,
        },
    ),
    "decode": (lambda: BatchDecodeWithPagedKVCacheWrapper, {"float_workspace_buffer": workspace()}),
    "prefill": (lambda: BatchPrefillWithPagedKVCacheWrapper, {"float_workspace_buffer": workspace()}),
    "ragged": (lambda: BatchPrefillWithRaggedKVCacheWrapper, {"float_workspace_buffer": workspace()}),
    "cascade": (
        lambda: MultiLevelCascadeAttentionWrapper,
        {"num_levels": 2, "float_workspace_buffer": workspace()},
    ),
    "attention": (lambda: BatchAttention, {"device": "cpu"}),
    "decode.plan": (lambda: decode().plan, {**TABLE, **SIZES, "q_data_type": F32}),
    "prefill.plan": (lambda: BatchPrefillWithPagedKVCacheWrapper(workspace()).plan, PREFILL),
    "latent.plan": (
        lambda: BatchMLAPagedAttentionWrapper(workspace()).plan,
        {
            **LENGTHS, "num_heads": 4, "head_dim_ckv": 8, "head_dim_kpe": 4, "page_size": 4, "causal": True,
            "sm_scale": 0.3, "q_data_type": F32, "kv_data_type": F32,
        },
    ),
    "attention.plan": (
        lambda: BatchAttention(device="cpu").plan,
        {**LENGTHS, "num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 8, "head_dim_vo": 8, "page_size": 4},
    ),
    "blocks.plan": (lambda: BlockSparseAttentionWrapper(workspace()).plan, {**BLOCKS, **HEADS}),
    "variable.plan": (lambda: VariableBlockSparseAttentionWrapper(workspace()).plan, MAP),
    "fast_decode_plan": (
        lambda: lambda self, **o: attn_core.fast_decode_plan(decoding() if self is None else self, **o),
        {"self": None, **TABLE, **SIZES, "q_data_type": F32, "global_override_indptr_cpu": ints(0, 2, 3)},
    ),
    "decode.run": (lambda: decoding().run, {"q": rand(2, 4, 8), "paged_kv_cache": CACHE}),
    "decode.forward": (lambda: decoding().forward, {"q": rand(2, 4, 8), "paged_kv_cache": CACHE}),
    "prefill.run": (lambda: paged().run, {"q": ROWS["q"], "paged_kv_cache": CACHE}),
    "prefill.forward": (lambda: paged().forward, {"q": ROWS["q"], "paged_kv_cache": CACHE}),
    "attention.run": (
        lambda: planned(
            BatchAttention(device="cpu"), **LENGTHS, num_qo_heads=4, num_kv_heads=2, head_dim_qk=8,
            head_dim_vo=8, page_size=4, q_data_type=F32, kv_data_type=F32,
        ).run,
        {"q": ROWS["q"], "kv_cache": CACHE},
    ),
    "variable.run": (lambda: variable().run, {"q": rand(4, 5, 8), "k": rand(2, 9, 8), "v": rand(2, 9, 8)}),
    "single_prefill": (lambda: single_prefill_with_kv_cache, ROWS),
    "single_decode": (lambda: single_decode_with_kv_cache, {**ROWS, "q": rand(4, 8)}),
    "convert": (
        lambda: convert_bsr_mask_layout,
        {"mask": torch.ones(3, 3, 3, dtype=torch.bool), "indptr": ints(0, 2, 3)},
    ),
    "packbits": (lambda: quantization.packbits, {"x": torch.ones(11, dtype=torch.bool)}),
    "segment_packbits": (
        lambda: quantization.segment_packbits,
        {"x": torch.ones(11, dtype=torch.bool), "indptr": ints(0, 4, 11)},
    ),
    "append": (
        lambda: page.append_paged_kv_cache,
        {
            "append_key": rand(3, 2, 8), "append_value": rand(3, 2, 8), "batch_indices": ints(0, 1, 1),
            "positions": ints(5, 0, 1), "paged_kv_cache": CACHE.clone(), "kv_indices": ints(0, 2, 1),
            "kv_indptr": ints(0, 2, 3), "kv_last_page_len": ints(3, 2),
        },
    ),
    "positions": (
        lambda: page.get_batch_indices_positions,
        {"append_indptr": QO, "seq_lens": ints(7, 2), "nnz": 3},
    ),
    "seq_lens": (
        lambda: page.get_seq_lens,
        {"kv_indptr": TABLE["indptr"], "kv_last_page_len": ints(3, 2), "page_size": 4},
    ),
    "merge_state": (lambda: merge_state, STATES),
    "merge_states": (lambda: merge_states, {"v": rand(3, 2, 4, 8), "s": rand(3, 2, 4)}),
    "sampling": (lambda: chain_speculative_sampling, DRAFTS),
    "CacheView": (lambda: CacheView, {"storage": CACHE, "k_path": (1, 0), "v_path": (1, 1)}),
}  # fmt: skip
FLAGS = {
    "decode": ["use_cuda_graph", "use_tensor_cores"], "prefill": ["use_cuda_graph"],
    "ragged": ["use_cuda_graph"], "cascade": ["use_cuda_graph"],
    "decode.plan": ["disable_split_kv", "needs_lse"],
    "prefill.plan": ["causal", "disable_split_kv", "needs_lse"], "latent.plan": ["causal", "needs_lse"],
    "attention.plan": ["causal"], "cascade.plan": ["causal"], "blocks.plan": ["causal"],
    "variable.plan": ["causal"],
    "decode.run": ["return_lse"], "prefill.run": ["return_lse"], "prefill.forward": ["causal"],
    "variable.run": ["return_lse"], "single_prefill": ["causal", "return_lse"],
    "single_decode": ["use_tensor_cores", "return_lse"],
}  # fmt: skip


class Array:
    """As numpy's are: compared by elements, with no truth, hash or index, although there is such a method."""

    __hash__ = None

    def __eq__(self, other):
        return self

    def __bool__(self):
        raise ValueError("the truth of an array is ambiguous")

    def __index__(self):
        raise TypeError("only a scalar is an index")


HUGE, ARRAY = 10**12, Array()
WRONG = {
    "pool": [
        ("float_workspace_buffer", 3), ("max_pages", 2**31), ("max_pages", 0), ("kv_layout", "x"),
        ("backend", 3), ("max_seq_len", 0), ("max_seq_len", "x"),
    ],
    "pool.plan": [("q_len_per_req", value) for value in (None, "x", [], 1.0, True, ARRAY, 2**64)],
    "cascade.plan": [
        ("window_left", ARRAY), ("window_left", FLAT), ("window_left", 3), ("pos_encoding_mode", ARRAY),
    ],
    "append": [("backend", []), ("backend", {}), ("backend", ARRAY), ("kv_layout", ARRAY)],
    "cascade": [("num_levels", value) for value in (0, 2**31, 2**64)],
    "attention": [("device", "x"), ("device", 2.5), ("device", True), ("device", []), ("device", -1)],
    "decode.plan": [
        ("indptr", SPARSE), ("last_page_len", SPARSE), ("seq_lens", SPARSE), ("window_left", HUGE),
        ("num_qo_heads", HUGE), ("page_size", HUGE), ("q_len_per_req", 2**63), ("block_tables", ARRAY),
    ],
    "decode": [("kv_layout", ARRAY), ("use_cuda_graph", ARRAY)],
    "latent.plan": [("sm_scale", value) for value in (math.nan, math.inf, -math.inf, True, None)],
    "prefill.plan": [
        ("qo_indptr", SPARSE), ("custom_mask", AWAY.bool()),
        ("custom_mask", torch.ones(16).bool().to_sparse()),
        ("packed_custom_mask", torch.ones(3, dtype=torch.uint8, device="meta")),
        ("packed_custom_mask", torch.ones(3, dtype=torch.uint8).to_sparse()),
    ],
    "attention.plan": [("kv_len_arr", SPARSE)],
    "variable.plan": [
        ("block_mask_map", MAP["block_mask_map"].to("meta")),
        ("block_row_sz", MAP["block_row_sz"].to("meta")),
        ("block_col_sz", MAP["block_col_sz"].to("meta")),
        ("block_mask_map", MAP["block_mask_map"].to_sparse()),
        ("block_col_sz", torch.full((2, 3), 2**31 - 1, dtype=torch.int32)),
    ],
    "fast_decode_plan": [
        ("self", 3), ("self", torch.ones(1)), ("page_size", FLAT), ("global_override_indptr_cpu", SPARSE),
    ],
    "decode.run": [
        ("q", rand(2, 4, 8).to_sparse()), ("window_left", FLAT), ("window_left", "x"),
        ("q_len_per_req", FLAT),
        ("out", rand(2, 4, 8).to_sparse()), ("paged_kv_cache", CACHE.to_sparse()),
    ],
    "decode.forward": [
        *(("window_left", value) for value in ("x", [], FLAT, None, 1 + 2j, HUGE)),
        ("pos_encoding_mode", ARRAY),
    ],
    "prefill.run": [("window_left", FLAT), ("window_left", "x"), ("q", rand(3, 4, 8).to_sparse())],
    "prefill.forward": [("window_left", "x"), ("window_left", FLAT)],
    "attention.run": [("logits_soft_cap", FLAT), ("logits_soft_cap", "x")],
    "variable.run": [
        ("out", 3), ("out", rand(4, 5, 8).to_sparse()), ("out", rand(1, 1, 8).expand(4, 5, 8)), ("lse", "x"),
        ("lse", rand(4, 5).double()), ("q", rand(4, 5, 8).to_sparse()), ("k", 3),
    ],
    "single_prefill": [("backend", []), ("backend", {}), ("custom_mask", torch.ones(3, 9).to("meta").bool())],
    "single_decode": [("window_left", HUGE), ("window_left", "x")],
    "convert": [
        ("mask", 3), ("mask", FLAT), ("indptr", [0, 2, 3]), ("indptr", FLAT), ("indptr", ints(0, 2, 9)),
        ("indptr", ints(0, 3, 2)), ("indptr", ints(1, 2)), ("indptr", ints()),
    ],
    "packbits": [("bitorder", ARRAY), ("x", [1]), ("x", None), ("x", SPARSE)],
    "segment_packbits": [("x", [1]), ("indptr", [0, 11]), ("indptr", QO.to("meta")), ("indptr", SPARSE)],
    "positions": [
        ("append_indptr", [0]), ("seq_lens", None), ("nnz", HUGE), ("nnz", int), ("nnz", ARRAY),
        ("append_indptr", SPARSE),
    ],
    "seq_lens": [
        ("page_size", int), ("page_size", 2**100), ("page_size", 0), ("kv_indptr", ints(0, 2, 2**31 - 1)),
        ("kv_indptr", [0]), ("kv_last_page_len", 3)],
    "merge_state": [("v_a", rand(3, 4, 8).to_sparse()), ("s_b", None)],
    "merge_states": [("v", rand(3, 2, 4, 8).to_sparse())],
    "sampling": [
        ("draft_probs", DRAFTS["draft_probs"].to_sparse()), ("generator", "x"), ("generator", FLAT),
        ("backend", []),
    ],
    "CacheView": [("k_path", 2.5), ("v_path", None), ("k_path", {}), ("v_path", torch.tensor(1))],
}  # fmt: skip
CASES = [
    *((call, name, value) for call, names in FLAGS.items() for name in names for value in (FLAT, "x", 2, [])),
    *((call, name, value) for call, pairs in WRONG.items() for name, value in pairs),
]


@pytest.mark.parametrize(("call", "name", "value"), CASES, ids=lambda value: str(value)[:24])
def test_it_is_refused_in_the_houses_words(call, name, value):
    make, given = CALLS[call]
    refusals = (TypeError, ValueError, NotImplementedError)
    with pytest.raises(refusals, match=r"needs .*got .*\[core\.[\w-]+\]"):
        make()(**{**given, name: value})


@pytest.mark.parametrize("call", CALLS)
def test_the_call_without_the_mistake_is_served(call):
    make, given = CALLS[call]
    make()(**given)


@pytest.mark.parametrize("value", [True, 1, None])
def test_what_is_true_or_false(value):
    assert paged(causal=value)._causal is bool(value)


def test_a_leaf_that_requires_a_gradient_is_written_to():
    states = {name: torch.nn.Parameter(t.clone()) for name, t in STATES.items()}
    want = merge_state(*STATES.values())
    merge_state_in_place(*states.values())
    assert torch.equal(states["v_a"].detach(), want[0])
    assert torch.equal(states["s_a"].detach(), want[1])
    out = torch.nn.Parameter(torch.zeros(4, 5, 8))
    given = CALLS["variable.run"][1]
    assert variable().run(**given, out=out) is out
    assert torch.equal(out.detach(), variable().run(**given))


def test_two_batches_refuse_a_flag_too():
    wrapper = BatchPODWithPagedKVCacheWrapper(workspace())
    table = (QO, TABLE["indptr"], TABLE["indices"], TABLE["last_page_len"])
    wrapper.plan(*table, *table, 4, 2, 8, 4, q_data_type=F32)
    for name in ("causal_p", "return_lse"):
        with pytest.raises(TypeError, match=r"needs True or False, got Tensor \[core.flag\]"):
            wrapper.run(ROWS["q"], CACHE, ROWS["q"], CACHE, **{name: FLAT})


def test_a_flag_is_looked_at_beside_a_mask_that_replaces_it():
    with pytest.raises(TypeError, match=r"causal: needs True or False, got str \[core.flag\]"):
        paged(custom_mask=torch.ones(16, dtype=torch.bool), causal="x")


@pytest.mark.parametrize("value", [None, "", [], {}, False, 0])
def test_a_sink_that_is_nothing_is_none(value):
    q = rand(2, 4, 8)
    assert torch.equal(decoding().run(q, CACHE, sinks=value), decoding().run(q, CACHE))


INT32_MIN = -(2**31)
FALLS = ints(0, 5, INT32_MIN)
WRAPPED = [  # differences of int32 that wrap to lengths
    ("decode.plan", "indptr"), ("prefill.plan", "qo_indptr"), ("prefill.plan", "paged_kv_indptr"),
    ("latent.plan", "qo_indptr"), ("latent.plan", "kv_indptr"), ("seq_lens", "kv_indptr"),
    ("positions", "append_indptr"), ("blocks.plan", "indptr"), ("append", "kv_indptr"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "name"), WRAPPED)
def test_an_indptr_that_falls_by_more_than_int32_holds_is_refused(call, name):
    make, given = CALLS[call]
    with pytest.raises(ValueError, match=r"indptr.*-2147483\d+"):
        make()(**{**given, name: FALLS})


def test_an_indptr_that_wraps_and_comes_back_is_refused():
    table = {"indptr": ints(0, 5, INT32_MIN, -1, 2**31 - 1), "last_page_len": ints(1, 1, 1, 1)}
    with pytest.raises(ValueError, match=r"kv_indptr\[2\]: needs at least .* = 5"):
        decode().plan(**{**TABLE, **table}, **{**SIZES, "page_size": 1})
