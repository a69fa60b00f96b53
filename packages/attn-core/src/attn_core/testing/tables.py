"""Index arrays of a batch, with a shuffled page table."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..batch import HostBatch, paged_batch, ragged_batch, single_batch
from ..problem import AttentionProblem, Op
from .batches import Lengths

SPARE_PAGES = 3
"""Pages of the pool that no request owns; page 0, which careless code reads, is one of them."""
_SHARED_PAGES = 2


@dataclass(slots=True)
class Table:
    """Index arrays, int32 on the CPU, as a caller would hand them over.

    Attributes:
        qo_indptr: ``[batch_size + 1]``.
        kv_indptr: ``[batch_size + 1]``, in pages (tokens when keys are not paged).
        kv_indices: ``[total_pages]`` page ids.
        kv_last_page_len: ``[batch_size]``.
        pages: Pages of each request, in order.
        pool: Pages of the whole cache.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_last_page_len: torch.Tensor
    pages: list[list[int]] = field(repr=False)
    pool: int

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the four arrays by name."""
        names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")
        return {name: getattr(self, name) for name in names}


def table_of(lengths: Lengths, page_size: int | None, *, seed: int = 7, pool: int | None = None) -> Table:
    """Lay a batch out.

    Args:
        lengths: The batch.
        page_size: Tokens per page, or None for contiguous keys.
        seed: Of the page order.
        pool: Pages of the cache; by default as many as are needed and a few spare ones.
    """
    size = page_size or 1
    counts = [-(-n // size) for n in lengths.kv_len]
    need = sum(counts) + SPARE_PAGES
    pool = need if pool is None else max(pool, need)
    order = torch.randperm(pool - 1, generator=torch.Generator().manual_seed(seed)) + 1
    ids: list[int] = order.tolist()
    pages: list[list[int]] = []
    for count in counts:
        pages.append([ids.pop() for _ in range(count)])
    if lengths.shared:
        pages[1][:_SHARED_PAGES] = pages[0][:_SHARED_PAGES]
    steps = lengths.kv_len if page_size is None else tuple(counts)
    return Table(
        qo_indptr=offsets(lengths.q_len),
        kv_indptr=offsets(steps),
        kv_indices=_ints([page for mine in pages for page in mine]),
        kv_last_page_len=_ints([(n - 1) % size + 1 if n else 1 for n in lengths.kv_len]),
        pages=pages,
        pool=pool,
    )


def shared_tokens(lengths: Lengths, page_size: int | None) -> int:
    """Return how many leading tokens the first two requests have in common."""
    return _SHARED_PAGES * page_size if lengths.shared and page_size else 0


def host_batch(problem: AttentionProblem, lengths: Lengths, table: Table) -> HostBatch:
    """Return the checked batch that ``Backend.plan`` gets. Aliases the table's arrays."""
    if problem.op in (Op.PREFILL_SINGLE, Op.DECODE_SINGLE):
        return single_batch(lengths.q_len[0], lengths.kv_len[0])
    if not problem.op.paged:
        return ragged_batch(table.qo_indptr, table.kv_indptr)
    assert problem.page_size is not None
    rows = lengths.q_len_per_req if problem.op in (Op.DECODE, Op.VERIFY) else table.qo_indptr
    return paged_batch(rows, table.kv_indptr, table.kv_indices, table.kv_last_page_len, problem.page_size)


def offsets(lengths: tuple[int, ...]) -> torch.Tensor:
    """Exclusive prefix sum with the total appended."""
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    return _ints(ends)


def _ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
