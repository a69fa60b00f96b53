"""Public reports by those who serve: process-wide defaults, padding, page tables, odd metadata, chunks."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
import torch

import attn_core

from .support import i32, indptr_of, rnd, same_bits, served, workspace
from .test_reports import HALF, SINK_VARIANT, causal, close, dense, graph_decode, paged, ragged
from .test_reports_engines import PAGE, keys_of, table

BF16 = torch.bfloat16


def decode(backend, **options):
    return attn_core.BatchDecodeWithPagedKVCacheWrapper(workspace(), backend=backend, **options)


@pytest.mark.parametrize("default", [BF16, torch.float64])
def test_a_default_type_and_device_of_the_process(backend, default):
    """A decode that never ended under a default type; engines load models under a default device.

    https://github.com/flashinfer-ai/flashinfer/issues/600
    """
    q, cache = rnd(0, (2, 64, 128), (4, 2, 32, 8, 128), dtype=BF16)
    extra = torch.rand(64, generator=torch.Generator().manual_seed(0))
    arrays, buffer = (i32(0, 2, 3), i32(3, 0, 2), i32(5, 32)), workspace()
    with served(backend), torch.no_grad():
        was = torch.get_default_dtype()
        torch.set_default_dtype(default)
        torch.set_default_device("meta")
        try:
            w = attn_core.BatchDecodeWithPagedKVCacheWrapper(buffer, backend=backend)
            w.plan(*arrays, 64, 8, 128, 32, q_data_type=BF16)
            out, lse = w.run(q, cache, return_lse=True)
            single = attn_core.single_prefill_with_kv_cache(
                q, cache[0, 0], cache[0, 1], causal=True, backend=backend
            )
            merged, _ = attn_core.merge_state(out, lse, out, lse)
            prepared = attn_core.packbits(extra > 0.5, bitorder="little")
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(was)
    assert (out.device.type, out.dtype, lse.dtype) == ("cpu", BF16, torch.float32)
    assert prepared.device.type == "cpu"
    for n, length, pages in ((0, 37, [3, 0]), (1, 32, [2])):
        k, v = (cache[pages, at].flatten(0, 1)[:length] for at in (0, 1))
        close(out[n : n + 1], dense(q[n : n + 1], k, v)[0], BF16)
    close(merged, out.double(), BF16)
    close(single, dense(q, cache[0, 0], cache[0, 1], causal(2, 32))[0], BF16)


def every_wrapper(backend, make):
    """Plan and run each kind; gives the outputs."""
    q, k, cache, latent, mask = make["q"], make["k"], make["cache"], make["latent"], make["mask"]
    pages = make["qo"], make["indptr"], make["indices"], make["last"]
    sizes, types = (4, 2, 64, 4), {"q_data_type": HALF}
    w = paged(backend)
    w.plan(*pages, *sizes, causal=True, fixed_split_size=1, **types)
    yield w.run(q, cache)
    w.plan(*pages, *sizes, custom_mask=mask, **types)
    yield w.run(q, cache, return_lse=True)[1]
    w.plan(*pages, *sizes, pos_encoding_mode="ROPE_LLAMA", **types)
    yield w.run(q, cache)
    w.plan(*pages, *sizes, pos_encoding_mode="ALIBI", **types)
    yield w.run(q, cache)
    w = decode(backend, use_tensor_cores=True)
    w.plan(*pages[1:], *sizes, q_len_per_req=2, **types)
    yield w.run(q[:4], cache)
    w = ragged(backend)
    w.plan(make["qo"], make["ends"], 4, 2, 64, causal=True, **types)
    yield w.run(q, k, k)
    w = attn_core.BatchAttention(backend=backend, device="cpu")
    w.plan(*pages[:3], make["lengths"], 4, 2, 64, 64, 4, q_data_type=HALF, kv_data_type=HALF)
    yield w.run(q, cache)[0]
    w = attn_core.MultiLevelCascadeAttentionWrapper(1, workspace(), backend=backend)
    w.plan(*([x] for x in pages), *sizes, causal=True, **types)
    yield w.run(q, cache)
    w = attn_core.BlockSparseAttentionWrapper(workspace(), backend=backend)
    w.plan(make["rows"], make["columns"], 5, 12, 5, 4, 4, 2, 64, **types)
    yield w.run(q, k, k)
    yield attn_core.single_prefill_with_kv_cache(q, k, k, backend=backend)
    w = attn_core.BatchMLAPagedAttentionWrapper(workspace(), backend=backend)
    w.plan(*pages[:3], make["lengths"], 4, 512, 64, 4, True, 0.1, HALF, HALF)
    yield w.run(*make["q_latent"].split([512, 64], -1), *latent.split([512, 64], -1))
    filled = cache.clone()
    at, positions = attn_core.get_batch_indices_positions(make["qo"], make["lengths"], 5)
    attn_core.append_paged_kv_cache(k[:5], k[:5], at, positions, filled, *pages[2:0:-1], pages[3])
    yield filled


def test_no_call_asks_for_the_default_device(backend):
    """Host arrays made on it were read as host memory: the process died."""
    q, k, cache, latent, q_latent = rnd(
        12, (5, 4, 64), (12, 2, 64), (4, 2, 4, 2, 64), (4, 4, 576), (5, 4, 576)
    )
    make = {
        "q": q, "k": k, "cache": cache, "latent": latent, "q_latent": q_latent, "qo": i32(0, 2, 5),
        "indptr": i32(0, 1, 3), "indices": i32(3, 0, 2), "last": i32(4, 3), "ends": i32(0, 4, 11),
        "lengths": i32(4, 7), "rows": i32(0, 2), "columns": i32(0, 2),
        "mask": torch.rand(2 * 4 + 3 * 7, generator=torch.Generator().manual_seed(0)) > 0.4,
    }  # fmt: skip
    buffers = workspace()

    def given():
        return buffers

    with served(backend), pytest.MonkeyPatch.context() as patch:
        patch.setitem(every_wrapper.__globals__, "workspace", given)
        patch.setitem(paged.__globals__, "workspace", given)
        want = list(every_wrapper(backend, make))
        with torch.device("meta"):
            got = list(every_wrapper(backend, make))
    for a, b in zip(got, want, strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize(("cap", "window"), [(30.0, -1), (0.0, 63)])
def test_a_mixed_batch_of_many_heads(backend, cap, window):
    """64 heads over 8 were wrong on one device. https://github.com/flashinfer-ai/flashinfer/issues/1353"""
    rows, lengths = [1, 5, 29], [1328, 18, 163]
    q, cache = rnd(1, (35, 64, 64), (96, 2, PAGE, 8, 64))
    indptr, pages, last = table(lengths)
    with served(backend):
        w = paged(backend)
        w.plan(
            indptr_of(rows), indptr, pages, last, 64, 8, 64, PAGE, causal=True, window_left=window,
            logits_soft_cap=cap, q_data_type=HALF,
        )  # fmt: skip
        out = w.run(q, cache)
    start = 0
    for n, (count, length) in enumerate(zip(rows, lengths, strict=True)):
        k, v = keys_of(cache, indptr, pages, n, length)
        seen = causal(count, length)
        if window >= 0:
            seen = seen & ~torch.ones_like(seen).tril(length - count - window - 1)
        part = slice(start, start + count)
        close(out[part], dense(q[part], k, v, seen, cap=cap)[0], HALF)
        start += count


