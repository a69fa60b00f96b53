"""A tensor whose storage was shrunk below what its elements take is refused by whatever takes tensors."""

import dataclasses

import pytest
import torch

from attn_core import append_paged_kv_cache
from attn_core.cascade import MultiLevelCascadeAttentionWrapper
from attn_core.decode import BatchDecodeWithPagedKVCacheWrapper
from attn_core.merge import merge_state_in_place
from attn_core.mla import BatchMLAPagedAttentionWrapper
from attn_core.pod import PODWithPagedKVCacheWrapper
from attn_core.pod_batch import BatchPODWithPagedKVCacheWrapper
from attn_core.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from attn_core.sparse import BlockSparseAttentionWrapper

from .kit import ints, workspace
from .test_wrong_types import (
    BLOCKS,
    CACHE,
    CALLS,
    F32,
    HEADS,
    LENGTHS,
    PREFILL,
    QO,
    ROWS,
    SIZES,
    STATES,
    TABLE,
    planned,
    rand,
)

K, V = CACHE.unbind(1)
TABLES = (QO, TABLE["indptr"], TABLE["indices"], TABLE["last_page_len"])
WRITTEN = {"out": torch.zeros(3, 4, 8), "lse": torch.zeros(3, 4), "return_lse": True}
PAIR = {"q": ROWS["q"], "k": K.contiguous(), "v": V.contiguous()}


def with_pair(run):
    return lambda q, k, v, **more: run(q, (k, v), **more)


def latent():
    wrapper = BatchMLAPagedAttentionWrapper(workspace(), backend="reference")
    sizes = {"num_heads": 4, "head_dim_ckv": 8, "head_dim_kpe": 4, "page_size": 4}
    wrapper.plan(**LENGTHS, **sizes, causal=True, sm_scale=0.3, q_data_type=F32, kv_data_type=F32)
    return wrapper.run


def levels():
    wrapper = MultiLevelCascadeAttentionWrapper(2, workspace(), "NHD")
    tables = [[t, t] for t in TABLES]
    wrapper.plan(*tables, 4, 2, 8, 4, q_data_type=F32)
    return wrapper.run


def with_sink():
    adds = [["sink"], ["float"], ["sm_scale"], ["double"]]
    jit = ["a_uri", F32, F32, F32, torch.int32, 8, 8, *adds, "AttentionSink", "its source"]
    wrapper = planned(BatchPrefillWithPagedKVCacheWrapper(workspace(), jit_args=jit), **PREFILL)
    return lambda q, cache, sink: wrapper.run(q, cache, sink, 0.3)


def pod():
    wrapper = PODWithPagedKVCacheWrapper(workspace())
    wrapper.plan(*TABLES[1:], 4, 2, 8, 4, q_data_type=F32)
    return wrapper.run


def two_batches():
    wrapper = BatchPODWithPagedKVCacheWrapper(workspace())
    wrapper.plan(*TABLES, *TABLES, 4, 2, 8, 4, q_data_type=F32)
    return wrapper.run


def graph_mode(**buffers):
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), use_cuda_graph=True, **buffers)
    return wrapper.plan(**TABLE, **SIZES, q_data_type=F32)


