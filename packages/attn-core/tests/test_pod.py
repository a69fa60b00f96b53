"""POD is prefill and decode, each as its own wrapper computes it."""

import pytest
import torch

from attn_core.pod import BatchPODWithPagedKVCacheWrapper, PODWithPagedKVCacheWrapper

from .kit import close, ints, offsets, oracle, pages, queries, random_mask, same_bits, workspace

SIZES = (4, 2, 8, 4)
F32 = {"q_data_type": torch.float32}
HALF = torch.float16


def request(rows=5, keys=9, seed=11):
    return (
        queries(rows, 4, 8, seed=seed),
        queries(keys, 2, 8, seed=seed + 1),
        queries(keys, 2, 8, seed=seed + 2),
    )


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_one_request_prefills_while_a_batch_decodes(order):
    (q_p, k_p, v_p), p, q_d = request(), pages([9, 3, 12], order=order), queries(3, 4, 8)
    wrapper = PODWithPagedKVCacheWrapper(workspace(), order)
    wrapper.plan(*p.table, *SIZES, window_left=6, sm_scale=0.3, **F32)
    out_p, out_d = wrapper.run(
        q_p, k_p, v_p, q_d, p.cache, causal_p=True, window_left_p=4, q_scale=2.0,
        k_scale=0.5, v_scale=3.0,
    )  # fmt: skip
    close(out_p, oracle(q_p, [k_p], [v_p], [5], causal=True, window=4)[0], 2e-6)
    want = oracle(q_d, p.keys, p.values, [1, 1, 1], window=6, sm_scale=0.3, v_scale=3.0)[0]
    close(out_d, want, 6e-6)
    assert not wrapper.is_cuda_graph_enabled
    wrapper.end_forward()


@pytest.mark.parametrize("asked", [(True, False), (False, True), (True, True)])
def test_each_part_returns_its_lse_where_asked(asked):
    (q_p, k_p, v_p), p, q_d = request(), pages([9, 3, 12]), queries(3, 4, 8)
    wrapper = PODWithPagedKVCacheWrapper(workspace())
    wrapper.plan(*p.table, *SIZES, **F32)
    given = q_p, k_p, v_p, q_d, p.cache
    found = wrapper.run(*given, causal_p=True, return_lse_p=asked[0], return_lse_d=asked[1])
    want = (
        oracle(q_p, [k_p], [v_p], [5], causal=True),
        oracle(q_d, p.keys, p.values, [1, 1, 1]),
    )
    for part, wanted, pair in zip(found, want, asked, strict=True):
        out, lse = part if pair else (part, None)
        close(out, wanted[0], 2e-6)
        if lse is not None:
            close(lse, wanted[1], 2e-6)
    for name in ("return_lse_p", "return_lse_d"):
        with pytest.raises(TypeError, match=rf"{name}: needs True or False, got str \[core\.flag\]"):
            wrapper.run(*given, **{name: "no"})


def test_the_prefill_part_takes_a_mask_and_heads_first():
    (q_p, k_p, v_p), p, q_d = request(), pages([5]), queries(1, 4, 8)
    flat, shaped = random_mask([5], [9])
    wrapper = PODWithPagedKVCacheWrapper(workspace())
    wrapper.begin_forward(*p.table, *SIZES, **F32)
    heads_first = [t.transpose(0, 1) for t in (k_p, v_p)]
    out_p, _ = wrapper.run(q_p, *heads_first, q_d, p.cache, flat, kv_layout_p="HND")
    close(out_p, oracle(q_p, [k_p], [v_p], [5], mask=shaped)[0], 2e-6)


def test_graph_mode_keeps_the_buffers_of_the_decode_part():
    buffers = [torch.full((n,), -7, dtype=torch.int32) for n in (4, 9, 3)]
    wrapper = PODWithPagedKVCacheWrapper(workspace(), "NHD", True, *buffers)
    p = pages([9, 3, 12])
    wrapper.plan(*p.table, *SIZES, **F32)
    assert wrapper.is_cuda_graph_enabled
    assert torch.equal(buffers[0], p.indptr)
    with pytest.raises(ValueError, match="batch"):
        wrapper.plan(*pages([9, 3]).table, *SIZES, **F32)


def test_what_pod_does_not_have_is_refused_by_name():
    (q_p, k_p, v_p), p, q_d = request(), pages([5]), queries(1, 4, 8)
    wrapper = PODWithPagedKVCacheWrapper(workspace())
    with pytest.raises(ValueError, match="prior plan"):
        wrapper.run(q_p, k_p, v_p, q_d, p.cache)
    wrapper.plan(*p.table, *SIZES, **F32)
    with pytest.raises(NotImplementedError, match="custom_mask_d"):
        wrapper.run(q_p, k_p, v_p, q_d, p.cache, custom_mask_d=torch.ones(5, dtype=torch.bool))
    with pytest.raises(NotImplementedError, match="jit_args"):
        PODWithPagedKVCacheWrapper(workspace(), jit_args=["x"])


@pytest.mark.parametrize("kind", [PODWithPagedKVCacheWrapper, BatchPODWithPagedKVCacheWrapper])
def test_data_type_alone_speaks_for_both(kind):
    p, wrapper = pages([5, 6], dtype=HALF), kind(workspace(8192))
    table = p.table if kind is PODWithPagedKVCacheWrapper else (ints(0, 1, 2), *p.table) * 2
    wrapper.plan(*table, *SIZES, data_type=torch.bfloat16)
    problem = wrapper._decode._state.query.problem
    assert problem.q_dtype is problem.kv_dtype is torch.bfloat16


