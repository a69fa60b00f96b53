"""The variants that the device kernels are built in: one code object each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from attn_core.problem import AttentionProblem, MaskMode, PosEncoding

HEAD_DIMS = (64, 128, 256)
"""Head dims that kernels are built for; smaller ones are padded inside a kernel."""
_HALVES = {torch.float16: ("fp16", 1), torch.bfloat16: ("bf16", 2)}
_WAVES, _PAIRED_WAVES = 4, 8
_BLOCKS = 2
"""Blocks that a compute unit runs side by side."""
_WAVE_KEYS = 16
"""Keys of a step that a wave copies on NVIDIA."""
PAIRED_ROWS = 64
"""Packed rows of the tiles that NVIDIA has paired kernels for too, where two groups of waves share a step's
keys: one block asks for as much as two others, so fewer tiles need be split."""
_RING_BYTES = 192 << 10
"""Keys and values that a paired block has room for."""
_SHARED_BYTES, _BLOCK_BYTES = 228 << 10, 1 << 10
"""Shared memory of a multiprocessor, and what each block takes besides its own."""
_JOINED_ROWS, _JOINED_DIM = 16, 128
"""Tiles of so many packed rows, or up to that head dim, can be joined by their last block on NVIDIA, as
kernels_gpu.cpp says."""
_ANY_PARTS, _FEW_PARTS = 2**31 - 1, 2
"""Of taller tiles one block reads few partials sooner than a launch begins."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One code object.

    Attributes:
        name: Stable name.
        source: File in ``csrc``.
        defines: ``NAME=VALUE``.
        entry: Symbol of its kernel.
        threads: Threads of a block.
        tile_q: Packed rows of an attention tile; 0 for another kernel.
        rows: Rows of a block of an append.
        lds: Dynamic shared memory of a block, bytes.
        joins: Partials of a tile, at most, that an attention kernel joins itself.
        turns: Blocks of a multiprocessor that suffice for any number of items, since each takes one after
            another; 0 where a block runs one item.
        blocks: Blocks of an attention kernel that a multiprocessor runs side by side, as plans count on.
        step: Keys that an attention kernel on NVIDIA takes at once.
    """

    name: str
    source: str
    defines: tuple[str, ...]
    entry: str
    threads: int
    tile_q: int = 0
    rows: int = 1
    lds: int = 0
    joins: int = 0
    turns: int = 0
    blocks: int = 2
    step: int = 64


@dataclass(frozen=True, slots=True)
class _Shape:
    """What an attention kernel is compiled for.

    Attributes:
        dtype: Type of query and products.
        fp8: Plain kernels: whether the cache is fp8 instead.
        head_dim: Head dim.
        tile_q: Packed rows; the fewer, the more do waves split the keys.
        general: Whether it takes every feature, cache type and smaller head dims.
        paired: Whether two groups of waves share the keys.
    """

    dtype: torch.dtype
    fp8: bool
    head_dim: int
    tile_q: int
    general: bool
    paired: bool = False

    @property
    def plain(self) -> bool:
        """Whether the cache is copied as it lies, without a feature that needs more."""
        return not (self.general or self.fp8)

    @property
    def name(self) -> str:
        kind = "any" if self.general else "fp8" if self.fp8 else "same"
        paired = "_paired" if self.paired else ""
        return f"attend_{_HALVES[self.dtype][0]}_{kind}_{self.head_dim}_{self.tile_q}{paired}"


@lru_cache
def attend_variants(arch: str) -> tuple[Variant, ...]:
    """Return the attention kernels of an arch."""
    return tuple(_attend(arch, shape) for shape in _shapes(arch))


@lru_cache
def misc_variants(arch: str) -> dict[str, Variant]:
    """Return the other kernels: ``merge``, ``append``, ``chain_sample``."""
    threads = {"merge": 256 if _is_amd(arch) else 512, "append": 256, "chain_sample": 256}
    return {
        name: Variant(name, "kernels_gpu_misc.cpp", (f"ATTN_KERNEL={n}",), f"attn_{name}", block)
        for n, (name, block) in enumerate(threads.items(), start=1)
    }


@lru_cache(maxsize=256)
def attend_variant(arch: str, problem: AttentionProblem, tile_q: int, paired: bool = False) -> Variant:
    """Return the attention kernel of a problem that is cut in tiles of ``tile_q`` packed rows.

    Args:
        arch: Device.
        problem: With q of a 16-bit type, k and v of the same or fp8, head dims up to 256.
        tile_q: One of :func:`tiles`.
        paired: Whether the paired kernel is asked for; see :func:`pairs`.
    """
    general = not _plain(problem)
    longest = max(problem.head_dim_qk, problem.head_dim_vo)
    dim = next(d for d in HEAD_DIMS if d >= longest)
    fp8 = not general and problem.kv_dtype != problem.q_dtype
    return _attend(arch, _Shape(problem.q_dtype, fp8, dim, tile_q, general, paired))


def attend_choices(arch: str, problem: AttentionProblem) -> tuple[Variant, ...]:
    """Return every attention kernel that plans of a problem may launch."""
    found = [attend_variant(arch, problem, tile) for tile in tiles(arch, problem)]
    if pairs(arch, problem):
        found.append(attend_variant(arch, problem, PAIRED_ROWS, True))
    return tuple(dict.fromkeys(found))


def pairs(arch: str, problem: AttentionProblem) -> bool:
    """Say whether tiles of ``PAIRED_ROWS`` have a paired kernel too."""
    plain = _plain(problem) and problem.kv_dtype == problem.q_dtype
    return plain and _wide(arch, problem.head_dim_qk)


def tiles(arch: str, problem: AttentionProblem) -> tuple[int, ...]:
    """Return the tile heights that plans of a problem may choose, least first."""
    plain = _plain(problem) and problem.kv_dtype == problem.q_dtype
    return _tiles(arch, problem.head_dim_qk, plain)


def _tiles(arch: str, head_dim: int, plain: bool) -> tuple[int, ...]:
    return (16, 64, 128) if plain and _wide(arch, head_dim) else (16, 64)


def _wide(arch: str, head_dim: int) -> bool:
    """Say whether registers hold two blocks of rows for a wave."""
    return head_dim <= 128 and not _is_amd(arch)


def _plain(problem: AttentionProblem) -> bool:
    return (
        problem.head_dim_qk == problem.head_dim_vo
        and problem.head_dim_qk in HEAD_DIMS
        and problem.mask is not MaskMode.CUSTOM
        and problem.pos_encoding is PosEncoding.NONE
        and not problem.logits_soft_cap
    )


def _is_amd(arch: str) -> bool:
    return arch.startswith("gfx")


def _shapes(arch: str) -> list[_Shape]:
    kinds = ((False, False), (True, False), (False, True))
    found = [
        _Shape(dtype, fp8, dim, tile, general)
        for dtype in _HALVES
        for dim in HEAD_DIMS
        for fp8, general in kinds
        for tile in _tiles(arch, dim, not (fp8 or general))
    ]
    tall = [s for s in found if s.plain and s.tile_q == PAIRED_ROWS and _wide(arch, s.head_dim)]
    return found + [replace(shape, paired=True) for shape in tall]


def _attend(arch: str, shape: _Shape) -> Variant:
    waves = _PAIRED_WAVES if shape.paired else _WAVES
    lds = 0 if _is_amd(arch) else _dynamic_shared(shape)
    defines = (
        f"ATTN_Q={_HALVES[shape.dtype][1]}",
        f"ATTN_KV={int(shape.fp8)}",
        f"ATTN_D={shape.head_dim}",
        f"ATTN_TILE={shape.tile_q}",
        f"ATTN_WIDE={int(shape.plain and _wide(arch, shape.head_dim))}",
        f"ATTN_WAVES={waves}",
        f"ATTN_GENERAL={int(shape.general)}",
        f"ATTN_ENTRY={shape.name}",
        *((f"ATTN_LDS={lds}",) if lds else ()),
    )
    threads = waves * (64 if _is_amd(arch) else 32)
    blocks = 1 if shape.paired else _BLOCKS
    return Variant(
        shape.name,
        "kernels_gpu.cpp",
        defines,
        shape.name,
        threads,
        shape.tile_q,
        lds=lds,
        joins=_joins(arch, shape),
        turns=_turns(shape, lds, blocks),
        blocks=blocks,
        step=waves * _WAVE_KEYS,
    )


def _turns(shape: _Shape, lds: int, blocks: int) -> int:
    """Return how many blocks a multiprocessor holds, of a kernel whose blocks take turns."""
    low = shape.tile_q == _JOINED_ROWS
    if not (lds and shape.plain and (low or shape.head_dim <= _JOINED_DIM)):
        return 0
    fit = _SHARED_BYTES // (lds + _BLOCK_BYTES)
    return fit if low else min(fit, blocks)  # tall tiles fill the registers


def _joins(arch: str, shape: _Shape) -> int:
    if _is_amd(arch):
        return 0
    if shape.tile_q == _JOINED_ROWS:
        return _ANY_PARTS
    return _FEW_PARTS if shape.head_dim <= _JOINED_DIM else 0


def joins_all(variant: Variant) -> bool:
    """Say whether plans for an attention kernel never need the merge kernel."""
    return variant.joins == _ANY_PARTS


def _dynamic_shared(shape: _Shape) -> int:
    """Return what kernels_gpu.cpp asserts of NVIDIA: a ring of steps, and q."""
    row = 2 * shape.head_dim
    if shape.paired:
        return _RING_BYTES + shape.tile_q * row
    short = shape.tile_q == 128 or (shape.tile_q == 64 and shape.head_dim > 128)
    steps = 1 if not shape.plain else 2 if short else 3
    return steps * 2 * _WAVES * _WAVE_KEYS * row + shape.tile_q * row
