"""``attn fuzz``: random sessions with the backends of this machine."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch

from .. import plugins
from ..backend import Backend
from ..errors import needs
from ..target import target_of
from ..testing.fuzz import Tally, sessions
from ..testing.kit import CPU, Failure
from .output import told

Say = Callable[[str], object]


def fuzz(
    names: tuple[str, ...], seconds: float, seed: int, session: int | None, say: Say | None
) -> dict[str, Any]:
    """Test backends one after another; returns what was done and found, as JSON can hold it.

    Args:
        names: Backends; all that can run here if empty.
        seconds: Per backend.
        seed: Of all sessions.
        session: Only this one.
        say: Prints a line as soon as there is one to print.

    Raises:
        ValueError: No backend has that name, or it cannot run here.
    """
    torch.set_num_threads(1)  # small batches: more threads mostly wait for each other
    return {
        "seed": seed,
        "backends": [_one(backend, seconds, seed, session, say) for backend in _chosen(names)],
    }


def _chosen(names: tuple[str, ...]) -> list[Backend]:
    known = {backend.name: backend for backend in plugins.registry().backends}
    missing = [name for name in names if name not in known]
    if missing:
        raise ValueError(needs("--backend", f"one of {', '.join(known)}", missing[0], "cli.fuzz"))
    refused = {name: _why_not(backend) for name, backend in known.items()}
    for name in names:
        if refused[name] is not None:
            raise ValueError(needs("--backend", "a backend that can run here", refused[name], "cli.fuzz"))
    return [backend for name, backend in known.items() if name in names or (not names and not refused[name])]


def _why_not(backend: Backend) -> str | None:
    target = _target(backend)
    if not any(p.capability.archs is None or target.arch in p.capability.archs for p in backend.paths):
        return f"{backend.name}, which has no path for {target.arch}"
    found = backend.unavailable(target)
    return None if found is None else str(found)


def _target(backend: Backend) -> Any:
    if torch.cuda.is_available():
        gpu = target_of(torch.device("cuda", torch.cuda.current_device()))
        if any(p.capability.archs is not None and gpu.arch in p.capability.archs for p in backend.paths):
            return gpu
    return CPU


def _one(backend: Backend, seconds: float, seed: int, session: int | None, say: Say | None) -> dict[str, Any]:
    tally, failures = Tally(), []
    if say:
        what = f"{seconds:g} s" if session is None else f"session {session}"
        say(f"{backend.name}: seed {seed}, {what}")
    bounds: dict[str, Any] = {"seconds": seconds} if session is None else {"first": session, "count": 1}
    for failure in sessions(backend, _target(backend), seed=seed, tally=tally, **bounds):
        failures.append({"case": failure.case, "error": told(failure.error)})
        if say:
            _tell(failure, say, whole=session is not None)
    if say:
        ops = ", ".join(f"{op} {count}" for op, count in sorted(tally.by_op.items()))
        say(f"  {tally.sessions} sessions ({ops})")
        say(f"  {tally.right} right calls compared, {tally.wrong} wrong ones refused")
        say(f"  {len(failures)} failures")
    return {
        "backend": backend.name, "sessions": tally.sessions, "by_op": dict(tally.by_op),
        "right": tally.right, "wrong": tally.wrong, "failures": failures,
    }  # fmt: skip


def _tell(failure: Failure, say: Say, *, whole: bool) -> None:
    say(f"  {failure.case}")
    if whole:
        say("".join(traceback.format_exception(failure.error)))
    else:
        say(f"    {told(failure.error)}")
