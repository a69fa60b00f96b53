"""What a plan must be, said slowly: sets of (request, head, packed row, key) and nothing clever."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch


class Item(NamedTuple):
    request: int
    q_tile: int
    kv_head: int
    num_heads: int
    kv_begin: int
    kv_end: int
    slot: int
    merge: int


class Merge(NamedTuple):
    request: int
    q_tile: int
    kv_head: int
    first_slot: int
    num_slots: int
    slot_stride: int
    arrived: int
    launched: int


@dataclass(frozen=True)
class Asked:
    """Input of a plan."""

    q_len: tuple[int, ...]
    kv_len: tuple[int, ...]
    group: int = 1
    num_kv_heads: int = 1
    tile_q: int = 4
    kv_tile: int = 8
    min_chunk: int = 16
    workers: int = 2
    max_heads: int = 1
    window_left: int = -1
    causal: bool = False
    split: int = 0
    max_slots: int = -1
    joined: int = 0
    fine: int = 0
    pace: tuple[int, ...] = (0,) * 7

    def packed(self, request: int) -> int:
        return self.q_len[request] * self.group

    def tiles(self, request: int) -> int:
        return -(-self.packed(request) // self.tile_q)

    def rows(self, request: int, tile: int) -> range:
        return range(tile * self.tile_q, min((tile + 1) * self.tile_q, self.packed(request)))

    def visible(self, request: int, packed_row: int) -> set[int]:
        kv, q = self.kv_len[request], self.q_len[request]
        position = kv - q + packed_row // self.group
        return {
            key
            for key in range(kv)
            if (not self.causal or key <= position)
            and (self.window_left < 0 or key >= position - self.window_left)
        }

    def alone(self, request: int) -> Asked:
        return replace(self, q_len=(self.q_len[request],), kv_len=(self.kv_len[request],))


@dataclass(frozen=True)
class Made:
    """Output of a plan."""

    items: list[Item]
    merges: list[Merge]
    slots: int
    max_heads: int
    chunk: int


def plan(native: Any, asked: Asked) -> Made:
    how, indptr, kv_len = _native(native, asked)
    made = how.plan(indptr.data_ptr(), kv_len.data_ptr(), len(asked.q_len))
    items = torch.full((made.num_items, native.ITEM_WORDS), -7, dtype=torch.int32)
    merges = torch.full((made.num_merges, native.ITEM_WORDS), -7, dtype=torch.int32)
    counts = torch.full((native.COUNT_WORDS,), -7, dtype=torch.int32)
    made.write(items.data_ptr(), merges.data_ptr(), counts.data_ptr())
    assert counts.tolist() == [
        made.num_items,
        made.num_merges,
        made.num_slots,
        made.max_heads,
        0,
        made.num_launched,
    ]
    assert made.num_launched == sum(Merge(*row).launched for row in merges.tolist())
    return Made(
        [Item(*row) for row in items.tolist()], [Merge(*row) for row in merges.tolist()],
        made.num_slots, made.max_heads, made.chunk,
    )  # fmt: skip


def capacity(native: Any, asked: Asked, *limits: int) -> tuple[int, int, int]:
    items, merges, slots = _native(native, asked)[0].capacity(*limits)
    return items, merges, slots


def _native(native: Any, a: Asked) -> tuple[Any, torch.Tensor, torch.Tensor]:
    how = native.PlanInput(
        a.group, a.num_kv_heads, a.tile_q, a.kv_tile, a.min_chunk, a.fine, a.workers, a.max_heads,
        a.window_left, a.causal, a.pace, a.split, a.max_slots, a.joined,
    )  # fmt: skip
    indptr = torch.tensor([0, *a.q_len], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return how, indptr, torch.tensor(a.kv_len, dtype=torch.int32)


def check(asked: Asked, made: Made) -> None:
    """Assert everything that makes a plan right."""
    _check_cover(asked, made)
    _check_slots(asked, made)
    _check_joins(asked, made)
    _check_grid(asked, made)


def _tiles(asked: Asked) -> set[tuple[int, int, int]]:
    return {
        (r, t, h)
        for r in range(len(asked.q_len))
        for t in range(asked.tiles(r))
        for h in range(asked.num_kv_heads)
    }


def _check_cover(asked: Asked, made: Made) -> None:
    """Every row of every head sees each visible key in exactly one item, and no key is asked for twice."""
    covered: dict[tuple[int, int, int], list[int]] = {}
    for item in made.items:
        assert 1 <= item.num_heads <= made.max_heads <= asked.num_kv_heads
        assert 0 <= item.kv_begin <= item.kv_end <= asked.kv_len[item.request]
        for head in range(item.kv_head, item.kv_head + item.num_heads):
            keys = covered.setdefault((item.request, item.q_tile, head), [])
            keys.extend(range(item.kv_begin, item.kv_end))
    assert covered.keys() == _tiles(asked)
    for (request, tile, _), keys in covered.items():
        assert len(keys) == len(set(keys))
        for row in asked.rows(request, tile):
            assert asked.visible(request, row) <= set(keys)


def _check_slots(asked: Asked, made: Made) -> None:
    """Slots are 0..n-1, each written once; a tile is direct, or merged whole in order of its keys."""
    written: dict[int, tuple[int, int, int, int]] = {}
    direct: set[tuple[int, int, int]] = set()
    for item in made.items:
        for n in range(item.num_heads):
            tile = (item.request, item.q_tile, item.kv_head + n)
            if item.slot < 0:
                assert tile not in direct
                direct.add(tile)
            else:
                assert item.slot + n not in written
                written[item.slot + n] = (*tile, item.kv_begin)
    assert sorted(written) == list(range(made.slots))
    read: list[int] = []
    merged: set[tuple[int, int, int]] = set()
    for merge in made.merges:
        tile = (merge.request, merge.q_tile, merge.kv_head)
        assert tile not in merged
        merged.add(tile)
        slots = [merge.first_slot + i * merge.slot_stride for i in range(merge.num_slots)]
        begins = [written[slot][3] for slot in slots]
        assert all(written[slot][:3] == tile for slot in slots)
        assert begins == sorted(set(begins))
        assert len(begins) >= 2
        read += slots
    assert sorted(read) == sorted(written)
    assert direct | merged == _tiles(asked)
    assert not direct & merged


def _check_joins(asked: Asked, made: Made) -> None:
    """An item names the merge that its partial of a head is for; counts begin at 0."""
    assert all(merge.arrived == 0 for merge in made.merges)
    assert all(merge.launched == (merge.num_slots > asked.joined) for merge in made.merges)
    for item in made.items:
        for n in range(item.num_heads if item.slot >= 0 else 0):
            merge = made.merges[item.merge + n]
            slots = [merge.first_slot + i * merge.slot_stride for i in range(merge.num_slots)]
            assert item.slot + n in slots


def _check_grid(asked: Asked, made: Made) -> None:
    """Chunks begin on the grid and none is there that no row of its tile sees."""
    for item in made.items:
        if made.chunk > 0:
            assert item.kv_begin % made.chunk == 0
            assert item.kv_end - item.kv_begin <= made.chunk
        else:
            assert item.kv_begin == 0
        seen = set().union(
            *(asked.visible(item.request, row) for row in asked.rows(item.request, item.q_tile))
        )
        assert not seen or seen & set(range(item.kv_begin, item.kv_end))
        assert seen or item.kv_begin == item.kv_end == 0


def cost(item: Item) -> int:
    return (item.kv_end - item.kv_begin) * item.num_heads
