"""The native planner against a slow model of what a plan must be."""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .model import Asked, Item, capacity, check, cost, plan

LENGTHS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 150)), max_size=6)


PACES = [(0,) * 7, (0, 0, 0, 0, 3, 8, 8), (5, 2, 20, 1, 2, 4, 3), (40, 0, 1000, 0, 8, 0, 8)]


@st.composite
def asked(draw: st.DrawFn) -> Asked:
    lengths = draw(LENGTHS)
    return Asked(
        q_len=tuple(q for q, _ in lengths),
        kv_len=tuple(kv for _, kv in lengths),
        group=draw(st.integers(1, 5)),
        num_kv_heads=draw(st.integers(1, 5)),
        tile_q=draw(st.sampled_from([4, 8, 16])),
        workers=draw(st.integers(1, 8)),
        max_heads=draw(st.integers(1, 6)),
        window_left=draw(st.sampled_from([-1, -1, 0, 3, 40])),
        causal=draw(st.booleans()),
        split=draw(st.sampled_from([0, 0, 0, -1, 1, 7, 16, 1000])),
        max_slots=draw(st.sampled_from([-1, -1, 0, 1, 7, 40])),
        fine=draw(st.sampled_from([0, 0, 1, 4])),
        pace=draw(st.sampled_from(PACES)),
        joined=draw(st.sampled_from([0, 2, 3, 2**31 - 1])),
    )


