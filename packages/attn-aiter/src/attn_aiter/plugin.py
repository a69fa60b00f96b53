"""Entry point of group ``attn.backends``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attn_core.backend import Backend
from attn_core.hookspecs import hookimpl
from attn_core.target import DeviceTarget

from .backend import NAME, AiterBackend


@hookimpl
def attn_backends(api_version: int, config: Mapping[str, Mapping[str, object]]) -> Sequence[Backend]:
    """Return the one backend. Looks for the package amd-aiter; imports nothing of it."""
    return (AiterBackend(config.get(NAME)),)


@hookimpl
def attn_targets() -> Sequence[DeviceTarget]:
    """Return the Instinct devices this backend serves."""
    return (
        DeviceTarget("hip", "gfx942", 304, 64),  # MI300X, MI325X
        DeviceTarget("hip", "gfx950", 256, 64),  # MI350X, MI355X
    )
