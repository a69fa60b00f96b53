"""Checks of public arguments that several entry points share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import capture
from .batch import HostBatch, to_host
from .checking import check_reach, dense
from .errors import needs
from .problem import PosEncoding
from .quantization import packbits, segment_packbits


def as_dtype(name: str, value: torch.dtype | str) -> torch.dtype:
    """Return a torch dtype given as one or by its name.

    Raises:
        TypeError: Neither a dtype nor a string.
        ValueError: The string names no dtype.
    """
    if isinstance(value, torch.dtype):
        return value
    if not isinstance(value, str):
        raise TypeError(needs(name, "a torch.dtype or its name", type(value).__name__, "core.dtype"))
    found = getattr(torch, value, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(needs(name, "the name of a torch dtype", repr(value), "core.dtype"))
    return found


def as_pos_encoding(mode: str) -> PosEncoding:
    """Return the position encoding a string names.

    Raises:
        ValueError: It names none.
    """
    try:
        return PosEncoding(mode if isinstance(mode, str) else repr(mode))
    except ValueError:
        names = ", ".join(e.value for e in PosEncoding)
        raise ValueError(
            needs("pos_encoding_mode", f"one of {names}", repr(mode), "core.pos-encoding")
        ) from None


_MAY_BE_NEUTRAL = (bool, int, float, str, tuple, list, dict)


def refuse(**given: object) -> None:
    """Refuse arguments of upstream that no backend here has; None, 0, 0.0, False and nothing are neutral.

    Raises:
        NotImplementedError: Names the first argument that is not neutral.
    """
    for name, value in given.items():
        neutral = value is None or (isinstance(value, _MAY_BE_NEUTRAL) and not value)
        if not neutral:
            got = type(value).__name__ if isinstance(value, torch.Tensor | dict) else repr(value)
            raise NotImplementedError(needs(name, "to be left at its default", got, "core.not-supported"))


def split_size(value: int | None) -> int | None:
    """Return ``fixed_split_size``, with upstream's 'not positive means automatic' as None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise TypeError(needs("fixed_split_size", "an int or None", type(value).__name__, "core.split-size"))
    return None if value is None or value < 1 else value


def check_workspace(name: str, buffer: object) -> torch.Tensor:
    """Return the buffer if kernels can use it.

    Raises:
        TypeError: Not a tensor.
        ValueError: Not contiguous, or not aligned to 16 bytes.
    """
    buffer = dense(name, buffer, "core.workspace")
    if not buffer.is_contiguous():
        raise ValueError(needs(name, "a contiguous tensor", f"strides {buffer.stride()}", "core.workspace"))
    if buffer.numel() and buffer.device.type != "meta" and buffer.data_ptr() % 16:
        off = f"data_ptr % 16 = {buffer.data_ptr() % 16}"
        raise ValueError(needs(f"{name} must be 16-byte aligned", "data_ptr % 16 = 0", off, "core.alignment"))
    return buffer


@dataclass(frozen=True, slots=True, eq=False)
class MaskBits:
    """A custom mask ready for a kernel.

    Attributes:
        bits: uint8 on the device, little-endian, each request on a byte border, owned by the plan.
        indptr: ``[batch_size + 1]`` int32 on the CPU: first byte of each request.
    """

    bits: torch.Tensor
    indptr: torch.Tensor


