"""Rows and requests without keys, extreme and poisoned numbers, strides and outputs."""

import math

import pytest
import torch

from attn_core.prefill import single_prefill_with_kv_cache

from .kit import (
    bits,
    close,
    decode_wrapper,
    ints,
    offsets,
    paged_wrapper,
    pages,
    queries,
    run_prefill,
    same_bits,
)

INF = math.inf
Q_LENS, KV_LENS = [3, 0, 1, 5], [9, 4, 0, 5]  # a request without rows, one without keys


@pytest.mark.parametrize("mask", ["none", "causal", "flat"])
def test_rows_without_keys_give_zero_and_minus_infinity(mask):
    q_lens, kv_lens = [34, 2, 1], [1, 0, 3]
    p, q = pages(kv_lens, heads=1, dim=4), queries(37, 2, 4)
    seen = torch.zeros(37, dtype=torch.bool)
    seen[[33, 36]] = True
    if mask == "none":
        seen[:34] = True
    flat = torch.cat([torch.arange(34) == 33, torch.ones(3, dtype=torch.bool)])
    ask = {"causal": mask == "causal", "custom_mask": flat if mask == "flat" else None}
    out, lse = run_prefill(p, q, q_lens, 1, **ask)
    assert torch.equal(lse.isneginf().all(1), ~seen)
    assert torch.equal((bits(out) == 0).flatten(1).all(1), ~seen)
    assert not out.isnan().any()
    assert not lse.isnan().any()
    close(out[33], p.values[0][0].expand(2, 4), 1e-6)


@pytest.mark.parametrize("kv_lens", [[], [0], [0, 0, 0]])
@pytest.mark.parametrize("mask", ["none", "causal", "flat"])
def test_batches_without_any_key(kv_lens, mask):
    p, q_lens = pages([*kv_lens, 1], heads=1, dim=4), [2] * len(kv_lens)
    wrapper = paged_wrapper()
    wrapper.plan(
        offsets(q_lens),
        p.indptr[:-1],
        p.indices,
        p.last[:-1],
        1,
        1,
        4,
        4,
        q_data_type=torch.float32,
        causal=mask == "causal",
        custom_mask=torch.zeros(0, dtype=torch.bool) if mask == "flat" else None,
    )
    for cache in (p.cache, (p.k[:0], p.v[:0])):
        out, lse = wrapper.run(torch.ones(sum(q_lens), 1, 4), cache, return_lse=True)
        assert out.shape == (sum(q_lens), 1, 4)
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.equal(lse, torch.full_like(lse, -INF))


def test_one_request_has_the_rows_and_another_the_keys():
    wrapper = paged_wrapper()
    for mask in (None, torch.zeros(0, dtype=torch.bool)):
        wrapper.plan(
            ints(0, 0, 3),
            ints(0, 2, 2),
            ints(0, 1),
            ints(1, 1),
            2,
            1,
            4,
            4,
            custom_mask=mask,
            q_data_type=torch.float32,
        )
        out = wrapper.run(torch.ones(3, 2, 4), (torch.ones(2, 4, 1, 4),) * 2)
        assert torch.equal(out, torch.zeros(3, 2, 4))


@pytest.mark.parametrize("logit", [-5e5, 5e5])
@pytest.mark.parametrize("causal", [False, True])
def test_extreme_logits(logit, causal):
    q, k = torch.full((2, 1, 4), 500.0), torch.full((3, 1, 4), logit / 2000)
    v = torch.arange(12.0).view(3, 1, 4)
    out, lse = single_prefill_with_kv_cache(q, k, v, causal=causal, sm_scale=1.0, return_lse=True)
    keys = [2, 3] if causal else [3, 3]
    want = torch.stack([v[:n].mean(0) for n in keys])
    close(out, want, 1e-5)
    close(lse.view(-1), torch.tensor([logit / math.log(2) + math.log2(n) for n in keys]), 1e-6)


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("poison", [math.nan, INF, -INF])
def test_slots_past_the_end_are_never_read(poison, order):
    clean = pages([5, 2], order=order, poison=0.0)
    dirty = pages([5, 2], order=order, poison=poison)
    q = queries(4, 4, 8)
    a, b = (run_prefill(p, q, [3, 1], 2, causal=True) for p in (clean, dirty))
    assert same_bits(a[0], b[0])
    assert same_bits(a[1], b[1])


def test_a_nan_in_a_key_that_is_seen_is_not_hidden():
    p, q = pages([4, 4]), queries(2, 4, 8)
    p.k[p.indices[0], 1] = math.nan
    out, lse = run_prefill(p, q, [1, 1], 2)
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert not out[1].isnan().any()


def spread(t, how):
    """The same values in other strides."""
    if how == "gaps":  # every other element of a twice as wide head
        wide = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), math.nan)
        wide[..., ::2] = t
        return wide[..., ::2]
    if how == "reversed":
        order = list(range(t.ndim))[::-1]
        return t.permute(order).contiguous().permute(order)
    wide = t.new_full((t.shape[0], t.shape[1] + 3, *t.shape[2:]), math.nan)
    wide[:, 1 : 1 + t.shape[1]] = t
    return wide[:, 1 : 1 + t.shape[1]]


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("how", ["gaps", "reversed", "sliced"])
def test_strides_do_not_matter(how, order):
    p, q = pages([5, 3], order=order), queries(4, 4, 8)
    want = run_prefill(p, q, [3, 1], 2, causal=True)
    p.k = spread(p.k, how)
    for v, queried in ((p.v, q), (spread(p.v, how), spread(q, how)), (spread(p.v, "gaps"), q)):
        p.v = v
        got = run_prefill(p, queried, [3, 1], 2, causal=True)
        assert got[0].is_contiguous()
        close(got[0], want[0], 1e-6)
        close(got[1], want[1], 1e-6)


def test_one_tensor_cache_and_packed_projections():
    p, q = pages([5, 3]), queries(2, 4, 8)
    want = run_prefill(p, q, [1, 1], 2)[0]
    wrapper = decode_wrapper()
    wrapper.plan(*p.table, 4, 2, 8, 4, q_data_type=torch.float32)
    projected = torch.cat([q, torch.full((2, 4, 8), math.nan)], 1)
    got = wrapper.run(projected[:, :4], torch.stack(p.cache, 1))
    assert same_bits(got, want)
    assert got.is_contiguous()


@pytest.mark.parametrize("strided", [False, True])
def test_out_and_lse_are_written_and_returned(strided):
    p, q = pages(KV_LENS), queries(sum(Q_LENS), 4, 8)
    want = run_prefill(p, q, Q_LENS, 2)
    rows = sum(Q_LENS)
    out, lse = torch.full((rows, 4, 8), math.nan), torch.full((rows, 4), math.nan)
    if strided:
        out, lse = torch.full((8, 4, rows), math.nan).permute(2, 1, 0), torch.full((4, rows), math.nan).T
    got = run_prefill(p, q, Q_LENS, 2, out=out, lse=lse)
    assert got[0] is out
    assert got[1] is lse
    assert same_bits(out, want[0])
    assert same_bits(lse, want[1])


def test_run_changes_none_of_its_inputs():
    p, q = pages(KV_LENS), queries(sum(Q_LENS), 4, 8)
    inputs = (q, p.k, p.v, *p.table)
    before = [t.clone() for t in inputs]
    run_prefill(p, q, Q_LENS, 2, pos_encoding_mode="ROPE_LLAMA", q_scale=2.0, k_scale=2.0)
    assert all(same_bits(a, b) for a, b in zip(inputs, before, strict=True))
