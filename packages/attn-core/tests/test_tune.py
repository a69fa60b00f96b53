"""Measuring two candidates: the right crossover, in spite of noise, and nothing about a wrong result."""

import math
import random
from itertools import pairwise

import pytest
import torch

from attn_core import plugins
from attn_core.measured import Bucket, Cell
from attn_core.options import make_problem
from attn_core.problem import MaskMode, Op, PagedKV, RaggedKV
from attn_core.reference import ReferenceBackend
from attn_core.thresholds import Limit, Never
from attn_core.tune import check, fit
from attn_core.tune.sweep import ROUNDS, WrongResult, sweep, times
from attn_core.tune.timing import HostTimer
from attn_core.tune.workload import Cache, Shape, Workload

from .tune_kit import Clock, Timed, bucket, cells

NAMES = ("a/p", "b/p")
CPU = torch.device("cpu")


def layer(op=Op.PREFILL_PAGED, *, kv=None, mask=MaskMode.CAUSAL, window=-1, dtype="float32", kv_dtype=None):
    return make_problem(
        op, (4, 2), (8, 8), dtype, kv_dtype or dtype, None, kv or PagedKV(4), mask, "NONE", window, None,
        None, None, None, False, True, None, False,
    )  # fmt: skip


def backends(cost_a, cost_b, **fault):
    """Two backends on one clock; returns the clock and the two."""
    clock = Clock()
    found = Timed("a", clock, cost_a), Timed("b", clock, cost_b, rank=20, **fault)
    plugins.use(plugins.Registry((*found, ReferenceBackend()), (), (), {}))
    return clock, found


def run(clock, shapes, *, problem=None, refine=True):
    seen = []
    found = sweep(
        problem or layer(),
        NAMES,
        shapes,
        CPU,
        HostTimer(clock),
        lambda *told: seen.append(told),
        refine=refine,
    )
    return found, seen


@pytest.mark.parametrize("at", [2, 3, 7, 16, 20, 63])
def test_the_crossover_is_found_exactly(at):
    """a costs 10 ms, b more below ``at`` rows and less from there on, by a wide margin."""
    clock, _ = backends(lambda q, kv: 10e-3, lambda q, kv: 12e-3 if q < at else 8e-3)
    found, _ = run(clock, [Shape(1, 64, q) for q in (1, 4, 16, 64)])
    (one,) = found.buckets
    assert one.steps == ((1, "a/p"), (at, "b/p"))


def test_a_smooth_crossover_is_read_off_between_two_cells():
    """Times cross at q = 24; the grid has 16 and 32 only."""
    clock, _ = backends(lambda q, kv: 24e-3, lambda q, kv: q * 1e-3)
    found, seen = run(clock, [Shape(1, 64, q) for q in (16, 32)], refine=False)
    assert found.buckets[0].steps == ((16, "b/p"), (24, "a/p"))
    assert [shape.q_len for shape, _ in seen] == [16, 32]


def test_both_are_run_in_turns_and_the_median_counts():
    clock, (a, b) = backends(lambda q, kv: 5e-3, lambda q, kv: 7e-3)
    order = []
    a.fault = lambda io: order.append("a")
    b.fault = lambda io: order.append("b")
    problem = layer()
    taken, failures = times(Workload(problem, Cache(problem, 2, 16, CPU), 4), NAMES, HostTimer(clock))
    assert (failures, ROUNDS) == ([], 3)
    assert order == ["a", "b", *"ab", *"ba", *"ab"]  # a first run each, then the rounds
    assert taken == {"a/p": pytest.approx(5e-3), "b/p": pytest.approx(7e-3)}
    slow_once = iter([1.0, 5e-3, 9.0, 5e-3])
    a.cost = lambda q, kv: next(slow_once)
    taken, _ = times(Workload(problem, Cache(problem, 2, 16, CPU), 4), NAMES, HostTimer(clock))
    assert taken["a/p"] == pytest.approx(5e-3)


