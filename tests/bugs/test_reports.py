"""More public reports, one test each: masks, scales, merging, graphs, latent and block-sparse attention."""

from __future__ import annotations

import math

import pytest
import torch

import attn_core

from .support import TOLERANCE, i32, indptr_of, rnd, served, workspace

HALF = torch.float16
SINK_VARIANT = [
    "uri", HALF, HALF, HALF, torch.int32, 64, 64, ["sink"], ["float"], ["sm_scale"], ["double"],
    "AttentionSink", "source",
]  # fmt: skip
"""Of heads of 64 elements, with a sink per query head."""


def dense(q, k, v, seen=None, scale=None, cap=0.0):
    """Return out and base-2 lse in float64; ``seen`` is ``[rows, keys]``."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    x = torch.einsum("qhd,khd->hqk", q.double(), k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    x = cap * torch.tanh(x / cap) if cap else x
    x = x if seen is None else x.masked_fill(~seen, -math.inf)
    out = torch.einsum("hqk,khd->qhd", x.softmax(-1).nan_to_num(0.0), v)
    return out, x.logsumexp(-1).T / math.log(2.0)


def close(got, want, dtype):
    torch.testing.assert_close(got.double(), want, atol=TOLERANCE[dtype], rtol=0)


def causal(rows, keys):
    return torch.arange(keys)[None] <= torch.arange(rows)[:, None] + keys - rows


def paged(backend, **options):
    return attn_core.BatchPrefillWithPagedKVCacheWrapper(workspace(), backend=backend, **options)


def ragged(backend):
    return attn_core.BatchPrefillWithRaggedKVCacheWrapper(workspace(), backend=backend)


def graph_decode(backend, batch, pages, **options):
    return attn_core.BatchDecodeWithPagedKVCacheWrapper(
        workspace(), use_cuda_graph=True, paged_kv_indptr_buffer=torch.zeros(batch + 1, dtype=torch.int32),
        paged_kv_indices_buffer=torch.zeros(pages, dtype=torch.int32),
        paged_kv_last_page_len_buffer=torch.zeros(batch, dtype=torch.int32), backend=backend, **options,
    )  # fmt: skip


@pytest.mark.parametrize("batch", [1, 5])
def test_a_mask_with_head_dims_192_and_128(backend, batch):
    """Wrong for many batch sizes. https://github.com/flashinfer-ai/flashinfer/issues/860"""
    q, k, v = rnd(0, (batch * 37, 4, 192), (batch * 54, 4, 192), (batch * 54, 4, 128))
    seen = torch.rand(batch, 37, 54, generator=torch.Generator().manual_seed(1)) > 0.5
    with served(backend):
        w = ragged(backend)
        w.plan(indptr_of([37] * batch), indptr_of([54] * batch), 4, 4, 192, 128, custom_mask=seen.flatten())
        out = w.run(q, k, v)
    for n in range(batch):
        a, b = slice(37 * n, 37 * n + 37), slice(54 * n, 54 * n + 54)
        close(out[a], dense(q[a], k[b], v[b], seen[n])[0], HALF)


@pytest.mark.parametrize("shape", [(10, 15), (10, 25), (8, 20), (20, 10)])
def test_a_mask_of_another_shape_is_refused(backend, shape):
    """Bits beyond the mask were read. https://github.com/flashinfer-ai/flashinfer/issues/3176"""
    q, k = rnd(0, (10, 8, 128), (20, 4, 128))
    with pytest.raises(ValueError, match="custom_mask"):
        attn_core.single_prefill_with_kv_cache(
            q, k, k, custom_mask=torch.ones(shape, dtype=torch.bool), backend=backend
        )


def test_masks_of_another_length_are_refused_at_plan(backend):
    """https://github.com/flashinfer-ai/flashinfer/pull/3503"""
    arrays = i32(0, 2, 5), i32(0, 1, 3), i32(0, 1, 2), i32(4, 2)  # 26 bits, 4 bytes
    for given in (
        {"custom_mask": torch.ones(25, dtype=torch.bool)},
        {"custom_mask": torch.ones(27, dtype=torch.bool)},
        {"packed_custom_mask": torch.ones(3, dtype=torch.uint8)},
        {"packed_custom_mask": torch.ones(5, dtype=torch.uint8)},
    ):
        with pytest.raises(ValueError, match="custom_mask"):
            paged(backend).plan(*arrays, 2, 2, 64, 4, **given)


