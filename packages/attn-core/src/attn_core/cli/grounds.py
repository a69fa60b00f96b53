"""Where the numbers behind a decision come from: thresholds of rules, measurements of this device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from ..backend import Backend
from ..measured import Pair
from ..plugins import Registry
from ..query import Query
from ..route import AUTO, Verdict
from ..thresholds import Limit, Row, Thresholds
from .output import grid, heading, styled


@dataclass(frozen=True, slots=True)
class Ground:
    """One number or measurement.

    Attributes:
        about: The rule's code, or the two candidates.
        says: The limit, or which candidate is faster where.
        kind: ``reported``, ``measured`` or ``derived``.
        source: Who measured, when and with what.
        file: Where it is written.
    """

    about: str
    says: str
    kind: str
    source: str
    file: str


def grounds(query: Query, wanted: str, verdicts: Sequence[Verdict], registry: Registry) -> tuple[Ground, ...]:
    """Return the thresholds of the rules that were asked, and the measurements that spoke.

    Args:
        query: The question.
        wanted: What the caller asked for; measurements speak for ``auto`` only.
        verdicts: The answer.
        registry: Backends and measurements.
    """
    codes = {reason.code.slug for verdict in verdicts for reason in verdict.refusals}
    found: dict[Ground, None] = {}
    for backend in registry.backends:
        for rule in backend.rules:
            if query.problem.op not in rule.ops or rule.gate is None:
                continue
            row = _row(backend, rule.code.slug, query.target.arch)
            # A limit that was kept to matters too, where nothing else had refused the candidate before.
            able = {f"{backend.name}/{p}" for p in rule.paths} & {
                v.candidate for v in verdicts if not v.refusals
            }
            if row is not None and (rule.code.slug in codes or able):
                found[_of_row(row)] = None
    if wanted == AUTO:
        for pair in registry.measured.about(query.target, query.problem):
            found[_of_pair(pair, query)] = None
    return tuple(found)


def _row(backend: Backend, slug: str, arch: str) -> Row | None:
    table = getattr(backend, "thresholds", None)
    return table.find(slug, arch) if isinstance(table, Thresholds) else None


def _of_row(row: Row) -> Ground:
    limit = f"up to {row.verdict.value:g}" if isinstance(row.verdict, Limit) else "never"
    facts = dict(row.provenance)
    return Ground(row.code, limit, row.kind, f"{facts['source']}; {facts['versions']}", row.origin)


def _of_pair(pair: Pair, query: Query) -> Ground:
    finding = pair.judge(query)
    says = "nothing: too far from the sizes measured"
    if finding is not None:
        says = f"{finding.faster} is faster at {finding.where}"
    facts = dict(pair.provenance)
    source = f"{facts['device']}, {facts['date']}; {facts['versions']}"
    return Ground(", ".join(pair.candidates), says, facts["kind"], source, pair.origin)


def render_grounds(found: Sequence[Ground]) -> list[RenderableType]:
    """Return a section for a terminal; nothing when there is nothing to tell."""
    if not found:
        return []
    table = grid(max(len(ground.about) for ground in found), None)
    for ground in found:
        says = Text.assemble(ground.says, (f"  {ground.kind}: {ground.source} ({ground.file})", "dim"))
        table.add_row(styled(ground.about, ""), says)
    return [heading("Rests on"), Padding(table, (0, 0, 1, 2), expand=True)]
