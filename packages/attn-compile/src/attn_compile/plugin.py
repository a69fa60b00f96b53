"""What attn-core finds: the tracer, or why there is none."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from attn_core.backend import Backend
from attn_core.hookspecs import hookimpl
from attn_core.tracing import Tracer

SWITCH = "ATTN_COMPILE"
_OFF = ("0", "false", "no", "off")


@hookimpl
def attn_backends(api_version: int, config: Mapping[str, Mapping[str, object]]) -> Sequence[Backend]:
    """Return no backend: this package is about those of others."""
    return ()


@hookimpl
def attn_tracer() -> Tracer | str:
    """Return the operators, unless ``ATTN_COMPILE=0`` switches them off."""
    if os.environ.get(SWITCH, "").lower() in _OFF:
        return f"{SWITCH}={os.environ[SWITCH]} switches attn-compile off"
    from .ops import OpTracer

    return OpTracer()
