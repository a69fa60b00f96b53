"""Index arrays of one batch, checked, and the integers derived from them.

This is the only place where sequence lengths are derived, and they come from the page metadata alone:
whatever a caller says beside it (``seq_lens``) is checked against it, never believed over it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from . import capture
from .checking import check_reach, dense, flat
from .errors import needs

INT32_MAX = 2**31 - 1
INDEX_DTYPES = (torch.int32, torch.int64)
"""Types index arrays may come in; everything inside is int32."""
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """Integers of one batch, in tokens unless named otherwise. Hashable; holds no tensor.

    Attributes:
        batch_size: Requests.
        total_q: Query rows of all requests.
        max_q_len: Query rows of the longest request.
        uniform_q_len: Query rows of every request when they are equal, else None.
        max_kv_len: Keys of the longest request.
        total_kv: Keys of all requests.
        total_pages: Pages of all requests (0 when keys are not paged).
    """

    batch_size: int
    total_q: int
    max_q_len: int
    uniform_q_len: int | None
    max_kv_len: int
    total_kv: int
    total_pages: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostBatch:
    """Checked index arrays: int32, contiguous, on the CPU, owned by nobody else after plan() has read them.

    Attributes:
        shape: The integers.
        qo_indptr: ``[batch_size + 1]`` first query row of each request.
        kv_indptr: ``[batch_size + 1]`` first entry of each request in ``kv_indices``; for ragged keys,
            first token.
        kv_len: ``[batch_size]`` keys per request.
        kv_indices: ``[total_pages]`` page ids, or None. The one array that may live on the device: a
            backend reads its values in plan() only if its path sets ``host_indices``.
        kv_last_page_len: ``[batch_size]`` tokens in each request's last page, or None.
        max_page_id: Largest page id, -1 without pages, None when the ids are on the device.
        min_kv_len: Keys of the shortest request.
    """

    shape: BatchShape
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_len: torch.Tensor
    kv_indices: torch.Tensor | None = None
    kv_last_page_len: torch.Tensor | None = None
    max_page_id: int | None = -1
    min_kv_len: int = 0


def paged_batch(
    qo: torch.Tensor | int,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    page_size: int,
    *,
    device: torch.device = CPU,
    seq_lens: torch.Tensor | None = None,
    host_indices: bool = False,
) -> HostBatch:
    """Check the metadata of a paged batch.

    Host tensors cost no device synchronisation. Metadata on the device is fetched in one copy;
    ``kv_indices`` stays there (its values are then not checked) unless ``host_indices``.

    Args:
        qo: ``qo_indptr`` ``[batch_size + 1]``, or the number of query rows of every request.
        kv_indptr: ``[batch_size + 1]``, in pages.
        kv_indices: ``[>= kv_indptr[-1]]`` page ids; a longer buffer is cut.
        kv_last_page_len: ``[batch_size]``, 1 to ``page_size``; no effect for a request without pages.
        page_size: Tokens per page.
        device: Where the kernel will run.
        seq_lens: Optional lengths; at least ``batch_size`` entries, none above the metadata's.
        host_indices: Fetch and check ``kv_indices`` even if it is on the device.

    Raises:
        TypeError: An array is not a tensor of int32 or int64.
        ValueError: A length, an order or a range does not hold; names position and both numbers.
    """
    named = {"kv_indptr": kv_indptr, "kv_last_page_len": kv_last_page_len}
    if not isinstance(qo, int):
        named["qo_indptr"] = qo
    if seq_lens is not None:
        named["seq_lens"] = flat(seq_lens)
    check_index("kv_indices", kv_indices, device)
    if host_indices or kv_indices.device.type == "cpu":
        named["kv_indices"] = kv_indices
    host = to_host(named, device)
    indptr, last = host["kv_indptr"], host["kv_last_page_len"]
    few = _few_lengths(indptr, last, page_size)
    if few is not None:
        lengths, total_pages = few
        indices, max_page_id = page_ids(host.get("kv_indices"), kv_indices, total_pages)
        kv_len = torch.tensor(lengths, dtype=torch.int32, device=CPU)
        known = min(lengths), max(lengths), sum(lengths)
    else:
        _check_last_pages(last, indptr, host.get("qo_indptr"))
        pages, total_pages, min_pages, max_pages = lengths_of("kv_indptr", indptr, last.numel())
        if max_pages * page_size > INT32_MAX:
            want = f"at most {INT32_MAX} tokens per request"
            raise ValueError(needs("kv_indptr", want, f"{max_pages} pages of {page_size}", "core.kv-len"))
        indices, max_page_id = page_ids(host.get("kv_indices"), kv_indices, total_pages)
        kv_len, known = _kv_len(pages, min_pages, last, page_size), None
    if seq_lens is not None:
        _check_seq_lens(host["seq_lens"], kv_len)
    q = qo if isinstance(qo, int) else host["qo_indptr"]
    return _assemble(q, indptr, kv_len, total_pages, indices, last, max_page_id, known)


def with_host_indices(batch: HostBatch) -> HostBatch:
    """Return the batch with its page ids fetched from the device and checked; one copy."""
    if batch.kv_indices is None or batch.max_page_id is not None:
        return batch
    on_host = to_host({"kv_indices": batch.kv_indices}, batch.kv_indices.device)["kv_indices"]
    indices, most = page_ids(on_host, on_host, batch.shape.total_pages)
    return replace(batch, kv_indices=indices, max_page_id=most)


def ragged_batch(
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    *,
    device: torch.device = CPU,
    seq_lens: torch.Tensor | None = None,
) -> HostBatch:
    """Check the metadata of a batch with contiguous keys; ``kv_indptr`` is in tokens.

    Raises:
        TypeError: As for :func:`paged_batch`.
        ValueError: As for :func:`paged_batch`.
    """
    named = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr}
    if seq_lens is not None:
        named["seq_lens"] = flat(seq_lens)
    host = to_host(named, device)
    indptr = host["kv_indptr"]
    if indptr.numel() == 0:
        raise ValueError(needs("kv_indptr", "batch size + 1 entries", 0, "core.indptr"))
    kv_len, _, _, _ = lengths_of("kv_indptr", indptr, indptr.numel() - 1)
    if seq_lens is not None:
        _check_seq_lens(host["seq_lens"], kv_len)
    return _assemble(host["qo_indptr"], indptr, kv_len, 0, None, None, -1)


def single_batch(q_len: int, kv_len: int) -> HostBatch:
    """One request of ``q_len`` rows over ``kv_len`` contiguous keys."""
    qo, kv = (torch.tensor([0, n], dtype=torch.int32, device=CPU) for n in (q_len, kv_len))
    return _assemble(qo, kv, kv[1:], 0, None, None, -1)


def to_host(named: Mapping[str, torch.Tensor], device: torch.device = CPU) -> dict[str, torch.Tensor]:
    """Return the arrays as int32 on the CPU; those on the device come over in one copy."""
    out: dict[str, torch.Tensor] = {}
    away: list[str] = []
    for name, tensor in named.items():
        check_index(name, tensor, device)
        if tensor.device.type == "cpu":
            # Backends hand addresses of these to native code, which knows no strides.
            out[name] = tensor.contiguous() if tensor.dtype is torch.int32 else narrow(name, tensor)
        else:
            away.append(name)
    if away:
        capture.refuse_plan(device)
        # int64 keeps a value that does not fit int32 visible to narrow.
        packed = torch.cat([named[name].to(torch.int64) for name in away]).cpu()
        for name, part in zip(away, packed.split_with_sizes([named[n].numel() for n in away]), strict=True):
            out[name] = narrow(name, part)
    return out


def check_index(name: str, tensor: object, device: torch.device) -> None:
    """Refuse what is no 1-D index tensor on the CPU or on a device of this kind."""
    tensor = dense(name, tensor, "core.index-type", "an int32 tensor")
    if tensor.dtype not in INDEX_DTYPES:
        raise TypeError(needs(name, "dtype int32 (int64 is converted)", tensor.dtype, "core.index-type"))
    if tensor.ndim != 1:
        raise ValueError(needs(name, "a 1-D tensor", f"shape {tuple(tensor.shape)}", "core.index-shape"))
    check_reach(name, tensor, device)


def narrow(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return an index tensor of the CPU as int32.

    Raises:
        ValueError: A value does not fit.
    """
    small = tensor.to(torch.int32)
    if tensor.dtype is not torch.int32 and not torch.equal(small.to(tensor.dtype), tensor):
        at = first_true(small != tensor)
        want = "a value that fits int32"
        raise ValueError(needs(f"{name}[{at}]", want, int(tensor[at]), "core.index-range"))
    return small


