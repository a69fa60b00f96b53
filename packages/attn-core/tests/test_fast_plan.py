"""The plan() that serving engines bind over a wrapper's own."""

import inspect
from functools import partial

import pytest
import torch

import attn_core
from attn_core.decode import fast_decode_plan

from .fakes import FakeBackend
from .kit import (
    SIZES,
    Snapshot,
    close,
    decode_graph,
    decode_wrapper,
    ints,
    oracle,
    pages,
    queries,
    replay,
    same_bits,
    workspace,
)


def test_needs_a_plan_before():
    wrapper, p = decode_wrapper(), pages([9, 3])
    for error in (ValueError, RuntimeError):  # upstream and its AMD fork raise one or the other
        with pytest.raises(error, match="fast_decode_plan: needs a wrapper with a prior plan"):
            fast_decode_plan(wrapper, *p.table, *SIZES)
        with pytest.raises(error, match=r"run: needs a prior plan.*plan\(\) first"):
            wrapper.run(torch.zeros(2, 4, 8), torch.zeros(1, 2, 4, 2, 8))
    assert wrapper._state is None


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("override", [False, True])
def test_plans_what_plan_plans(override, graph, q_len):
    slow, fast = ((decode_graph(2, 12) if graph else decode_wrapper()) for _ in range(2))
    options = {
        "pos_encoding_mode": "ALIBI",
        "window_left": 5,
        "logits_soft_cap": 3.0,
        "q_data_type": "float32",
        "sm_scale": 0.4,
        "rope_scale": 2.0,
        "rope_theta": 100.0,
        "q_len_per_req": q_len,
        "fixed_split_size": 2,
    }
    first = pages([4, 8])
    for wrapper in (slow, fast):
        wrapper.plan(*first.table, *SIZES, **options)
    captured = fast._state
    p, q = pages([9, 6]), queries(2 * q_len, 4, 8)
    slow.plan(*p.table, *SIZES, **options)
    known = {"global_override_indptr_cpu": torch.cat([p.indptr, ints(99, 99)])} if override else {}
    fast_decode_plan(fast, *p.table, *SIZES, **options, **known)
    assert fast._state.query == slow._state.query
    assert fast.route == slow.route
    want = slow.run(q, p.cache)
    assert same_bits(fast.run(q, p.cache), want)
    if graph:
        assert same_bits(replay(captured, q, p.cache)[0], want)


def test_bound_over_plan_as_engines_do():
    p, q = pages([9, 6]), queries(2, 4, 8)
    for name in ("plan", "begin_forward"):
        wrapper = decode_graph(2, 12)
        wrapper.plan(*pages([4, 8]).table, *SIZES, q_data_type="float32")
        setattr(wrapper, name, partial(fast_decode_plan, wrapper))
        getattr(wrapper, name)(
            *p.table, *SIZES, q_data_type="float32", data_type=torch.float32, non_blocking=True
        )
        close(wrapper.run(q, p.cache), oracle(q, p.keys, p.values, [1, 1])[0], 2e-6)


def test_a_failure_changes_nothing(use):
    fake = use(FakeBackend())
    wrapper, p = decode_graph(2, 12), pages([9, 6])
    wrapper.plan(*pages([4, 8]).table, *SIZES)
    kept = Snapshot.of(wrapper)
    plan = partial(fast_decode_plan, wrapper, *p.table)
    for change, error, message in (
        (
            {"global_override_indptr_cpu": ints(0, 3)},
            ValueError,
            "global_override_indptr_cpu: needs at least 3",
        ),
        (
            {"global_override_indptr_cpu": [0, 3, 5]},
            TypeError,
            "global_override_indptr_cpu: needs an int32 tensor",
        ),
        ({"global_override_indptr_cpu": ints(0, 3, 2)}, ValueError, r"indptr\[2\]"),
        ({"window_left": 3}, ValueError, "window_left is frozen"),
        ({"q_len_per_req": 2}, ValueError, "q_len_per_req"),
    ):
        with pytest.raises(error, match=message):
            plan(*SIZES, **change)
        kept.require(wrapper)
    with pytest.raises(TypeError, match="last_page_len: needs an int32 tensor, got list"):
        fast_decode_plan(wrapper, p.indptr, p.indices, [1, 2], *SIZES)
    fake.does["plan"] = OSError("gone")
    with pytest.raises(OSError, match="gone"):
        plan(*SIZES)
    kept.require(wrapper)


def test_the_host_copy_spares_the_read_and_page_size_one_needs_none():
    """On the meta device a value cannot be read at all."""
    p = pages([9, 3], page_size=1)
    table = [t.to("meta") for t in p.table]
    wrapper = decode_wrapper(ws=workspace(device="meta"))
    wrapper.plan(p.indptr, table[1], p.last, 4, 2, 8, 1)
    fast_decode_plan(wrapper, *table, 4, 2, 8, 1, global_override_indptr_cpu=p.indptr)
    assert wrapper._state.batch.kv_len.tolist() == [9, 3]
    with pytest.raises(NotImplementedError, match="meta"):
        fast_decode_plan(wrapper, *table, 4, 2, 8, 1)


def test_signature_is_upstreams():
    names = list(inspect.signature(fast_decode_plan).parameters)
    assert names == [
        "self",
        "indptr",
        "indices",
        "last_page_len",
        "num_qo_heads",
        "num_kv_heads",
        "head_dim",
        "page_size",
        "pos_encoding_mode",
        "window_left",
        "logits_soft_cap",
        "q_data_type",
        "kv_data_type",
        "data_type",
        "sm_scale",
        "rope_scale",
        "rope_theta",
        "non_blocking",
        "fixed_split_size",
        "disable_split_kv",
        "q_len_per_req",
        "global_override_indptr_cpu",
    ]
    assert attn_core.fast_decode_plan is fast_decode_plan
