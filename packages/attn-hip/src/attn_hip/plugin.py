"""Entry point of group ``attn.backends``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attn_core.backend import Backend
from attn_core.hookspecs import hookimpl
from attn_core.target import DeviceTarget

from .backend import Fa2Backend


@hookimpl
def attn_backends(api_version: int, config: Mapping[str, Mapping[str, object]]) -> Sequence[Backend]:
    """Return the one backend. Compiles and loads nothing."""
    return (Fa2Backend(),)


@hookimpl
def attn_targets() -> Sequence[DeviceTarget]:
    """Return the NVIDIA device that the kernels are written for."""
    return (DeviceTarget("cuda", "sm_90", 132, 32),)
