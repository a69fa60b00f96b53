"""From a query and a batch to a launch and its index arrays. The cutting itself is native code."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from attn_core.backend import PlanResult
from attn_core.batch import HostBatch
from attn_core.problem import AttentionProblem, MaskMode, Op
from attn_core.query import GraphLimits, Query

from . import variants
from .gpu import Gpu
from .launch import Launch, kernel_of
from .launch_gpu import GpuLaunch, tables_of

_SPLIT_AUTO, _SPLIT_NEVER = 0, -1
_UNLIMITED = -1
_DECODES = (Op.DECODE, Op.VERIFY)
_MOST_ROWS = 2**31 - 1  # native code counts in int32
_CPU_MIN_CHUNK = 512
_GPU_KV_TILE, _GPU_FINE = 64, 16
_GPU_MIN_CHUNK = {16: 128, 64: 256, 128: 256}
_GPU_BLOCKS = 2
"""Blocks of a merge kernel that a multiprocessor runs side by side."""
_HIP_MERGE_ROWS, _CUDA_MERGE_ROWS = 16, 4
"""Packed rows of a block that joins partials, at least."""
NOT_MEASURED = (0,) * 7
"""The pace of a device that nobody has measured."""
_KEY_BYTES = 512
"""Key and value of a head for which paces were measured."""
_INVARIANT_TILE = 64
"""Tiles of other heights add a row's keys up in another order: the rest of the batch may not choose."""
SHORT_KV = 2048
"""Keys up to which tiles of that height are sooner done than taller ones, if all run at once."""
_LEAST_BUSY = 0.8
"""Share of multiprocessors that must have a paired tile."""
_PAIRED_KV = 256
"""Keys of a prefill from which what pairs save is more than what joining them costs."""
_TALLEST_TILE = 128
"""Where it is built: of a verify, bound by reading, it reads once what two lower tiles read twice."""
_PACKED_ROWS = 16
"""Up to so many packed rows a CPU item takes several KV heads: a decode, bound by reading."""
_PACKED_TOKENS, _PACKED_BYTES = 16, 256 << 10
"""What a step of such an item reads stays in the second-level cache."""


@dataclass(frozen=True, slots=True)
class Style:
    """How a kind of device wants its work cut.

    Attributes:
        tile_q: Packed rows (query rows x gqa_group_size) per tile.
        kv_tile: Keys per step; chunks are multiples.
        min_chunk: Keys of a chunk, at least.
        max_heads: KV heads of an item, at most.
        fine: Short chunks may be any multiple of it where that keeps workers busier; 0 for no such choice.
        pace: What splitting costs and brings there: ``Pace`` of csrc/planner.h.
        joined: Tiles of up to so many partials are joined by their last item; others by a launch.
        variant: Kernel of a GPU.
    """

    tile_q: int
    kv_tile: int
    min_chunk: int
    max_heads: int
    fine: int = 0
    pace: tuple[int, ...] = NOT_MEASURED
    joined: int = 0
    variant: variants.Variant | None = None


@dataclass(frozen=True, slots=True)
class _Measured:
    """Costs in keys of a block among few, as in ``Pace``; blocks of a multiprocessor that suffice."""

    start: int
    part: int
    join: int
    gather: int
    saturated: float


_H200 = {
    16: _Measured(118, 60, 90, 2, 0.81),
    64: _Measured(80, 150, 440, 4, 1.4),
    128: _Measured(150, 200, 290, 0, 1.3),
}
"""By tile height. A block among few takes 80, 55, 36 keys of bfloat16, head_dim 128, in a microsecond."""
_H200_PAIRED = _Measured(150, 110, 650, 0, 0.7)
"""Of a tile whose block has a multiprocessor to itself."""


def plan(native: Any, query: Query, batch: HostBatch) -> PlanResult:
    """Cut a batch into work items.

    Args:
        native: The native module.
        query: What is asked. Under capture sizes and launch depend on its limits and workspace only.
        batch: Host arrays.

    Raises:
        ValueError: The batch needs more items than can be numbered.
    """
    style = style_of(native, query)
    cut = _cut(native, query, batch, style)
    launch = Launch(query.problem, style.tile_q, cut.slots, kernel_of(native, query.problem))
    return PlanResult(launch, cut.image, cut.bytes)


def plan_gpu(native: Any, gpu: Gpu, query: Query, batch: HostBatch) -> PlanResult:
    """Cut a batch into work items for kernels that are loaded.

    Args:
        native: The native module.
        gpu: Holds the kernels.
        query: As for :func:`plan`.
        batch: Host arrays.

    Raises:
        ValueError: The batch needs more items than can be numbered.
    """
    target, problem = query.target, query.problem
    style = style_of(native, query)
    cut = _cut(native, query, batch, style)
    variant = style.variant
    assert variant is not None
    attend = gpu.get(target, variant)
    merges = 0 if variants.joins_all(variant) else cut.merges if cut.launched else 0
    merge = gpu.get(target, variants.misc_variants(target.arch)["merge"]) if merges else attend
    launch = GpuLaunch(
        problem,
        style.tile_q,
        _grid(query, variant, cut.items),
        _merge_grid(query, style.tile_q, merges),
        cut.slots,
        variant.name,
        native,
        attend,
        merge,
    )
    return PlanResult(launch, {**cut.image, **tables_of(native, problem)}, cut.bytes)


