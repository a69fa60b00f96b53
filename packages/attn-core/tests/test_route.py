"""Who serves a call, and why not the others: stages, rules, purity."""

from dataclasses import replace

import pytest
import torch

from attn_core.batch import BatchShape
from attn_core.capability import Capability, Dims
from attn_core.errors import NoRoute
from attn_core.problem import AttentionProblem, MaskMode, Op, PagedKV, RaggedKV
from attn_core.query import GraphLimits, Query
from attn_core.reasons import Code, Reason, Stage
from attn_core.reference import ReferenceBackend
from attn_core.route import choose, explain, screen
from attn_core.target import DeviceTarget

from .fakes import ABSENT, BUILD, EVERYTHING, SLOW, WRONG, FakeBackend, rule, slugs
from .kit import SIZES, decode_wrapper, pages

CPU, GFX942 = DeviceTarget("cpu", "cpu", 2, 1), DeviceTarget("hip", "gfx942", 304, 64)
PROBLEM = AttentionProblem(
    op=Op.DECODE,
    num_qo_heads=4,
    num_kv_heads=2,
    head_dim_qk=8,
    head_dim_vo=8,
    q_dtype=torch.float16,
    kv_dtype=torch.float16,
    o_dtype=torch.float16,
    kv=PagedKV(4),
)
SHAPE = BatchShape(
    batch_size=2, total_q=2, max_q_len=1, uniform_q_len=1, max_kv_len=9, total_kv=12, total_pages=4
)
ALL = frozenset(Op)


def decide(*backends, problem=PROBLEM, shape=SHAPE, target=CPU, graph=None, **options):
    screened = screen(target, problem, backends, graph=graph, **options)
    return choose(screened, Query(target, problem, shape, graph))


REFERENCE = ReferenceBackend()


def test_stages_run_in_order_and_a_refused_candidate_gets_no_later_one():
    """Four paths, each refused by one stage more than the last; every rule and build is recorded."""
    asked = []

    def wrong(query):
        asked.append("wrong")
        return (1, 2)

    def slow(query):
        asked.append("slow")
        return (3, 4)

    narrow = replace(EVERYTHING, head_dims=Dims(values=frozenset({64})))
    absent = FakeBackend(
        "absent", rank=1, rules=[rule(WRONG, wrong)], unavailable=Reason(ABSENT, "", "a licence")
    )
    unable = FakeBackend("unable", rank=2, paths=[("p", narrow)], rules=[rule(WRONG, wrong)])
    assert decide(absent, unable, REFERENCE).candidate == "reference/torch"
    assert asked == []
    assert absent.count("prepare") == unable.count("prepare") == 0

    fake = FakeBackend("both", rules=[rule(SLOW, slow), rule(WRONG, wrong)])
    decision = decide(fake, REFERENCE)
    assert asked == ["slow", "wrong"]
    assert slugs(decision.refused) == [("both/p", "fake.wrong")]  # a wrong answer's speed is of no interest
    assert fake.count("prepare") == 0

    built = FakeBackend("built", rules=[rule(SLOW, lambda q: None)], prepare=Reason(BUILD, "", "ninja"))
    decision = decide(built, REFERENCE)
    assert slugs(decision.refused) == [("built/p", "fake.build")]
    assert [Stage.AVAILABILITY < Stage.CAPABILITY < Stage.PREFERENCE < Stage.PREPARE] == [True]


def test_every_failing_fact_of_a_stage_is_kept():
    narrow = Capability(
        archs=None,
        ops=frozenset({Op.DECODE}),
        q_dtypes=frozenset({torch.bfloat16}),
        head_dims=Dims(multiple_of=16),
        max_group=1,
        kv_orders=frozenset({"HND"}),
        page_sizes=frozenset({16, 128}),
        lse=False,
        tensor_cores=False,
    )
    problem = replace(
        PROBLEM,
        window_left=3,
        logits_soft_cap=2.0,
        needs_lse=True,
        use_tensor_cores=True,
        kv_dtype=torch.float8_e5m2,
        o_dtype=torch.float32,
        disable_split_kv=True,
    )
    decision = decide(FakeBackend(paths=[("p", narrow)]), REFERENCE, problem=problem)
    assert [r.code.slug for r in decision.refused] == [
        "core.q-dtype",
        "core.kv-dtype",
        "core.o-dtype",
        "core.head-dim",
        "core.gqa-group",
        "core.kv-order",
        "core.page-size",
        "core.window",
        "core.soft-cap",
        "core.lse",
        "core.batch-invariant",
        "core.tensor-cores",
    ]
    rules = [
        rule(SLOW, lambda q: (1, 2)),
        rule(Code("fake.two", Stage.PREFERENCE, "is {limit}"), lambda q: ("two", 3)),
    ]
    assert [r.code.slug for r in decide(FakeBackend(rules=rules), REFERENCE).refused] == [
        "fake.slow",
        "fake.two",
    ]


