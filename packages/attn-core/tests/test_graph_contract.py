"""What a captured graph may rely on, shown on CPU tensors.

A graph replays the launch and the addresses of the plan it was captured under; ``replay`` does exactly that
with the first plan's state, after later plans have changed bytes and nothing else.
"""

import pytest
import torch

from attn_core.decode import BatchDecodeWithPagedKVCacheWrapper
from attn_core.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper

from .kit import (
    SIZES,
    Snapshot,
    close,
    decode_graph,
    decode_wrapper,
    ints,
    oracle,
    pages,
    queries,
    replay,
    same_bits,
    workspace,
)

LENGTHS = [[9, 3, 12], [3, 16, 5], [12, 12, 12], [4, 4, 4], [16, 3, 7]]


def addresses(wrapper):
    """Where everything is that a kernel of this wrapper reads."""
    return {name: (t.data_ptr(), t.numel()) for name, t in wrapper._state.image.items()}


@pytest.mark.parametrize("q_len", [1, 2, 3])
def test_replays_with_other_lengths_equal_eager_plans(q_len):
    wrapper = decode_graph(3, 12)
    captured = None
    for seed, kv_lens in enumerate(LENGTHS):
        p, q = pages(kv_lens, seed=seed), queries(3 * q_len, 4, 8, seed=seed)
        wrapper.plan(*p.table, *SIZES, q_data_type="float32", q_len_per_req=q_len)
        captured = captured or wrapper._state
        got, eager = replay(captured, q, p.cache), decode_wrapper()
        eager.plan(*p.table, *SIZES, q_data_type="float32", q_len_per_req=q_len)
        want = eager.run(q, p.cache, return_lse=True)
        close(got[0], want[0], 1e-6)
        close(got[1], want[1], 1e-6)
        close(got[0], oracle(q, p.keys, p.values, [q_len] * 3, causal=q_len > 1)[0], 2e-6)
        assert same_bits(wrapper.run(q, p.cache), got[0])


def test_a_request_may_lose_all_its_pages():
    wrapper = decode_graph(3, 12)
    full, empty = pages([9, 3, 12]), pages([9, 0, 12])
    q = queries(3, 4, 8)
    wrapper.plan(*full.table, *SIZES, q_data_type="float32")
    captured = wrapper._state
    wrapper.plan(*empty.table, *SIZES, q_data_type="float32")
    out, lse = replay(captured, q, empty.cache)
    assert torch.equal(out[1], torch.zeros(4, 8))
    assert lse[1].isneginf().all()
    close(out, oracle(q, empty.keys, empty.values, [1] * 3)[0], 2e-6)


@pytest.mark.parametrize(("first", "then"), [(1, 4), (4, 1), (2, 3), (3, 2)])
def test_q_len_is_frozen_by_the_first_plan_in_both_directions(first, then):
    p, wrapper = pages([9, 5, 12]), decode_graph(3, 12)
    q = queries(3 * first, 4, 8)
    wrapper.plan(*p.table, *SIZES, q_data_type="float32", q_len_per_req=first)
    want, kept = wrapper.run(q, p.cache), Snapshot.of(wrapper)
    for _ in range(2):
        with pytest.raises(
            ValueError,
            match=f"q_len_per_req: needs {first}, of the frozen cudagraph shape.*got {then}.*DecodePlanPool",
        ):
            wrapper.plan(*p.table, *SIZES, q_data_type="float32", q_len_per_req=then)
        kept.require(wrapper)
    wrapper.plan(*p.table, *SIZES, q_data_type="float32", q_len_per_req=first)
    assert same_bits(wrapper.run(q, p.cache), want)


@pytest.mark.parametrize("q_len", [1, 3])
def test_buffers_hold_the_plan_and_never_move(q_len):
    wrapper = decode_graph(3, 12)
    bound = wrapper._graph.bound
    own = {name: t.data_ptr() for name, t in bound.items()}
    offsets_at = wrapper._qo_indptr_buf.data_ptr()
    assert wrapper._qo_indptr_buf.tolist() == [0, 1, 2, 3]
    at = None
    for seed, kv_lens in enumerate(LENGTHS):
        p = pages(kv_lens, seed=seed)
        before = bound["kv_indices"].clone()
        wrapper.plan(*p.table, *SIZES, q_len_per_req=q_len)
        at = at or addresses(wrapper)
        assert addresses(wrapper) == at
        assert {name: t.data_ptr() for name, t in bound.items()} == own
        assert wrapper._qo_indptr_buf.data_ptr() == offsets_at == at["qo_indptr"][0]
        assert wrapper._qo_indptr_buf.tolist() == [0, q_len, 2 * q_len, 3 * q_len]
        used = int(p.indptr[-1])
        assert torch.equal(bound["kv_indptr"], p.indptr)
        assert torch.equal(bound["kv_indices"][:used], p.indices)
        assert torch.equal(bound["kv_indices"][used:], before[used:])
        assert torch.equal(bound["kv_last_page_len"], p.last)
        assert wrapper._state.image["kv_len"].tolist() == kv_lens
        for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len"):
            assert wrapper._state.image[name].data_ptr() == own[name]


