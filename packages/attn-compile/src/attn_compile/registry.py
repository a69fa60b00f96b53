"""From a declaration to a registered operator and what a traced call of the function becomes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from attn_core.op_table import OpRow

from . import guard
from .schema import NAMESPACE, inputs, name, outs, schema, tags, updated, validate

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
_known: dict[str, Operator] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Operator:
    """One registered operator.

    Attributes:
        row: Its declaration.
        op: The torch operator.
        call: What a traced call of the function becomes: takes the row's arguments without the ``out`` ones,
            returns what the function returns.
    """

    row: OpRow
    op: Any
    call: Callable[..., Any]


def register(row: OpRow) -> Operator:
    """Register an operator; once per declaration and process.

    ``define`` and ``impl`` rather than ``torch.library.custom_op``, which costs ten times as much per call.

    Raises:
        ValueError: The row cannot be exact; see :func:`attn_compile.schema.validate`.
    """
    full = name(validate(row))
    found = _known.get(full)
    if found is not None:
        return found
    _LIBRARY.define(full + schema(row), tags=tags(row))  # type: ignore[no-untyped-call]
    _LIBRARY.impl(full, implementation(row), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{full}", fake(row), lib=_LIBRARY)
    op = getattr(getattr(torch.ops, NAMESPACE), full).default
    guard.watch(op, row)
    _known[full] = Operator(row, op, traced(row, op))
    return _known[full]


def operators() -> tuple[Operator, ...]:
    """Return all that were registered in this process."""
    return tuple(_known.values())


def implementation(row: OpRow) -> Callable[..., Any]:
    """Return what the operator does with real tensors."""
    if row.into:
        return row.kernel
    count, copies = len(inputs(row)), updated(row)

    def run(*args: Any) -> Any:
        given = list(args[:count])
        for at in copies:
            given[at] = given[at].clone()
        found = row.kernel(*given)
        results = found if isinstance(found, tuple) else () if found is None else (found,)
        if count == len(args):
            return _packed((*results[: row.returns], *(given[at] for at in copies)))
        for place, value in zip(args[count:], results, strict=False):
            place.copy_(value)
        return None

    return run


def fake(row: OpRow) -> Callable[..., Any]:
    """Return what the operator does with tensors that have no memory."""
    if outs(row) or row.fresh is None:
        return lambda *args: _packed(tuple(torch.empty_like(args[at]) for at in updated(row)))
    make, copies = row.fresh, updated(row)
    return lambda *args: _packed((*make(*args), *(torch.empty_like(args[at]) for at in copies)))


def traced(row: OpRow, op: Any) -> Callable[..., Any]:
    """Return what Dynamo traces in place of the function."""
    make, copies = row.fresh, updated(row)
    if outs(row):
        assert make is not None

        def filled(*args: Any) -> Any:
            # Fresh memory of the graph, never a view and never the caller's: the one form torch leaves alone.
            made = make(*args)
            op(*args, *made)
            return _packed(tuple(t for t in made if t is not None))

        return filled
    if copies:

        def copied(*args: Any) -> Any:
            found = op(*args)
            every = found if isinstance(found, tuple) else (found,)
            for at, value in zip(copies, every[row.returns :], strict=True):
                args[at].copy_(value)
            return _packed(every[: row.returns])

        return copied
    return op  # type: ignore[no-any-return]


def _packed(results: tuple[Any, ...]) -> Any:
    return None if not results else results[0] if len(results) == 1 else results
