"""Which method of a backend an error came out of."""

from __future__ import annotations

import traceback

from ..backend import Backend


def blame(error: BaseException, backend: Backend) -> None:
    """Add a note with the outermost method of ``backend`` that ``error`` went through, if there is one."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_locals.get("self") is backend:
            error.add_note(f"raised in {backend.name}: {frame.f_code.co_name}()")
            return
