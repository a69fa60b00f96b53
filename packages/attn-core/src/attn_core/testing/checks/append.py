"""append() writes the slots it was given, byte for byte, and nothing else."""

from __future__ import annotations

import torch

from ...backend import AppendBackend, AppendIO
from ...page import append_paged_kv_cache
from ..cases import Case
from ..drive import only
from ..memory import put, same_bits
from ..world import World, world_of
from .expect import expect

_FAR = 1 << 30
"""Position of a skipped row: nobody may look at it."""


def appends_exact_bytes(case: Case) -> None:
    """Every byte of the cache's memory is as a loop over the rows leaves it, gaps included."""
    world, want = world_of(case), world_of(case)
    for each in (world, want):
        each.lay(torch.nan)
    io = _rows(case, world)
    _loop(io, want)
    inputs = _inputs(io)
    before = [t.clone() for t in inputs]
    with only(case.backend, case.path):
        last = world.table.kv_last_page_len.to(case.device)
        append_paged_kv_cache(
            io.key, io.value, io.batch_indices, io.positions, world.kv.cache, io.kv_indices, io.kv_indptr,
            last, case.problem.kv.order, case.candidate,
        )  # fmt: skip
    _compare(world, want)
    for was, now in zip(before, inputs, strict=True):
        expect(same_bits(was, now), "append() wrote to one of its inputs")


def appends_the_same_when_called_directly(case: Case) -> None:
    """``Backend.append`` as the core calls it, twice: the second changes nothing."""
    backend = case.backend
    assert isinstance(backend, AppendBackend)
    world, want = world_of(case), world_of(case)
    for each in (world, want):
        each.lay(torch.nan)
    io = _rows(case, world)
    _loop(io, want)
    expect(backend.prepare(case.target, case.problem, case.path.name) is None, "prepare() refuses an append")
    for _ in range(2):
        backend.append(case.path.name, case.problem, io)
        _compare(world, want)


def _inputs(io: AppendIO) -> tuple[torch.Tensor, ...]:
    return (io.key, io.value, io.batch_indices, io.positions, io.kv_indices, io.kv_indptr)


def _compare(world: World, want: World) -> None:
    changed = sum(int((a != b).sum()) for a, b in zip(world.bytes(), want.bytes(), strict=True))
    expect(changed == 0, f"{changed} bytes of the cache's memory are not as they should be")


def _rows(case: Case, world: World) -> AppendIO:
    """The last rows of every request in shuffled order, of random bytes, some of them skipped."""
    p, lengths = case.problem, world.lengths
    make = torch.Generator().manual_seed(case.seed)
    owner = [n for n, count in enumerate(lengths.q_len) for _ in range(count)]
    position = [
        kv - count + i for count, kv in zip(lengths.q_len, lengths.kv_len, strict=True) for i in range(count)
    ]
    order = torch.randperm(len(owner), generator=make).tolist()
    owner, position = [owner[i] for i in order], [position[i] for i in order]
    step = {"skips": 3, "all_skipped": 1}.get(lengths.name, 0)
    for at in range(0, len(owner), step) if step else ():
        owner[at], position[at] = -1, _FAR
    key, value = (
        _random(len(owner), p.num_kv_heads, dim, p.kv_dtype, make).to(case.device)
        for dim in (p.head_dim_qk, p.head_dim_vo)
    )
    if case.form != "plain":  # as slices of a fused qkv come: rows further apart than a row is wide
        key, value = (torch.cat([t, t, t], 1)[:, p.num_kv_heads : 2 * p.num_kv_heads] for t in (key, value))
    table = world.table

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=case.device)

    return AppendIO(
        key, value, world.k, world.v, ints(owner), ints(position),
        table.kv_indices.to(case.device), table.kv_indptr.to(case.device),
    )  # fmt: skip


def _random(rows: int, heads: int, dim: int, dtype: torch.dtype, make: torch.Generator) -> torch.Tensor:
    """Any bytes at all: an append moves NaN payloads and denormals too."""
    size = rows * heads * dim * dtype.itemsize
    return torch.randint(0, 256, (size,), generator=make).to(torch.uint8).view(dtype).view(rows, heads, dim)


def _loop(io: AppendIO, want: World) -> None:
    page_size = want.problem.page_size or 1
    rows = zip(io.batch_indices.tolist(), io.positions.tolist(), strict=True)
    for n, (request, position) in enumerate(rows):
        if request >= 0:
            page = want.table.pages[request][position // page_size]
            at = (page, position % page_size)
            put(want._slots(want.kv.k), at, io.key[n])
            put(want._slots(want.kv.v), at, io.value[n])