@pytest.mark.parametrize("length", [1, 17, 200])
def test_a_window_that_reaches_every_key_is_none(backend, length):
    """length - 1 gave other numbers than no window. https://github.com/Dao-AILab/flash-attention/issues/1133"""
    q, k, v = rnd(2, (length, 4, 64), (length, 2, 64), (length, 2, 64))
    with served(backend):
        outs = [
            attn_core.single_prefill_with_kv_cache(
                q, k, v, causal=True, window_left=window, backend=backend, return_lse=True
            )
            for window in (-1, length - 1, length, 2**31 - 1)
        ]
    for out, lse in outs[1:]:
        torch.testing.assert_close(out, outs[0][0], rtol=0, atol=1e-3)
        torch.testing.assert_close(lse, outs[0][1], rtol=0, atol=1e-4)


def test_the_narrowest_window_sees_the_row_itself(backend):
    """Engines differ on whether it counts. https://github.com/huggingface/transformers/issues/39408"""
    q, k, v = rnd(3, (9, 4, 64), (9, 2, 64), (9, 2, 64))
    with served(backend):
        out = attn_core.single_prefill_with_kv_cache(q, k, v, causal=True, window_left=0, backend=backend)
    assert torch.equal(out, v.repeat_interleave(2, 1))


@pytest.mark.parametrize("active", [0, 1, 3, 8])
def test_a_small_batch_in_a_large_graph(backend, active):
    """What pads the batch was never tested. https://github.com/alibaba/rtp-llm/pull/1084"""
    q, cache = rnd(4, (8, 4, 64), (40, 2, PAGE, 2, 64))
    lengths = [37, 5, 16, 100, 1, 64, 7, 33][:active]
    indptr, pages, last = table(lengths) if lengths else (i32(0), i32(), i32())
    idle = 8 - active
    with served(backend):
        w = graph_decode(backend, 8, 40)
        w.plan(*table([37, 5, 16, 100, 1, 64, 7, 33]), 4, 2, 64, PAGE, q_data_type=HALF)
        w.run(q, cache)
        w.plan(
            torch.cat([indptr, indptr[-1:].expand(idle)]), pages, torch.cat([last, i32(*[0] * idle)]),
            4, 2, 64, PAGE, q_data_type=HALF,
        )  # fmt: skip
        out, lse = w.run(q, cache, return_lse=True)
    for n, length in enumerate(lengths):
        k, v = keys_of(cache, indptr, pages, n, length)
        close(out[n : n + 1], dense(q[n : n + 1], k, v)[0], HALF)
    assert not out[active:].any()
    assert torch.isneginf(lse[active:]).all()


