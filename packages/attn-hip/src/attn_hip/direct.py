"""Runs that are checked and launched in one native call, where torch lets native code look at its tensors."""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from typing import Any

import torch

from attn_core.backend import DeviceImage, DirectRun, RunIO, RunShapes

from .launch import Launch, arrays_of
from .launch_gpu import GpuLaunch

_EXCHANGE = "__dlpack_c_exchange_api__"
_TORCH = "libtorch_cpu.so"


def direct(
    native: Any, launch: Launch | GpuLaunch, image: DeviceImage, io: RunIO, shapes: RunShapes
) -> DirectRun | None:
    """Return a function that enqueues further runs of a plan; None where torch shows native code no tensors.

    Args:
        native: The host module.
        launch: What was run.
        image: The plan's index arrays; kept alive.
        io: Tensors of a run that was right: types and device are theirs.
        shapes: What tensors of a run must be.
    """
    api, storage = getattr(torch.Tensor, _EXCHANGE, None), _storage_api(native, _TORCH)
    if api is None or storage is None:
        return None
    facts = (torch.Tensor, torch.Tensor.is_neg, io.q, io.k, io.out)
    device = io.q.device
    stream = (torch._C._cuda_getCurrentRawStream, device.index) if device.type == "cuda" else ()
    try:
        held = native.Held(
            api, storage, stream, facts, (shapes.q, shapes.out), shapes.k, shapes.v, shapes.least_rows
        )
    except ValueError:  # a version of the API that is not known here
        return None
    found: DirectRun
    if isinstance(launch, GpuLaunch):
        found = launch.bind(image).direct(held, (launch, image))
    else:
        found = launch.kernel.direct(held, arrays_of(launch, image), torch.get_num_threads, image)
    return found


@lru_cache(maxsize=8)
def _storage_api(native: Any, library: str) -> Any | None:
    """Return how native code asks for the size of a storage; None where it cannot, or gets a wrong answer."""
    try:
        found = ctypes.CDLL(library, mode=os.RTLD_NOLOAD)
        asks = found.aoti_torch_get_storage_size, found.aoti_torch_get_storage_offset
        at = (ctypes.cast(ask, ctypes.c_void_p).value for ask in asks)
        api = native.StorageApi(*at, torch.Tensor._cdata)
    except (OSError, AttributeError, ValueError):
        return None
    sample = torch.empty(7, dtype=torch.float16, device="cpu")[3:5]
    right = api.of(sample) == (sample.untyped_storage().nbytes(), sample.storage_offset())
    return api if right else None
