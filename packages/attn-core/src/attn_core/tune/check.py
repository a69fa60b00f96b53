"""How much ``auto`` loses against the fastest candidate, batch by batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..problem import AttentionProblem
from .sweep import Failure, Report, times
from .timing import Timer
from .workload import Cache, Shape, Workload

MEAN_GOAL, WORST_GOAL = 1.03, 1.25
"""What ``auto`` may lose in the geometric mean, and in one cell."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One batch.

    Attributes:
        problem: The layer.
        shape: The batch.
        chosen: What ``auto`` took.
        seconds: By candidate.
    """

    problem: AttentionProblem
    shape: Shape
    chosen: str
    seconds: dict[str, float]

    @property
    def fastest(self) -> str:
        """The candidate with the least time."""
        return min(self.seconds, key=lambda name: self.seconds[name])

    @property
    def regret(self) -> float:
        """Time of what was chosen over the least time."""
        return self.seconds[self.chosen] / self.seconds[self.fastest]


def judge(
    problem: AttentionProblem,
    candidates: Sequence[str],
    shapes: Iterable[Shape],
    device: torch.device,
    timer: Timer,
    report: Report,
) -> tuple[list[Judged], list[Failure]]:
    """Ask ``auto`` and measure all candidates anew, what it chose among them.

    Raises:
        WrongResult: A result is not the reference's.
        NoRoute: ``auto`` finds nobody.
    """
    judged, failures = [], []
    cache: Cache | None = None
    for shape in shapes:
        if cache is None or (cache.batch_size, cache.kv_len) != (shape.batch_size, shape.kv_len):
            cache = Cache(problem, shape.batch_size, shape.kv_len, device)
        work = Workload(problem, cache, shape.q_len)
        route = work.planned("auto").route
        assert route is not None
        names = list(dict.fromkeys([*candidates, route.candidate]))
        taken, failed = times(work, names, timer)
        failures.extend(failed)
        report(shape, taken)
        if route.candidate in taken:
            judged.append(Judged(problem, shape, route.candidate, taken))
    return judged, failures


def mean_regret(judged: Sequence[Judged]) -> float:
    """Return the geometric mean of the regrets."""
    return math.exp(sum(math.log(one.regret) for one in judged) / len(judged))


def worst(judged: Sequence[Judged]) -> Judged:
    """Return the batch with the largest regret."""
    return max(judged, key=lambda one: one.regret)


def good(judged: Sequence[Judged]) -> bool:
    """Whether ``auto`` is as near to the fastest candidate as it shall be."""
    return mean_regret(judged) <= MEAN_GOAL and worst(judged).regret <= WORST_GOAL
