"""Instruction sets of the host CPU that the kernels are built for, and the choice between them."""

from __future__ import annotations

import os
import platform
from functools import lru_cache
from pathlib import Path

from attn_core.errors import needs

VARIABLE = "ATTN_CPU_ISA"
GENERIC = "generic"

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
FLAGS: dict[str, tuple[str, ...]] = {
    "avx512bf16": (*_AVX512, "-mavx512bf16"),
    "avx512": _AVX512,
    "avx2": _AVX2,
    GENERIC: (),
}
"""Compiler flags by name, the most capable first."""

_X86 = ("x86_64", "amd64")
_AMD = "AuthenticAMD"
_CPUINFO = Path("/proc/cpuinfo")
_KERNEL_NAMES = {"avx512bf16": "avx512_bf16"}
"""Where Linux spells a feature unlike the compiler."""


def known() -> tuple[str, ...]:
    """Return the names that this kind of machine can build, the most capable first."""
    return tuple(FLAGS) if platform.machine().lower() in _X86 else (GENERIC,)


@lru_cache(maxsize=1)
def supported() -> tuple[str, ...]:
    """Return the names that this CPU can run, the most capable first; never empty."""
    has = frozenset(cpu("flags").split())
    return tuple(name for name in known() if all(need in has for need in _needed(name)))


def preferred() -> str:
    """Return the fastest that this CPU can run.

    Only AMD's bfloat16 dot product is worth its rounding of the weights: where it was measured on an Intel
    CPU, avx512 was faster.
    """
    can = supported()
    return can[1] if can[0] == "avx512bf16" and cpu("vendor_id") != _AMD else can[0]


def cpu(field: str) -> str:
    """Return what Linux says about the first CPU under ``field``; empty where that cannot be read."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    pairs = (line.partition(":") for line in lines)
    return next((value.strip() for name, _, value in pairs if name.strip() == field), "")


def _needed(name: str) -> list[str]:
    stems = [flag.removeprefix("-m") for flag in FLAGS[name]]
    return [_KERNEL_NAMES.get(stem, stem) for stem in stems]


def chosen() -> str:
    """Return the instruction set to use: ``ATTN_CPU_ISA``, else that of :func:`preferred`.

    Raises:
        ValueError: The variable names an unknown set, or one that would crash here.
    """
    asked = os.environ.get(VARIABLE, "").strip().lower()
    if not asked:
        return preferred()
    if asked not in supported():
        raise ValueError(needs(VARIABLE, f"one of {', '.join(supported())} on this CPU", asked, "fa2.isa"))
    return asked
