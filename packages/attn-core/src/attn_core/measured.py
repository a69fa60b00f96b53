"""Which of two candidates was measured to be the faster one, on which device, for which questions.

A :class:`Pair` holds what ``attn tune`` found on one machine for one layer: per batch size and sequence
length a step function of the query rows. Routing asks it after everything else (see
:func:`attn_core.route.choose`); nothing here knows a backend.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from .problem import AttentionProblem, PagedKV
from .query import Query
from .target import DeviceTarget

REACH = 4
"""How many times beyond the smallest or largest size measured a verdict holds. Further is unmeasured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The facts of a layer that a measurement is about. All must be equal for it to speak.

    Types by name, ``page_size`` 0 for contiguous keys; the rest as in AttentionProblem.
    """

    op: str
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    q_dtype: str
    kv_dtype: str
    kv_layout: str
    page_size: int
    mask: str
    pos_encoding: str
    window_left: int
    logits_soft_cap: float

    @classmethod
    def of(cls, problem: AttentionProblem) -> Scope:
        """Return the scope of a problem."""
        return cls(
            op=problem.op.value,
            num_qo_heads=problem.num_qo_heads,
            num_kv_heads=problem.num_kv_heads,
            head_dim_qk=problem.head_dim_qk,
            head_dim_vo=problem.head_dim_vo,
            q_dtype=str(problem.q_dtype).removeprefix("torch."),
            kv_dtype=str(problem.kv_dtype).removeprefix("torch."),
            kv_layout=problem.kv.order,
            page_size=problem.kv.page_size if isinstance(problem.kv, PagedKV) else 0,
            mask=problem.mask.value,
            pos_encoding=problem.pos_encoding.value,
            window_left=problem.window_left,
            logits_soft_cap=float(problem.logits_soft_cap),
        )


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: seconds of the pair's candidates, in the pair's order, for ``q_len`` query rows."""

    q_len: int
    seconds: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Bucket:
    """What was found at one batch size and sequence length.

    Attributes:
        batch_size: Requests.
        kv_len: Keys of each.
        steps: ``(q_len, candidate)``, ascending: the candidate is the faster one from that many query rows
            per request on, up to the next step. One step alone is a verdict of "always" for its candidate.
        cells: The measurements behind it, ascending by ``q_len``.
    """

    batch_size: int
    kv_len: int
    steps: tuple[tuple[int, str], ...]
    cells: tuple[Cell, ...]

    def fastest(self, q_len: int) -> str | None:
        """Return the faster candidate; None beyond the reach of what was measured."""
        if not self.cells or not within(q_len, (self.cells[0].q_len, self.cells[-1].q_len)):
            return None
        at = bisect_right(self.steps, q_len, key=lambda step: step[0])
        return self.steps[max(at - 1, 0)][1]


@dataclass(frozen=True, slots=True)
class Finding:
    """A verdict that took part in a decision.

    Attributes:
        faster: Candidate measured faster.
        slower: The other.
        where: The nearest sizes measured, in words.
        origin: File it was read from.
    """

    faster: str
    slower: str
    where: str
    origin: str

    def __str__(self) -> str:
        return f"{self.faster} was measured faster than {self.slower} at {self.where} ({self.origin})"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two candidates measured side by side on one device for one layer.

    Attributes:
        candidates: ``backend/path`` twice; the one that ``auto`` tried first comes first.
        arch: Device it was measured on.
        num_cus: Its compute units: a cut-down device of the same architecture crosses over elsewhere.
        scope: The layer.
        buckets: What was found.
        provenance: Facts for the reader: kind, source, statistic, grid, versions, device.
        origin: File it was read from.
    """

    candidates: tuple[str, str]
    arch: str
    num_cus: int
    scope: Scope
    buckets: tuple[Bucket, ...]
    provenance: tuple[tuple[str, str], ...]
    origin: str

    @property
    def key(self) -> tuple[object, ...]:
        """What a later measurement of the same thing has in common with this one."""
        return (self.arch, self.num_cus, self.scope, frozenset(self.candidates))

    def bucket(self, batch_size: int, kv_len: int) -> Bucket | None:
        """Return the nearest bucket by ratio, batch size first; None when even that is out of reach."""
        if not within(batch_size, _range(b.batch_size for b in self.buckets)):
            return None
        size = _nearest(batch_size, (b.batch_size for b in self.buckets))
        same = [b for b in self.buckets if b.batch_size == size]
        if not within(kv_len, _range(b.kv_len for b in same)):
            return None
        length = _nearest(kv_len, (b.kv_len for b in same))
        return next(b for b in same if b.kv_len == length)

    def judge(self, query: Query) -> Finding | None:
        """Return which one is faster for a query of this scope and device; None when that is unmeasured."""
        shape = query.batch
        found = self.bucket(shape.batch_size, captured_kv_len(query))
        faster = None if found is None else found.fastest(shape.max_q_len)
        if found is None or faster is None:
            return None
        slower = self.candidates[faster == self.candidates[0]]
        q_len = _nearest(shape.max_q_len, (cell.q_len for cell in found.cells))
        where = f"batch {found.batch_size}, q_len {q_len}, kv_len {found.kv_len}"
        return Finding(faster, slower, where, self.origin)


class Measured:
    """Read-only table of pairs; a later pair replaces an earlier one with the same key."""

    def __init__(self, pairs: Iterable[Pair] = ()) -> None:
        self._pairs = {pair.key: pair for pair in pairs}

    def about(self, target: DeviceTarget, problem: AttentionProblem) -> tuple[Pair, ...]:
        """Return the pairs measured on such a device for such a layer."""
        if not self._pairs:
            return ()
        scope = Scope.of(problem)
        return tuple(
            pair
            for pair in self._pairs.values()
            if (pair.arch, pair.num_cus, pair.scope) == (target.arch, target.num_cus, scope)
        )

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._pairs.values())

    def __len__(self) -> int:
        return len(self._pairs)


NOTHING = Measured()


def captured_kv_len(query: Query) -> int:
    """Longest sequence of the query: of the batch, or the capacity when it will be captured."""
    graph = query.graph
    if graph is None:
        return query.batch.max_kv_len
    return query.batch.max_kv_len if graph.max_kv_len is None else graph.max_kv_len


def within(value: int, measured: tuple[int, int]) -> bool:
    """Whether a size is near enough to a measured range, by ratio."""
    low, high = measured
    return low <= value * REACH and value <= high * REACH


def _range(values: Iterable[int]) -> tuple[int, int]:
    found = sorted(values)
    return (found[0], found[-1]) if found else (1, 0)


def _nearest(value: int, measured: Iterable[int]) -> int:
    """Return the measured size with the smallest ratio to ``value``; of two, the smaller."""
    floor = max(value, 1)
    return min(measured, key=lambda size: (max(size / floor, floor / max(size, 1)), size))
