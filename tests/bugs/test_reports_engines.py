"""Public reports by serving engines: warm-up in another mode, shared workspaces, promised lengths."""

from __future__ import annotations

import pytest
import torch

import attn_core

from .support import i32, indptr_of, rnd, same_bits, served, workspace
from .test_reports import HALF, SINK_VARIANT, causal, close, dense, graph_decode, paged

PAGE = 16


def table(lengths, seed=3):
    indptr = indptr_of([-(-n // PAGE) for n in lengths])
    pages = torch.randperm(int(indptr[-1]), generator=torch.Generator().manual_seed(seed)).int()
    return indptr, pages, i32(*((n - 1) % PAGE + 1 for n in lengths))


def keys_of(cache, indptr, pages, n, length):
    mine = cache[pages[indptr[n] : indptr[n + 1]].long()]
    return (mine[:, at].flatten(0, 1)[:length] for at in (0, 1))


def test_a_warm_up_in_inference_mode_serves_outside_of_it(backend):
    """What was first allocated in that mode could not be written after it.

    https://github.com/sgl-project/sglang/issues/33470
    """
    q, cache = rnd(0, (3, 4, 64), (40, 2, PAGE, 2, 64))
    with served(backend):
        w = graph_decode(backend, 3, 40)
        with torch.inference_mode():
            warm = [graph_decode(backend, 3, 40), w]
            for each in warm:
                each.plan(*table([1, 1, 1]), 4, 2, 64, PAGE, q_data_type=HALF)
                out, lse = each.run(q, cache, return_lse=True)
        for each in warm:
            for lengths in ([40, 9, 33], [3, 180, 5]):
                indptr, pages, last = table(lengths)
                each.plan(indptr, pages, last, 4, 2, 64, PAGE, q_data_type=HALF)
                each.run(q, cache, out=out, lse=lse)
                for n, length in enumerate(lengths):
                    k, v = keys_of(cache, indptr, pages, n, length)
                    close(out[n : n + 1], dense(q[n : n + 1], k, v)[0], HALF)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("split", [{}, {"fixed_split_size": 4}, {"disable_split_kv": True}])
def test_a_promised_longest_sequence_changes_no_bit(backend, rows, split):
    """A host-side bound changed the output. https://github.com/flashinfer-ai/flashinfer/issues/4647"""
    lengths = [700, 33, 3, 256]
    q, cache = rnd(1, (4 * rows, 8, 64), (80, 2, PAGE, 2, 64))
    options = {"q_data_type": HALF, "q_len_per_req": rows, **split}
    with served(backend):
        outs = []
        for longest in (700, 1024, 8192):
            w = graph_decode(backend, 4, 80, use_tensor_cores=True, max_seq_len=longest)
            w.plan(*table(lengths), 8, 2, 64, PAGE, **options)
            outs.append(w.run(q, cache))
    indptr, pages, _ = table(lengths)
    for n, length in enumerate(lengths):
        k, v = keys_of(cache, indptr, pages, n, length)
        mine = slice(n * rows, (n + 1) * rows)
        close(outs[0][mine], dense(q[mine], k, v, seen=causal(rows, length))[0], HALF)
    assert same_bits(outs[0], outs[1])
    assert same_bits(outs[0], outs[2])


def test_wrappers_of_other_heads_and_windows_share_a_workspace(backend):
    """All layers' groups ran with what was planned last. https://github.com/sgl-project/sglang/pull/32062"""
    shared, lengths, rows = workspace(), [300, 41], [9, 4]
    q, cache = rnd(2, (13, 12, 64), (30, 2, PAGE, 2, 64))
    indptr, pages, last = table(lengths)
    groups = {8: -1, 12: 17}
    with served(backend):
        wrappers = {
            heads: attn_core.BatchPrefillWithPagedKVCacheWrapper(shared, backend=backend) for heads in groups
        }
        for heads, window in groups.items():
            wrappers[heads].plan(
                indptr_of(rows), indptr, pages, last, heads, 2, 64, PAGE, causal=True, window_left=window,
                q_data_type=HALF,
            )  # fmt: skip
        outs = {heads: w.run(q[:, :heads], cache) for heads, w in wrappers.items()}
    for heads, window in groups.items():
        for n, (first, count) in enumerate(((0, 9), (9, 4))):
            k, v = keys_of(cache, indptr, pages, n, lengths[n])
            seen = causal(count, lengths[n])
            if window >= 0:
                at = torch.arange(count)[:, None] + lengths[n] - count
                seen = seen & (torch.arange(lengths[n])[None] >= at - window)
            part = slice(first, first + count)
            close(outs[heads][part], dense(q[part, :heads], k, v, seen=seen)[0], HALF)


def test_every_row_of_a_verified_chain_has_a_window_of_its_own(backend):
    """All rows had the first one's left bound. https://github.com/sgl-project/sglang/pull/35208"""
    lengths, rows, window = [7, 9, 200], 4, 4
    q, cache = rnd(4, (3 * rows, 4, 64), (20, 2, PAGE, 2, 64))
    indptr, pages, last = table(lengths)
    with served(backend):
        w = attn_core.BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True, backend=backend)
        w.plan(indptr, pages, last, 4, 2, 64, PAGE, window_left=window, q_len_per_req=rows, q_data_type=HALF)
        out = w.run(q, cache)
    for n, length in enumerate(lengths):
        at = torch.arange(rows)[:, None] + length - rows
        keys = torch.arange(length)[None]
        k, v = keys_of(cache, indptr, pages, n, length)
        mine = slice(n * rows, (n + 1) * rows)
        close(out[mine], dense(q[mine], k, v, seen=(keys <= at) & (keys >= at - window))[0], HALF)


def test_sinks_of_a_model_are_its_parameter(backend):
    """Prefill took sinks and did not apply them. https://github.com/vllm-project/vllm/pull/52148"""
    q, cache = rnd(5, (11, 4, 64), (20, 2, PAGE, 2, 64))
    sink = torch.nn.Parameter(torch.tensor([0.5, -1.0, 3.0, 0.0]))
    indptr, pages, last = table([40])
    with served(backend):
        w = paged(backend, jit_args=SINK_VARIANT)
        w.plan(i32(0, 11), indptr, pages, last, 4, 2, 64, PAGE, causal=True, q_data_type=HALF)
        out = w.run(q, cache, sink, 0.125)
    k, v = keys_of(cache, indptr, pages, 0, 40)
    want, lse = dense(q, k, v, seen=causal(11, 40), scale=0.125)
    kept = torch.sigmoid((lse * 0.6931471805599453) - sink.detach().double())
    close(out, want * kept[..., None], HALF)
