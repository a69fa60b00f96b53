"""More public reports: latent, persistent, block-sparse attention, appends, requests without rows, chains."""

from __future__ import annotations

import pytest
import torch

import attn_core

from .support import i32, indptr_of, rnd, served, workspace
from .test_reports import HALF, causal, close, dense, ragged

CKV, KPE = 512, 64


def latent(backend, lengths, page_size, pages, dtype, rows=1):
    w = attn_core.BatchMLAPagedAttentionWrapper(workspace(), backend=backend)
    indptr = indptr_of([-(-n // page_size) for n in lengths])
    w.plan(
        indptr_of([rows] * len(lengths)), indptr, pages, i32(*lengths), 4, CKV, KPE, page_size, False, 0.07,
        dtype, dtype,
    )  # fmt: skip
    return w, indptr


def latent_want(q, cache, pages, length, scale=0.07):
    keys = cache[pages.long()].reshape(-1, 1, CKV + KPE)[:length]
    return dense(q, keys, keys[..., :CKV], scale=scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, HALF])
def test_latent_pages_in_any_order(backend, dtype):
    """Scattered pages gave zeros. https://github.com/flashinfer-ai/flashinfer/issues/3219"""
    q, cache = rnd(0, (2, 4, CKV + KPE), (40, 4, CKV + KPE), dtype=dtype)
    pages = torch.randperm(40, generator=torch.Generator().manual_seed(2))[:19].int()
    with served(backend):
        w, indptr = latent(backend, [37, 35], 4, pages, dtype)
        parts = [t.clone() for t in (q[..., :CKV], q[..., CKV:], cache[..., :CKV], cache[..., CKV:])]
        out = w.run(*parts)
    for n, length in enumerate((37, 35)):
        mine = pages[indptr[n] : indptr[n + 1]]
        close(out[n : n + 1], latent_want(q[n : n + 1], cache, mine, length)[0], dtype)


def test_latent_inputs_of_any_strides(backend):
    """Wrong unless everything was contiguous. https://github.com/flashinfer-ai/flashinfer/issues/1341"""
    q, cache = rnd(0, (2, 4, CKV + KPE), (9, 4, CKV + KPE))
    wide_q, wide = torch.zeros(2, 8, CKV + KPE + 8, dtype=HALF), torch.zeros(9, 8, CKV + KPE + 8, dtype=HALF)
    wide_q[:, ::2, : CKV + KPE], wide[:, ::2, : CKV + KPE] = q, cache
    pages = i32(*range(8, -1, -1))
    with served(backend):
        w, indptr = latent(backend, [17, 13], 4, pages, HALF)
        out = w.run(
            wide_q[:, ::2, :CKV], wide_q[:, ::2, CKV:-8], wide[:, ::2, :CKV], wide[:, ::2, CKV:-8].clone()
        )
    for n, length in enumerate((17, 13)):
        mine = pages[indptr[n] : indptr[n + 1]]
        close(out[n : n + 1], latent_want(q[n : n + 1], cache, mine, length)[0], HALF)


def test_a_latent_request_without_keys(backend):
    """https://github.com/flashinfer-ai/flashinfer/pull/868"""
    q, cache = rnd(0, (3, 4, CKV + KPE), (5, 4, CKV + KPE))
    with served(backend):
        w, _ = latent(backend, [7, 0, 9], 4, i32(0, 1, 2, 3, 4), HALF)
        out, lse = w.run(q[..., :CKV], q[..., CKV:], cache[..., :CKV], cache[..., CKV:], return_lse=True)
    assert not out[1].any()
    assert torch.isneginf(lse[1]).all()
    close(out[2:], latent_want(q[2:], cache, i32(2, 3, 4), 9)[0], HALF)


def test_rows_before_the_first_key_of_the_persistent_kernel(backend):
    """They kept what was in memory. https://github.com/flashinfer-ai/flashinfer/pull/1533"""
    q, cache = rnd(0, (235 + 300, 4, 64), (3, 2, 1, 1, 64))
    with served(backend):
        w = attn_core.BatchAttention(backend=backend, device="cpu")
        w.plan(
            indptr_of([235, 300]), i32(0, 2, 3), i32(2, 0, 1), i32(2, 1), 4, 1, 64, 64, 1, causal=True,
            q_data_type=HALF, kv_data_type=HALF,
        )  # fmt: skip
        out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan)
        w.run(q, cache, out=out, lse=lse)
    for rows, pages in ((slice(0, 235), [2, 0]), (slice(235, None), [1])):
        k, v = cache[pages, 0, 0], cache[pages, 1, 0]
        want, want_lse = dense(q[rows], k, v, causal(len(q[rows]), len(k)))
        close(out[rows], want, HALF)
        torch.testing.assert_close(lse[rows].double(), want_lse, atol=1e-3, rtol=0)
    assert not out[:233].any()


def test_the_persistent_kernel_takes_a_part_of_qkv(backend):
    """https://github.com/flashinfer-ai/flashinfer/pull/1865"""
    qkv, cache = rnd(0, (6, 8 * 64), (2, 2, 8, 2, 64))
    q = qkv.split([256, 128, 128], -1)[0].view(6, 4, 64)
    with served(backend):
        w = attn_core.BatchAttention(backend=backend, device="cpu")
        w.plan(i32(0, 6), i32(0, 2), i32(1, 0), i32(13), 4, 2, 64, 64, 8, q_data_type=HALF, kv_data_type=HALF)
        out, _ = w.run(q, cache)
    k, v = (cache[[1, 0], at].reshape(-1, 2, 64)[:13] for at in (0, 1))
    close(out, dense(q, k, v)[0], HALF)


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_a_request_without_rows_among_others(backend, empty):
    """https://github.com/Dao-AILab/flash-attention/issues/1713 and flashinfer pull 353 (without keys)"""
    rows, keys = [5, 4, 3], [9, 4, 7]
    rows[empty] = 0
    for lengths in (keys, [0 if n == empty else m for n, m in enumerate(keys)]):
        q, k, v = rnd(0, (sum(rows), 4, 64), (sum(lengths), 2, 64), (sum(lengths), 2, 64))
        with served(backend):
            w = ragged(backend)
            w.plan(indptr_of(rows), indptr_of(lengths), 4, 2, 64, causal=True)
            out = w.run(q, k, v)
        at, start = 0, 0
        for n, m in zip(rows, lengths, strict=True):
            if n:
                want = dense(q[at : at + n], k[start : start + m], v[start : start + m], causal(n, m))[0]
                close(out[at : at + n], want, HALF)
            at, start = at + n, start + m


def test_the_example_of_blocks_of_any_size(backend):
    """A crash in plan(). https://github.com/flashinfer-ai/flashinfer/issues/1271"""
    seen = torch.tensor([[[0, 0, 1], [1, 0, 1], [0, 1, 1]]], dtype=torch.bool)
    rows, cols = i32(1, 2, 3)[None], i32(3, 1, 2)[None]
    q, k, v = rnd(0, (1, 6, 128), (1, 6, 128), (1, 6, 128))
    with served(backend):
        w = attn_core.VariableBlockSparseAttentionWrapper(workspace(), backend=backend)
        w.plan(seen, rows, cols, 1, 1, 128)
        out = w.run(q, k, v)
    full = seen[0].repeat_interleave(rows[0].long(), 0).repeat_interleave(cols[0].long(), 1)
    want = dense(*(t.transpose(0, 1) for t in (q, k, v)), full)[0]
    close(out.transpose(0, 1), want, HALF)


@pytest.mark.parametrize("blocks", [([[1]], [3], [5]), ([[0, 0], [1, 0]], [2, 1], [4, 1])])
def test_few_blocks_and_rows_that_see_none(backend, blocks):
    """https://github.com/LMCache/LMCache/pull/2791"""
    seen, rows, cols = torch.tensor(blocks[0], dtype=torch.bool)[None], i32(*blocks[1]), i32(*blocks[2])
    q, k, v = rnd(0, (2, int(rows.sum()), 64), (1, int(cols.sum()), 64), (1, int(cols.sum()), 64))
    with served(backend):
        w = attn_core.VariableBlockSparseAttentionWrapper(workspace(), backend=backend)
        w.plan(seen, rows[None], cols[None], 2, 1, 64)
        out = w.run(q, k, v)
    full = seen[0].repeat_interleave(rows.long(), 0).repeat_interleave(cols.long(), 1)
    close(out.transpose(0, 1), dense(*(t.transpose(0, 1) for t in (q, k, v)), full)[0], HALF)


def test_requests_that_append_nothing():
    """Batch indices 0, 0, 2, 3, 5, 5. https://github.com/flashinfer-ai/flashinfer/issues/616"""
    appended, lengths = [2, 0, 1, 1, 0, 2], [5, 3, 1, 4, 2, 6]
    at, positions = attn_core.get_batch_indices_positions(indptr_of(appended), i32(*lengths), 6)
    assert at.tolist() == [0, 0, 2, 3, 5, 5]
    assert positions.tolist() == [3, 4, 0, 3, 4, 5]
    pages = [-(-n // 2) for n in lengths]
    indptr, indices = indptr_of(pages), torch.arange(sum(pages) - 1, -1, -1, dtype=torch.int32)
    (rows,) = rnd(0, (6, 2, 64))
    # every second head of a wider allocation, https://github.com/flashinfer-ai/flashinfer/pull/527
    cache = torch.zeros(sum(pages), 2, 2, 4, 64, dtype=HALF)[:, :, :, ::2]
    last = i32(*((n - 1) % 2 + 1 for n in lengths))
    attn_core.append_paged_kv_cache(rows, -rows, at, positions, cache, indices, indptr, last)
    want = torch.zeros(cache.shape, dtype=HALF)
    for n, (request, place) in enumerate(zip(at.tolist(), positions.tolist(), strict=True)):
        page = indices[indptr[request] + place // 2]
        want[page, 0, place % 2], want[page, 1, place % 2] = rows[n], -rows[n]
    assert torch.equal(cache, want)


def test_a_chain_never_emits_beyond_its_drafts():
    """Counted 4 where 3 had probability. https://github.com/flashinfer-ai/flashinfer/issues/879"""
    made = torch.Generator().manual_seed(0)
    drafts = torch.rand(64, 3, 4, generator=made)
    target = torch.rand(64, 4, 4, generator=made)
    drafts, target = drafts / drafts.sum(-1, keepdim=True), target / target.sum(-1, keepdim=True)
    ids = torch.randint(4, (64, 3), generator=made, dtype=torch.int32)
    accepted, emitted = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    for seed in range(20):
        accepted.zero_(), emitted.zero_()
        out, *_ = attn_core.chain_speculative_sampling(
            drafts, ids, target, accepted, emitted, seed=seed, offset=0
        )
        assert int(emitted.max()) <= 3
        assert torch.equal(emitted + 1, (out >= 0).sum(1).int())
        assert (accepted >= emitted).all()
        assert int(accepted.max()) <= 3
        kept = torch.arange(3)[None] < emitted[:, None]
        assert torch.equal(out[:, :3][kept], ids[kept])
