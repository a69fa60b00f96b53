"""Choose a candidate: one walk over an ordered list, one explanation for every candidate.

``screen`` asks what does not depend on the batch, once per (device, problem). ``choose`` asks the
rest, per plan. Both are pure: equal questions get equal answers, whatever was planned before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from . import rules
from .attempts import RAISED, Served, first_to_serve, unavailable, unready
from .backend import Backend, Path
from .errors import NoRoute
from .measured import NOTHING, Finding, Measured, Pair, Sizes, remember, sizes_of
from .problem import AttentionProblem
from .query import GraphLimits, Query
from .reasons import Code, Reason, Stage, worth_telling
from .target import DeviceTarget

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
MEASURED = Code(
    "core.measured-slower",
    Stage.PREFERENCE,
    "was measured slower on this device than {limit}",
    meaning="`attn tune` found another candidate to be faster for such a batch.",
)
CODES = (PINNED, NOT_REQUESTED, MEASURED, RAISED)


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
        measured: Measurements of this machine that changed the choice, in the order they did.
    """

    candidate: str
    backend: Backend = field(compare=False)
    path: Path = field(compare=False)
    refused: tuple[Reason, ...]
    requested: str
    measured: tuple[Finding, ...] = ()

    @property
    def fallback_reason(self) -> str | None:
        """Why a better-ranked backend was passed over, on one line; None when none was.

        Causes nobody can act on (a backend for another device) do not count; ``refused`` has them.
        """
        told = [str(reason) for reason in worth_telling(self.refused, self.candidate)]
        return "; ".join(told) if told else None

    def __str__(self) -> str:
        why = self.fallback_reason
        return self.candidate if why is None else f"{self.candidate}, since {why}"


@dataclass(slots=True)
class Screened:
    """The batch-independent half of a decision for one (device, problem, capture).

    Attributes:
        prepared: Candidates that said they are ready.
        settled: The decision, once it has been made without asking anything that depends on the batch.
        settled_at: Those that depend on it by its sizes alone, since measurements took part and no rule did.
    """

    target: DeviceTarget
    problem: AttentionProblem
    graph: GraphLimits | None
    requested: str
    candidates: tuple[Candidate, ...]
    prefer: bool
    measured: tuple[Pair, ...] = ()
    prepared: set[str] = field(default_factory=set)
    settled: RouteDecision | None = None
    settled_at: dict[Sizes, RouteDecision] = field(default_factory=dict)


def screen(
    target: DeviceTarget,
    problem: AttentionProblem,
    backends: Sequence[Backend],
    *,
    graph: GraphLimits | None = None,
    requested: str = AUTO,
    pinned: str | None = None,
    measured: Measured = NOTHING,
) -> Screened:
    """Run the stages that do not look at a batch, for every candidate.

    Args:
        target: Device to decide for; it need not be here.
        problem: What is asked.
        backends: Owners of the candidates, most preferred first.
        graph: Capacities when the call will be captured.
        requested: ``auto``, a backend, or a candidate ``backend/path``.
        pinned: Candidate of a captured graph; nothing else may be chosen.
        measured: What was measured on this machine; speaks only where the choice is ours.

    Raises:
        NoRoute: ``requested`` names nothing that is installed.
    """
    check_requested(requested, backends, (f"{b.name}/{p.name}" for b in backends for p in b.paths))
    found = []
    for backend in backends:
        # One that was not asked for is not asked either: its faults are no concern of this call.
        asked_for = requested == AUTO or requested.split("/")[0] == backend.name
        missing = unavailable(backend, target, ours=requested == AUTO) if asked_for else None
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
    pairs = measured.about(target, problem) if prefer else ()
    return Screened(target, problem, graph, requested, tuple(found), prefer, pairs)


def check_requested(requested: str, backends: Sequence[Backend], candidates: Iterable[str]) -> None:
    """Raise NoRoute where a request names neither a backend nor a candidate."""
    owners = [b.name for b in backends]
    if requested not in (AUTO, *owners, *candidates):
        names = ", ".join([AUTO, *owners])
        raise NoRoute(f"backend: needs one of {names}, got {requested!r} [core.backend-name]", ())


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
    said = rules.ask(candidate.rules, query, candidate.name)
    if not said:
        return ()
    wrong = tuple(r for r in said if r.code.stage is not Stage.PREFERENCE)
    return _quieted(candidate.path, wrong or (said if prefer else ()))


def _prepare(screened: Screened, candidate: Candidate) -> tuple[Reason, ...]:
    ask = partial(candidate.backend.prepare, screened.target, screened.problem, candidate.path.name)
    return _quieted(candidate.path, unready(ask, candidate.name, screened.prepared, ours=screened.prefer))


