"""pluggy hooks. Called at discovery only; never on the plan or run path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pluggy

from .backend import Backend
from .op_table import OpRow
from .target import DeviceTarget
from .tracing import Tracer

NAME = "attn"
hookspec = pluggy.HookspecMarker(NAME)
hookimpl = pluggy.HookimplMarker(NAME)


@hookspec
def attn_backends(api_version: int, config: Mapping[str, Mapping[str, object]]) -> Sequence[Backend]:
    """Return this package's backends. Called once per process.

    Must not import a GPU library, compile, or touch a device. An exception makes the package's
    backends unavailable and is shown by ``attn doctor``; the others work.

    Args:
        api_version: Version of the Backend contract this core speaks.
        config: Options by backend name, from ``attn_core.configure`` and the ``ATTN_CONFIG`` file.
    """
    return ()


@hookspec
def attn_targets() -> Sequence[DeviceTarget]:
    """Return devices this package knows by arch name, so that they can be asked about anywhere."""
    return ()


@hookspec(firstresult=True)
def attn_order(names: Sequence[str]) -> Sequence[str] | None:
    """Return the backend names in the order ``auto`` shall try them, or None for rank order.

    Names left out come after those given, in rank order; unknown names are ignored.
    """
    return None


@hookspec(firstresult=True)
def attn_tracer() -> Tracer | str | None:
    """Return what torch.compile shall see instead of run(), or why it shall not (a switch is off).

    Called once, when backends are discovered.
    """
    return None


@hookspec
def attn_op_table() -> Sequence[OpRow]:
    """Return declarations of this package's own operators, for torch.compile.

    Called once, when backends are discovered, where a package registers operators at all. A row that could
    not be exact makes the package's rows unavailable and is shown by ``attn doctor``.
    """
    return ()
