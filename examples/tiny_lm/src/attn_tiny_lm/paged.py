"""The paged KV cache of the example: who owns which page, and how many of a request's tokens count.

The host side is two numbers per request, a list of pages and a length. Taking back rejected draft tokens is
nothing but not advancing the length: what was written behind it is overwritten before it can be seen again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from attn_core import get_batch_indices_positions, get_seq_lens
from attn_tiny_lm.model import ModelConfig


class StepCache(NamedTuple):
    """What a forward pass over the cache reads and writes; every tensor is on the model's device.

    Attributes:
        pool: `[num_layers, pages, 2, page_size, num_kv_heads, head_dim]`, keys and then values of each
            block. The pass writes the new tokens into it.
        batch_indices: int32 `[rows]`, request (row of the page table) of each token.
        kv_indptr: int32 `[batch + 1]`.
        kv_indices: int32 `[kv_indptr[-1]]`.
        kv_last_page_len: int32 `[batch]`.
    """

    pool: Tensor
    batch_indices: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_last_page_len: Tensor


@dataclass(frozen=True)
class Step:
    """A page table in which the tokens of the coming step already count.

    Attributes:
        qo_indptr: int32 `[batch + 1]` on the host, new tokens of each request.
        kv_indptr: int32 `[batch + 1]` on the host, pages of each request.
        kv_indices: int32 on the host, page ids.
        kv_last_page_len: int32 `[batch]` on the host.
        positions: int32 `[rows]` on the model's device, position of each new token in its request.
        cache: the same page table on the model's device, with the pool.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_last_page_len: Tensor
    positions: Tensor
    cache: StepCache


@dataclass
class _Request:
    pages: list[int] = field(default_factory=list)
    length: int = 0


class PagedCache:
    """A pool of pages for all blocks, and the requests that live in it.

    Args:
        config: shape of the model.
        num_pages: pages in the pool.
        page_size: tokens per page.
        device: where the pool is.
        dtype: type of keys and values.
        seed: pages are handed out in an order shuffled with it, as after a long time of serving.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        shape = (config.num_layers, num_pages, 2, page_size, config.num_kv_heads, config.head_dim)
        self.pool = torch.zeros(shape, device=device, dtype=dtype)
        self.page_size = page_size
        self._free = list(range(num_pages))
        random.Random(seed).shuffle(self._free)
        self._requests: dict[int, _Request] = {}
        self._next_id = 0

    @property
    def free_pages(self) -> int:
        """Pages that no request holds."""
        return len(self._free)

    def add(self) -> int:
        """Make an empty request and return its id."""
        self._next_id += 1
        self._requests[self._next_id] = _Request()
        return self._next_id

    def release(self, request: int) -> None:
        """Forget a request; its pages are free again."""
        self._free.extend(self._requests.pop(request).pages)

    def length(self, request: int) -> int:
        """Tokens of the request that count."""
        return self._requests[request].length

    def pages(self, request: int) -> tuple[int, ...]:
        """Pages the request holds, in order of its tokens; more than it needs after a rejected draft."""
        return tuple(self._requests[request].pages)

    def keep(self, request: int, count: int) -> None:
        """Let the first `count` tokens written since the last `keep` count; the others are taken back.

        Raises:
            ValueError: the request has no room for so many, so they cannot have been written.
        """
        held = self._requests[request]
        room = len(held.pages) * self.page_size - held.length
        if not 0 <= count <= room:
            raise ValueError(f"count: needs 0 to {room}, got {count} [tiny-lm.keep]")
        held.length += count

    def begin(self, requests: Sequence[int], counts: Sequence[int]) -> Step:
        """Find room for `counts[i]` new tokens of `requests[i]` and describe the step that will write them.

        Lengths do not change; call `keep` after the step. Must not be called during graph capture.

        Raises:
            ValueError: the pool has too few free pages. No request has changed then.
        """
        held = [self._requests[request] for request in requests]
        needed = [-(-(r.length + n) // self.page_size) for r, n in zip(held, counts, strict=True)]
        missing = [max(0, n - len(r.pages)) for r, n in zip(held, needed, strict=True)]
        if sum(missing) > len(self._free):
            raise ValueError(f"pages: needs {sum(missing)} free, got {len(self._free)} [tiny-lm.pages]")
        for r, n in zip(held, missing, strict=True):
            r.pages.extend(self._free.pop() for _ in range(n))

        indices = [page for r, n in zip(held, needed, strict=True) for page in r.pages[:n]]
        last = [r.length + c - (n - 1) * self.page_size for r, c, n in zip(held, counts, needed, strict=True)]
        return self._step(_offsets(counts), _offsets(needed), _int32(indices), _int32(last))

    def _step(self, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, last_page_len: Tensor) -> Step:
        device = self.pool.device
        seq_lens = get_seq_lens(kv_indptr, last_page_len, self.page_size)
        owners, positions = get_batch_indices_positions(qo_indptr, seq_lens, int(qo_indptr[-1]))
        table = (t.to(device) for t in (owners, kv_indptr, kv_indices, last_page_len))
        cache = StepCache(self.pool, *table)
        return Step(qo_indptr, kv_indptr, kv_indices, last_page_len, positions.to(device), cache)


def _int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _offsets(counts: Sequence[int]) -> Tensor:
    return _int32([0, *counts]).cumsum(0, dtype=torch.int32)
