from __future__ import annotations

import math

import pytest
import torch

import attn_core

from .support import (
    D_TC,
    S1,
    WAYS,
    Asked,
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
    rnd,
    run,
    same_bits,
    served,
    wrapper,
)

INF = math.inf


@pytest.mark.parametrize("way", WAYS)
def test_b17_lse_has_one_base(backend, way):
    """The base was 2 or e, depending on what auto had chosen. https://github.com/flashinfer-ai/flashinfer/issues/4485"""
    case = base_r0()
    agrees(way, backend, case, sums=[-3.49293], lse=[5.82656])
    out, lse = attend(way, backend, case)
    assert (lse.dtype, tuple(lse.shape), tuple(out.shape)) == (torch.float32, (1, 4), (1, 4, 64))


def test_b17_lse_of_single_decode_and_of_given_buffers():
    """The base was 2 or e, depending on what auto had chosen. https://github.com/flashinfer-ai/flashinfer/issues/2113"""
    case = base_r0()
    want, want_lse = case.want()
    for tensor_cores in (False, True):
        out, lse = attn_core.single_decode_with_kv_cache(
            case.q[0], *case.keys(0), use_tensor_cores=tensor_cores, return_lse=True
        )
        close((out[None], lse[None]), (want, want_lse), torch.float16)
    for way in (D, D_TC, P, R):
        w = wrapper(way, "auto")
        plan(w, case)
        given = torch.full((1, 4), math.nan)
        _, lse = run(w, case, lse=given)
        assert lse is given
        torch.testing.assert_close(given.double(), want_lse, atol=1e-3, rtol=0)


def test_b18_merge_of_empty_states():
    """Merging two empty states gave NaN. https://github.com/flashinfer-ai/flashinfer/issues/4051"""
    zero, empty = torch.zeros(1, 1, 64, dtype=torch.float16), torch.full((1, 1), -INF)
    (some,) = rnd(18, (1, 1, 64))
    lse = torch.tensor([[3.25]])
    junk = torch.full_like(zero, math.nan)  # an empty state's value is not looked at
    for va, sa, vb, sb, v, s in (
        (zero, empty, zero, empty, zero, empty),
        (junk, empty, junk, empty, zero, empty),
        (some, lse, junk, empty, some, lse),
        (junk, empty, some, lse, some, lse),
    ):
        got = attn_core.merge_state(va, sa, vb, sb)
        into_v, into_s = va.clone(), sa.clone()
        attn_core.merge_state_in_place(into_v, into_s, vb, sb)
        many = attn_core.merge_states(torch.stack([va, vb], 1), torch.stack([sa, sb], 1))
        for merged in (got, (into_v, into_s), many):
            assert same_bits(merged[0], v)
            assert same_bits(merged[1], s)
    for at in range(3):
        vs, ss = [junk] * 3, [empty] * 3
        vs[at], ss[at] = some, lse
        v, s = attn_core.merge_states(torch.stack(vs, 1), torch.stack(ss, 1))
        assert same_bits(v, some)
        assert same_bits(s, lse)
    v, s = attn_core.merge_states(zero.new_zeros(1, 0, 1, 64), empty.new_zeros(1, 0, 1))
    assert same_bits(v, zero)
    assert same_bits(s, empty)


@pytest.mark.parametrize("way", [P, R, S1])
def test_b20_rows_without_keys_have_lse_minus_inf(backend, way):
    """Fully masked rows came back with lse about -49994. https://github.com/flashinfer-ai/flashinfer/issues/4452"""
    q, k, v = rnd(4, (6, 2, 64), (4, 2, 64), (4, 2, 64))
    case, asked = paged(q, k, v, 16), Asked(Rule(causal=True))
    agrees(way, backend, case, asked, sums=[-13.14287])
    out, lse = attend(way, backend, case, asked)
    assert torch.equal(out[:2], torch.zeros_like(out[:2]))
    assert torch.equal(lse[:2], torch.full((2, 2), -INF))
    assert abs(float(lse[2, 0]) - 2.79247) < 1e-3


@pytest.mark.parametrize("way", WAYS)
def test_b21_request_without_keys_merges_as_nothing(backend, way):
    """lse was +inf for queries without keys and took all the weight. https://github.com/Dao-AILab/flash-attention/pull/978"""
    case = base_r0()
    other_v, other_s = attend(D, "auto", case)
    nothing = case.but(tables=((),), last=(0,))
    out, lse = attend(way, backend, nothing)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full((1, 4), -INF))
    v, s = attn_core.merge_state(out, lse, other_v, other_s)
    assert same_bits(v, other_v)
    assert same_bits(s, other_s)
    # another library's way of saying so
    v, s = attn_core.merge_state(out, -lse, other_v, other_s)
    assert same_bits(v, other_v)
    assert same_bits(s, other_s)


def test_b21_split_context_merges_to_the_whole(backend):
    """lse was +inf for queries without keys and took all the weight. https://github.com/Dao-AILab/flash-attention/pull/978"""
    case = base_r0()
    w = wrapper(D, backend)
    parts = []
    for first, last in (((), 0), ((2, 0), 16), ((3,), 5), ((), 0)):
        with served(backend):
            plan(w, case.but(tables=(first,), last=(last,)))
        parts.append(run(w, case))
    v, s = parts[0]
    for other_v, other_s in parts[1:]:
        attn_core.merge_state_in_place(v, s, other_v, other_s)
    close((v, s), case.want(), torch.float16)
