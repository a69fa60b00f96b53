"""Multi-item scoring: many candidate items behind one prefix, scored in one pass without seeing each other.

A sequence is ``prefix | delimiter item | delimiter item | ... | delimiter``. A row of the prefix is causal. A
row behind it sees the whole prefix and, of its own item, the tokens up to itself; a delimiter sees the
prefix alone, and nobody sees a delimiter. That is a mask of at most two runs of keys per row: it is
written here as the bits of a custom mask, which every backend with custom masks then serves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from . import capture
from .arguments import MaskBits, mask_places
from .batch import HostBatch, first_true, to_host
from .checking import check_reach, dense, whole
from .errors import needs

_POINTERS = ("prefix_len_ptr", "token_pos_in_items_ptr", "max_item_len_ptr")
_DTYPES = (torch.uint16, torch.uint32, torch.int32, torch.int64)
_CODE = "core.items"


def asks_items(a: Mapping[str, Any], device: torch.device) -> bool:
    """Return whether the arguments of a plan, by name, ask for multi-item scoring.

    Raises:
        TypeError: ``token_pos_in_items_len`` is not a whole number.
        ValueError: Some of the arguments are there and others are not, or a custom mask is there too.
    """
    missing = [name for name in _POINTERS if a.get(name) is None]
    if len(missing) == len(_POINTERS):
        stride = _padded_length(a.get("token_pos_in_items_len"), device)
        if stride:
            want = f"0 without {', '.join(_POINTERS)}"
            raise ValueError(needs("token_pos_in_items_len", want, stride, _CODE))
        return False
    if missing:
        want = f"a tensor, as {_POINTERS[0]}, {_POINTERS[1]} and {_POINTERS[2]} belong together"
        raise ValueError(needs(missing[0], want, "None", _CODE))
    for name in ("custom_mask", "packed_custom_mask"):
        if a[name] is not None:
            raise ValueError(needs(name, "None with multi-item scoring, which is a mask", "a mask", _CODE))
    return True


def item_bits(a: Mapping[str, Any], batch: HostBatch, device: torch.device) -> MaskBits:
    """Build the mask of a plan that :func:`asks_items`.

    Costs time and scratch in proportion to the bytes of the result, ``q_len * kv_len / 8`` per request; the
    bits are made on the host and brought to the device in one copy.

    Args:
        a: The arguments of the plan, by name.
        batch: Its checked index arrays.
        device: Where the kernel runs.

    Raises:
        TypeError: An argument is not a tensor of a type that holds lengths.
        ValueError: A size or a value does not fit the batch.
        RuntimeError: The current stream is being captured.
    """
    capture.refuse_plan(device)
    host = to_host({name: _whole_numbers(name, a[name], device) for name in _POINTERS}, device)
    for name, values in host.items():
        if bool((values < 0).any()):
            at = first_true(values < 0)
            raise ValueError(needs(f"{name}[{at}]", "a length of 0 or more", int(values[at]), _CODE))
    prefix, positions, longest = (host[name].long() for name in _POINTERS)
    for name, values in (("prefix_len_ptr", prefix), ("max_item_len_ptr", longest)):
        if values.numel() != batch.shape.batch_size:
            want = f"batch size {batch.shape.batch_size} entries"
            raise ValueError(needs(name, want, values.numel(), _CODE))
    stride = _padded_length(a["token_pos_in_items_len"], device)
    _check_positions(positions, stride, prefix, batch)
    place, row_prefix, request, first_bit = _rows(batch, prefix)
    behind = place >= row_prefix
    own = torch.zeros_like(place)
    own[behind] = positions[(request * stride + place - row_prefix)[behind]]
    _check_longest(own, request, longest)
    _, byte_indptr = mask_places(batch)
    start = 8 * byte_indptr[request] + first_bit
    seen = place + 1  # not above 0 for a row in front of all keys: runs that end before they begin are none
    first = torch.minimum(row_prefix, seen)
    bits = _runs(
        torch.cat([start, start + torch.maximum(first, seen - own)]),
        torch.cat([start + first, start + seen]),
        int(byte_indptr[-1]),
    )
    return MaskBits(bits.to(device), to_host({"mask_indptr": byte_indptr})["mask_indptr"])


def _padded_length(value: object, device: torch.device) -> int:
    """Return ``token_pos_in_items_len``, which upstream's callers give as a tensor of one element too."""
    if isinstance(value, torch.Tensor) and value.dtype in _DTYPES and value.numel() == 1:
        value = int(capture.fetch("token_pos_in_items_len", value, device).to(torch.int64))
    return 0 if value is None else whole("token_pos_in_items_len", value, _CODE, 0)


