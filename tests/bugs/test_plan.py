from __future__ import annotations

from itertools import combinations

import pytest
import torch

import attn_core

from .support import (
    BASE_LSE,
    BASE_SUMS,
    D_TC,
    DECODES,
    Asked,
    D,
    P,
    R,
    Rule,
    agrees,
    base,
    base_r0,
    close,
    i32,
    plan,
    refused,
    run,
    same_bits,
    served,
    wrapper,
)

PAGED = (D, D_TC, P)
INDEX = ("indptr", "indices", "last")


def long(case, names):
    arrays = {"indptr": case.indptr, "indices": case.indices, "last": case.last_page_len}
    return {name: arrays[name].long() for name in names}


def planned(way, backend, case):
    """A planned wrapper and what it answers, to show later that a refused plan changed nothing."""
    w = wrapper(way, backend, case.layout)
    with served(backend):
        plan(w, case)
    return w, run(w, case)


def still_answers(w, case, before):
    assert all(same_bits(a, b) for a, b in zip(run(w, case), before, strict=True))
    plan(w, case)
    close(run(w, case), case.want(), case.q.dtype)


@pytest.mark.parametrize("way", PAGED)
def test_b01_int64_metadata_is_read_as_numbers(backend, way):
    """An int64 last_page_len gave zero rows and no message. https://github.com/flashinfer-ai/flashinfer/issues/1654"""
    case = base()
    for count in (1, 2, 3):
        for names in combinations(INDEX, count):
            agrees(way, backend, case, Asked(indices=long(case, names)), BASE_SUMS, BASE_LSE)


def test_b01_int64_too_large_for_int32_is_named(backend):
    """An int64 last_page_len gave zero rows and no message. https://github.com/flashinfer-ai/flashinfer/issues/1654"""
    case = base()
    w, before = planned(D, backend, case)
    huge = torch.tensor([5, 2**32 + 16])
    with refused("kv_last_page_len[1]", 2**32 + 16, "int32"):
        plan(w, case, Asked(indices={"last": huge}))
    still_answers(w, case, before)


@pytest.mark.parametrize("last", [(17, 16), (0, 16), (-1, 16), (5, 17)])
def test_b02_last_page_len_outside_the_page_is_refused(backend, last):
    """A last page fuller than a page, or empty, went through. https://github.com/flashinfer-ai/flashinfer/issues/320"""
    case = base()
    at = 0 if last[0] != 5 else 1
    for way in PAGED:
        w, before = planned(way, backend, case)
        with refused(f"kv_last_page_len[{at}]", last[at], "page_size 16"):
            plan(w, case, Asked(indices={"last": i32(*last)}))
        still_answers(w, case, before)
    with refused("kv_last_page_len", last[at], 16):
        attn_core.get_seq_lens(case.indptr, i32(*last), 16)
    k, v = case.k.clone(), case.v.clone()
    rows = case.k[0, :1], case.v[0, :1]
    with refused(f"kv_last_page_len[{at}]", last[at], 16):
        attn_core.append_paged_kv_cache(
            *rows, i32(0), i32(0), (k, v), case.indices, case.indptr, i32(*last), backend=backend
        )
    assert same_bits(k, case.k)
    assert same_bits(v, case.v)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"qo_indptr": i32(0, 5, 4)}, ("qo_indptr[2]", 5, 4)),
        ({"indptr": i32(0, 3, 2)}, ("kv_indptr[2]", 3, 2)),
        ({"indptr": i32(1, 3, 4)}, ("kv_indptr[0]", 0, 1)),
        ({"qo_indptr": i32(1, 1, 2)}, ("qo_indptr[0]", 0, 1)),
        ({"indices": i32(2, 0, 3)}, ("kv_indices", 4, 3)),
        ({"indptr": i32(0, 3)}, ("kv_indptr", 3, 2)),
    ],
)
def test_b03_decreasing_indptr_is_refused(backend, index, words):
    """A decreasing indptr read memory wrongly unless one planner checked. https://github.com/sgl-project/sglang/issues/5678"""
    case = base()
    for way in PAGED:
        if "qo_indptr" in index and way != P:
            continue
        w, before = planned(way, backend, case)
        with refused(*words):
            plan(w, case, Asked(indices=index))
        still_answers(w, case, before)


def test_b03_ragged_indptr_is_refused(backend):
    """A decreasing indptr read memory wrongly unless one planner checked. https://github.com/flashinfer-ai/flashinfer/pull/537"""
    case = base()
    w, before = planned(R, backend, case)
    for index, words in (
        ({"qo_indptr": i32(0, 5, 4)}, ("qo_indptr[2]", 5, 4)),
        ({"kv_indptr": i32(0, 37, 36)}, ("kv_indptr[2]", 37, 36)),
        ({"kv_indptr": i32(2, 37, 53)}, ("kv_indptr[0]", 0, 2)),
        ({"kv_indptr": i32(0, 37)}, ("qo_indptr", 2, 3)),
    ):
        with refused(*words):
            plan(w, case, Asked(indices=index))
    still_answers(w, case, before)


