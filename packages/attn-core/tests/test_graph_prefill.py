"""Captured prefill on CPU tensors: rows, keys and masks within what the first plan stated."""

import pytest
import torch

from attn_core.prefill import BatchPrefillWithPagedKVCacheWrapper

from .kit import (
    SIZES,
    Snapshot,
    close,
    offsets,
    oracle,
    packed,
    pages,
    prefill_graph,
    queries,
    ragged_graph,
    random_mask,
    replay,
    workspace,
)

LENGTHS = [[9, 3, 12], [3, 16, 5], [12, 12, 12], [4, 4, 4], [16, 3, 7]]


def addresses(wrapper):
    """Where everything is that a kernel of this wrapper reads."""
    return {name: (t.data_ptr(), t.numel()) for name, t in wrapper._state.image.items()}


def plan_prefill(wrapper, p, q_lens, **options):
    wrapper.plan(offsets(q_lens), *p.table, *SIZES, q_data_type="float32", **options)


@pytest.mark.parametrize("causal", [False, True])
def test_prefill_replays_with_fewer_rows_and_other_lengths(causal):
    wrapper, captured, at = prefill_graph(3, 12), None, None
    for seed, (kv_lens, q_lens) in enumerate(
        zip(LENGTHS, ([4, 3, 2], [2, 0, 7], [1, 1, 1], [0, 0, 9], [3, 3, 3]), strict=True)
    ):
        p, q = pages(kv_lens, seed=seed), queries(9, 4, 8, seed=seed)
        plan_prefill(wrapper, p, q_lens, causal=causal)
        captured, at = captured or wrapper._state, at or addresses(wrapper)
        assert addresses(wrapper) == at
        rows = sum(q_lens)
        out, lse = replay(captured, q, p.cache)
        want = oracle(q[:rows], p.keys, p.values, q_lens, causal=causal)
        close(out[:rows], want[0], 2e-6)
        close(lse[:rows], want[1], 3e-6)
        assert torch.equal(wrapper._graph.bound["qo_indptr"], offsets(q_lens))
    kept = Snapshot.of(wrapper)
    with pytest.raises(ValueError, match=r"query rows.*at most 9, frozen .*first plan\), got 10"):
        plan_prefill(wrapper, p, [4, 4, 2], causal=causal)
    with pytest.raises(ValueError, match="mask is frozen"):
        plan_prefill(wrapper, p, [3, 3, 3], causal=not causal)
    kept.require(wrapper)


def test_custom_masks_are_copied_into_their_buffers():
    wrapper = prefill_graph(3, 12, mask_bytes=24)
    bound, captured = wrapper._graph.bound, None
    q_lens = [4, 3, 2]
    for seed, kv_lens in enumerate(LENGTHS[:4]):
        p, q = pages(kv_lens, seed=seed), queries(9, 4, 8, seed=seed)
        flat, shaped = random_mask(q_lens, kv_lens, seed=seed)
        bits, before = packed(shaped), bound["custom_mask"].clone()
        if seed % 2:
            plan_prefill(wrapper, p, q_lens, custom_mask=flat)
        else:
            plan_prefill(wrapper, p, q_lens, packed_custom_mask=bits)
        captured = captured or wrapper._state
        sizes = [-(-m.numel() // 8) for m in shaped]
        assert torch.equal(bound["custom_mask"][: bits.numel()], bits)
        assert torch.equal(bound["custom_mask"][bits.numel() :], before[bits.numel() :])
        assert torch.equal(bound["mask_indptr"], offsets(sizes))
        assert wrapper._state.image["custom_mask"].data_ptr() == bound["custom_mask"].data_ptr()
        close(replay(captured, q, p.cache)[0], oracle(q, p.keys, p.values, q_lens, mask=shaped)[0], 2e-6)
    kept = Snapshot.of(wrapper)
    with pytest.raises(ValueError, match=r"custom_mask_buf: needs [0-9]+ bytes, got 24"):
        plan_prefill(wrapper, pages([40, 1, 1]), [9, 0, 0], custom_mask=torch.ones(360, dtype=torch.bool))
    kept.require(wrapper)


def test_a_mask_needs_buffers_for_it():
    p = pages([9, 3, 12])
    flat, _ = random_mask([1, 2, 3], p.kv_lens)
    wrapper = prefill_graph(3, 12)
    kept = Snapshot.of(wrapper)
    with pytest.raises(ValueError, match="custom_mask_buf and mask_indptr_buf given to the constructor"):
        plan_prefill(wrapper, p, [1, 2, 3], custom_mask=flat)
    kept.require(wrapper)
    both = prefill_graph(3, 12, mask_bytes=64)
    plan_prefill(both, p, [1, 2, 3], causal=True)  # mask buffers may stay unused
    with pytest.raises(ValueError, match="mask is frozen at causal, asked for custom"):
        plan_prefill(both, p, [1, 2, 3], custom_mask=flat)


def test_ragged_replays_within_the_first_plans_rows_and_keys():
    wrapper, captured = ragged_graph(3), None
    for seed, (kv_lens, q_lens) in enumerate(
        (([9, 3, 12], [4, 3, 2]), ([2, 20, 0], [1, 0, 8]), ([8, 8, 8], [3, 3, 3]))
    ):
        p, q = pages(kv_lens, seed=seed), queries(9, 4, 8, seed=seed)
        wrapper.plan(offsets(q_lens), offsets(kv_lens), 4, 2, 8, causal=True, q_data_type="float32")
        captured = captured or wrapper._state
        k, v = (torch.cat([*rows, torch.full((24, 2, 8), float("nan"))])[:24] for rows in (p.keys, p.values))
        close(replay(captured, q, (k, v))[0], oracle(q, p.keys, p.values, q_lens, causal=True)[0], 2e-6)
    kept = Snapshot.of(wrapper)
    with pytest.raises(ValueError, match=r"at most 24 entries.*got 25"):
        wrapper.plan(offsets([3, 3, 3]), offsets([9, 8, 8]), 4, 2, 8, causal=True, q_data_type="float32")
    kept.require(wrapper)


@pytest.mark.parametrize(
    ("short", "told"),
    [
        (1, "the length of paged_kv_indptr_buf should be batch_size \\+ 1"),
        (3, "the length of paged_kv_last_page_len_buf should be batch_size$"),
        (2, "paged_kv_indices_buf should be a torch.Tensor"),
    ],
)
def test_a_buffer_is_refused_in_the_words_that_programs_look_for(short, told):
    buffers = [torch.zeros(n, dtype=torch.int32) for n in (3, 3, 12, 2)]
    buffers[short] = None if short == 2 else buffers[short][:-1]
    with pytest.raises(ValueError, match=told):
        BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", True, *buffers)


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "told"),
    [
        ([2, 4], [9, 6], "cannot exceed the number of rows"),
        ([2, 3, 1], [9, 6, 1], "batch size should be fixed"),
        ([2, 3], [30, 30], "exceeds the allocated buffer size"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_in_those_words(q_lens, kv_lens, told):
    wrapper, p = prefill_graph(2, 12), pages([9, 6])
    wrapper.plan(offsets([2, 3]), *p.table, 4, 2, 8, 4, q_data_type=torch.float32)
    with pytest.raises(ValueError, match=told):
        wrapper.plan(offsets(q_lens), *pages(kv_lens).table, 4, 2, 8, 4, q_data_type=torch.float32)
