from __future__ import annotations

import pytest
import torch

import attn_core
from attn_core.problem import MaskMode, PosEncoding

from .fakes import Fake, capability
from .support import (
    D_TC,
    DECODES,
    S1,
    WAYS,
    Asked,
    Case,
    D,
    P,
    R,
    Rule,
    agrees,
    base,
    base_r0,
    i32,
    paged,
    plan,
    refused,
    rnd,
    run,
    served,
    wrapper,
)

PAGED = (D, D_TC, P)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("heads", "figure"),
    [((24, 4), -0.22927), ((28, 4), -12.13686), ((40, 8), -27.97606), ((6, 2), -22.44614)],
)
def test_b36_any_head_ratio(backend, way, heads, figure):
    """Group size 6 worked in prefill and died at the first decode step. https://github.com/flashinfer-ai/flashinfer/issues/996"""
    q, k, v = rnd(7, (1, heads[0], 128), (37, heads[1], 128), (37, heads[1], 128))
    agrees(way, backend, paged(q, k, v, 16), sums=[figure])


def test_b36_heads_that_do_not_divide_are_refused(backend):
    """Group size 6 worked in prefill and died at the first decode step. https://github.com/flashinfer-ai/flashinfer/issues/996"""
    q, k, v = rnd(7, (1, 7, 64), (37, 2, 64), (37, 2, 64))
    case = paged(q, k, v, 16)
    for way in (*PAGED, R):
        with refused("num_qo_heads", "num_kv_heads 2", "got 7"):
            plan(wrapper(way, backend), case)
    with refused("num_qo_heads", "num_kv_heads 2", "got 7"):
        attn_core.single_prefill_with_kv_cache(q, k, v, backend=backend)


@pytest.mark.parametrize("way", [D_TC, P, R, S1])
@pytest.mark.parametrize(
    ("dims", "figure"),
    [
        ((64, 64), None), ((96, 96), -5.08397), ((100, 100), 18.42268), ((128, 128), None),
        ((192, 192), -29.92971), ((256, 256), 15.70378), ((192, 128), -37.32720),
    ],
)  # fmt: skip
def test_b38_any_head_dim(backend, way, dims, figure):
    """Head sizes that are no multiple of 16 gave silent wrong results. https://github.com/flashinfer-ai/flashinfer/issues/4299"""
    q, k, v = rnd(8, (3, 4, dims[0]), (41, 2, dims[0]), (41, 2, dims[1]))
    case, rule = paged(q, k, v, 16), Rule(causal=True)
    if way == D_TC and dims[0] != dims[1]:
        # decode has one head_dim: a v of another size cannot be stated, and is not taken
        w = wrapper(way, backend)
        with served(backend):
            plan(w, case.but(v=case.k))
        with refused("v:", 192, 128):
            run(w, case)
        return
    agrees(way, backend, case, Asked(rule), sums=[] if figure is None else [figure])


