"""Counts memory that compiled code allocates: a cell in which a whole cache was copied is unusable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_sizes: list[int] | None = None
_installed = False


def watch() -> bool:
    """Begin to see what Inductor's code allocates; False where this torch cannot be watched."""
    global _installed
    if _installed:
        return True
    home = getattr(torch._C._dynamo, "guards", None)
    names = [n for n in ("_empty_strided_cpu", "_empty_strided_cuda") if hasattr(home, n)]
    for name in names:
        setattr(home, name, _noting(getattr(home, name)))
    _installed = bool(names)
    return _installed


def _noting(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def noting(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        made = allocate(size, stride, dtype)
        if _sizes is not None:
            _sizes.append(made.untyped_storage().nbytes())
        return made

    return noting


class Allocations:
    """Sizes in bytes of what compiled code allocates while the context is open."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __enter__(self) -> Allocations:
        global _sizes
        watch()
        _sizes = self.sizes
        return self

    def __exit__(self, *_: Any) -> None:
        global _sizes
        _sizes = None

    def at_least(self, nbytes: int) -> int:
        """Count those of at least so many bytes."""
        return sum(size >= nbytes for size in self.sizes)
