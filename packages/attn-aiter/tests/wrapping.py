"""What tests through attn-core's wrappers share: stand-in kernels by AITER's names, and batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .functions import Prefill, Varlen
from .standins import PaV1, reshape_and_cache_flash

PAGE, HEADS, KV_HEADS, DIM = 16, 8, 2, 64


class Kernels:
    """Stand-ins by AITER's names, as the loader asks for them."""

    def __init__(self) -> None:
        self.pa, self.varlen, self.prefill = PaV1(), Varlen(), Prefill()

    def __call__(self, module: str, name: str) -> Callable[..., Any]:
        return {
            "compile": self.pa,
            "flash_attn_varlen_func": self.varlen,
            "mha_batch_prefill_func": self.prefill,
            "reshape_and_cache_flash": reshape_and_cache_flash,
        }[name]


def workspace(size: int = 1 << 20) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8)


def cache(count: int = 9, page_size: int = PAGE) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(count, 2, page_size, KV_HEADS, DIM).half()


def table(lengths: list[int], page_size: int = PAGE) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    counts = torch.tensor([-(-n // page_size) for n in lengths])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()
    ids = torch.randperm(int(indptr[-1]), generator=torch.Generator().manual_seed(1)).int()
    return indptr, ids, torch.tensor([(n - 1) % page_size + 1 for n in lengths], dtype=torch.int32)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a.float(), b.float(), atol=1e-2, rtol=1e-2)
