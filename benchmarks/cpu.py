"""Attention of fa2 on the host CPU against torch's, in one process, interleaved.

Every cell plans a batch, checks fa2's answer against each peer's, then takes turns: fa2, peer, peer, fa2, ...
Keys and values are larger than the caches of the CPU. The read rate of the machine, a sum over the same bytes
on the same threads, is measured in the same turns. Figures depend on the machine and on what else it does.

    uv run python benchmarks/cpu.py [--threads N] [--quick] [--csv FILE] [--plot FILE.png]
"""

from __future__ import annotations

import argparse
import csv
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention

import attn_core
from attn_core import plugins

PAGE, DIM = 16, 128
LEAST_BYTES = 192 << 20
"""Keys and values of a cell, at least: several copies take turns where one is smaller."""
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}

PEERS = {"gather + SDPA": "#2a6f97", "contiguous SDPA": "#e07a1f"}
"""What fa2 is compared with, and its colour."""

Call = Callable[[int], torch.Tensor]
"""Runs on one of the copies, by number."""


@dataclass(frozen=True)
class Cell:
    """One batch. Every request has q_len rows and kv_len keys; prefill and verify are causal."""

    op: str
    dtype: torch.dtype
    num_qo_heads: int
    num_kv_heads: int
    batch: int
    q_len: int
    kv_len: int

    @property
    def name(self) -> str:
        """What the row is called."""
        kind = str(self.dtype).removeprefix("torch.")
        heads = f"{self.num_qo_heads}/{self.num_kv_heads}"
        return f"{self.op} {kind} {heads} {self.batch} x {self.q_len} x {self.kv_len}"

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that are read."""
        return 2 * self.batch * self.kv_len * self.num_kv_heads * DIM * self.dtype.itemsize

    @property
    def flops(self) -> float:
        """Of the two products, over the keys that are seen."""
        seen = self.q_len * (self.kv_len - (self.q_len - 1) / 2)
        return 4.0 * self.batch * self.num_qo_heads * DIM * seen


@dataclass
class Result:
    """Times of one cell, in milliseconds."""

    cell: Cell
    ms: Mapping[str, float]
    error: float
    rounds: int
    threads: int = field(default_factory=torch.get_num_threads)

    @property
    def gb_s(self) -> float:
        """fa2's rate over keys and values."""
        return self.cell.kv_bytes / self.ms["fa2"] / 1e6

    @property
    def gflop_s(self) -> float:
        """fa2's arithmetic rate."""
        return self.cell.flops / self.ms["fa2"] / 1e6

    @property
    def read_share(self) -> float:
        """fa2's rate over the keys and values, as a share of the rate at which they can be read."""
        return self.ms["read"] / self.ms["fa2"]

    def ratio(self, peer: str) -> float:
        """Time of a peer over time of fa2."""
        return self.ms[peer] / self.ms["fa2"]


def cells(quick: bool) -> list[Cell]:
    both = (torch.float32, torch.bfloat16)
    heads = ((32, 8), (64, 8))
    shapes = ((4, 2048),) if quick else ((4, 2048), (16, 2048), (1, 16384))
    found = [Cell("decode", dt, *h, b, 1, kv) for dt in both for h in heads for b, kv in shapes]
    found += [Cell("verify", dt, 32, 8, 4, 4, 2048) for dt in both]
    prefills = ((512, 512),) if quick else ((512, 512), (512, 2048), (1024, 1024))
    return found + [Cell("prefill", dt, 32, 8, 1, q, kv) for dt in both for q, kv in prefills]


