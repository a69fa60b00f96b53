"""Compilers of device code: which there are, and which targets each of them knows.

For AMD any clang of LLVM 19 or newer will do, and none of them needs HIP's headers or libraries: the command
line is one that ROCm's own ``amdclang++`` takes too.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .build import BuildError, NoCompiler, stamp

AMD_VARIABLE, NVIDIA_VARIABLE = "ATTN_HIP_CXX", "ATTN_NVCC"
ARCHS = ("gfx942", "gfx950", "sm_90")
"""Devices that the kernels are written for."""
AMD_FLAGS = (
    "-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpulib", "-nogpuinc", "-std=c++17",
    "-O3", "-mcode-object-version=5",
)  # fmt: skip
NVIDIA_FEATURES = "a"
"""Code of an NVIDIA arch may use what no later arch keeps: products of four warps at once."""
NVIDIA_FLAGS = ("-x", "cu", "-std=c++17", "-O3", "-cubin", "--resource-usage")
ZIG = "ziglang"
_CLANGS = tuple(f"clang-{version}" for version in range(26, 18, -1))
_ROCM = "/opt/rocm"
_TIMEOUT_S = 60.0
_HIP_VERSION = re.compile(r"clang version .*")


def is_amd(arch: str) -> bool:
    """Say whether an arch is AMD's."""
    return arch.startswith("gfx")


@dataclass(frozen=True, slots=True)
class DeviceCompiler:
    """A compiler of device code.

    Attributes:
        name: Short name, the value of ``attn build --compiler``.
        command: Program and leading arguments.
        version: One line of what ``--version`` says.
    """

    name: str
    command: tuple[str, ...]
    version: str

    def arguments(self, arch: str) -> tuple[str, ...]:
        """Return the command up to the defines; ``-o OUT IN`` completes it."""
        if is_amd(arch):
            return (*self.command, f"--offload-arch={arch}", *AMD_FLAGS)
        return (*self.command, f"-arch={arch}{NVIDIA_FEATURES}", *NVIDIA_FLAGS)

    def environment(self, work: Path) -> dict[str, str]:
        """Return the environment of a compilation in ``work``, where a helper may be put.

        HIP mode links with a program called ``lld``; the ``ziglang`` package has it under another name.
        """
        env = {**os.environ, "LC_ALL": "C", "HIP_PLATFORM": "amd"}
        env.pop("LD_PRELOAD", None)  # a sanitizer in this process is no concern of the compiler
        if self.name == ZIG:
            helper = work / "bin" / "lld"
            helper.parent.mkdir(exist_ok=True)
            helper.write_text(
                f'#!/bin/sh\nshift 2\nexec {shlex.quote(sys.executable)} -m ziglang ld.lld "$@"\n'
            )
            helper.chmod(0o755)
            env["PATH"] = f"{helper.parent}{os.pathsep}{env.get('PATH', os.defpath)}"
        return env


def wanted(arch: str) -> str:
    """Say which compilers are looked for."""
    if stated(arch):
        return f"{_variable(arch)}={os.environ[_variable(arch)]} to compile for {arch}"
    if is_amd(arch):
        return f"a compiler for {arch} (amdclang++, hipcc, clang-19 or newer, or the ziglang package)"
    return f"a compiler for {arch} (nvcc)"


def stated(arch: str) -> bool:
    """Say whether the user has named the compiler of an arch."""
    return bool(os.environ.get(_variable(arch)))


def _variable(arch: str) -> str:
    return AMD_VARIABLE if is_amd(arch) else NVIDIA_VARIABLE


def commands(arch: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return names and commands of the compilers on this machine, most preferred first; runs no program.

    One that the user names is the only one.
    """
    given = shlex.split(os.environ.get(_variable(arch), ""))
    if given:
        found = shutil.which(given[0])
        return [(Path(given[0]).name, (found, *given[1:]))] if found else []
    places = _amd_places() if is_amd(arch) else _nvidia_places()
    made: list[tuple[str, tuple[str, ...]]] = [
        (Path(place).name, (found,)) for place in places if (found := shutil.which(place))
    ]
    if is_amd(arch) and importlib.util.find_spec(ZIG) is not None:
        made.append((ZIG, (sys.executable, "-m", ZIG, "clang")))
    return list(dict(made).items())


def _amd_places() -> list[str]:
    rocm = os.environ.get("ROCM_PATH") or os.environ.get("ROCM_HOME") or _ROCM
    return [f"{rocm}/bin/amdclang++", "amdclang++", f"{rocm}/bin/hipcc", *_CLANGS]


def _nvidia_places() -> list[str]:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    return ["nvcc", *(f"{home}/bin/nvcc" for home in homes if home)]


def compilers(arch: str) -> list[DeviceCompiler]:
    """Return the compilers that can build for an arch, most preferred first. Runs each briefly, once."""
    found = (_asked(name, command, stamp(command[0]), arch) for name, command in commands(arch))
    return [compiler for compiler in found if compiler is not None]


def find(arch: str, name: str | None = None) -> DeviceCompiler:
    """Return the compiler to use.

    Args:
        arch: Target.
        name: Name of one of :func:`compilers`; by default the first.

    Raises:
        NoCompiler: There is none, or none of that name.
    """
    able = compilers(arch)
    for compiler in able:
        if name in (None, compiler.name):
            return compiler
    if name is not None and able:
        raise NoCompiler(f"one of {', '.join(c.name for c in able)} for {arch}", name)
    here = [found for found, _ in commands(arch)]
    raise NoCompiler(wanted(arch), f"{', '.join(here)}, which cannot" if here else "none")


@lru_cache(maxsize=64)
def _asked(name: str, command: tuple[str, ...], stamp: tuple[int, int], arch: str) -> DeviceCompiler | None:
    """Return the compiler if it answers and knows the target."""
    try:
        said = _run([*command, "--version"])
        if is_amd(arch):
            # An old clang answers for gfx950 that there is no such target.
            _run([*command, "-x", "hip", f"--offload-arch={arch}", "--cuda-device-only", "-nogpulib",
                  "-nogpuinc", "-fsyntax-only", os.devnull])  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    told = next(
        (line for line in lines if "release" in line or _HIP_VERSION.search(line)), "".join(lines[:1])
    )
    return DeviceCompiler(name, command, told)


def _run(command: list[str]) -> str:
    env = {**os.environ, "LC_ALL": "C", "HIP_PLATFORM": "amd"}
    ran = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, env=env, timeout=_TIMEOUT_S, check=True
    )
    return ran.stdout.decode(errors="replace")


__all__ = [
    "ARCHS",
    "BuildError",
    "DeviceCompiler",
    "NoCompiler",
    "commands",
    "compilers",
    "find",
    "is_amd",
    "wanted",
]
