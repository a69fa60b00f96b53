"""An engine's own copy of plan(), for replayed graphs: it assigns to the wrapper and calls its module."""

import pytest
import torch

from attn_core.mla import BatchMLAPagedAttentionWrapper

from .kit import (
    Snapshot,
    close,
    decode_graph,
    ints,
    offsets,
    oracle,
    paged_wrapper,
    pages,
    prefill_graph,
    queries,
    same_bits,
    workspace,
)

HEADS, CKV, KPE, PAGE = 2, 8, 4, 1
F32 = torch.float32


def latent(batch=2, capacity=40):
    sizes = {"qo_indptr": batch + 1, "kv_indptr": batch + 1, "kv_indices": capacity, "kv_len_arr": batch}
    buffers = {name: torch.zeros(n, dtype=torch.int32) for name, n in sizes.items()}
    return BatchMLAPagedAttentionWrapper(workspace(), True, **buffers)


def latent_plan(wrapper, qo, kv, lens, *, causal=False, sm_scale=0.3, page_size=PAGE, heads=HEADS):
    """What an engine does per replay once it has put page ids into the buffer it gave."""
    wrapper._causal, wrapper._page_size, wrapper._sm_scale = causal, page_size, sm_scale
    wrapper._cached_module.plan(
        wrapper._float_workspace_buffer, wrapper._int_workspace_buffer,
        wrapper._pin_memory_int_workspace_buffer, qo, kv, lens, heads, CKV, causal,
    )  # fmt: skip


def first(wrapper, batch=2):
    ids = torch.arange(batch, dtype=torch.int32)
    wrapper.plan(
        offsets([1] * batch), offsets([1] * batch), ids, ints(*[1] * batch), HEADS, CKV, KPE, PAGE, False,
        0.3, F32, F32,
    )  # fmt: skip
    return wrapper


@pytest.mark.parametrize("lens", [[9, 6], [1, 14], [0, 3]])
def test_a_latent_wrapper_is_planned_by_way_of_its_module(lens):
    captured, eager = first(latent()), BatchMLAPagedAttentionWrapper(workspace())
    ids = torch.randperm(20, generator=torch.Generator().manual_seed(1))[: sum(lens)].int()
    captured._kv_indices_buf[: sum(lens)] = ids
    latent_plan(captured, offsets([1, 1]), offsets(lens), ints(*lens))
    assert captured._kv_len_arr_buf.tolist() == lens
    assert captured._kv_indptr_buf.tolist() == offsets(lens).tolist()
    eager.plan(offsets([1, 1]), offsets(lens), ids, ints(*lens), HEADS, CKV, KPE, PAGE, False, 0.3, F32, F32)
    q, cache = queries(2, HEADS, CKV + KPE), torch.randn(20, PAGE, CKV + KPE)
    parts = (q[..., :CKV], q[..., CKV:], cache[..., :CKV], cache[..., CKV:])
    for mine, want in zip(
        captured.run(*parts, return_lse=True), eager.run(*parts, return_lse=True), strict=True
    ):
        close(mine, want, 2e-6)


def test_what_an_engine_assigns_must_be_what_is_planned():
    wrapper = first(latent())
    kept = Snapshot.of(wrapper)
    for name, value in (("_sm_scale", 0.4), ("_causal", True), ("_page_size", 16), ("_plan_info", 3)):
        with pytest.raises(ValueError, match=rf"{name}: needs .*plan\(\)\).*\[core.engine\]"):
            setattr(wrapper, name, value)
    with pytest.raises(ValueError, match=r"_sm_scale: needs None, as planned"):
        latent()._sm_scale = 0.3
    wrapper._plan_info = wrapper._plan_info
    kept.require(wrapper)


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"lens": ints(9, 99)}, ValueError, r"kv_len_arr\[1\]: needs 0 to 6"),
        ({"kv": offsets([9, 99])}, ValueError, "kv_indices: needs"),
        ({"heads": 4}, ValueError, r"graph-frozen"),
        ({"heads": "2"}, TypeError, "num_qo_heads: needs an int"),
        (
            {"qo": offsets([1, 1, 1]), "kv": offsets([9, 6, 1]), "lens": ints(9, 6, 1)},
            ValueError,
            "graph-batch",
        ),
    ],
)
def test_bad_input_by_way_of_the_module_changes_nothing(given, error, told):
    wrapper = first(latent())
    kept = Snapshot.of(wrapper)
    asked = {"qo": offsets([1, 1]), "kv": offsets([9, 6]), "lens": ints(9, 6)} | given
    with pytest.raises(error, match=told):
        latent_plan(wrapper, asked.pop("qo"), asked.pop("kv"), asked.pop("lens"), **asked)
    kept.require(wrapper)