FITS = Capability(archs=None, ops=frozenset(Op), masks=frozenset({MaskMode.NONE}))
CASES = {
    "core.arch": (
        {"archs": frozenset({"gfx942", "gfx950"})},
        {},
        "needs a device of gfx942, gfx950, got cpu",
    ),
    "core.op": ({"ops": frozenset({Op.VERIFY, Op.APPEND})}, {}, "serves append, verify, got decode"),
    "core.q-dtype": ({"q_dtypes": frozenset({torch.bfloat16})}, {}, "takes q of bfloat16, got float16"),
    "core.kv-dtype": ({}, {"kv_dtype": torch.float8_e5m2}, "got float8_e5m2"),
    "core.same-dtype": ({"same_dtype": True}, {"kv_dtype": torch.bfloat16}, "q's type float16, got bfloat16"),
    "core.o-dtype": ({}, {"o_dtype": torch.float32}, "writes out of float16, got float32"),
    "core.head-dim": (
        {"head_dims": Dims(multiple_of=16, at_most=256)},
        {},
        "multiple of 16 up to 256, got 8",
    ),
    "core.head-dim-split": ({"head_dim_split": False}, {"head_dim_vo": 16}, "got 8 and 16"),
    "core.gqa-group": ({"max_group": 1}, {}, "up to 1, got 2"),
    "core.kv-order": ({"kv_orders": frozenset({"HND"})}, {}, "kv_layout HND, got NHD"),
    "core.page-size": ({"page_sizes": frozenset({128, 16})}, {}, "pages at 16, 128, got 4"),
    "core.mask": ({}, {"mask": MaskMode.CAUSAL}, "takes mask none, got causal"),
    "core.pos-encoding": ({}, {"pos_encoding": "ALIBI"}, "NONE, got ALIBI"),
    "core.window": ({}, {"window_left": 0}, "has no sliding window, got 0"),
    "core.soft-cap": ({}, {"logits_soft_cap": 1.0}, "has no logits soft cap, got 1.0"),
    "core.lse": ({"lse": False}, {"needs_lse": True}, "does not return the log-sum-exp"),
    "core.batch-invariant": ({}, {"fixed_split_size": 1}, "does not honour fixed_split_size"),
    "core.tensor-cores": ({"tensor_cores": False}, {"use_tensor_cores": True}, "use_tensor_cores=False only"),
}


@pytest.mark.parametrize("slug", CASES)
def test_each_field_of_a_capability_refuses_alone(slug):
    has, asks, text = CASES[slug]
    asks = {k: type(PROBLEM.pos_encoding)(v) if k == "pos_encoding" else v for k, v in asks.items()}
    problem, fake = replace(PROBLEM, **asks), FakeBackend(paths=[("p", replace(FITS, **has))])
    with pytest.raises(NoRoute) as caught:
        decide(fake, problem=problem)
    assert slugs(caught.value.reasons) == [("fake/p", slug)]
    assert text in str(caught.value.reasons[0])
    fitting = FakeBackend(paths=[("p", FITS)])
    assert decide(fitting).candidate == "fake/p"
    if not asks:
        assert decide(fitting, problem=problem).candidate == "fake/p"


def test_page_sizes_and_splits_do_not_concern_ragged_keys():
    paged_only = replace(FITS, page_sizes=frozenset({16}))
    problem = replace(PROBLEM, op=Op.PREFILL_RAGGED, kv=RaggedKV())
    assert decide(FakeBackend(paths=[("p", paged_only)]), problem=problem).candidate == "fake/p"


