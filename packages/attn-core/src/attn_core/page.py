"""Writing new keys and values into a paged cache."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING

import torch
from torch.compiler import is_dynamo_compiling

from . import notices, plugins, tracing
from .backend import AppendBackend, AppendIO
from .batch import INDEX_DTYPES, INT32_MAX, BatchShape, first_true, narrow
from .cache_view import CacheView, unpack
from .checking import apart, backend_name, dense, no_autocast
from .errors import needs
from .not_here import refusing
from .page_indices import get_batch_indices_positions, get_seq_lens
from .problem import AttentionProblem, Op, PagedKV, check_kv_order
from .query import Query
from .route import RouteDecision, Screened, screen, serve
from .target import DeviceTarget, target_of


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: tuple[torch.Tensor, torch.Tensor] | torch.Tensor | CacheView,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
    backend: str = "auto",
) -> None:
    """Write rows of keys and values into the slots of a paged cache.

    Row n goes to position ``positions[n]`` of request ``batch_indices[n]``: slot ``position %
    page_size`` of page ``kv_indices[kv_indptr[request] + position // page_size]``. Those slots of the
    cache are written and no other byte. May be captured; waits for the device never. On the CPU every
    index is checked; on a GPU that would need a read, so there rows that fall outside are skipped.

    Args:
        append_key: ``[nnz, num_kv_heads, head_dim_qk]`` in the cache's type, any strides.
        append_value: ``[nnz, num_kv_heads, head_dim_vo]``; strides are its own.
        batch_indices: int32 ``[nnz]``; -1 skips the row (padding of ``get_batch_indices_positions``).
        positions: int32 ``[nnz]``.
        paged_kv_cache: As for the wrappers: a pair, one 5-D tensor or a CacheView.
        kv_indices: int32 page ids.
        kv_indptr: int32 ``[batch_size + 1]``, in pages.
        kv_last_page_len: int32 ``[batch_size]``, 1..page_size for a request with pages; checked only:
            positions say where rows go.
        kv_layout: ``NHD`` or ``HND``.
        backend: ``auto``, a backend, or a candidate ``backend/path``.

    Raises:
        TypeError: An array has the wrong type.
        ValueError: A shape, a type, a device or (on the CPU) an index does not fit; nothing was written.
        NotImplementedError: No backend serves the combination.
    """
    if is_dynamo_compiling():
        tracing.call(
            "append_paged_kv_cache", append_key, append_value, batch_indices, positions, paged_kv_cache,
            kv_indices, kv_indptr, kv_last_page_len, kv_layout, backend,
        )  # fmt: skip
        return
    check_kv_order(kv_layout)
    backend_name(backend)
    k, v = unpack(paged_kv_cache, kv_layout)
    rows = check_rows(append_key, append_value, k, v, kv_layout)
    indices = {
        "batch_indices": batch_indices, "positions": positions, "kv_indices": kv_indices,
        "kv_indptr": kv_indptr, "kv_last_page_len": kv_last_page_len,
    }  # fmt: skip
    i32 = {name: _index(name, index, k.device) for name, index in indices.items()}
    _check_sizes(i32, rows)
    page_size = k.shape[1] if kv_layout == "NHD" else k.shape[2]
    if k.device.type == "cpu":
        _check_values(i32, page_size, min(k.shape[0], v.shape[0]))
    heads = append_key.shape[1]
    problem = _problem(heads, append_key.shape[2], append_value.shape[2], k.dtype, page_size, kv_layout)
    target = target_of(k.device)
    screened = _screened(
        target, problem, backend_name(backend), plugins.registry()
    )  # a name is checked for no rows too
    del i32["kv_last_page_len"]
    if rows:
        query = Query(target, problem, _shape(i32, rows))
        _dispatch(screened, query, AppendIO(append_key, append_value, k, v, **i32))


def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    backend: str = "auto",
) -> None:
    """Write rows into a paged latent cache; see :func:`append_paged_kv_cache`.

    Args:
        append_ckv: ``[nnz, head_dim_ckv]`` in the cache's type, any strides.
        append_kpe: ``[nnz, head_dim_kpe]``; strides are its own.
        batch_indices: As for :func:`append_paged_kv_cache`, like all that follow but:
        positions: See there.
        ckv_cache: ``[pages, page_size, head_dim_ckv]``.
        kpe_cache: ``[pages, page_size, head_dim_kpe]``.
        kv_indices: See there.
        kv_indptr: See there.
        kv_last_page_len: See there.
        backend: See there.

    Raises:
        TypeError: An array has the wrong type.
        ValueError: As there; nothing was written.
        NotImplementedError: No backend serves the combination.
    """
    parts = (("append_ckv", append_ckv, 2), ("append_kpe", append_kpe, 2))
    caches = (("ckv_cache", ckv_cache, 3), ("kpe_cache", kpe_cache, 3))
    for name, t, ndim in (*parts, *caches):
        if dense(name, t, "core.append-shape").ndim != ndim:
            raise ValueError(needs(name, f"a {ndim}-D tensor", tuple(t.shape), "core.append-shape"))
    if is_dynamo_compiling():
        tracing.call(
            "append_paged_mla_kv_cache", append_ckv, append_kpe, batch_indices, positions, ckv_cache,
            kpe_cache, kv_indices, kv_indptr, kv_last_page_len, backend,
        )  # fmt: skip
        return
    append_paged_kv_cache(
        append_ckv.unsqueeze(1), append_kpe.unsqueeze(1), batch_indices, positions,
        (ckv_cache.unsqueeze(2), kpe_cache.unsqueeze(2)), kv_indices, kv_indptr, kv_last_page_len,
        backend=backend,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _problem(
    heads: int, dim_qk: int, dim_vo: int, dtype: torch.dtype, page_size: int, order: str
) -> AttentionProblem:
    return AttentionProblem(
        op=Op.APPEND, num_qo_heads=heads, num_kv_heads=heads, head_dim_qk=dim_qk, head_dim_vo=dim_vo,
        q_dtype=dtype, kv_dtype=dtype, o_dtype=dtype, kv=PagedKV(page_size, order),
    )  # fmt: skip


@lru_cache(maxsize=256)
def _screened(
    target: DeviceTarget, problem: AttentionProblem, backend: str, registry: plugins.Registry
) -> Screened:
    return screen(target, problem, registry.backends, requested=backend)


def _shape(index: dict[str, torch.Tensor], rows: int) -> BatchShape:
    return BatchShape(
        batch_size=index["kv_indptr"].numel() - 1, total_q=rows, max_q_len=rows, uniform_q_len=None,
        max_kv_len=0, total_kv=0,
    )  # fmt: skip


def _dispatch(screened: Screened, query: Query, io: AppendIO) -> None:
    def append(decision: RouteDecision) -> None:
        assert isinstance(decision.backend, AppendBackend)
        with no_autocast(io.k.device):
            decision.backend.append(decision.path.name, query.problem, io)

    decision, _ = serve(screened, query, append)
    notices.announce(query.target, decision.refused, decision.candidate)


def check_rows(key: torch.Tensor, value: torch.Tensor, k: torch.Tensor, v: torch.Tensor, order: str) -> int:
    """Return the number of rows; raise where rows and cache do not fit together. Looks at no value."""
    heads_at = 2 if order == "NHD" else 1
    for name, rows, cache in (("append_key", key, k), ("append_value", value, v)):
        if dense(name, rows, "core.append-shape", "a 3-D tensor").ndim != 3:
            raise ValueError(needs(name, "a 3-D tensor", tuple(rows.shape), "core.append-shape"))
        apart("paged_kv_cache", dense("paged_kv_cache", cache, "core.cache-shape"), "core.cache-shape")
        want = (cache.shape[heads_at], cache.shape[3])
        if tuple(rows.shape[1:]) != want:
            raise ValueError(
                needs(name, f"[nnz, heads, dim] with {want}", tuple(rows.shape), "core.append-shape")
            )
        if rows.dtype is not cache.dtype:
            raise ValueError(needs(name, f"the cache's type {cache.dtype}", rows.dtype, "core.append-dtype"))
        if rows.device != cache.device:
            raise ValueError(needs(name, f"a tensor on {cache.device}", rows.device, "core.device"))
    if key.shape[0] != value.shape[0]:
        raise ValueError(needs("append_value", f"{key.shape[0]} rows", value.shape[0], "core.append-shape"))
    if k.shape[1:3] != v.shape[1:3] or k.dtype is not v.dtype or k.device != v.device:
        both = f"{tuple(k.shape)} {k.dtype} {k.device} and {tuple(v.shape)} {v.dtype} {v.device}"
        raise ValueError(
            needs("paged_kv_cache", "k and v alike in page, heads, type and device", both, "core.cache-shape")
        )
    return key.shape[0]


def _index(name: str, index: object, device: torch.device) -> torch.Tensor:
    index = dense(name, index, "core.index-type", "an int32 tensor")
    if index.dtype not in INDEX_DTYPES:
        raise TypeError(needs(name, "an int32 tensor (int64 is converted)", index.dtype, "core.index-type"))
    if index.ndim != 1:
        raise ValueError(needs(name, "a 1-D tensor", f"shape {tuple(index.shape)}", "core.index-shape"))
    if index.device != device:
        raise ValueError(needs(name, f"a tensor on {device}, as the cache is", index.device, "core.device"))
    index = index.contiguous()  # backends read it as it lies
    if device.type == "cpu":
        return narrow(name, index)
    # A device's values are not looked at; one that is too large has to stay so, for its row to be skipped.
    return index if index.dtype is torch.int32 else index.clamp(-1, INT32_MAX).to(torch.int32)


def _check_sizes(index: dict[str, torch.Tensor], rows: int) -> None:
    for name in ("batch_indices", "positions"):
        if index[name].numel() != rows:
            raise ValueError(
                needs(name, f"{rows} entries, one per row", index[name].numel(), "core.append-index")
            )
    batch = index["kv_last_page_len"].numel()
    if index["kv_indptr"].numel() != batch + 1:
        want = f"batch size + 1 = {batch + 1} entries"
        raise ValueError(needs("kv_indptr", want, index["kv_indptr"].numel(), "core.indptr"))


def _check_values(index: dict[str, torch.Tensor], page_size: int, pages: int) -> None:
    batch, position, indptr = index["batch_indices"], index["positions"], index["kv_indptr"]
    if batch.numel() == 0:
        return
    _first_bad(
        batch, (batch < -1) | (batch >= indptr.numel() - 1), "batch_indices", f"-1 to {indptr.numel() - 2}"
    )
    steps = indptr.long().diff()
    _first_bad(steps, steps < 0, "kv_indptr step", "0 or more (non-decreasing)")
    last = index["kv_last_page_len"]
    outside = ((last < 1) | (last > page_size)) & (steps > 0)
    _first_bad(last, outside, "kv_last_page_len", f"1 to page_size {page_size}")
    kept = batch >= 0
    owner = batch.clamp(min=0).long()
    room = steps[owner].long() * page_size
    bad = kept & ((position < 0) | (position >= room))
    if bool(bad.any()):
        at = first_true(bad)
        want = f"0 to {int(room[at]) - 1}, what the pages of request {int(batch[at])} hold"
        raise ValueError(needs(f"positions[{at}]", want, int(position[at]), "core.append-index"))
    entry = (indptr[owner].long() + position // page_size)[kept]
    kv_indices = index["kv_indices"]
    if entry.numel() and int(entry.max()) >= kv_indices.numel():
        want = f"more than {int(entry.max())} entries"
        raise ValueError(needs("kv_indices", want, kv_indices.numel(), "core.indices"))
    page = kv_indices[entry]
    _first_bad(page, (page < 0) | (page >= pages), "kv_indices: a page", f"0 to {pages - 1}")


def _first_bad(values: torch.Tensor, bad: torch.Tensor, name: str, want: str) -> None:
    if bool(bad.any()):
        at = first_true(bad)
        raise ValueError(needs(f"{name}[{at}]", want, int(values[at]), "core.append-index"))


__all__ = [
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
]


if not TYPE_CHECKING:
    __getattr__ = partial(refusing, "page")
