"""What is measured: batches, and the memory that a batch and its peers need."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

PAGE, DIM, KV_HEADS = 16, 128, 8
FLEX_PAGE = 128
"""FlexAttention's own page; smaller blocks are slower."""
LEAST_BYTES = 192 << 20
"""Copies of a small batch take turns, so that keys and values come from memory and not from a cache."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
"""By label, the type of keys and values; queries over fp8 keys are bfloat16."""
OPS = ("decode", "ragged", "verify", "prefill")


@dataclass(frozen=True, slots=True)
class Cell:
    """One batch. Every request has ``q_len`` rows; verify and prefill are causal.

    Attributes:
        op: One of :data:`OPS`.
        kind: Key of :data:`DTYPES`.
        num_qo_heads: Query heads; there are 8 key/value heads of 128.
        q_len: Query rows of every request.
        kv_lens: Keys of each request.
        flex: Whether FlexAttention is asked too; it compiles for seconds per cell.
    """

    op: str
    kind: str
    num_qo_heads: int
    q_len: int
    kv_lens: tuple[int, ...]
    flex: bool = False

    @property
    def batch(self) -> int:
        """Requests."""
        return len(self.kv_lens)

    @property
    def label(self) -> str:
        """Name of the row, unlike any other's."""
        low, high = min(self.kv_lens), max(self.kv_lens)
        keys = str(high) if low == high else f"{low}..{high}"
        return f"{self.op} {self.kind} {self.num_qo_heads}/{KV_HEADS} {self.batch} x {self.q_len} x {keys}"

    @property
    def kv_dtype(self) -> torch.dtype:
        """Type of keys and values."""
        return DTYPES[self.kind]

    @property
    def dtype(self) -> torch.dtype:
        """Type of queries and outputs."""
        return torch.bfloat16 if self.kind == "fp8" else self.kv_dtype

    @property
    def causal(self) -> bool:
        """Whether rows see different keys."""
        return self.q_len > 1

    @property
    def pages(self) -> tuple[int, ...]:
        """Pages of each request."""
        return tuple(-(-n // PAGE) for n in self.kv_lens)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values that are read."""
        return 2 * sum(self.kv_lens) * KV_HEADS * DIM * self.kv_dtype.itemsize

    @property
    def flops(self) -> float:
        """Of both products, over the keys that are seen."""
        seen = sum(self.q_len * (n - (self.q_len - 1) / 2) for n in self.kv_lens)
        return 4.0 * self.num_qo_heads * DIM * seen

    @property
    def copies(self) -> int:
        """How many copies of the cache take turns."""
        return max(1, -(-LEAST_BYTES // self.kv_bytes))

    @property
    def need_bytes(self) -> int:
        """Memory of all peers: pages, contiguous keys and Flex's pages of every copy, and one gather."""
        kept = self.copies * self.kv_bytes * (3 if self.flex else 2)
        widened = 2 if self.kind == "fp8" else 1
        return kept + 2 * widened * self.kv_bytes + (256 << 20)


def grid(quick: bool) -> list[Cell]:
    """Return all cells, or those of a run of two minutes."""
    return _quick() if quick else _full()


def _quick() -> list[Cell]:
    both = ("float32", "bfloat16")
    found = [
        Cell("decode", kind, heads, 1, (2048,) * 4, flex=heads == 32) for kind in both for heads in (32, 64)
    ]
    found.append(Cell("decode", "fp8", 32, 1, (2048,) * 4))
    found += [Cell("ragged", kind, 32, 1, ragged(8, 128, 4096)) for kind in both]
    found += [Cell("verify", kind, 32, 4, (2048,) * 4) for kind in both]
    return found + [Cell("prefill", kind, 32, 512, (512,)) for kind in both]


def _full() -> list[Cell]:
    both, heads = ("float32", "bfloat16"), (32, 64)
    found: list[Cell] = []
    for kind in both:
        for h in heads:
            for batch in (1, 4, 16, 64):
                for kv_len in (512, 2048, 8192, 32768):
                    flex = (batch, kv_len) in ((4, 2048), (16, 2048), (1, 8192))
                    found.append(Cell("decode", kind, h, 1, (kv_len,) * batch, flex))
    found += [Cell("decode", "fp8", h, 1, (2048,) * 16) for h in heads]
    for kind in both:
        found += [
            Cell("ragged", kind, h, 1, ragged(b, 128, 8192), (h, b) == (32, 8))
            for h in heads
            for b in (8, 32)
        ]
        found += [
            Cell("verify", kind, h, q, (8192,) * 4, (h, q) in ((32, 4), (32, 16)))
            for h in heads for q in (1, 2, 4, 8, 16)
        ]  # fmt: skip
        rows = ((64, 2048), (512, 512), (512, 2048), (1024, 1024), (2048, 2048))
        found += [Cell("prefill", kind, 32, q, (kv,), kv == 2048) for q, kv in rows]
    found += [Cell("ragged", "fp8", 32, 1, ragged(8, 128, 8192))]
    found += [Cell("verify", "fp8", 32, q, (8192,) * 4) for q in (1, 4)]
    found += [Cell("prefill", "fp8", 32, 512, (2048,))]
    return found


def ragged(batch: int, low: int, high: int) -> tuple[int, ...]:
    """Return lengths spread evenly over the logarithm, the shortest and the longest among them."""
    draw = random.Random(batch)
    middle = (round(low * (high / low) ** draw.random()) for _ in range(batch - 2))
    return (low, *middle, high)
