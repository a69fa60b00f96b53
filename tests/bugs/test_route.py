from __future__ import annotations

import logging

import pytest
import torch

import attn_core
from attn_core import NoRoute, Unsupported
from attn_core.backend import Path
from attn_core.batch import BatchShape
from attn_core.capability import FLOATS, GraphSupport
from attn_core.problem import AttentionProblem, MaskMode, Op, PagedKV
from attn_core.query import GraphLimits, Query
from attn_core.reasons import Code, Reason, Stage
from attn_core.route import choose, screen
from attn_core.rules import Rule as RouteRule
from attn_core.target import DeviceTarget

from .fakes import ABSENT, BUILD, LATE, Fake, capability
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
    base,
    close,
    i32,
    plan,
    refused,
    run,
    workspace,
    wrapper,
)

SHORT = Code("fake.short", Stage.PREFERENCE, "is slower up to {limit} rows", meaning="Measured.")
SHORT_ROWS = {"gfx942": 16, "gfx950": 8}


def short(query: Query):
    limit, rows = SHORT_ROWS.get(query.target.arch), query.batch.max_q_len
    return None if limit is None or rows > limit else (limit, rows)


ARCHS = frozenset(SHORT_ROWS)
NATIVE = Path(
    "native", capability(archs=ARCHS, ops=frozenset({Op.PREFILL_PAGED}), page_sizes=frozenset({1024}))
)
GATHER = Path("gather", capability(archs=ARCHS, ops=frozenset({Op.PREFILL_PAGED}), same_dtype=True))
ONE_ROW = Path(
    "rows",
    capability(
        archs=ARCHS, ops=frozenset({Op.DECODE}), tensor_cores=False, max_group=16, graph=GraphSupport.NEVER
    ),
)  # fmt: skip
FAST = Fake(
    name="fast",
    paths=(NATIVE, GATHER, ONE_ROW),
    rules=(RouteRule(SHORT, frozenset({Op.PREFILL_PAGED}), frozenset({"gather"}), short),),
)
TILES = Fake(
    capability(archs=ARCHS | {"cpu"}, q_dtypes=FLOATS, kv_dtypes=FLOATS, same_dtype=True), "tiles", rank=9
)
LAST = Fake(name="last", rank=99)
F16, BF16, F8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn

# arch, op, cache type, page, rows, group, captured -> candidate. A change here is a change of behaviour.
GOLDEN = [
    ("gfx942", Op.PREFILL_PAGED, F16, 1024, 1, 4, False, "fast/native"),
    ("gfx942", Op.PREFILL_PAGED, F16, 64, 16, 4, False, "tiles/only"),
    ("gfx942", Op.PREFILL_PAGED, F16, 64, 17, 4, False, "fast/gather"),
    ("gfx950", Op.PREFILL_PAGED, F16, 64, 8, 4, False, "tiles/only"),
    ("gfx950", Op.PREFILL_PAGED, F16, 64, 9, 4, False, "fast/gather"),
    ("gfx942", Op.PREFILL_PAGED, F8, 64, 512, 4, False, "last/only"),
    ("gfx942", Op.PREFILL_PAGED, F8, 1024, 512, 4, False, "fast/native"),
    ("gfx942", Op.DECODE, F16, 16, 1, 4, False, "fast/rows"),
    ("gfx942", Op.DECODE, F16, 16, 1, 16, False, "fast/rows"),
    ("gfx942", Op.DECODE, F16, 16, 1, 32, False, "tiles/only"),
    ("gfx942", Op.DECODE, F16, 16, 1, 4, True, "tiles/only"),
    ("gfx942", Op.VERIFY, F16, 16, 4, 4, False, "tiles/only"),
    ("gfx90a", Op.DECODE, F16, 16, 1, 4, False, "last/only"),
    ("cpu", Op.DECODE, F16, 16, 1, 4, False, "tiles/only"),
    ("cpu", Op.PREFILL_PAGED, BF16, 64, 512, 4, False, "tiles/only"),
]