def test_preferences_are_not_asked_of_a_backend_that_was_named():
    fake = FakeBackend(rules=[rule(SLOW, lambda q: (16, 2))])
    assert decide(fake, REFERENCE).candidate == "reference/torch"
    for name in ("fake", "fake/p"):
        decision = decide(fake, REFERENCE, requested=name)
        assert (decision.candidate, decision.refused, decision.fallback_reason) == ("fake/p", (), None)
    limits = GraphLimits(2, 2, 8)
    pinned = decide(fake, REFERENCE, graph=limits, pinned="fake/p")
    assert pinned.candidate == "fake/p"


def test_limits_hold_for_a_backend_that_was_named_too():
    fake = FakeBackend(rules=[rule(WRONG, lambda q: (16, 20))])
    for options in (
        {"requested": "fake"},
        {"requested": "fake/p"},
        {"graph": GraphLimits(2, 2, 8), "pinned": "fake/p"},
    ):
        with pytest.raises(NoRoute, match=r"fake/p: is wrong above 16 rows, got 20 \[fake.wrong\]"):
            decide(fake, REFERENCE, **options)


def test_a_rule_sees_only_its_own_entry_points_and_paths():
    asked = []
    rules = [
        rule(WRONG, lambda q: asked.append("decode b"), paths=["b"], ops=frozenset({Op.DECODE})),
        rule(WRONG, lambda q: asked.append("verify"), paths=["a", "b"], ops=frozenset({Op.VERIFY})),
    ]
    fake = FakeBackend(paths=["a", "b"], rules=rules)
    decide(fake)
    assert asked == []
    decide(fake, requested="fake/b")
    assert asked == ["decode b"]


