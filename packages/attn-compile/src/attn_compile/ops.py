"""The traced side of attn-core."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from attn_core import tracing
from attn_core.op_table import OpRow

from . import defects, fixups, guard
from .calls import CALLS, handed_over, split_scales
from .plans import PLANS
from .registry import register
from .rows import ROWS
from .schema import clash, fits

OWN = "attn-core"


class OpTracer:
    """Turns traced calls of attn-core, and of packages that brought rows, into operators."""

    def __init__(self) -> None:
        self._sources: dict[str, str] = {}
        self._ops: dict[str, Callable[..., Any]] = {}
        self._calls: dict[str, Callable[..., Any]] = {}
        self.add((*ROWS, *PLANS), OWN)
        self._calls.update({name: partial(call, self._ops) for name, call in CALLS.items()})

    def add(self, rows: Sequence[OpRow], source: str) -> None:
        """Register the operators of one package; all of them or none.

        Raises:
            ValueError: A row cannot be exact, or its name is taken; names operator, argument and fix.
        """
        fits(rows)
        seen = dict(self._sources)
        for row in rows:
            if row.base in seen:
                raise clash(row, source, seen[row.base])
            seen[row.base] = source
        for row in rows:
            self._ops[row.base] = self._calls[row.base] = register(row).call
        self._sources = seen

    def call(self, name: str, *args: Any) -> Any:
        """Emit the operators of the free function ``name``."""
        guard.arm()
        return self._calls[name](*args)

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
        scales: tuple[tracing.Scale, tracing.Scale, tracing.Scale],
        plan: torch.Tensor | None,
    ) -> tracing.Result:
        """Emit one run. A caller's ``out`` or ``lse`` is filled by ``copy_`` afterwards."""
        guard.arm()
        args = (handle, q, k, v, *split_scales(scales), o_dtype, return_lse)
        found = self._ops["run"](*args) if plan is None else self._ops["run_planned"](plan, *args)
        result: tracing.Result = handed_over(found, return_lse, out, lse)
        return result

    def doctor(self, probe: bool) -> dict[str, object]:
        """Return rows for ``attn doctor``; with ``probe`` ten cells of the matrix are compiled."""
        probed = _probe() if probe else {}
        return {
            "operators": len(self._ops),
            "placement guard": guard.state(),
            **fixups.state(),
            "defects of this torch": ", ".join(defect.name for defect in defects.present()),
            **probed,
        }


def _probe() -> dict[str, object]:
    from .testing import matrix

    found = {cell: matrix.run(cell) for cell in matrix.probe()}
    count = Counter(outcome.verdict for outcome in found.values())
    bad = {f"probe {cell}": f"{o.verdict}: {o.detail}" for cell, o in found.items() if not o.good}
    return {"probe": ", ".join(f"{n} {verdict}" for verdict, n in sorted(count.items())), **bad}
