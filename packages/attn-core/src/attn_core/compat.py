"""Puts this package where a program that cannot be edited imports ``flashinfer`` from.

Beside the modules of attention there are what such a program asks a library for before it attends: device
queries (``flashinfer.utils``) and the compilation of kernels ahead of use (``flashinfer.jit``), which is
nothing to do here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import Enum
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

import attn_core

from .errors import needs
from .not_here import refusing

VERSION = "0.6.18"
"""The release whose names and meanings these are."""

MODULES = (
    "attention", "cascade", "decode", "mla", "page", "pod", "prefill", "quantization", "sampling", "sparse",
)  # fmt: skip
"""Modules of upstream that this package has."""

Lookup = Callable[[str], object]


def install(name: str = "flashinfer") -> ModuleType:
    """Make ``import flashinfer`` find this package, for the rest of the process.

    Call it before anything imports that name. A name of upstream's attention API that is not here can be
    imported and raises NotImplementedError when it is called (see :mod:`attn_core.not_here`).

    Args:
        name: The name to be found under.

    Returns:
        The module. Calling again returns the same one.

    Raises:
        ImportError: Another package was imported under that name.
    """
    there = sys.modules.get(name)
    if isinstance(there, _Alias):
        return there
    if there is not None:
        raise ImportError(needs(name, "not to be imported yet", repr(there), "core.compat"))
    root = _Alias(name, lambda wanted: getattr(attn_core, wanted))
    root.__dict__.update(__version__=VERSION, __path__=[])
    made = {name: root}
    for module in MODULES:
        made[f"{name}.{module}"] = _Alias(f"{name}.{module}", _attribute_of(module))
    for module in ("rope", "xqa"):
        made[f"{name}.{module}"] = _Alias(f"{name}.{module}", _refused_of(module))
    made[f"{name}.utils"] = _Alias(f"{name}.utils", lambda wanted: _UTILS[wanted])
    for module in (
        "jit",
        "jit.core",
        "jit.utils",
        "jit.attention",
        "jit.attention.modules",
        "jit.attention.pytorch",
    ):
        made[f"{name}.{module}"] = _Alias(f"{name}.{module}", _jit)
    for path, alias in made.items():
        parent, _, last = path.rpartition(".")
        if parent and last != "xqa":  # as upstream, where the function hides the module
            made[parent].__dict__[last] = alias
    # Programs ask whether the package of prebuilt kernels is installed: there is nothing to build here.
    made[f"{name}_jit_cache"] = _Alias(f"{name}_jit_cache", lambda wanted: refusing("", wanted))
    sys.modules.update(made)
    return root


class _Alias(ModuleType):
    """A module whose attributes are looked up when they are asked for, and kept."""

    def __init__(self, name: str, find: Lookup) -> None:
        super().__init__(name, f"attn-core under the name of {name}.")
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__dict__["_find"] = find

    def __getattr__(self, wanted: str) -> object:
        if wanted.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {wanted!r}")
        try:
            found: object = self.__dict__["_find"](wanted)
        except (AttributeError, KeyError):
            message = f"module {self.__name__!r} (attn_core) has no attribute {wanted!r}"
            raise AttributeError(message) from None
        setattr(self, wanted, found)
        return found


def _attribute_of(module: str) -> Lookup:
    def find(wanted: str) -> object:
        found = getattr(import_module(f"attn_core.{module}"), wanted, None)
        if found is not None:
            return found
        return _UTILS[wanted] if wanted in _SHARED else getattr(attn_core, wanted)

    return find


def _refused_of(module: str) -> Lookup:
    return lambda wanted: refusing(module, wanted)


def _jit(wanted: str) -> object:
    """Return a stand-in for what builds kernels ahead of time."""
    if wanted in _JIT:
        return _JIT[wanted]
    if wanted.startswith("gen_"):
        return _spec
    raise KeyError(wanted)


class JitSpec:
    """Stands for a kernel that upstream would build; there is nothing to build."""


def _spec(*args: object, **kwargs: object) -> JitSpec:
    return JitSpec()


class MissingJITCacheError(RuntimeError):
    """Upstream's complaint about kernels that were not prebuilt; never raised here."""


class PosEncodingMode(Enum):
    """Upstream's numbers of position encodings."""

    NONE = 0
    ROPE_LLAMA = 1
    ALIBI = 2


class MaskMode(Enum):
    """Upstream's numbers of masks."""

    NON_CAUSAL = 0
    CAUSAL = 1
    CUSTOM = 2
    MULTIITEMSCORING = 3


class TensorLayout(Enum):
    """Upstream's numbers of cache layouts."""

    NHD = 0
    HND = 1


def get_compute_capability(device: torch.device | str) -> tuple[int, int]:
    """Return torch's ``(major, minor)`` of a GPU, ``(0, 0)`` of anything else."""
    device = torch.device(device)
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def get_alibi_slopes(n_heads: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Return the ALiBi slopes in force, float32 ``[n_heads]``."""
    from .reference_math import alibi_slopes

    return alibi_slopes(n_heads, torch.device(device or "cpu")).float()


def next_positive_power_of_2(x: int) -> int:
    """Return the least power of two that is not below x."""
    return 1 << max(0, x - 1).bit_length()


def ceil_div(x: int, y: int) -> int:
    """Return x / y rounded up."""
    return -(-x // y)


def round_up(x: int, y: int) -> int:
    """Return the least multiple of y that is not below x."""
    return ceil_div(x, y) * y


def _no(*args: object, **kwargs: object) -> bool:
    """Return False: the device feature of another vendor is not there."""
    return False


def _range(length: int, device: torch.device | str) -> torch.Tensor:
    return torch.arange(length, dtype=torch.int32, device=device)


class FP4Tensor:
    """Upstream's NVFP4 tensor, for isinstance(); there are none here."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(needs("FP4Tensor", "another cache type", "a call", "core.not-here"))


_SHARED = ("MaskMode", "PosEncodingMode", "TensorLayout", "_get_range_buf")
_UTILS: dict[str, Any] = {
    "FP4Tensor": FP4Tensor, "MaskMode": MaskMode, "PosEncodingMode": PosEncodingMode,
    "TensorLayout": TensorLayout, "ceil_div": ceil_div, "device_support_pdl": _no,
    "determine_attention_backend": lambda *args, **kwargs: "fa2", "get_alibi_slopes": get_alibi_slopes,
    "get_compute_capability": get_compute_capability, "has_flashinfer_jit_cache": lambda: True,
    "next_positive_power_of_2": next_positive_power_of_2, "round_up": round_up, "_get_range_buf": _range,
    **dict.fromkeys(
        (
            "is_cutlass_backend_supported", "is_fa3_backend_supported", "is_fa3_prefill_head_dim_supported",
            "is_sm90a_supported", "is_sm100a_supported", "is_sm100f_supported", "is_sm110a_supported",
            "is_sm120a_supported", "is_sm120f_supported", "is_sm121a_supported", "is_sm12x_supported",
        ),
        _no,
    ),
}  # fmt: skip
_JIT: dict[str, Any] = {
    "JitSpec": JitSpec, "MissingJITCacheError": MissingJITCacheError,
    "build_jit_specs": lambda *args, **kwargs: None, "check_cuda_arch": lambda: None,
}  # fmt: skip
