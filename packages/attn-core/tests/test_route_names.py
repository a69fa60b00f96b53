"""Names, late refusals and notices: what a caller of auto, or of one backend, gets to see."""

import logging
from dataclasses import replace

import pytest
import torch

from attn_core import notices, plugins
from attn_core.backend import PlanResult
from attn_core.capability import Dims
from attn_core.errors import NoRoute, Unsupported
from attn_core.problem import MaskMode, Op
from attn_core.reasons import Code, Reason, Stage
from attn_core.target import DeviceTarget

from .fakes import ABSENT, BUILD, EVERYTHING, SLOW, WRONG, FakeBackend, registry, rule, slugs
from .kit import SIZES, decode_graph, decode_wrapper, offsets, paged_wrapper, pages, queries

CPU, GFX942 = DeviceTarget("cpu", "cpu", 2, 1), DeviceTarget("hip", "gfx942", 304, 64)


@pytest.mark.parametrize("stage", ["plan", "prepare", "unavailable"])
def test_unsupported_moves_auto_on_and_is_raised_to_whoever_named_it(stage, use):
    late = Unsupported(Reason(BUILD, "someone/else", "a newer kernel", "an old one"))
    use(FakeBackend(**{stage: late}), FakeBackend("next", rank=20))
    p = pages([9, 3])
    wrapper = decode_wrapper()
    wrapper.plan(*p.table, *SIZES)
    assert wrapper.route.candidate == "next/p"
    assert (
        wrapper.backend_fallback_reason
        == "fake/p: needs a build of a newer kernel, got an old one [fake.build]"
    )
    for name in ("fake", "fake/p"):
        with pytest.raises(Unsupported) as caught:
            decode_wrapper(backend=name).plan(*p.table, *SIZES)
        assert caught.value is late


def test_the_second_path_of_a_backend_is_tried_after_its_first():
    def plan(query, path, batch):
        if path == "a":
            raise Unsupported(Reason(BUILD, "", "a"))
        return PlanResult(path)

    plugins.use(registry(FakeBackend(paths=["a", "b"], plan=plan)))
    p, wrapper = pages([9, 3]), decode_wrapper()
    for _ in range(2):
        wrapper.plan(*p.table, *SIZES)
        assert wrapper.route.candidate == "fake/b"
        assert slugs(wrapper.route.refused) == [("fake/a", "fake.build")]


@pytest.mark.parametrize(
    "error", [ValueError, TypeError, ImportError, OSError, RuntimeError, NotImplementedError]
)
@pytest.mark.parametrize("backend", ["auto", "fake"])
@pytest.mark.parametrize("stage", ["plan", "prepare"])
def test_any_other_exception_is_nobodys_refusal(stage, backend, error, use):
    """A bug must not look like a change of backend."""
    use(FakeBackend(**{stage: error("a bug")}))
    with pytest.raises(error, match="a bug"):
        decode_wrapper(backend=backend).plan(*pages([9, 3]).table, *SIZES)


@pytest.mark.parametrize(
    ("does", "got"),
    [
        (RuntimeError("no\ndriver"), "RuntimeError: no driver"),
        (ValueError("a bug"), "ValueError: a bug"),
        (SystemExit("no ROCm"), "SystemExit: no ROCm"),
        ("not here", "'not here'"),
        (False, "False"),
    ],
)
def test_a_backend_that_cannot_say_whether_it_is_there_is_refused(does, got, use, caplog):
    """A broken plugin harms nobody else, and is told by name, once."""
    fake = use(FakeBackend(paths=["a", "b"], unavailable=does), FakeBackend("next", rank=20))
    why = f"fake/a: needs an unavailable() that returns None or a Reason, got {got} [core.unavailable-raised]"
    for _ in range(2):
        wrapper = decode_wrapper()
        wrapper.plan(*pages([9, 3]).table, *SIZES)
        assert wrapper.route.candidate == "next/p"
        assert wrapper.backend_fallback_reason == why
        assert slugs(wrapper.route.refused) == [(f"fake/{p}", "core.unavailable-raised") for p in "ab"]
    assert [r.getMessage() for r in caplog.records] == [f"{why}; using next/p"]
    for name in ("fake", "fake/a"):
        with pytest.raises(NoRoute, match=r"\[core\.unavailable-raised\]"):
            decode_wrapper(backend=name).plan(*pages([9, 3]).table, *SIZES)
    assert fake.count("prepare") == fake.count("plan") == 0


