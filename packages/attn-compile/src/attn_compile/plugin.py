"""What attn-core finds: the tracer, or why there is none."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from attn_core.backend import Backend
from attn_core.hookspecs import hookimpl
from attn_core.tracing import Tracer

SWITCH = "ATTN_COMPILE"
FORKS_SWITCH = "FLASHINFER_USE_TORCH_CUSTOM_OPS"
"""That of FlashInfer's AMD fork; off by default there, here only where it says so."""
_OFF = ("0", "false", "no", "off")


@hookimpl
def attn_backends(api_version: int, config: Mapping[str, Mapping[str, object]]) -> Sequence[Backend]:
    """Return no backend: this package is about those of others."""
    return ()


@hookimpl
def attn_tracer() -> Tracer | str:
    """Return the operators, unless ``ATTN_COMPILE=0`` or the fork's switch switches them off."""
    for switch in (SWITCH, FORKS_SWITCH):
        if os.environ.get(switch, "").lower() in _OFF:
            return f"{switch}={os.environ[switch]} switches attn-compile off: custom ops are not enabled"
    from .ops import OpTracer

    return OpTracer()