def test_a_quick_call_is_repeated_until_it_can_be_timed():
    clock = Clock()
    calls = []

    def call():
        calls.append(1)
        clock.now += 100e-6

    assert HostTimer(clock).sample(call) == pytest.approx(100e-6)
    assert len(calls) == 1 + 20


@pytest.mark.parametrize("seed", range(8))
def test_noise_does_not_make_steps(seed):
    """A true ratio of 1.4 below q 32 and 0.7 above, under 10 % noise, is one step; equal times are none."""
    noise = random.Random(seed)
    some = [
        Cell(q, (1e-3, 1e-3 * (0.7 if q >= 32 else 1.4) * noise.uniform(0.9, 1.1)))
        for q in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    ]
    (_, first), (at, second) = fit.steps(NAMES, some)
    assert (first, second) == NAMES
    assert 16 < at <= 32
    flat = [Cell(q, (1e-3, 1e-3 * noise.uniform(0.99, 1.01))) for q in (1, 2, 4, 8, 16, 32)]
    assert len(fit.steps(NAMES, flat)) == 1


def test_three_stretches_are_three_steps():
    some = cells((1, 2.0), (4, 2.0), (8, 0.5), (16, 0.5), (64, 2.0))
    assert [name for _, name in fit.steps(NAMES, some)] == ["a/p", "b/p", "a/p"]


def test_the_fit_is_as_good_as_any_step_function():
    """Against every assignment of candidates to six cells, for random ratios."""
    noise = random.Random(3)
    for _ in range(50):
        some = cells(*((2**n, math.exp(noise.gauss(0, 0.1))) for n in range(6)))

        def cost(taken, some=some):
            lost = sum(math.log(c.seconds[t] / min(c.seconds)) for c, t in zip(some, taken, strict=True))
            return lost + fit.SWITCH_COST * sum(x != y for x, y in pairwise(taken))

        best = min(cost([n >> k & 1 for k in range(6)]) for n in range(64))
        found = Bucket(1, 1, fit.steps(NAMES, some), tuple(some))
        mine = [NAMES.index(found.fastest(c.q_len)) for c in some]
        assert cost(mine) == pytest.approx(best)


def test_one_cell_is_a_verdict_and_a_tie_goes_to_the_first():
    assert fit.steps(NAMES, cells((4, 0.5))) == ((4, "b/p"),)
    assert fit.steps(NAMES, cells((4, 1.0))) == ((4, "a/p"),)


def test_refining_halves_by_ratio_stops_at_neighbours_and_leaves_ties():
    assert fit.next_q_len(cells((1, 2.0), (64, 0.5))) == 8
    assert fit.next_q_len(cells((8, 2.0), (9, 0.5))) is None
    assert fit.next_q_len(cells((1, 2.0), (64, 0.99))) is None
    assert fit.next_q_len(cells((1, 2.0), (64, 0.5)), {8}) is None
    assert fit.next_q_len(cells((1, 2.0), (64, 3.0))) is None


def test_a_threshold_is_the_largest_size_that_is_lost_in_the_worst_case():
    some = [
        Bucket(1, 64, ((1, "a/p"),), tuple(cells((1, 0.5), (8, 0.9), (16, 1.2)))),
        Bucket(1, 256, ((1, "a/p"),), tuple(cells((1, 0.5), (8, 1.5), (16, 1.01)))),
    ]
    assert fit.threshold(some, "q_len", 0) == Limit(8)  # a loses by 1 / 0.9 at 8, by nothing at 16
    assert fit.threshold(some, "q_len", 1) == Limit(16)
    assert fit.threshold(some, "kv_len", 1) == Limit(256)
    assert fit.threshold(some[:1], "kv_len", 0) == Limit(64)
    assert fit.threshold([bucket((1, "a/p"))], "q_len", 0) == Never()
    assert fit.threshold([], "q_len", 0) is None


