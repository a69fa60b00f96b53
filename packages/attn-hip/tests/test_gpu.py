"""On a GPU of this machine: capture and replay, replanning, streams, threads. Skipped where there is none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import attn_core
from attn_core.decode import BatchDecodeWithPagedKVCacheWrapper
from attn_core.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper

from .gpu_world import (
    DIM,
    HEADS,
    KV_HEADS,
    PAGE,
    PAGES,
    TYPE,
    Decode,
    Lengths,
    World,
    capture,
    close,
    cuda,
    eager,
    fa2,
    same,
    workspace,
)  # fmt: skip

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures(fa2.__name__),
    # Of torch: a refused capture leaves a graph empty; the watch for waiting calls itself a prototype.
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]

SHAPES: list[tuple[int, Lengths, list[Lengths]]] = [
    (1, (37, 16), [(500, 3), (1, 1), (3000, 900), (16, 37)]),
    (4, (40, 16, 4), [(1500, 4, 5), (4, 4, 4), (700, 2000, 64)]),
    (9, (100, 30), [(9, 9), (2500, 12)]),
]


@pytest.mark.parametrize(("q_len", "first", "later"), SHAPES)
def test_replays_follow_the_plan_of_the_day(q_len: int, first: Lengths, later: list[Lengths]) -> None:
    """Other lengths, longer and shorter, other pages; each replay has the bits of an eager run."""
    world = World()
    d = Decode(world, len(first), q_len)
    table = world.table(first)
    d.plan(table)
    graph = capture(d.run)
    same(d.replay(graph), eager(world, d.q, table, q_len, "fa2"))
    for kv_len in later:
        table = world.table(kv_len)
        d.plan(table)
        found = d.replay(graph)
        same(found, eager(world, d.q, table, q_len, "fa2"))
        close(found, eager(world, d.q, table, q_len, "reference"))


def test_a_promised_longest_sequence_bounds_the_captured_grid() -> None:
    world = World()
    bounded, free = (Decode(world, 2, max_seq_len=n) for n in (64, None))
    table = world.table((20, 20))
    for d in (bounded, free):
        d.plan(table)
    assert bounded.wrapper._state.launch.items < free.wrapper._state.launch.items
    assert bounded.wrapper._state.launch.merges == 0
    graph = capture(bounded.run)
    table = world.table((64, 1))
    bounded.plan(table)
    same(bounded.replay(graph), eager(world, bounded.q, table, 1, "fa2"))
    with pytest.raises(ValueError, match=r"core\.graph-kv-len"):
        bounded.plan(world.table((900, 5)))
    same(bounded.replay(graph), eager(world, bounded.q, table, 1, "fa2"))


def test_a_rejected_plan_leaves_the_replay_right() -> None:
    world = World()
    d = Decode(world, 2, 4)
    table = world.table((300, 40))
    d.plan(table)
    graph = capture(d.run)
    want = eager(world, d.q, table, 4, "fa2")
    heads = (HEADS * 2, KV_HEADS, DIM, PAGE)
    wrong: list[Callable[[], object]] = [
        lambda: d.plan(world.table((300, 40, 8))),  # another batch
        lambda: d.plan(world.table((300, 40)), q_len_per_req=1),  # another number of rows, downwards
        lambda: d.plan(world.table((300, 40)), q_len_per_req=8),  # and upwards
        lambda: d.plan((cuda(0, PAGES, PAGES + 1), cuda(*[0] * (PAGES + 1)), cuda(1, 1))),  # too many pages
        lambda: d.wrapper.plan(*world.table((9, 9)), *heads, q_data_type=TYPE, q_len_per_req=4),
        lambda: d.plan(world.table((300, 40)), q_data_type=torch.float16),
        lambda: d.plan(world.table((2, 40))),  # fewer keys than rows
    ]
    for attempt in wrong:
        with pytest.raises((ValueError, NotImplementedError)):
            attempt()
        same(d.replay(graph), want)


def test_a_captured_plan_of_one_row_stays_one_of_one_row() -> None:
    world = World()
    d = Decode(world, 2, 1)
    d.plan(world.table((30, 40)))
    with pytest.raises(ValueError, match=r"q_len_per_req: needs 1, of the frozen .*core\.graph-frozen"):
        d.plan(world.table((30, 40)), q_len_per_req=4)
    assert d.wrapper._qo_indptr_buf.tolist() == [0, 1, 2]


def test_offsets_of_a_verify_are_in_the_captured_buffer() -> None:
    world = World()
    d = Decode(world, 3, 4)
    before = d.wrapper._qo_indptr_buf.data_ptr()
    assert d.wrapper._qo_indptr_buf.tolist() == [0, 1, 2, 3]
    d.plan(world.table((30, 40, 50)))
    assert d.wrapper._qo_indptr_buf.tolist() == [0, 4, 8, 12]
    assert d.wrapper._qo_indptr_buf.data_ptr() == before


def test_planning_and_an_eager_run_are_refused_during_capture() -> None:
    world = World()
    q = world.q(2)
    table = tuple(
        part.cpu() for part in world.table((30, 40))
    )  # what is on the device cannot even be read there
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True, backend="fa2")
    wrapper.plan(*table, HEADS, KV_HEADS, DIM, PAGE, q_data_type=TYPE)
    want = wrapper.run(q, world.kv)
    for call, code in (
        (lambda: wrapper.run(q, world.kv), "core.eager-in-capture"),
        (lambda: wrapper.plan(*table, HEADS, KV_HEADS, DIM, PAGE, q_data_type=TYPE), "core.plan-in-capture"),
    ):
        with pytest.raises(RuntimeError, match=code):
            capture(call)
        assert torch.equal(wrapper.run(q, world.kv), want)


def test_a_captured_prefill_takes_fewer_rows() -> None:
    world = World()
    q = world.q(96)
    buffers = [torch.zeros(n, dtype=torch.int32, device="cuda") for n in (4, 4, PAGES, 3)]
    wrapper = BatchPrefillWithPagedKVCacheWrapper(
        workspace(), use_cuda_graph=True, qo_indptr_buf=buffers[0], paged_kv_indptr_buf=buffers[1],
        paged_kv_indices_buf=buffers[2], paged_kv_last_page_len_buf=buffers[3], backend="fa2",
    )  # fmt: skip
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device="cuda")
    graph = None
    for q_len, kv_len in (
        ((64, 2, 30), (1000, 40, 30)),
        ((1, 1, 94), (5, 1, 2500)),
        ((20, 20, 20), (64, 64, 64)),
    ):
        qo, table = torch.tensor([0, *q_len]).cumsum(0).int().cuda(), world.table(kv_len)
        wrapper.plan(qo, *table, HEADS, KV_HEADS, DIM, PAGE, causal=True, q_data_type=TYPE)
        rows = sum(q_len)
        if graph is None:
            graph = capture(lambda: wrapper.run(q, world.kv, out=out, lse=lse, return_lse=True))
        out.fill_(float("nan"))
        graph.replay()
        plain = BatchPrefillWithPagedKVCacheWrapper(workspace(), backend="reference")
        plain.plan(qo, *table, HEADS, KV_HEADS, DIM, PAGE, causal=True, q_data_type=TYPE)
        close((out[:rows], lse[:rows]), plain.run(q[:rows], world.kv, return_lse=True))
        assert bool(out[rows:].isnan().all())


def test_a_captured_ragged_prefill() -> None:
    make = torch.Generator("cuda").manual_seed(4)
    q, k, v = (
        torch.randn(n, h, DIM, generator=make, device="cuda").to(TYPE)
        for n, h in ((60, HEADS), (700, KV_HEADS), (700, KV_HEADS))
    )
    buffers = [torch.zeros(3, dtype=torch.int32, device="cuda") for _ in range(2)]
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(
        workspace(), use_cuda_graph=True, qo_indptr_buf=buffers[0], kv_indptr_buf=buffers[1], backend="fa2"
    )
    out, graph = torch.empty_like(q), None
    for qo, kv in (((0, 50, 60), (0, 100, 700)), ((0, 10, 60), (0, 640, 700))):
        wrapper.plan(cuda(*qo), cuda(*kv), HEADS, KV_HEADS, DIM, causal=True, q_data_type=TYPE)
        if graph is None:
            graph = capture(lambda: wrapper.run(q, k, v, out=out))
        out.fill_(float("nan"))
        graph.replay()
        plain = BatchPrefillWithRaggedKVCacheWrapper(workspace(), backend="reference")
        plain.plan(cuda(*qo), cuda(*kv), HEADS, KV_HEADS, DIM, causal=True, q_data_type=TYPE)
        torch.testing.assert_close(out.float(), plain.run(q, k, v).float(), atol=2e-2, rtol=2e-2)


def test_a_captured_append() -> None:
    world = World()
    indptr, ids, last = world.table((40, 90))
    index = {"batch_indices": cuda(0, 1, -1), "positions": cuda(39, 3, 0)}
    rows = torch.randn(2, 3, KV_HEADS, DIM, device="cuda").to(TYPE)

    def append() -> None:
        attn_core.append_paged_kv_cache(
            rows[0], rows[1], index["batch_indices"], index["positions"], world.kv, ids, indptr, last,
            backend="fa2",
        )  # fmt: skip

    append()  # an append has no plan: its first call loads the kernel
    graph = capture(append)
    for positions in ((38, 80, 0), (0, 17, 5)):
        index["positions"].copy_(cuda(*positions))
        rows.normal_()
        want = world.kv.clone()
        for row, request in ((0, 0), (1, 1)):
            page = int(ids[int(indptr[request]) + positions[row] // PAGE])
            want[page, :, positions[row] % PAGE] = rows[:, row]
        graph.replay()
        assert torch.equal(world.kv, want)


def test_run_allocates_nothing_and_waits_for_nothing() -> None:
    world = World()
    for q_len, kv_len in ((1, (3000, 20)), (4, (50, 60))):
        d = Decode(world, 2, q_len)
        d.plan(world.table(kv_len))
        d.run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            d.run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_plans_do_not_overtake_runs_in_flight() -> None:
    """A second plan's upload must not reach the memory that a queued run still reads."""
    world = World()
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True, backend="fa2")
    q = world.q(2)
    tables = [world.table((3000, 20)), world.table((16, 2800))]
    wants = [eager(world, q, table, 1, "fa2")[0] for table in tables]
    outs = torch.empty(200, *q.shape, dtype=TYPE, device="cuda")
    busy = torch.randn(4096, 4096, device="cuda")
    for n in range(100):
        if n % 10 == 0:
            busy @ busy
        for which in (0, 1):
            wrapper.plan(*tables[which], HEADS, KV_HEADS, DIM, PAGE, q_data_type=TYPE)
            wrapper.run(q, world.kv, out=outs[2 * n + which])
    torch.cuda.synchronize()
    for n in range(200):
        assert torch.equal(outs[n], wants[n % 2]), n