def mask_bits(
    custom_mask: torch.Tensor | None,
    packed_custom_mask: torch.Tensor | None,
    batch: HostBatch,
    device: torch.device,
) -> MaskBits | None:
    """Check a custom mask against the batch and bring it to the device; None when there is none.

    Args:
        custom_mask: Flat or shaped bool (or 0/1 uint8) of ``sum(q_len * kv_len)`` elements, request
            after request, row-major.
        packed_custom_mask: The same as bits: little-endian, each request on a byte border.
        batch: The batch it is for.
        device: Where the kernel runs.

    Raises:
        TypeError: Wrong element type.
        ValueError: Wrong size, or both were given and differ.
        RuntimeError: The current stream is being captured.
    """
    if custom_mask is None and packed_custom_mask is None:
        return None
    capture.refuse_plan(device)  # a copy of the mask, to the device or within it, would be captured
    bit_indptr, byte_indptr = mask_places(batch)
    given = None
    if packed_custom_mask is not None:
        given = _packed(packed_custom_mask, int(byte_indptr[-1]), device)
    if custom_mask is not None:
        made = _pack(custom_mask, bit_indptr, _mask_shapes(batch), device)
        if given is not None and not torch.equal(given, made):
            both = "the same mask as custom_mask"
            raise ValueError(needs("packed_custom_mask", both, "another mask", "core.mask-conflict"))
        given = made
    assert given is not None
    return MaskBits(given, to_host({"mask_indptr": byte_indptr})["mask_indptr"])


def mask_places(batch: HostBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where each request's mask begins: its first element, and its first byte once packed.

    Both int64 ``[batch_size + 1]`` on the CPU.
    """
    q_len = batch.qo_indptr.diff().long()
    bit_indptr = torch.zeros(q_len.numel() + 1, dtype=torch.int64, device="cpu")
    torch.cumsum(q_len * batch.kv_len.long(), 0, out=bit_indptr[1:])
    byte_indptr = torch.zeros_like(bit_indptr)
    torch.cumsum((bit_indptr.diff() + 7) // 8, 0, out=byte_indptr[1:])
    return bit_indptr, byte_indptr


def _packed(mask: torch.Tensor, size: int, device: torch.device) -> torch.Tensor:
    if not isinstance(mask, torch.Tensor) or mask.dtype is not torch.uint8:
        got = getattr(mask, "dtype", type(mask).__name__)
        raise TypeError(needs("packed_custom_mask", "a uint8 tensor", got, "core.mask-dtype"))
    _check_place("packed_custom_mask", mask, device)
    if mask.numel() != size:
        want = f"{size} bytes (each request's q_len * kv_len bits rounded up to bytes)"
        raise ValueError(needs("packed_custom_mask", want, mask.numel(), "core.mask-size"))
    return mask.reshape(-1).to(device, copy=True)


def _check_place(name: str, mask: torch.Tensor, device: torch.device) -> None:
    dense(name, mask, "core.mask-dtype")
    check_reach(name, mask, device)


def _mask_shapes(batch: HostBatch) -> list[tuple[int, ...]]:
    """Shapes other than flat that say the same without room for a mistake."""
    shape = batch.shape
    if shape.uniform_q_len is None or shape.total_kv != shape.batch_size * shape.max_kv_len:
        return []
    each = (shape.max_q_len, shape.max_kv_len)
    return [(shape.batch_size, *each)] + ([each] if shape.batch_size == 1 else [])


def _pack(
    mask: torch.Tensor, bit_indptr: torch.Tensor, shapes: list[tuple[int, ...]], device: torch.device
) -> torch.Tensor:
    if not isinstance(mask, torch.Tensor) or mask.dtype not in (torch.bool, torch.uint8):
        got = getattr(mask, "dtype", type(mask).__name__)
        raise TypeError(needs("custom_mask", "a bool (or 0/1 uint8) tensor", got, "core.mask-dtype"))
    _check_place("custom_mask", mask, device)
    size = int(bit_indptr[-1])
    if mask.numel() != size or (mask.ndim != 1 and tuple(mask.shape) not in shapes):
        also = "".join(f" or shape {shape}" for shape in shapes)
        want = f"{size} elements, the sum of q_len * kv_len over requests, flat{also}"
        raise ValueError(needs("custom_mask", want, f"shape {tuple(mask.shape)}", "core.mask-size"))
    flat = mask.reshape(-1).to(device)
    if bit_indptr.numel() == 2:
        return packbits(flat, "little")
    return segment_packbits(flat, bit_indptr, "little")[0]
