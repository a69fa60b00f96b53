"""How serving engines use the wrappers: what they read of them, and what they call once per layer."""

from functools import partial

import pytest
import torch

from attn_core import fast_decode_plan
from attn_core.backend import PlanResult, TensorContract
from attn_core.mla import BatchMLAPagedAttentionWrapper
from attn_core.planner import plan_all
from attn_core.problem import MaskMode

from .fakes import FakeBackend
from .kit import (
    Snapshot,
    close,
    decode_graph,
    decode_wrapper,
    ints,
    offsets,
    oracle,
    paged_wrapper,
    pages,
    prefill_graph,
    queries,
    ragged_wrapper,
    same_bits,
    workspace,
)

SIZES = (4, 2, 8, 4)
F32 = {"q_data_type": torch.float32}
Q_LENS = [2, 3]


def prefill(wrapper=None, **options):
    wrapper, p = wrapper or paged_wrapper(), pages([9, 6])
    wrapper.plan(offsets(Q_LENS), *p.table, *SIZES, **F32, **options)
    return wrapper, p, queries(5, 4, 8)


def test_what_vllm_compares_before_every_run():
    decode, p = decode_wrapper(), pages([9, 6])
    assert decode._window_left is decode._sm_scale is decode._causal is decode._pos_encoding_mode is None
    decode.plan(*p.table, *SIZES, window_left=5, logits_soft_cap=30.0, sm_scale=0.3, **F32)
    assert (decode._window_left, decode._logits_soft_cap, decode._sm_scale) == (5, 30.0, 0.3)
    assert (decode._causal, decode._pos_encoding_mode) == (False, "NONE")
    assert (decode._rope_scale, decode._rope_theta) == (1.0, 1e4)
    assert decode_wrapper()._max_kv_len is None
    assert type(decode._max_kv_len) is int
    assert decode._max_kv_len == 9
    mask = torch.ones(2 * 9 + 3 * 6, dtype=torch.bool)
    assert prefill(causal=True, custom_mask=mask)[0]._causal is False
    for wrapper in (prefill(causal=True)[0], ragged_wrapper()):
        if wrapper._state is None:
            wrapper.plan(offsets(Q_LENS), offsets([9, 6]), 4, 2, 8, causal=True)
        assert (wrapper._causal, wrapper._window_left, wrapper._logits_soft_cap) == (True, -1, 0.0)


def test_buffers_of_a_graph_wrapper_are_the_callers():
    wrapper = decode_graph(2, 12)
    assert wrapper._fixed_batch_size == 2
    bound = wrapper._graph.bound
    assert wrapper._paged_kv_indptr_buf is wrapper._kv_indptr_buf is bound["kv_indptr"]
    assert wrapper._paged_kv_indices_buf is wrapper._kv_indices_buf is bound["kv_indices"]
    assert wrapper._paged_kv_last_page_len_buf is bound["kv_last_page_len"]
    assert wrapper._qo_indptr_buf is bound["qo_indptr"]
    masked = prefill_graph(2, 12, 64)
    assert masked._custom_mask_buf is masked._graph.bound["custom_mask"]
    assert masked._mask_indptr_buf is masked._graph.bound["mask_indptr"]


def test_arrays_of_an_eager_wrapper_are_the_plans():
    wrapper, p, _ = prefill()
    assert wrapper._fixed_batch_size == 0
    assert wrapper._qo_indptr_buf.tolist() == [0, 2, 5]
    assert wrapper._paged_kv_indptr_buf.tolist() == p.indptr.tolist()
    assert wrapper._paged_kv_indices_buf.tolist() == p.indices.tolist()
    assert wrapper._custom_mask_buf is None
    assert paged_wrapper()._paged_kv_indices_buf is None
    latent = BatchMLAPagedAttentionWrapper(workspace())
    latent.plan(ints(0, 1), ints(0, 1), ints(0), ints(3), 2, 8, 4, 4, False, 0.5, "float32", "float32")
    assert latent._kv_indices_buf.tolist() == [0]
    wrapper.reset_workspace_buffer(workspace(), wrapper._int_workspace_buffer)