CALLS = CALLS | {
    "prefill.run with a pair": (
        lambda: with_pair(planned(BatchPrefillWithPagedKVCacheWrapper(workspace()), **PREFILL).run),
        {**PAIR, **WRITTEN, "q_scale": torch.ones(1), "k_scale": torch.ones(1), "v_scale": torch.ones(1)},
    ),
    "prefill.plan with a mask": (
        lambda: BatchPrefillWithPagedKVCacheWrapper(workspace()).plan,
        {**PREFILL, "custom_mask": torch.ones(16, dtype=torch.bool)},
    ),
    "prefill.plan with bits": (
        lambda: BatchPrefillWithPagedKVCacheWrapper(workspace()).plan,
        {**PREFILL, "packed_custom_mask": torch.ones(3, dtype=torch.uint8)},
    ),
    "a sink": (with_sink, {"q": ROWS["q"], "cache": CACHE, "sink": rand(4)}),
    "ragged.run": (
        lambda: planned(
            BatchPrefillWithRaggedKVCacheWrapper(workspace()), qo_indptr=QO, kv_indptr=ints(0, 7, 9),
            num_qo_heads=4, num_kv_heads=2, head_dim_qk=8, q_data_type=F32,
        ).run,
        {**ROWS, **WRITTEN},
    ),
    "latent.run": (
        latent,
        {
            "q_nope": rand(3, 4, 8), "q_pe": rand(3, 4, 4), "ckv_cache": rand(4, 4, 8),
            "kpe_cache": rand(4, 4, 4), **WRITTEN,
        },
    ),
    "levels.run": (levels, {"q": ROWS["q"], "paged_kv_cache": CACHE}),
    "pod.run": (
        pod,
        {
            "q_p": rand(3, 4, 8), "k_p": rand(9, 2, 8), "v_p": rand(9, 2, 8), "q_d": rand(2, 4, 8),
            "paged_kv_cache_d": CACHE, "custom_mask_p": torch.ones(3, 9, dtype=torch.bool),
        },
    ),
    "two batches": (
        two_batches,
        {"q_p": ROWS["q"], "paged_kv_cache_p": CACHE, "q_d": ROWS["q"] + 1, "paged_kv_cache_d": CACHE + 1},
    ),
    "blocks.run": (
        lambda: planned(
            BlockSparseAttentionWrapper(workspace()), **BLOCKS, **HEADS, q_data_type=F32, o_data_type=F32
        ).run,
        {
            "q": rand(5, 4, 8), "k": rand(9, 2, 8), "v": rand(9, 2, 8),
            "out": torch.zeros(5, 4, 8), "lse": torch.zeros(5, 4),
        },
    ),
    "blocks.plan with a mask": (
        lambda: BlockSparseAttentionWrapper(workspace()).plan,
        {**BLOCKS, **HEADS, "mask": torch.ones(3, 3, 3, dtype=torch.bool)},
    ),
    "append": (
        lambda: append_paged_kv_cache,
        {
            "append_key": rand(3, 2, 8), "append_value": rand(3, 2, 8), "batch_indices": ints(0, 0, 1),
            "positions": ints(5, 6, 1), "paged_kv_cache": CACHE.clone(), "kv_indices": TABLE["indices"],
            "kv_indptr": TABLE["indptr"], "kv_last_page_len": TABLE["last_page_len"],
        },
    ),
    "merge_state_in_place": (
        lambda: merge_state_in_place,
        {
            "v": rand(3, 4, 8), "s": rand(3, 4), "v_other": STATES["v_b"], "s_other": STATES["s_b"],
            "mask": torch.ones(3, dtype=torch.bool),
        },
    ),
    "graph mode": (
        lambda: graph_mode,
        {
            "paged_kv_indptr_buffer": torch.zeros(3, dtype=torch.int32),
            "paged_kv_indices_buffer": torch.zeros(8, dtype=torch.int32),
            "paged_kv_last_page_len_buffer": torch.zeros(2, dtype=torch.int32),
        },
    ),
}  # fmt: skip
UNREAD = {
    ("append", "kv_last_page_len"), ("fast_decode_plan", "indptr"),
    ("CacheView", "storage"),  # its views are looked at when they are used
}  # fmt: skip
CASES = [
    (call, name)
    for call, (_, given) in CALLS.items()
    for name, value in given.items()
    if isinstance(value, torch.Tensor) and (call, name) not in UNREAD
]


def shrunk(t):
    """Return a tensor whose last element has one byte less than it takes."""
    t = t.clone()
    t.untyped_storage().resize_(t.nbytes - 1)
    return t


def cut_off(t):
    """Return what began at the end of the storage that is left."""
    both = torch.cat([t, t])
    behind = both[len(t) :]
    both.untyped_storage().resize_(t.nbytes)
    return behind


@pytest.mark.parametrize("change", [shrunk, cut_off])
@pytest.mark.parametrize(("call", "name"), CASES)
def test_a_shrunk_tensor_is_named(call, name, change):
    make, given = CALLS[call]
    called, others = (
        make(),
        {n: t.clone() for n, t in given.items() if isinstance(t, torch.Tensor) and n != name},
    )
    with pytest.raises(
        ValueError, match=r"needs memory behind its elements, got .*its storage was (shrunk|freed)"
    ):
        called(**{**given, **others, name: change(given[name])})
    assert all(torch.equal(t, given[n]) for n, t in others.items())


@pytest.mark.parametrize("call", CALLS)
def test_the_right_call_is_served(call):
    make, given = CALLS[call]
    make()(**given)


def test_a_workspace_is_looked_at_by_plan_and_run():
    """One backend here needs none: the buffer stands for that of one which does."""
    buffer = workspace(1 << 16)
    wrapper = planned(BatchPrefillWithPagedKVCacheWrapper(buffer), **PREFILL)
    wrapper._state = dataclasses.replace(wrapper._state, workspace_bytes=1 << 10)
    wrapper.run(ROWS["q"], CACHE)
    buffer.untyped_storage().resize_(1 << 9)
    with pytest.raises(
        ValueError, match=r"float_workspace_buffer: needs memory behind its elements, got 512"
    ):
        wrapper.run(ROWS["q"], CACHE)
    with pytest.raises(
        ValueError, match=r"float_workspace_buffer: needs memory behind its elements, got 512"
    ):
        wrapper._provide(1 << 10)


def test_a_buffer_of_a_graph_is_looked_at_by_every_plan():
    buffers = {name: t.clone() for name, t in CALLS["graph mode"][1].items()}
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), use_cuda_graph=True, **buffers)
    wrapper.plan(**TABLE, **SIZES, q_data_type=F32)
    before = wrapper._state
    for name, buffer in buffers.items():
        kept = buffer.clone()
        buffer.untyped_storage().resize_(buffer.nbytes - 1)
        with pytest.raises(ValueError, match=r"needs memory behind its elements"):
            wrapper.plan(**TABLE, **SIZES, q_data_type=F32)
        assert wrapper._state is before, name
        buffer.untyped_storage().resize_(buffer.nbytes)
        buffer.copy_(kept)
    wrapper.plan(**TABLE, **SIZES, q_data_type=F32)
