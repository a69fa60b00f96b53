from __future__ import annotations

import pytest
import torch

import attn_core

from .devices import FakeDevice
from .support import (
    D_TC,
    Asked,
    Case,
    D,
    P,
    R,
    Rule,
    attend,
    base,
    close,
    plan,
    rnd,
    same_bits,
    served,
    workspace,
    wrapper,
)


def device_wrapper(device: FakeDevice, way: str):
    """A wrapper whose device is the fake one."""
    kind = {
        P: attn_core.BatchPrefillWithPagedKVCacheWrapper,
        R: attn_core.BatchPrefillWithRaggedKVCacheWrapper,
    }.get(way, attn_core.BatchDecodeWithPagedKVCacheWrapper)
    return kind(device.put(workspace(1)), **({"use_tensor_cores": True} if way == D_TC else {}))


def index_of(case: Case) -> dict[str, torch.Tensor]:
    return {
        "qo_indptr": case.qo_indptr, "indptr": case.indptr, "indices": case.indices,
        "last": case.last_page_len, "kv_indptr": torch.tensor([0, *case.kv_lens]).cumsum(0).int(),
    }  # fmt: skip


@pytest.mark.parametrize("way", [D, D_TC, P, R])
def test_b103_plan_with_host_tensors_reads_no_device(way):
    """plan() fetched device index tensors every step; engines forked it. https://github.com/flashinfer-ai/flashinfer/issues/565"""
    case = base()
    with FakeDevice() as device:
        w = device_wrapper(device, way)
        for _ in range(3):
            plan(w, case, Asked(indices=index_of(case)))
    assert device.reads == []
    assert "on the host cost no synchronisation" in " ".join(type(w).plan.__doc__.split())


@pytest.mark.parametrize("way", [D, D_TC, P, R])
def test_b103_plan_with_device_tensors_reads_once(way):
    """plan() fetched device index tensors every step; engines forked it. https://github.com/flashinfer-ai/flashinfer/issues/565"""
    case = base()
    with FakeDevice() as device:
        w = device_wrapper(device, way)
        there = {name: device.put(array) for name, array in index_of(case).items()}
        plan(w, case, Asked(indices=there))
        assert device.reads == ["cpu"]
        lengths = {"seq_lens": device.put(torch.tensor(case.kv_lens, dtype=torch.int32))}
        plan(w, case, Asked(plan=lengths, indices=there))
    assert device.reads == ["cpu"] * 2
    assert w._plan_info.batch.kv_len.tolist() == list(case.kv_lens)
    assert "those on the device are fetched in one copy" in " ".join(type(w).plan.__doc__.split())


@pytest.mark.parametrize("way", [P, R])
def test_b103_custom_mask_on_the_device_is_not_read(way):
    """plan() fetched device index tensors every step; engines forked it. https://github.com/sgl-project/sglang/pull/27689"""
    case = base()
    with FakeDevice() as device:
        w = device_wrapper(device, way)
        mask = device.put(torch.ones(sum(case.kv_lens), dtype=torch.bool))
        plan(w, case, Asked(plan={"custom_mask": mask}, indices=index_of(case)))
    assert device.reads == []
    bits = w._plan_info.image["custom_mask"]
    assert bits.tolist() == [255] * 4 + [31] + [255] * 2


def test_b103_fast_plan_reads_no_device():
    """plan() fetched device index tensors every step; engines forked it. https://github.com/sgl-project/sglang/issues/23500"""
    (k,) = rnd(103, (64, 1, 2, 64))
    case = base().but(k=k, v=k, tables=(tuple(range(9)), (20, 21)), last=(1, 1))
    with FakeDevice() as device:
        w = device_wrapper(device, D_TC)
        plan(w, case)
        there = [device.put(t) for t in (case.indptr, case.indices, case.last_page_len)]
        attn_core.fast_decode_plan(
            w, *there, *case.heads, 64, 1, q_data_type=torch.float16,
            global_override_indptr_cpu=case.indptr,
        )  # fmt: skip
        assert device.reads == []
        q, cache = device.put(case.q), device.put(case.k)
        got = w.run(q, (cache, cache), return_lse=True)
    assert w._plan_info.batch.kv_len.tolist() == [9, 2]
    close(got, case.want(), torch.float16)


LENGTHS = (3000, 3700, *(17 + 13 * n for n in range(30)))  # a neighbour that is longer, and short ones


