"""The device a decision is made for. It is an argument, so it may be one that is not here."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from .errors import needs


@dataclass(frozen=True, slots=True)
class DeviceTarget:
    """What routing and planning may know about a device.

    Attributes:
        kind: ``cpu``, ``cuda``, ``hip``, or another torch device type.
        arch: ``cpu``, ``sm_90``, ``gfx942`` and so on.
        num_cus: Compute units (streaming multiprocessors); 0 when unknown.
        wave_size: Lanes of a wave; 0 when unknown.
        index: Ordinal of the device.
    """

    kind: str
    arch: str
    num_cus: int = 0
    wave_size: int = 0
    index: int = 0

    @property
    def device(self) -> torch.device:
        """Torch's name of it."""
        if self.kind == "cpu":
            return torch.device("cpu")
        return torch.device("cuda" if self.kind == "hip" else self.kind, self.index)

    def __str__(self) -> str:
        return self.arch if self.kind == "cpu" else f"{self.kind}:{self.index} ({self.arch})"


def target_of(device: torch.device) -> DeviceTarget:
    """Describe a device of this machine. May initialise the GPU runtime; never called on import."""
    if device.type == "cpu":
        return DeviceTarget("cpu", "cpu", os.cpu_count() or 1, 1)
    if device.type != "cuda":
        return DeviceTarget(device.type, device.type, index=device.index or 0)
    return _gpu(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache(maxsize=64)
def _gpu(index: int) -> DeviceTarget:
    # Keyed by ordinal: two unlike cards in one machine must not share an answer.
    props = torch.cuda.get_device_properties(index)
    cus, wave = int(props.multi_processor_count), int(getattr(props, "warp_size", 0))
    if torch.version.hip:
        return DeviceTarget("hip", str(props.gcnArchName).split(":")[0], cus, wave or 64, index)
    return DeviceTarget("cuda", f"sm_{props.major}{props.minor}", cus, wave or 32, index)


def parse_target(arch: str, known: Iterable[DeviceTarget] = ()) -> DeviceTarget:
    """Make a target from an arch name, on any machine.

    Args:
        arch: ``cpu``, ``sm_90``, ``gfx942`` ...; ``gfx942:304`` also states the compute units.
        known: Targets described by installed packages; they supply counts that are not stated.

    Raises:
        ValueError: The name follows no known pattern.
    """
    name, _, cus = arch.strip().lower().partition(":")
    stated = _count(arch, cus)
    for target in known:
        if target.arch == name:
            return replace(target, num_cus=stated or target.num_cus)
    if name == "cpu":
        return DeviceTarget("cpu", "cpu", stated or os.cpu_count() or 1, 1)
    if name.startswith("gfx") and len(name) > 5:
        return DeviceTarget("hip", name, stated, 64 if name.startswith("gfx9") else 32)
    if name.startswith("sm_") and name[3:].rstrip("a").isdigit():
        return DeviceTarget("cuda", name, stated, 32)
    raise ValueError(needs("arch", "'cpu', 'gfx...' or 'sm_...'", repr(arch), "core.arch-name"))


def _count(arch: str, text: str) -> int:
    if not text:
        return 0
    if not text.isdigit() or int(text) < 1:
        raise ValueError(
            needs("arch", "a positive compute unit count after ':'", repr(arch), "core.arch-name")
        )
    return int(text)