@pytest.mark.parametrize("way", [*PAGED, R])
def test_b04_planned_type_is_asked_for_by_name(backend, way):
    """The error said "plan", not which argument to set. https://github.com/flashinfer-ai/flashinfer/issues/638"""
    case = base(torch.bfloat16)
    w = wrapper(way, backend)
    heads = case.heads
    pages = case.indptr, case.indices, case.last_page_len
    with served(backend):
        if way in DECODES:
            w.plan(*pages, *heads, 64, 16)
        elif way == P:
            w.plan(case.qo_indptr, *pages, *heads, 64, 16)
        else:
            w.plan(case.qo_indptr, i32(0, 37, 53), *heads, 64)
    with refused("q", "q_data_type", torch.float16, torch.bfloat16):
        run(w, case)


@pytest.mark.parametrize("way", PAGED)
def test_b04_fp8_cache_does_not_make_q_fp8(backend, way):
    """With an fp8 cache the query type silently followed it. https://github.com/flashinfer-ai/flashinfer/pull/532"""
    case = base()
    small = case.but(k=case.k.to(torch.float8_e4m3fn), v=case.v.to(torch.float8_e4m3fn))
    # no q_data_type: float16 stays the query's type
    w = wrapper(way, backend)
    pages = case.indptr, case.indices, case.last_page_len
    with served(backend):
        if way in DECODES:
            w.plan(*pages, *case.heads, 64, 16, kv_data_type=torch.float8_e4m3fn)
        else:
            w.plan(case.qo_indptr, *pages, *case.heads, 64, 16, kv_data_type=torch.float8_e4m3fn)
    with refused("q_data_type", torch.float16, torch.bfloat16):
        run(w, small.but(q=small.q.bfloat16()))
    with refused("q_data_type", torch.float16, torch.float8_e4m3fn):
        run(w, small.but(q=small.q.to(torch.float8_e4m3fn)))
    with refused("kv_data_type", torch.float8_e4m3fn, torch.float16):
        run(w, case)
    close(run(w, small), small.want(), torch.float16)


@pytest.mark.parametrize("way", [*PAGED, R])
def test_b05_option_given_after_plan_holds_or_is_refused(backend, way):
    """A cap handed to forward() or run() was dropped. https://github.com/sgl-project/sglang/issues/33915"""
    case = base_r0(8)
    plain, capped = case.want(), case.want(Rule(cap=5.0))
    assert abs(float(plain[0].sum()) - 2.66909) < 1e-4
    assert abs(float(capped[0].sum()) + 9.75720) < 1e-4
    w, before = planned(way, backend, case)
    inputs = (case.q, *case.keys(0)) if way == R else (case.q, (case.k, case.v))
    for late in ({"logits_soft_cap": 5.0}, {"sm_scale": 0.5}):
        with refused(next(iter(late)), kind=TypeError):
            w.run(*inputs, **late)
    # R.run() has no such keyword at all
    with refused(*(("window_left",) if way == R else ("window_left", -1, 3)), kind=(TypeError, ValueError)):
        w.run(*inputs, window_left=3)
    assert same_bits(w.run(*inputs), before[0])
    for late, rule in (
        ({"logits_soft_cap": 5.0}, Rule(cap=5.0)),
        ({"window_left": 3}, Rule(window=3)),
        ({"sm_scale": 0.5}, Rule(sm_scale=0.5)),
    ):
        with served(backend):
            close(w.forward_return_lse(*inputs, **late), case.want(rule), torch.float16)
        # the next layer has no such option: what one forward() was given does not stick to the plan
        close(w.forward_return_lse(*inputs), plain, torch.float16)


def test_b05_forward_causal_does_not_stick(backend):
    """A cap handed to forward() or run() was dropped. https://github.com/flashinfer-ai/flashinfer/issues/1193"""
    case = base().but(q=base().q.repeat(2, 1, 1), q_lens=(3, 1))
    w, _ = planned(P, backend, case)
    inputs = case.q, (case.k, case.v)
    close(w.forward_return_lse(*inputs, causal=True), case.want(Rule(causal=True)), torch.float16)
    close(w.forward_return_lse(*inputs), case.want(), torch.float16)


