"""Choose a candidate: one walk over an ordered list, one explanation for every candidate.

``screen`` asks what does not depend on the batch, once per (device, problem). ``choose`` asks the
rest, per plan. Both are pure: equal questions get equal answers, whatever was planned before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from . import rules
from .backend import Backend, Path
from .errors import NoRoute, Unsupported
from .problem import AttentionProblem
from .query import GraphLimits, Query
from .reasons import Code, Reason, Stage, worth_telling
from .target import DeviceTarget

Served = TypeVar("Served")

AUTO = "auto"
PINNED = Code(
    "core.graph-pinned",
    Stage.CAPABILITY,
    "a captured graph replays {limit} and nothing else",
    quiet=True,
    meaning="The wrapper's graph already holds another candidate.",
)
NOT_REQUESTED = Code(
    "core.not-requested",
    Stage.CAPABILITY,
    "the caller asked for {limit}",
    quiet=True,
    meaning="backend= names something else.",
)
CODES = (PINNED, NOT_REQUESTED)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One path of one backend, with what screening said about it and the rules still to be asked."""

    backend: Backend
    path: Path
    name: str
    refusals: tuple[Reason, ...]
    rules: tuple[rules.Rule, ...] = ()


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """The chosen candidate and every refusal met on the way, in order.

    Attributes:
        candidate: ``backend/path``.
        backend: The backend object.
        path: The path.
        refused: Reasons of the candidates tried before it.
        requested: What the caller asked for.
    """

    candidate: str
    backend: Backend = field(compare=False)
    path: Path = field(compare=False)
    refused: tuple[Reason, ...]
    requested: str

    @property
    def fallback_reason(self) -> str | None:
        """Why a better-ranked backend was passed over, on one line; None when none was.

        Causes nobody can act on (a backend for another device) do not count; ``refused`` has them.
        """
        told = [str(reason) for reason in worth_telling(self.refused, self.candidate)]
        return "; ".join(told) if told else None


@dataclass(slots=True)
class Screened:
    """The batch-independent half of a decision for one (device, problem, capture)."""

    target: DeviceTarget
    problem: AttentionProblem
    graph: GraphLimits | None
    requested: str
    candidates: tuple[Candidate, ...]
    prefer: bool
    prepared: set[str] = field(default_factory=set)


def screen(
    target: DeviceTarget,
    problem: AttentionProblem,
    backends: Sequence[Backend],
    *,
    graph: GraphLimits | None = None,
    requested: str = AUTO,
    pinned: str | None = None,
) -> Screened:
    """Run the stages that do not look at a batch, for every candidate.

    Args:
        target: Device to decide for; it need not be here.
        problem: What is asked.
        backends: Owners of the candidates, most preferred first.
        graph: Capacities when the call will be captured.
        requested: ``auto``, a backend, or a candidate ``backend/path``.
        pinned: Candidate of a captured graph; nothing else may be chosen.

    Raises:
        NoRoute: ``requested`` names nothing that is installed.
    """
    known = [b.name for b in backends] + [f"{b.name}/{p.name}" for b in backends for p in b.paths]
    if requested != AUTO and requested not in known:
        names = ", ".join([AUTO, *(b.name for b in backends)])
        raise NoRoute(f"backend: needs one of {names}, got {requested!r} [core.backend-name]", ())
    found = []
    for backend in backends:
        # One that was not asked for is not asked either: its faults are no concern of this call.
        asked_for = requested == AUTO or requested.split("/")[0] == backend.name
        missing = _unavailable(backend, target, requested) if asked_for else None
        for path in backend.paths:
            name = f"{backend.name}/{path.name}"
            refusals: tuple[Reason, ...]
            if requested not in (AUTO, backend.name, name):
                refusals = (Reason(NOT_REQUESTED, name, requested),)
            elif pinned is not None and pinned != name:
                refusals = (Reason(PINNED, name, pinned),)
            else:
                refusals = _static(target, problem, graph, path, name, missing)
            asked = () if refusals else rules.about(backend.rules, problem.op, path.name)
            found.append(Candidate(backend, path, name, refusals, asked))
    prefer = requested == AUTO and pinned is None  # a choice that is not ours is not judged for speed
    return Screened(target, problem, graph, requested, tuple(found), prefer)


def _unavailable(backend: Backend, target: DeviceTarget, requested: str) -> Reason | None:
    try:
        return backend.unavailable(target)
    except Unsupported as late:
        if requested != AUTO:
            raise
        return late.reason