def test_runs_are_enqueued_on_the_current_stream() -> None:
    world = World()
    table, q = world.table((900, 20)), world.q(2)
    want = eager(world, q, table, 1, "fa2")
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True, backend="fa2")
    wrapper.plan(*table, HEADS, KV_HEADS, DIM, PAGE, q_data_type=TYPE)
    side, late = torch.cuda.Stream(), torch.zeros_like(q)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        late.copy_(q)  # on another stream run() would read zeros
        found = wrapper.run(late, world.kv, return_lse=True)
    side.synchronize()
    same(found, want)


def test_a_thread_that_never_used_the_gpu_may_run() -> None:
    world = World()
    d = Decode(world, 2)
    table = world.table((900, 20))
    d.plan(table)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            d.run()
        except BaseException as err:
            failed.append(err)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failed == []
    same((d.out, d.lse), eager(world, d.q, table, 1, "fa2"))


def test_a_pool_holds_a_graph_for_every_shape() -> None:
    world = World()
    pool = attn_core.DecodePlanPool(workspace(), max_pages=PAGES, backend="fa2")
    graphs: dict[int, Any] = {}
    for q_len in (1, 2, 4, 8):
        table, q = world.table((400, 30)), world.q(2 * q_len)
        wrapper = pool.plan(*table, HEADS, KV_HEADS, DIM, PAGE, q_data_type=TYPE, q_len_per_req=q_len)
        out = torch.empty_like(q)
        graphs[q_len] = q, out, capture(lambda w=wrapper, q=q, out=out: w.run(q, world.kv, out=out))
    for q_len, kv_len in ((4, (1000, 9)), (1, (7, 2000)), (8, (8, 8)), (2, (100, 100)), (4, (4, 800))):
        table = world.table(kv_len)
        pool.plan(*table, HEADS, KV_HEADS, DIM, PAGE, q_data_type=TYPE, q_len_per_req=q_len)
        q, out, graph = graphs[q_len]
        graph.replay()
        same((out,), eager(world, q, table, q_len, "fa2")[:1])