def crowd(others: int, rows: int, dtype: torch.dtype = torch.float16) -> Case:
    """Request 0 of 3000 keys, then ``others``, all over their own pages."""
    lengths = LENGTHS[: others + 1]
    counts = [-(-n // 16) for n in lengths]
    total = sum(-(-n // 16) for n in LENGTHS)
    q, k, v = rnd(106, (32 * rows, 2, 64), (total, 16, 1, 64), (total, 16, 1, 64), dtype=dtype)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(106)).tolist()
    tables = tuple(tuple(order.pop() for _ in range(count)) for count in counts)
    last = tuple(n - (count - 1) * 16 for n, count in zip(lengths, counts, strict=True))
    return Case(q[: (others + 1) * rows], k, v, tables, last, (rows,) * (others + 1))


@pytest.mark.parametrize(("way", "rows"), [(D, 1), (D_TC, 1), (D_TC, 4), (P, 4), (R, 4)])
@pytest.mark.parametrize(
    ("window", "dtype"),
    [(-1, torch.float16), (700, torch.float16), (-1, torch.float32)],  # rounding to 16 bits hides much
)
def test_b106_bits_do_not_depend_on_the_batch(backend, way, rows, window, dtype):
    """The same request in another batch came out with other bits. https://github.com/flashinfer-ai/flashinfer/pull/1675"""
    rule = Rule(causal=rows > 1, window=window)
    want = None
    for options in ({"fixed_split_size": 512 if way == R else 32}, {"disable_split_kv": True}):
        found = []
        for others in (0, 1, 31):
            out, lse = attend(way, backend, crowd(others, rows, dtype), Asked(rule, options))
            found.append((out[:rows], lse[:rows]))
        want = want or crowd(0, rows, dtype).want(rule)
        close(found[0], want, dtype)
        for out, lse in found[1:]:
            assert same_bits(out, found[0][0])
            assert same_bits(lse, found[0][1])


@pytest.mark.parametrize("way", [D, D_TC, P, R])
def test_b106_the_option_reaches_the_problem(backend, way):
    """The same request in another batch came out with other bits. https://github.com/flashinfer-ai/flashinfer/pull/1675"""
    w = wrapper(way, backend)
    for options, invariant in (
        ({}, False), ({"fixed_split_size": 2}, True), ({"fixed_split_size": -1}, False),
        ({"disable_split_kv": True}, True),
    ):  # fmt: skip
        with served(backend):
            plan(w, base(), Asked(plan=options))
        assert w._plan_info.query.problem.batch_invariant == invariant


def test_b108_twenty_graph_wrappers_own_little(backend):
    """One wrapper per captured batch size cost 72 MB each. https://github.com/flashinfer-ai/flashinfer/issues/2046"""
    shared, max_pages = workspace(), 256
    pool = attn_core.DecodePlanPool(shared, max_pages, backend=backend, max_seq_len=512)
    owned, wrappers = 0, []
    full = crowd(21, 1).but(q_lens=())
    for batch in range(1, 21):
        some = slice(2, batch + 2)
        case = full.but(q=full.q[some], tables=full.tables[some], last=full.last[some])
        buffers = [torch.zeros(n, dtype=torch.int32) for n in (batch + 1, max_pages, batch)]
        w = attn_core.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
            shared, *buffers, use_tensor_cores=True, backend=backend, max_seq_len=512
        )
        assert w.owned_bytes == 0
        with served(backend):
            plan(w, case)
        close(w.run(case.q, (case.k, case.v), return_lse=True), case.want(), torch.float16)
        owned += w.owned_bytes
        wrappers.append((w, case))
    # the page table, perhaps twice (a landing place and the caller's buffer), and a few words per request
    assert 20 * 4 * max_pages <= owned < 20 * 8 * 1024
    # every one still answers, in any order, on the one float workspace
    for w, case in reversed(wrappers):
        close(w.run(case.q, (case.k, case.v), return_lse=True), case.want(), torch.float16)
    short = full.but(q=full.q[2:5], tables=full.tables[2:5], last=full.last[2:5])
    member = pool.plan(short.indptr, short.indices, short.last_page_len, *short.heads, 64, 16)
    close(member.run(short.q, (short.k, short.v), return_lse=True), short.want(), torch.float16)
    assert 4 * max_pages <= pool.owned_bytes < 8 * 1024
    assert "float workspace" in attn_core.DecodePlanPool.__doc__