def _whole_numbers(name: str, given: object, device: torch.device) -> torch.Tensor:
    """Return an argument as int64, where it is. Unsigned types have next to no operators in torch."""
    tensor = dense(name, given, _CODE)
    if tensor.dtype not in _DTYPES:
        own = torch.uint32 if name == "prefix_len_ptr" else torch.uint16
        raise TypeError(needs(name, f"dtype {own} (int32 and int64 are converted)", tensor.dtype, _CODE))
    if tensor.ndim > 1:
        raise ValueError(needs(name, "a 1-D tensor", f"shape {tuple(tensor.shape)}", _CODE))
    check_reach(name, tensor, device)
    return tensor.reshape(-1).to(torch.int64)  # of one request upstream's callers give a scalar


def _check_positions(positions: torch.Tensor, stride: int, prefix: torch.Tensor, batch: HostBatch) -> None:
    """Refuse an array of positions that ends before the last row, or in which requests overlap."""
    wanted = (batch.kv_len.long() - prefix).clamp_(min=0) * (batch.qo_indptr.diff() > 0)
    if wanted.numel() == 0:
        return
    most = int(wanted.max())
    if stride < most and (stride or wanted.numel() > 1):
        want = f"at least {most}, the most tokens behind a prefix"
        raise ValueError(needs("token_pos_in_items_len", want, stride, _CODE))
    ends = torch.arange(wanted.numel(), device="cpu") * stride + wanted
    size = int(ends[wanted > 0].max()) if most else 0
    if positions.numel() < size:
        want = f"at least {size} entries ({wanted.numel()} requests, token_pos_in_items_len {stride} apart)"
        raise ValueError(needs("token_pos_in_items_ptr", want, positions.numel(), _CODE))


def _check_longest(own: torch.Tensor, request: torch.Tensor, longest: torch.Tensor) -> None:
    over = own > longest[request]
    if bool(over.any()):
        at = first_true(over)
        which, got = int(request[at]), int(longest[request[at]])
        want = f"at least {int(own[at])}, a position in token_pos_in_items_ptr of this request"
        raise ValueError(needs(f"max_item_len_ptr[{which}]", want, got, _CODE))


def _rows(
    batch: HostBatch, prefix: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return per query row: its place in the sequence, the prefix, the request, its first bit therein."""
    q_len = batch.qo_indptr.diff().long()
    request = torch.arange(q_len.numel(), device="cpu").repeat_interleave(q_len)
    row = torch.arange(batch.shape.total_q, device="cpu") - batch.qo_indptr.long()[request]
    kv_len = batch.kv_len.long()[request]
    return row + kv_len - q_len[request], prefix[request], request, row * kv_len


def _runs(start: torch.Tensor, end: torch.Tensor, size: int) -> torch.Tensor:
    """Return ``size`` bytes whose bits ``start[i]`` to ``end[i]`` are set, little-endian, for disjoint runs.

    Bytes inside a run come from a running count of the runs that are open; its two ends share bytes with
    other runs, and as no bit is in two runs their sum is their union.
    """
    start, end = start[end > start], end[end > start]
    low, high = start >> 3, end >> 3
    opened = torch.zeros(size + 1, dtype=torch.int8, device="cpu")
    opened.index_add_(0, low, torch.ones_like(low, dtype=torch.int8))
    opened.index_add_(0, high, torch.full_like(high, -1, dtype=torch.int8))
    # A run [s, e) is byte s // 8 to byte e // 8, less the bits below s, plus those below e.
    bits = opened.cumsum_(0).view(torch.uint8).mul_(255)
    bits.index_add_(0, low, -((1 << (start & 7)) - 1).to(torch.uint8))
    bits.index_add_(0, high, ((1 << (end & 7)) - 1).to(torch.uint8))
    return bits[:size]
