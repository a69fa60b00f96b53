from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import attn_core
from attn_core.backend import RunIO

from .devices import FakeDevice
from .support import (
    D_TC,
    DECODES,
    Asked,
    Case,
    D,
    P,
    R,
    Rule,
    base,
    close,
    i32,
    plan,
    refused,
    rnd,
    same_bits,
    served,
    workspace,
)


def graph_wrapper(way: str, backend: str, batch: int, pages: int, **options: object):
    """A wrapper with fixed buffers, and those buffers."""
    sizes = (batch + 1, pages, batch)
    indptr, indices, last = (torch.zeros(size, dtype=torch.int32) for size in sizes)
    if way in DECODES:
        w = attn_core.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
            workspace(), indptr, indices, last, use_tensor_cores=way == D_TC, backend=backend, **options
        )
    else:
        qo = torch.zeros(batch + 1, dtype=torch.int32)
        w = attn_core.BatchPrefillWithPagedKVCacheWrapper(
            workspace(), use_cuda_graph=True, qo_indptr_buf=qo, paged_kv_indptr_buf=indptr,
            paged_kv_indices_buf=indices, paged_kv_last_page_len_buf=last, backend=backend, **options,
        )  # fmt: skip
    return w, (indptr, indices, last)


@dataclass
class Captured:
    """What a graph holds: one launch, and addresses. A replay looks at nothing else."""

    launch: object
    image: object
    io: RunIO
    serve: object

    @classmethod
    def of(cls, w, case: Case) -> Captured:
        out, lse = torch.empty_like(case.q), torch.empty(case.q.shape[:2])
        w.run(case.q, (case.k, case.v), out=out, lse=lse, return_lse=True)
        s = w._plan_info
        io = RunIO(case.q, case.k, case.v, out, lse, w._float_workspace_buffer)
        return cls(s.launch, s.image, io, s.decision.backend)

    def replay(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.io.out.fill_(float("nan"))
        self.io.lse.fill_(float("nan"))
        self.serve.run(self.launch, self.image, self.io)
        return self.io.out.clone(), self.io.lse.clone()


def addresses(w) -> dict[str, int]:
    image = w._plan_info.image
    return {name: image[name].data_ptr() for name in image}


def pool(batch: int, pages: int = 64, rows: int = 1) -> Case:
    """A cache large enough for every table below."""
    q, k, v = rnd(64, (batch * rows, 4, 64), (pages, 16, 2, 64), (pages, 16, 2, 64))
    return Case(q, k, v, (), (), (rows,) * batch)


def sized(case: Case, *kv_lens: int) -> Case:
    """The same cache with a table for these lengths, the pages shuffled."""
    order = torch.randperm(64, generator=torch.Generator().manual_seed(sum(kv_lens))).tolist()
    tables, last = [], []
    for n in kv_lens:
        pages = -(-n // 16)
        tables.append(tuple(order.pop() for _ in range(pages)))
        last.append(n - (pages - 1) * 16)
    return case.but(tables=tuple(tables), last=tuple(last))


@pytest.mark.parametrize("way", [D, D_TC, P])
def test_b64_replay_sees_the_new_table(backend, way):
    """A table derived at plan time was not refreshed: replay and eager differed. https://github.com/flashinfer-ai/flashinfer/issues/2511"""
    case = base()
    w, buffers = graph_wrapper(way, backend, 2, 8)
    with served(backend):
        plan(w, case)
    graph, before = Captured.of(w, case), addresses(w)
    close(graph.replay(), case.want(), torch.float16)
    new = case.but(tables=((1, 3, 0), (2,)), last=(1, 9))
    plan(w, new)
    assert addresses(w) == before
    close(graph.replay(), new.want(), torch.float16)
    for buffer, array in zip(buffers, (new.indptr, new.indices, new.last_page_len), strict=True):
        assert torch.equal(buffer[: array.numel()], array)
    assert {b.data_ptr() for b in buffers} <= set(before.values())
    assert w._plan_info.launch == graph.launch


@pytest.mark.parametrize("way", [D, D_TC, P])
def test_b65_replay_follows_every_plan(backend, way):
    """Only page tables were refreshed before replay: stale schedule, wrong numbers. https://github.com/NVIDIA/TensorRT-LLM/pull/18443"""
    case = pool(2)
    w, _ = graph_wrapper(way, backend, 2, 40)
    first = sized(case, 37, 16)
    with served(backend):
        plan(w, first)
    graph, before = Captured.of(w, first), addresses(w)
    for lengths in ((37, 16), (500, 3), (1, 1), (3, 500), (37, 16)):
        now = sized(case, *lengths)
        plan(w, now)
        close(graph.replay(), now.want(), torch.float16)
    assert addresses(w) == before


@pytest.mark.parametrize("way", [D_TC, P])
def test_b65_failing_plan_leaves_the_graph_replayable(backend, way):
    """Only page tables were refreshed before replay: stale schedule, wrong numbers. https://github.com/alibaba/rtp-llm/pull/1254"""
    case = pool(2)
    w, buffers = graph_wrapper(way, backend, 2, 40)
    good = sized(case, 500, 3)
    with served(backend):
        plan(w, good)
    graph, held = Captured.of(w, good), [b.clone() for b in buffers]
    three = sized(pool(3), 5, 6, 7)
    with refused("batch size", "2 requests", "got 3"):
        plan(w, three)
    with refused("kv_indices", "40", "got 63"):
        plan(w, sized(case, 620, 370))
    two_rows = sized(pool(2, rows=2), 20, 30)
    if way == D_TC:
        with refused("q_len_per_req", "needs 1, of the frozen", "got 2"):
            plan(w, two_rows)
    else:
        with refused("query rows", "2, frozen", "got 4"):
            plan(w, two_rows)
    heads = sized(case, 20, 30)
    with refused("num_qo_heads", "frozen at 4", "asked for 2"):
        plan(w, heads.but(q=heads.q[:, :2]))
    with refused("window_left", "frozen at -1", "asked for 7"):
        plan(w, heads, Asked(Rule(window=7)))
    with refused("kv_last_page_len"):
        plan(w, heads, Asked(indices={"last": i32(17, 3)}))
    assert all(same_bits(a, b) for a, b in zip(buffers, held, strict=True))
    close(graph.replay(), good.want(), torch.float16)
    # and the next good plan works
    new = sized(case, 100, 200)
    plan(w, new)
    close(graph.replay(), new.want(), torch.float16)


def test_b65_verify_length_is_frozen_in_both_directions(backend):
    """Only page tables were refreshed before replay: stale schedule, wrong numbers. https://github.com/alibaba/rtp-llm/pull/1084"""
    for frozen, other in ((4, 1), (1, 4), (4, 2)):
        w, _ = graph_wrapper(D_TC, backend, 2, 40)
        case = sized(pool(2, rows=frozen), 37, 16)
        with served(backend):
            plan(w, case)
        graph = Captured.of(w, case)
        with refused("q_len_per_req", f"needs {frozen}, of the frozen", f"got {other}"):
            plan(w, sized(pool(2, rows=other), 60, 70))
        new = sized(pool(2, rows=frozen), 60, 70)
        plan(w, new)
        close(graph.replay(), new.want(Rule(causal=frozen > 1)), torch.float16)
    assert "plan() again before each replay" in attn_core.DecodePlanPool.__doc__


def test_b68_run_reads_nothing_back():
    """Allocations and reads during capture are refused by the device. https://github.com/AMD-Ecosystem/flashinfer/pull/170"""
    case = base()
    for way, rows in ((D, 1), (D_TC, 1), (D_TC, 4), (P, 1), (R, 1)):
        shaped = case.but(q=case.q.repeat(rows, 1, 1), q_lens=(rows,) * 2)
        kind = {
            P: attn_core.BatchPrefillWithPagedKVCacheWrapper,
            R: attn_core.BatchPrefillWithRaggedKVCacheWrapper,
        }.get(way, attn_core.BatchDecodeWithPagedKVCacheWrapper)
        tensors = [shaped.q, shaped.k, shaped.v]
        if way == R:
            tensors[1:] = [torch.cat([shaped.keys(n)[at] for n in (0, 1)]) for at in (0, 1)]
        with FakeDevice() as device:
            q, k, v = (device.put(t) for t in tensors)
            out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=q.device)
            w = kind(device.put(workspace(1)), **({"use_tensor_cores": True} if way == D_TC else {}))
            plan(w, shaped)
            got = w.run(q, *((k, v) if way == R else ((k, v),)), out=out, lse=lse, return_lse=True)
        assert device.reads == []
        assert got[0] is out
        assert got[1] is lse
        close(got, shaped.want(Rule(causal=rows > 1)), torch.float16)


def test_b68_sampling_merging_and_appending_read_nothing_back():
    """Allocations and reads during capture are refused by the device. https://github.com/AMD-Ecosystem/flashinfer/pull/170"""
    case, generator = base(), torch.Generator().manual_seed(68)
    probs = [torch.rand(2, n, 10, generator=generator) for n in (3, 4)]
    ids, seed = torch.randint(0, 10, (2, 3), generator=generator), torch.zeros(1, dtype=torch.int64)
    v, s = rnd(68, (3, 2, 8), (3, 2), dtype=torch.float32)
    with FakeDevice() as device:
        draft, target, ids_there, seed_there = (device.put(t) for t in (*probs, ids, seed))
        count, more = (device.put(i32(0, 0)) for _ in range(2))
        v_there, s_there, k = device.put(v), device.put(s), device.put(case.k)
        index = [device.put(t) for t in (case.indices, case.indptr, case.last_page_len)]
        tokens, accepted, _ = attn_core.chain_speculative_sampling(
            draft, ids_there, target, count, more, seed=seed_there, offset=seed_there
        )
        merged = attn_core.merge_state(v_there, s_there, v_there, s_there)
        into = v_there.clone(), s_there.clone()
        attn_core.merge_state_in_place(*into, v_there, s_there, mask=s_there[:, 0] > 0)
        attn_core.merge_states(v_there[:, None], s_there[:, None])
        places = device.put(i32(0, 1)), device.put(i32(34, 14))
        attn_core.append_paged_kv_cache(k[0, :2], k[0, :2], *places, (k, k), *index)
        positions = attn_core.get_batch_indices_positions(index[1], index[2], 8)
        lengths = attn_core.get_seq_lens(index[1], index[2], 16)
    assert device.reads == []
    host, *_ = attn_core.chain_speculative_sampling(probs[0], ids, probs[1], seed=0, offset=0)
    assert torch.equal(tokens, host)
    assert accepted is count
    assert all(map(same_bits, merged, attn_core.merge_state(v, s, v, s)))
    want = case.k.clone()
    want[3, 2], want[1, 14] = case.k[0, 0], case.k[0, 1]
    assert same_bits(k, want)
    assert lengths.tolist() == [37, 16]
    assert positions[0].tolist() == [0, 0, 0, 1, -1, -1, -1, -1]


def test_b68_the_fake_device_notices_reads():
    """Allocations and reads during capture are refused by the device. https://github.com/AMD-Ecosystem/flashinfer/pull/170"""
    with FakeDevice() as device:
        there = device.put(i32(3, 4))
        assert there.device != torch.device("cpu")
        assert (there + 1).sum().item() == 9
        assert torch.cat([there, there]).cpu().tolist() == [3, 4, 3, 4]
        assert bool((there > 3).any())
        assert there.to("cpu").tolist() == [3, 4]
        assert int(torch.ones(1, device=there.device)[0]) == 1
        torch.zeros(2, dtype=torch.int32).copy_(there)
        with pytest.raises(AssertionError, match="two devices"):
            there + torch.ones(2)
    assert device.reads == ["item", "cpu", "__bool__", "to", "__int__", "copy_"]


@pytest.mark.parametrize("way", [D, D_TC])
def test_b69_longest_sequence_is_not_frozen(backend, way):
    """A Python integer, the longest length, was frozen into the launch. https://github.com/huggingface/transformers/pull/45323"""
    case = pool(2)
    w, _ = graph_wrapper(way, backend, 2, 60)
    first = sized(case, 20, 20)
    with served(backend):
        plan(w, first)
    graph = Captured.of(w, first)
    for lengths in ((900, 5), (5, 900), (20, 20)):
        now = sized(case, *lengths)
        plan(w, now)
        assert w._plan_info.launch == graph.launch
        close(graph.replay(), now.want(), torch.float16)


@pytest.mark.parametrize("way", [D, D_TC])
def test_b69_promised_maximum_is_checked(backend, way):
    """A Python integer, the longest length, was frozen into the launch. https://github.com/huggingface/transformers/pull/45323"""
    case = pool(2)
    w, buffers = graph_wrapper(way, backend, 2, 60, max_seq_len=32)
    first = sized(case, 20, 20)
    with served(backend):
        plan(w, first)
    graph, held = Captured.of(w, first), [b.clone() for b in buffers]
    with refused("kv length", "max_seq_len 32", "got 900"):
        plan(w, sized(case, 900, 5))
    with refused("kv length", "max_seq_len 32", "got 33"):
        plan(w, sized(case, 5, 33))
    assert all(same_bits(a, b) for a, b in zip(buffers, held, strict=True))
    close(graph.replay(), first.want(), torch.float16)
    now = sized(case, 32, 1)
    plan(w, now)
    close(graph.replay(), now.want(), torch.float16)