@pytest.mark.parametrize("way", PAGED)
def test_b09_table_outside_the_cache_is_refused(backend, way):
    """Page ids or lengths beyond the table were read out of bounds. https://github.com/Dao-AILab/flash-attention/pull/2711"""
    case = base()
    w, before = planned(way, backend, case)
    with refused("kv_indices[2]", 0, -1):
        plan(w, case, Asked(indices={"indices": i32(2, 0, -1, 1)}))
    with refused("seq_lens[0]", 37, 512):
        plan(w, case, Asked(plan={"seq_lens": i32(512, 16)}))
    still_answers(w, case, before)
    plan(w, case, Asked(indices={"indices": i32(2, 0, 3, 9)}))  # how many pages there are is not known yet
    with refused("k:", "more than 9 pages", "got 4"):
        run(w, case)
    with refused("v:", "more than 9 pages", "got 4"):
        run(w, case.but(cache=(torch.cat([case.k] * 3), case.v)))


def test_b09_append_outside_the_cache_is_refused(backend):
    """Page ids or lengths beyond the table were read out of bounds. https://github.com/Dao-AILab/flash-attention/pull/2711"""
    case = base()
    k, v = case.k.clone(), case.v.clone()
    rows = case.k[0, :1], case.v[0, :1]
    for bad, words in ((i32(2, 0, 9, 1), ("kv_indices", 9, 3)), (i32(2, 0, -1, 1), ("kv_indices", -1, 3))):
        with refused(*words):
            attn_core.append_paged_kv_cache(
                *rows, i32(0), i32(34), (k, v), bad, case.indptr, case.last_page_len, backend=backend
            )
    with refused("positions[0]", 47, 48):
        attn_core.append_paged_kv_cache(
            *rows, i32(0), i32(48), (k, v), case.indices, case.indptr, case.last_page_len, backend=backend
        )
    assert same_bits(k, case.k)
    assert same_bits(v, case.v)


@pytest.mark.parametrize("way", [D, P, R])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_b10_index_of_another_type_is_refused(backend, way, dtype):
    """int64 tables read wrong memory; the fix was a tutorial sentence. https://github.com/flashinfer-ai/flashinfer/pull/737"""
    case = base()
    w, before = planned(way, backend, case)
    names = {"kv_indptr": "kv_indptr", "qo_indptr": "qo_indptr"} if way == R else dict(
        zip(INDEX, ("kv_indptr", "kv_indices", "kv_last_page_len"), strict=True)
    )  # fmt: skip
    arrays = {
        "indptr": case.indptr, "indices": case.indices, "last": case.last_page_len,
        "qo_indptr": case.qo_indptr, "kv_indptr": i32(0, 37, 53),
    }  # fmt: skip
    for short, name in names.items():
        with refused(name, "int32", dtype, kind=TypeError):
            plan(w, case, Asked(indices={short: arrays[short].to(dtype)}))
    still_answers(w, case, before)


def test_b10_ragged_int64_is_read_as_numbers(backend):
    """int64 tables read wrong memory; the fix was a tutorial sentence. https://github.com/flashinfer-ai/flashinfer/pull/737"""
    case = base()
    index = {"qo_indptr": case.qo_indptr.long(), "kv_indptr": i32(0, 37, 53).long()}
    agrees(R, backend, case, Asked(indices=index), BASE_SUMS, BASE_LSE)


def test_b10_append_with_int64_indices(backend):
    """int64 tables read wrong memory; the fix was a tutorial sentence. https://github.com/flashinfer-ai/flashinfer/pull/737"""
    case = base()
    key, value = rnd_rows = case.k[1, :3].clone(), case.v[1, :3].clone()
    batch, positions = i32(0, 0, 1), i32(35, 36, 15)
    index = [case.indices, case.indptr, case.last_page_len]
    k, v = case.k.clone(), case.v.clone()
    with served(backend):
        attn_core.append_paged_kv_cache(
            *rnd_rows, batch.long(), positions.long(), (k, v), *(t.long() for t in index), backend=backend
        )
    want_k, want_v = case.k.clone(), case.v.clone()
    for row, (page, slot) in enumerate(((3, 3), (3, 4), (1, 15))):
        want_k[page, slot], want_v[page, slot] = key[row], value[row]
    assert same_bits(k, want_k)
    assert same_bits(v, want_v)
    for at, name in enumerate(("batch_indices", "positions", "kv_indices", "kv_indptr", "kv_last_page_len")):
        arrays = [batch, positions, *index]
        arrays[at] = arrays[at].float()
        with refused(name, "int32", torch.float32, kind=TypeError):
            attn_core.append_paged_kv_cache(*rnd_rows, *arrays[:2], (k, v), *arrays[2:], backend=backend)
    assert same_bits(k, want_k)
