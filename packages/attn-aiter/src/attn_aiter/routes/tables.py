"""Dense page tables, for kernels that do not take an indptr."""

from __future__ import annotations

import torch

from attn_core.batch import HostBatch


def block_table(batch: HostBatch, width: int) -> torch.Tensor:
    """Return ``[batch_size * width]`` int32: the pages of each request, row by row, padded with page 0.

    The values of ``kv_indices`` are read: a path that calls this sets ``host_indices``.
    """
    assert batch.kv_indices is not None
    ids = batch.kv_indices
    pages = batch.kv_indptr.diff().long()
    row = torch.repeat_interleave(torch.arange(pages.numel(), device="cpu"), pages)
    column = torch.arange(ids.numel(), device="cpu") - torch.repeat_interleave(
        batch.kv_indptr[:-1].long(), pages
    )
    table = torch.zeros(pages.numel() * width, dtype=torch.int32, device="cpu")
    table[row * width + column] = ids
    return table