def first_true(mask: torch.Tensor) -> int:
    """Return the position of the first True of a 1-D mask."""
    return int(mask.to(torch.uint8).argmax())


_FEW = 256
"""Up to so many numbers Python's min() and max() beat a torch operator and two reads of its result."""

_HANDFUL = 64
"""Up to so many requests Python integers beat half a dozen torch operators on them."""


def _few_lengths(indptr: torch.Tensor, last: torch.Tensor, page_size: int) -> tuple[list[int], int] | None:
    """Return keys per request and pages of all when both arrays are short and right.

    None leaves the rest to the tensor operators: long arrays, and the words for what is wrong.
    """
    if not 0 < last.numel() <= _HANDFUL or indptr.numel() != last.numel() + 1:
        return None
    starts: list[int] = indptr.tolist()
    lasts: list[int] = last.tolist()
    pages = [end - start for start, end in pairwise(starts)]
    if starts[0] != 0 or min(pages) < 0 or max(pages) * page_size > INT32_MAX:
        return None
    if min(lasts) < 1 or max(lasts) > page_size:
        return None
    return [(n - 1) * page_size + end if n else 0 for n, end in zip(pages, lasts, strict=True)], starts[-1]


def _range(values: torch.Tensor) -> tuple[int, int]:
    if values.numel() <= _FEW:
        numbers: list[int] = values.tolist()
        return min(numbers), max(numbers)
    low, high = torch.aminmax(values)
    return int(low), int(high)


