"""The seam for torch.compile: a traced run() goes to whoever registered as the tracer, eager never does.

attn-core defines no operator. A package that does (attn-compile) returns a :class:`Tracer` from the
``attn_tracer`` hook; it is found with the backends, when the first wrapper is planned.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.compiler import is_dynamo_compiling

from .errors import needs
from .op_table import OpRow

if TYPE_CHECKING:
    from .planner import Planner
    from .state import PlanState
    from .wrapper import AttentionWrapper

Scale = float | torch.Tensor | None
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

_wrappers: weakref.WeakValueDictionary[int, Planner] = weakref.WeakValueDictionary()
_handles = itertools.count()
_tracer: Tracer | None = None
_absent = "no package provides it; install attn-compile"


class Tracer(Protocol):
    """Turns traced calls into opaque operators."""

    def add(self, rows: Sequence[OpRow], source: str) -> None:
        """Take over the declarations of one package; called at discovery.

        Raises:
            ValueError: A row cannot be exact; names operator, argument and fix. None of the rows is taken.
        """

    def call(self, name: str, *args: Any) -> Any:
        """Emit the operators of the free function ``name``; called while Dynamo traces."""

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
        plan: torch.Tensor | None,
    ) -> Result:
        """Emit the operator; called while Dynamo traces. ``wrapper(handle)`` is what it shall run.

        ``plan`` is what the traced ``plan()`` returned, or None for the plan in force.
        """


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


def plan_in_force(wrapper: Planner) -> PlanState:
    """Return what the wrapper's last plan() made.

    Raises:
        ValueError: There was none.
    """
    return wrapper._planned()


def run_plan(
    wrapper: AttentionWrapper,
    plan: PlanState | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    return_lse: bool,
    scales: tuple[Scale, Scale, Scale],
) -> Result:
    """Run a plan of a wrapper, None for the one in force; by the backend's own way if that takes the call."""
    found = wrapper._run_direct(q, (k, v), out, lse, return_lse, *scales, plan)
    return wrapper._run(q, k, v, out, lse, return_lse, *scales, plan) if found is None else found


def install(tracer: Tracer | None, absent: str | None = None) -> None:
    """Set the tracer, or why there is none (for the message of a traced call)."""
    global _tracer, _absent
    _tracer = tracer
    if absent is not None:
        _absent = absent


def state() -> Tracer | str:
    """Return the tracer, or why there is none."""
    return _absent if _tracer is None else _tracer


def tracer(what: str = "run()") -> Tracer:
    """Return the tracer.

    Raises:
        RuntimeError: There is none; says why.
    """
    if _tracer is None:
        raise RuntimeError(needs(f"torch.compile of {what}", "a registered operator", _absent, "core.tracer"))
    return _tracer


def _discover() -> bool:
    """Find the packages. Dynamo calls this while it traces, and does not look inside."""
    from . import plugins

    plugins.registry()
    return True


# What torch.compiler.assume_constant_result does, less the import of all of torch._dynamo.
_discover._dynamo_marked_constant = True  # type: ignore[attr-defined]


def refuse_plan(what: str) -> None:
    """Raise for a plan() that is traced and cannot be an operator."""
    want, got = "a call outside the compiled region", "one inside it"
    raise ValueError(needs(f"{what}: plan() under torch.compile", want, got, "core.traced-plan"))


def refuse_traced_plan(wrapper: object) -> None:
    """Raise ValueError where a plan() that cannot be an operator is traced; its first line."""
    if is_dynamo_compiling():
        refuse_plan(type(wrapper).__name__)


def call(name: str, *args: Any) -> Any:
    """Trace a free function: its operators take the place of its body.

    A public function begins with ``if is_dynamo_compiling(): return tracing.call(name, ...)``.

    Raises:
        RuntimeError: No package registers operators; says why.
    """
    _discover()
    return tracer(name).call(name, *args)
