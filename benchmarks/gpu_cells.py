"""The shapes that ``gpu.py`` measures."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

KV_HEADS, DIM, TYPE = 8, 128, torch.bfloat16


@dataclass(frozen=True)
class Cell:
    """One shape.

    Attributes:
        kind: ``decode``, ``graph`` (a decode replayed from a graph), ``ragged``, ``verify`` or ``prefill``.
        heads: Query heads.
        page: Tokens of a page.
        kv_len: Keys of each request.
        q_len: Query rows of every request.
        label: Distinct name.
    """

    kind: str
    heads: int
    page: int
    kv_len: tuple[int, ...]
    q_len: int = 1
    label: str = field(default="")

    @property
    def read_bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(self.kv_len) * KV_HEADS * DIM * 2 * TYPE.itemsize

    @property
    def flops(self) -> float:
        """Operations of causal attention."""
        pairs = sum(self.q_len * n - self.q_len * (self.q_len - 1) / 2 for n in self.kv_len)
        return 4.0 * self.heads * DIM * pairs


def cells(quick: bool) -> Iterator[Cell]:
    """The grid."""
    shapes = [(1, 512), (1, 4096), (16, 512), (16, 4096), (16, 8192), (64, 512), (64, 4096), (64, 8192)]
    shapes += [(128, 4096), (128, 8192), (64, 32768)]
    for batch, kv in shapes[:5] if quick else shapes:
        for heads in (32, 64):
            yield Cell("decode", heads, 16, (kv,) * batch, label=f"decode {batch} x {kv}, {heads}/8")
    for page in (1, 64):
        yield Cell("decode", 32, page, (4096,) * 64, label=f"decode 64 x 4096, 32/8, page {page}")
    for batch, kv in ((1, 512), (1, 4096), (4, 2048), (16, 512), (16, 2048), (16, 4096)):
        yield Cell("graph", 32, 16, (kv,) * batch, label=f"replayed decode {batch} x {kv}, 32/8")
    for seed in (1, 2, 3):
        draw = random.Random(seed)
        lengths = tuple(int(128 * 256 ** draw.random()) for _ in range(64))
        yield Cell("ragged", 32, 16, lengths, label=f"ragged decode 64, draw {seed}, 32/8")
    for heads in (32, 64):
        for q in (1, 2, 4, 8, 16):
            yield Cell("verify", heads, 16, (8192,) * 16, q, f"verify 16 x 8192, q {q}, {heads}/8")
            yield Cell("graph", heads, 16, (8192,) * 16, q, f"replayed verify 16 x 8192, q {q}, {heads}/8")
    grid = [
        (16, 16, 2048),
        (16, 64, 2048),
        (16, 512, 2048),
        (16, 2048, 2048),
        (16, 64, 8192),
        (16, 512, 8192),
    ]
    grid += [(16, 2048, 8192), (1, 512, 2048), (1, 64, 8192), (1, 512, 8192), (1, 2048, 8192)]
    for batch, q, kv in grid[:4] if quick else grid:
        yield Cell("prefill", 32, 16, (kv,) * batch, q, f"prefill {batch} x {q} of {kv}, 32/8")