def _sum(values: torch.Tensor) -> int:
    return sum(values.tolist()) if values.numel() <= _FEW else int(values.sum())


def lengths_of(name: str, indptr: torch.Tensor, batch_size: int) -> tuple[torch.Tensor, int, int, int]:
    """Check an indptr; return per-request lengths, their sum, least and greatest."""
    if indptr.numel() != batch_size + 1:
        raise ValueError(
            needs(name, f"batch size + 1 = {batch_size + 1} entries", indptr.numel(), "core.indptr")
        )
    first, total = indptr[::batch_size].tolist() if batch_size else (int(indptr[0]), 0)
    if first != 0:
        raise ValueError(needs(f"{name}[0]", "0", first, "core.indptr"))
    if batch_size == 0:
        return indptr[1:], 0, 0, 0
    lengths = indptr[1:] - indptr[:-1]
    low, high = _range(lengths)
    # A difference that wraps to a positive one shows in the sum, which has no other way to be so large.
    if low < 0 or (batch_size * high > INT32_MAX and _sum(lengths) != total):
        at = first_true(indptr[1:] < indptr[:-1])
        want = f"at least {name}[{at}] = {int(indptr[at])} (non-decreasing)"
        raise ValueError(needs(f"{name}[{at + 1}]", want, int(indptr[at + 1]), "core.indptr"))
    return lengths, total, low, high


def _check_last_pages(last: torch.Tensor, indptr: torch.Tensor, qo_indptr: torch.Tensor | None) -> None:
    """Raise for lengths of another batch, unless qo_indptr shows that kv_indptr is the odd one out."""
    requests = indptr.numel() - 1
    agree = qo_indptr is not None and qo_indptr.numel() - 1 == last.numel()
    if requests >= 0 and last.numel() != requests and not agree:
        want = f"{requests} entries, as kv_indptr has batch size + 1 = {requests + 1}"
        got = f"{last.numel()}, which go with {last.numel() + 1}"
        raise ValueError(needs("kv_last_page_len", want, got, "core.last-page"))


