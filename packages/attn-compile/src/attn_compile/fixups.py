"""Repairs of torch: each small, installed only where the defect is present, switched off by one variable."""

from __future__ import annotations

import os
from collections.abc import Mapping

SWITCH = "ATTN_COMPILE_NO_FIXUPS"
_state: dict[str, str] = {}


def install() -> Mapping[str, str]:
    """Install what this torch lacks, once; return what became of each repair.

    Values: ``installed``, ``not needed`` (torch has it), ``off`` (the switch), or ``failed: why``.
    """
    if not _state:
        _state["sym_storage_offset"] = _guarded(_sym_storage_offset)
    return dict(_state)


def _guarded(repair: object) -> str:
    if os.environ.get(SWITCH) == "1":
        return "off"
    assert callable(repair)
    try:
        return "installed" if repair() else "not needed"
    except Exception as err:  # private parts of another torch: the guard then refuses what this would repair
        return f"failed: {type(err).__name__}: {' '.join(str(err).split())}"


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
    import torch
    from torch._inductor import lowering

    found = lowering.lowerings.get(torch.ops.aten.sym_storage_offset.default)
    return found is not None and not getattr(found, "_is_fallback_handler", False)
