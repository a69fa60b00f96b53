"""What routing does when a candidate finds late that it cannot serve: look further, if that is its choice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from .backend import Backend
from .errors import Unsupported
from .reasons import Code, Reason, Stage
from .target import DeviceTarget

RAISED = Code(
    "core.unavailable-raised",
    Stage.AVAILABILITY,
    "needs an unavailable() that returns None or a Reason, got {limit}",
    meaning="The backend fails when it is asked whether it can be used: a broken plugin.",
)


class Choice(Protocol):
    """What a choice says of itself."""

    @property
    def candidate(self) -> str:
        """``backend/path``."""


Chosen = TypeVar("Chosen", bound=Choice)
Served = TypeVar("Served")


def unavailable(backend: Backend, target: DeviceTarget, *, ours: bool = True) -> Reason | None:
    """Return why a backend cannot be used on a device; one that cannot even say it cannot be used.

    Args:
        backend: The backend.
        target: The device.
        ours: Whether the choice is ours, so that Unsupported is a reason to look further.
    """
    try:
        found: object = backend.unavailable(target)
    except Unsupported as late:
        if not ours:
            raise
        return late.reason
    except (Exception, SystemExit) as err:  # what it loads may give up on a machine it does not know
        return Reason(RAISED, backend.name, f"{type(err).__name__}: {err}")
    if found is None or isinstance(found, Reason):
        return found
    return Reason(RAISED, backend.name, repr(found))


def unready(
    prepare: Callable[[], Reason | None], candidate: str, prepared: set[str], *, ours: bool
) -> tuple[Reason, ...]:
    """Have a candidate made ready; return why it is not.

    Args:
        prepare: Builds or loads what the candidate runs; may raise Unsupported.
        candidate: Its name.
        prepared: Names of those that are ready; gains this one.
        ours: Whether the choice is ours, so that Unsupported is a reason to look further.
    """
    try:
        reason = prepare()
    except Unsupported as late:
        if not ours:
            raise
        reason = late.reason
    if reason is None:
        prepared.add(candidate)
        return ()
    return (replace(reason, candidate=candidate),)


def first_to_serve(
    choose: Callable[[Sequence[Reason]], Chosen], attempt: Callable[[Chosen], Served], *, ours: bool
) -> tuple[Chosen, Served]:
    """Choose and try until one serves; what raised Unsupported is passed over if the choice is ours.

    Args:
        choose: Returns the next choice, given the reasons of those that could not serve after all.
        attempt: Does what was chosen; may raise Unsupported, having changed nothing.
        ours: Whether the choice is ours.

    Returns:
        The choice that held, and what ``attempt`` returned for it.
    """
    passed: list[Reason] = []
    while True:
        chosen = choose(passed)
        try:
            return chosen, attempt(chosen)
        except Unsupported as late:
            if not ours:
                raise
            passed.append(replace(late.reason, candidate=chosen.candidate))
