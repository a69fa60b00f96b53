"""Between the sizes that were measured: who is taken, why, and at which cost."""

import math
import random
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest

from attn_core import measured
from attn_core.measured import Bucket, Measured
from attn_core.route import choose, screen
from attn_core.tune import fit

from .fakes import SLOW, FakeBackend, rule
from .test_measured import HERE, LAYER, asked, route
from .tune_kit import cells, pair

NAMES = ("a/p", "b/p")


def found(kv_len, *ratios, batch_size=2):
    """A bucket as ``attn tune`` makes it: the second candidate takes so many times the first one's time."""
    some = cells(*ratios)
    return Bucket(batch_size, kv_len, fit.steps(NAMES, some), tuple(some))


def taken(known, q_len, kv_len, batch_size=2):
    size = SimpleNamespace(batch_size=batch_size, max_q_len=q_len, max_kv_len=kv_len)
    return known.judge(SimpleNamespace(batch=size, graph=None))


def test_the_larger_lead_reaches_further_along_the_keys():
    """b leads 8 times at 64 keys, a 2 times at 1024: three quarters of the way, by ratio, are b's."""
    known = pair(LAYER, HERE, found(64, (16, 1 / 8)), found(1024, (16, 2.0)))
    kv = {64: "b/p", 128: "b/p", 256: "b/p", 500: "b/p", 530: "a/p", 1024: "a/p"}
    assert {length: route(asked(16, length), known).candidate for length in kv} == kv


def test_the_larger_lead_reaches_further_along_the_batch_and_the_rows():
    known = pair(LAYER, HERE, found(64, (16, 1 / 8)), found(64, (16, 2.0), batch_size=32))
    assert [taken(known, 16, 64, size).faster for size in (2, 15, 17, 32)] == ["b/p", "b/p", "a/p", "a/p"]
    rows = pair(LAYER, HERE, found(64, (4, 1 / 8), (64, 1.5)), found(256, (4, 1.5), (64, 1.5)))
    # At 128 keys: log 8 and log 1.5 weigh alike at 4 rows, and b's share falls with the rows.
    assert [taken(rows, q, 128).faster for q in (4, 25, 26, 64)] == ["b/p", "b/p", "a/p", "a/p"]


def test_it_says_between_which_sizes_and_by_how_much():
    known = pair(LAYER, HERE, found(64, (16, 1 / 8)), found(1024, (16, 2.0)))
    decision = route(asked(16, 256), known)
    assert decision.refused[0].got == "batch 2, q_len 16, kv_len between 64 and 1024, 2.00x by interpolation"
    assert taken(known, 16, 64).where == "batch 2, q_len 16, kv_len 64"
    both = pair(LAYER, HERE, found(64, (16, 0.5)), found(64, (16, 1.5), batch_size=8))
    assert taken(both, 16, 64, 3).where.startswith("batch between 2 and 8, q_len 16, kv_len 64, 1.")


def test_a_verdict_between_two_that_agree_is_theirs():
    known = pair(LAYER, HERE, found(64, (1, 2.0), (16, 0.5)), found(1024, (1, 3.0), (16, 0.9)))
    finding = taken(known, 16, 300)
    assert (finding.faster, finding.where) == ("b/p", "batch 2, q_len 16, kv_len 1024")


def test_figures_that_are_not_those_of_the_verdict_weigh_nothing():
    """A step that smooths a cell away, or one written by hand, speaks by its verdict alone."""
    smoothed = Bucket(2, 64, ((1, "a/p"),), tuple(cells((1, 0.01), (64, 0.01))))
    known = pair(LAYER, HERE, smoothed, found(1024, (1, 0.9), (64, 0.9)))
    assert [taken(known, 8, kv).faster for kv in (64, 80, 900, 1024)] == ["a/p", "b/p", "b/p", "b/p"]
    both = pair(LAYER, HERE, smoothed, replace(smoothed, kv_len=1024, steps=((1, "b/p"),), cells=tuple(
        cells((1, 100.0), (64, 100.0)))))  # fmt: skip
    assert [taken(both, 8, kv).faster for kv in (255, 256, 257)] == ["a/p", "a/p", "b/p"]


def test_one_that_was_not_measured_at_such_rows_leaves_it_to_the_other():
    known = pair(LAYER, HERE, found(64, (1, 0.5), (4, 0.5)), found(1024, (1, 2.0), (512, 2.0)))
    assert [taken(known, q, 200).faster for q in (2, 17, 512)] == ["b/p", "a/p", "a/p"]
    assert taken(known, 512, 64) is None


@pytest.mark.parametrize("seed", range(20))
def test_on_any_surface_a_bucket_keeps_its_steps_and_two_change_places_once(seed):
    made = random.Random(seed)
    lengths, rows = (64, 512, 2048), (1, 4, 16, 64)
    known = pair(
        LAYER, HERE, *(found(kv, *((q, math.exp(made.gauss(0, 1.5))) for q in rows)) for kv in lengths)
    )  # fmt: skip
    for bucket in known.buckets:
        for q in range(1, 65):
            assert taken(known, q, bucket.kv_len).faster == bucket.fastest(q)
    for low, high in ((64, 512), (512, 2048)):
        for q in rows:
            names = [taken(known, q, kv).faster for kv in range(low, high + 1)]
            assert sum(x != y for x, y in pairwise(names)) <= 1


def test_what_is_remembered_is_what_would_be_found(monkeypatch):
    made = random.Random(5)
    monkeypatch.setattr(measured, "_MOST_KEPT", 7)
    backends = [FakeBackend("a", rank=1), FakeBackend("b", rank=2)]
    known = pair(LAYER, HERE, found(64, (1, 2.0), (64, 0.5)), found(1024, (1, 0.6), (64, 3.0)))
    warm = screen(HERE, LAYER, backends, measured=Measured([known]))
    for _ in range(200):
        query = asked(made.choice((1, 5, 9, 30, 64)), made.choice((64, 100, 300, 700, 1024)))
        cold = screen(HERE, LAYER, backends, measured=Measured([replace(known)]))
        assert choose(warm, query) == choose(cold, query)
        assert max(len(warm.settled_at), len(known._told)) <= 7
    assert warm.settled_at


def test_a_decision_that_a_rule_took_part_in_is_made_anew():
    refuses = []
    moody = rule(SLOW, lambda query: (1, 2) if refuses else None)
    backends = [FakeBackend("a", rank=1, rules=[moody]), FakeBackend("b", rank=2)]
    known = Measured([pair(LAYER, HERE, found(4096, (16, 2.0)))])  # out of reach: the order decides
    screened = screen(HERE, LAYER, backends, measured=known)
    assert choose(screened, asked(16)).candidate == "a/p"
    refuses.append(1)
    assert choose(screened, asked(16)).candidate == "b/p"


def test_refining_goes_where_a_wrong_verdict_would_cost_most():
    some = [found(64, (1, 0.5), (16, 0.9)), found(512, (1, 2.0), (16, 0.9)), found(4096, (1, 0.2), (16, 0.9))]
    assert fit.next_kv_len(some) == 181  # both gaps are worth a factor of 2: the first
    assert fit.next_kv_len(some, {181}) == 1448
    assert fit.next_kv_len(some, {181, 1448}) is None
    assert fit.next_kv_len([found(64, (1, 0.5)), found(128, (1, 2.0))]) is None  # near enough
    assert fit.next_kv_len([found(64, (1, 0.5)), found(512, (1, 1.02))]) is None  # a tie
    assert fit.next_kv_len([found(64, (1, 0.5)), found(512, (2, 2.0))]) is None  # not the same rows
    assert fit.next_kv_len([]) is None
