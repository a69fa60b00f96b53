"""The native planner: how evenly its work items keep a GPU busy, and what a plan costs.

Items are replayed in order, each on the compute unit that is free first (304: MI300X, 256: MI355X); a unit
runs one item at a time and an item takes as long as it has keys. The ideal is an even share, or the shortest
chunk that may be cut off where that is longer. It is a model of balance and no timing of any GPU.

    uv run python benchmarks/planner.py [--batches N]
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import statistics
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from attn_hip.host import Host
from attn_hip.plan import NOT_MEASURED

TILE_Q, KV_TILE, MIN_CHUNK, FINE, GROUP = 16, 64, 128, 16, 4
KINDS = {
    "64 requests, 128 to 32768 keys": (64, 64, 128, 32768),
    "1 to 256 requests, 1 to 32768 keys": (1, 256, 1, 32768),
    "1 to 16 requests, 16 to 4096 keys": (1, 16, 16, 4096),
}


def planner(native: Any, heads: int, workers: int) -> Any:
    return native.PlanInput(
        GROUP, heads, TILE_Q, KV_TILE, MIN_CHUNK, FINE, workers, 1, -1, True, NOT_MEASURED, 0, -1, 0
    )


def plan(how: Any, qo_indptr: torch.Tensor, kv_len: torch.Tensor) -> Any:
    return how.plan(qo_indptr.data_ptr(), kv_len.data_ptr(), kv_len.numel())


def balance(native: Any, made: Any, units: int) -> float:
    """Return ideal over actual time."""
    words = native.ITEM_WORDS
    items = torch.empty(made.num_items, words, dtype=torch.int32)
    merges = torch.empty(made.num_merges, words, dtype=torch.int32)
    counts = torch.empty(native.COUNT_WORDS, dtype=torch.int32)
    made.write(items.data_ptr(), merges.data_ptr(), counts.data_ptr())
    times = (items[:, 5] - items[:, 4]).tolist()
    free = [0] * units
    for t in times:
        heapq.heapreplace(free, free[0] + t)
    return float(max(sum(times) / units, min(MIN_CHUNK, max(times))) / max(free))


def spread(native: Any, units: int, kind: tuple[int, int, int, int], batches: int) -> list[float]:
    draw, (least, most, low, high) = random.Random(units), kind
    found = []
    for _ in range(batches):
        count = draw.randint(least, most)
        lengths = [int(math.exp(draw.uniform(math.log(low), math.log(high)))) for _ in range(count)]
        qo, kv = torch.arange(count + 1, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
        found.append(balance(native, plan(planner(native, draw.choice((1, 4, 8)), units), qo, kv), units))
    return sorted(found)


def cost_us(native: Any, batch: int, longest: int = 8000) -> float:
    """Least time of a native plan over a few rounds, in microseconds."""
    how = planner(native, 8, 304)
    qo = torch.arange(batch + 1, dtype=torch.int32)
    kv = torch.randint(100, longest, (batch,), dtype=torch.int32)
    rounds = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(10):
            plan(how, qo, kv)
        rounds.append((time.perf_counter() - start) / 10 * 1e6)
    return min(rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=1000)
    args = parser.parse_args()
    host = Host()
    reason = host.prepare()
    if reason is not None:
        raise SystemExit(str(reason))
    native, console = host.module(), Console()
    made = Table(
        title=f"ideal / makespan over {args.batches} random batches, group {GROUP}, 1, 4 or 8 KV heads"
    )
    for name in ("batches of", "units", "least", "1 %", "5 %", "median", "below 0.85"):
        made.add_column(name, justify="left" if name == "batches of" else "right")
    for name, kind in KINDS.items():
        for units in (304, 256):
            found = spread(native, units, kind, args.batches)
            at = [found[len(found) * p // 100] for p in (0, 1, 5)]
            below = sum(x < 0.85 for x in found)
            cells = [f"{x:.3f}" for x in (*at, statistics.median(found))]
            made.add_row(name, str(units), *cells, str(below))
    console.print(made)
    costs = {batch: cost_us(native, batch) for batch in (1, 16, 128, 1024)}
    console.print("native plan, us: " + ", ".join(f"batch {b}: {us:.1f}" for b, us in costs.items()))
    costs = {batch: cost_us(native, batch, 1500) for batch in (1, 16, 128)}
    console.print("of short requests: " + ", ".join(f"batch {b}: {us:.1f}" for b, us in costs.items()))


if __name__ == "__main__":
    main()
