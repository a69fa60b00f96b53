"""The GPU's driver as this process has it: loads code objects, finds kernels, says what went wrong.

For ROCm this is the libamdhip64 that torch has loaded, found in the process's memory map: a second copy of
the library would not know torch's streams. ``ATTN_HIP_RUNTIME`` names another. For NVIDIA it is libcuda.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

RUNTIME_VARIABLE = "ATTN_HIP_RUNTIME"
Kind = Literal["hip", "cuda"]
_MAPS = Path("/proc/self/maps")
_CUDA_LIBRARY, _HIP_LIBRARY = "libcuda.so.1", "libamdhip64.so"
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SHARED_WITHOUT_ASKING = 48 << 10

_HIP = {
    "load": "hipModuleLoadData", "function": "hipModuleGetFunction", "launch": "hipModuleLaunchKernel",
    "get_current": "hipGetDevice", "set_current": "hipSetDevice", "error": "hipGetErrorString",
}  # fmt: skip
_CUDA = {
    "load": "cuModuleLoadData", "function": "cuModuleGetFunction", "launch": "cuLaunchKernel",
    "get_current": "cuCtxGetCurrent", "set_current": "cuCtxSetCurrent", "error": "cuGetErrorString",
    "init": "cuInit", "device": "cuDeviceGet", "retain": "cuDevicePrimaryCtxRetain",
    "set_attribute": "cuFuncSetAttribute", "version": "cuDriverGetVersion",
}  # fmt: skip
_LAUNCH_EARLY = "cuLaunchKernelEx"
_CAPTURES_EARLY = 12030
"""CUDA version of the first driver that captures kernels that start early."""


class DriverError(Exception):
    """The driver is not there, or refused a call; the text is the driver's own."""


@dataclass(frozen=True, slots=True)
class Function:
    """A kernel on one device.

    Attributes:
        handle: The driver's handle.
        image: The code object, kept for as long as the handle.
    """

    handle: int
    image: bytes


class Driver:
    """One driver library.

    Args:
        kind: ``hip`` or ``cuda``.

    Raises:
        DriverError: The library or one of its functions is not there.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.path = library(kind)
        try:
            self._lib = ctypes.CDLL(self.path)
        except OSError as err:
            raise DriverError(f"{self.path}: {err}") from err
        self._calls = {role: self._symbol(name) for role, name in (_HIP if kind == "hip" else _CUDA).items()}
        self._owners: dict[int, int] = {}
        self._lock = threading.Lock()
        if kind == "cuda":
            self._check("cuInit", self._calls["init"](0))
        else:
            self._calls["error"].restype = ctypes.c_char_p

    def _symbol(self, name: str) -> Any:
        try:
            return getattr(self._lib, name)
        except AttributeError:
            raise DriverError(f"{self.path} has no function {name}") from None

    def addresses(self) -> Mapping[str, int]:
        """Return the addresses that native code calls: launch, get_current, set_current.

        ``launch_after`` launches a kernel that may start before the one ahead of it is done; 0 where the
        driver has no such launch, or none that a graph can capture.
        """
        roles = ("launch", "get_current", "set_current")
        calls = {role: self._calls[role] for role in roles}
        if self._starts_early():
            calls["launch_after"] = self._symbol(_LAUNCH_EARLY)
        at = {role: ctypes.cast(call, ctypes.c_void_p).value or 0 for role, call in calls.items()}
        return {"launch_after": 0, **at}

    def _starts_early(self) -> bool:
        if self.kind == "hip" or not hasattr(self._lib, _LAUNCH_EARLY):
            return False
        version = ctypes.c_int()
        self._check("cuDriverGetVersion", self._calls["version"](ctypes.byref(version)))
        return version.value >= _CAPTURES_EARLY

    def owner(self, ordinal: int) -> int:
        """Return what makes a device current: its primary context for CUDA, its ordinal for HIP.

        Raises:
            DriverError: There is no such device.
        """
        if self.kind == "hip":
            return ordinal
        with self._lock:
            if ordinal not in self._owners:
                device, context = ctypes.c_int(), ctypes.c_void_p()
                self._check("cuDeviceGet", self._calls["device"](ctypes.byref(device), ordinal))
                self._check("cuDevicePrimaryCtxRetain", self._calls["retain"](ctypes.byref(context), device))
                self._owners[ordinal] = context.value or 0
            return self._owners[ordinal]

    def load(self, ordinal: int, image: bytes, entry: str, lds: int = 0) -> Function:
        """Load a code object on a device and find its kernel. Not for the time of a graph capture.

        Args:
            ordinal: Device.
            image: The code object.
            entry: Name of the kernel.
            lds: Dynamic shared memory that launches will ask for, bytes.

        Raises:
            DriverError: The driver refuses it, for example since it is for another device.
        """
        before = self._enter(ordinal)
        try:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            call = self._calls["load"]
            self._check(call.__name__, call(ctypes.byref(module), image))
            call = self._calls["function"]
            self._check(f"{call.__name__}({entry})", call(ctypes.byref(function), module, entry.encode()))
            if lds > _SHARED_WITHOUT_ASKING and self.kind == "cuda":
                self._check(
                    "cuFuncSetAttribute", self._calls["set_attribute"](function, _MAX_DYNAMIC_SHARED, lds)
                )
        finally:
            self._leave(before)
        return Function(function.value or 0, image)

    def _enter(self, ordinal: int) -> Any:
        """Make a device current; returns what was."""
        before: Any = ctypes.c_int() if self.kind == "hip" else ctypes.c_void_p()
        self._check("the current device", self._calls["get_current"](ctypes.byref(before)))
        owner = self.owner(ordinal)
        value = ctypes.c_int(owner) if self.kind == "hip" else ctypes.c_void_p(owner)
        self._check(f"device {ordinal}", self._calls["set_current"](value))
        return before

    def _leave(self, before: Any) -> None:
        self._calls["set_current"](before)

    def error_text(self, code: int) -> str:
        """Return the driver's words for an error code."""
        if self.kind == "hip":
            said = self._calls["error"](code)
        else:
            text = ctypes.c_char_p()
            said = None if self._calls["error"](code, ctypes.byref(text)) else text.value
        return f"{said.decode(errors='replace')} ({code})" if said else f"error {code}"

    def _check(self, what: str, code: int) -> None:
        if code:
            raise DriverError(f"{what}: {self.error_text(code)}")


def library(kind: Kind) -> str:
    """Return the path or name of the driver library to use.

    Raises:
        DriverError: No libamdhip64 is loaded, so torch has no ROCm.
    """
    if kind == "cuda":
        return _CUDA_LIBRARY
    stated = os.environ.get(RUNTIME_VARIABLE)
    if stated:
        return stated
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as err:
        raise DriverError(f"{_MAPS}: {err}") from err
    for line in lines:
        path = line.partition("/")
        if path[1] and Path(path[2]).name.startswith(_HIP_LIBRARY):
            return "/" + path[2]
    raise DriverError(f"{_HIP_LIBRARY} is not loaded in this process; {RUNTIME_VARIABLE} names another")


_kept: dict[tuple[Kind, str], Driver] = {}
_kept_lock = threading.Lock()


def driver(kind: Kind) -> Driver:
    """Return the driver of a kind of GPU; opened once per library.

    Raises:
        DriverError: As for :class:`Driver`.
    """
    key = (kind, library(kind))
    with _kept_lock:
        if key not in _kept:
            _kept[key] = Driver(kind)
        return _kept[key]