PROBLEMS = {
    "paged": layer(),
    "paged HND": layer(kv=PagedKV(4, "HND")),
    "no mask": layer(mask=MaskMode.NONE),
    "window": layer(window=3),
    "window, no mask": layer(mask=MaskMode.NONE, window=3),
    "ragged": layer(Op.PREFILL_RAGGED, kv=RaggedKV()),
    "ragged HND": layer(Op.PREFILL_RAGGED, kv=RaggedKV("HND")),
    "verify": layer(Op.VERIFY),
    "half": layer(dtype="float16"),
    "fp8 cache": layer(dtype="float16", kv_dtype="float8_e4m3fn"),
}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
@pytest.mark.parametrize(("q_len", "kv_len"), [(2, 16), (19, 30)])
def test_a_right_result_passes_and_a_wrong_one_in_any_row_it_looks_at_does_not(problem, q_len, kv_len):
    _, (_, b) = backends(lambda q, kv: 1e-3, lambda q, kv: 1e-3)
    work = Workload(problem, Cache(problem, 3, kv_len, CPU), q_len)
    assert work.wrong(work.planned("b")) is None
    for row in (0, q_len - 1, 2 * q_len, 3 * q_len - 1):

        def spoil(io, row=row):
            io.out[row, 1, 0] += 1.0

        if problem.window_left >= 0 and problem.mask is MaskMode.NONE and row % q_len == 0 and q_len > 8:
            continue  # rows whose window the reference cannot be given by themselves
        b.fault = spoil
        told = work.wrong(work.planned("b"))
        assert told is not None, row
        assert f"of request {row // q_len} differ from the reference by" in told
    b.fault = lambda io: io.out.fill_(torch.nan)
    assert "inf times" in work.wrong(work.planned("b"))


def test_decode_is_checked_too():
    problem = layer(Op.DECODE, mask=MaskMode.NONE)
    _, (_, b) = backends(lambda q, kv: 1e-3, lambda q, kv: 1e-3)
    work = Workload(problem, Cache(problem, 2, 21, CPU), 1)
    assert work.wrong(work.planned("b")) is None
    b.fault = lambda io: io.out[1].mul_(1.01)
    assert "request 1" in work.wrong(work.planned("b"))


def test_a_wrong_result_ends_the_sweep():
    clock, (_, b) = backends(lambda q, kv: 1e-3, lambda q, kv: 1e-3)
    b.fault = lambda io: io.out.zero_()
    with pytest.raises(
        WrongResult, match=r"^b/p: needs the reference's result at batch 1, q_len 4, kv_len 16"
    ):
        run(clock, [Shape(1, 16, 4)])


def test_a_cell_that_one_cannot_serve_is_left_out_and_told_of():
    clock, (a, _) = backends(lambda q, kv: 1e-3, lambda q, kv: 2e-3)

    def fault(io):
        if io.q.shape[0] > 8:
            raise RuntimeError("out of\n memory")

    a.fault = fault
    found, seen = run(clock, [Shape(1, 16, 4), Shape(1, 16, 16)])
    assert [cell.q_len for cell in found.buckets[0].cells] == [4]
    (failure,) = found.failures
    assert (str(failure.shape), failure.candidate, failure.text) == (
        "batch 1, q_len 16, kv_len 16", "a/p", "RuntimeError: out of memory",
    )  # fmt: skip
    assert [set(taken) for _, taken in seen] == [set(NAMES), {"b/p"}]


def test_a_bucket_without_a_cell_is_none():
    clock, (a, _) = backends(lambda q, kv: 1e-3, lambda q, kv: 2e-3)
    a.fault = lambda io: 1 / 0
    found, _ = run(clock, [Shape(1, 16, 4)])
    assert (found.buckets, len(found.failures)) == ([], 1)


@pytest.mark.parametrize("problem", [layer(Op.APPEND), layer(mask=MaskMode.CUSTOM)])
def test_what_cannot_be_tuned_is_refused(problem):
    with pytest.raises(
        ValueError, match=r"tune: needs an op of .* without a custom mask, got .* \[core.tune-op\]"
    ):
        Workload(problem, Cache(problem, 1, 16, CPU), 1)


