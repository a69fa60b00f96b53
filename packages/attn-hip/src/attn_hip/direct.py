"""Runs that are checked and launched in one native call, where torch lets native code look at its tensors."""

from __future__ import annotations

from typing import Any

import torch

from attn_core.backend import DeviceImage, DirectRun, RunIO, RunShapes

from .launch import Launch, arrays_of
from .launch_gpu import GpuLaunch

_EXCHANGE = "__dlpack_c_exchange_api__"


def direct(
    native: Any, launch: Launch | GpuLaunch, image: DeviceImage, io: RunIO, shapes: RunShapes
) -> DirectRun | None:
    """Return a function that enqueues further runs of a plan, or None where torch has no exchange API.

    Args:
        native: The host module.
        launch: What was run.
        image: The plan's index arrays; kept alive.
        io: Tensors of a run that was right: types and device are theirs.
        shapes: What tensors of a run must be.
    """
    api = getattr(torch.Tensor, _EXCHANGE, None)
    if api is None:
        return None
    facts = (torch.Tensor, torch.Tensor.is_neg, io.q, io.k, io.out)
    device = io.q.device
    stream = (torch._C._cuda_getCurrentRawStream, device.index) if device.type == "cuda" else ()
    try:
        held = native.Held(api, stream, facts, (shapes.q, shapes.out), shapes.k, shapes.v, shapes.least_rows)
    except ValueError:  # a version of the API that is not known here
        return None
    found: DirectRun
    if isinstance(launch, GpuLaunch):
        found = launch.bind(image).direct(held, (launch, image))
    else:
        found = launch.kernel.direct(held, arrays_of(launch, image), torch.get_num_threads, image)
    return found