def test_a_plan_without_a_mask_forgets_it(backend):
    """https://github.com/flashinfer-ai/flashinfer/pull/1028"""
    q, cache = rnd(0, (4, 2, 64), (2, 2, 4, 2, 64))
    k, v = (cache[:, at].reshape(-1, 2, 64)[:7] for at in (0, 1))
    arrays = i32(0, 4), i32(0, 2), i32(0, 1), i32(3), 2, 2, 64, 4
    with served(backend):
        w = paged(backend)
        for seen, options in (
            (torch.eye(4, 7, dtype=torch.bool), {"custom_mask": torch.eye(4, 7, dtype=torch.bool).flatten()}),
            (causal(4, 7), {"causal": True}),
            (None, {}),
        ):
            w.plan(*arrays, **options)
            close(w.run(q, cache), dense(q, k, v, seen)[0], HALF)


def test_a_mask_that_ends_inside_a_byte(backend):
    """https://github.com/flashinfer-ai/flashinfer/issues/1005"""
    q, k = rnd(0, (3, 2, 64), (11, 2, 64))
    seen = torch.rand(3, 11, generator=torch.Generator().manual_seed(0)) > 0.4
    packed = attn_core.packbits(seen.flatten(), bitorder="little")
    with served(backend):
        out = attn_core.single_prefill_with_kv_cache(q, k, k, packed_custom_mask=packed, backend=backend)
    close(out, dense(q, k, k, seen)[0], HALF)


def test_a_mask_wins_over_causal(backend):
    """https://github.com/flashinfer-ai/flashinfer/issues/1489"""
    q, k = rnd(0, (5, 2, 64), (5, 2, 64))
    seen = torch.rand(5, 5, generator=torch.Generator().manual_seed(0)) > 0.3
    with served(backend):
        out = attn_core.single_prefill_with_kv_cache(q, k, k, custom_mask=seen, causal=True, backend=backend)
    close(out, dense(q, k, k, seen)[0], HALF)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_graph_without_splits_leaves_padding_alone(backend, reverse):
    """Blocks of padding ran on what an earlier plan left. https://github.com/sgl-project/sglang/pull/31387"""
    lengths = [70, 300, 64, 129]
    q, cache = rnd(0, (4, 16, 128), (sum(lengths), 2, 1, 2, 128))
    pages, indptr = torch.arange(sum(lengths), dtype=torch.int32), indptr_of(lengths)
    with served(backend):
        w = graph_decode(backend, 4, sum(lengths), use_tensor_cores=True)
        for order in (pages, pages.flip(0).contiguous() if reverse else pages):
            w.plan(indptr, order, i32(1, 1, 1, 1), 16, 2, 128, 1, q_data_type=HALF, disable_split_kv=True)
            out = w.run(q, cache)
            for n in range(4):
                at = order[indptr[n] : indptr[n + 1]].long()
                close(out[n : n + 1], dense(q[n : n + 1], cache[at, 0, 0], cache[at, 1, 0])[0], HALF)