# ---- two batches -------------------------------------------------------------------------------------


def both(seed=0):
    p, d = pages([9, 4], seed=seed), pages([3, 12, 7], seed=seed + 1)
    return p, d, queries(6, 4, 8, seed=seed + 2), queries(4, 4, 8, seed=seed + 3)


Q_P, Q_D = [2, 4], [1, 2, 1]


def test_two_batches_and_a_mask_that_changes_between_runs():
    p, d, q_p, q_d = both()
    wrapper = BatchPODWithPagedKVCacheWrapper(workspace())
    wrapper.plan(offsets(Q_P), *p.table, offsets(Q_D), *d.table, *SIZES, **F32)
    flat, shaped = random_mask(Q_P, [9, 4])
    want_d, want_lse_d = oracle(q_d, d.keys, d.values, Q_D)
    other, other_shaped = random_mask(Q_P, [9, 4], seed=9)
    again = {"custom_mask_p": other}, {"mask": other_shaped}
    causal, masked = ({"causal_p": True}, {"causal": True}), ({"custom_mask_p": flat}, {"mask": shaped})
    runs = (({}, {}), causal, masked, again, ({}, {}))
    for given, meant in runs:
        (out_p, out_d), (lse_p, lse_d) = wrapper.run(q_p, p.cache, q_d, d.cache, **given, return_lse=True)
        want_p, want_lse_p = oracle(q_p, p.keys, p.values, Q_P, **meant)
        close(out_p, want_p, 2e-6)
        close(lse_p, want_lse_p, 2e-6)
        close(out_d, want_d, 2e-6)
        close(lse_d, want_lse_d, 2e-6)


def test_scales_are_the_decode_parts():
    p, d, q_p, q_d = both()
    wrapper = BatchPODWithPagedKVCacheWrapper(workspace())
    wrapper.begin_forward(offsets(Q_P), *p.table, offsets(Q_D), *d.table, *SIZES, **F32)
    plain_p, _ = wrapper.run(q_p, p.cache, q_d, d.cache)
    out_p, out_d = wrapper.run(q_p, p.cache, q_d, d.cache, q_scale=0.5, k_scale=3.0, v_scale=2.0)
    assert same_bits(out_p, plain_p)
    close(out_d, oracle(q_d, d.keys, d.values, Q_D, q_scale=0.5, k_scale=3.0, v_scale=2.0)[0], 4e-6)
    assert not wrapper.is_cuda_graph_enabled
    wrapper.end_forward()


def test_both_parts_are_planned_or_neither(monkeypatch):
    p, d, q_p, q_d = both()
    wrapper = BatchPODWithPagedKVCacheWrapper(workspace())
    wrapper.plan(offsets(Q_P), *p.table, offsets(Q_D), *d.table, *SIZES, **F32)
    before = wrapper.run(q_p, p.cache, q_d, d.cache)
    short = ints(0, 1, 2, 3)  # fits the batch, not its pages
    with pytest.raises(ValueError, match="kv_indices"):
        wrapper.plan(ints(0, 1, 2), *p.table, short, d.indptr, d.indices[:2], d.last, *SIZES, **F32)
    for was, now in zip(before, wrapper.run(q_p, p.cache, q_d, d.cache), strict=True):
        assert same_bits(was, now)
    monkeypatch.setattr(wrapper._decode, "_compute", lambda *_: 1 / 0)  # found late: the first is computed
    with pytest.raises(ZeroDivisionError):
        wrapper.plan(offsets(Q_P), *p.table, offsets(Q_D), *d.table, *SIZES, sm_scale=0.9, **F32)
    for was, now in zip(before, wrapper.run(q_p, p.cache, q_d, d.cache), strict=True):
        assert same_bits(was, now)


STATED = {
    "kv_layout_d": ("NHD", "HND"), "pos_encoding_mode_d": ("ROPE_LLAMA", "ALIBI"), "window_left_d": (6, 5),
    "sm_scale_d": (0.3, 0.31), "rope_scale_d": (2.0, 1.0), "rope_theta_d": (5e5, 1e4),
}  # fmt: skip


@pytest.mark.parametrize("name", STATED)
def test_what_a_run_states_about_the_decode_part_is_what_was_planned(name):
    """Upstream takes these arguments and computes what was planned."""
    (q_p, k_p, v_p), p, q_d = request(), pages([9, 3, 12]), queries(3, 4, 8)
    wrapper = PODWithPagedKVCacheWrapper(workspace())
    wrapper.plan(
        *p.table, *SIZES, window_left=6, sm_scale=0.3, pos_encoding_mode="ROPE_LLAMA", rope_scale=2.0,
        rope_theta=5e5, **F32,
    )  # fmt: skip
    right, wrong = STATED[name]
    want = wrapper.run(q_p, k_p, v_p, q_d, p.cache)
    found = wrapper.run(q_p, k_p, v_p, q_d, p.cache, **{name: right})
    assert all(map(same_bits, found, want))
    with pytest.raises(ValueError, match=rf"{name}: needs .*core.pod-planned"):
        wrapper.run(q_p, k_p, v_p, q_d, p.cache, **{name: wrong})
