"""A routing rule: one named, pure test that may decline one candidate for one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from .problem import Op
from .query import Query
from .reasons import Code, Reason

Verdict = tuple[object, object] | None
"""(limit, got) to decline, None to let pass."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Belongs to the backend it can decline; ``code.stage`` says what it is.

    PREFERENCE rules (right but slow) are skipped when the caller names a backend or a captured graph
    pins one. CAPABILITY rules (the answer would be wrong) always hold.

    Attributes:
        code: The cause it reports.
        ops: Entry points it looks at.
        paths: This backend's paths it looks at.
        test: Pure function of the query. The returned limit must not depend on the batch.
        gate: What ``attn tune`` may re-measure: ``q_len`` or ``kv_len`` when the rule declines up to and
            including the threshold row of its code; ``verdict`` when it declines until somebody has
            measured; None for what is no matter of speed.
    """

    code: Code
    ops: frozenset[Op]
    paths: frozenset[str]
    test: Callable[[Query], Verdict]
    gate: Literal["q_len", "kv_len", "verdict"] | None = None

    def decline(self, query: Query, path: str, candidate: str) -> Reason | None:
        """Apply to one candidate; a rule about another op or path never sees the query."""
        if query.problem.op not in self.ops or path not in self.paths:
            return None
        found = self.test(query)
        return None if found is None else Reason(self.code, candidate, *found)


def apply(rules: Iterable[Rule], query: Query, path: str, candidate: str) -> tuple[Reason, ...]:
    """Return every reason the rules give, not only the first."""
    return ask(about(rules, query.problem.op, path), query, candidate)


def ask(rules: Iterable[Rule], query: Query, candidate: str) -> tuple[Reason, ...]:
    """Return every reason that rules about the query's op and the candidate's path give.

    Called for every plan, so there are no calls but those of the tests.
    """
    said = []
    for rule in rules:
        found = rule.test(query)
        if found is not None:
            said.append(Reason(rule.code, candidate, *found))
    return tuple(said)


def about(rules: Iterable[Rule], op: Op, path: str) -> tuple[Rule, ...]:
    """Return the rules that look at an entry point and a path."""
    return tuple(rule for rule in rules if op in rule.ops and path in rule.paths)