QUICK = settings(
    max_examples=150, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip


@QUICK
@given(asked())
def test_every_row_sees_every_key_once(native: Any, a: Asked) -> None:
    made = plan(native, a)
    check(a, made)
    assert plan(native, a) == made
    if a.split == 0 and a.max_slots >= 0:
        assert made.slots <= a.max_slots
    if a.split > 0:
        assert made.chunk == a.split
    if a.split == 0 and made.chunk > 0:
        assert made.chunk >= a.min_chunk
        # One that grows for want of slots grows by whole steps.
        assert made.chunk % (a.fine or a.kv_tile) == 0


@QUICK
@given(asked())
def test_expensive_items_come_first(native: Any, a: Asked) -> None:
    made = plan(native, a)

    # Sorted by bucket: nothing may come behind an item that is cheaper by more than a bucket's width.
    def spent(item: Item) -> int:
        begin = max(item.kv_begin, min(_begins(a, item), default=0))
        rows = 1 if a.pace[4] else len(a.rows(item.request, item.q_tile)) + 4  # a measured GPU's: any number
        return (item.kv_end - begin + a.kv_tile) * rows * item.num_heads

    costs = [spent(item) for item in made.items]
    width = max(costs, default=0) / 256 + 1
    floor = math.inf
    for c in costs:
        assert c <= floor + width
        floor = min(floor, c)


def test_a_low_last_tile_of_a_measured_device_does_not_start_last(native: Any) -> None:
    """Its blocks take as long as the others, and what starts last ends last."""
    a = Asked(
        q_len=(200,), kv_len=(16384,), group=4, num_kv_heads=8, tile_q=128, kv_tile=64, min_chunk=64,
        workers=264, causal=True, fine=64, pace=(150, 200, 290, 0, 172, 132, 264), split=3648,
    )  # fmt: skip
    items = plan(native, a).items
    assert len(items) == 7 * 5 * 8
    whole = [i for i, item in enumerate(items) if item.kv_end - item.kv_begin == 3648]
    assert {items[i].q_tile for i in whole} == set(range(7))
    assert max(whole) < 264


def _begins(a: Asked, item: Item) -> list[int]:
    rows = a.rows(item.request, item.q_tile)
    return [min(keys) for row in rows if (keys := a.visible(item.request, row))]


@QUICK
@given(asked(), st.sampled_from([-1, 1, 7, 16]))
def test_a_request_is_cut_alone_as_in_its_batch(native: Any, a: Asked, split: int) -> None:
    """With a fixed length, or none, the cuts of a request do not know its neighbours."""
    a = replace(a, split=split)
    whole = plan(native, a)
    for request in range(len(a.q_len)):
        single = plan(native, a.alone(request))
        assert _cuts(whole.items, request) == _cuts(single.items, 0)


def _cuts(items: list[Item], request: int) -> set[tuple[int, int, int, int]]:
    return {
        (item.q_tile, head, item.kv_begin, item.kv_end)
        for item in items
        if item.request == request
        for head in range(item.kv_head, item.kv_head + item.num_heads)
    }


@QUICK
@given(asked(), st.booleans(), st.integers(0, 60))
def test_no_plan_exceeds_its_capacity(native: Any, a: Asked, uniform: bool, spare: int) -> None:
    batch, total_kv, longest = len(a.q_len), sum(a.kv_len) + spare, max(a.kv_len, default=0) + spare
    q_len = -1
    if uniform:
        q_len = max(a.q_len, default=0)
        a = replace(a, q_len=(q_len,) * batch)
    limits = (batch, sum(a.q_len) + (0 if uniform else spare), q_len, min(longest, total_kv), total_kv)
    most = capacity(native, a, *limits)
    made = plan(native, a)
    assert len(made.items) <= most[0]
    assert len(made.merges) <= most[1]
    assert made.slots <= most[2]
    if a.split == 0 and a.max_slots >= 0:
        assert most[2] <= a.max_slots


def test_a_short_workspace_makes_longer_chunks(native: Any) -> None:
    a = Asked((1,) * 4, (1000,) * 4, num_kv_heads=2, workers=16)
    free = plan(native, a)
    assert free.slots > 40
    for slots in (40, 20):
        tight = plan(native, replace(a, max_slots=slots))
        assert 0 < tight.slots <= slots
        assert tight.chunk > free.chunk
    none = plan(native, replace(a, max_slots=15))  # two chunks each are 16
    assert none.slots == 0
    assert none.chunk > 1000


def test_few_requests_are_spread_over_heads(native: Any) -> None:
    """The heads of one short request go to different threads; many requests keep theirs together."""
    a = Asked((1,), (40,), group=4, num_kv_heads=8, max_heads=8, workers=4, min_chunk=512)
    assert plan(native, a).max_heads == 1
    assert plan(native, replace(a, q_len=(1,) * 16, kv_len=(40,) * 16)).max_heads == 8


@pytest.mark.parametrize(
    "bad", [{"group": 0}, {"tile_q": 0}, {"workers": 0}, {"split": -2}, {"window_left": -2}, {"max_heads": 0}]
)
def test_senseless_sizes_are_refused(native: Any, bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"\[fa2\.native\]"):
        plan(native, replace(Asked((1,), (1,)), **bad))


def test_more_items_than_can_be_numbered_are_refused(native: Any) -> None:
    with pytest.raises(ValueError, match="more work items"):
        plan(native, Asked((1,) * 64, (2_000_000,) * 64, num_kv_heads=1, split=1))


# The tile of a GPU: 16 up to 16 packed rows, 128 from 256 on, else 64. Unlike requests count by
# their mean, captured ones by the longest that fits.
@pytest.mark.parametrize(
    ("batch", "q_len", "group", "captured", "tile"),
    [
        (4, 4, 4, False, 16), (4, 4, 4, True, 16), (4, 5, 4, False, 64), (4, 5, 4, True, 64),
        (4, 1, 16, True, 16), (4, 1, 17, True, 64), (64, 2, 8, True, 16), (4, 0, 4, False, 16),
        (4, 63, 4, False, 64), (4, 63, 4, True, 64), (4, 64, 4, False, 128), (4, 64, 4, True, 128),
    ],
)  # fmt: skip
def test_tile_of_equal_requests_is_the_same_under_capture(
    native: Any, batch: int, q_len: int, group: int, captured: bool, tile: int
) -> None:
    assert native.cta_tile_q(batch * q_len, batch, q_len, group, captured) == tile


@pytest.mark.parametrize(
    ("total_q", "batch", "group", "captured", "tile"),
    [
        (16, 4, 4, False, 16),
        (16, 4, 4, True, 64),  # one request may have 13 rows: 52 packed
        (4, 4, 4, True, 16),  # a row each: nobody can have more
        (8, 4, 4, True, 64), (6, 3, 4, True, 16), (5, 2, 4, True, 16), (6, 2, 4, True, 64),
        (255, 4, 4, False, 64), (256, 4, 4, False, 128), (66, 3, 4, True, 128), (65, 3, 4, True, 64),
        (19, 4, 4, False, 64), (18, 4, 4, False, 64), (17, 4, 4, False, 64), (0, 0, 4, False, 16),
    ],
)  # fmt: skip
def test_tile_of_unlike_requests(
    native: Any, total_q: int, batch: int, group: int, captured: bool, tile: int
) -> None:
    assert native.cta_tile_q(total_q, batch, -1, group, captured) == tile


def balance(items: list[Item], units: int, least: int) -> float:
    """Ideal over actual time of running items in order on whichever unit is free first."""
    times = [cost(item) for item in items]
    free = [0] * units
    for time in times:
        heapq.heapreplace(free, free[0] + time)
    # Nobody can do better than an even share, or than the shortest piece that may be cut off.
    return max(sum(times) / units, min(least, max(times))) / max(free)


def ragged(draw: random.Random, batch: int, low: int, high: int) -> tuple[int, ...]:
    return tuple(int(math.exp(draw.uniform(math.log(low), math.log(high)))) for _ in range(batch))


@pytest.mark.parametrize("units", [304, 256])
def test_ragged_batches_keep_every_compute_unit_busy(native: Any, units: int) -> None:
    draw = random.Random(units)
    for _ in range(120):
        kv_len = ragged(draw, 64, 128, 32768)
        heads = draw.choice([1, 4, 8])
        a = Asked((1,) * 64, kv_len, 4, heads, 16, 64, 128, units, causal=True, fine=16)
        assert balance(plan(native, a).items, units, 128) >= 0.85, kv_len


@pytest.mark.parametrize("units", [304, 256])
@pytest.mark.parametrize("kind", [(1, 256, 1, 32768), (1, 16, 16, 4096)])
def test_batches_of_any_size_are_balanced(native: Any, units: int, kind: tuple[int, int, int, int]) -> None:
    """Also where a unit's share is not much longer than the shortest chunk."""
    draw, (fewest, most, low, high) = random.Random(units), kind
    for _ in range(120):
        count = draw.randint(fewest, most)
        kv_len, heads = ragged(draw, count, low, high), draw.choice([1, 4, 8])
        a = Asked((1,) * count, kv_len, 4, heads, 16, 64, 128, units, causal=True, fine=16)
        assert balance(plan(native, a).items, units, 128) >= 0.85, kv_len


def test_small_batches_wait_for_one_chunk_at_most(native: Any) -> None:
    """What list scheduling guarantees: the even share, and the longest item on top."""
    draw = random.Random(1)
    for _ in range(120):
        a = Asked((1,) * 6, ragged(draw, 6, 16, 8192), 4, 8, 16, 64, 128, 304, causal=True)
        items = plan(native, a).items
        times = [cost(item) for item in items]
        free = [0] * 304
        for time in times:
            heapq.heapreplace(free, free[0] + time)
        assert max(free) <= sum(times) / 304 + max(times)


# Of an H200: 132 multiprocessors with two blocks each; 107 blocks keep its memory busy.
H200 = Asked(
    (1,) * 16, (512,) * 16, group=4, num_kv_heads=8, tile_q=16, kv_tile=64, min_chunk=64, workers=264,
    causal=True, fine=64, pace=(118, 60, 90, 2, 107, 132, 220),
)  # fmt: skip


@pytest.mark.parametrize(("batch", "kv_len"), [(16, 512), (64, 512), (16, 2048), (16, 8192)])
def test_what_keeps_a_measured_device_busy_is_not_split(native: Any, batch: int, kv_len: int) -> None:
    """A second launch and second starts cost more than an even number of blocks brings."""
    a = replace(H200, q_len=(1,) * batch, kv_len=(kv_len,) * batch)
    assert plan(native, a).slots == 0
    assert plan(native, replace(a, pace=(0,) * 7)).slots > 0


@pytest.mark.parametrize(("batch", "kv_len"), [(1, 4096), (4, 2048), (1, 131072)])
def test_few_keys_are_split_as_far_as_it_pays(native: Any, batch: int, kv_len: int) -> None:
    a = replace(H200, q_len=(1,) * batch, kv_len=(kv_len,) * batch)
    assert 60 <= len(plan(native, a).items) <= 264


def test_one_long_request_among_many_is_split(native: Any) -> None:
    a = replace(H200, q_len=(1,) * 33, kv_len=(60000,) + (500,) * 32)
    made = plan(native, a)
    assert {item.request for item in made.items if item.slot >= 0} == {0}
    assert balance(made.items, 264, 64) > 0.5


def test_blocks_of_a_large_grid_are_not_spread(native: Any) -> None:
    """128 captured items may share 64 multiprocessors: there they are split."""
    a = replace(H200, kv_len=(8192,) * 16)
    assert len(plan(native, a).items) == 128
    assert len(plan(native, replace(a, pace=(118, 60, 90, 2, 107, 0, 220))).items) == 256