def _static(
    target: DeviceTarget,
    problem: AttentionProblem,
    graph: GraphLimits | None,
    path: Path,
    name: str,
    missing: Reason | None,
) -> tuple[Reason, ...]:
    """AVAILABILITY, else CAPABILITY: the first stage that has anything to say."""
    stated = tuple(path.capability.refusals(target, problem, graph, name))
    first = tuple(r for r in stated if r.code.stage is Stage.AVAILABILITY)
    if missing is not None and not first:
        first = (replace(missing, candidate=name),)
    return _quieted(path, first or stated)


def _quieted(path: Path, reasons: tuple[Reason, ...]) -> tuple[Reason, ...]:
    """What is said of a path that ``auto`` leaves out anyway is nobody's cause for a fallback."""
    if not path.by_name:
        return reasons
    return tuple(replace(reason, code=replace(reason.code, quiet=True)) for reason in reasons)


def _dynamic(candidate: Candidate, query: Query, *, prefer: bool) -> tuple[Reason, ...]:
    """Per-batch CAPABILITY, then PREFERENCE if the choice is ours, in that order."""
    said = rules.apply(candidate.rules, query, candidate.path.name, candidate.name)
    if not said:
        return ()
    wrong = tuple(r for r in said if r.code.stage is not Stage.PREFERENCE)
    return _quieted(candidate.path, wrong or (said if prefer else ()))


def _prepare(screened: Screened, candidate: Candidate) -> tuple[Reason, ...]:
    try:
        reason = candidate.backend.prepare(screened.target, screened.problem, candidate.path.name)
    except Unsupported as late:
        if not screened.prefer:
            raise
        reason = late.reason
    if reason is None:
        screened.prepared.add(candidate.name)
        return ()
    return _quieted(candidate.path, (replace(reason, candidate=candidate.name),))


def choose(screened: Screened, query: Query, *, passed: Iterable[Reason] = ()) -> RouteDecision:
    """Return the first candidate that nothing speaks against.

    Args:
        screened: Result of :func:`screen` for the query's device, problem and capture.
        query: The complete question.
        passed: Reasons found after an earlier choice (a plan that raised Unsupported); their
            candidates are skipped.

    Raises:
        NoRoute: Every candidate was refused; holds all reasons.
    """
    extra = tuple(passed)
    refused: list[Reason] = []
    for candidate in screened.candidates:
        reasons = candidate.refusals or tuple(r for r in extra if r.candidate == candidate.name)
        if not reasons and candidate.rules:
            reasons = _dynamic(candidate, query, prefer=screened.prefer)
        if not reasons and candidate.name not in screened.prepared:
            reasons = _prepare(screened, candidate)
        if not reasons:
            return RouteDecision(
                candidate.name, candidate.backend, candidate.path, tuple(refused), screened.requested
            )
        refused.extend(reasons)
    relevant = [r for r in refused if r.code not in CODES] or refused
    p = query.problem
    raise NoRoute(f"backend: no candidate of {screened.requested!r} can serve {p.op.value}:", relevant)


def serve(
    screened: Screened, query: Query, attempt: Callable[[RouteDecision], Served]
) -> tuple[RouteDecision, Served]:
    """Choose and try; a candidate that finds late that it cannot serve is passed over if the choice is ours.

    Args:
        screened: As for :func:`choose`.
        query: As for :func:`choose`.
        attempt: Does what was chosen; may raise Unsupported.

    Returns:
        The decision that held, with every refusal met, and what ``attempt`` returned for it.

    Raises:
        NoRoute: Every candidate was refused.
        Unsupported: A candidate the caller or a captured graph named cannot serve.
    """
    passed: list[Reason] = []
    while True:
        decision = choose(screened, query, passed=passed)
        try:
            return decision, attempt(decision)
        except Unsupported as late:
            if not screened.prefer:
                raise
            passed.append(replace(late.reason, candidate=decision.candidate))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an explanation says of one candidate; no refusal means it could serve."""

    candidate: str
    chosen: bool
    refusals: tuple[Reason, ...]


def explain(screened: Screened, query: Query) -> tuple[Verdict, ...]:
    """Judge every candidate, those after the chosen one too, without building anything.

    PREPARE is left out: it would compile, and the device may not be here.
    """
    verdicts: list[Verdict] = []
    taken = False
    for candidate in screened.candidates:
        reasons = candidate.refusals or _dynamic(candidate, query, prefer=screened.prefer)
        chosen = not reasons and not taken
        taken = taken or chosen
        verdicts.append(Verdict(candidate.name, chosen, reasons))
    return tuple(verdicts)
