"""Which of two candidates was measured to be the faster one, on which device, for which questions.

A :class:`Pair` holds what ``attn tune`` found on one machine for one layer: per batch size and sequence
length a step function of the query rows. Routing asks it after everything else (see
:func:`attn_core.route.choose`); nothing here knows a backend.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

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

    @property
    def lead(self) -> float:
        """Logarithm of the first candidate's time over the second's; above 0 the second is faster."""
        return math.log(self.seconds[0] / self.seconds[1])


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

    def lead(self, q_len: int) -> float:
        """Return :attr:`Cell.lead` at any ``q_len``: by its logarithm between two cells, else the end's."""
        at = bisect_left(self.cells, q_len, key=lambda cell: cell.q_len)
        if at == len(self.cells):
            return self.cells[-1].lead
        after = self.cells[at]
        if at == 0 or after.q_len == q_len:
            return after.lead
        before = self.cells[at - 1]
        share = _share(before.q_len, q_len, after.q_len)
        return (1 - share) * before.lead + share * after.lead


@dataclass(frozen=True, slots=True)
class Finding:
    """A verdict that took part in a decision.

    Attributes:
        faster: Candidate measured faster.
        slower: The other.
        where: The nearest sizes measured, or those the verdict was interpolated between, in words.
        origin: File it was read from.
    """

    faster: str
    slower: str
    where: str
    origin: str

    def __str__(self) -> str:
        return f"{self.faster} was measured faster than {self.slower} at {self.where} ({self.origin})"


_Axis = tuple[tuple[int, ...], tuple[Bucket, ...]]
"""Lengths ascending, and the bucket of each."""
_Item = TypeVar("_Item")
Answer = TypeVar("Answer")
_UNASKED = Finding("", "", "", "")


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
    _sizes: tuple[int, ...] = field(init=False, compare=False, repr=False)
    _by_size: tuple[_Axis, ...] = field(init=False, compare=False, repr=False)
    _told: dict[Sizes, Finding | None] = field(init=False, compare=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Sort the buckets by batch size and keys, so that a verdict is looked up by bisection."""
        grouped: dict[int, dict[int, Bucket]] = {}
        for bucket in self.buckets:
            grouped.setdefault(bucket.batch_size, {}).setdefault(bucket.kv_len, bucket)
        sizes = tuple(sorted(grouped))
        axes = tuple(
            (tuple(sorted(same)), tuple(same[kv_len] for kv_len in sorted(same)))
            for same in (grouped[size] for size in sizes)
        )
        object.__setattr__(self, "_sizes", sizes)
        object.__setattr__(self, "_by_size", axes)

    @property
    def key(self) -> tuple[object, ...]:
        """What a later measurement of the same thing has in common with this one."""
        return (self.arch, self.num_cus, self.scope, frozenset(self.candidates))

    def judge(self, query: Query) -> Finding | None:
        """Return which one is faster for a query of this scope and device; None when that is unmeasured.

        The buckets around the query's batch size and keys speak, up to two of each. What they agree on
        holds. Where they do not, their time ratios at its ``q_len`` are interpolated, in logarithms of the
        ratio and of the sizes; one whose figures there are not those of its verdict weighs nothing, and
        when none does, the nearest speaks.
        """
        sizes = sizes_of(query)
        found = self._told.get(sizes, _UNASKED)
        if found is _UNASKED:
            found = self._judge(*sizes)
            remember(self._told, sizes, found)
        return found

    def _judge(self, batch_size: int, q_len: int, kv_len: int) -> Finding | None:
        said = [
            (share * part, bucket, faster)
            for share, same in _around(self._sizes, self._by_size, batch_size)
            for part, bucket in _around(*same, kv_len)
            if (faster := bucket.fastest(q_len)) is not None
        ]
        if not said:
            return None
        faster, lead = max(said, key=lambda one: one[0])[2], 0.0
        agreed = all(name == faster for _, _, name in said)
        if not agreed:
            leads = [(share, bucket.lead(q_len), name) for share, bucket, name in said]
            lead = sum(s * x for s, x, name in leads if self.candidates[x > 0] == name)
            lead /= sum(share for share, _, _ in said)
            faster = self.candidates[lead > 0] if lead else faster
        slower = self.candidates[faster == self.candidates[0]]
        buckets = [bucket for _, bucket, _ in said]
        if agreed:
            where = _nearest_cell(buckets, batch_size, q_len, kv_len)
        else:
            where = _between(buckets, q_len, math.exp(abs(lead)))
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


Sizes = tuple[int, int, int]
_MOST_KEPT = 512


def sizes_of(query: Query) -> Sizes:
    """Return what a measurement is asked about: batch size, query rows of the longest request, keys."""
    shape = query.batch
    return (shape.batch_size, shape.max_q_len, captured_kv_len(query))


def remember(answers: dict[Sizes, Answer], sizes: Sizes, answer: Answer) -> None:
    """Keep an answer that depends on the sizes alone: plans ask for the same ones over and over."""
    if len(answers) >= _MOST_KEPT:
        answers.clear()
    answers[sizes] = answer


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


def _around(sizes: Sequence[int], items: Sequence[_Item], value: int) -> list[tuple[float, _Item]]:
    """Return the items of the one or two sizes around a value with their shares; none when out of reach."""
    if not sizes or not within(value, (sizes[0], sizes[-1])):
        return []
    at = bisect_left(sizes, value)
    if at == len(sizes):
        return [(1.0, items[-1])]
    if at == 0 or sizes[at] == value:
        return [(1.0, items[at])]
    share = _share(sizes[at - 1], value, sizes[at])
    return [(1.0 - share, items[at - 1]), (share, items[at])]


def _share(low: int, value: int, high: int) -> float:
    """How far a value lies from one size to the next, by ratio: 0 to 1."""
    return math.log(value / low) / math.log(high / low)


def _nearest(value: int, measured: Iterable[int]) -> int:
    """Return the measured size with the smallest ratio to ``value``; of two, the smaller."""
    floor = max(value, 1)
    return min(measured, key=lambda size: (max(size / floor, floor / max(size, 1)), size))


def _nearest_cell(buckets: Sequence[Bucket], batch_size: int, q_len: int, kv_len: int) -> str:
    size = _nearest(batch_size, (b.batch_size for b in buckets))
    same = [b for b in buckets if b.batch_size == size]
    length = _nearest(kv_len, (b.kv_len for b in same))
    cells = next(b for b in same if b.kv_len == length).cells
    return f"batch {size}, q_len {_nearest(q_len, (cell.q_len for cell in cells))}, kv_len {length}"


def _between(buckets: Sequence[Bucket], q_len: int, times: float) -> str:
    def ends(values: Iterable[int]) -> str:
        found = sorted(set(values))
        return str(found[0]) if len(found) == 1 else f"between {found[0]} and {found[-1]}"

    batch, kv = ends(b.batch_size for b in buckets), ends(b.kv_len for b in buckets)
    return f"batch {batch}, q_len {q_len}, kv_len {kv}, {times:.2f}x by interpolation"