def paged_plan(wrapper, qo, kv, lens, *, window=-1, causal=True, split=(), batch=2, page_size=4):
    return wrapper._cached_module.plan(
        wrapper._float_workspace_buffer, wrapper._int_workspace_buffer,
        wrapper._pin_memory_int_workspace_buffer, qo, kv, lens, int(qo[-1]), batch, 4, 2, page_size,
        wrapper.is_cuda_graph_enabled, 8, 8, causal, window, *split,
    )  # fmt: skip


@pytest.mark.parametrize("split", [(), (-1, False, 0)])
def test_a_paged_wrapper_is_planned_by_way_of_its_module(split):
    wrapper, p, q = prefill_graph(2, 12), pages([9, 6]), queries(5, 4, 8)
    small = pages([3, 3])
    wrapper.plan(offsets([3, 2]), *small.table, 4, 2, 8, 4, causal=True, q_data_type=F32)
    assert wrapper._max_total_num_rows is None
    wrapper._paged_kv_indices_buf[: p.indices.numel()] = p.indices
    wrapper._plan_info = paged_plan(wrapper, offsets([2, 3]), p.indptr, ints(9, 6), split=split)
    assert wrapper._paged_kv_last_page_len_buf.tolist() == [1, 2]
    found, want = wrapper.run(q, p.cache), oracle(q, p.keys, p.values, [2, 3], causal=True)[0]
    close(found, want, 2e-6)


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"batch": 3}, ValueError, "batch_size: needs 2, as planned, got 3"),
        ({"page_size": 8}, ValueError, "page_size: needs 4, as planned, got 8"),
        ({"window": 3}, ValueError, "window_left is frozen at -1, asked for 3"),
        ({"causal": False}, ValueError, "mask is frozen"),
        ({"split": (8, False, 0)}, ValueError, "honours fixed_split_size"),
        ({"split": (1, 2, 3, 4, 5)}, TypeError, "_cached_module.plan: needs 16 to 20 arguments, got 21"),
    ],
)
def test_what_a_graph_froze_stays(given, error, told):
    wrapper, p = prefill_graph(2, 12), pages([9, 6])
    wrapper.plan(offsets([2, 3]), *p.table, 4, 2, 8, 4, causal=True, q_data_type=F32)
    kept = Snapshot.of(wrapper)
    with pytest.raises(error, match=told):
        paged_plan(wrapper, offsets([2, 3]), p.indptr, ints(9, 6), **given)
    kept.require(wrapper)


def test_wrappers_without_such_a_copy_say_what_to_call():
    p, eager, fresh = pages([9, 6]), paged_wrapper(), prefill_graph(2, 12)
    eager.plan(offsets([2, 3]), *p.table, 4, 2, 8, 4, q_data_type=F32)
    decode = decode_graph(2, 12)
    decode.plan(*p.table, 4, 2, 8, 4, q_data_type=F32)
    masked, mask = prefill_graph(2, 12, 64), torch.ones(2 * 9 + 3 * 6, dtype=torch.bool)
    masked.plan(offsets([2, 3]), *p.table, 4, 2, 8, 4, custom_mask=mask, q_data_type=F32)
    for wrapper, want in (
        (eager, "fast_decode"),
        (fresh, "fast_decode"),
        (decode, "fast_decode"),
        (masked, "cust"),
    ):
        with pytest.raises(NotImplementedError, match=rf"_cached_module\.plan: needs .*{want}"):
            paged_plan(wrapper, offsets([2, 3]), p.indptr, ints(9, 6))
    with pytest.raises(NotImplementedError, match=r"_cached_module\.run: needs fast_decode_plan"):
        decode._cached_module.run(1)


def test_the_same_plan_gives_the_same_bits():
    one, other, p, q = prefill_graph(2, 12), prefill_graph(2, 12), pages([9, 6]), queries(5, 4, 8)
    for wrapper in (one, other):
        wrapper.plan(offsets([2, 3]), *p.table, 4, 2, 8, 4, causal=True, q_data_type=F32)
    paged_plan(one, offsets([2, 3]), p.indptr, ints(9, 6))
    assert same_bits(one.run(q, p.cache), other.run(q, p.cache))
