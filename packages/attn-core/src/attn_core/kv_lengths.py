"""A paged batch whose lengths come in tokens instead of as fill of the last page."""

from __future__ import annotations

import torch

from .batch import HostBatch, check_index, first_true, lengths_of, page_ids, paged_batch, to_host
from .checking import flat
from .errors import needs


def batch_of_lengths(
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_len_arr: torch.Tensor,
    page_size: int,
    *,
    device: torch.device,
) -> HostBatch:
    """Check the metadata of a paged batch given by the tokens of each request.

    Args:
        qo_indptr: int32 ``[batch_size + 1]``, first query row of each request.
        kv_indptr: int32 ``[batch_size + 1]`` or more, first page of each request in ``kv_indices``; entries
            behind those of the batch, which the other two arrays tell, have no meaning.
        kv_indices: int32 page ids, at least ``kv_indptr[batch_size]``.
        kv_len_arr: int32 ``[batch_size]``, tokens of each request; at most what its pages hold; pages behind
            them are not read.
        page_size: Tokens per page.
        device: Where the kernel will run.

    Raises:
        TypeError: An array has the wrong type.
        ValueError: An array does not fit, or a length is more than the pages of its request hold.
    """
    given = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_len_arr": flat(kv_len_arr)}
    host = to_host(given, device)
    indptr, kv_len = host["kv_indptr"], host["kv_len_arr"]
    batch_size = max(0, host["qo_indptr"].numel() - 1)
    if kv_len.numel() != batch_size:
        want = f"batch size = {batch_size} entries"
        raise ValueError(needs("kv_len_arr", want, kv_len.numel(), "core.kv-len"))
    indptr = indptr[: batch_size + 1]
    held = lengths_of("kv_indptr", indptr, kv_len.numel())[0]
    pages = -(-kv_len // page_size)
    _check_held(kv_len, held, page_size)
    last = torch.where(pages > 0, kv_len - (pages - 1) * page_size, 1).to(torch.int32)
    if not torch.equal(pages, held):
        check_index("kv_indices", kv_indices, device)
        kv_indices = _used(kv_indices, indptr, pages)
        indptr = torch.cat((indptr[:1], pages.cumsum(0))).to(torch.int32)
    return paged_batch(host["qo_indptr"], indptr, kv_indices, last, page_size, device=device)


def _check_held(kv_len: torch.Tensor, held: torch.Tensor, page_size: int) -> None:
    most = held.long() * page_size
    wrong = (kv_len < 0) | (kv_len > most)
    if bool(wrong.any()):
        at = first_true(wrong)
        want = f"0 to {int(most[at])}, what its {int(held[at])} pages hold"
        raise ValueError(needs(f"kv_len_arr[{at}]", want, int(kv_len[at]), "core.kv-len"))


def _used(kv_indices: torch.Tensor, indptr: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Return the ids of the first ``pages`` pages of each request, without those reserved behind them."""
    held, _ = page_ids(None, kv_indices, int(indptr[-1]))
    first = pages.cumsum(0) - pages
    places = torch.arange(int(pages.sum()), device="cpu") + (indptr[:-1] - first).repeat_interleave(pages)
    return held[places.to(held.device)]
