"""fa2 against FlashInfer, torch SDPA and a plain Triton kernel, side by side on one GPU.

Each cell is one shape. Every library computes it in turns, from a cold L2 cache, timed by events; the
median counts. Every result is compared with float32 attention first, and a wrong one has no time. A library
that is not installed, or cannot do a cell, is left out of it.

    python benchmarks/gpu.py --csv gpu.csv --plot gpu.png
"""

from __future__ import annotations

import csv
import importlib.metadata
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from gpu_cells import DIM, KV_HEADS, TYPE, Cell, cells  # type: ignore[import-not-found]

POOL_TOKENS = 128 * 32768 // 2
FLUSH_BYTES, WORKSPACE_BYTES = 512 << 20, 1 << 30
TOLERANCE = 1.2e-2
Call = Callable[[], torch.Tensor]


class World:
    """One pool of pages that all cells draw from, and the memory of the measurement."""

    def __init__(self) -> None:
        self.device = torch.device("cuda")
        make = torch.Generator(self.device).manual_seed(0)
        tokens = POOL_TOKENS * KV_HEADS * DIM
        self.pool = [torch.empty(tokens, device=self.device, dtype=TYPE) for _ in range(2)]
        for part in self.pool:
            part.normal_(generator=make)
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)

    def batch(self, cell: Cell) -> Batch:
        """Draw pages and a query."""
        return Batch(self, cell)


class Batch:
    """A cell's tensors."""

    def __init__(self, world: World, cell: Cell) -> None:
        self.cell, self.world, device = cell, world, world.device
        self.kv = tuple(part.view(-1, cell.page, KV_HEADS, DIM) for part in world.pool)
        pages = [math.ceil(n / cell.page) for n in cell.kv_len]
        order = torch.randperm(self.kv[0].shape[0], device=device)
        need = sum(pages)
        self.indices = order.repeat(math.ceil(need / len(order)))[:need].int()  # larger than the pool: shared
        self.indptr = torch.tensor([0, *pages], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.last = torch.tensor([(n - 1) % cell.page + 1 for n in cell.kv_len], dtype=torch.int32)
        self.qo_indptr = torch.arange(len(pages) + 1, dtype=torch.int32) * cell.q_len
        self.lengths = torch.tensor(cell.kv_len, dtype=torch.int32, device=device)
        self.q = torch.randn(len(pages) * cell.q_len, cell.heads, DIM, device=device).to(TYPE)

    def dense(self, r: int, head: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a request, ``[kv_len, heads, head_dim]``."""
        ids = self.indices[int(self.indptr[r]) : int(self.indptr[r + 1])].long()
        heads = slice(None) if head is None else slice(head, head + 1)
        flat = [part[ids][:, :, heads].flatten(0, 1)[: self.cell.kv_len[r]] for part in self.kv]
        return flat[0], flat[1]

    def error(self, out: torch.Tensor) -> float:
        """Relative error of the first and last request's first and last KV head."""
        worst, group, q_len = 0.0, self.cell.heads // KV_HEADS, self.cell.q_len
        for r in {0, len(self.cell.kv_len) - 1}:
            for h in (0, KV_HEADS - 1):
                k, v = (x[:, 0].float() for x in self.dense(r, h))
                rows, heads = slice(r * q_len, (r + 1) * q_len), slice(h * group, (h + 1) * group)
                scores = torch.einsum("qhd,kd->hqk", self.q[rows, heads].float(), k) * DIM**-0.5
                at = torch.arange(q_len, device=k.device)[:, None] + len(k) - q_len
                scores.masked_fill_(torch.arange(len(k), device=k.device)[None] > at, -math.inf)
                wanted = torch.einsum("hqk,kd->qhd", scores.softmax(-1), v)
                got = out.view(-1, self.cell.heads, DIM)[rows, heads].float()
                worst = max(worst, float((got - wanted).norm() / wanted.norm()))
        return worst


def wrapped(library: Any, batch: Batch, **how: Any) -> Call:
    """Plan a cell with the wrappers of a library that has FlashInfer's API."""
    cell, world = batch.cell, batch.world
    types: dict[str, Any] = {"q_data_type": TYPE, "kv_data_type": TYPE}
    out = torch.empty_like(batch.q)
    graph = cell.kind == "graph"
    if cell.kind == "prefill" or (cell.kind == "verify" and cell.q_len > 1 and how.get("verify_by_prefill")):
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(world.workspace, "NHD", backend="fa2")
        wrapper.plan(
            batch.qo_indptr, batch.indptr, batch.indices, batch.last, cell.heads, KV_HEADS, DIM, cell.page,
            causal=True, **types,
        )  # fmt: skip
    else:
        buffers: dict[str, Any] = {}
        if graph:
            device = world.device
            buffers = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": torch.empty_like(batch.indptr, device=device),
                "paged_kv_indices_buffer": torch.empty_like(batch.indices),
                "paged_kv_last_page_len_buffer": torch.empty_like(batch.last, device=device),
            }
        cores = how.get("tensor_cores", True)
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            world.workspace, "NHD", use_tensor_cores=cores, backend="fa2" if cores else "auto", **buffers
        )
        if cell.q_len > 1:
            types["q_len_per_req"] = cell.q_len
        wrapper.plan(
            batch.indptr, batch.indices, batch.last, cell.heads, KV_HEADS, DIM, cell.page, **types
        )  # fmt: skip

    def run() -> torch.Tensor:
        wrapper.run(batch.q, batch.kv, out=out)
        return out

    return replayed(run, out) if graph else run


