"""A paged batch whose lengths come in tokens instead of as fill of the last page."""

from __future__ import annotations

import torch

from .batch import HostBatch, first_true, flat, paged_batch, to_host
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
        kv_indptr: int32 ``[batch_size + 1]``, first page of each request in ``kv_indices``.
        kv_indices: int32 page ids, at least ``kv_indptr[-1]``.
        kv_len_arr: int32 ``[batch_size]``, tokens of each request; its pages hold exactly these.
        page_size: Tokens per page.
        device: Where the kernel will run.

    Raises:
        TypeError: An array has the wrong type.
        ValueError: An array does not fit, or a length is not what the pages of its request hold.
    """
    given = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_len_arr": flat(kv_len_arr)}
    host = to_host(given, device)
    indptr, kv_len = host["kv_indptr"], host["kv_len_arr"]
    if kv_len.numel() != indptr.numel() - 1:
        want = f"batch size = {indptr.numel() - 1} entries"
        raise ValueError(needs("kv_len_arr", want, kv_len.numel(), "core.kv-len"))
    held = indptr.diff()
    wrong = (kv_len < 0) | (kv_len > held * page_size) | (kv_len <= (held - 1) * page_size)
    if bool(wrong.any()):
        at = first_true(wrong)
        most = max(0, int(held[at]) * page_size)
        least = max(0, most - page_size + 1)
        want = f"{least} to {most}, what its {int(held[at])} pages hold"
        raise ValueError(needs(f"kv_len_arr[{at}]", want, int(kv_len[at]), "core.kv-len"))
    last = torch.where(held > 0, kv_len - (held - 1) * page_size, 1).to(torch.int32)
    return paged_batch(host["qo_indptr"], indptr, kv_indices, last, page_size, device=device)
