"""Measure two candidates on a grid of batches: back to back, in turns, every result checked."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from ..errors import needs
from ..measured import Bucket, Cell
from ..problem import AttentionProblem
from . import fit
from .timing import Timer
from .workload import Cache, Shape, Workload

ROUNDS = 3
"""Samples of each candidate per cell; the median counts."""
_MOST_REFINED = 6
"""Cells added to site the crossovers of one bucket."""
_MOST_LENGTHS = 3
"""Sequence lengths added per batch size, where two neighbours have different winners."""


class WrongResult(RuntimeError):
    """A candidate computed something else than the reference: nothing about it may be written."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A cell that could not be measured, and why, on one line."""

    shape: Shape
    candidate: str
    text: str


@dataclass(slots=True)
class Found:
    """What was measured of one layer.

    Attributes:
        problem: The layer.
        buckets: One per batch size and sequence length with at least one cell.
        failures: Cells without a measurement.
    """

    problem: AttentionProblem
    buckets: list[Bucket] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    @property
    def cells(self) -> Iterator[tuple[Bucket, Cell]]:
        """Every measurement."""
        return ((bucket, cell) for bucket in self.buckets for cell in bucket.cells)


Report = Callable[[Shape, dict[str, float]], None]
"""Called after every cell with its times in seconds; none for one that failed."""


def times(work: Workload, candidates: Sequence[str], timer: Timer) -> tuple[dict[str, float], list[Failure]]:
    """Measure candidates on one batch.

    Each is planned, checked against the reference, and sampled :data:`ROUNDS` times in turns whose order
    alternates, so that a clock that drifts favours nobody.

    Returns:
        Seconds by candidate, those that failed left out, and the failures.

    Raises:
        WrongResult: A result is not the reference's.
    """
    ready, failures = {}, []
    for name in candidates:
        try:
            wrapper = work.planned(name)
            wrong = work.wrong(wrapper)
        except Exception as err:  # whatever a candidate raises here it would raise for the user
            text = " ".join(f"{type(err).__name__}: {err}".split())
            failures.append(Failure(work.shape, name, text))
            continue
        if wrong is not None:
            raise WrongResult(
                needs(name, f"the reference's result at {work.shape}", wrong, "core.tune-wrong")
            )
        ready[name] = lambda wrapper=wrapper: work.call(wrapper)
    samples: dict[str, list[float]] = {name: [] for name in ready}
    for turn in range(ROUNDS):
        for name in list(ready) if turn % 2 == 0 else list(ready)[::-1]:
            samples[name].append(timer.sample(ready[name]))
    return {name: max(statistics.median(taken), 1e-9) for name, taken in samples.items()}, failures


def sweep(
    problem: AttentionProblem,
    candidates: tuple[str, str],
    shapes: Iterable[Shape],
    device: torch.device,
    timer: Timer,
    report: Report,
    *,
    refine: bool = True,
) -> Found:
    """Measure one layer.

    Args:
        problem: The layer.
        candidates: Two, the one that ``auto`` tries first in front.
        shapes: Batches.
        device: Where to run.
        timer: Measures calls.
        report: Told after every cell.
        refine: Add cells and sequence lengths between two with different winners until the crossover is
            sited.

    Raises:
        WrongResult: A result is not the reference's.
    """
    found = Found(problem)
    grouped: dict[int, dict[int, list[int]]] = {}
    for shape in shapes:
        grouped.setdefault(shape.batch_size, {}).setdefault(shape.kv_len, []).append(shape.q_len)

    def measure(cache: Cache, q_len: int) -> Cell | None:
        work = Workload(problem, cache, q_len)
        taken, failures = times(work, candidates, timer)
        found.failures.extend(failures)
        report(work.shape, taken)
        return None if failures else Cell(q_len, (taken[candidates[0]], taken[candidates[1]]))

    def bucket(batch_size: int, kv_len: int, q_lens: Iterable[int]) -> list[Bucket]:
        cache = Cache(problem, batch_size, kv_len, device)
        made = (measure(cache, q_len) for q_len in sorted(set(q_lens)))
        cells = [cell for cell in made if cell is not None]
        tried: set[int] = set()
        while refine and len(tried) < _MOST_REFINED and (more := fit.next_q_len(cells, tried)) is not None:
            tried.add(more)
            cell = measure(cache, more)
            cells = sorted([*cells, *([] if cell is None else [cell])], key=lambda cell: cell.q_len)
        if not cells:
            return []
        return [Bucket(batch_size, kv_len, fit.steps(candidates, cells), tuple(cells))]

    for batch_size, lengths in grouped.items():
        made = [one for kv_len in sorted(lengths) for one in bucket(batch_size, kv_len, lengths[kv_len])]
        asked = sorted({q_len for q_lens in lengths.values() for q_len in q_lens})
        added: set[int] = set()
        while refine and len(added) < _MOST_LENGTHS and (more := fit.next_kv_len(made, added)) is not None:
            added.add(more)
            made += bucket(batch_size, more, [q_len for q_len in asked if q_len <= more])
            made.sort(key=lambda one: one.kv_len)
        found.buckets += made
    return found