def test_page_ids_written_into_the_buffer_are_planned_as_sglang_plans_them():
    """One page per token; ids go straight into the wrapper's buffer, all of which is then passed."""
    p, q = pages([9, 6], page_size=1), queries(2, 4, 8)
    wrapper = decode_graph(2, 40)
    wrapper.begin_forward(ints(0, 1, 2), wrapper._paged_kv_indices_buf.zero_(), ints(1, 1), 4, 2, 8, 1, **F32)
    wrapper.begin_forward = partial(fast_decode_plan, wrapper)
    assert wrapper.begin_forward.func == fast_decode_plan
    wrapper._paged_kv_indices_buf[:15] = p.indices
    wrapper.begin_forward(
        p.indptr, wrapper._paged_kv_indices_buf, ints(1, 1), 4, 2, 8, 1, data_type=torch.float32,
        q_data_type=torch.float32, non_blocking=True, fixed_split_size=None, disable_split_kv=False,
        global_override_indptr_cpu=p.indptr,
    )  # fmt: skip
    out = wrapper.forward(q, p.cache, sm_scale=8**-0.5, logits_soft_cap=0.0, k_scale=None, v_scale=None)
    close(out, oracle(q, p.keys, p.values, [1, 1])[0], 2e-6)


def test_a_module_engines_once_called_themselves_says_what_to_call():
    """As in an engine's own copy of fast_decode_plan."""
    wrapper = decode_graph(2, 12)
    with pytest.raises(NotImplementedError, match=r"_cached_module\.plan: needs fast_decode_plan"):
        wrapper._cached_module.plan(wrapper._float_workspace_buffer, wrapper._int_workspace_buffer)
    wrapper.vllm_first_call = False  # engines keep marks of their own on a wrapper


def test_the_scale_named_in_every_layers_call_costs_no_plan():
    wrapper, p, q = prefill(causal=True)
    kept = Snapshot.of(wrapper)
    plain = wrapper.run(q, p.cache)
    assert same_bits(wrapper.forward(q, p.cache, causal=True, sm_scale=8**-0.5), plain)
    found, lse = wrapper.forward_return_lse(q, p.cache, causal=True, sm_scale=0.2)
    kept.require(wrapper)
    want, want_lse = oracle(q, p.keys, p.values, Q_LENS, causal=True, sm_scale=0.2)
    close(found, want, 2e-6)
    close(lse, want_lse, 2e-6)
    assert wrapper._state.revision == 0


def test_the_planned_scale_in_other_words_reaches_no_kernel(monkeypatch):
    assert 8**-0.5 != 1 / 8**0.5
    wrapper, p, q = prefill()
    given, run = [], wrapper.run
    monkeypatch.setattr(wrapper, "run", lambda *a, **o: (given.append(o["q_scale"]), run(*a, **o))[1])
    for scale, q_scale in ((8**-0.5, None), (1 / 8**0.5, None), (0.5 / 8**0.5, 0.5)):
        wrapper.forward(q, p.cache, sm_scale=scale)
        assert given.pop() == q_scale


def test_a_scale_beside_a_planned_0_is_planned():
    wrapper, p, q = prefill(sm_scale=0.0)
    found = wrapper.forward(q, p.cache, causal=True, sm_scale=0.3)
    close(found, oracle(q, p.keys, p.values, Q_LENS, causal=True, sm_scale=0.3)[0], 2e-6)


def test_a_scale_is_planned_where_the_kernel_takes_none(use):
    backend = use(FakeBackend("fake", contract=TensorContract(scales=False)))
    wrapper, p, q = prefill()
    wrapper.forward(q, p.cache, sm_scale=0.3)
    assert backend.count("plan") == 2


def test_a_custom_mask_stays_whatever_forward_says():
    mask = torch.rand(2 * 9 + 3 * 6, generator=torch.Generator().manual_seed(2)) < 0.6
    wrapper, p, q = prefill(custom_mask=mask)
    plain = wrapper.run(q, p.cache)
    assert same_bits(wrapper.forward(q, p.cache, causal=True), plain)
    capped = paged_wrapper()
    capped.plan(offsets(Q_LENS), *p.table, *SIZES, custom_mask=mask, logits_soft_cap=0.4, **F32)
    assert same_bits(wrapper.forward(q, p.cache, causal=True, logits_soft_cap=0.4), capped.run(q, p.cache))