def replayed(run: Call, out: torch.Tensor) -> Call:
    """Capture a call and return its replay."""
    torch.cuda.synchronize()  # the plan's arrays are on their way
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()

    def replay(plan: Call = run) -> torch.Tensor:  # a replay reads what the plan owns
        graph.replay()
        return out

    return replay


class Ours:
    """The wrappers' names where FlashInfer has them."""

    def __init__(self) -> None:
        from attn_core.decode import BatchDecodeWithPagedKVCacheWrapper
        from attn_core.prefill import BatchPrefillWithPagedKVCacheWrapper

        self.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper
        self.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper


def sdpa(batch: Batch) -> Call:
    """Call torch's attention over a cache that was gathered before: no pages to follow."""
    cell = batch.cell
    if len(set(cell.kv_len)) > 1 or cell.kind == "graph" or cell.read_bytes > 5e9:
        raise NotImplementedError
    n, kv, q_len = len(cell.kv_len), cell.kv_len[0], cell.q_len
    k, v = (torch.stack([batch.dense(r)[i] for r in range(n)]).transpose(1, 2) for i in (0, 1))
    q = batch.q.view(n, q_len, cell.heads, DIM).transpose(1, 2)
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    mask = causal_lower_right(q_len, kv) if q_len > 1 else None

    def run() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2)

    def flat() -> torch.Tensor:
        return run().reshape(-1, cell.heads, DIM)

    flat()
    return run if q_len == 1 else flat


def triton_decode(batch: Batch) -> Call:
    """A plain split-KV kernel in Triton, as one writes it in an afternoon."""
    from triton_peer import paged_decode  # type: ignore[import-not-found]

    cell = batch.cell
    if cell.q_len > 1 or cell.kind == "graph":
        raise NotImplementedError
    starts = batch.indptr.to(batch.world.device)
    call: Call = paged_decode(batch.q, *batch.kv, starts, batch.indices, batch.lengths, max(cell.kv_len))
    return call


def peers() -> dict[str, Callable[[Batch], Call]]:
    """What can be measured here: name -> plans a cell."""
    found: dict[str, Callable[[Batch], Call]] = {"fa2": lambda batch: wrapped(Ours(), batch)}
    try:
        import flashinfer  # type: ignore[import-not-found]
    except ImportError:
        pass
    else:
        found["flashinfer"] = lambda batch: wrapped(flashinfer, batch, verify_by_prefill=True)
    found["triton"] = triton_decode
    found["sdpa"] = sdpa
    return found