def test_scaled_offsets_are_in_place_before_the_first_replay():
    """Stride-1 offsets left behind give plausible numbers: look at the contents, and at the output."""
    p, q = pages([9, 5, 12]), queries(9, 4, 8)
    wrapper = decode_graph(3, 12)
    wrapper.plan(*p.table, *SIZES, q_data_type="float32", q_len_per_req=3)
    state = wrapper._state
    want = replay(state, q, p.cache)[0]
    close(want, oracle(q, p.keys, p.values, [3] * 3, causal=True)[0], 2e-6)
    state.image["qo_indptr"].copy_(ints(0, 1, 2, 3))
    assert not torch.equal(replay(state, q, p.cache)[0], want)
    wrapper.plan(*p.table, *SIZES, q_data_type="float32", q_len_per_req=3)
    assert torch.equal(replay(state, q, p.cache)[0], want)


def test_the_batch_and_the_page_buffer_are_limits():
    wrapper, p = decode_graph(3, 8), pages([9, 3, 12])
    wrapper.plan(*p.table, *SIZES)
    assert wrapper._state.query.graph.max_pages == 8
    kept = Snapshot.of(wrapper)
    for kv_lens, message in (
        ([9, 3], "needs the 3 requests its buffers were made for .*, got 2"),
        ([9, 3, 12, 1], "needs the 3 requests.*got 4"),
        ([9, 3, 20], "kv_indices.*at most 8 entries.*got 9"),
    ):
        for graph in (wrapper, decode_graph(3, 8)):
            with pytest.raises(ValueError, match=message):
                graph.plan(*pages(kv_lens).table, *SIZES)
        kept.require(wrapper)
    longer = torch.cat([p.indices, torch.full((20,), -1, dtype=torch.int32)])
    wrapper.plan(p.indptr, longer, p.last, *SIZES)  # only indptr[-1] of them count


def test_max_seq_len_is_a_promise():
    wrapper, p = decode_graph(3, 12, max_seq_len=12), pages([9, 3, 12])
    wrapper.plan(*p.table, *SIZES, q_data_type="float32")
    assert wrapper._state.query.graph.max_kv_len == 12
    assert wrapper._state.launch.groups[0][3] == 12  # padded keys of the one captured group
    with pytest.raises(ValueError, match="kv length: needs at most max_seq_len 12 tokens, got 13"):
        wrapper.plan(*pages([9, 3, 13]).table, *SIZES, q_data_type="float32")
    q = queries(3, 4, 8)
    close(wrapper.run(q, p.cache), oracle(q, p.keys, p.values, [1] * 3)[0], 2e-6)


@pytest.mark.parametrize(
    ("bad", "kind"), [(0, ValueError), (-3, ValueError), (True, TypeError), (8.0, TypeError)]
)
def test_max_seq_len_is_a_positive_int_of_graph_mode(bad, kind):
    with pytest.raises(kind, match="max_seq_len"):
        decode_graph(3, 12, max_seq_len=bad)
    with pytest.raises(ValueError, match="max_seq_len: needs use_cuda_graph=True"):
        decode_wrapper(max_seq_len=8)


CHANGES = {
    "num_qo_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 16,
    "page_size": 8,
    "q_data_type": "bfloat16",
    "kv_data_type": "bfloat16",
    "o_data_type": "float32",
    "sm_scale": 0.5,
    "window_left": 3,
    "logits_soft_cap": 2.0,
    "pos_encoding_mode": "ALIBI",
    "rope_theta": 7.0,
    "fixed_split_size": 2,
    "disable_split_kv": True,
    "needs_lse": True,
}


@pytest.mark.parametrize("name", CHANGES)
def test_nothing_of_the_problem_can_change(name):
    p, wrapper = pages([4, 3, 4]), decode_graph(3, 12)
    sizes = dict(zip(("num_qo_heads", "num_kv_heads", "head_dim", "page_size"), SIZES, strict=True))
    wrapper.plan(*p.table, **sizes)
    kept = Snapshot.of(wrapper)
    with pytest.raises(ValueError, match=r"frozen at .*, asked for .*core.graph-frozen"):
        wrapper.plan(*p.table, **{**sizes, name: CHANGES[name]})
    kept.require(wrapper)
    wrapper.plan(*p.table, **sizes)
    assert wrapper._state.revision == 1