def page_ids(host: torch.Tensor | None, given: torch.Tensor, total: int) -> tuple[torch.Tensor, int | None]:
    """Return the page ids in use, and the greatest of those that are on the host, which are checked."""
    if given.numel() < total:
        raise ValueError(
            needs("kv_indices", f"kv_indptr[-1] = {total} entries", given.numel(), "core.indices")
        )
    if host is None:
        return given[:total], None
    used = host[:total]
    if total == 0:
        return used, -1
    low, high = _range(used)
    if low < 0:
        at = first_true(used < 0)
        raise ValueError(needs(f"kv_indices[{at}]", "a page id of 0 or more", int(used[at]), "core.indices"))
    return used, high


def _kv_len(pages: torch.Tensor, min_pages: int, last: torch.Tensor, page_size: int) -> torch.Tensor:
    """``(pages - 1) * page_size + last``, and 0 for a request without pages."""
    if pages.numel() == 0:
        return pages
    low, high = _range(last)
    if low < 1 or high > page_size:
        bad = ((last < 1) | (last > page_size)) & (pages > 0)
        if bool(bad.any()):
            at = first_true(bad)
            raise ValueError(
                needs(
                    f"kv_last_page_len[{at}]", f"1 to page_size {page_size}", int(last[at]), "core.last-page"
                )
            )
    if min_pages > 0:
        return torch.add(last, pages - 1, alpha=page_size)
    return torch.where(pages > 0, torch.add(last, pages - 1, alpha=page_size), 0)


def _check_seq_lens(seq_lens: torch.Tensor, kv_len: torch.Tensor) -> None:
    batch_size = kv_len.numel()
    if seq_lens.numel() < batch_size:
        raise ValueError(
            needs("seq_lens", f"at least batch size {batch_size} entries", seq_lens.numel(), "core.seq-lens")
        )
    over = seq_lens[:batch_size] > kv_len
    if bool(over.any()):
        at = first_true(over)
        want = f"at most {int(kv_len[at])}, the tokens of request {at} in the metadata"
        raise ValueError(needs(f"seq_lens[{at}]", want, int(seq_lens[at]), "core.seq-lens"))


def check_drafts_appended(batch: HostBatch, q_len: int) -> None:
    """Raise ValueError when a request has fewer keys than rows to verify."""
    if batch.shape.batch_size and batch.min_kv_len < q_len:
        at = first_true(batch.kv_len < q_len)
        want = f"kv_len of at least {q_len} in every request (append the drafts first)"
        got = f"kv_len {int(batch.kv_len[at])} in request {at}"
        text = needs("q_len_per_req", want, got, "core.kv-shorter-than-q")
        raise ValueError(f"{text}: its first rows would have an empty KV range")


def _assemble(
    qo: torch.Tensor | int,
    kv_indptr: torch.Tensor,
    kv_len: torch.Tensor,
    total_pages: int,
    indices: torch.Tensor | None,
    last: torch.Tensor | None,
    max_page_id: int | None,
    known: tuple[int, int, int] | None = None,
) -> HostBatch:
    batch_size = kv_len.numel()
    uniform: int | None
    if isinstance(qo, int):
        # A new array each time: scaling a shared one in place would corrupt every other plan.
        indptr = torch.arange(0, (batch_size + 1) * qo, qo, dtype=torch.int32, device=CPU)
        total_q, longest, uniform = batch_size * qo, qo if batch_size else 0, qo
    else:
        indptr = qo
        _, total_q, shortest, longest = lengths_of("qo_indptr", qo, batch_size)
        uniform = longest if shortest == longest else None
    if known is None:
        known = (*(_range(kv_len) if batch_size else (0, 0)), _sum(kv_len))
    least, most, total_kv = known
    shape = BatchShape(
        batch_size=batch_size,
        total_q=total_q,
        max_q_len=longest,
        uniform_q_len=uniform,
        max_kv_len=most,
        total_kv=total_kv,
        total_pages=total_pages,
    )
    return HostBatch(
        shape=shape,
        qo_indptr=indptr,
        kv_indptr=kv_indptr,
        kv_len=kv_len,
        kv_indices=indices,
        kv_last_page_len=last,
        max_page_id=max_page_id,
        min_kv_len=least,
    )
