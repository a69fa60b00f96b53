"""Measurements of this machine: when they speak, and what they may and may not overrule."""

from dataclasses import replace

import pytest
import torch

from attn_core import notices, plugins
from attn_core.batch import BatchShape
from attn_core.decode import BatchDecodeWithPagedKVCacheWrapper
from attn_core.errors import NoRoute, Unsupported
from attn_core.measured import REACH, Measured
from attn_core.problem import AttentionProblem, MaskMode, Op, PagedKV
from attn_core.query import GraphLimits, Query
from attn_core.reasons import Reason
from attn_core.route import MEASURED, choose, explain, screen, serve
from attn_core.target import DeviceTarget

from .fakes import ABSENT, BUILD, SLOW, WRONG, FakeBackend, registry, rule, slugs
from .tune_kit import bucket, pair

HERE = DeviceTarget("hip", "gfx942", 304, 64)
LAYER = AttentionProblem(
    op=Op.PREFILL_PAGED, num_qo_heads=8, num_kv_heads=2, head_dim_qk=64, head_dim_vo=64,
    q_dtype=torch.bfloat16, kv_dtype=torch.bfloat16, o_dtype=torch.bfloat16, kv=PagedKV(16),
    mask=MaskMode.CAUSAL,
)  # fmt: skip
B_FROM_9 = bucket((1, "a/p"), (9, "b/p"))
A_FROM_9 = bucket((1, "b/p"), (9, "a/p"))


