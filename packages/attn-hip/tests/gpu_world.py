"""What tests on a GPU of this machine share: a paged cache, a captured decode, comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from attn_core import plugins
from attn_core.decode import BatchDecodeWithPagedKVCacheWrapper
from attn_hip.backend import Fa2Backend

PAGE, KV_HEADS, HEADS, DIM = 16, 2, 8, 128
TYPE = torch.bfloat16
PAGES = 400
Lengths = tuple[int, ...]


@pytest.fixture
def fa2() -> Iterator[Fa2Backend]:
    """An fa2 that has loaded nothing yet. Where there is a GPU its absence is a failure, not a skip."""
    made = Fa2Backend()
    others = tuple(b for b in plugins.registry().backends if b.name != "fa2")
    old = plugins.use(plugins.Registry((made, *others), (), (), {b.name: "test" for b in (made, *others)}))
    torch.cuda.synchronize()
    yield made
    torch.cuda.synchronize()
    plugins.use(old)


def cuda(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def workspace(size: int = 64 << 20) -> torch.Tensor:
    return torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")


class World:
    """A cache of random pages; a batch takes its pages in a random order."""

    def __init__(self, seed: int = 1) -> None:
        self.make = torch.Generator("cuda").manual_seed(seed)
        self.kv = torch.randn(PAGES, 2, PAGE, KV_HEADS, DIM, generator=self.make, device="cuda").to(TYPE)

    def q(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, HEADS, DIM, generator=self.make, device="cuda").to(TYPE)

    def table(self, kv_len: Lengths) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        pages = [-(-n // PAGE) for n in kv_len]
        assert sum(pages) <= PAGES
        ids = torch.randperm(PAGES, generator=self.make, device="cuda")[: sum(pages)].int()
        last = [n - max(0, p - 1) * PAGE for n, p in zip(kv_len, pages, strict=True)]
        return torch.tensor([0, *pages]).cumsum(0).int().cuda(), ids, cuda(*last)


class Decode:
    """A graph-mode decode wrapper with its buffers, and the tensors of its run."""

    def __init__(self, world: World, batch: int, q_len: int = 1, **made: Any) -> None:
        self.world, self.q_len, self.batch = world, q_len, batch
        buffers = [torch.zeros(n, dtype=torch.int32, device="cuda") for n in (batch + 1, PAGES, batch)]
        self.wrapper = BatchDecodeWithPagedKVCacheWrapper(
            workspace(), use_cuda_graph=True, use_tensor_cores=made.pop("use_tensor_cores", True),
            paged_kv_indptr_buffer=buffers[0], paged_kv_indices_buffer=buffers[1],
            paged_kv_last_page_len_buffer=buffers[2], backend="fa2", **made,
        )  # fmt: skip
        self.q = world.q(batch * q_len)
        self.out = torch.full_like(self.q, float("nan"))
        self.lse = torch.full(self.q.shape[:2], float("nan"), device="cuda")

    def plan(self, table: tuple[torch.Tensor, ...], **options: Any) -> None:
        options = {"q_data_type": TYPE, "q_len_per_req": self.q_len, **options}
        self.table = table
        self.wrapper.plan(*table, HEADS, KV_HEADS, DIM, PAGE, **options)

    def run(self) -> None:
        self.wrapper.run(self.q, self.world.kv, out=self.out, lse=self.lse, return_lse=True)

    def replay(self, graph: torch.cuda.CUDAGraph) -> tuple[torch.Tensor, torch.Tensor]:
        self.out.fill_(float("nan"))
        self.lse.fill_(float("nan"))
        graph.replay()
        return self.out.clone(), self.lse.clone()


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture with no call before it: what run() needs was made by plan()."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        run()
    return graph


def eager(
    world: World, q: torch.Tensor, table: tuple[torch.Tensor, ...], q_len: int, backend: str, **o: Any
) -> Any:
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True, backend=backend)
    wrapper.plan(*table, HEADS, KV_HEADS, DIM, PAGE, q_data_type=TYPE, q_len_per_req=q_len, **o)
    return wrapper.run(q, world.kv, return_lse=True)


def same(found: Any, want: Any) -> None:
    for a, b in zip(found, want, strict=True):
        assert torch.equal(a, b), (a.float() - b.float()).abs().max()


def close(found: Any, want: Any) -> None:
    torch.testing.assert_close(found[0].float(), want[0].float(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(found[1], want[1], atol=5e-3, rtol=5e-3)
