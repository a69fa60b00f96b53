"""Make AITER's Triton modules importable without importing AITER, on a machine with no AMD GPU."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from attn_aiter import probe, rows
from attn_aiter.backend import AiterBackend

AMD_ONLY = ("waves_per_eu", "matrix_instr_nonkdim", "kpack")
"""Launch options other Triton backends do not know and refuse."""


def isolate(tree: Path, arch: str = "gfx942", compute_units: int = 304) -> None:
    """Put bare parent packages in place, without their ``__init__``, and answer what asks for a GPU."""
    for name in ("aiter", "aiter.ops", "aiter.ops.triton"):
        package = types.ModuleType(name)
        package.__path__ = [str(tree / name.replace(".", "/"))]
        sys.modules[name] = package
    answers: dict[str, dict[str, Any]] = {
        "aiter.ops.triton.utils._triton.arch_info": {
            "get_arch": lambda: arch, "get_device": lambda: "MI300X", "is_fp4_avail": lambda: False,
            "is_fp8_avail": lambda: True, "is_gluon_avail": lambda: False,
            "_LDS_CAP_BYTES": {"gfx942": 65536, "gfx950": 163840},
        },
        "aiter.ops.triton.utils.device_info": {
            "get_num_sms": lambda: compute_units, "get_num_xcds": lambda: 8,
        },
    }  # fmt: skip
    for name, values in answers.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        sys.modules[name] = module


def backend(tree: Path) -> AiterBackend:
    """Return the backend over the isolated modules; only the path ``unified`` can be loaded."""
    (info,) = tree.glob("amd_aiter-*.dist-info")
    release = info.name.removesuffix(".dist-info").removeprefix("amd_aiter-")
    options = {"assume_version": release, "min_version": "0.1.0"}
    made = AiterBackend(options, loader=lambda module, name: getattr(importlib.import_module(module), name))
    assert probe.read(made.install).functions.keys() >= {"unified"}
    assert rows.UNIFIED in made._routes
    return made


def at_launch(instead: Callable[..., Any]) -> None:
    """Have ``instead(launch, kernel, arguments, keywords)`` called where Triton would launch."""
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def run(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return instead(launch, self, arguments, keywords)

    JITFunction.run = run


def without_amd_options() -> None:
    """Drop what another backend than AMD's refuses; the kernel itself is untouched."""

    def launch(run: Callable[..., Any], kernel: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
        kept = {name: value for name, value in keywords.items() if name not in AMD_ONLY}
        return run(kernel, *arguments, **kept)

    at_launch(launch)


def fake_driver(arch: str) -> None:
    """Tell Triton, and torch, of a device of ``arch`` that is not here."""
    import triton
    from triton.backends.compiler import GPUTarget

    class Driver:
        def get_current_target(self) -> Any:
            return GPUTarget("hip", arch, 64)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int = 0) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

    triton.runtime.driver.set_active(Driver())