def test_a_failed_build_is_a_reason_and_is_tried_again(use):
    fake = use(FakeBackend(prepare=Reason(BUILD, "", "a compiler", "none")))
    p, wrapper = pages([9, 3]), decode_wrapper()
    wrapper.plan(*p.table, *SIZES)
    assert wrapper.backend_fallback_reason == "fake/p: needs a build of a compiler, got none [fake.build]"
    with pytest.raises(NoRoute, match="needs a build of a compiler"):
        decode_wrapper(backend="fake").plan(*p.table, *SIZES)
    del fake.does["prepare"]
    wrapper.plan(*p.table, *SIZES)
    assert wrapper.backend == "fake"


def test_when_nobody_can_serve_every_reason_is_told(use):
    narrow = replace(EVERYTHING, head_dims=Dims(values=frozenset({64, 128})))
    use(
        FakeBackend("one", paths=[("p", narrow)]),
        FakeBackend("two", plan=Unsupported(Reason(BUILD, "", "more"))),
        FakeBackend("three", rules=[rule(WRONG, lambda q: (1, 2))]),
        reference=False,
    )
    with pytest.raises(NoRoute) as caught:
        decode_wrapper().plan(*pages([9, 3]).table, *SIZES)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, NotImplementedError)
    assert str(caught.value).splitlines() == [
        "backend: no candidate of 'auto' can serve decode:",
        "  one/p: takes head_dim [64, 128], got 8 [core.head-dim]",
        "  two/p: needs a build of more [fake.build]",
        "  three/p: is wrong above 1 rows, got 2 [fake.wrong]",
    ]


@pytest.mark.parametrize("name", ["fa3", "cudnn", "fa2/none", "", "AUTO", "reference/"])
def test_an_unknown_backend_is_refused_with_those_installed(name, use):
    use(FakeBackend("fa2"))
    wrapper = decode_wrapper(backend=name)
    with pytest.raises(
        NoRoute, match=r"needs one of auto, fa2, reference, got .*core.backend-name"
    ) as caught:
        wrapper.plan(*pages([9, 3]).table, *SIZES)
    assert isinstance(caught.value, NotImplementedError)
    assert isinstance(caught.value, ValueError)
    assert repr(name) in str(caught.value)
    assert wrapper.backend == name


def test_backend_and_reason_are_readable_without_a_log(use):
    use(FakeBackend("quick", rules=[rule(SLOW, lambda q: (1, 2) if q.batch.batch_size > 2 else None)]))
    wrapper = decode_wrapper()
    assert (wrapper.backend, wrapper.backend_fallback_reason, wrapper.route) == ("auto", None, None)
    wrapper.plan(*pages([9, 3, 4]).table, *SIZES)
    assert (wrapper.backend, wrapper.route.requested) == ("reference", "auto")
    assert wrapper.backend_fallback_reason == "quick/p: is slow up to 1 rows, got 2 [fake.slow]"
    assert str(wrapper.route) == f"{wrapper.route.candidate}, since {wrapper.backend_fallback_reason}"
    wrapper.plan(*pages([9, 3]).table, *SIZES)
    assert (wrapper.backend, wrapper.backend_fallback_reason) == ("quick", None)
    assert str(wrapper.route) == wrapper.route.candidate
    named = decode_wrapper(backend="reference")
    named.plan(*pages([9, 3]).table, *SIZES)
    assert (named.backend, named.backend_fallback_reason) == ("reference", None)
    assert named.route.requested == "reference"


def test_reasons_nobody_can_act_on_are_listed_but_not_told(use, caplog):
    """A backend for another device is no fallback; a package that is missing here is one."""
    for_amd = ("p", replace(EVERYTHING, archs=frozenset({"gfx942"})))
    for_prefill = ("p", replace(EVERYTHING, ops=frozenset({Op.PREFILL_PAGED})))
    use(FakeBackend("amd", paths=[for_amd]), FakeBackend("prefill", paths=[for_prefill]))
    wrapper = decode_wrapper()
    wrapper.plan(*pages([9, 3]).table, *SIZES)
    assert slugs(wrapper.route.refused) == [("amd/p", "core.arch"), ("prefill/p", "core.op")]
    assert wrapper.route.fallback_reason is None
    assert wrapper.backend_fallback_reason is None
    assert caplog.records == []
    use(FakeBackend("amd", paths=[for_amd]), FakeBackend("gone", unavailable=Reason(ABSENT, "", "amd-aiter")))
    wrapper.plan(*pages([9, 3]).table, *SIZES)
    assert wrapper.backend_fallback_reason == "gone/p: needs amd-aiter [fake.absent]"
    assert len(caplog.records) == 1