def test_two_graph_wrappers_follow_plans_of_their_own(backend):
    """Those of other windows kept the plan of the warm-up. https://github.com/NVIDIA/TensorRT-LLM/pull/18769"""
    q, cache = rnd(0, (3, 4, 64), (64, 2, 4, 2, 64))
    with served(backend):
        wrappers = {window: graph_decode(backend, 3, 64) for window in (-1, 7)}
        for lengths in ([1, 1, 1], [40, 9, 33], [3, 80, 5]):
            indptr = indptr_of([-(-n // 4) for n in lengths])
            pages = torch.randperm(64, generator=torch.Generator().manual_seed(lengths[1]))[
                : indptr[-1]
            ].int()
            last = i32(*((n - 1) % 4 + 1 for n in lengths))
            for window, w in wrappers.items():
                w.plan(indptr, pages, last, 4, 2, 64, 4, window_left=window, q_data_type=HALF)
                out = w.run(q, cache)
                for n, length in enumerate(lengths):
                    mine = cache[pages[indptr[n] : indptr[n + 1]].long()]
                    first = 0 if window < 0 else max(0, length - 1 - window)
                    k, v = (mine[:, at].reshape(-1, 2, 64)[first:length] for at in (0, 1))
                    close(out[n : n + 1], dense(q[n : n + 1], k, v)[0], HALF)


def test_a_graph_of_head_dim_256_grows_and_shrinks(backend):
    """https://github.com/NVIDIA/TensorRT-LLM/pull/18002"""
    q, cache = rnd(0, (1, 8, 256), (300, 2, 16, 1, 256), dtype=torch.bfloat16)
    with served(backend):
        w = graph_decode(backend, 1, 300, use_tensor_cores=True)
        for length in (1, 4000, 17, 4799):
            pages = -(-length // 16)
            table = torch.arange(pages, dtype=torch.int32)
            w.plan(
                i32(0, pages), table, i32((length - 1) % 16 + 1), 8, 1, 256, 16, q_data_type=torch.bfloat16
            )
            k, v = (cache[:pages, at].reshape(-1, 1, 256)[:length] for at in (0, 1))
            close(w.run(q, cache), dense(q, k, v)[0], torch.bfloat16)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, HALF])
def test_scales_count_on_every_wrapper(backend, kv_dtype):
    """Ignored on one of two. https://github.com/flashinfer-ai/flashinfer/issues/4979, 1023 and 3097"""
    q, k, v = rnd(0, (5, 4, 64), (12, 2, 64), (12, 2, 64))
    k, v = (k / 0.25).to(kv_dtype), (v / 0.5).to(kv_dtype)
    want = dense(q, k.float() * 0.25, v.float() * 0.5, causal(5, 12))[0]
    scales = {"k_scale": 0.25, "v_scale": 0.5}
    with served(backend):
        w = ragged(backend)
        w.plan(i32(0, 5), i32(0, 12), 4, 2, 64, causal=True, q_data_type=HALF, kv_data_type=kv_dtype)
        close(w.run(q, k, v, **scales), want, HALF)
        w = paged(backend)
        w.plan(
            i32(0, 5), i32(0, 3), i32(0, 1, 2), i32(4), 4, 2, 64, 4, causal=True, q_data_type=HALF,
            kv_data_type=kv_dtype,
        )  # fmt: skip
        cache = k.view(3, 4, 2, 64), v.view(3, 4, 2, 64)
        close(w.run(q, cache, **scales), want, HALF)
        close(w.forward_return_lse(q, cache, causal=True, **scales)[0], want, HALF)
        close(
            attn_core.single_prefill_with_kv_cache(q, k, v, causal=True, backend=backend, **scales),
            want,
            HALF,
        )


@pytest.mark.parametrize("expanded", [False, True])
def test_a_strided_mask_of_an_in_place_merge(expanded):
    """Other rows were merged. https://github.com/flashinfer-ai/flashinfer/pull/5055"""
    v, other = rnd(0, (4, 2, 64), (4, 2, 64), dtype=torch.float32)
    s, s_other = rnd(1, (4, 2), (4, 2), dtype=torch.float32)
    wide = torch.zeros(8, dtype=torch.bool)
    wide[0] = wide[4] = True
    mask = torch.ones(1, dtype=torch.bool).expand(4) if expanded else wide[::2]
    want_v, want_s = attn_core.merge_state(v, s, other, s_other)
    want_v, want_s = torch.where(mask[:, None, None], want_v, v), torch.where(mask[:, None], want_s, s)
    attn_core.merge_state_in_place(v, s, other, s_other, mask=mask)
    torch.testing.assert_close(v, want_v)
    torch.testing.assert_close(s, want_s)


def test_logits_below_any_finite_stand_in_for_infinity(backend):
    """Rows came out 0. https://github.com/flashinfer-ai/flashinfer/issues/4267 and 4450"""
    q, k = torch.full((1, 8, 128), 64.0, dtype=HALF), torch.full((3, 2, 128), -64.0, dtype=HALF)
    v = torch.ones_like(k)
    with served(backend):
        out, lse = attn_core.single_prefill_with_kv_cache(q, k, v, backend=backend, return_lse=True)
    assert torch.equal(out, torch.ones_like(out))
    torch.testing.assert_close(lse.double(), dense(q, k, v)[1], rtol=1e-5, atol=1e-2)


def test_cap_and_window_of_a_ragged_plan(backend):
    """https://github.com/sgl-project/sglang/pull/34093 and https://github.com/flashinfer-ai/flashinfer/pull/350"""
    q, k, v = rnd(0, (9, 4, 64), (9, 2, 64), (9, 2, 64))
    rows, keys = torch.arange(9)[:, None], torch.arange(9)[None]
    with served(backend):
        w = ragged(backend)
        w.plan(i32(0, 9), i32(0, 9), 4, 2, 64, causal=True, window_left=3, logits_soft_cap=2.0)
        out = w.run(q * 12, k, v)
    close(out, dense(q * 12, k, v, (keys <= rows) & (keys >= rows - 3), cap=2.0)[0], HALF)
