"""Split tiles that their last block joins: the same bits whichever that is, run after run, on two streams."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import pytest
import torch

from attn_core.decode import BatchDecodeWithPagedKVCacheWrapper

from .gpu_world import (
    DIM,
    HEADS,
    KV_HEADS,
    PAGE,
    PAGES,
    TYPE,
    Decode,
    Lengths,
    World,
    capture,
    close,
    eager,
    fa2,
    same,
    workspace,
)  # fmt: skip

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures(fa2.__name__),
]

ARRIVED = 6
"""The word of a MergeItem that counts blocks."""


def arrived(wrapper: Any) -> torch.Tensor:
    """Return the counts of a wrapper's split tiles."""
    torch.cuda.synchronize()
    found = wrapper._state.image["merges"].view(-1, 8)[:, ARRIVED].cpu()
    assert found.numel() > 0, "nothing is split"
    return found


def lengths(draw: Random, q_len: int) -> Lengths:
    """Return up to four lengths that PAGES hold, one of them long enough to be split."""
    found = [draw.randrange(600, 3000)]
    found += draw.choices((1, 15, 16, 17, 64, 200, 513, draw.randrange(1, 900)), k=draw.randrange(4))
    draw.shuffle(found)
    return tuple(max(n, q_len) for n in found)


def test_a_replay_never_changes_a_bit() -> None:
    world = World()
    d = Decode(world, 2, 4)
    d.plan(world.table((3000, 900)))
    graph = capture(d.run)
    want = d.replay(graph)
    close(want, eager(world, d.q, d.table, 4, "reference"))
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(3000):
        graph.replay()
        differing += (d.out != want[0]).any() | (d.lse != want[1]).any()
    assert differing.item() == 0
    assert not arrived(d.wrapper).any()


def test_two_streams_join_side_by_side() -> None:
    world = World()
    both = [Decode(world, 2), Decode(world, 2, 3)]
    tables = [world.table((3000, 200)), world.table((40, 2600))]
    for d, table in zip(both, tables, strict=True):
        d.plan(table)
    graphs = [capture(d.run) for d in both]
    wants = [eager(world, d.q, table, d.q_len, "fa2") for d, table in zip(both, tables, strict=True)]
    streams = [torch.cuda.Stream() for _ in both]
    differing = torch.zeros(2, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for _ in range(1000):
        for n, (d, graph, want, stream) in enumerate(zip(both, graphs, wants, streams, strict=True)):
            with torch.cuda.stream(stream):
                graph.replay()
                differing[n] += (d.out != want[0]).any()
    torch.cuda.synchronize()
    assert differing.tolist() == [0, 0]
    for d in both:
        assert not arrived(d.wrapper).any()


@pytest.mark.parametrize("q_len", [1, 2, 4])
def test_random_plans_one_after_another(q_len: int) -> None:
    """Each plan counts anew, be the one before it captured, replayed or refused."""
    draw, world = Random(q_len), World(q_len)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True, backend="fa2")
    for _ in range(40):
        table = world.table(lengths(draw, q_len))
        q = world.q((table[0].numel() - 1) * q_len)
        options = {"q_data_type": TYPE, "q_len_per_req": q_len}
        wrapper.plan(*table, HEADS, KV_HEADS, DIM, PAGE, **options)
        found = [wrapper.run(q, world.kv, return_lse=True) for _ in range(5)]
        with pytest.raises(ValueError, match="core"):
            wrapper.plan(table[0].flip(0), *table[1:], HEADS, KV_HEADS, DIM, PAGE, **options)
        found.append(wrapper.run(q, world.kv, return_lse=True))
        for again in found[1:]:
            same(again, found[0])
        close(found[0], eager(world, q, table, q_len, "reference"))
        assert not arrived(wrapper).any()


