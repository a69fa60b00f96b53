"""The seam for torch.compile: a traced run() goes to whoever registered as the tracer, eager never does.

attn-core defines no operator. A package that does (attn-compile) returns a :class:`Tracer` from the
``attn_tracer`` hook; it is found with the backends, when the first wrapper is planned.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Protocol

import torch

from .errors import needs

if TYPE_CHECKING:
    from .planner import Planner

Scale = float | torch.Tensor | None
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

_wrappers: weakref.WeakValueDictionary[int, Planner] = weakref.WeakValueDictionary()
_handles = itertools.count()
_tracer: Tracer | None = None
_absent = "no package provides it; install attn-compile"


class Tracer(Protocol):
    """Turns a traced run() into one opaque operator."""

    def run(
        self,
        handle: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        o_dtype: torch.dtype,
        scales: tuple[Scale, Scale, Scale],
    ) -> Result:
        """Emit the operator; called while Dynamo traces. ``wrapper(handle)`` is what it shall run."""


def register(wrapper: Planner) -> int:
    """Return a number that stands for a wrapper in a graph, as long as the wrapper lives."""
    handle = next(_handles)
    _wrappers[handle] = wrapper
    return handle


def wrapper(handle: int) -> Planner:
    """Return the wrapper a number stands for.

    Raises:
        RuntimeError: It is gone: a compiled function outlived the wrapper it was traced with.
    """
    found = _wrappers.get(handle)
    if found is None:
        raise RuntimeError(
            needs("compiled run()", "the wrapper it was traced with", "none", "core.trace-handle")
        )
    return found


def install(tracer: Tracer | None, absent: str | None = None) -> None:
    """Set the tracer, or why there is none (for the message of a traced call)."""
    global _tracer, _absent
    _tracer = tracer
    if absent is not None:
        _absent = absent


def tracer() -> Tracer:
    """Return the tracer.

    Raises:
        RuntimeError: There is none; says why.
    """
    if _tracer is None:
        raise RuntimeError(needs("torch.compile of run()", "a registered operator", _absent, "core.tracer"))
    return _tracer