def asked(arch: str, op: Op, dtype: torch.dtype, page: int, rows: int, group: int, graph: bool) -> Query:
    target = DeviceTarget("cpu", "cpu", 8) if arch == "cpu" else DeviceTarget("hip", arch, 304, 64)
    problem = AttentionProblem(
        op=op, num_qo_heads=group, num_kv_heads=1, head_dim_qk=128, head_dim_vo=128,
        q_dtype=F16 if dtype is F8 else dtype, kv_dtype=dtype, o_dtype=F16 if dtype is F8 else dtype,
        kv=PagedKV(page), mask=MaskMode.NONE if op is Op.DECODE else MaskMode.CAUSAL,
    )  # fmt: skip
    shape = BatchShape(
        batch_size=2, total_q=2 * rows, max_q_len=rows, uniform_q_len=rows, max_kv_len=4096, total_kv=8192
    )
    return Query(target, problem, shape, GraphLimits(2, 2 * rows, 512) if graph else None)


def decide(query: Query) -> str:
    return choose(
        screen(query.target, query.problem, (FAST, TILES, LAST), graph=query.graph), query
    ).candidate


def test_b89_golden_table():
    """An upgrade changed what auto means for decode. https://github.com/flashinfer-ai/flashinfer/pull/2530"""
    assert {(*row, decide(asked(*row))) for *row, _ in GOLDEN} == {tuple(row) for row in GOLDEN}
    # and in the other order: a decision depends on its own question
    again = [decide(asked(*row)) for *row, _ in reversed(GOLDEN)]
    assert again == [row[-1] for row in reversed(GOLDEN)]


def late(query: Query) -> None:
    raise Unsupported(Reason(LATE, "fake/only", 3, query.batch.max_q_len))


@pytest.mark.parametrize("way", [D, D_TC, P, R, S1])
@pytest.mark.parametrize(
    ("fake", "said"),
    [
        (lambda: Fake(on_plan=late), "fake/only: cannot after all, got 1 [fake.late]"),
        (
            lambda: Fake(on_prepare=lambda path: Reason(BUILD, path, None, "no compiler")),
            "fake/only: did not build, got no compiler [fake.build]",
        ),
        (
            lambda: Fake(on_unavailable=lambda target: Reason(ABSENT, "fake")),
            "fake/only: is not installed [fake.absent]",
        ),
    ],
)
def test_b90_auto_moves_on_and_says_why(install, way, fake, said):
    """auto committed to a backend that then raised, and raised too. https://github.com/flashinfer-ai/flashinfer/issues/4935"""
    broken = fake()
    install(broken)
    agrees(way, "auto", base())
    assert broken.runs == 0
    if way == S1:
        with refused(said, kind=(NoRoute, Unsupported)):
            attn_core.single_prefill_with_kv_cache(base().q[:1], *base().keys(0), backend="fake")
        return
    w = wrapper(way, "auto")
    plan(w, base())
    assert (w.backend, w.backend_fallback_reason) == ("reference", said)
    explicit = wrapper(way, "fake")
    with refused(said, kind=(NoRoute, Unsupported)):
        plan(explicit, base())
    assert explicit._plan_info is None


def test_b90_unsupported_from_any_question(install):
    """auto committed to a backend that then raised, and raised too. https://github.com/AMD-Ecosystem/flashinfer/pull/311"""
    error = Unsupported(Reason(LATE, "fake/only"))

    def fail(_: object) -> None:
        raise error

    for hook in ("on_unavailable", "on_prepare", "on_plan"):
        install(Fake(**{hook: fail}))
        w = wrapper(D, "auto")
        plan(w, base())
        assert (w.backend, w.backend_fallback_reason) == (
            "reference",
            "fake/only: cannot after all [fake.late]",
        )
        close(run(w, base()), base().want(), torch.float16)
        with pytest.raises(Unsupported) as caught:
            plan(wrapper(D, "fake"), base())
        assert caught.value is error


