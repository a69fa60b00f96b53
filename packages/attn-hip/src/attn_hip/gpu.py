"""The kernels of this machine's GPUs: built or found, loaded once per device, by plans and never by runs."""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch

from attn_core.problem import AttentionProblem, Op
from attn_core.reasons import Reason
from attn_core.target import DeviceTarget, target_of

from . import cache, codes, device_build, toolchain, variants
from .build import BuildError, NoCompiler
from .driver import RUNTIME_VARIABLE, Driver, DriverError, Function, Kind, driver
from .variants import Variant

LOGGER = logging.getLogger("attn_hip")
CANDIDATE = "fa2"
_KINDS: dict[str, Kind] = {"hip": "hip", "cuda": "cuda"}
_Slot = tuple[str, int, str]  # kind of driver, ordinal, variant


@dataclass(frozen=True, slots=True)
class Loaded:
    """A kernel of one device, ready for native launches.

    Attributes:
        variant: Which.
        driver: Who loaded it.
        native_driver: The driver as native code takes it.
        native: The function as native code takes it.
    """

    variant: Variant
    driver: Driver
    native_driver: Any
    native: Any
    function: Function


class Gpu:
    """Loads kernels and remembers what failed, so that a broken build costs its time once."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._loaded: dict[_Slot, Loaded] = {}
        self._failed: dict[_Slot, Reason] = {}

    def unavailable(self, target: DeviceTarget) -> Reason | None:
        """Say why this machine's GPU cannot be served, or None; of a device elsewhere only the arch counts.

        A foreign target is answered for an installation that is complete.
        """
        if target.arch not in toolchain.ARCHS or target.kind not in _KINDS or not is_here(target):
            return None
        if any(slot[:2] == (target.kind, target.index) for slot in self._loaded):
            return None
        try:
            driver(_KINDS[target.kind])
        except DriverError as err:
            return Reason(codes.DRIVER, CANDIDATE, target.arch, err)
        wanted = device_build.missing(target.arch, all_variants(target.arch))
        return None if wanted is None else Reason(codes.DEVICE_COMPILER, CANDIDATE, wanted, "none")

    def prepare(self, native: Any, target: DeviceTarget, problem: AttentionProblem) -> Reason | None:
        """Load the kernels that plans of a problem may choose from; a failure is remembered.

        Args:
            native: The host module.
            target: A device of this machine.
            problem: What will be planned.
        """
        for variant in needed(target.arch, problem):
            failed = self.ready(native, target, variant)
            if failed is not None:
                return failed
        return None

    def ready(self, native: Any, target: DeviceTarget, variant: Variant) -> Reason | None:
        """Load one kernel; a failure is remembered. During graph capture nothing is loaded."""
        slot = _slot(target, variant)
        if slot in self._loaded:
            return None
        if _capturing():
            return Reason(codes.CAPTURE, CANDIDATE, variant.name)
        with self._lock:
            if slot not in self._loaded and slot not in self._failed:
                self._load(native, slot, target, variant)
            return self._failed.get(slot)

    def get(self, target: DeviceTarget, variant: Variant) -> Loaded:
        """Return a kernel that :meth:`prepare` has loaded.

        Raises:
            RuntimeError: It has not.
        """
        found = self._loaded.get(_slot(target, variant))
        if found is None:
            raise RuntimeError(
                f"attn_hip: needs prepare() before plan(), got none for {variant.name} [fa2.not-prepared]"
            )
        return found

    def forget(self) -> None:
        """Forget failures, so that the next plan tries again. What is loaded stays."""
        with self._lock:
            self._failed.clear()

    def _load(self, native: Any, slot: _Slot, target: DeviceTarget, variant: Variant) -> None:
        try:
            self._loaded[slot] = _load(native, target, variant)
        except NoCompiler as err:
            self._failed[slot] = Reason(
                codes.DEVICE_COMPILER, CANDIDATE, toolchain.wanted(target.arch), err.got
            )
        except BuildError as err:
            self._failed[slot] = Reason(codes.DEVICE_BUILD, CANDIDATE, target.arch, err)
        except cache.CacheError as err:
            self._failed[slot] = Reason(codes.CACHE, CANDIDATE, err.wanted, err.got)
        except DriverError as err:
            self._failed[slot] = Reason(codes.LOAD, CANDIDATE, target.arch, err)

    def state(self) -> dict[str, object]:
        """Return facts for ``attn doctor``."""
        rows: dict[str, object] = {}
        for arch in toolchain.ARCHS:
            made = all_variants(arch)
            built = sum(device_build.present(arch, made))
            names = ", ".join(name for name, _ in toolchain.commands(arch)) or "no compiler"
            rows[arch] = f"{built} of {len(made)} code objects; {names}"
        if self._failed:
            rows["gpu failures"] = "; ".join(sorted({reason.text for reason in self._failed.values()}))
        return rows


def all_variants(arch: str) -> tuple[Variant, ...]:
    """Return every kernel of an arch."""
    return (*variants.attend_variants(arch), *variants.misc_variants(arch).values())


def needed(arch: str, problem: AttentionProblem) -> tuple[Variant, ...]:
    """Return the kernels that plans of a problem may launch."""
    others = variants.misc_variants(arch)
    if problem.op is Op.APPEND:
        return (others["append"],)
    return (*variants.attend_choices(arch, problem), others["merge"])


def is_here(target: DeviceTarget) -> bool:
    """Say whether a target is a GPU of this machine, or a runtime was named that stands in for one."""
    if target.kind == "hip" and os.environ.get(RUNTIME_VARIABLE):
        return True
    built_for = torch.version.hip if target.kind == "hip" else torch.version.cuda
    if not built_for or not torch.cuda.is_available() or target.index >= torch.cuda.device_count():
        return False
    return target_of(torch.device("cuda", target.index)).arch == target.arch


def _capturing() -> bool:
    """Whether loading now would end a capture: drivers wait for the device to load code."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _slot(target: DeviceTarget, variant: Variant) -> _Slot:
    return target.kind, target.index, f"{target.arch}/{variant.name}"


def _load(native: Any, target: DeviceTarget, variant: Variant) -> Loaded:
    opened = driver(_KINDS[target.kind])
    start = time.monotonic()
    path = device_build.ensure(variant, target.arch)
    function = opened.load(target.index, path.read_bytes(), variant.entry, variant.lds)
    LOGGER.debug("%s for %s in %.2f s: %s", variant.name, target.arch, time.monotonic() - start, path)
    at = opened.addresses()
    return Loaded(
        variant,
        opened,
        native.GpuDriver(
            at["launch"],
            at["get_current"],
            at["set_current"],
            opened.kind == "hip",
            opened.owner(target.index),
            at["launch_after"],
        ),
        native.GpuFunction(function.handle, variant.threads, variant.lds),
        function,
    )
