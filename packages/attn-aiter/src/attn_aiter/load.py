"""The one place that imports aiter: late, guarded, once.

``import aiter`` may raise RuntimeError (no ROCm), SystemExit (a compilation failed) or ImportError (built for
another torch), and it puts its own folders, with modules of everyday names, in front of ``sys.path``.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

STRICT_VARIABLE = "ATTN_AITER_STRICT"
_KEPT = 200

_lock = threading.RLock()
_verdicts: dict[tuple[str, str], Callable[..., Any] | str] = {}


class Failed(RuntimeError):
    """A module did not import or a kernel did not build; the message is one line."""


def strict() -> bool:
    """Whether ``ATTN_AITER_STRICT`` asks for an exception where auto would quietly pass a path over."""
    return os.environ.get(STRICT_VARIABLE, "").strip().lower() in ("1", "true", "yes", "on")


def one_line(err: BaseException) -> str:
    """Return an exception as one line of bounded length."""
    text = " ".join(f"{type(err).__name__}: {err}".split())
    return text if len(text) <= _KEPT else text[: _KEPT - 3] + "..."


def function(module: str, name: str) -> Callable[..., Any]:
    """Import ``aiter``, then a function of one of its modules. The verdict is kept, good or bad.

    May take seconds and compile the first time; must not be called during graph capture or from run().

    Args:
        module: Dotted name; ``csrc...`` modules become importable with aiter.
        name: Function in it.

    Raises:
        Failed: The import raised, tried to end the process, or has no such function.
        KeyboardInterrupt: The user's.
    """
    with _lock:
        found = _verdicts.get((module, name))
        if found is None:
            found = _verdicts[module, name] = _import(module, name)
    if isinstance(found, str):
        raise Failed(found)
    return found


def forget() -> None:
    """Forget all verdicts (for tests)."""
    with _lock:
        _verdicts.clear()


def _import(module: str, name: str) -> Callable[..., Any] | str:
    before = list(sys.path)
    try:
        importlib.import_module("aiter")
        found = getattr(importlib.import_module(module), name)
    except (KeyboardInterrupt, torch.OutOfMemoryError):
        sys.path[:] = before
        raise
    except BaseException as err:  # SystemExit too: a failed build must not take the process with it
        sys.path[:] = before
        return one_line(err)
    _demote(before)
    if not callable(found):
        return f"{module}.{name} is not callable"
    loaded: Callable[..., Any] = found
    return loaded


def _demote(before: list[str]) -> None:
    """Move what the import put in front of ``sys.path`` to its end.

    AITER still finds its own modules there; ``utils`` or ``hipify`` of the user are no longer shadowed.
    """
    added = [entry for entry in sys.path if entry not in before]
    sys.path[:] = [*before, *added]
