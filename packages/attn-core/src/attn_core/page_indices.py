"""Index arrays of a paged KV cache: where each appended token goes, and how long each request is.

Neither function reads anything back to the host from a device, so both may be called during graph capture.
Values are therefore checked for tensors on the CPU only; shapes, dtypes and devices are checked everywhere.
"""

from __future__ import annotations

import operator

import torch
from torch.compiler import is_dynamo_compiling

from . import tracing
from .batch import INDEX_DTYPES, INT32_MAX, first_true
from .checking import apart, dense
from .errors import needs


def get_batch_indices_positions(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Say of each of ``nnz`` appended tokens to which request it belongs and at which position.

    The tokens of request ``i`` are ``append_indptr[i]`` to ``append_indptr[i + 1] - 1`` and become the last
    ones of its ``seq_lens[i]``. Tokens from ``append_indptr[-1]`` on (a buffer padded to a fixed ``nnz``)
    belong to nobody: they get batch index -1, at which an append writes nothing, and position 0.

    Args:
        append_indptr: ``[batch_size + 1]`` int32 or int64, starts at 0 and does not decrease.
        seq_lens: ``[batch_size]`` int32 or int64, on the same device: tokens of each request in the cache,
            the appended ones included. A longer buffer is cut to ``batch_size``.
        nnz: Length of the results, at least ``append_indptr[-1]``.
        batch_indices: ``[nnz]`` int32 to be written, or None for a new tensor.
        positions: ``[nnz]`` int32 to be written, or None for a new tensor.

    Returns:
        ``(batch_indices, positions)``, ``[nnz]`` int32 each, on the device of ``append_indptr``; the tensors
        given, where they were given.

    Raises:
        TypeError: An index tensor is not int32 or int64, a result tensor not int32, ``nnz`` not an integer.
        ValueError: Shapes or devices do not fit together. On the CPU also: ``append_indptr`` does not start
            at 0, decreases or ends behind ``nnz``; a request appends more tokens than it has. On a device
            such tokens get what the formula gives (a negative position), and those behind ``nnz`` are
            dropped.
    """
    if is_dynamo_compiling():
        return tracing.call(  # type: ignore[no-any-return]
            "get_batch_indices_positions", append_indptr, seq_lens, nnz, batch_indices, positions
        )
    batch_size = _check_indptr("append_indptr", append_indptr)
    device = append_indptr.device
    nnz = _check_count(nnz)
    _check_index("seq_lens", seq_lens, device)
    if seq_lens.numel() < batch_size:
        wanted = f"at least {batch_size} entries (append_indptr has one more)"
        raise ValueError(needs("seq_lens", wanted, seq_lens.numel(), "core.append-seq-lens"))
    for name, out in (("batch_indices", batch_indices), ("positions", positions)):
        if out is not None:
            _check_out(name, out, nnz, device)
    indptr, lens = append_indptr.to(torch.int64), seq_lens[:batch_size].to(torch.int64)
    if device.type == "cpu":
        _check_append_values(indptr, lens, nnz)

    token = torch.arange(nnz, device=device)
    ends = indptr[1:].contiguous()
    owner = torch.searchsorted(ends, token, right=True)  # how many requests end at or before the token
    padding = owner == batch_size
    to_position = torch.nn.functional.pad(lens - ends, (0, 1))  # the extra entry is the padding's
    owner_ids = owner.masked_fill(padding, -1)
    position = (token + to_position[owner]).masked_fill_(padding, 0)
    return _deliver(owner_ids, batch_indices), _deliver(position, positions)


def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the number of tokens of each request: ``(pages - 1) * page_size + last_page_len``.

    A request without pages has 0 tokens, whatever ``kv_last_page_len`` says of it, as in the attention
    kernels. (FlashInfer's function of this name returns ``kv_last_page_len`` there, and then disagrees with
    its kernels.)

    Args:
        kv_indptr: ``[batch_size + 1]`` int32 or int64, in pages; does not decrease.
        kv_last_page_len: ``[batch_size]`` int32 or int64, on the same device: tokens in each request's last
            page, 1 to ``page_size``.
        page_size: Tokens per page.

    Returns:
        ``[batch_size]``, int64 if either tensor is, else int32.

    Raises:
        TypeError: A tensor is not int32 or int64, or ``page_size`` not an integer.
        ValueError: Shapes or devices do not fit together, or ``page_size`` is not positive. On the CPU also:
            ``kv_indptr`` decreases, or the last page of a request that has pages is outside 1 to
            ``page_size``.
    """
    if is_dynamo_compiling():
        return tracing.call("get_seq_lens", kv_indptr, kv_last_page_len, page_size)  # type: ignore[no-any-return]
    batch_size = _check_indptr("kv_indptr", kv_indptr)
    _check_index("kv_last_page_len", kv_last_page_len, kv_indptr.device)
    if kv_last_page_len.numel() != batch_size:
        wanted = f"{batch_size} entries (kv_indptr has one more)"
        raise ValueError(needs("kv_last_page_len", wanted, kv_last_page_len.numel(), "core.last-page-len"))
    page_size = _as_int("page_size", page_size)
    if not 1 <= page_size <= INT32_MAX:
        want = f"at least 1 and at most {INT32_MAX}"
        raise ValueError(
            needs("page_size", want if page_size > 0 else "at least 1", page_size, "core.page-size")
        )
    pages = kv_indptr.diff()
    if kv_indptr.device.type == "cpu":
        _check_ascending("kv_indptr", kv_indptr)
        outside = (pages > 0) & ((kv_last_page_len < 1) | (kv_last_page_len > page_size))
        if (at := _first(outside)) is not None:
            wanted, got = f"1 to page_size ({page_size})", f"{int(kv_last_page_len[at])} at position {at}"
            raise ValueError(needs("kv_last_page_len", wanted, got, "core.last-page-len"))
        # Of int64, differences and products may wrap.
        if (at := _first((pages < 0) | (pages > INT32_MAX // page_size))) is not None:
            wanted, got = f"at most {INT32_MAX} tokens per request", f"{int(pages[at])} pages of {page_size}"
            raise ValueError(needs("kv_indptr", wanted, got, "core.kv-len"))
    return ((pages - 1) * page_size + kv_last_page_len).masked_fill_(pages <= 0, 0)


def _deliver(values: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        return values.to(torch.int32)
    with torch.inference_mode():  # where alone a tensor made in it may be written
        return out.copy_(values)


def _check_append_values(indptr: torch.Tensor, lens: torch.Tensor, nnz: int) -> None:
    if (first := int(indptr[0])) != 0:
        raise ValueError(needs("append_indptr", "0 at position 0", first, "core.indptr"))
    _check_ascending("append_indptr", indptr)
    if (last := int(indptr[-1])) > nnz:
        wanted = f"at least append_indptr[-1], which is {last}"
        raise ValueError(needs("nnz", wanted, nnz, "core.append-nnz"))
    if (at := _first(lens > INT32_MAX)) is not None:
        raise ValueError(
            needs(
                "seq_lens", f"at most {INT32_MAX} tokens per request", int(lens[at]), "core.append-seq-lens"
            )
        )
    appended = indptr.diff()
    if (at := _first(lens < appended)) is not None:
        wanted = f"at least the {int(appended[at])} tokens that request {at} appends"
        raise ValueError(needs("seq_lens", wanted, int(lens[at]), "core.append-seq-lens"))


def _check_ascending(name: str, indptr: torch.Tensor) -> None:
    if (at := _first(indptr[1:] < indptr[:-1])) is not None:
        got = f"{int(indptr[at + 1])} at position {at + 1} after {int(indptr[at])}"
        raise ValueError(needs(name, "no decrease", got, "core.indptr"))


def _first(bad: torch.Tensor) -> int | None:
    """Return the first position where ``bad``, a bool tensor on the CPU, is True."""
    return first_true(bad) if bool(bad.any()) else None


def _check_indptr(name: str, indptr: torch.Tensor) -> int:
    """Check an offsets tensor and return the batch size."""
    _check_index(name, indptr, dense(name, indptr, "core.index-dtype").device)
    if indptr.numel() == 0:
        raise ValueError(needs(name, "batch_size + 1 entries", 0, "core.indptr"))
    return indptr.numel() - 1


def _check_index(name: str, index: torch.Tensor, device: torch.device) -> None:
    if dense(name, index, "core.index-dtype").dtype not in INDEX_DTYPES:
        raise TypeError(needs(name, "int32 or int64", index.dtype, "core.index-dtype"))
    if index.dim() != 1:
        raise ValueError(needs(name, "1 dimension", f"shape {tuple(index.shape)}", "core.index-shape"))
    if index.device != device:
        raise ValueError(
            needs(name, f"the device of the indptr, {device}", index.device, "core.index-device")
        )


def _check_out(name: str, out: torch.Tensor, nnz: int, device: torch.device) -> None:
    if dense(name, out, "core.append-out").dtype != torch.int32:
        raise TypeError(needs(name, "int32", out.dtype, "core.append-out"))
    if tuple(out.shape) != (nnz,):
        raise ValueError(needs(name, f"shape ({nnz},)", tuple(out.shape), "core.append-out"))
    if out.device != device:
        raise ValueError(needs(name, f"the device of append_indptr, {device}", out.device, "core.append-out"))
    apart(name, out, "core.append-out")


def _check_count(nnz: int) -> int:
    nnz = _as_int("nnz", nnz)
    if not 0 <= nnz <= INT32_MAX:
        raise ValueError(needs("nnz", f"0 to {INT32_MAX}", nnz, "core.append-nnz"))
    return nnz


def _as_int(name: str, value: int) -> int:
    """Accept what Python counts with (numpy integers too) but no tensor, whose value may be on a device."""
    try:
        found = None if isinstance(value, bool | torch.Tensor) else operator.index(value)
    except TypeError:
        found = None
    if found is None:
        raise TypeError(needs(name, "an int", type(value).__name__, "core.integer"))
    return found