def asked(q_len=16, kv_len=64, batch_size=2, target=HERE, problem=LAYER, graph=None):
    shape = BatchShape(
        batch_size=batch_size, total_q=batch_size * q_len, max_q_len=q_len, uniform_q_len=q_len,
        max_kv_len=kv_len, total_kv=batch_size * kv_len, total_pages=batch_size * -(-kv_len // 16),
    )  # fmt: skip
    return Query(target, problem, shape, graph)


def route(query, *pairs, backends=None, passed=(), **options):
    backends = backends or [FakeBackend("a", rank=1), FakeBackend("b", rank=2)]
    screened = screen(
        query.target, query.problem, backends, graph=query.graph, measured=Measured(pairs), **options
    )
    found = choose(screened, query, passed=passed)
    if not passed:
        assert [v.candidate for v in explain(screened, query) if v.chosen] == [found.candidate]
    return found


def test_the_faster_one_is_taken_on_either_side_of_a_crossover():
    known = pair(LAYER, HERE, B_FROM_9)
    assert [route(asked(q), known).candidate for q in (1, 8, 9, 64)] == ["a/p", "a/p", "b/p", "b/p"]


def test_a_measured_decision_says_what_it_rests_on():
    found = route(asked(16), pair(LAYER, HERE, B_FROM_9, origin="my.toml"))
    assert found.refused == (Reason(MEASURED, "a/p", "b/p", "batch 2, q_len 64, kv_len 64"),)
    (finding,) = found.measured
    assert str(finding) == "b/p was measured faster than a/p at batch 2, q_len 64, kv_len 64 (my.toml)"
    assert found.fallback_reason == (
        "a/p: was measured slower on this device than b/p, got batch 2, q_len 64, kv_len 64 "
        "[core.measured-slower]"
    )
    assert route(asked(1), pair(LAYER, HERE, B_FROM_9)).measured == ()


def test_a_decision_does_not_depend_on_what_was_asked_before():
    screened = screen(HERE, LAYER, [FakeBackend("a"), FakeBackend("b", rank=20)], measured=Measured(
        [pair(LAYER, HERE, B_FROM_9)]
    ))  # fmt: skip
    lengths = [1, 64, 1, 9, 8, 64, 1]
    assert [choose(screened, asked(q)).candidate for q in lengths] == [
        "b/p" if q >= 9 else "a/p" for q in lengths
    ]


OTHER = {
    "arch": {"target": replace(HERE, arch="gfx950")},
    "compute units": {"target": replace(HERE, num_cus=228)},
    **{
        name: {"problem": replace(LAYER, **{name: value})}
        for name, value in {
            "num_qo_heads": 16,
            "head_dim_vo": 32,
            "kv_dtype": torch.float16,
            "kv": PagedKV(16, "HND"),
            "mask": MaskMode.NONE,
            "window_left": 5,
            "logits_soft_cap": 3.0,
            "op": Op.PREFILL_RAGGED,
        }.items()
    },
    "q_dtype": {"problem": replace(LAYER, q_dtype=torch.float16, o_dtype=torch.float16)},
    "page size": {"problem": replace(LAYER, kv=PagedKV(32))},
}


@pytest.mark.parametrize("other", OTHER.values(), ids=OTHER)
def test_a_measurement_is_about_its_own_device_and_layer_only(other):
    assert route(asked(**other), pair(LAYER, HERE, B_FROM_9)).candidate == "a/p"


def test_facts_that_cost_no_time_do_not_matter():
    same = replace(LAYER, needs_lse=True, sm_scale=0.5, rope_theta=2.0)
    assert route(asked(problem=same), pair(LAYER, HERE, B_FROM_9)).candidate == "b/p"
    elsewhere = replace(HERE, index=3)
    assert route(asked(target=elsewhere), pair(LAYER, HERE, B_FROM_9)).candidate == "b/p"


def test_beyond_its_reach_a_measurement_is_silent():
    known = pair(LAYER, HERE, bucket((1, "b/p"), batch_size=8, kv_len=64, q_lens=(8, 64)))
    near = {"q_len": 16, "kv_len": 64, "batch_size": 8}
    for name, (low, high) in {"q_len": (8, 64), "kv_len": (64, 64), "batch_size": (8, 8)}.items():
        ends = {low // REACH: "b/p", high * REACH: "b/p", low // REACH - 1: "a/p", high * REACH + 1: "a/p"}
        for size, chosen in ends.items():
            assert route(asked(**{**near, name: size}), known).candidate == chosen, (name, size)


def test_the_nearest_bucket_by_ratio_speaks_batch_size_first():
    known = pair(
        LAYER, HERE,
        bucket((1, "a/p"), batch_size=2, kv_len=64), bucket((1, "b/p"), batch_size=2, kv_len=256),
        bucket((1, "b/p"), batch_size=32, kv_len=64),
    )  # fmt: skip
    kv = {64: "a/p", 127: "a/p", 128: "a/p", 129: "b/p", 256: "b/p"}  # 128 is as far from both: the smaller
    for kv_len, chosen in kv.items():
        assert route(asked(kv_len=kv_len), known).candidate == chosen, kv_len
    assert route(asked(batch_size=8, kv_len=64), known).candidate == "a/p"
    assert route(asked(batch_size=9, kv_len=256), known).candidate == "b/p"


def test_a_measurement_lifts_the_preference_against_the_faster_one():
    slow = rule(SLOW, lambda q: (99, q.batch.max_q_len))
    backends = [FakeBackend("a", rank=1, rules=[slow]), FakeBackend("b", rank=2)]
    known = pair(LAYER, HERE, A_FROM_9)
    assert route(asked(16), backends=backends).candidate == "b/p"
    found = route(asked(16), known, backends=backends)
    assert (found.candidate, found.refused, found.fallback_reason) == ("a/p", (), None)
    assert [str(f.faster) for f in found.measured] == ["a/p"]
    short = route(asked(1), known, backends=backends)
    assert (short.candidate, slugs(short.refused)) == ("b/p", [("a/p", "fake.slow")])


def test_a_measurement_never_lifts_a_limit():
    wrong = rule(WRONG, lambda q: (8, q.batch.max_q_len))
    known = pair(LAYER, HERE, B_FROM_9)
    for unable in (
        FakeBackend("b", rank=2, rules=[wrong]),
        FakeBackend("b", rank=2, unavailable=Reason(ABSENT, "b")),
    ):
        found = route(asked(16), known, backends=[FakeBackend("a", rank=1), unable])
        assert (found.candidate, found.refused, found.measured) == ("a/p", (), ())


def test_a_faster_one_that_cannot_be_built_is_passed_over_and_told_of():
    known = pair(LAYER, HERE, A_FROM_9)
    slow = rule(SLOW, lambda q: (99, q.batch.max_q_len))
    broken = FakeBackend("a", rank=1, rules=[slow], prepare=Reason(BUILD, "a/p"))
    screened = screen(HERE, LAYER, [broken, FakeBackend("b", rank=2)], measured=Measured([known]))
    found = choose(screened, asked(16))
    assert (found.candidate, found.measured) == ("b/p", ())
    assert slugs(found.refused) == [("a/p", "fake.slow"), ("a/p", "fake.build")]


def test_one_that_finds_late_that_it_cannot_is_not_chosen_again():
    screened = screen(HERE, LAYER, [FakeBackend("a", rank=1), FakeBackend("b", rank=2)], measured=Measured(
        [pair(LAYER, HERE, B_FROM_9)]
    ))  # fmt: skip

    def attempt(decision):
        if decision.candidate == "b/p":
            raise Unsupported(Reason(WRONG, "b/p", 1))
        return decision.candidate

    decision, served = serve(screened, asked(16), attempt)
    assert (decision.candidate, served) == ("a/p", "a/p")


def test_verdicts_in_a_circle_end():
    names = ("a/p", "b/p", "c/p")
    known = [
        pair(LAYER, HERE, bucket((1, faster)), candidates=(slower, faster))
        for slower, faster in zip(names, (*names[1:], names[0]), strict=True)
    ]
    backends = [FakeBackend(name, rank=at) for at, name in enumerate("abc")]
    found = route(asked(), *known, backends=backends)
    assert (found.candidate, len(found.measured)) == ("c/p", 2)


def test_a_chain_of_verdicts_is_followed():
    known = (
        pair(LAYER, HERE, bucket((1, "b/p"))),
        pair(LAYER, HERE, bucket((1, "c/p")), candidates=("b/p", "c/p")),
    )
    backends = [FakeBackend(name, rank=at) for at, name in enumerate("abc")]
    found = route(asked(), *known, backends=backends)
    assert (found.candidate, slugs(found.refused)) == (
        "c/p",
        [("a/p", "core.measured-slower"), ("b/p", "core.measured-slower")],
    )


def test_a_named_or_pinned_candidate_is_not_judged():
    known = pair(LAYER, HERE, B_FROM_9)
    assert route(asked(16), known, requested="a").candidate == "a/p"
    assert route(asked(16), known, pinned="a/p").candidate == "a/p"


def test_a_candidate_that_is_not_installed_changes_nothing():
    known = pair(LAYER, HERE, bucket((1, "gone/p")), candidates=("a/p", "gone/p"))
    assert route(asked(16), known).candidate == "a/p"


def test_measurements_do_not_make_a_route_where_there_is_none():
    none = rule(WRONG, lambda q: (0, 1))
    backends = [FakeBackend("a", rules=[none]), FakeBackend("b", rank=20, rules=[none])]
    with pytest.raises(NoRoute):
        route(asked(16), pair(LAYER, HERE, B_FROM_9), backends=backends)


def test_a_captured_wrapper_is_judged_at_its_capacity():
    known = pair(LAYER, HERE, bucket((1, "a/p"), kv_len=64), bucket((1, "b/p"), kv_len=4096))
    assert route(asked(kv_len=64), known).candidate == "a/p"
    limits = GraphLimits(2, 32, 512, 4096)
    assert route(asked(kv_len=64, graph=limits), known).candidate == "b/p"


def test_a_wrapper_follows_the_registry_and_says_so_once(caplog):
    backends = [FakeBackend("a", rank=1), FakeBackend("b", rank=2, value=2.0)]
    plain = registry(*backends)
    plugins.use(plain)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(64, dtype=torch.uint8))

    def plan(kv_len):
        indptr = torch.tensor([0, -(-kv_len // 16)], dtype=torch.int32)
        last = torch.tensor([(kv_len - 1) % 16 + 1], dtype=torch.int32)
        wrapper.plan(indptr, torch.arange(256, dtype=torch.int32), last, 2, 1, 8, 16, q_data_type="float32")
        return wrapper.route.candidate

    assert plan(64) == "a/p"
    query = wrapper._planned().query
    known = pair(query.problem, query.target, bucket((1, "b/p"), batch_size=1, kv_len=64))
    plugins.use(replace(plain, measured=Measured([known])))
    notices.forget()
    with caplog.at_level("WARNING", logger="attn_core"):
        assert [plan(64), plan(65), plan(4096)] == ["b/p", "b/p", "a/p"]
    assert [record.message for record in caplog.records] == [
        "a/p: was measured slower on this device than b/p [core.measured-slower]; using b/p"
    ]