def test_more_pages_than_the_buffer_of_a_graph_are_refused(backend):
    """They were written past its end. https://github.com/sgl-project/sglang/pull/24587"""
    q, cache = rnd(5, (2, 4, 64), (40, 2, PAGE, 2, 64))
    with served(backend):
        w = graph_decode(backend, 2, 4)
        w.plan(*table([33, 16]), 4, 2, 64, PAGE, q_data_type=HALF)
        was = w.run(q, cache)
        with pytest.raises(ValueError, match=r"indices.*\[core\."):
            w.plan(*table([33, 33]), 4, 2, 64, PAGE, q_data_type=HALF)
        assert same_bits(w.run(q, cache), was)


@pytest.mark.parametrize("count", [3, 5])
def test_padded_rows_are_refused_with_both_numbers(backend, count):
    """https://github.com/vllm-project/vllm/pull/56181 and https://github.com/sgl-project/sglang/pull/35876"""
    q, k = rnd(6, (count, 4, 64), (9, 2, 64))
    for w, cache in ((paged(backend), (k[None], k[None])), (ragged(backend), None)):
        with served(backend):
            if cache is None:
                w.plan(i32(0, 4), i32(0, 9), 4, 2, 64, q_data_type=HALF)
            else:
                w.plan(i32(0, 4), i32(0, 1), i32(0), i32(9), 4, 2, 64, 9, q_data_type=HALF)
        given = (k, k) if cache is None else (cache,)
        with pytest.raises(ValueError, match=rf"q: needs .*4.*got .*{count}"):
            w.run(q, *given)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lengths_of_latent_and_persistent_kernels(backend, dtype):
    """int64 lengths gave zeros, others a crash. https://github.com/sgl-project/sglang/pull/14654"""
    q, cache = rnd(7, (2, 4, 64), (4, 2, 8, 2, 64))
    lengths = torch.tensor([13, 8], dtype=dtype)
    arrays = torch.tensor([0, 1, 2], dtype=dtype), torch.tensor([0, 2, 3], dtype=dtype)
    with served(backend):
        w = attn_core.BatchAttention(backend=backend, device="cpu")
        given = (*arrays, torch.tensor([2, 0, 3], dtype=dtype), lengths, 4, 2, 64, 64, 8)
        w.plan(*given, q_data_type=HALF, kv_data_type=HALF)
        out, _ = w.run(q, cache)
    for n, length, pages in ((0, 13, [2, 0]), (1, 8, [3])):
        k, v = (cache[pages, at].flatten(0, 1)[:length] for at in (0, 1))
        close(out[n : n + 1], dense(q[n : n + 1], k, v)[0], HALF)
    with served(backend):  # https://github.com/flashinfer-ai/flashinfer/issues/4833
        w.plan(*given[:3], lengths.view(2, 1, 1, 1), *given[4:], q_data_type=HALF, kv_data_type=HALF)
        assert same_bits(w.run(q, cache)[0], out)