def test_two_live_wrappers_share_nothing() -> None:
    world = World()
    both = [Decode(world, 2), Decode(world, 3, 4)]
    tables = [world.table((700, 30)), world.table((30, 700, 5))]
    for d, table in zip(both, tables, strict=True):
        d.plan(table)
    graphs = [capture(d.run) for d in both]
    for d, graph in zip(both, graphs, strict=True):
        d.replay(graph)
    for d, graph, table in zip(both, graphs, tables, strict=True):
        same(d.replay(graph), eager(world, d.q, table, d.q_len, "fa2"))


def test_every_head_size_group_and_type_once() -> None:
    """The kit covers combinations; this is the quick look at the kernels one by one."""
    make = torch.Generator("cuda").manual_seed(9)
    for dim in (40, 64, 128, 256):
        for dtype in (torch.float16, torch.bfloat16):
            for group, causal, cap in ((1, True, 0.0), (5, False, 0.0), (8, True, 20.0)):
                q = torch.randn(70, 2 * group, dim, generator=make, device="cuda").to(dtype)
                k, v = (torch.randn(170, 2, dim, generator=make, device="cuda").to(dtype) for _ in range(2))
                found = [
                    attn_core.single_prefill_with_kv_cache(
                        q, k, v, causal=causal, logits_soft_cap=cap, return_lse=True, backend=name
                    )
                    for name in ("fa2", "reference")
                ]
                close(*found)


