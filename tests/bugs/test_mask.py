from __future__ import annotations

import math
from functools import cache

import pytest
import torch

import attn_core

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
    attend,
    base_r0,
    close,
    paged,
    plan,
    refused,
    rnd,
    wrapper,
)


@pytest.mark.parametrize("way", [P, R, S1])
def test_b11_window_without_causal(backend, way):
    """Non-causal windows were wrong in the first query tile of a split. https://github.com/flashinfer-ai/flashinfer/issues/4972"""
    q, k, v = rnd(2, (160, 4, 64), (1024, 2, 64), (1024, 2, 64))
    case, rule = paged(q, k, v, 16), Rule(window=100)
    want = case.want(rule)
    for row, figure in ((127, -1.61288), (128, -1.76611)):
        assert abs(float(want[0][row].sum()) - figure) < 1e-4
    agrees(way, backend, case, Asked(rule), sums=[9.99275])
    if way != S1:  # many chunks: 2 pages, or as many tokens
        small = {P: 2, R: 32}[way]
        close(attend(way, backend, case, Asked(rule, {"fixed_split_size": small})), want, q.dtype)


@cache
def reported_window():
    q, k, v = rnd(0, (300, 8, 128), (4096, 2, 128), (4096, 2, 128))
    case, rule = paged(q, k, v, 16), Rule(window=333)
    return case, rule, case.want(rule)


@pytest.mark.parametrize("way", [P, R])
def test_b11_window_without_causal_in_the_reported_shape(backend, way):
    """Non-causal windows were wrong in the first query tile of a split. https://github.com/flashinfer-ai/flashinfer/issues/4972"""
    case, rule, want = reported_window()
    close(attend(way, backend, case, Asked(rule)), want, torch.float16)


@pytest.mark.parametrize("way", WAYS)
def test_b13_soft_cap(backend, way):
    """A soft cap in the wrong place took GSM8K from 0.86 to 0.26. https://github.com/flashinfer-ai/flashinfer/issues/1193"""
    case = base_r0(8)
    agrees(way, backend, case, Asked(Rule(cap=5.0)), sums=[-9.75720], lse=[9.97641])
    agrees(way, backend, case, Asked(Rule(cap=30.0)), sums=[2.31108], lse=[24.37514])
    agrees(way, backend, case, Asked(Rule(cap=5.0, window=10)))
    agrees(way, backend, case, sums=[2.66909])
    if way != S1:
        for none in (0, 0.0, None):
            agrees(way, backend, case, Asked(plan={"logits_soft_cap": none}), sums=[2.66909])


def test_b13_negative_soft_cap_is_refused(backend):
    """A soft cap in the wrong place took GSM8K from 0.86 to 0.26. https://github.com/flashinfer-ai/flashinfer/issues/1193"""
    case = base_r0(8)
    for way in (D, D_TC, P, R):
        for bad in (-1.0, math.nan, math.inf):
            with refused("logits_soft_cap", bad):
                plan(wrapper(way, backend), case, Asked(plan={"logits_soft_cap": bad}))
    k, v = case.keys(0)
    with refused("logits_soft_cap", -1.0, "0 (off) or 1e-18 to 1e18"):
        attn_core.single_prefill_with_kv_cache(case.q, k, v, logits_soft_cap=-1.0, backend=backend)


@pytest.mark.parametrize("way", WAYS)
def test_b13_backend_without_cap_is_passed_over_by_name(install, way):
    """A soft cap in the wrong place took GSM8K from 0.86 to 0.26. https://github.com/flashinfer-ai/flashinfer/issues/1193"""
    fake = Fake(capability(soft_cap=False))
    install(fake)
    case, asked = base_r0(8), Asked(Rule(cap=5.0))
    agrees(way, "auto", case, asked, sums=[-9.75720])
    assert fake.runs == 0
    agrees(way, "auto", case)
    assert fake.runs == 1
    with refused("fake/only", "soft cap", 5.0, "core.soft-cap"):
        # not attend(): that would take the refusal as good
        plan(wrapper(way, "fake"), case, asked) if way != S1 else attn_core.single_prefill_with_kv_cache(
            case.q, *case.keys(0), logits_soft_cap=5.0, backend="fake"
        )
    if way != S1:
        w = wrapper(way, "auto")
        plan(w, case, asked)
        assert (w.backend, w.backend_fallback_reason) == (
            "reference", "fake/only: has no logits soft cap, got 5.0 [core.soft-cap]",
        )  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kv_len", [1, 15, 16, 17, 19, 255, 257])
def test_b14_lanes_past_the_end_have_no_weight(backend, way, kv_len):
    """Padding lanes entered the denominator when no causal mask ran. https://github.com/flashinfer-ai/flashinfer/issues/3716"""
    q, k, v = rnd(6, (1, 8, 128), (kv_len, 8, 128), (kv_len, 8, 128), dtype=torch.bfloat16)
    case = paged(torch.zeros_like(q), k, v, 16)
    mean = v.double().mean(0)[None]
    if kv_len == 19:
        assert abs(float(mean.sum()) - 7.71929) < 1e-4
    lse = torch.full((1, 8), math.log2(kv_len), dtype=torch.float64)
    close(attend(way, backend, case), (mean, lse), torch.bfloat16)
    # beside a longer request, whose length a kernel may pad to: the same pages again and again
    longer = case.but(
        q=case.q.repeat(2, 1, 1), tables=(case.tables[0], case.tables[0] * 3), last=case.last * 2, q_lens=()
    )
    out, got = attend(way, backend, longer)
    close((out, got), longer.want(), torch.bfloat16)
    close((out[:1], got[:1]), (mean, lse), torch.bfloat16)


@cache
def in_large_pages(kv_len: int) -> tuple[Case, Case, tuple[torch.Tensor, torch.Tensor]]:
    """The same tokens in pages of 256 and of 16, both shuffled, and the oracle's answer."""
    q, k, v = rnd(32, (1, 8, 64), (kv_len, 2, 64), (kv_len, 2, 64))
    cases = []
    for page_size in (256, 16):
        pages = -(-kv_len // page_size)
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(32)).tolist()
        cases.append(paged(q, k, v, page_size, order))
    return cases[0], cases[1], cases[1].want()


@pytest.mark.parametrize("way", [*DECODES, P])
@pytest.mark.parametrize("kv_len", [4096, 6144, 8864])
def test_b16_long_sequences_in_large_pages(backend, way, kv_len):
    """Pages of 256 were wrong past 4096 keys only. https://github.com/flashinfer-ai/flashinfer/issues/4347"""
    large, small, want = in_large_pages(kv_len)
    for case in (large, small):
        close(attend(way, backend, case), want, torch.float16)