def test_a_mask_made_before_the_batch_was_padded_is_refused(backend):
    """Offsets counted the padding, the mask did not. https://github.com/sgl-project/sglang/pull/13740"""
    mask = torch.ones(2 * 5 + 2 * 7, dtype=torch.bool)
    w = paged(backend)
    padded = i32(0, 2, 4, 6), i32(0, 2, 4, 5), i32(0, 1, 2, 3, 4), i32(1, 3, 1)
    with pytest.raises(ValueError, match=r"custom_mask: needs 26 .*got shape .24"):
        w.plan(*padded, 4, 2, 64, 4, custom_mask=mask, q_data_type=HALF)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_a_window_beside_a_tree_mask(backend, order):
    """Rows of other widths misaligned later requests. https://github.com/sgl-project/sglang/pull/39160"""
    rows, lengths = [[4, 3][n] for n in order], [[40, 9][n] for n in order]
    q, cache = rnd(8, (7, 4, 64), (20, 2, PAGE, 2, 64))
    indptr, pages, last = table(lengths)
    masks = []
    for count, length in zip(rows, lengths, strict=True):
        seen = torch.rand(count, length, generator=torch.Generator().manual_seed(length)) > 0.3
        seen[:, : length - count] = True
        masks.append(seen)
    with served(backend):
        w = paged(backend)
        w.plan(
            indptr_of(rows), indptr, pages, last, 4, 2, 64, PAGE, window_left=6, q_data_type=HALF,
            custom_mask=torch.cat([m.flatten() for m in masks]),
        )  # fmt: skip
        out = w.run(q, cache)
    start = 0
    for n, (count, length) in enumerate(zip(rows, lengths, strict=True)):
        k, v = keys_of(cache, indptr, pages, n, length)
        near = ~torch.ones(count, length, dtype=torch.bool).tril(length - count - 7)
        part = slice(start, start + count)
        close(out[part], dense(q[part], k, v, masks[n] & near)[0], HALF)
        start += count


