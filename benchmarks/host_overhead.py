"""What attn-core costs on the host: plan(), run(), the route decision, import. Runs anywhere.

A null backend takes the place of kernels, so the figures are Python and torch's host operators and
nothing else. Every row checks what the plan produced. Times depend on the machine; figures of
FlashInfer stand beside them as reported, measured elsewhere (0.6.18.post1, H200 host).

    uv run python benchmarks/host_overhead.py [--csv FILE]
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

import attn_core
from attn_core import plugins
from attn_core.backend import API_VERSION, DeviceImage, Path, PlanResult, RunIO
from attn_core.batch import HostBatch
from attn_core.capability import Capability
from attn_core.problem import AttentionProblem, Op
from attn_core.query import Query
from attn_core.reasons import Reason
from attn_core.route import choose, screen
from attn_core.rules import Rule
from attn_core.target import DeviceTarget, target_of

BATCHES = (1, 16, 128, 1024)
PAGES, PAGE_SIZE, HEADS, KV_HEADS, DIM = 4, 16, 32, 8, 128
REPORTED = {
    ("decode plan", 1): "73", ("decode plan", 16): "105", ("decode plan", 128): "354-758",
    ("paged prefill plan", 1): "104", ("paged prefill plan", 16): "190",
    ("paged prefill plan", 128): "689-1394",
    ("run(out=)", 1): "9.2-11.2", ("run(out=)", 16): "7.9-13.1", ("run(out=)", 128): "7.7-12.7",
}  # fmt: skip
"""FlashInfer 0.6.18.post1, microseconds: plan() with host metadata; Python above the native call of run()."""


class Null:
    """A backend without kernels."""

    api_version = API_VERSION
    name = "null"
    rank = 0
    paths = (Path("none", Capability(archs=None, ops=frozenset(Op))),)
    rules: tuple[Rule, ...] = ()

    def unavailable(self, target: DeviceTarget) -> Reason | None:
        """Return None: it is always there."""

    def prepare(self, target: DeviceTarget, problem: AttentionProblem, path: str) -> Reason | None:
        """Return None: there is nothing to prepare."""

    def plan(self, query: Query, path: str, batch: HostBatch) -> PlanResult:
        """Plan nothing."""
        return PlanResult(None)

    def run(self, launch: object, image: DeviceImage, io: RunIO) -> None:
        """Compute nothing."""


@dataclass(frozen=True)
class Row:
    """One measurement, in microseconds unless named otherwise."""

    what: str
    batch_size: int
    us: float
    checked: str
    reported: str = ""


def median_us(call: Callable[[], object], seconds: float = 0.15, rounds: int = 9) -> float:
    """Median over rounds of the mean time of a call, in microseconds."""
    for _ in range(20):
        call()
    start = time.perf_counter()
    call()
    count = max(5, int(seconds / rounds / max(time.perf_counter() - start, 1e-7)))
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(count):
            call()
        found.append((time.perf_counter() - start) / count * 1e6)
    return statistics.median(found)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts copies between devices by watching operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moves = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        kwargs = kwargs or {}
        if func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
            devices = {a.device.type for a in args if isinstance(a, torch.Tensor)}
            target = kwargs.get("device")
            if target is not None:
                devices.add(torch.device(target).type)
            self.moves += len(devices) > 1
        return func(*args, **kwargs)


def metadata(batch_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Shuffled pages for equal requests, on the host."""
    indptr = torch.arange(0, (batch_size + 1) * PAGES, PAGES, dtype=torch.int32)
    indices = torch.randperm(batch_size * PAGES).to(torch.int32)
    return indptr, indices, torch.full((batch_size,), 5, dtype=torch.int32)


