"""plan() inside a compiled region: exact where plans stand beside each other, refused by name elsewhere."""

import pytest
import torch
import torch._dynamo.testing

from attn_core import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    fast_decode_plan,
)

PAGES, PAGE, HKV, HQ, DIM = 8, 4, 2, 4, 16


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def workspace():
    return torch.empty(64, dtype=torch.uint8)


def table(kv_lens, seed=3):
    kv = i32(*kv_lens)
    pages = (kv + PAGE - 1) // PAGE
    indptr = torch.cat([torch.zeros(1), pages.cumsum(0)]).int()
    order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(seed)).int()
    return indptr, order, kv - (pages - 1) * PAGE


def plan(wrapper, tables, **options):
    wrapper.plan(*tables, HQ, HKV, DIM, PAGE, q_data_type="float32", **options)


def eager(tables, q, cache, **options):
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True)
    plan(wrapper, tables, **options)
    return wrapper.run(q, cache)


@pytest.fixture
def cache():
    return torch.randn(PAGES, 2, PAGE, HKV, DIM)


def test_plan_and_run_in_one_region_over_eight_plans(cache):
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True)
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")

    def step(q, cache, *tables):
        plan(wrapper, tables)
        return wrapper.run(q * 2, cache)

    compiled, q = torch.compile(step, fullgraph=True, backend=counter), torch.randn(2, HQ, DIM)
    for kv_lens in ((9, 14), (4, 20), (1, 1), (12, 12), (16, 3), (2, 2), (5, 6), (13, 7)):
        got = compiled(q, cache, *table(kv_lens))
        assert torch.equal(got, eager(table(kv_lens), q * 2, cache))
        # The plan stays in force, also for eager runs behind it.
        assert torch.equal(wrapper.run(q * 2, cache), got)
    assert counter.frame_count <= 2


def test_two_plans_in_one_region_each_serve_the_run_behind_them(cache):
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True)

    def step(q, cache, a, b):
        plan(wrapper, a)
        first = wrapper.run(q, cache)
        plan(wrapper, b)
        second = wrapper.run(first, cache)
        plan(wrapper, a)
        return first, second

    q, a, b = torch.randn(2, HQ, DIM), table((9, 14)), table((3, 20), seed=4)
    first, second = torch.compile(step, fullgraph=True)(q, cache, a, b)
    assert torch.equal(first, eager(a, q, cache))
    assert torch.equal(second, eager(b, first, cache))
    assert torch.equal(wrapper.run(q, cache), first)


def test_an_eager_plan_after_a_compiled_one_is_what_a_compiled_run_sees(cache):
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True)
    q = torch.randn(2, HQ, DIM)
    run = torch.compile(lambda q, cache: wrapper.run(q, cache), fullgraph=True)
    make = torch.compile(lambda *tables: plan(wrapper, tables), fullgraph=True)
    for kv_lens in ((9, 14), (4, 20)):
        make(*table(kv_lens))
        assert torch.equal(run(q, cache), eager(table(kv_lens), q, cache))
        plan(wrapper, table((2, 7)))
        assert torch.equal(run(q, cache), eager(table((2, 7)), q, cache))


def test_verify_and_options_reach_the_plan(cache):
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True)
    options = {"q_len_per_req": 3, "window_left": 5, "logits_soft_cap": 2.0, "o_data_type": torch.float64}

    def step(q, cache, *tables):
        plan(wrapper, tables, **options)
        return wrapper.run(q, cache)

    q, tables = torch.randn(6, HQ, DIM), table((9, 14))
    got = torch.compile(step, fullgraph=True)(q, cache, *tables)
    assert got.dtype is torch.float64
    assert torch.equal(got, eager(tables, q, cache, **options))


def test_a_bad_plan_raises_its_eager_text_and_leaves_the_last_one(cache):
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace())
    plan(wrapper, table((9, 14)))
    q = torch.randn(2, HQ, DIM)
    want = wrapper.run(q, cache)
    indptr, indices, last = table((9, 14))
    make = torch.compile(lambda *tables: plan(wrapper, tables), fullgraph=True)
    with pytest.raises(ValueError, match="last_page_len"):
        make(indptr, indices, last + 9)
    assert torch.equal(wrapper.run(q, cache), want)
    with pytest.raises(Exception, match="unexpected keyword argument 'page_sise'"):
        torch.compile(lambda *t: plan(wrapper, t, page_sise=3), fullgraph=True)(indptr, indices, last)


def test_fast_decode_plan_in_a_region(cache):
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True)
    plan(wrapper, table((9, 14)))

    def step(q, cache, *tables):
        fast_decode_plan(wrapper, *tables, HQ, HKV, DIM, PAGE, q_data_type=torch.float32)
        return wrapper.run(q, cache)

    q = torch.randn(2, HQ, DIM)
    got = torch.compile(step, fullgraph=True)(q, cache, *table((4, 20)))
    assert torch.equal(got, eager(table((4, 20)), q, cache))


def graph_wrapper():
    return BatchDecodeWithPagedKVCacheWrapper(
        workspace(),
        use_cuda_graph=True,
        paged_kv_indptr_buffer=i32(0, 0, 0),
        paged_kv_indices_buffer=torch.zeros(PAGES, dtype=torch.int32),
        paged_kv_last_page_len_buffer=i32(0, 0),
    )


def refused_plans():
    graph = graph_wrapper()
    yield "a CUDA-graph wrapper", lambda t: plan(graph, t)
    paged = BatchPrefillWithPagedKVCacheWrapper(workspace())
    yield "BatchPrefillWithPaged", lambda t: paged.plan(i32(0, 1, 2), *t, HQ, HKV, DIM, PAGE)
    ragged = BatchPrefillWithRaggedKVCacheWrapper(workspace())
    yield "BatchPrefillWithRagged", lambda t: ragged.plan(i32(0, 1, 2), i32(0, 3, 9), HQ, HKV, DIM)


@pytest.mark.parametrize("case", range(3))
def test_where_order_or_size_would_matter_plan_is_refused(case):
    name, make = list(refused_plans())[case]
    with pytest.raises(Exception, match=rf"{name}.*plan\(\) under torch\.compile.*core\.traced-plan"):
        torch.compile(make, fullgraph=True)(table((9, 14)))
    make(table((9, 14)))
