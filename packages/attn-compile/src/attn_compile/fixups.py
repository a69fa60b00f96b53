"""Repairs of torch: each small, installed only where the defect is present, switched off by one variable.

They touch Inductor, whose import takes seconds, so they are installed when a region is first traced and not
before. None changes what a program means: one supplies a missing lowering, two correct where torch puts
memory.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from attn_core.errors import needs

from .schema import NAMESPACE

SWITCH = "ATTN_COMPILE_NO_FIXUPS"
WAITS = "installed when a region is first compiled"
_state: dict[str, str] = {}


def install() -> Mapping[str, str]:
    """Install what this torch lacks, once; return what became of each repair.

    Values: ``installed``, ``not needed`` (torch has it), ``off`` (the switch), or ``failed: why``.
    """
    if not _state:
        _state.update({name: _guarded(repair) for name, repair in REPAIRS.items()})
    return dict(_state)


def state() -> Mapping[str, str]:
    """Return what :func:`install` did, or that it waits; imports nothing."""
    if _state:
        return dict(_state)
    return dict.fromkeys(REPAIRS, "off" if os.environ.get(SWITCH) == "1" else WAITS)


def _guarded(repair: Callable[[], bool]) -> str:
    if os.environ.get(SWITCH) == "1":
        return "off"
    try:
        return "installed" if repair() else "not needed"
    except Exception as err:  # private parts of another torch: the guard then refuses what this would repair
        fault = f"failed: {type(err).__name__}: {' '.join(str(err).split())}"
        text = needs("attn-compile", "a torch that it can repair", fault, "compile.no-repair")
        warnings.warn(f"{text}; some regions will raise, none compute wrongly for it", stacklevel=2)
        return fault


def _sym_storage_offset() -> bool:
    """Give ``aten.sym_storage_offset`` a lowering: the number that tracing found.

    Without one, Inductor falls back to calling it on a tensor rebuilt at offset 0, and every view of a
    written argument that it rebuilds under symbolic shapes lands at the start of its allocation (pytorch
    198068).
    """
    import torch
    from torch._inductor import lowering
    from torch._inductor.virtualized import V

    op = torch.ops.aten.sym_storage_offset.default
    if has_lowering():
        return False

    def sym_storage_offset(tensor: object) -> object:
        value = V.graph.current_node.meta["val"]
        return value.node.expr if isinstance(value, torch.SymInt) else int(value)

    lowering.register_lowering(op)(sym_storage_offset)
    return True


def has_lowering() -> bool:
    """Whether Inductor knows ``aten.sym_storage_offset``, by itself or through this module."""
    lowering = sys.modules.get("torch._inductor.lowering")
    if lowering is None:
        return False
    import torch

    found = lowering.lowerings.get(torch.ops.aten.sym_storage_offset.default)
    return found is not None and not getattr(found, "_is_fallback_handler", False)


def _scatter_in_place() -> bool:
    """Let a plain write to part of a cache that our operators use as well be done in place.

    Inductor writes in place where both sides lie in memory anyway, and rewrites the whole tensor where it
    hopes to fuse. It does not know that an argument of an opaque operator always lies in memory, so one page
    set to zero beside an append copied the cache. Whether writing in place is allowed is still its decision:
    this is the question of whether it is worth it.
    """
    from dataclasses import replace

    from torch._inductor.fx_passes import reinplace

    table, scatter = reinplace.inplaceable_ops, reinplace._generalized_scatter
    given = table[scatter]

    def worth_it(node: Any) -> bool:
        return given.extra_check(node) or _ours(node.args[0]) or any(map(_ours, node.users))

    table[scatter] = replace(given, extra_check=worth_it)
    return True


def _ours(node: Any) -> bool:
    """Whether a node of a graph is one of our operators, still wrapped up or not, or a result of one."""
    import operator

    if node.target is operator.getitem:
        node = node.args[0]
    inner = node.args[0] if "functionalized" in str(node.target) and node.args else node.target
    return str(getattr(inner, "namespace", "")) == NAMESPACE


def _base_of_inputs() -> bool:
    from . import synthetic_base

    synthetic_base.install()
    return True


REPAIRS: Mapping[str, Callable[[], bool]] = {
    "sym_storage_offset lowering": _sym_storage_offset,
    "scatter in place": _scatter_in_place,
    "base of written inputs": _base_of_inputs,
}
