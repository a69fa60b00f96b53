"""Placement guard: no operator of the table reads or writes where the program did not say.

While Inductor lowers one of our operators, the guard compares where Inductor put each tensor argument with
what the traced program says. It changes no generated code and nothing outside our own
operators: it passes, or raises :class:`MisplacedArgument`; :class:`CacheCopy` for a copy of a whole argument.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from typing import Any

import torch

from attn_core.errors import needs
from attn_core.op_table import OpRow

from . import fixups
from .schema import written

SWITCH = "ATTN_COMPILE_NO_GUARD"
ADVICE = (
    "pass the cache as allocated (one tensor, a CacheView, or views made outside the compiled region)"
    " and write to it with attn-core's functions only inside the region"
)
stats: Counter[str] = Counter()
"""``checked`` arguments; for tests."""
_fault: str | None = None
_armed = False
_waiting: list[tuple[Any, OpRow]] = []


class MisplacedArgument(RuntimeError):
    """torch would write an argument somewhere else than the program says, or through a copy of it."""


class CacheCopy(MisplacedArgument):
    """torch would copy a whole argument on every call instead of writing in place."""


def state() -> str:
    """Return ``on``, ``off`` or ``failed: why``."""
    return _fault or ("off" if os.environ.get(SWITCH) == "1" else "on")


def watch(op: Any, row: OpRow) -> None:
    """Guard an operator from the first traced region on; at once, where that has been."""
    _waiting.append((op, row))
    if _armed:
        arm()


def arm() -> bool:
    """Install the repairs of torch and the guarding lowerings. Dynamo calls this while it traces."""
    global _armed
    _armed = True
    if _waiting:
        fixups.install()
        while _waiting:
            _try_install(*_waiting.pop())
    return True


# Dynamo then calls it, and does not look inside; see attn_core.tracing.
arm._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _try_install(op: Any, row: OpRow) -> None:
    global _fault
    if state() != "on":
        return
    try:
        _install(op, row)
    except Exception as err:  # private parts of another torch
        _fault = f"failed: {type(err).__name__}: {' '.join(str(err).split())}"
        text = needs("attn-compile", "a torch whose lowerings it can guard", _fault, "compile.no-guard")
        warnings.warn(f"{text}; compiled results are not checked", stacklevel=2)


def _install(op: Any, row: OpRow) -> None:
    from torch._inductor import lowering
    from torch._inductor.virtualized import V

    fallback = lowering.fallback_handler(op, add_to_fallback_set=False)  # type: ignore[no-untyped-call]

    writes = written(row)

    def lower(*args: Any, **kwargs: Any) -> Any:
        node = V.graph.current_node
        for at, fx in enumerate(node.args):
            if isinstance(fx, torch.fx.Node) and isinstance(fx.meta.get("val"), torch.Tensor):
                stats["checked"] += 1
                _check(f"{row.base}.{row.args[at].name}", fx, args[at], at in writes)
        return fallback(*args, **kwargs)

    lowering.register_lowering(op, type_promotion_kind=None)(lower)


def _check(what: str, fx: torch.fx.Node, placed: Any, writes: bool) -> None:
    """Compare one argument's place in the traced program with its place in Inductor's."""
    source, dtype_view = _source(fx)
    if source.op == "placeholder":
        _check_input(what, fx, source, dtype_view, placed, writes)
    elif source.op == "get_attr":
        return
    elif source.target is torch.ops.aten.clone.default:
        _check_copy(what, fx, source, writes, dtype_view)
    else:
        if source is not fx:
            _check_derived(what, source, dtype_view)
        if writes:
            _check_stored_back(what, fx, source)


def _source(fx: torch.fx.Node) -> tuple[torch.fx.Node, bool]:
    """Follow views to what they are views of; say whether one of them changes the dtype."""
    dtype_view = False
    while _is_view(fx):
        dtype_view = dtype_view or fx.target is torch.ops.aten.view.dtype
        parent = fx.args[0]
        assert isinstance(parent, torch.fx.Node)
        fx = parent
    return fx, dtype_view


def _is_view(node: torch.fx.Node) -> bool:
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or not node.args:
        return False
    arguments = target._schema.arguments
    alias = arguments[0].alias_info if arguments else None
    return alias is not None and not alias.is_write and isinstance(node.args[0], torch.fx.Node)


def _check_input(
    what: str, fx: torch.fx.Node, source: torch.fx.Node, dtype_view: bool, placed: Any, writes: bool
) -> None:
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    placed.realize()
    storage, layout = ir.as_storage_and_layout(placed) if ir.is_storage_and_layout(placed) else (None, None)
    base = source.meta["val"]
    if dtype_view:
        if _expr(base.storage_offset()) != 0 or layout is None:
            want = "a view that keeps the dtype, of an input at a nonzero storage offset"
            raise _misplaced(what, want, "a dtype view made in the graph, whose offset torch counts twice")
        return
    if storage is None or layout is None or storage.get_name() != source.target:
        if not writes:
            return  # a copy that Inductor made, for its strides say
        got = "a buffer of its own" if storage is None else str(storage.get_name())
        raise _misplaced(what, f"the memory of graph input {source.target}", got)
    want_at = _simple(_expr(fx.meta["val"].storage_offset()) - _expr(base.storage_offset()))
    have_at = _simple(layout.offset)
    if want_at != have_at and not V.graph.sizevars.statically_known_equals(want_at, have_at):
        raise _misplaced(what, f"element {want_at} of graph input {source.target}", have_at)


def _check_copy(what: str, fx: torch.fx.Node, copy: torch.fx.Node, writes: bool, dtype_view: bool) -> None:
    parent = copy.args[0]
    assert isinstance(parent, torch.fx.Node)
    origin, below = _source(parent)
    if below and origin.op == "placeholder" and _expr(origin.meta["val"].storage_offset()) != 0:
        raise _misplaced(what, "a view that keeps the dtype", "a copy of a dtype view made in the graph")
    if not writes:
        return
    symbolic = not _expr(fx.meta["val"].storage_offset()).is_number
    if dtype_view or (symbolic and not fixups.has_lowering()):
        raise _misplaced(what, "the caller's memory", "a copy that this torch puts at the wrong offset")
    _check_stored_back(what, fx, origin)


def _check_stored_back(what: str, fx: torch.fx.Node, node: torch.fx.Node) -> None:
    """Raise where what is written is a copy of a graph input that becomes the input again at the end."""
    root = _root(node)
    copy_ = torch.ops.aten.copy_.default
    if root.op == "placeholder" and any(u.target is copy_ and u.args[0] is root for u in root.users):
        shape = tuple(fx.meta["val"].shape)
        text = needs(
            what, "to be written in place", f"a copy of all of {shape} per call", "compile.cache-copy"
        )
        raise CacheCopy(f"{text}; {ADVICE}")


def _root(node: torch.fx.Node) -> torch.fx.Node:
    """Follow views and whole copies with a part replaced to what they began as."""
    while node.op == "call_function" and ("scatter" in str(node.target) or _is_view(node)):
        parent = node.args[0]
        if not isinstance(parent, torch.fx.Node):
            break
        node = parent
    return node


def _check_derived(what: str, source: torch.fx.Node, dtype_view: bool) -> None:
    """A view of something the graph computed: a cache it also writes with plain torch operators, say."""
    root = _root(source)
    at = root.meta["val"].storage_offset() if root.op == "placeholder" else 0
    if dtype_view or not (isinstance(at, int) and at == 0):
        got = f"a slice of one that {source} writes, at a storage offset torch counts twice"
        raise _misplaced(what, "a cache that the graph writes with attn-core's functions only", got)


def _misplaced(what: str, want: str, got: object) -> MisplacedArgument:
    return MisplacedArgument(f"{needs(what, want, got, 'compile.misplaced')}; {ADVICE}")


def _expr(value: Any) -> Any:
    import sympy  # type: ignore[import-untyped]

    return value.node.expr if isinstance(value, torch.SymInt) else sympy.Integer(value)


def _simple(value: Any) -> Any:
    import sympy

    return sympy.expand(sympy.sympify(value))
