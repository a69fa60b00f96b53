from __future__ import annotations

import pytest
import torch

from attn_core import NoRoute
from attn_core.batch import BatchShape
from attn_core.capability import FLOATS
from attn_core.problem import AttentionProblem, MaskMode, Op, PagedKV
from attn_core.query import Query
from attn_core.reasons import Code, Stage
from attn_core.route import choose, screen
from attn_core.rules import Rule as RouteRule
from attn_core.target import DeviceTarget

from .fakes import Fake, capability
from .support import (
    D_TC,
    Asked,
    Case,
    D,
    P,
    Rule,
    attend,
    close,
    i32,
    plan,
    refused,
    rnd,
    run,
    same_bits,
    served,
    wrapper,
)


def verify(q_len: int = 4) -> Case:
    """Two requests with ``q_len`` drafts each, lengths 41 and 20."""
    q, k, v = rnd(17, (8, 8, 128), (6, 16, 2, 128), (6, 16, 2, 128), dtype=torch.bfloat16)
    rows = {4: q, 1: q[[0, 4]], 2: q[[0, 1, 4, 5]], 8: torch.cat([q, q])}[q_len]
    return Case(rows, k, v, ((0, 2, 4), (1, 3)), (9, 4), (q_len,) * 2)


@pytest.mark.parametrize("q_len", [1, 2, 4, 8])
def test_b53_verify_is_causal_with_all_rows(backend, q_len):
    """Several rows per request: one was used, and no causal mask. https://github.com/flashinfer-ai/flashinfer/pull/3871"""
    case, rule = verify(q_len), Rule(causal=True)
    want = case.want(rule)
    if q_len == 4:
        assert abs(float(want[0][:4].sum()) + 29.82032) < 1e-4
        assert abs(float(want[0][4:].sum()) + 111.10524) < 1e-4
        assert abs(float(want[1][0, 0]) - 6.27805) < 1e-4
    w, other = wrapper(D_TC, backend), wrapper(P, backend)
    with served(backend):
        plan(w, case)
        plan(other, case, Asked(rule))
    got, prefill = run(w, case), run(other, case)
    close(got, want, torch.bfloat16)
    if w.route.candidate == other.route.candidate:
        assert all(same_bits(a, b) for a, b in zip(got, prefill, strict=True))


def test_b53_rows_that_were_not_planned_are_refused(backend):
    """Several rows per request: one was used, and no causal mask. https://github.com/flashinfer-ai/flashinfer/pull/3871"""
    case = verify()
    w = wrapper(D_TC, backend)
    with served(backend):
        plan(w, case)
    before = run(w, case)
    for rows in (4, 5, 7, 9, 16, 0):
        q = case.q[:1].expand(rows, -1, -1)
        with refused("q", "8 rows", "q_len_per_req 4", f"got {rows}"):
            run(w, case.but(q=q))
    with (
        pytest.warns(DeprecationWarning, match="q_len_per_req"),
        refused("q_len_per_req", "planned 4", "got 2"),
    ):
        run(w, case, q_len_per_req=2)
    for bad in (0, -1):
        with refused("q_len_per_req", "at least 1", bad):
            plan(w, case, Asked(plan={"q_len_per_req": bad}))
    for bad in (2.0, True, "4"):
        with refused("q_len_per_req", "an int", type(bad).__name__, kind=TypeError):
            plan(w, case, Asked(plan={"q_len_per_req": bad}))
    with refused("q_len_per_req", "use_tensor_cores=True", 4):
        plan(wrapper(D, backend), case)
    assert all(same_bits(a, b) for a, b in zip(run(w, case), before, strict=True))


def test_b53_fewer_keys_than_drafts_are_refused(backend):
    """Several rows per request: one was used, and no causal mask. https://github.com/flashinfer-ai/flashinfer/pull/3871"""
    case = verify()
    w = wrapper(D_TC, backend)
    with served(backend):
        plan(w, case)
    before = run(w, case)
    short = case.but(tables=((0, 2, 4), (1,)), last=(9, 3))
    for options in ({}, {"seq_lens": i32(41, 2)}, {"seq_lens": i32(41, 3, 99)}):
        with refused("q_len_per_req", "kv_len 3 in request 1", "at least 4"):
            plan(w, short, Asked(plan=options))
    # 16 keys in the pages, 32 drafts, and a seq_lens that says all is well
    with refused("seq_lens[0]", 16, 512):
        options = {"q_len_per_req": 32, "seq_lens": i32(512, 512)}
        plan(w, case.but(tables=((0,), (1,)), last=(16, 16)), Asked(plan=options))
    assert all(same_bits(a, b) for a, b in zip(run(w, case), before, strict=True))


