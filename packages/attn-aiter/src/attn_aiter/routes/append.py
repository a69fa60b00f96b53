"""``reshape_and_cache_flash``: writing rows into NHD pages, the path ``append``.

The kernel computes every address inside a page itself, from one page stride shared by both caches, and
checks nothing else: a layout it cannot see would be corrupted, so it is refused here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attn_core.backend import AppendIO
from attn_core.errors import Unsupported, needs
from attn_core.reasons import Reason

from .. import codes
from ..probe import AiterApi
from .common import Call


class Append:
    """Rows into pages."""

    call = Call(
        "append",
        ("key", "value", "key_cache", "value_cache", "slot_mapping", "kv_cache_dtype", "k_scale", "v_scale"),
    )

    def __init__(self) -> None:
        self._ones: dict[torch.device, torch.Tensor] = {}

    def missing(self, api: AiterApi) -> tuple[str, ...]:
        """Return what does not bind."""
        return self.call.missing(api)

    def append(self, api: AiterApi, function: Callable[..., Any], io: AppendIO) -> None:
        """Write the rows; those of slot -1, or outside what their request owns, are skipped.

        Raises:
            Unsupported: A layout the kernel would corrupt.
            RuntimeError: The first append on a device happens during graph capture.
        """
        check_layout(io)
        one = self._one(io.k.device)
        key, value = (t if _rows_packed(t) else t.contiguous() for t in (io.key, io.value))
        function(**self.call.bind(api.functions[self.call.key], {
            "key": key, "value": value, "key_cache": io.k, "value_cache": io.v,
            "slot_mapping": slots(io), "kv_cache_dtype": "auto", "k_scale": one, "v_scale": one,
        }))  # fmt: skip

    def _one(self, device: torch.device) -> torch.Tensor:
        # The kernel reads both scales whatever the type. Made once: a graph that was captured with them
        # replays the address, so they must not come from its private pool.
        if device not in self._ones:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                want = "one call before graph capture"
                raise RuntimeError(needs("aiter/append", want, "the first during it", "aiter.append-capture"))
            self._ones[device] = torch.ones(1, dtype=torch.float32, device=device)
        return self._ones[device]


def check_layout(io: AppendIO) -> None:
    """Refuse caches whose tokens are not dense inside a page, or whose pages lie differently.

    Raises:
        Unsupported: With the cause ``aiter.append-layout``.
    """
    for t in (io.k, io.v):
        _, page, heads, dim = t.shape
        want = (heads * dim, dim, 1)
        if any(
            n > 1 and at != step for n, at, step in zip((page, heads, dim), t.stride()[1:], want, strict=True)
        ):
            raise Unsupported(_refusal("NHD pages of dense tokens", t.stride()))
    if io.k.shape[0] > 1 and io.k.stride(0) != io.v.stride(0):
        raise Unsupported(_refusal("k and v with the same page stride", (io.k.stride(0), io.v.stride(0))))
    if io.k.shape[0] != io.v.shape[0]:
        raise Unsupported(_refusal("k and v with as many pages", (io.k.shape[0], io.v.shape[0])))


def _refusal(limit: str, got: object) -> Reason:
    return Reason(codes.APPEND_LAYOUT, "aiter/append", limit, got)


def _rows_packed(t: torch.Tensor) -> bool:
    _, heads, dim = t.shape
    return (dim == 1 or t.stride(2) == 1) and (heads == 1 or t.stride(1) == dim)


def slots(io: AppendIO) -> torch.Tensor:
    """Return ``[nnz]`` int64 cache slots, -1 for rows to skip; computed on the device, nothing read back."""
    if io.kv_indices.numel() == 0:
        return torch.full_like(io.positions, -1, dtype=torch.int64)
    page_size, pages = io.k.shape[1], io.k.shape[0]
    request, position = io.batch_indices.long(), io.positions.long()
    known = (request >= 0) & (request < io.kv_indptr.numel() - 1) & (position >= 0)
    owner = torch.where(known, request, 0)
    entry = io.kv_indptr.long()[owner] + position.div(page_size, rounding_mode="floor")
    known &= entry < io.kv_indptr.long()[owner + 1]
    known &= entry < io.kv_indices.numel()
    page = io.kv_indices.long()[torch.where(known, entry, 0)]
    known &= (page >= 0) & (page < pages)
    return torch.where(known, page * page_size + position % page_size, -1)