@dataclass
class Row:
    """One library's time of one cell; ``note`` says why there is none."""

    cell: str
    kind: str
    peer: str
    us: float = math.nan
    gbps: float = math.nan
    tflops: float = math.nan
    error: float = math.nan
    note: str = ""


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def medians(world: World, calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Time calls in turns, microseconds."""
    times: dict[str, list[tuple[Any, Any]]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            world.flush.zero_()
            begin, end = (_event() for _ in range(2))
            begin.record()
            call()
            end.record()
            times[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) * 1e3 for a, b in t) for name, t in times.items()}


def measure(world: World, cell: Cell, found: dict[str, Callable[[Batch], Call]], rounds: int) -> list[Row]:
    """Run every library on one cell."""
    batch = world.batch(cell)
    calls: dict[str, Call] = {}
    errors: dict[str, float] = {}
    lost: list[Row] = []
    for name, plan in found.items():
        try:
            call = plan(batch)
            errors[name] = batch.error(call())
            torch.cuda.synchronize()
        except NotImplementedError:
            continue
        except Exception as err:
            lost.append(Row(cell.label, cell.kind, name, note=f"{type(err).__name__}: {str(err)[:200]}"))
            continue
        if errors[name] < TOLERANCE:
            calls[name] = call
        else:
            lost.append(Row(cell.label, cell.kind, name, error=errors[name], note="wrong"))
    return lost + [
        Row(cell.label, cell.kind, name, us, cell.read_bytes / us / 1e3, cell.flops / us / 1e6, errors[name])
        for name, us in medians(world, calls, rounds).items()
    ]


def save(table: Path, rows: list[Row]) -> None:
    """Write the rows so far."""
    with table.open("w", newline="") as sink:
        writer = csv.DictWriter(sink, list(Row.__dataclass_fields__))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def show(rows: list[Row], console: Console) -> None:
    """Print one line per cell."""
    names = list(dict.fromkeys(row.peer for row in rows))
    table = Table(title=f"{torch.cuda.get_device_name()}, microseconds")
    for title in ("cell", *names, "GB/s", "TFLOP/s", "flashinfer / fa2"):
        table.add_column(title, justify="left" if title == "cell" else "right")
    for label in dict.fromkeys(row.cell for row in rows):
        at = {row.peer: row for row in rows if row.cell == label}
        ours, theirs = at.get("fa2"), at.get("flashinfer")
        ratio = f"{theirs.us / ours.us:.2f}" if ours and theirs else ""
        rate = (f"{ours.gbps:.0f}", f"{ours.tflops:.0f}") if ours else ("", "")
        said = (at[n].note[:40] or f"{at[n].us:.1f}" if n in at else "" for n in names)
        table.add_row(label, *said, *rate, ratio)
    console.print(table)


def plot(rows: list[Row], path: Path) -> None:
    """Draw the speed of each cell over FlashInfer's."""
    import matplotlib.pyplot as plt

    rows = [r for r in rows if not r.note]
    labels = [r.cell for r in rows if r.peer == "flashinfer"]
    base = {r.cell: r.us for r in rows if r.peer == "flashinfer"}
    figure, axes = plt.subplots(figsize=(9, 0.22 * len(labels) + 1.5))
    for name, mark in (("fa2", "o"), ("triton", "x"), ("sdpa", "+")):
        points = [
            (base[r.cell] / r.us, labels.index(r.cell)) for r in rows if r.peer == name and r.cell in base
        ]
        axes.plot([x for x, _ in points], [y for _, y in points], mark, label=name, zorder=3)
    axes.axvline(1.0, color="black", linewidth=1, zorder=2)
    axes.grid(color="0.9", zorder=1)
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlabel("speed, FlashInfer = 1; to the right is faster")
    axes.legend(loc="upper center", bbox_to_anchor=(0.35, 1.0 + 1.5 / len(labels)), ncols=3, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(
    table: Annotated[Path | None, typer.Option("--csv", help="Write every row.")] = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="Draw speeds over FlashInfer's.")] = None,
    rounds: Annotated[int, typer.Option(help="Timed calls of each library in a cell.")] = 15,
    kind: Annotated[list[str] | None, typer.Option(help="Only cells of this kind.")] = None,
    quick: Annotated[bool, typer.Option(help="Small shapes only.")] = False,
) -> None:
    """Compare libraries on one GPU."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("needs a GPU that torch can use, got none")
    console = Console(width=170)
    names = ("torch", "triton", "flashinfer-python", "attn-hip")
    versions = []
    for name in names:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    console.print(", ".join(versions))
    world, found, rows = World(), peers(), []
    for cell in cells(quick):
        if kind and cell.kind not in kind:
            continue
        try:
            rows += measure(world, cell, found, rounds)
        except Exception as err:
            rows.append(Row(cell.label, cell.kind, "all", note=f"{type(err).__name__}: {str(err)[:200]}"))
        if table is not None:
            save(table, rows)
    show(rows, console)
    if picture is not None:
        plot(rows, picture)


if __name__ == "__main__":
    typer.run(main)
