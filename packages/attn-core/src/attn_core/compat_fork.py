"""What programs ask upstream's AMD fork before they name a backend, answered for the device in question."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from . import attempts, plugins
from .target import DeviceTarget, target_of

_AITER = "aiter"


def is_aiter_supported(device: torch.device | str | int | None = None) -> bool:
    """Say whether the backend of that name is installed and serves the device.

    Args:
        device: The device, by default the current GPU.
    """
    return not capability_reason(device, "", _AITER)


def capability_available(device: torch.device | str | int | None, op: str, backend: str) -> bool:
    """Say whether a backend is installed and serves the device; which calls it takes, plan() says.

    Args:
        device: The device.
        op: Not looked at: what a backend lacks of an operator depends on the call, see ``attn explain``.
        backend: Its name.
    """
    return not capability_reason(device, op, backend)


def capability_reason(device: torch.device | str | int | None, op: str, backend: str) -> str:
    """Return why a backend cannot be used on the device, on one line; "" where it can.

    Args:
        device: The device.
        op: Not looked at.
        backend: Its name.
    """
    found = next((b for b in plugins.registry().backends if b.name == backend), None)
    if found is None:
        return f"{backend}: no backend of that name is installed"
    target = _target(device)
    if target is None:
        return f"{backend}: torch has no device {device}"
    reason = attempts.unavailable(found, target)
    return "" if reason is None else str(reason)


def device_arch(device: torch.device | str | int | None = None) -> str | None:
    """Return the name of a device's architecture, None of a device that is not here."""
    target = _target(device)
    return None if target is None else target.arch


def gpus() -> tuple[int, ...]:
    """Return the indices of the GPUs that torch sees."""
    return tuple(range(torch.cuda.device_count()))


def rocm_archs() -> list[str]:
    """Return the AMD architectures that installed packages know."""
    return [target.arch for target in plugins.registry().targets if target.kind == "hip"]


def rocm_home() -> str:
    """Return where ROCm is said to be."""
    return os.environ.get("ROCM_PATH") or os.environ.get("ROCM_HOME") or "/opt/rocm"


def _target(device: torch.device | str | int | None) -> DeviceTarget | None:
    try:
        return target_of(torch.device("cuda" if device is None else device))
    except (AssertionError, RuntimeError):  # torch's, of a GPU that is not there
        return None


def _nothing(*args: object, **kwargs: object) -> None:
    return None


FORK: dict[str, Any] = {
    # Cached there, and so they can be asked to forget.
    "_aiter_native_page_sizes": cache(frozenset[int]),
    "_aiter_native_paging_available": cache(lambda *args, **kwargs: False),
    "_aiter_ops_importable": cache(lambda: find_spec(_AITER) is not None),
    "_device_arch": device_arch,
    "_aiter_importable": cache(lambda: find_spec(_AITER) is not None),
    "aiter_softcap_defect_arch": _nothing,
    "capability_available": capability_available,
    "capability_reason": capability_reason,
    "check_torch_rocm_compatibility": _nothing,  # any torch will do
    "get_available_gpu_count": lambda: len(gpus()),
    "get_physical_card_device_indices": gpus,
    "get_rocm_home": rocm_home,
    "get_supported_device_indices": gpus,
    "is_aiter_available": lambda device=None, op="": is_aiter_supported(device),
    "is_aiter_supported": is_aiter_supported,
}
"""The fork's names. What it decides by page size or cap before a call, plan() decides here."""
VALUES: dict[str, Callable[[], object]] = {
    "FLASHINFER_SUPPORTED_ROCM_ARCHS": rocm_archs,
    "HAS_AITER": lambda: find_spec(_AITER) is not None,
    "IS_CUDA": lambda: torch.version.cuda is not None,
    "IS_HIP": lambda: torch.version.hip is not None,
}
"""Its names of what is found out when it is asked for."""
CASCADE: dict[str, Any] = {"_HIP_FUSED_CASCADE": False}
"""Switches that the fork has in a module of upstream's; there is one way to merge here."""
PARTS: dict[str, str | None] = {
    "aiter_utils": None, "decode_rocm": "decode", "device_utils": None, "hip_utils": None,
    "mla_rocm": "mla", "prefill_rocm": "prefill", "rocm": None, "rocm.aiter_utils": None,
    "rocm.arch_caps": None, "rocm.decode": "decode", "rocm.device_utils": None, "rocm.hip_utils": None,
    "rocm.mla": "mla", "rocm.prefill": "prefill",
}  # fmt: skip
"""The fork's modules, and those here that hold the rest of their names."""


def lookup(own: Callable[[str], object] | None) -> Callable[[str], object]:
    """Return what looks a name of one of those modules up."""

    def find(wanted: str) -> object:
        if wanted in VALUES:
            return VALUES[wanted]()
        return FORK[wanted] if own is None or wanted in FORK else own(wanted)

    return find
