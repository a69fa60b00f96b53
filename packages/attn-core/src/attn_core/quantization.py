"""Packing boolean masks into bits.

Attention masks are packed with ``bitorder="little"``, one request after the other, each starting on a byte
border: that is ``segment_packbits(mask, mask_indptr, "little")``.
"""

from __future__ import annotations

import torch
from torch.compiler import is_dynamo_compiling

from . import capture, tracing
from .batch import INDEX_DTYPES, INT32_MAX, first_true
from .checking import dense
from .errors import needs


def packbits(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    """Pack a 1-D binary array into bytes, as ``numpy.packbits`` does; the last byte is filled up with zeros.

    Works on any device, reads nothing back to the host and may be called during graph capture. Needs a
    quarter of a byte of scratch per element of ``x``, on top of the result.

    Args:
        x: ``[n]`` bool or any integer dtype (nonzero is 1), any stride.
        bitorder: ``"big"``: the first element of each eight is the byte's highest bit. ``"little"``: its
            lowest.

    Returns:
        ``[ceil(n / 8)]`` uint8 on the device of ``x``.

    Raises:
        TypeError: ``x`` is not bool or integer.
        ValueError: ``x`` is not 1-D, or ``bitorder`` is neither ``"big"`` nor ``"little"``.
    """
    if is_dynamo_compiling():
        return tracing.call("packbits", x, bitorder)  # type: ignore[no-any-return]
    _check_bits(x, bitorder)
    if x.dtype == torch.bool:
        x = x.view(torch.uint8)  # a bool made by reinterpreting bytes may hold more than 0 and 1
    packed = torch.zeros((x.numel() + 7) // 8, dtype=torch.uint8, device=x.device)
    for bit in range(8):
        lane = x[bit::8].ne(0).view(torch.uint8)
        shift = 7 - bit if bitorder == "big" else bit
        packed[: lane.numel()].bitwise_or_(lane.bitwise_left_shift_(shift))
    return packed


def segment_packbits(
    x: torch.Tensor, indptr: torch.Tensor, bitorder: str = "big"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack each segment ``x[indptr[i]:indptr[i + 1]]`` into bytes of its own; see :func:`packbits`.

    The size of the result depends on the values of ``indptr``: one on the device is read once (a host tensor
    costs no synchronisation), so this cannot be called during graph capture. Needs about 16 bytes of scratch
    per byte of the result.

    Args:
        x: ``[indptr[-1]]`` bool or any integer dtype (nonzero is 1).
        indptr: ``[num_segments + 1]`` int32 or int64, on the host or on any device; starts at 0 and does not
            decrease. Segments may be empty.
        bitorder: ``"big"`` or ``"little"``.

    Returns:
        The bytes, ``[new_indptr[-1]]`` uint8, and ``new_indptr`` ``[num_segments + 1]`` int32, in bytes,
        where segment ``i`` has ``ceil(len_i / 8)`` of them. Both on the device of ``x``.

    Raises:
        TypeError: ``x`` is not bool or integer, ``indptr`` not int32 or int64.
        ValueError: ``x`` or ``indptr`` is not 1-D; ``indptr`` does not start at 0, decreases, or does not end
            at ``len(x)``; ``bitorder`` is unknown; the result would be larger than int32 can index; the
            current stream is being captured.
    """
    if is_dynamo_compiling():
        return tracing.call("segment_packbits", x, indptr, bitorder)  # type: ignore[no-any-return]
    _check_bits(x, bitorder)
    if capture.capturing(x.device):
        wanted = "a call outside graph capture (the size of the result is read from indptr)"
        raise ValueError(needs("segment_packbits", wanted, "a capturing stream", "core.packbits-capture"))
    offsets = _host_offsets(indptr, x.numel())
    num_bytes = (offsets.diff() + 7) // 8
    new_offsets = torch.nn.functional.pad(num_bytes.cumsum(0), (1, 0))
    total = int(new_offsets[-1])
    if total > INT32_MAX:
        wanted = f"a packed size of at most {INT32_MAX} bytes"
        raise ValueError(needs("indptr", wanted, f"{total} bytes", "core.packbits-size"))
    new_indptr = new_offsets.to(torch.int32).to(x.device)
    if num_bytes.numel() <= 1:
        return packbits(x, bitorder), new_indptr
    return _cut(packbits(x, bitorder), offsets, new_offsets, bitorder), new_indptr


def _cut(
    packed: torch.Tensor, offsets: torch.Tensor, new_offsets: torch.Tensor, bitorder: str
) -> torch.Tensor:
    """Move every segment of an unsegmented packing to a byte border.

    Byte ``b`` of the result holds the bits from ``start[b]`` of ``packed``, which straddle two of its bytes,
    and of them only those in front of its segment's end.
    """
    total = int(new_offsets[-1])
    # Bit numbers below 2**31 halve the scratch.
    index = torch.int32 if 8 * total <= INT32_MAX else torch.int64
    counts = new_offsets.diff().to(packed.device)
    ends = offsets[1:].to(index).to(packed.device)
    shifts = (offsets[:-1] - 8 * new_offsets[:-1]).to(index).to(packed.device)
    start = torch.arange(0, 8 * total, 8, dtype=index, device=packed.device)
    start += shifts.repeat_interleave(counts, output_size=total)
    valid = ends.repeat_interleave(counts, output_size=total).sub_(start).clamp_(max=8).to(torch.uint8)
    skip = start.bitwise_and(7).to(torch.uint8)
    byte = start.bitwise_right_shift_(3)
    low = packed.index_select(0, byte)
    # A byte past the end is only ever asked for bits that `valid` drops.
    high = packed.index_select(0, byte.add_(1).clamp_(max=packed.numel() - 1))
    # uint8 shifts by 8 are undefined, hence one step of 7 - skip and one of 1.
    if bitorder == "little":
        result = low.bitwise_right_shift_(skip).bitwise_or_((high << (7 - skip)).bitwise_left_shift_(1))
        return result.bitwise_and_(torch.full_like(valid, 0xFF).bitwise_right_shift_(8 - valid))
    result = low.bitwise_left_shift_(skip).bitwise_or_((high >> (7 - skip)).bitwise_right_shift_(1))
    return result.bitwise_and_(torch.full_like(valid, 0xFF).bitwise_left_shift_(8 - valid))


def _host_offsets(indptr: torch.Tensor, length: int) -> torch.Tensor:
    """Return ``indptr`` as int64 on the host, checked against ``x``."""
    if dense("indptr", indptr, "core.packbits-indptr").dtype not in INDEX_DTYPES:
        raise TypeError(needs("indptr", "int32 or int64", indptr.dtype, "core.packbits-indptr"))
    if indptr.dim() != 1 or indptr.numel() == 0:
        wanted = "1 dimension and at least 1 entry"
        raise ValueError(needs("indptr", wanted, f"shape {tuple(indptr.shape)}", "core.packbits-indptr"))
    if indptr.is_meta:
        raise ValueError(needs("indptr", "a tensor with data", indptr.device, "core.packbits-indptr"))
    host = indptr.to(device="cpu", dtype=torch.int64)
    if (first := int(host[0])) != 0:
        raise ValueError(needs("indptr", "0 at position 0", first, "core.packbits-indptr"))
    if bool((steps := host.diff()).lt(0).any()):
        at = first_true(steps < 0) + 1
        wanted = f"at least {int(host[at - 1])} (its predecessor) at position {at}"
        raise ValueError(needs("indptr", wanted, int(host[at]), "core.packbits-indptr"))
    if (last := int(host[-1])) != length:
        wanted = f"the length of x, {length}, at position {host.numel() - 1}"
        raise ValueError(needs("indptr", wanted, last, "core.packbits-indptr"))
    return host


def _check_bits(x: torch.Tensor, bitorder: str) -> None:
    dense("x", x, "core.packbits-dtype")
    if x.dtype.is_floating_point or x.dtype.is_complex:
        raise TypeError(needs("x", "bool or an integer dtype", x.dtype, "core.packbits-dtype"))
    if x.dim() != 1:
        raise ValueError(needs("x", "1 dimension", f"shape {tuple(x.shape)}", "core.packbits-shape"))
    if not isinstance(bitorder, str) or bitorder not in ("big", "little"):
        raise ValueError(needs("bitorder", "'big' or 'little'", repr(bitorder), "core.packbits-bitorder"))