def decode_rows(batch_size: int) -> Iterator[Row]:
    indptr, indices, last = metadata(batch_size)
    wrapper = attn_core.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1024, dtype=torch.uint8))

    def plan() -> None:
        wrapper.plan(indptr, indices, last, HEADS, KV_HEADS, DIM, PAGE_SIZE, q_data_type=torch.bfloat16)

    us = median_us(plan)
    state = wrapper._planned()
    assert torch.equal(state.image["kv_indices"], indices)
    assert state.image["kv_len"].tolist() == [(PAGES - 1) * PAGE_SIZE + 5] * batch_size
    with _Counter() as counter:
        plan()
    assert counter.moves == 0
    yield Row("decode plan", batch_size, us, "image", REPORTED.get(("decode plan", batch_size), ""))
    q = torch.empty(batch_size, HEADS, DIM, dtype=torch.bfloat16)
    cache = torch.empty(2, batch_size * PAGES, PAGE_SIZE, KV_HEADS, DIM, dtype=torch.bfloat16)
    kv, out = (cache[0], cache[1]), torch.empty_like(q)
    assert wrapper.run(q, kv, out=out) is out
    direct = median_us(lambda: Null.run(state.decision.backend, None, state.image, None))  # type: ignore[arg-type]
    for what, call in (
        ("run(out=)", lambda: wrapper.run(q, kv, out=out)),
        ("run()", lambda: wrapper.run(q, kv)),
    ):
        reported = REPORTED.get((what, batch_size), "")
        yield Row(what, batch_size, median_us(call) - direct, "out", reported)


def prefill_rows(batch_size: int) -> Iterator[Row]:
    indptr, indices, last = metadata(batch_size)
    qo = torch.arange(0, (batch_size + 1) * 4, 4, dtype=torch.int32)
    wrapper = attn_core.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1024, dtype=torch.uint8))

    def plan() -> None:
        wrapper.plan(
            qo,
            indptr,
            indices,
            last,
            HEADS,
            KV_HEADS,
            DIM,
            PAGE_SIZE,
            causal=True,
            q_data_type=torch.bfloat16,
        )

    us = median_us(plan)
    assert torch.equal(wrapper._planned().image["qo_indptr"], qo)
    what = "paged prefill plan"
    yield Row(what, batch_size, us, "image", REPORTED.get((what, batch_size), ""))


def route_row() -> Row:
    indptr, indices, last = metadata(16)
    wrapper = attn_core.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1024, dtype=torch.uint8))
    wrapper.plan(indptr, indices, last, HEADS, KV_HEADS, DIM, PAGE_SIZE)
    query = wrapper._planned().query
    screened = screen(target_of(torch.device("cpu")), query.problem, plugins.registry().backends)
    assert choose(screened, query).candidate == "null/none"
    return Row("choose()", 16, median_us(lambda: choose(screened, query)), "candidate")


def import_row() -> Row:
    name = "BatchDecodeWithPagedKVCacheWrapper"  # the package alone imports next to nothing
    code = (
        "import time; import torch; a = time.perf_counter(); "
        f"from attn_core import {name}; print(time.perf_counter() - a)"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(5)
    ]
    seconds = [float(run.stdout) for run in runs]
    return Row("import the wrappers after torch", 0, statistics.median(seconds) * 1e6, "exit 0")


def table(rows: list[Row]) -> Table:
    made = Table(title="Host overhead, microseconds (null backend)")
    for name in ("what", "batch", "attn-core", "FlashInfer 0.6.18 (reported)", "checked"):
        made.add_column(name, justify="left" if name == "what" else "right")
    for row in rows:
        made.add_row(row.what, str(row.batch_size or ""), f"{row.us:.2f}", row.reported, row.checked)
    return made


def growth(rows: list[Row], what: str) -> float:
    """Microseconds per request between batch 16 and 1024."""
    us = {row.batch_size: row.us for row in rows if row.what == what}
    return (us[1024] - us[16]) / (1024 - 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", help="also write the rows to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    plugins.use(plugins.Registry((Null(),), (), (), {"null": "benchmark"}))
    rows: list[Row] = []
    console = Console()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for batch_size in progress.track(BATCHES, description="plan and run"):
            rows += decode_rows(batch_size)
            rows += prefill_rows(batch_size)
    rows += [route_row(), import_row()]
    console.print(table(rows))
    for what in ("decode plan", "paged prefill plan"):
        console.print(f"{what}: {growth(rows, what):.3f} us per request from batch 16 to 1024")
    if args.csv:
        with open(args.csv, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(asdict(rows[0])))
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)


if __name__ == "__main__":
    main()