def test_a_rule_that_raises_is_a_bug_and_not_a_refusal():
    fake = FakeBackend(rules=[rule(SLOW, lambda q: 1 // 0)])
    with pytest.raises(ZeroDivisionError):
        decide(fake, REFERENCE)


def test_equal_questions_have_equal_answers_whatever_came_between(use):
    quick = [rule(SLOW, lambda q: (1, q.batch.total_q) if q.batch.total_q > 2 else None)]
    use(FakeBackend(rules=quick))
    p = {n: pages([9] * n) for n in (1, 2, 3, 4)}

    def ask(wrapper, n):
        wrapper.plan(*p[n].table, *SIZES)
        return wrapper.route

    want = {n: ask(decode_wrapper(), n) for n in p}
    assert {n: d.candidate for n, d in want.items()} == {
        1: "fake/p",
        2: "fake/p",
        3: "reference/torch",
        4: "reference/torch",
    }
    wrapper = decode_wrapper()
    for n in (3, 1, 4, 4, 2, 1, 3, 2):
        assert ask(wrapper, n) == want[n]
    assert len({want[3], ask(wrapper, 3)}) == 1
    assert want[3] != want[4]  # got is part of the decision, though not of the cause
    assert want[3].refused[0].key == want[4].refused[0].key


def test_asking_again_prepares_nothing_again(use):
    fake = use(FakeBackend())
    wrapper, p = decode_wrapper(), pages([9, 3])
    for _ in range(5):
        wrapper.plan(*p.table, *SIZES)
    assert (fake.count("prepare"), fake.count("unavailable"), fake.count("plan")) == (1, 1, 5)
    wrapper.plan(*p.table, *SIZES, window_left=4)
    assert (fake.count("prepare"), fake.count("unavailable")) == (2, 2)


def test_registries_do_not_mix(use):
    """A wrapper that outlives a change of backends asks the new ones."""
    use(FakeBackend("first"))
    wrapper, p = decode_wrapper(), pages([9, 3])
    wrapper.plan(*p.table, *SIZES)
    use(FakeBackend("second"))
    wrapper.plan(*p.table, *SIZES)
    assert wrapper.backend == "second"


def test_explain_judges_every_candidate_and_builds_nothing():
    gone = FakeBackend("gone", rank=1, unavailable=Reason(ABSENT, "", "a wheel"))
    fakes = [
        gone,
        FakeBackend("slow", rank=2, rules=[rule(SLOW, lambda q: (1, 2))]),
        FakeBackend("first", rank=3, paths=["p", "q"]),
        FakeBackend("late", rank=4, paths=[("p", replace(EVERYTHING, archs=frozenset({"gfx950"})))]),
        REFERENCE,
    ]
    found = explain(screen(GFX942, PROBLEM, fakes), Query(GFX942, PROBLEM, SHAPE))
    assert [(v.candidate, v.chosen, [r.code.slug for r in v.refusals]) for v in found] == [
        ("gone/p", False, ["fake.absent"]),
        ("slow/p", False, ["fake.slow"]),
        ("first/p", True, []),
        ("first/q", False, []),
        ("late/p", False, ["core.arch"]),
        ("reference/torch", False, []),
    ]
    assert not any(f.count("prepare") or f.count("plan") for f in fakes[:-1])
    assert choose(screen(GFX942, PROBLEM, fakes), Query(GFX942, PROBLEM, SHAPE)).candidate == "first/p"
    named = explain(screen(GFX942, PROBLEM, fakes, requested="slow"), Query(GFX942, PROBLEM, SHAPE))
    assert [v.candidate for v in named if v.chosen] == ["slow/p"]
    assert {r.code.slug for v in named if not v.chosen for r in v.refusals} == {"core.not-requested"}


def test_paths_are_tried_in_the_backends_own_order():
    fake = FakeBackend(paths=["z", "a", "m"])
    assert decide(fake).candidate == "fake/z"
    assert decide(fake, requested="fake/m").candidate == "fake/m"
    found = explain(screen(CPU, PROBLEM, [fake]), Query(CPU, PROBLEM, SHAPE))
    assert [v.candidate for v in found] == ["fake/z", "fake/a", "fake/m"]


def test_what_a_path_by_name_cannot_do_is_no_cause_of_a_fallback():
    """It is listed in the decision, told of nobody, and still an error for who names it."""
    narrow = replace(EVERYTHING, head_dims=Dims(values=frozenset({64})))

    def fast(**changes):
        backend = FakeBackend("fast", paths=(("p", narrow),))
        backend.paths = (replace(backend.paths[0], **changes),)
        return backend

    told, untold = decide(fast(), REFERENCE), decide(fast(by_name=True), REFERENCE)
    for decision in (told, untold):
        assert slugs(decision.refused) == [("fast/p", "core.head-dim")]
    assert "core.head-dim" in told.fallback_reason
    assert untold.fallback_reason is None
    with pytest.raises(NoRoute, match=r"core.head-dim"):
        decide(fast(by_name=True), REFERENCE, requested="fast")


def test_a_decision_that_no_batch_can_change_is_made_once():
    fake = FakeBackend("fake", paths=[("never", replace(EVERYTHING, ops=frozenset({Op.APPEND}))), "p"])
    screened = screen(CPU, PROBLEM, [fake, REFERENCE])
    first = choose(screened, Query(CPU, PROBLEM, SHAPE))
    longer = Query(CPU, PROBLEM, replace(SHAPE, max_kv_len=90, total_kv=100))
    assert choose(screened, longer) is first
    late = choose(screened, longer, passed=[Reason(WRONG, "fake/p", 1)])
    assert slugs(late.refused) == [("fake/never", "core.op"), ("fake/p", "fake.wrong")]
    assert late.candidate == "reference/torch"
    assert choose(screened, longer) is first


@pytest.mark.parametrize("kind", ["rule", "build", "passed"])
def test_a_decision_that_a_batch_or_a_try_may_change_is_made_anew(kind):
    ready = []
    slow = [rule(SLOW, lambda q: (9, 1) if q.batch.max_kv_len < 10 else None)] if kind == "rule" else []
    build = Reason(BUILD, "", "ninja")
    fake = FakeBackend(
        "fake", rules=slow, prepare=lambda *_: build if kind == "build" and not ready else None
    )
    screened = screen(CPU, PROBLEM, [fake, REFERENCE])
    passed = [Reason(WRONG, "fake/p", 1)] if kind == "passed" else []
    assert choose(screened, Query(CPU, PROBLEM, SHAPE), passed=passed).candidate == "reference/torch"
    ready.append(True)
    longer = replace(SHAPE, max_kv_len=90, total_kv=100)
    assert choose(screened, Query(CPU, PROBLEM, longer)).candidate == "fake/p"