def judged(*regrets):
    return [
        check.Judged(layer(), Shape(1, 16, n + 1), "a/p", {"a/p": regret, "b/p": 1.0})
        for n, regret in enumerate(regrets)
    ]


def test_regret_is_the_time_over_the_fastest():
    some = judged(1.2, 1.0, 0.5)
    assert [one.regret for one in some] == [1.2, 1.0, 1.0]
    assert [one.fastest for one in some] == ["b/p", "a/p", "a/p"]
    assert check.mean_regret(some) == pytest.approx(1.2 ** (1 / 3))
    assert check.worst(some) is some[0]
    assert check.good(judged(1.0, 1.05))
    assert not check.good(judged(1.04, 1.04))
    assert not check.good(judged(*[1.0] * 30, 1.3))


def test_auto_is_measured_among_the_candidates():
    clock, _ = backends(lambda q, kv: 2e-3, lambda q, kv: 1e-3)
    some, failures = check.judge(
        layer(), ["b/p"], [Shape(1, 16, 4), Shape(2, 32, 4)], CPU, HostTimer(clock), lambda *told: None
    )
    assert [(one.chosen, one.fastest, round(one.regret, 6)) for one in some] == [("a/p", "b/p", 2.0)] * 2
    assert failures == []


def test_a_crossing_is_the_first_length_at_which_the_other_is_ahead():
    """Between 4 and 10 the ratio of times is 1 at 6.3: at 6 the first candidate is still faster."""
    assert fit.crossing(Cell(4, (1.0, 2.0)), Cell(10, (2.0, 1.0))) == 7
    assert fit.crossing(Cell(4, (1.0, 2.0)), Cell(16, (2.0, 1.0))) == 8


def far_apart(q, kv):
    """b wins at few keys only, where that is depends on the rows, and a wins by more and more."""
    return 10e-3 * (kv / (150 * q)) ** 0.8


def test_lengths_are_added_where_the_neighbours_have_different_winners():
    clock, _ = backends(lambda q, kv: 10e-3, far_apart)
    grid = [Shape(1, kv, q) for kv in (64, 1024) for q in (1, 2, 4)]
    found, seen = run(clock, grid)
    assert [one.kv_len for one in found.buckets] == [64, 128, 256, 512, 1024]
    assert len({(shape.kv_len, shape.q_len) for shape, _ in seen}) == len(seen)
    coarse, _ = run(clock, grid, refine=False)
    assert [one.kv_len for one in coarse.buckets] == [64, 1024]
    clock, _ = backends(lambda q, kv: 10e-3, lambda q, kv: 12e-3)
    found, _ = run(clock, grid)
    assert [one.kv_len for one in found.buckets] == [64, 1024]


def test_added_lengths_are_few_and_end_where_nothing_can_be_measured():
    """A winner that changes with every length is not chased."""
    clock, (a, _) = backends(lambda q, kv: 10e-3, lambda q, kv: 10e-3 * (2 if hash((q, kv)) % 2 else 0.5))
    found, _ = run(clock, [Shape(b, kv, q) for b in (1, 2) for kv in (16, 256, 2048) for q in (1, 2, 4, 8)])
    assert len(found.buckets) <= 2 * (3 + 3)
    clock, (a, _) = backends(lambda q, kv: 10e-3, far_apart)
    a.fault = lambda io: 1 / 0 if a.planned[-1][2] not in (64, 1024) else None
    found, _ = run(clock, [Shape(1, kv, q) for kv in (64, 1024) for q in (1, 2, 4)])
    assert [one.kv_len for one in found.buckets] == [64, 1024]
    assert {failure.shape.kv_len for failure in found.failures} == {256}


def test_rows_beyond_an_added_length_are_left_out():
    clock, _ = backends(lambda q, kv: 10e-3, far_apart)
    found, seen = run(clock, [Shape(1, 16, 1), Shape(1, 16, 4), Shape(1, 1024, 1), Shape(1, 1024, 256)])
    assert all(shape.q_len <= shape.kv_len for shape, _ in seen)
    assert len(found.buckets) > 2
