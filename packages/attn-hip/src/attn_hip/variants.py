"""The variants that the device kernels are built in: one code object each."""

from __future__ import annotations

from dataclasses import dataclass

from attn_core.problem import AttentionProblem


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
    """

    name: str
    source: str
    defines: tuple[str, ...]
    entry: str
    threads: int
    tile_q: int = 0
    rows: int = 1
    lds: int = 0


def attend_variants(arch: str) -> tuple[Variant, ...]:
    """Return the attention kernels of an arch."""
    threads = 4 * (64 if arch.startswith("gfx") else 32)
    return tuple(
        Variant(f"attend_bf16_{d}", "kernels_gpu.cpp", (), f"attend_bf16_{d}", threads, 64) for d in (64, 128)
    )


def misc_variants(arch: str) -> dict[str, Variant]:
    """Return the other kernels: ``merge``, ``append``, ``chain_sample``."""
    return {}


def attend_variant(arch: str, problem: AttentionProblem, tile_q: int) -> Variant:
    """Return the attention kernel of a problem that is cut in tiles of ``tile_q`` packed rows."""
    dim = max(problem.head_dim_qk, problem.head_dim_vo)
    return attend_variants(arch)[0 if dim <= 64 else 1]


def tiles(arch: str, problem: AttentionProblem) -> tuple[int, ...]:
    """Return the tile heights that plans of a problem may choose, least first."""
    return (64,)