@pytest.mark.parametrize("error", [ValueError, TypeError, ImportError, OSError, RuntimeError, KeyError])
def test_b90_a_question_that_fails(install, error):
    """A predicate of a backend's that raises itself is one more refusal, told as what it is."""

    def fail(_: object) -> None:
        raise error("a bug")

    install(Fake(on_unavailable=fail))
    for way in WAYS:
        agrees(way, "auto", base())
    w = wrapper(D, "auto")
    plan(w, base())
    assert w.backend == "reference"
    assert w.backend_fallback_reason.endswith("[core.unavailable-raised]")
    assert error.__name__ in w.backend_fallback_reason
    explicit = wrapper(D, "fake")
    with refused("fake/only", error.__name__, "a bug", "[core.unavailable-raised]", kind=NoRoute):
        plan(explicit, base())
    assert explicit._plan_info is None


def test_b90_no_demotion_after_capture(install):
    """auto committed to a backend that then raised, and raised too. https://github.com/flashinfer-ai/flashinfer/issues/4935"""

    def second(query: Query) -> None:
        if fake.plans > 1:
            late(query)

    fake = Fake(on_plan=second)
    install(fake)
    buffers = [torch.zeros(n, dtype=torch.int32) for n in (3, 8, 2)]
    w = attn_core.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(1), *buffers)
    plan(w, base())
    assert w.backend == "fake"
    held, bytes_before = w._plan_info, [b.clone() for b in buffers]
    with refused("fake/only", "cannot after all", kind=Unsupported):
        plan(w, base().but(tables=((0, 1), (2,)), last=(3, 4)))
    assert w._plan_info is held
    assert all(torch.equal(a, b) for a, b in zip(buffers, bytes_before, strict=True))
    close(run(w, base()), base().want(), torch.float16)


@pytest.mark.parametrize("error", [ValueError, TypeError, ImportError, OSError, RuntimeError, KeyError])
@pytest.mark.parametrize("hook", ["on_prepare", "on_plan"])
def test_b92_only_unsupported_leads_to_a_fallback(install, error, hook):
    """A contract error was swallowed and became a quiet change of backend. https://github.com/alibaba/rtp-llm/pull/1254"""

    def fail(_: object) -> None:
        raise error("a bug")

    install(Fake(**{hook: fail}))
    for name in ("auto", "fake"):
        w = wrapper(D, name)
        with pytest.raises(error, match="a bug"):
            plan(w, base())
        assert w._plan_info is None
    # who asked for another backend has nothing to do with it
    agrees(D, "reference", base())
    agrees(S1, "reference", base())


def test_b92_callers_mistake_is_no_reason_to_fall_back(install):
    """A contract error was swallowed and became a quiet change of backend. https://github.com/alibaba/rtp-llm/pull/1254"""
    fake = Fake()
    install(fake)
    with refused("kv_indptr[2]", 3, 2):
        plan(wrapper(D, "auto"), base(), Asked(indices={"indptr": i32(0, 3, 2)}))
    assert fake.plans == 0
    with refused("backend", "auto, fake, reference", "'flash'"):
        plan(wrapper(D, "flash"), base())


def test_b93_one_record_per_cause(install, caplog):
    """One warning line per step and rank. https://github.com/vllm-project/vllm/issues/21563"""
    caplog.set_level(logging.DEBUG)
    fake = Fake(
        capability(soft_cap=False), rules=(RouteRule(SHORT, frozenset(Op), frozenset({"only"}), rows16),)
    )
    install(fake)
    case = base()
    decode, verify, prefill = wrapper(D, "auto"), wrapper(D_TC, "auto"), wrapper(P, "auto")
    for step in range(340):
        rows = 1 + step % 16
        tables = ((2, 0, 3), tuple(range(step % 3 + 1)))
        now = case.but(tables=tables, last=(rows, 16))
        plan(decode, now)
        plan(verify, now.but(q_lens=(rows,) * 2))
        plan(prefill, now.but(q_lens=(rows, 1)))
        for w in (decode, verify, prefill):
            assert w.backend_fallback_reason.startswith("fake/only: is slower up to 16 rows, got")
    assert [(r.name, r.levelname) for r in caplog.records] == [("attn_core", "WARNING")]
    assert caplog.records[0].getMessage() == (
        "fake/only: is slower up to 16 rows [fake.short]; using reference/torch"
    )
    plan(decode, case, Asked(Rule(cap=5.0)))
    plan(prefill, case, Asked(Rule(cap=7.0)))
    assert [r.getMessage() for r in caplog.records[1:]] == [
        "fake/only: has no logits soft cap [core.soft-cap]; using reference/torch"
    ]