def test_a_reason_is_one_line(use):
    use(FakeBackend(unavailable=Reason(ABSENT, "", "x\n  y", "multi\nline\ttext")))
    wrapper = decode_wrapper()
    wrapper.plan(*pages([9, 3]).table, *SIZES)
    assert wrapper.backend_fallback_reason == "fake/p: needs x y, got multi line text [fake.absent]"


def test_a_thousand_plans_say_a_cause_once(use, caplog):
    """q_len, lengths and wrappers change at every step; the cause does not."""
    use(FakeBackend(rules=[rule(SLOW, lambda q: (1, (q.batch.total_q, q.batch.max_kv_len, q.problem.op)))]))
    tables = {n: pages([20 + n, 18]).table for n in range(5)}
    wrappers = [decode_wrapper() for _ in range(2)]
    got = set()
    for step in range(1000):
        wrapper = wrappers[step % 2]
        wrapper.plan(*tables[step % 5], *SIZES, q_len_per_req=1 + step % 16)
        got.add(wrapper.backend_fallback_reason)
    assert len(got) > 50
    assert [(r.name, r.levelno, r.getMessage()) for r in caplog.records] == [
        ("attn_core", logging.WARNING, "fake/p: is slow up to 1 rows [fake.slow]; using reference/torch")
    ]


def test_another_device_candidate_code_or_limit_is_another_cause(caplog):
    reasons = [Reason(SLOW, "a/p", 1, got) for got in range(3)]
    notices.announce(CPU, tuple(reasons), "x")
    assert len(caplog.records) == 1
    for target, reason in (
        (GFX942, Reason(SLOW, "a/p", 1)),
        (replace(GFX942, index=1), Reason(SLOW, "a/p", 1)),
        (CPU, Reason(SLOW, "b/p", 1)),
        (CPU, Reason(WRONG, "a/p", 1)),
        (CPU, Reason(SLOW, "a/p", 2)),
        (CPU, Reason(SLOW, "a/p", [1, 2])),
    ):
        before = len(caplog.records)
        for _ in range(2):
            notices.announce(target, (reason,), "x")
        assert len(caplog.records) == before + 1
    notices.announce(CPU, (Reason(Code("fake.quiet", Stage.CAPABILITY, "x", quiet=True), "a/p"),), "x")
    assert len(caplog.records) == 7


def test_nothing_declined_nothing_said(use, caplog):
    use(FakeBackend())
    decode_wrapper().plan(*pages([9, 3]).table, *SIZES)
    with pytest.raises(ValueError, match="page_size"):
        decode_wrapper().plan(*pages([9, 3]).table, 4, 2, 8, 0)
    assert caplog.records == []


def test_a_rejected_plan_announces_no_fallback(use, caplog):
    use(FakeBackend(rules=[rule(SLOW, lambda q: (1, 2))]))
    p, graph = pages([9, 3]), decode_graph(2, 4)
    with pytest.raises(ValueError, match="at most 4 entries"):
        graph.plan(*pages([9, 9]).table, *SIZES)
    assert caplog.records == []
    graph.plan(*p.table, *SIZES)
    assert len(caplog.records) == 1


def test_auto_is_resolved_anew_by_every_eager_plan(use):
    """A mask that only the reference has must not stick to the plan after it."""
    use(FakeBackend(paths=[("p", replace(EVERYTHING, masks=frozenset({MaskMode.NONE, MaskMode.CAUSAL})))]))
    p, wrapper = pages([4, 4]), paged_wrapper()
    mask = torch.ones(8, dtype=torch.bool)
    served = []
    for options in ({}, {"custom_mask": mask}, {"causal": True}, {"custom_mask": mask}, {}):
        wrapper.plan(offsets([1, 1]), *p.table, *SIZES, **options)
        served.append(wrapper.backend)
        wrapper.run(queries(2, 4, 8, torch.float16), tuple(t.half() for t in p.cache))
    assert served == ["fake", "reference", "fake", "reference", "fake"]