def test_a_scale_joins_that_of_q_in_decode():
    wrapper, p, q = decode_graph(2, 12), pages([9, 6]), queries(2, 4, 8)
    wrapper.plan(*p.table, *SIZES, sm_scale=0.7, **F32)
    out = wrapper.forward(q, p.cache, sm_scale=0.2, q_scale=2.0)
    close(out, oracle(q, p.keys, p.values, [1, 1], sm_scale=0.4)[0], 2e-6)
    both = wrapper.forward_return_lse(q, p.cache, sm_scale=0.2, q_scale=torch.tensor([2.0]))
    assert same_bits(both[0], out)
    assert wrapper._state.revision == 0


def test_ragged_forward_takes_a_scale_too():
    wrapper, p, q = ragged_wrapper(), pages([9, 6]), queries(5, 4, 8)
    wrapper.plan(offsets(Q_LENS), offsets([9, 6]), 4, 2, 8, **F32)
    k, v = torch.cat(p.keys), torch.cat(p.values)
    want, want_lse = oracle(q, p.keys, p.values, Q_LENS, sm_scale=0.2, causal=True)
    close(wrapper.forward(q, k, v, causal=True, sm_scale=0.2), want, 2e-6)
    close(wrapper.forward_return_lse(q, k, v, causal=True, sm_scale=0.2)[1], want_lse, 2e-6)


def test_the_same_change_in_every_layers_call_is_planned_once(monkeypatch):
    wrapper, p, q = prefill()
    base = wrapper._state
    first = wrapper.forward(q, p.cache, causal=True, window_left=4)
    close(first, oracle(q, p.keys, p.values, Q_LENS, causal=True, window=4)[0], 2e-6)
    assert wrapper._state is base
    with monkeypatch.context() as patched:
        patched.setattr(wrapper, "_plan", lambda *_, **__: pytest.fail("planned again"))
        assert same_bits(wrapper.forward(q, p.cache, causal=True, window_left=4), first)
    assert wrapper._state is base
    other = wrapper.forward(q, p.cache, causal=True, window_left=1)
    close(other, oracle(q, p.keys, p.values, Q_LENS, causal=True, window=1)[0], 2e-6)


def test_what_was_planned_for_another_batch_is_not_taken():
    wrapper, p, q = prefill()
    wrapper.forward(q, p.cache, causal=True)
    again = pages([4, 12], seed=5)
    wrapper.plan(offsets([4, 1]), *again.table, *SIZES, **F32)
    assert wrapper._instead is None
    out = wrapper.forward(q, again.cache, causal=True)
    close(out, oracle(q, again.keys, again.values, [4, 1], causal=True)[0], 2e-6)
    assert wrapper._state.query.problem.mask is MaskMode.NONE


def test_what_all_parts_planned_together_is_not_taken_either():
    """plan_all() publishes without the wrapper's own plan()."""
    wrapper, p, q = prefill()
    wrapper.forward(q, p.cache, causal=True)
    again, other = pages([4, 12], seed=5), paged_wrapper()
    other.plan(offsets([4, 1]), *again.table, *SIZES, **F32)
    planned = other._planned()
    plan_all([(wrapper, planned.query.problem, planned.batch)])
    out = wrapper.forward(q, again.cache, causal=True)
    close(out, oracle(q, again.keys, again.values, [4, 1], causal=True)[0], 2e-6)


def test_a_plan_within_a_changed_call_stays_in_force():
    wrapper, p, _ = prefill()
    with wrapper._for_one_call(window_left=3):
        wrapper.plan(offsets(Q_LENS), *p.table, *SIZES, sm_scale=0.5, **F32)
    assert (wrapper._window_left, wrapper._sm_scale) == (-1, 0.5)


def test_what_was_planned_before_needs_its_workspace_still(use):
    def plan(query, path, batch):
        return PlanResult("launch", workspace_bytes=0 if query.problem.window_left < 0 else 48)

    use(FakeBackend("fake", plan=plan))
    wrapper, p, q = prefill()
    wrapper.forward(q, p.cache, window_left=3)
    wrapper.reset_workspace_buffer(workspace(32), workspace(32))
    with pytest.raises(ValueError, match=r"float_workspace_buffer: needs 48 bytes, got 32"):
        wrapper.forward(q, p.cache, window_left=3)
