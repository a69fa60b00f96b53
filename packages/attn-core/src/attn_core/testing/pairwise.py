"""All-pairs combination of independent choices: few rows, yet every two values meet in one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

Value = object
Row = dict[str, Value]
Clash = Callable[[str, Value, str, Value], bool]
_Choice = tuple[int, int]
"""Position of an axis, position of one of its values."""


def cover(axes: Mapping[str, Sequence[Value]], clash: Clash) -> list[Row]:
    """Return rows in which every pair of values of two axes occurs that may occur.

    Greedy and free of randomness: equal arguments give equal rows in equal order.

    Args:
        axes: Values to choose from, by name; each has at least one.
        clash: Whether a value of one axis and a value of another exclude each other. Asked with the
            axes in their order in ``axes``.

    Raises:
        ValueError: An axis is empty, or no row at all satisfies ``clash``.
    """
    empty = [name for name, values in axes.items() if not values]
    if empty:
        raise ValueError(f"axes: needs values for every axis, got none for {empty[0]}")
    table = _Table(axes, clash)
    rows: list[Row] = []
    while (seed := table.first_open()) is not None:
        chosen = table.complete(dict(seed))
        if chosen is None:  # each two go together, but no third axis goes with both
            table.open.pop(seed)
            continue
        table.close(chosen)
        rows.append({table.names[a]: table.values[a][v] for a, v in sorted(chosen.items())})
    if not rows:
        raise ValueError("axes: needs values that go together, got none")
    return rows


class _Table:
    """Pairs not covered yet (``open``, in a fixed order) and how often each value was used."""

    def __init__(self, axes: Mapping[str, Sequence[Value]], clash: Clash) -> None:
        self.names = list(axes)
        self.values = [list(values) for values in axes.values()]
        self.used = [[0] * len(values) for values in self.values]
        self.clashing: set[tuple[_Choice, _Choice]] = set()
        self.open: dict[tuple[_Choice, _Choice], None] = {}
        for a in range(len(self.names)):
            for b in range(a + 1, len(self.names)):
                self._pairs(a, b, clash)
        if len(self.names) == 1:
            self.open = {((0, v), (0, v)): None for v in range(len(self.values[0]))}
        # Wide axes first: they decide how many rows there must be.
        self.order = sorted(range(len(self.names)), key=lambda a: -len(self.values[a]))

    def _pairs(self, a: int, b: int, clash: Clash) -> None:
        for v, left in enumerate(self.values[a]):
            for w, right in enumerate(self.values[b]):
                pair = ((a, v), (b, w))
                if clash(self.names[a], left, self.names[b], right):
                    self.clashing.add(pair)
                else:
                    self.open[pair] = None

    def first_open(self) -> tuple[_Choice, _Choice] | None:
        return next(iter(self.open), None)

    def complete(self, chosen: dict[int, int]) -> dict[int, int] | None:
        """Choose a value for every other axis, most new pairs first; backtracks out of dead ends."""
        axis = next((a for a in self.order if a not in chosen), None)
        if axis is None:
            return chosen
        for value in self._ranked(axis, chosen):
            found = self.complete({**chosen, axis: value})
            if found is not None:
                return found
        return None

    def _ranked(self, axis: int, chosen: dict[int, int]) -> list[int]:
        scored: list[tuple[int, int, int]] = []
        for value in range(len(self.values[axis])):
            pairs = [_pair((axis, value), other) for other in chosen.items()]
            if self.clashing.isdisjoint(pairs):
                new = sum(pair in self.open for pair in pairs)
                scored.append((-new, self.used[axis][value], value))
        return [value for _, _, value in sorted(scored)]

    def close(self, chosen: dict[int, int]) -> None:
        items = list(chosen.items())
        for axis, value in items:
            self.used[axis][value] += 1
        for at, left in enumerate(items):
            for right in items[at + 1 :]:
                self.open.pop(_pair(left, right), None)
        if len(items) == 1:
            self.open.pop((items[0], items[0]), None)


def _pair(a: _Choice, b: _Choice) -> tuple[_Choice, _Choice]:
    return (a, b) if a < b else (b, a)
