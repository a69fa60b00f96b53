"""What the block-sparse wrappers share: block-sparse attention is paged attention.

A row of blocks is a request: its query rows are the request's, the columns of its blocks are the pages. The
keys are not copied.
"""

from __future__ import annotations

import torch

from .checking import dense, whole
from .errors import needs
from .prefill_paged import BatchPrefillWithPagedKVCacheWrapper
from .route import RouteDecision


class SparseWrapper:
    """Holds the paged wrapper that serves a block-sparse one."""

    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        self._paged = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, backend=backend)

    @property
    def device(self) -> torch.device:
        """Where it works: where the workspace is."""
        return self._paged.device

    @property
    def route(self) -> RouteDecision | None:
        """The decision in force; None before the first plan()."""
        return self._paged.route

    @property
    def backend(self) -> str:
        """Name of the backend that serves the plan in force; what was asked for before plan()."""
        return self._paged.backend

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        """Replace the float workspace; see the paged wrappers' method."""
        self._paged.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def end_forward(self) -> None:
        """Do nothing; upstream's counterpart of ``begin_forward``."""


def check_size(name: str, value: object, least: int = 1) -> int:
    """Return a size given as an int.

    Raises:
        TypeError: Not an int.
        ValueError: Too small.
    """
    return whole(name, value, "core.sparse", least)


def check_keys(name: str, t: torch.Tensor, shape: tuple[int, int, int]) -> torch.Tensor:
    """Return a tensor of keys or values of the planned shape.

    Raises:
        TypeError: Not a tensor.
        ValueError: Another shape.
    """
    dense(name, t, "core.kv-shape")
    if tuple(t.shape) != shape:
        raise ValueError(needs(name, f"shape {shape}", tuple(t.shape), "core.kv-shape"))
    return t
