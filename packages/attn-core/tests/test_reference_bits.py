"""Where the reference promises the same bits, and where its cutting must not show."""

import pytest
import torch

from attn_core import reference, reference_math

from .kit import (
    SIZES,
    TOLERANCE,
    close,
    decode_graph,
    decode_wrapper,
    ints,
    offsets,
    oracle,
    pages,
    prefill_graph,
    queries,
    ragged_graph,
    random_mask,
    run_prefill,
    same_bits,
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("q_len", [1, 2, 4, 8])
def test_verify_equals_causal_prefill_bit_for_bit(q_len, dtype):
    p = pages([8, 21, 13], dtype=dtype, dim=64, page_size=16)
    q = queries(3 * q_len, 8, 64, dtype)
    wrapper = decode_wrapper()
    wrapper.plan(*p.table, 8, 2, 64, 16, q_data_type=dtype, q_len_per_req=q_len)
    got, want = wrapper.run(q, p.cache, return_lse=True), run_prefill(p, q, [q_len] * 3, 2, causal=True)
    assert same_bits(got[0], want[0])
    assert same_bits(got[1], want[1])
    close(got[0], oracle(q, p.keys, p.values, [q_len] * 3, causal=True)[0], TOLERANCE[dtype])


@pytest.mark.parametrize("option", [{"fixed_split_size": 2}, {"disable_split_kv": True}], ids=str)
@pytest.mark.parametrize("q_len", [1, 3])
def test_a_request_does_not_depend_on_its_batch(q_len, option):
    """The same request alone and with seven others of other lengths has the same bits."""
    kv_lens = [37, 300, 5, 64, 129, 3, 70, 1000]
    p = pages(kv_lens, page_size=16, dim=64, dtype=torch.float16)
    q = queries(8 * q_len, 4, 64, torch.float16)
    for options in (option, {**option, "window_left": 50}):
        whole, one = decode_wrapper(), decode_wrapper()
        whole.plan(*p.table, 4, 2, 64, 16, q_len_per_req=q_len, **options)
        out, lse = whole.run(q, p.cache, return_lse=True)
        for at in range(8):
            first, end = p.indptr[at], p.indptr[at + 1]
            one.plan(
                ints(0, end - first),
                p.indices[first:end],
                p.last[at : at + 1],
                4,
                2,
                64,
                16,
                q_len_per_req=q_len,
                **options,
            )
            rows = slice(at * q_len, (at + 1) * q_len)
            alone = one.run(q[rows], p.cache, return_lse=True)
            assert same_bits(alone[0], out[rows])
            assert same_bits(alone[1], lse[rows])


@pytest.mark.parametrize("mask", ["none", "causal", "flat"])
@pytest.mark.parametrize(("gather", "scores"), [(1, 1), (1, 8 << 20), (64 << 20, 1), (1200, 150)])
def test_cutting_into_groups_and_blocks_changes_nothing(mask, gather, scores, monkeypatch):
    kv_lens, q_lens = [9, 0, 5, 2, 7], [4, 2, 0, 2, 6]
    p, q = pages(kv_lens), queries(sum(q_lens), 4, 8)
    flat, shaped = random_mask(q_lens, kv_lens)
    ask = {"causal": mask == "causal", "custom_mask": flat if mask == "flat" else None}
    monkeypatch.setattr(reference, "_GATHER_BYTES", gather)
    monkeypatch.setattr(reference_math, "_SCORE_ELEMENTS", scores)
    blocks = []
    compute = reference_math._Rows.block
    monkeypatch.setattr(
        reference_math._Rows, "block", lambda self, *a: blocks.append(a[:2]) or compute(self, *a)
    )
    out, lse = run_prefill(p, q, q_lens, 2, **ask)
    assert len(blocks) >= {(1, 1): 14, (1, 8 << 20): 4, (64 << 20, 1): 6, (1200, 150): 4}[gather, scores]
    want = oracle(
        q, p.keys, p.values, q_lens, causal=mask == "causal", mask=shaped if mask == "flat" else None
    )
    close(out, want[0], 2e-6)
    close(lse, want[1], 3e-6)


def test_a_captured_plan_reads_lengths_from_memory_only():
    """One group at capacity serves every replay; its numbers are those of the eager plan."""
    graph, eager = decode_graph(3, 12), decode_wrapper()
    for seed, kv_lens in enumerate(([9, 1, 4], [2, 30, 0], [16, 16, 16])):
        p, q = pages(kv_lens, seed=seed), queries(3, 4, 8, seed=seed)
        for wrapper in (graph, eager):
            wrapper.plan(*p.table, 4, 2, 8, 4, q_data_type=torch.float32, pos_encoding_mode="ROPE_LLAMA")
        a, b = (wrapper.run(q, p.cache, return_lse=True) for wrapper in (graph, eager))
        close(a[0], b[0], 1e-6)
        close(a[1], b[1], 1e-6)
    assert graph._state.launch.groups == ((0, 3, 1, 48, 0, -1, -1),)


@pytest.mark.parametrize("q_len", [1, 3])
def test_a_captured_request_does_not_depend_on_its_batch(q_len):
    p = pages([37, 300, 5, 64], page_size=16, dim=64)
    q = queries(4 * q_len, 4, 64)
    options = {"q_data_type": "float32", "q_len_per_req": q_len, "disable_split_kv": True}
    whole = decode_graph(4, 30)
    whole.plan(*p.table, 4, 2, 64, 16, **options)
    out, lse = whole.run(q, p.cache, return_lse=True)
    for at in range(4):
        first, end = p.indptr[at], p.indptr[at + 1]
        one = decode_graph(1, 30)
        one.plan(ints(0, end - first), p.indices[first:end], p.last[at : at + 1], 4, 2, 64, 16, **options)
        rows = slice(at * q_len, (at + 1) * q_len)
        alone = one.run(q[rows], p.cache, return_lse=True)
        assert same_bits(alone[0], out[rows])
        assert same_bits(alone[1], lse[rows])


@pytest.mark.parametrize("option", [{"fixed_split_size": 2}, {"disable_split_kv": True}], ids=str)
def test_what_a_captured_prefill_cannot_promise_is_refused(option):
    p = pages([9, 3])
    for graph, last in ((prefill_graph(2, 8), p.table), (ragged_graph(2), (offsets(p.kv_lens),))):
        sizes = SIZES if len(last) == 3 else SIZES[:3]
        with pytest.raises(NotImplementedError, match=r"\[reference.captured-split\]"):
            graph.plan(offsets([1, 2]), *last, *sizes, **option)
        graph.plan(offsets([1, 2]), *last, *sizes)