@pytest.mark.parametrize(("dim", "q_len"), [(64, 1), (128, 1), (256, 1), (64, 20), (128, 20)])
def test_more_items_than_blocks(dim: int, q_len: int) -> None:
    """Blocks of a captured grid take the items that are left, each once, and leave the count at 0."""
    make = torch.Generator("cuda").manual_seed(dim)
    batch, heads = 150, 16
    kv = torch.randn(PAGES, 2, PAGE, heads, dim, generator=make, device="cuda").to(TYPE)
    q = torch.randn(batch * q_len, heads, dim, generator=make, device="cuda").to(TYPE)
    world, draw, found = World(), Random(dim), []
    d = Decode(world, batch, q_len)
    for _ in range(3):
        table = world.table((700, *(draw.randrange(q_len, 33) for _ in range(batch - 1))))
        options: dict[str, Any] = {"q_data_type": TYPE, "q_len_per_req": q_len}
        d.wrapper.plan(*table, heads, heads, dim, PAGE, **options)
        out, lse = d.wrapper.run(q, kv, return_lse=True)
        graph = capture(partial(d.wrapper.run, q, kv, out=out, lse=lse, return_lse=True))
        eagerly = BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True, backend="fa2")
        eagerly.plan(*table, heads, heads, dim, PAGE, **options)
        want = eagerly.run(q, kv, return_lse=True)
        differing = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(300):
            out.fill_(float("nan"))
            graph.replay()
            differing += (out != want[0]).any() | (lse != want[1]).any()
        assert differing.item() == 0
        counts = d.wrapper._state.image["counts"].tolist()
        assert counts[0] > d.wrapper._state.launch.items
        assert counts[4] == 0
        oracle = BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True, backend="reference")
        oracle.plan(*table, heads, heads, dim, PAGE, **options)
        found.append((want, oracle.run(q, kv, return_lse=True)))
    for got, wanted in found:
        close(got, wanted)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("q_len", "kv_len"), [(5, (1600, 1100)), (11, (1585, 80)), (16, (1599, 1281)), (30, (1600, 900))]
)
def test_two_partials_of_a_tall_tile(dim: int, q_len: int, kv_len: Lengths) -> None:
    """Its last block joins them, full tile or not, with the bits of every run; a whole tile is as near."""
    make, world = torch.Generator("cuda").manual_seed(dim + q_len), World()
    kv = torch.randn(PAGES, 2, PAGE, KV_HEADS, dim, generator=make, device="cuda").to(TYPE)
    q = torch.randn(2 * q_len, HEADS, dim, generator=make, device="cuda").to(TYPE)
    table, found = world.table(kv_len), []
    for backend, how in (
        ("fa2", {"fixed_split_size": 50}),
        ("fa2", {"disable_split_kv": True}),
        ("reference", {}),
    ):
        wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True, backend=backend)
        wrapper.plan(*table, HEADS, KV_HEADS, dim, PAGE, q_data_type=TYPE, q_len_per_req=q_len, **how)
        found.append(wrapper.run(q, kv, return_lse=True))
        for _ in range(20):
            same(wrapper.run(q, kv, return_lse=True), found[-1])
        if "fixed_split_size" in how:
            assert wrapper._state.launch.merges == 0
            assert not arrived(wrapper).any()
    close(found[0], found[2])
    close(found[1], found[2])


@pytest.mark.parametrize("dim", [40, 64, 72, 128, 160, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 16])
def test_every_head_dim_and_group(dim: int, group: int) -> None:
    """Rows of a lane in vectors or one by one; as many rows as waves, fewer, more."""
    make = torch.Generator("cuda").manual_seed(dim * group)
    kv = torch.randn(PAGES, 2, PAGE, KV_HEADS, dim, generator=make, device="cuda").to(TYPE)
    q = torch.randn(2, KV_HEADS * group, dim, generator=make, device="cuda").to(TYPE)
    table = World().table((3000, 1111))
    found = []
    for backend in ("fa2", "reference"):
        wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True, backend=backend)
        wrapper.plan(*table, KV_HEADS * group, KV_HEADS, dim, PAGE, q_data_type=TYPE)
        found.append(wrapper.run(q, kv, return_lse=True))
        if backend == "fa2":
            assert not arrived(wrapper).any()
    close(*found)


@pytest.mark.parametrize("dim", [40, 64, 66, 128, 160, 256])
@pytest.mark.parametrize("q_len", [5, 16, 20, 40])
def test_tall_tiles(dim: int, q_len: int) -> None:
    """Tiles of 64 rows and of 128, full or not; with head dims of 160 on, a launch joins them."""
    make, world, group = torch.Generator("cuda").manual_seed(dim * q_len), World(), HEADS // KV_HEADS
    kv = torch.randn(PAGES, 2, PAGE, KV_HEADS, dim, generator=make, device="cuda").to(TYPE)
    q = torch.randn(2 * q_len, KV_HEADS * group, dim, generator=make, device="cuda").to(TYPE)
    for kv_len in ((3000, 1111), (2900, 40), (2000, 2000)):
        table, found = world.table(kv_len), []
        for backend in ("fa2", "reference"):
            wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True, backend=backend)
            wrapper.plan(*table, HEADS, KV_HEADS, dim, PAGE, q_data_type=TYPE, q_len_per_req=q_len)
            found.append(wrapper.run(q, kv, return_lse=True))
            if backend == "fa2":
                same(wrapper.run(q, kv, return_lse=True), found[0])
                assert not arrived(wrapper).any()
        close(*found)
