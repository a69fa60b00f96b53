"""Plans under way in several threads, and plans after other plans."""

import functools
import threading
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_core import plugins
from attn_core.backend import PlanResult
from attn_core.capability import Capability
from attn_core.errors import Unsupported
from attn_core.problem import Op
from attn_core.reasons import Reason
from attn_core.rules import Rule

from .fakes import BUILD, SLOW, WRONG, FakeBackend, registry
from .kit import (
    SIZES,
    close,
    decode_graph,
    decode_wrapper,
    ints,
    offsets,
    oracle,
    pages,
    planned,
    queries,
    ragged_wrapper,
    random_mask,
)


def test_a_run_sees_one_plan_or_the_other_never_both():
    p = [pages([9, 3, 12], seed=0), pages([2, 14, 5], seed=0)]
    q, wrapper = queries(3, 4, 8), decode_wrapper()
    cache = (torch.randn(12, 4, 2, 8), torch.randn(12, 4, 2, 8))
    want = []
    for each in p:
        wrapper.plan(*each.table, *SIZES, q_data_type="float32")
        want.append(wrapper.run(q, cache))
    stop, faults = threading.Event(), []

    def plan(n):
        try:
            while not stop.is_set():
                wrapper.plan(*p[n].table, *SIZES, q_data_type="float32")
                with pytest.raises(ValueError, match="seq_lens"):
                    wrapper.plan(*p[1 - n].table, *SIZES, q_data_type="float32", seq_lens=ints(99, 99, 99))
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=plan, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    found = [wrapper.run(q, cache) for _ in range(150)]
    stop.set()
    for thread in threads:
        thread.join()
    assert not faults
    kinds = [[torch.equal(out, w) for w in want] for out in found]
    assert all(sum(kind) == 1 for kind in kinds)


def test_plans_of_a_graph_wrapper_do_not_mix():
    tables = [pages([9, 3, 12], seed=n).table for n in range(2)]
    wrapper = decode_graph(3, 12)
    faults = []

    def plan(n):
        try:
            for _ in range(60):
                wrapper.plan(*tables[n], *SIZES)
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=plan, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert wrapper._state.revision == 119
    last = wrapper._graph.bound["kv_indices"][: tables[0][0][-1]]
    assert any(torch.equal(last, table[1]) for table in tables)
    assert torch.equal(wrapper._state.host["kv_indices"], last)


def over(limit, got):
    return (limit, got) if got > limit else None


def moody():
    """A backend with every way to say no: capability, two kinds of rules, and late."""

    def late(query, path, batch):
        if batch.shape.batch_size == 2:
            raise Unsupported(Reason(BUILD, "", "another batch", 2))
        return PlanResult((path, query.problem.window_left))

    rules = [
        Rule(SLOW, frozenset({Op.VERIFY}), frozenset({"quick"}), lambda q: over(3, q.batch.total_q)),
        Rule(WRONG, frozenset(Op), frozenset({"quick", "late"}), lambda q: over(9, q.batch.max_kv_len)),
    ]
    few = Capability(
        archs=None, ops=frozenset({Op.DECODE, Op.VERIFY}), q_dtypes=frozenset({torch.float32}), window=True
    )
    return FakeBackend("moody", paths=[("quick", few), ("late", few)], rules=rules, plan=late, value=7.0)


STEP = st.fixed_dictionaries(
    {
        "kv_lens": st.lists(st.integers(0, 11), min_size=0, max_size=3),
        "q_len": st.integers(1, 3),
        "window_left": st.sampled_from([-1, 2]),
        "logits_soft_cap": st.sampled_from([None, 5.0]),
        "q_data_type": st.sampled_from(["float32", "float16"]),
        "seed": st.integers(0, 2),
    }
)


def outcome(wrapper, step):
    """What a plan and a run give: the decision and the bytes, or the error."""
    p = pages(step["kv_lens"], seed=step["seed"], dtype=getattr(torch, step["q_data_type"]))
    q = queries(len(p.kv_lens) * step["q_len"], 4, 8, p.k.dtype)
    options = {name: step[name] for name in ("window_left", "logits_soft_cap", "q_data_type")}
    try:
        wrapper.plan(*p.table, *SIZES, q_len_per_req=step["q_len"], **options)
    except (ValueError, Unsupported) as error:
        return type(error), str(error)
    out, lse = wrapper.run(q, p.cache, return_lse=True)
    return wrapper.route, wrapper.backend_fallback_reason, out.view(torch.uint8).tolist(), lse.tolist()


@settings(max_examples=25, deadline=None, database=None)
@given(steps=st.lists(STEP, min_size=2, max_size=5), backend=st.sampled_from(["auto", "reference", "moody"]))
def test_a_plan_does_not_depend_on_what_was_planned_before(steps, backend):
    plugins.use(registry(moody()))
    wrapper = decode_wrapper(backend=backend)
    for step in steps:
        assert outcome(wrapper, step) == outcome(decode_wrapper(backend=backend), step)


RAGGED_STEP = st.fixed_dictionaries(
    {
        "lens": st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=3),
        "mask": st.sampled_from(["none", "causal", "flat", "wrong"]),
        "window": st.sampled_from([-1, 1]),
    }
)


@settings(max_examples=25, deadline=None, database=None)
@given(steps=st.lists(RAGGED_STEP, min_size=2, max_size=5))
def test_masks_and_lengths_of_a_ragged_wrapper_do_not_linger(steps):
    wrapper, last = ragged_wrapper(), None
    for step in steps:
        q_lens, kv_lens = map(list, zip(*step["lens"], strict=True))
        p, q = pages(kv_lens), queries(sum(q_lens), 4, 8)
        flat, shaped = random_mask(q_lens, kv_lens)
        mask = {"flat": flat, "wrong": torch.cat([flat, torch.ones(1, dtype=torch.bool)])}.get(step["mask"])
        plan = functools.partial(
            wrapper.plan,
            offsets(q_lens),
            offsets(kv_lens),
            4,
            2,
            8,
            q_data_type="float32",
            custom_mask=mask,
            causal=step["mask"] == "causal",
            window_left=step["window"],
        )
        if step["mask"] == "wrong":
            with pytest.raises(ValueError, match="custom_mask"):
                plan()
        else:
            plan()
            k, v = torch.cat(p.keys), torch.cat(p.values)
            see = {"causal": step["mask"] == "causal", "mask": shaped if step["mask"] == "flat" else None}
            last = (q, k, v), oracle(q, p.keys, p.values, q_lens, window=step["window"], **see)
        if last is not None:
            out, lse = wrapper.run(*last[0], return_lse=True)
            close(out, last[1][0], 2e-6)
            close(lse, last[1][1], 3e-6)


def test_no_warning_is_raised_in_plain_use():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapper, p, q = planned(q_len=2)
        wrapper.run(q, p.cache, return_lse=True)
        wrapper.end_forward()
    assert wrapper.route.refused == ()