@pytest.mark.parametrize("way", PAGED)
@pytest.mark.parametrize("page_size", [1, 3, 5, 17, 64, 256, 512])
def test_b40_any_page_size(backend, way, page_size):
    """Page size 512 failed to dispatch. https://github.com/flashinfer-ai/flashinfer/issues/320"""
    pages = -(-103 // page_size)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(page_size)).tolist()
    q, k, v = rnd(9, (1, 4, 64), (pages, page_size, 2, 64), (pages, page_size, 2, 64))
    case = Case(q, k, v, (tuple(table),), (103 - (pages - 1) * page_size,))
    figure = {3: 0.90725, 17: -0.54586, 512: 3.24910}.get(page_size)
    agrees(way, backend, case, sums=[] if figure is None else [figure])


def test_b40_page_size_below_one_is_refused(backend):
    """Page size 512 failed to dispatch. https://github.com/flashinfer-ai/flashinfer/issues/320"""
    case = base()
    pages = case.indptr, case.indices, case.last_page_len
    for bad in (0, -1):
        for way in DECODES:
            with refused("page_size", "at least 1", bad):
                wrapper(way, backend).plan(*pages, 4, 2, 64, bad)
        with refused("page_size", "at least 1", bad):
            wrapper(P, backend).plan(case.qo_indptr, *pages, 4, 2, 64, bad)
        with refused("page_size", "at least 1", bad):
            attn_core.get_seq_lens(case.indptr, case.last_page_len, bad)


NARROW = capability(
    masks=frozenset({MaskMode.NONE, MaskMode.CAUSAL}),
    pos_encodings=frozenset({PosEncoding.NONE}),
    page_sizes=frozenset({16}),
    kv_orders=frozenset({"NHD"}),
    kv_dtypes=frozenset({torch.float16, torch.bfloat16}),
    window=False,
    batch_invariant=False,
)


def beyond_narrow():
    """What the table above does not list: case, plan keywords, words of the refusal."""
    case = base()
    hnd = case.but(k=case.k.transpose(1, 2), v=case.v.transpose(1, 2), layout="HND")
    q, k, v = rnd(42, (2, 4, 64), (4, 32, 2, 64), (4, 32, 2, 64))
    fp8 = case.but(k=case.k.to(torch.float8_e4m3fn), v=case.v.to(torch.float8_e4m3fn))
    masks = tuple(torch.ones(1, n, dtype=torch.bool) for n in case.kv_lens)
    yield case, {"pos_encoding_mode": "ALIBI"}, ("pos_encoding_mode", "NONE", "ALIBI"), (*PAGED, R)
    yield case, {"pos_encoding_mode": "ROPE_LLAMA"}, ("pos_encoding_mode", "ROPE_LLAMA"), (*PAGED, R)
    yield Case(q, k, v, case.tables, (5, 32)), {}, ("pages at 16", "32"), PAGED
    yield case.but(masks=masks), {}, ("mask", "causal, none", "custom"), (P, R)
    yield fp8, {}, ("k/v", "bfloat16, float16", "float8_e4m3fn"), (*PAGED, R)
    yield hnd, {}, ("kv_layout", "NHD", "HND"), (*PAGED, R)
    yield case, {"window_left": 4}, ("sliding window", 4), (*PAGED, R)
    yield case, {"fixed_split_size": 1}, ("fixed_split_size",), (*PAGED, R)


def test_b42_every_entry_point_holds_to_the_table(install):
    """The selector knew the limits, the op itself did not check them. https://github.com/vllm-project/vllm/issues/57614"""
    fake = Fake(NARROW)
    install(fake)
    for case, options, words, ways in beyond_narrow():
        for way in ways:
            for name in ("fake", "fake/only"):
                with refused("fake/only", *words, kind=NotImplementedError):
                    plan(wrapper(way, name, case.layout), case, Asked(plan=options))
            w = wrapper(way, "auto", case.layout)
            plan(w, case, Asked(plan=options))
            assert w.backend == "reference"
            assert all(str(word) in w.backend_fallback_reason for word in words)
    q, (k, v) = base().q[:1], base().keys(0)
    for options, words in (
        ({"pos_encoding_mode": "ALIBI"}, ("pos_encoding_mode", "ALIBI")),
        ({"custom_mask": torch.ones(1, 37, dtype=torch.bool)}, ("mask", "custom")),
        ({"window_left": 4}, ("sliding window", 4)),
    ):
        with refused("fake/only", *words, kind=NotImplementedError):
            attn_core.single_prefill_with_kv_cache(q, k, v, backend="fake", **options)
    hnd = k.transpose(0, 1), v.transpose(0, 1)
    with refused("fake/only", "kv_layout", "HND", kind=NotImplementedError):
        attn_core.single_prefill_with_kv_cache(q, *hnd, kv_layout="HND", backend="fake")
    assert (fake.plans, fake.runs) == (0, 0)


def test_b42_append_holds_to_the_table(install):
    """The selector knew the limits, the op itself did not check them. https://github.com/vllm-project/vllm/issues/57614"""
    fake = Fake(NARROW)
    install(fake)
    case = base()

    def append(k, v, layout="NHD"):
        heads_first = layout == "HND"
        rows = (k[:1, :, 0], v[:1, :, 0]) if heads_first else (k[0, :1], v[0, :1])
        attn_core.append_paged_kv_cache(
            *(row.clone() for row in rows), i32(0), i32(3), (k, v), case.indices, case.indptr,
            case.last_page_len, kv_layout=layout, backend="fake",
        )  # fmt: skip

    for k, v, layout, words in (
        (*rnd(42, (4, 32, 2, 64), (4, 32, 2, 64)), "NHD", ("pages at 16", "32")),
        (case.k.to(torch.float8_e4m3fn), case.v.to(torch.float8_e4m3fn), "NHD", ("float8_e4m3fn",)),
        (case.k.transpose(1, 2), case.v.transpose(1, 2), "HND", ("kv_layout", "HND")),
    ):
        with refused("fake/only", *words, kind=NotImplementedError):
            append(k, v, layout)
    assert fake.appends == 0
    append(case.k.clone(), case.v.clone())
    assert fake.appends == 1


@pytest.mark.parametrize("way", PAGED)
def test_b42_options_nobody_has_are_refused(backend, way):
    """The selector knew the limits, the op itself did not check them. https://github.com/vllm-project/vllm/issues/57614"""
    case = base_r0()
    w = wrapper(way, backend)
    with served(backend):
        plan(w, case)
    sinks = torch.zeros(4)
    for option, value in (("sinks", sinks), ("skip_softmax_threshold_scale_factor", 0.5)):
        with refused(option, "default", kind=NotImplementedError):
            run(w, case, **{option: value})
    with refused("block_tables", kind=NotImplementedError):
        plan(w, case, Asked(plan={"block_tables": i32(0, 1, 2)}))


@pytest.mark.parametrize("way", PAGED)
def test_b43_page_size_without_a_kernel(install, way):
    """A page size was accepted and ignored: fast and wrong. https://github.com/ROCm/aiter/issues/2996"""
    fake = Fake(capability(page_sizes=frozenset({1})))
    install(fake)
    q, k, v = rnd(43, (1, 4, 64), (103, 2, 64), (103, 2, 64))
    case = paged(q, k, v, 64, (1, 0))
    agrees(way, "auto", case)
    w = wrapper(way, "auto")
    plan(w, case)
    assert w.backend_fallback_reason == "fake/only: pages at 1, got 64 [core.page-size]"
    with refused("fake/only", "pages at 1", "got 64", kind=NotImplementedError):
        plan(wrapper(way, "fake"), case)
    assert (fake.plans, fake.runs) == (0, 0)
    agrees(way, "auto", paged(q, k, v, 1))
    assert (fake.plans, fake.runs) == (1, 1)
