"""What torch.compile support costs: operators, eager calls, compiled calls against the size of the cache.

Every row checks a result. Times depend on the machine and on what else runs there; the ratios hold.

    uv run python benchmarks/compile.py [--quick]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch._dynamo.testing import CompileCounterWithBackend

from attn_compile.registry import register
from attn_core import BatchDecodeWithPagedKVCacheWrapper, append_paged_kv_cache, tracing
from attn_core.op_table import Arg, OpRow, Role

HEADS, KV_HEADS, DIM, PAGE_SIZE, BACKEND = 8, 2, 64, 16, "reference"
PAGE_BYTES = 2 * PAGE_SIZE * KV_HEADS * DIM * 4


@dataclass(frozen=True)
class Row:
    """One measurement: what, microseconds, against what, how it was checked."""

    what: str
    us: float
    against: str
    checked: str


def us(call: Callable[[], object], seconds: float = 0.2, rounds: int = 15) -> float:
    """Least over rounds of the mean time of a call, in microseconds of this thread."""
    for _ in range(20):
        call()
    start = time.thread_time()
    call()
    count = max(3, int(seconds / rounds / max(time.thread_time() - start, 1e-6)))
    found = []
    for _ in range(rounds):
        start = time.thread_time()
        for _ in range(count):
            call()
        found.append((time.thread_time() - start) / count * 1e6)
    return min(found)


def operators() -> Iterator[Row]:
    """Twelve arguments, eight of them tensors, one written; the kernel only counts."""
    seen = 0

    def kernel(*args: Any) -> None:
        nonlocal seen
        seen += 1

    names = [f"t{n}" for n in range(7)]
    consts = tuple(Arg(f"c{n}", "int", Role.CONST) for n in range(4))
    row = OpRow("benchmark", (*map(Arg, names), *consts, Arg("out", role=Role.CACHE)), kernel)
    ours = register(row).op

    def typed(
        t0: torch.Tensor, t1: torch.Tensor, t2: torch.Tensor, t3: torch.Tensor, t4: torch.Tensor,
        t5: torch.Tensor, t6: torch.Tensor, c0: int, c1: int, c2: int, c3: int, out: torch.Tensor,
    ) -> None:  # fmt: skip
        kernel()

    ints = dict.fromkeys(("c0", "c1", "c2", "c3"), int)
    tensors = dict.fromkeys((*names, "out"), torch.Tensor)
    typed.__annotations__ = {**tensors, **ints, "return": None}
    theirs = torch.library.custom_op("attn_benchmark::custom", typed, mutates_args=("out",))
    args = (*(torch.zeros(4) for _ in names), 1, 2, 3, 4, torch.zeros(4))
    direct = us(lambda: kernel(*args))
    for what, op in (("registered operator", ours), ("torch.library.custom_op beside it", theirs)):
        before = seen
        cost = us(lambda op=op: op(*args)) - direct  # type: ignore[misc]
        assert seen > before
        yield Row(f"{what}, over a direct call", cost, "goal C7: <= 5 us, 4x less", "kernel ran")


def planned(
    pages: int, batch: int = 4
) -> tuple[BatchDecodeWithPagedKVCacheWrapper, tuple[torch.Tensor, ...]]:
    """A planned wrapper, and what append takes: the last place of every request."""
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(1024, dtype=torch.uint8), backend=BACKEND)
    indptr = torch.arange(batch + 1, dtype=torch.int32) * 2
    indices = torch.randperm(pages)[: 2 * batch].int()
    last = torch.full((batch,), 5, dtype=torch.int32)
    wrapper.plan(indptr, indices, last, HEADS, KV_HEADS, DIM, PAGE_SIZE, q_data_type=torch.float32)
    positions = torch.full((batch,), PAGE_SIZE + 4, dtype=torch.int32)
    return wrapper, (torch.arange(batch).int(), positions, indices, indptr, last)


def eager() -> Iterator[Row]:
    """run() with and without attn-compile installed, and compiled."""
    wrapper, _ = planned(64)
    q, cache = torch.randn(4, HEADS, DIM), torch.randn(64, 2, PAGE_SIZE, KV_HEADS, DIM)
    out = torch.empty_like(q)
    want = wrapper.run(q, cache).clone()
    kept = tracing.state()
    times: dict[str, list[float]] = {"without": [], "with": []}
    for _ in range(5):
        for name, tracer in (("without", None), ("with", kept)):
            assert not isinstance(tracer, str)
            tracing.install(tracer)
            times[name].append(us(lambda: wrapper.run(q, cache, out=out)))
    assert torch.equal(out, want)
    without, installed = (statistics.median(times[name]) for name in ("without", "with"))
    yield Row("eager run(out=)", without, "", "out")
    yield Row(
        "the same, attn-compile installed", installed, f"{installed - without:+.2f}, goal <= +0.3", "out"
    )
    step: Any = torch.compile(wrapper.run, fullgraph=True)
    assert torch.equal(step(q, cache), want)
    cost = us(lambda: step(q, cache))
    yield Row(
        "compiled run()", cost, f"{cost - us(lambda: wrapper.run(q, cache)):+.1f} over eager run()", "out"
    )


CACHES: dict[str, tuple[Callable[[int], tuple[int, ...]], Callable[[torch.Tensor], Any]]] = {
    "views kv[i] of [2, pages]": (lambda n: (2, n, PAGE_SIZE, KV_HEADS, DIM), lambda x: (x[0], x[1])),
    "views kv[:, i]": (lambda n: (n, 2, PAGE_SIZE, KV_HEADS, DIM), lambda x: (x[:, 0], x[:, 1])),
    "one interleaved tensor": (lambda n: (n, 2, PAGE_SIZE, KV_HEADS, DIM), lambda x: x),
    "layer of a pool": (lambda n: (2, n // 2, 2, PAGE_SIZE, KV_HEADS, DIM), lambda x: x[1]),
}
MODES = {"False": False, "None": None, "True": True}


def _layer(wrapper: BatchDecodeWithPagedKVCacheWrapper, at: tuple[torch.Tensor, ...]) -> Callable[..., Any]:
    batch, positions, indices, indptr, last = at

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Any) -> Any:
        append_paged_kv_cache(k, v, batch, positions, cache, indices, indptr, last, backend=BACKEND)
        return wrapper.run(q, cache)

    return layer


def sizes(nbytes: tuple[int, ...], modes: dict[str, bool | None]) -> Iterator[Row]:
    """Append and attend, compiled, over a small and a large cache."""
    for name, (shape, take) in CACHES.items():
        for mode, dynamic in modes.items():
            times: list[float] = []
            for size in nbytes:
                torch._dynamo.reset()
                storage = torch.zeros(shape(size // PAGE_BYTES))
                cache = take(storage)
                wrapper, at = planned(32)
                q, k, v = torch.randn(4, HEADS, DIM), *(torch.randn(4, KV_HEADS, DIM) for _ in "kv")
                f = _layer(wrapper, at)
                want = f(q, k, v, cache)
                bits = storage.sum()
                step = torch.compile(f, fullgraph=True, dynamic=dynamic)
                assert torch.equal(step(q, k, v, cache), want)
                times.append(us(partial(step, q, k, v, cache)))
                assert torch.equal(storage.sum(), bits)
            ratio = times[1] / times[0]
            yield Row(
                f"{name}, dynamic={mode}",
                times[1],
                f"{ratio:.2f}x the small cache, goal C9: 1.1",
                "out, cache",
            )


def recompiles() -> Iterator[Row]:
    """Plans of growing KV, and many plans of one wrapper."""
    counter = CompileCounterWithBackend("eager")
    torch._dynamo.reset()
    cache = torch.randn(512, 2, PAGE_SIZE, KV_HEADS, DIM)
    wrapper, _ = planned(512)
    step: Any = torch.compile(wrapper.run, fullgraph=True, backend=counter)
    q = torch.randn(4, HEADS, DIM)
    for plan in range(40):
        pages = 1 + 3 * plan
        indptr = torch.arange(5, dtype=torch.int32) * pages
        indices = torch.randperm(512)[: 4 * pages].int()
        last = torch.full((4,), 7, dtype=torch.int32)
        wrapper.plan(indptr, indices, last, HEADS, KV_HEADS, DIM, PAGE_SIZE, q_data_type=torch.float32)
        want = wrapper.run(q, cache)
        assert isinstance(want, torch.Tensor)
        assert torch.equal(step(q, cache), want)
    yield Row(
        "compilations over 40 plans of growing KV", counter.frame_count, "goal: 1 per batch size", "out"
    )


def _model(layer: Callable[..., Any], pool: torch.Tensor) -> Callable[..., Any]:
    caches = tuple(pool)

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for cache in caches:
            q = q + layer(q, k, v, cache)
        return q

    return model


def layers() -> Iterator[Row]:
    """Time until the first answer of a model of many layers over one pool, traced as one graph."""
    for count in (1, 8, 32):
        torch._dynamo.reset()
        wrapper, at = planned(32)
        pool = torch.randn(count, 32, 2, PAGE_SIZE, KV_HEADS, DIM)
        model = _model(_layer(wrapper, at), pool)
        q, k, v = torch.randn(4, HEADS, DIM), *(torch.randn(4, KV_HEADS, DIM) for _ in "kv")
        want = model(q, k, v)
        step = torch.compile(model, fullgraph=True, options={"fx_graph_cache": False})
        start = time.perf_counter()
        got = step(q, k, v)
        seconds = time.perf_counter() - start
        assert torch.equal(got, want)
        yield Row(f"first call, {count} layers of one pool", seconds * 1e6, f"{seconds:.1f} s", "out")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one mode, 16 and 64 MiB")
    given = parser.parse_args()
    torch.set_num_threads(1)
    large = 1 << 26 if given.quick else 1 << 30
    modes: dict[str, bool | None] = {"None": None} if given.quick else {**MODES}
    rows = [*operators(), *eager(), *recompiles(), *layers(), *sizes((1 << 24, large), modes)]
    table = Table(title=f"torch.compile, microseconds (torch {torch.__version__}, one thread)")
    for name in ("what", "us", "against", "checked"):
        table.add_column(name, justify="right" if name == "us" else "left")
    for row in rows:
        table.add_row(escape(row.what), f"{row.us:.2f}", row.against, row.checked)
    Console().print(table)


if __name__ == "__main__":
    main()
