"""``attn fuzz``: random sessions with the backends of this machine."""

from __future__ import annotations

import textwrap
import traceback
from collections.abc import Callable
from typing import Any

import torch

from .. import plugins
from ..attempts import unavailable
from ..backend import Backend
from ..errors import needs
from ..target import DeviceTarget, target_of
from ..testing.fuzz import Tally, sessions
from ..testing.kit import CPU, Failure
from .output import told
from .tune_grid import device_of

Say = Callable[[str], object]


def fuzz(
    names: tuple[str, ...],
    seconds: float,
    seed: int,
    session: int | None,
    say: Say | None,
    device: str | None = None,
) -> dict[str, Any]:
    """Test backends one after another; returns what was done and found, as JSON can hold it.

    Args:
        names: Backends; all that can run here if empty.
        seconds: Per backend.
        seed: Of all sessions.
        session: Only this one.
        say: Prints a line as soon as there is one to print.
        device: Where; if None each backend's GPU of this machine, else the CPU.

    Raises:
        ValueError: No backend has that name, or it cannot run there, or the device is not here.
    """
    where = None if device is None else _stated(device)
    torch.set_num_threads(1)  # small batches: more threads mostly wait for each other
    return {
        "seed": seed,
        "backends": [
            _one(backend, where or _target(backend), seconds, seed, session, say)
            for backend in _chosen(names, where)
        ],
    }


def _chosen(names: tuple[str, ...], where: DeviceTarget | None) -> list[Backend]:
    known = {backend.name: backend for backend in plugins.registry().backends}
    missing = [name for name in names if name not in known]
    if missing:
        raise ValueError(needs("--backend", f"one of {', '.join(known)}", missing[0], "cli.fuzz"))
    refused = {name: _why_not(backend, where or _target(backend)) for name, backend in known.items()}
    for name in names:
        if refused[name] is not None:
            raise ValueError(needs("--backend", "a backend that can run here", refused[name], "cli.fuzz"))
    return [backend for name, backend in known.items() if name in names or (not names and not refused[name])]


def _why_not(backend: Backend, target: DeviceTarget) -> str | None:
    if not any(p.capability.archs is None or target.arch in p.capability.archs for p in backend.paths):
        return f"{backend.name}, which has no path for {target.arch}"
    found = unavailable(backend, target)
    return None if found is None else str(found)


def _stated(device: str) -> DeviceTarget:
    found = device_of(device)
    return CPU if found.type == "cpu" else target_of(found)


def _target(backend: Backend) -> DeviceTarget:
    if torch.cuda.is_available():
        gpu = target_of(torch.device("cuda", torch.cuda.current_device()))
        if any(p.capability.archs is not None and gpu.arch in p.capability.archs for p in backend.paths):
            return gpu
    return CPU


def _one(
    backend: Backend, target: DeviceTarget, seconds: float, seed: int, session: int | None, say: Say | None
) -> dict[str, Any]:
    tally, failures = Tally(), []
    if say:
        what = f"{seconds:g} s" if session is None else f"session {session}"
        say(f"{backend.name}: seed {seed}, {what}{'' if target.kind == 'cpu' else f', on {target.arch}'}")
    bounds: dict[str, Any] = {"seconds": seconds} if session is None else {"first": session, "count": 1}
    for failure in sessions(backend, target, seed=seed, tally=tally, **bounds):
        failures.append({"case": failure.case, "error": told(failure.error)})
        if say:
            _tell(failure, say, whole=session is not None)
    if say:
        say(f"  {tally.sessions} sessions")
        ops = ", ".join(f"{op} {count}" for op, count in sorted(tally.by_op.items()))
        say(textwrap.fill(ops, 78, initial_indent=" " * 4, subsequent_indent=" " * 4))
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