def test_a_plan_with_device_tensors_is_refused_before_it_ends_the_capture() -> None:
    world = World()
    d = Decode(world, 2)
    table = world.table((30, 40))
    d.plan(table)
    with pytest.raises(RuntimeError, match=r"core\.plan-in-capture"):
        capture(lambda: d.plan(table))
    same((d.replay(capture(d.run))), eager(world, d.q, table, 1, "fa2"))


def test_single_calls_are_captured_after_a_first_call() -> None:
    make = torch.Generator("cuda").manual_seed(4)
    q, k, v = (
        torch.randn(n, h, DIM, generator=make, device="cuda").to(TYPE)
        for n, h in ((17, HEADS), (3000, KV_HEADS), (3000, KV_HEADS))
    )
    calls: list[Callable[[], Any]] = [
        lambda: attn_core.single_decode_with_kv_cache(q[0], k, v),
        lambda: attn_core.single_prefill_with_kv_cache(q, k, v, causal=True, backend="fa2"),
    ]
    for call in calls:
        first = call()
        found: list[torch.Tensor] = []
        graph = capture(lambda call=call, found=found: found.append(call()))
        before = q.clone()
        q.normal_()
        want = call()
        assert not torch.equal(want, first)
        call()  # whose workspace is not the graph's
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found[-1], want)
        q.copy_(before)


def test_captured_chain_sampling_follows_its_offset() -> None:
    draft, target = (torch.rand(5, n, 3000, device="cuda") for n in (3, 4))
    ids = torch.randint(0, 3000, (5, 3), device="cuda")
    seed, offset = torch.tensor([7], device="cuda"), torch.tensor([0], device="cuda")

    def sample(backend: str = "fa2") -> Any:
        return attn_core.chain_speculative_sampling(
            draft, ids, target, seed=seed, offset=offset, backend=backend
        )

    sample()
    found: list[Any] = []
    graph = capture(lambda: found.append(sample()))
    for step in (1, 2, 1 << 40):
        offset.fill_(step)
        want = sample("reference")
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, found[-1], want))