class World:
    """Copies of one batch, and the same keys and values without pages."""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        pages = cell.batch * cell.kv_len // PAGE
        self.copies = max(1, -(-LEAST_BYTES // cell.kv_bytes))
        make = torch.Generator().manual_seed(0)
        shape = (pages, 2, PAGE, cell.num_kv_heads, DIM)
        self.caches = [torch.randn(shape, generator=make).to(cell.dtype) for _ in range(self.copies)]
        self.pages = torch.randperm(pages, generator=make)
        rows = cell.batch * cell.q_len
        self.q = torch.randn(rows, cell.num_qo_heads, DIM, generator=make).to(cell.dtype)
        # [batch, heads, rows, dim], as torch wants it
        self.q4 = self.q.view(cell.batch, cell.q_len, cell.num_qo_heads, DIM).transpose(1, 2).contiguous()
        self.dense = [self.gather(cache) for cache in self.caches]
        self.mask = None
        if cell.q_len > 1:
            self.mask = torch.ones(cell.q_len, cell.kv_len, dtype=torch.bool).tril(cell.kv_len - cell.q_len)

    def gather(self, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the pages of every request together: what torch's own attention needs first."""
        c = self.cell
        parts = cache[self.pages].view(c.batch, c.kv_len // PAGE, 2, PAGE, c.num_kv_heads, DIM)
        k, v = (
            parts[:, :, n].reshape(c.batch, c.kv_len, c.num_kv_heads, DIM).transpose(1, 2) for n in range(2)
        )
        return k, v

    def sdpa(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Run torch's attention; rows as fa2 returns them."""
        square = self.mask is not None and self.cell.q_len == self.cell.kv_len
        out = scaled_dot_product_attention(
            self.q4, k, v, attn_mask=None if square else self.mask, is_causal=square, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(self.q.shape)


def fa2(world: World) -> Call:
    """Plan once, run on any copy: the caches have the same pages."""
    c = world.cell
    per = c.kv_len // PAGE
    indptr = torch.arange(0, (c.batch + 1) * per, per, dtype=torch.int32)
    last = torch.full((c.batch,), PAGE, dtype=torch.int32)
    ids, workspace = world.pages.int(), torch.empty(64 << 20, dtype=torch.uint8)
    out = torch.empty_like(world.q)
    wrapper: attn_core.BatchDecodeWithPagedKVCacheWrapper | attn_core.BatchPrefillWithPagedKVCacheWrapper
    heads = (c.num_qo_heads, c.num_kv_heads, DIM, PAGE)
    if c.op == "prefill":
        wrapper = attn_core.BatchPrefillWithPagedKVCacheWrapper(workspace, backend="fa2")
        qo = torch.arange(0, (c.batch + 1) * c.q_len, c.q_len, dtype=torch.int32)
        wrapper.plan(qo, indptr, ids, last, *heads, causal=True, q_data_type=c.dtype)
    else:
        wrapper = attn_core.BatchDecodeWithPagedKVCacheWrapper(
            workspace, use_tensor_cores=True, backend="fa2"
        )
        wrapper.plan(indptr, ids, last, *heads, q_data_type=c.dtype, q_len_per_req=c.q_len)

    def run(copy: int) -> torch.Tensor:
        wrapper.run(world.q, world.caches[copy], out=out)
        return out

    return run


def peers(world: World) -> dict[str, Call]:
    """Return torch's attention over gathered pages, and over keys that never were in pages."""
    return {
        "gather + SDPA": lambda copy: world.sdpa(*world.gather(world.caches[copy])),
        "contiguous SDPA": lambda copy: world.sdpa(*world.dense[copy]),
    }


def measure(cell: Cell, rounds: int) -> Result:
    world = World(cell)
    calls: dict[str, Call] = {"fa2": fa2(world), **peers(world)}
    calls["read"] = lambda copy: world.caches[copy].view(torch.float32).sum()
    want = calls["fa2"](0).clone()
    error = max(
        float((call(0) - want).abs().max()) for name, call in calls.items() if name not in ("fa2", "read")
    )
    if not error <= TOLERANCE[cell.dtype]:
        raise AssertionError(f"{cell.name}: fa2 and torch differ by {error}")
    times: dict[str, list[float]] = {name: [] for name in calls}
    for n in range(rounds):
        names = list(calls) if n % 2 else list(reversed(calls))
        for at, name in enumerate(names):
            start = time.perf_counter()
            calls[name]((n * len(names) + at) % world.copies)
            times[name].append((time.perf_counter() - start) * 1e3)
    return Result(cell, {name: statistics.median(found) for name, found in times.items()}, error, rounds)


def table(results: list[Result]) -> Table:
    made = Table(title=f"fa2 on {results[0].threads} CPU thread(s), page {PAGE}, head_dim {DIM}")
    for name in ("cell", "fa2 ms", "GB/s K+V", "of read", "GFLOP/s", "x gather+SDPA", "x SDPA", "max diff"):
        made.add_column(name, justify="left" if name == "cell" else "right", no_wrap=name == "cell")
    for r in results:
        made.add_row(
            r.cell.name, f"{r.ms['fa2']:.2f}", f"{r.gb_s:.1f}", f"{r.read_share:.0%}", f"{r.gflop_s:.0f}",
            f"{r.ratio('gather + SDPA'):.2f}", f"{r.ratio('contiguous SDPA'):.2f}", f"{r.error:.1e}",
        )  # fmt: skip
    return made


def summary(results: list[Result]) -> list[str]:
    """Geometric means per entry point and type."""
    groups: dict[str, list[Result]] = {}
    for r in results:
        groups.setdefault(f"{r.cell.op} {str(r.cell.dtype).removeprefix('torch.')}", []).append(r)
    return [
        f"{name}: {statistics.geometric_mean(r.ratio('gather + SDPA') for r in found):.2f}x gather + SDPA, "
        f"{statistics.geometric_mean(r.ratio('contiguous SDPA') for r in found):.2f}x contiguous SDPA, "
        f"{statistics.geometric_mean(r.read_share for r in found):.0%} of the read rate"
        for name, found in groups.items()
    ]


def write_csv(path: str, results: list[Result], about: str) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        names = list(results[0].ms)
        head = [
            "op",
            "dtype",
            "num_qo_heads",
            "num_kv_heads",
            "batch",
            "q_len",
            "kv_len",
            "threads",
            "rounds",
        ]
        writer.writerow([*head, *(f"{name} ms" for name in names), "max_diff", "machine"])
        for r in results:
            c = r.cell
            facts = (c.op, str(c.dtype).removeprefix("torch."), c.num_qo_heads, c.num_kv_heads, c.batch)
            times = (f"{r.ms[name]:.4f}" for name in names)
            writer.writerow([*facts, c.q_len, c.kv_len, r.threads, r.rounds, *times, f"{r.error:.2e}", about])


def draw(path: str, results: list[Result], about: str) -> None:
    """Write a bar chart of the ratios; the line at 1 is torch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.42 * len(results)), layout="constrained")
    places = range(len(results))
    for n, (peer, colour) in enumerate(PEERS.items()):
        ratios = [result.ratio(peer) for result in results]
        bars = axes.barh([at + 0.38 * n for at in places], ratios, 0.36, label=f"over {peer}", color=colour)
        axes.bar_label(bars, [f"{ratio:.1f}" for ratio in ratios], padding=3, fontsize=8)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.margins(x=0.1)
    axes.set_yticks([at + 0.19 for at in places], [result.cell.name for result in results], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("times faster than torch (log scale); op, type, query/KV heads, batch x q_len x kv_len")
    axes.set_title(f"fa2 on the CPU: {about}", fontsize=9)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def machine() -> str:
    """Name the CPU and the instruction set that fa2 uses on it."""
    backend = next(b for b in plugins.registry().backends if b.name == "fa2")
    doctor: Callable[[], Mapping[str, object]] = backend.doctor  # type: ignore[attr-defined]
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            model = next(
                (line.split(":")[1].strip() for line in lines if line.startswith("model name")), model
            )
    except OSError:
        pass
    return f"{model}, {doctor().get('isa')}, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--quick", action="store_true", help="a third of the cells")
    parser.add_argument("--csv", help="also write the rows to this file")
    parser.add_argument("--plot", help="also draw the ratios to this file (needs matplotlib)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    console = Console() if sys.stdout.isatty() else Console(width=140)
    results: list[Result] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for cell in progress.track(cells(args.quick), description="cells"):
            results.append(measure(cell, args.rounds))
    about = machine()
    console.print(about)
    console.print(table(results))
    for line in summary(results):
        console.print(line)
    if args.csv:
        write_csv(args.csv, results, about)
    if args.plot:
        draw(args.plot, results, about)


if __name__ == "__main__":
    main()