def rows16(query: Query):
    return (16, query.batch.max_q_len) if query.batch.max_q_len <= 16 else None


def test_b93_nothing_is_said_when_nothing_was_declined(install, caplog, capfd):
    """One warning line per step and rank. https://github.com/vllm-project/vllm/pull/21759"""
    caplog.set_level(logging.DEBUG)
    # a backend for another device is listed, but nobody can act on it
    install(Fake(capability(archs=frozenset({"gfx942"})), "far"), Fake(rank=5))
    for way in (D, D_TC, P, R):
        w = wrapper(way, "auto")
        plan(w, base())
        run(w, base())
        assert (w.backend, w.backend_fallback_reason) == ("fake", None)
        assert [r.candidate for r in w.route.refused] == ["far/only"]
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")


def test_b95_choice_and_every_refusal_are_attributes(install):
    """Users could not see which backend auto had taken, nor why. https://github.com/flashinfer-ai/flashinfer/issues/1722"""
    install(
        Fake(capability(archs=frozenset({"gfx942"})), "far"),
        Fake(capability(page_sizes=frozenset({1}), window=False), "narrow", rank=1),
        Fake(name="late", rank=2, on_plan=late),
        Fake(name="good", rank=3),
        Fake(name="unasked", rank=4),
    )
    for way in (D, D_TC, P):
        w = wrapper(way, "auto")
        assert (w.backend, w.route, w.backend_fallback_reason) == ("auto", None, None)
        plan(w, base(), Asked(Rule(window=7)))
        assert (w.backend, w.route.candidate, w.route.requested) == ("good", "good/only", "auto")
        assert [(r.candidate, r.code.slug) for r in w.route.refused] == [
            ("far/only", "core.arch"),
            ("narrow/only", "core.page-size"),
            ("narrow/only", "core.window"),
            ("late/only", "fake.late"),
        ]
        reason = w.backend_fallback_reason
        assert reason == (
            "narrow/only: pages at 1, got 16 [core.page-size]; "
            "narrow/only: has no sliding window, got 7 [core.window]; "
            "late/only: cannot after all, got 1 [fake.late]"
        )
        assert "\n" not in reason
        explicit = wrapper(way, "unasked")
        assert explicit.backend == "unasked"
        plan(explicit, base())
        assert (explicit.backend, explicit.backend_fallback_reason) == ("unasked", None)


def test_x8_an_earlier_choice_decides_nothing(install):
    """auto was resolved once; a later plan kept the old choice or raised. https://github.com/vllm-project/vllm/issues/31625"""
    narrow = Fake(capability(page_sizes=frozenset({16}), soft_cap=False, kv_dtypes=FLOATS))
    install(narrow)
    w = wrapper(D, "auto")
    case = base()
    fp8 = case.but(k=case.k.to(F8), v=case.v.to(F8))
    small = case.but(
        k=case.k.view(8, 8, 2, 64), v=case.v.view(8, 8, 2, 64), tables=((0, 3), (1,)), last=(8, 2)
    )
    for shaped, rule, name in (
        (case, Rule(), "fake"),
        (case, Rule(cap=5.0), "reference"),
        (case, Rule(), "fake"),
        (fp8, Rule(), "reference"),
        (small, Rule(), "reference"),
        (case, Rule(), "fake"),
    ):
        plan(w, shaped, Asked(rule))
        assert w.backend == name
        assert (w.backend_fallback_reason is None) == (name == "fake")
        close(run(w, shaped), shaped.want(rule), torch.float16)
    assert narrow.runs == 3
