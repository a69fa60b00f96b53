"""A GPU made of the interpreter: the product's own plan, parameters and native launch, up to the driver.

The driver that native code calls is a function here. It takes the kernel's one argument as the hardware would
get it and runs the compiled instructions over the tensors that were registered.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from attn_core.target import DeviceTarget
from attn_hip import build, toolchain
from attn_hip.gpu import Loaded
from attn_hip.variants import Variant

from .isa import Counts, Memory, Program, launch

BUILDS = "ATTN_TEST_BUILDS"
"""Names the folder where the workers of a test run leave what they have compiled."""
CSRC = Path(build.__file__).parent / "csrc"
LLVM19, LLVM22 = "clang-19", toolchain.ZIG
TARGETS = (("gfx942", LLVM19), ("gfx942", LLVM22), ("gfx950", LLVM22))
"""Archs with the compilers that know them."""
COMPUTE_UNITS = {"gfx942": 304, "gfx950": 256}
_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_size_t, *[ctypes.c_uint] * 7, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t
)
_GET = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))
_SET = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)


def has(arch: str, compiler: str) -> bool:
    """Say whether a compiler is here."""
    return any(found.name == compiler for found in toolchain.compilers(arch))


@dataclass(frozen=True)
class Made:
    """What one run of a compiler left.

    Attributes:
        code: The code object.
        text: The same as text.
        seconds: Of one core.
    """

    code: bytes
    text: str
    seconds: float


@lru_cache(maxsize=512)
def made(variant: Variant, arch: str, compiler: str, sources: Path = CSRC) -> Made:
    """Return what a variant compiles to; the first worker that asks compiles it."""
    found = toolchain.find(arch, compiler)
    files = sorted(path for path in sources.iterdir() if path.is_file())
    said = "\0".join((variant.name, arch, compiler, *(path.read_text() for path in files)))
    place = Path(os.environ[BUILDS]) / hashlib.sha256(said.encode()).hexdigest()
    with (place.with_suffix(".lock")).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.is_dir():
            work = place.with_suffix(".new")
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            _compile(found, variant, arch, sources, work)
            work.rename(place)
    (text,) = place.glob("*.s")
    seconds = float((place / "seconds").read_text())
    return Made((place / "kernel.co").read_bytes(), text.read_text(), seconds)


def _compile(
    compiler: toolchain.DeviceCompiler, variant: Variant, arch: str, sources: Path, work: Path
) -> None:
    """Compile as the product does, keeping the assembly that the code object is made of."""
    out = work / "kernel.co"
    command = [
        *compiler.arguments(arch), "-save-temps=obj", *(f"-D{d}" for d in variant.defines), "-o", str(out),
        variant.source,
    ]  # fmt: skip
    with (work / "log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=sources, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env=compiler.environment(work),
        )  # fmt: skip
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, (work / "log").read_text()
    for left in work.iterdir():
        if left.suffix not in (".s", ".co"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    (work / "seconds").write_text(f"{used.ru_utime + used.ru_stime:.2f}")


@lru_cache(maxsize=512)
def program(variant: Variant, arch: str, compiler: str, sources: Path = CSRC) -> Program:
    """Return a variant as a program."""
    return Program.parse(made(variant, arch, compiler, sources).text, variant.entry)


class Device:
    """An AMD GPU, as the product sees one.

    Args:
        native: The host module.
        arch: Processor.
        compiler: Who compiles its kernels.
        sources: Folder of the sources.

    Attributes:
        target: As routing and planning know it.
        launched: Names and counts of the launches so far.
        profile: Whether bank conflicts are counted.
    """

    def __init__(self, native: Any, arch: str, compiler: str, sources: Path = CSRC) -> None:
        self.native, self.arch, self.compiler, self.sources = native, arch, compiler, sources
        self.target = DeviceTarget("hip", arch, COMPUTE_UNITS[arch], 64)
        self.launched: list[tuple[str, Counts]] = []
        self.profile = False
        self._variants: list[Variant] = []
        self._loaded: dict[str, Loaded] = {}
        self._memory = Memory()
        self._failed: BaseException | None = None
        self._doors = _LAUNCH(self._launch), _GET(self._get_current), _SET(lambda ordinal: 0)
        at = [ctypes.cast(door, ctypes.c_void_p).value or 0 for door in self._doors]
        self.native_driver = native.GpuDriver(*at, True, 0)

    def get(self, target: DeviceTarget, variant: Variant) -> Loaded:
        """Return a kernel, as :meth:`attn_hip.gpu.Gpu.get` does."""
        if variant.name not in self._loaded:
            self._variants.append(variant)
            function = self.native.GpuFunction(len(self._variants), variant.threads, variant.lds)
            words = SimpleNamespace(error_text=lambda code: f"fault {code}")
            made = Loaded(variant, words, self.native_driver, function, None)  # type: ignore[arg-type]
            self._loaded[variant.name] = made
        return self._loaded[variant.name]

    def register(self, readable: Mapping[str, torch.Tensor], writable: Mapping[str, torch.Tensor]) -> None:
        """Let kernels touch these tensors and nothing else."""
        self._memory = Memory()
        for group, write in ((readable, False), (writable, True)):
            for name, tensor in group.items():
                storage = tensor.untyped_storage()
                whole = tensor.is_contiguous()
                at = tensor.data_ptr() if whole else storage.data_ptr()
                self._memory.add(name, at, tensor.nbytes if whole else storage.nbytes(), writable=write)

    def run(self, variant: Variant, blocks: int, argument: bytes) -> Counts:
        """Launch a kernel without native code."""
        found = program(variant, self.arch, self.compiler, self.sources)
        counts = launch(
            found, (blocks, 1, 1), variant.threads, argument, self._memory,
            shared_bytes=variant.lds, profile=self.profile,
        )  # fmt: skip
        self.launched.append((variant.name, counts))
        return counts

    def check(self) -> None:
        """Raise what went wrong in a launch that native code made."""
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def _get_current(self, ordinal: Any) -> int:
        ordinal[0] = 0
        return 0

    def _launch(
        self, handle: int, x: int, y: int, z: int, threads: int, _y: int, _z: int, lds: int, stream: int,
        arguments: int, extra: int,
    ) -> int:  # fmt: skip
        try:
            variant = self._variants[handle - 1]
            assert (y, z, _y, _z, threads, lds) == (1, 1, 1, 1, variant.threads, variant.lds)
            size = program(variant, self.arch, self.compiler, self.sources).argument_bytes
            first = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))[0]
            assert first is not None
            self.run(variant, x, ctypes.string_at(first, size))
        except BaseException as err:  # cannot pass through native code
            self._failed = err
            return 1
        return 0
