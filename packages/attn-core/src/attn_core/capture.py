"""Whether a graph is being captured: asked before anything that a capture would not survive."""

from __future__ import annotations

import torch

from .checking import check_reach, dense
from .errors import needs


def capturing(device: torch.device) -> bool:
    """Return whether the current stream of a GPU is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_plan(device: torch.device) -> None:
    """Refuse a plan during capture.

    Raises:
        RuntimeError: The current stream is being captured.
    """
    if capturing(device):
        raise RuntimeError(
            needs("plan", "a call outside graph capture", "one during it", "core.plan-in-capture")
        )


def fetch(name: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on the CPU; waits for the device where it is not there.

    A copy from the device would end a capture with an error of the runtime's.

    Raises:
        TypeError: A sparse tensor.
        ValueError: It is neither on the CPU nor on ``device``.
        RuntimeError: It is on the device, whose current stream is being captured.
    """
    dense(name, tensor, "core.layout")
    if tensor.device.type == "cpu":
        return tensor
    check_reach(name, tensor, device)
    refuse_plan(device)
    return tensor.cpu()