@pytest.mark.parametrize("window", [0, 3, 20])
def test_b53_verify_with_a_window(backend, window):
    """Several rows per request: one was used, and no causal mask. https://github.com/flashinfer-ai/flashinfer/pull/3871"""
    case = verify()
    close(
        attend(D_TC, backend, case, Asked(Rule(window=window))),
        case.want(Rule(causal=True, window=window)),
        torch.bfloat16,
    )


ONE_ROW = capability(ops=frozenset({Op.DECODE}))


def test_b54_one_row_kernel_never_gets_several(install):
    """A one-row decode kernel was fed all rows of a verify. https://github.com/vllm-project/vllm/issues/31625"""
    fake = Fake(ONE_ROW)
    install(fake)
    want = verify().want(Rule(causal=True))
    w = wrapper(D_TC, "auto")
    plan(w, verify())
    assert (w.backend, fake.plans) == ("reference", 0)
    assert [str(reason) for reason in w.route.refused] == ["fake/only: serves decode, got verify [core.op]"]
    close(run(w, verify()), want, torch.bfloat16)
    with refused("fake/only", "serves decode", "got verify", kind=NoRoute):
        plan(wrapper(D_TC, "fake"), verify())
    # an earlier plan that the fake did serve decides nothing for the next
    w = wrapper(D_TC, "auto")
    for case, name in ((verify(1), "fake"), (verify(4), "reference"), (verify(1), "fake")):
        plan(w, case)
        assert w.backend == name
        close(run(w, case), case.want(Rule(causal=True)), torch.bfloat16)
    assert fake.runs == 2


LIMIT = Code("fake.verify-rows", Stage.CAPABILITY, "verifies at most {limit} rows", meaning="Wrong beyond.")
ROWS = {"gfx942": 4, "gfx950": 8}


def most_rows(query: Query):
    limit, rows = ROWS.get(query.target.arch, 0), query.batch.max_q_len
    return (limit, rows) if rows > limit else None


def test_b57_limits_are_per_architecture():
    """A kernel row existed for the shape, yet one arch answered wrongly. https://github.com/ROCm/aiter/issues/5679"""
    ops = frozenset({Op.VERIFY})
    rule = RouteRule(LIMIT, ops, frozenset({"only"}), most_rows)
    fake = Fake(capability(archs=frozenset(ROWS), ops=ops, q_dtypes=FLOATS), rules=(rule,))
    plain = Fake(name="plain", rank=9)
    problem = AttentionProblem(
        op=Op.VERIFY, num_qo_heads=16, num_kv_heads=1, head_dim_qk=64, head_dim_vo=64,
        q_dtype=torch.bfloat16, kv_dtype=torch.bfloat16, o_dtype=torch.bfloat16, kv=PagedKV(16),
        mask=MaskMode.CAUSAL, use_tensor_cores=True,
    )  # fmt: skip
    for arch, rows, right in (
        ("gfx942", 2, True), ("gfx942", 4, True), ("gfx942", 8, False), ("gfx950", 8, True),
        ("gfx950", 9, False),
    ):  # fmt: skip
        target = DeviceTarget("hip", arch, 304, 64)
        shape = BatchShape(
            batch_size=2, total_q=2 * rows, max_q_len=rows, uniform_q_len=rows, max_kv_len=64, total_kv=128
        )
        query = Query(target, problem, shape)
        decision = choose(screen(target, problem, (fake, plain)), query)
        assert decision.candidate == ("fake/only" if right else "plain/only")
        if right:
            assert decision.fallback_reason is None
            continue
        said = f"fake/only: verifies at most {ROWS[arch]} rows, got {rows} [fake.verify-rows]"
        assert decision.fallback_reason == said
        # a wrong answer is no preference: naming the backend does not help
        with refused(said, kind=NoRoute):
            choose(screen(target, problem, (fake, plain), requested="fake"), query)
