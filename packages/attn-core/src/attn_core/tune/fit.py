"""From measured cells to the verdicts that routing reads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from ..measured import Bucket, Cell
from ..thresholds import Limit, Never

SWITCH_COST = math.log(1.03)
"""What one more step must save in all: a difference of 3 % is within what a repetition shows."""

FINE = 2
"""Ratio of two sequence lengths near enough to interpolate between, whatever was found at them."""


def steps(candidates: tuple[str, str], cells: Sequence[Cell]) -> tuple[tuple[int, str], ...]:
    """Return the step function that loses least time against the faster candidate of every cell.

    The loss is the sum of ``log(time / best time)`` over the cells plus :data:`SWITCH_COST` per step; of two
    equal ones the first candidate, which ``auto`` tries first, is taken.

    Args:
        candidates: Names, in the order of the cells' times.
        cells: At least one, ascending by ``q_len``.
    """
    costs: tuple[float, float] = (0.0, 0.0)
    came: list[tuple[int, int]] = []
    for cell in cells:
        best = min(cell.seconds)
        first, second = (at if costs[at] <= costs[1 - at] + SWITCH_COST else 1 - at for at in (0, 1))
        came.append((first, second))
        costs = (
            costs[first] + SWITCH_COST * (first != 0) + math.log(cell.seconds[0] / best),
            costs[second] + SWITCH_COST * (second != 1) + math.log(cell.seconds[1] / best),
        )
    at = 0 if costs[0] <= costs[1] else 1
    taken = [at]
    for origin in reversed(came[1:]):
        at = origin[at]
        taken.append(at)
    taken.reverse()
    found = [(cells[0].q_len, candidates[taken[0]])]
    for n in range(1, len(cells)):
        if taken[n] != taken[n - 1]:
            found.append((crossing(cells[n - 1], cells[n]), candidates[taken[n]]))
    return tuple(found)


def crossing(before: Cell, after: Cell) -> int:
    """Return the least ``q_len`` at which the candidate that is faster in ``after`` overtakes the other.

    The ratio of the two times is taken as a power of ``q_len`` between the two cells.
    """
    low, high = before.lead, after.lead
    if low * high >= 0:  # a step the fit made in spite of one cell
        return after.q_len
    share = low / (low - high)
    x = math.exp(math.log(before.q_len) + share * math.log(after.q_len / before.q_len))
    return max(before.q_len + 1, min(after.q_len, math.ceil(x - 1e-9)))


def next_q_len(cells: Sequence[Cell], skip: Iterable[int] = ()) -> int | None:
    """Return the ``q_len`` to measure next in order to site a crossover, or None when all are sited.

    Halves, by ratio, the gap between two neighbours with different winners, unless one is a tie.
    """
    done = set(skip)
    for before, after in pairwise(cells):
        low, high = before.lead, after.lead
        if low * high >= 0 or min(abs(low), abs(high)) < SWITCH_COST:
            continue
        middle = round(math.sqrt(before.q_len * after.q_len))
        if before.q_len < middle < after.q_len and middle not in done:
            return middle
    return None


def next_kv_len(buckets: Sequence[Bucket], skip: Iterable[int] = ()) -> int | None:
    """Return the ``kv_len`` to measure next in order to site a crossover along it, or None when that is done.

    Halves, by ratio, the gap between the two neighbours of which a wrong verdict would cost most: at some
    ``q_len`` measured in both, one candidate is the faster one here, the other there, and the smaller of the
    two leads is the largest of all. Ties do not count, nor gaps of a ratio up to :data:`FINE`.

    Args:
        buckets: Of one batch size, ascending by ``kv_len``.
        skip: Lengths that were tried already.
    """
    done = set(skip)
    worst, found = SWITCH_COST, None
    for before, after in pairwise(buckets):
        middle = round(math.sqrt(before.kv_len * after.kv_len))
        if after.kv_len <= FINE * before.kv_len or middle in done:
            continue
        there = {cell.q_len: cell.lead for cell in after.cells}
        for cell in before.cells:
            here, other = cell.lead, there.get(cell.q_len, 0.0)
            if here * other < 0 and min(abs(here), abs(other)) > worst:
                worst, found = min(abs(here), abs(other)), middle
    return found


def threshold(buckets: Iterable[Bucket], gate: str, gated: int) -> Limit | Never | None:
    """Return the verdict of a gate: the largest size at which the gated candidate loses in the worst case.

    Args:
        buckets: Everything measured.
        gate: ``q_len`` or ``kv_len``, the size the gate looks at.
        gated: Position of the gated candidate in the pair.

    Returns:
        None when nothing was measured.
    """
    worst: dict[int, float] = {}
    for bucket in buckets:
        for cell in bucket.cells:
            size = cell.q_len if gate == "q_len" else bucket.kv_len
            ratio = cell.seconds[gated] / cell.seconds[1 - gated]
            worst[size] = max(worst.get(size, 0.0), ratio)
    if not worst:
        return None
    lost = [size for size, ratio in worst.items() if math.log(ratio) > SWITCH_COST]
    return Limit(max(lost)) if lost else Never()