def choose(screened: Screened, query: Query, *, passed: Iterable[Reason] = ()) -> RouteDecision:
    """Return the first candidate that nothing speaks against, or one that was measured to be faster than it.

    A measurement of this machine overrules the order of the backends and every PREFERENCE reason, which
    are guesses about this device; it never overrules what a candidate cannot do.

    Args:
        screened: Result of :func:`screen` for the query's device, problem and capture.
        query: The complete question.
        passed: Reasons found after an earlier choice (a plan that raised Unsupported); their
            candidates are skipped.

    Raises:
        NoRoute: Every candidate was refused; holds all reasons.
    """
    if screened.settled is not None and not passed:
        return screened.settled
    extra = tuple(passed)
    if screened.settled_at and not extra and (known := screened.settled_at.get(sizes_of(query))):
        return known
    lasting = not extra
    refused: list[Reason] = []
    for candidate in screened.candidates:
        reasons = candidate.refusals or tuple(r for r in extra if r.candidate == candidate.name)
        if not reasons and candidate.rules:
            reasons, lasting = _dynamic(candidate, query, prefer=screened.prefer), False
        if not reasons and candidate.name not in screened.prepared:
            reasons = _prepare(screened, candidate)
            lasting = lasting and not reasons
        if not reasons:
            if screened.measured:
                return _overruled(screened, query, candidate, refused, extra, lasting=lasting)
            decision = RouteDecision(
                candidate.name, candidate.backend, candidate.path, tuple(refused), screened.requested
            )
            if lasting:
                screened.settled = decision
            return decision
        refused.extend(reasons)
    raise no_route(screened.requested, query.problem.op.value, refused)


def no_route(requested: str, op: str, refused: Sequence[Reason]) -> NoRoute:
    """Return the error for a call that every candidate was refused for."""
    relevant = [r for r in refused if r.code not in (PINNED, NOT_REQUESTED)] or refused
    return NoRoute(f"backend: no candidate of {requested!r} can serve {op}:", relevant)


def _overruled(
    screened: Screened,
    query: Query,
    first: Candidate,
    refused: list[Reason],
    passed: tuple[Reason, ...],
    *,
    lasting: bool,
) -> RouteDecision:
    """Return the decision for ``first``, or for what was measured to be faster, kept if ``lasting``."""

    def against(candidate: Candidate) -> tuple[Reason, ...]:
        said = tuple(r for r in passed if r.candidate == candidate.name)
        return said if said or candidate.name in screened.prepared else _prepare(screened, candidate)

    chosen, findings, failed = _fastest(screened, query, first, against)
    met = refused
    if findings or failed:
        beaten = [Reason(MEASURED, f.slower, f.faster, f.where) for f in findings]
        place = {candidate.name: at for at, candidate in enumerate(screened.candidates)}
        # In the order of the candidates; what comes behind the chosen one was not passed over.
        met = [r for r in (*refused, *beaten, *failed) if place[r.candidate] < place[chosen.name]]
        met.sort(key=lambda reason: place[reason.candidate])
    decision = RouteDecision(
        chosen.name, chosen.backend, chosen.path, tuple(dict.fromkeys(met)), screened.requested, findings
    )
    if lasting and not failed and not any(c.rules for c in screened.candidates):
        remember(screened.settled_at, sizes_of(query), decision)
    return decision


def _fastest(
    screened: Screened,
    query: Query,
    first: Candidate,
    against: Callable[[Candidate], tuple[Reason, ...]],
) -> tuple[Candidate, tuple[Finding, ...], tuple[Reason, ...]]:
    """Follow measurements from candidate to faster candidate; no candidate is left twice.

    Returns:
        The last candidate, the findings that led there, and why faster ones could not be taken.
    """
    able = {c.name: c for c in screened.candidates if not c.refusals}
    chosen, left = first, {first.name}
    findings: list[Finding] = []
    failed: list[Reason] = []
    moved = True
    while moved:
        moved = False
        for finding in (pair.judge(query) for pair in screened.measured if chosen.name in pair.candidates):
            if finding is None or finding.faster in left or finding.faster not in able:
                continue
            candidate = able[finding.faster]
            left.add(candidate.name)
            said = _dynamic(candidate, query, prefer=False) or against(candidate)
            if said:
                failed.extend(said)
                continue
            chosen, moved = candidate, True
            findings.append(finding)
            break
    return chosen, tuple(findings), tuple(failed)


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
    return first_to_serve(
        lambda passed: choose(screened, query, passed=passed), attempt, ours=screened.prefer
    )


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
    against = [c.refusals or _dynamic(c, query, prefer=screened.prefer) for c in screened.candidates]
    pairs = list(zip(screened.candidates, against, strict=True))
    chosen = next((candidate for candidate, reasons in pairs if not reasons), None)
    beaten: dict[str, Reason] = {}
    if chosen is not None and screened.measured:
        chosen, findings, _ = _fastest(screened, query, chosen, lambda candidate: ())
        beaten = {f.slower: Reason(MEASURED, f.slower, f.faster, f.where) for f in findings}
    verdicts = []
    for candidate, reasons in pairs:
        if candidate is chosen:
            verdicts.append(Verdict(candidate.name, True, ()))
        else:
            more = (beaten[candidate.name],) if candidate.name in beaten else ()
            verdicts.append(Verdict(candidate.name, False, (*reasons, *more)))
    return tuple(verdicts)