def test_arguments_that_are_the_buffers_themselves():
    """Upstream's callers fill the wrapper's buffers and hand them to plan()."""
    wrapper = decode_graph(3, 12)
    bound = wrapper._graph.bound
    names = ("kv_indptr", "kv_indices", "kv_last_page_len")
    captured = None
    for seed, kv_lens in enumerate(LENGTHS):
        p, q = pages(kv_lens, seed=seed), queries(3, 4, 8, seed=seed)
        for name, t in zip(names, p.table, strict=True):
            bound[name][: t.numel()] = t
        wrapper.plan(*(bound[name] for name in names), *SIZES, q_data_type="float32")
        captured = captured or wrapper._state
        assert torch.equal(bound["kv_indices"][: p.indices.numel()], p.indices)
        close(replay(captured, q, p.cache)[0], oracle(q, p.keys, p.values, [1] * 3)[0], 2e-6)


def test_a_longer_plan_after_a_shorter_one_leaves_no_stale_tail():
    wrapper, q = decode_graph(3, 12), queries(3, 4, 8)
    for kv_lens in ([1, 1, 1], [16, 16, 16], [1, 2, 3], [16, 1, 16]):
        p = pages(kv_lens, backwards=True)
        wrapper.plan(*p.table, *SIZES, q_data_type="float32")
        close(wrapper.run(q, p.cache), oracle(q, p.keys, p.values, [1] * 3)[0], 2e-6)


def test_buffers_are_checked_at_construction():
    good = [ints(0, 0, 0), torch.zeros(8, dtype=torch.int32), ints(0, 0)]

    def make(**other):
        names = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
        return BatchDecodeWithPagedKVCacheWrapper(
            workspace(), "NHD", True, **{**dict(zip(names, good, strict=True)), **other}
        )

    make()
    for name, bad, message in (
        ("paged_kv_indptr_buffer", None, "needs a tensor in CUDA-graph mode, got NoneType"),
        ("paged_kv_indptr_buffer", ints(0, 0), "needs 3 entries, got 2"),
        ("paged_kv_indices_buffer", torch.zeros(8), "contiguous 1-D torch.int32"),
        ("paged_kv_indices_buffer", torch.zeros(8, dtype=torch.int64), "contiguous 1-D torch.int32"),
        ("paged_kv_indices_buffer", torch.zeros(16, dtype=torch.int32)[::2], "contiguous 1-D torch.int32"),
        ("paged_kv_last_page_len_buffer", torch.zeros(1, 2, dtype=torch.int32), "contiguous 1-D torch.int32"),
        (
            "paged_kv_last_page_len_buffer",
            torch.zeros(2, dtype=torch.int32, device="meta"),
            "needs a tensor on cpu",
        ),
    ):
        with pytest.raises(ValueError, match=f"{name}.*{message}"):
            make(**{name: bad})
    with pytest.raises(ValueError, match="qo_indptr_buf: needs batch size"):
        BatchPrefillWithRaggedKVCacheWrapper(workspace(), "NHD", True, ints(), ints(0))
    with pytest.raises(ValueError, match="mask_indptr_buf: needs a tensor"):
        BatchPrefillWithPagedKVCacheWrapper(
            workspace(),
            "NHD",
            True,
            ints(0, 0),
            ints(0, 0),
            ints(0),
            ints(0),
            torch.zeros(1, dtype=torch.uint8),
        )


def test_buffers_that_share_memory_are_refused():
    """A plan would write one array over another, and runs read what is left: wrong numbers."""
    block = torch.zeros(64, dtype=torch.int32)

    def decode(indptr, indices, last):
        return BatchDecodeWithPagedKVCacheWrapper(workspace(), "NHD", True, False, indptr, indices, last)

    def ragged(qo, kv, mask):
        return BatchPrefillWithRaggedKVCacheWrapper(workspace(), "NHD", True, qo, kv, mask, ints(0, 0, 0))

    bytes_of = block.view(torch.uint8)
    decode(block[:3], block[3:8], block[8:10])  # neighbours
    ragged(block[:3], block[3:6], bytes_of[24:])
    for make, args, told in (
        (decode, (block[:3], block[:5], block[20:22]), "kv_indptr|kv_indices"),
        (decode, (block[:3], block[2:7], block[20:22]), "kv_indices"),
        (decode, (block[:3], block[8:13], block[9:11]), "kv_last_page_len"),
        (decode, (block[:3], block[8:13], block[1:3]), "kv_last_page_len"),
        (ragged, (block[:3], block[:3], bytes_of[24:]), "kv_indptr|qo_indptr"),
        (ragged, (block[:3], block[3:6], bytes_of[23:]), "custom_mask"),
    ):
        with pytest.raises(ValueError, match=rf"({told}): needs graph buffers that share no memory, got "):
            make(*args)


def test_forward_cannot_change_a_captured_plan():
    p, wrapper, q = pages([9, 3, 12]), decode_graph(3, 12), queries(3, 4, 8)
    wrapper.plan(*p.table, *SIZES, q_data_type="float32")
    kept, want = Snapshot.of(wrapper), wrapper.run(q, p.cache)
    with pytest.raises(ValueError, match="window_left is frozen at -1, asked for 2"):
        wrapper.forward(q, p.cache, window_left=2)
    kept.require(wrapper)
    assert same_bits(wrapper.forward(q, p.cache), want)