def _grid(query: Query, variant: variants.Variant, items: int) -> int:
    """Return the blocks to launch, under capture for up to ``items`` items."""
    if query.graph is None or not variant.turns:
        return items
    # One less than fill the device: else some first blocks share a multiprocessor while others have none.
    blocks = variant.turns * max(1, query.target.num_cus)
    return min(items, blocks - 1 if variant.turns > 1 else blocks)


def _merge_grid(query: Query, tile: int, merges: int) -> int:
    """Return the blocks that join up to ``merges`` tiles; those of NVIDIA take what there is in turns."""
    if query.target.kind == "hip":
        return merges * (tile // _HIP_MERGE_ROWS)
    return min(merges * (tile // _CUDA_MERGE_ROWS), _GPU_BLOCKS * max(1, query.target.num_cus))


@dataclass(frozen=True, slots=True)
class _Cut:
    """A batch cut into items: sizes (under capture capacities), arrays, bytes of workspace.

    ``launched`` says whether a merge kernel may have something to join.
    """

    items: int
    merges: int
    slots: int
    image: dict[str, torch.Tensor]
    bytes: int
    launched: bool


def _cut(native: Any, query: Query, batch: HostBatch, style: Style) -> _Cut:
    problem, graph = query.problem, query.graph
    slot_bytes = 4 * style.tile_q * (problem.head_dim_vo + 1)
    slots = _UNLIMITED if query.workspace_bytes is None else query.workspace_bytes // slot_bytes
    how = _input(native, problem, style, _workers(query, style), slots)
    made = how.plan(batch.qo_indptr.data_ptr(), batch.kv_len.data_ptr(), query.batch.batch_size)
    if graph is None:
        sizes = (made.num_items, made.num_merges, made.num_slots)
    else:
        sizes = how.capacity(*_bounds(problem, graph))
    image = _image(native, made, sizes[0], sizes[1], padded=graph is not None)
    launched = graph is not None or made.num_launched > 0
    return _Cut(*sizes, image, sizes[2] * slot_bytes, launched)


def _workers(query: Query, style: Style) -> int:
    return max(1, query.target.num_cus) * (1 if style.variant is None else style.variant.blocks)


def style_of(native: Any, query: Query) -> Style:
    """Choose tile and chunk sizes from what a captured graph keeps, else from the batch."""
    problem, shape, graph = query.problem, query.batch, query.graph
    group = problem.gqa_group_size
    if query.target.kind != "cpu":
        return _gpu_style(native, query)
    if graph is None:
        rows = shape.max_q_len
    elif problem.op in _DECODES:
        rows = graph.total_q // max(1, graph.batch_size)
    else:
        rows = max(1, graph.total_q - graph.batch_size + 1)
    packed = rows * group
    heads = 1
    if packed <= _PACKED_ROWS:
        row_bytes = (problem.head_dim_qk + problem.head_dim_vo) * problem.kv_dtype.itemsize
        heads = max(1, _PACKED_BYTES // (_PACKED_TOKENS * row_bytes))
    return Style(native.tile_q_for(min(packed, _MOST_ROWS)), native.kv_tile(), _CPU_MIN_CHUNK, heads)


def _gpu_style(native: Any, query: Query) -> Style:
    problem, arch = query.problem, query.target.arch
    tile = _fitting(_wanted_tile(native, query), variants.tiles(arch, problem))
    variant = variants.attend_variant(arch, problem, tile, _pairs(query, tile))
    if query.target.kind == "hip":
        return Style(tile, _GPU_KV_TILE, _GPU_MIN_CHUNK[tile], 1, _GPU_FINE, variant=variant)
    pace, step = _pace(query, variant), variant.step
    return Style(tile, step, step, 1, step, pace, variant.joins, variant)


def _pairs(query: Query, tile: int) -> bool:
    """Say whether tiles that stay whole keep the device busy, a paired block on each multiprocessor."""
    problem, cus = query.problem, max(1, query.target.num_cus)
    _, batch, q_len = _rows(query)
    if tile != variants.PAIRED_ROWS or q_len <= 0 or problem.batch_invariant:
        return False
    if not variants.pairs(query.target.arch, problem):
        return False
    if problem.op not in _DECODES and query.batch.max_kv_len < _PAIRED_KV:
        return False
    tiles = batch * -(-q_len * problem.gqa_group_size // tile) * problem.num_kv_heads
    return _LEAST_BUSY * cus <= tiles <= cus


def _wanted_tile(native: Any, query: Query) -> int:
    problem, graph, group = query.problem, query.graph, query.problem.gqa_group_size
    if problem.batch_invariant and problem.op not in _DECODES:
        return _INVARIANT_TILE
    total_q, batch, q_len = _rows(query)
    if problem.op in _DECODES and q_len * group > _INVARIANT_TILE:
        return _TALLEST_TILE
    tile = int(native.cta_tile_q(total_q, batch, q_len, group, graph is not None))
    return min(tile, _INVARIANT_TILE) if graph is None and _is_short(query) else tile


def _is_short(query: Query) -> bool:
    """Say whether lower tiles, which are more, all run at once and are done soon."""
    problem, shape = query.problem, query.batch
    rows = shape.total_q * problem.gqa_group_size
    tiles = (rows // _INVARIANT_TILE + shape.batch_size) * problem.num_kv_heads
    if shape.uniform_q_len is not None:
        each = -(-shape.uniform_q_len * problem.gqa_group_size // _INVARIANT_TILE)
        tiles = shape.batch_size * each * problem.num_kv_heads
    return tiles <= _GPU_BLOCKS * query.target.num_cus and shape.max_kv_len <= SHORT_KV


def _pace(query: Query, variant: variants.Variant) -> tuple[int, ...]:
    """Return what was measured on an H200, for its number of multiprocessors."""
    problem, cus = query.problem, max(1, query.target.num_cus)
    paired, low = variant.blocks == 1, variant.tile_q <= _PACKED_ROWS
    measured = _H200_PAIRED if paired else _H200[variant.tile_q]
    share = 1.0
    if low:  # bound by memory: of shorter rows more blocks are needed to ask for enough
        row_bytes = (problem.head_dim_qk + problem.head_dim_vo) * problem.kv_dtype.itemsize
        share = min(max(1.0, _KEY_BYTES / row_bytes), variant.blocks / measured.saturated)
    # The blocks of a large grid, as captured ones are, do not each begin on a multiprocessor of their own,
    # unless they take turns. A decode is cut for that always, so that a replay has the bits of an eager run.
    even = variant.turns or (query.graph is None and problem.op not in _DECODES)
    spread = cus if even else 0
    workers = cus * variant.blocks
    saturated, crowded = round(measured.saturated * share * cus), workers * 5 // 6 if low else workers
    return measured.start, measured.part, measured.join, measured.gather, saturated, spread, crowded


def _fitting(tile: int, built: tuple[int, ...]) -> int:
    """Return the least tile that is built and not lower than wanted, else the tallest."""
    return min((t for t in built if t >= tile), default=max(built))


def _rows(query: Query) -> tuple[int, int, int]:
    """Return query rows in all, requests, and rows of each request where all are equal, else -1."""
    graph, shape = query.graph, query.batch
    if graph is None:
        uniform = shape.uniform_q_len
        return shape.total_q, shape.batch_size, -1 if uniform is None else uniform
    return graph.total_q, graph.batch_size, _captured_q_len(query.problem, graph)


def _captured_q_len(problem: AttentionProblem, graph: GraphLimits) -> int:
    # Decode keeps its rows per request under capture, so it gets the tile an eager plan gets.
    return graph.total_q // max(1, graph.batch_size) if problem.op in _DECODES else -1


def _bounds(problem: AttentionProblem, graph: GraphLimits) -> tuple[int, int, int, int, int]:
    total = graph.max_pages * (problem.page_size or 1)
    longest = total if graph.max_kv_len is None else min(total, graph.max_kv_len)
    return graph.batch_size, graph.total_q, _captured_q_len(problem, graph), longest, total


@lru_cache(maxsize=256)
def _input(native: Any, problem: AttentionProblem, style: Style, workers: int, max_slots: int) -> Any:
    split = _SPLIT_AUTO
    if problem.disable_split_kv:
        split = _SPLIT_NEVER
    elif problem.fixed_split_size is not None:
        split = problem.fixed_split_size * (problem.page_size or 1)
    return native.PlanInput(
        problem.gqa_group_size, problem.num_kv_heads, style.tile_q, style.kv_tile, style.min_chunk,
        style.fine, workers,
        style.max_heads, problem.window_left, problem.mask is MaskMode.CAUSAL, style.pace, split, max_slots,
        style.joined,
    )  # fmt: skip


def _image(native: Any, made: Any, items: int, merges: int, *, padded: bool) -> dict[str, torch.Tensor]:
    """Return the arrays that the kernels read: one block, cut in three."""
    words = native.ITEM_WORDS
    sizes = (words * items, words * merges, native.COUNT_WORDS)
    make = torch.zeros if padded else torch.empty
    block = make(sum(sizes), dtype=torch.int32, device="cpu")
    start = block.data_ptr()
    made.write(start, start + 4 * sizes[0], start + 4 * (sizes[0] + sizes[1]))
    return dict(zip(("items", "merges", "counts"), block.split_with_sizes(sizes), strict=True))
