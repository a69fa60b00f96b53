"""What the modules under upstream's name hold beside attention: device queries, and builds of kernels.

A program asks a library such things before it attends. Here no device has another vendor's features, and
there is no kernel to build ahead of use.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any, NoReturn

import torch

from . import plugins, tracing
from .errors import needs
from .not_here import OWN_KERNELS

Lookup = Callable[[str], object]


class JitSpec:
    """Stands for a kernel that upstream would build; there is nothing to build, and no module to load."""

    name = "attn_core"

    def build_and_load(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise NotImplementedError: kernels here are a backend's."""
        raise NotImplementedError(needs("JitSpec.build_and_load", OWN_KERNELS, "a call", "core.not-here"))


class MissingJITCacheError(RuntimeError):
    """Upstream's complaint about kernels that were not prebuilt; never raised here."""


class GPUArchitectureError(Exception):
    """Upstream's complaint about a device; never raised here, like the next two."""


class LibraryError(Exception):
    """Upstream's complaint about a library it calls."""


class BackendSupportedError(Exception):
    """Upstream's complaint about a backend."""


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


class FP4Tensor:
    """Upstream's NVFP4 tensor, for isinstance(); there are none here."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(needs("FP4Tensor", "another cache type", "a call", "core.not-here"))


def get_compute_capability(device: torch.device | str) -> tuple[int, int]:
    """Return torch's ``(major, minor)`` of a GPU, ``(0, 0)`` of anything else."""
    device = torch.device(device)
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def get_device_sm_count(device: torch.device | str) -> int:
    """Return the compute units that torch tells of a GPU, torch's threads of anything else."""
    device = torch.device(device)
    if device.type != "cuda":
        return torch.get_num_threads()
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def get_alibi_slopes(n_heads: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Return the ALiBi slopes in force, float32 ``[n_heads]``."""
    from .reference_math import alibi_slopes

    return alibi_slopes(n_heads, torch.device(device or "cpu")).float()


def canonicalize_torch_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return a type that is given by itself or by name.

    Raises:
        TypeError: It is neither.
    """
    from .arguments import as_dtype

    return as_dtype("dtype", dtype)


def is_float8(x: torch.Tensor) -> bool:
    """Say whether a tensor has an 8-bit floating-point type."""
    return x.dtype.is_floating_point and x.dtype.itemsize == 1


def next_positive_power_of_2(x: int) -> int:
    """Return the least power of two that is not below x."""
    return 1 << max(0, x - 1).bit_length()


def last_positive_power_of_2(x: int) -> int:
    """Return the greatest power of two that is not above x."""
    return 1 << max(0, x.bit_length() - 1)


def ceil_div(x: int, y: int) -> int:
    """Return x / y rounded up."""
    return -(-x // y)


def round_up(x: int, y: int) -> int:
    """Return the least multiple of y that is not below x."""
    return ceil_div(x, y) * y


def get_indptr(x: torch.Tensor) -> torch.Tensor:
    """Return the offsets of some lengths, int64, one more than there are lengths."""
    return torch.cat((x.new_zeros(1, dtype=torch.int64), x.to(torch.int64).cumsum(0)))


def get_device_name(device: torch.device | str) -> str:
    """Return torch's name of a GPU, the type of anything else."""
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def version_at_least(version: str, base_version: str) -> bool:
    """Compare two versions by their numbers."""

    def numbers(text: str) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", text.partition("+")[0])]

    return numbers(version) >= numbers(base_version)


def autotune(*args: object, **kwargs: object) -> AbstractContextManager[None]:
    """Return a context in which nothing is different: ``attn tune`` measures, once, outside the program."""
    return nullcontext()


def traceable() -> bool:
    """Say whether calls can be traced by torch.compile, the AMD fork's ``use_torch_custom_ops_enabled()``."""
    plugins.registry()
    return not isinstance(tracing.state(), str)


def no(*args: object, **kwargs: object) -> bool:
    """Return False: the feature of another vendor's device is not there."""
    return False


def jit(wanted: str) -> object:
    """Return a stand-in for what builds kernels ahead of time.

    Raises:
        KeyError: There is none of that name.
    """
    return _spec if wanted.startswith("gen_") else JIT[wanted]


def _spec(*args: object, **kwargs: object) -> JitSpec:
    return JitSpec()


def _nothing(*args: object, **kwargs: object) -> None:
    return None


def _range(length: int, device: torch.device | str) -> torch.Tensor:
    return torch.arange(length, dtype=torch.int32, device=device)


SHARED = (
    "FP4Tensor", "GPUArchitectureError", "MaskMode", "PosEncodingMode", "TensorLayout", "_get_range_buf",
    "canonicalize_torch_dtype", "ceil_div", "device_support_pdl", "determine_attention_backend",
    "get_alibi_slopes", "get_compute_capability", "get_device_sm_count", "is_float8", "log2e", "round_up",
)  # fmt: skip
"""Names of utils that modules of attention have too."""
UTILS: dict[str, Any] = {
    "BackendSupportedError": BackendSupportedError, "FP4Tensor": FP4Tensor,
    "GPUArchitectureError": GPUArchitectureError, "LibraryError": LibraryError, "MaskMode": MaskMode,
    "PosEncodingMode": PosEncodingMode, "TensorLayout": TensorLayout, "_get_range_buf": _range,
    "canonicalize_torch_dtype": canonicalize_torch_dtype, "ceil_div": ceil_div,
    "determine_attention_backend": lambda *args, **kwargs: "fa2",
    "determine_mla_backend": lambda *args, **kwargs: "fa2", "get_alibi_slopes": get_alibi_slopes,
    "get_device_name": get_device_name, "get_indptr": get_indptr, "version_at_least": version_at_least,
    "get_compute_capability": get_compute_capability, "get_device_sm_count": get_device_sm_count,
    "has_flashinfer_jit_cache": lambda: True, "is_float8": is_float8,
    "last_positive_power_of_2": last_positive_power_of_2, "log2e": math.log2(math.e),
    "next_positive_power_of_2": next_positive_power_of_2, "round_up": round_up,
    **dict.fromkeys(
        (
            "device_support_pdl", "has_cuda_cudart", "is_cutlass_backend_supported", "is_cvt_rs_supported",
            "is_fa3_backend_supported", "is_fa3_prefill_head_dim_supported", "is_sm90a_supported",
            "is_sm100a_supported", "is_sm100f_supported", "is_sm110a_supported", "is_sm120a_supported",
            "is_sm120f_supported", "is_sm121a_supported", "is_sm12x_supported",
        ),
        no,
    ),
}  # fmt: skip
JIT: dict[str, Any] = {
    "JitSpec": JitSpec, "MissingJITCacheError": MissingJITCacheError, "build_jit_specs": _nothing,
    "check_cuda_arch": _nothing, "has_prebuilt_ops": True, "logger": logging.getLogger("attn_core"),
    "filename_safe_dtype_map": {
        torch.float16: "f16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2",
        torch.int8: "i8", torch.uint8: "u8", torch.int32: "i32", torch.uint32: "u32", torch.int64: "i64",
        torch.uint64: "u64",
    },
    # The source of a kernel there; a name is enough for who hands it back to a wrapper.
    "attention_sink_decl": {"fa2": "AttentionSink", "fa3": "AttentionSink"},
}  # fmt: skip
