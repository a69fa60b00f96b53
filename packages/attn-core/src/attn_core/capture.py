"""Whether a graph is being captured: asked before anything that a capture would not survive."""

from __future__ import annotations

import torch

from .errors import needs


def capturing(device: torch.device) -> bool:
    """Return whether the current stream of a GPU is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_plan(device: torch.device) -> None:
    """Refuse a plan during capture, before an index tensor is fetched from the device: that ends the capture.

    Raises:
        RuntimeError: The current stream is being captured.
    """
    if capturing(device):
        raise RuntimeError(
            needs("plan", "a call outside graph capture", "one during it", "core.plan-in-capture")
        )