@pytest.mark.parametrize("size", [1, 16, 64, 128])
def test_pages_of_unequal_head_dims(backend, size):
    """Garbage unless pages had 128 tokens. https://github.com/Dao-AILab/flash-attention/pull/2368"""
    q, k, v = rnd(9, (130, 4, 192), (300, 4, 192), (300, 4, 128), dtype=BF16)
    count = -(-300 // size)
    pool_k, pool_v = k.new_zeros(count * size, 4, 192), v.new_zeros(count * size, 4, 128)
    pool_k[:300], pool_v[:300] = k, v
    pages = torch.randperm(count, generator=torch.Generator().manual_seed(size))
    cache = [torch.empty_like(t).view(count, size, 4, -1) for t in (pool_k, pool_v)]
    for t, pool in zip(cache, (pool_k, pool_v), strict=True):
        t[pages] = pool.view_as(t)
    with served(backend):
        w = paged(backend)
        w.plan(
            i32(0, 130), i32(0, count), pages.int(), i32((300 - 1) % size + 1), 4, 4, 192, size,
            head_dim_vo=128, causal=True, q_data_type=BF16,
        )  # fmt: skip
        out = w.run(q, tuple(cache))
    close(out, dense(q, k, v, causal(130, 300))[0], BF16)


def test_a_prefix_and_a_suffix_merge_to_the_whole(backend):
    """Base 2 met base e: the suffix got a fifth of its weight.

    https://github.com/sgl-project/sglang/issues/40903, https://github.com/vllm-project/vllm/pull/52796
    """
    q, k, v = rnd(10, (8, 4, 64), (3136, 2, 64), (3136, 2, 64))
    parts = []
    with served(backend):
        for first, end, mask in ((0, 3072, False), (3072, 3136, True)):
            w = ragged(backend)
            w.plan(i32(0, 8), i32(0, end - first), 4, 2, 64, causal=mask, q_data_type=HALF)
            parts += w.run_return_lse(q, k[first:end], v[first:end])
    # as a kernel of other strides gives it, https://github.com/vllm-project/vllm/pull/22003
    parts[3] = parts[3].T.contiguous().T
    out, lse = attn_core.merge_state(*parts)
    want, want_lse = dense(q, k, v, causal(8, 3136))
    close(out, want, HALF)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-3, rtol=0)
    whole, other = out.clone(), lse.clone()
    attn_core.merge_state_in_place(whole, other, whole, other)  # aliased, local-inference-lab/vllm pull 468
    close(whole, out.double(), HALF)
    torch.testing.assert_close(other, lse + 1, atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [-1, 20])
def test_a_sink_counts_once_however_the_keys_are_split(backend, window):
    """Partitions, their reduction and windows each had a bug. https://github.com/vllm-project/vllm-metal/pull/550"""
    q, cache = rnd(11, (2, 8, 64), (400, 2, PAGE, 2, 64))
    sink = torch.tensor([3.0, -2.0, 0.0, 8.0, 1.0, -30.0, 5.0, 2.0])
    indptr, pages, last = table([5000, 31])
    with served(backend):
        w = paged(backend, jit_args=SINK_VARIANT)
        w.plan(
            i32(0, 1, 2), indptr, pages, last, 8, 2, 64, PAGE, causal=True, window_left=window,
            q_data_type=HALF, fixed_split_size=8,
        )  # fmt: skip
        out = w.run(q, cache, sink, 0.125)
    for n, length in ((0, 5000), (1, 31)):
        k, v = keys_of(cache, indptr, pages, n, length)
        seen = torch.arange(length)[None] >= (length - 1 - window if window >= 0 else 0)
        want, lse = dense(q[n : n + 1], k, v, seen, scale=0.125)
        kept = torch.sigmoid(lse * math.log(2.0) - sink.double())
        close(out[n : n + 1], want * kept[..., None], HALF)


FACTORIES = {"empty", "zeros", "ones", "full", "tensor", "arange", "as_tensor", "rand", "randn", "randperm"}
TOOLS = ("testing", "tune", "bench", "selftest.py")


def test_every_tensor_of_the_packages_says_where_it_is():
    """Paths of GPUs as well, which cannot run everywhere."""
    made, mute = {f"torch.{name}" for name in FACTORIES}, []
    for file in sorted(Path(__file__).parents[2].glob("packages/*/src/**/*.py")):
        if set(file.parts) & set(TOOLS):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in made:
                named = {keyword.arg for keyword in node.keywords}
                if not named & {"device", None}:
                    mute.append(f"{file.name}:{node.lineno}")
    assert mute == []
