"""Mixed batches planned from lengths, and paged attention with sinks."""

import math

import pytest
import torch

from attn_core.attention import BatchAttention, BatchAttentionWithAttentionSinkWrapper

from .kit import close, ints, offsets, oracle, pages, queries, same_bits, workspace

Q_LENS, KV_LENS = [4, 1, 2], [9, 12, 0]
F32 = {"q_data_type": torch.float32, "kv_data_type": torch.float32}


def mixed(order="NHD", **options):
    p, wrapper = pages(KV_LENS, order=order), BatchAttention(order, "cpu")
    given = (offsets(Q_LENS), p.indptr, p.indices, ints(*KV_LENS), 4, 2, 8, 8, 4)
    wrapper.plan(*given, **{**F32, **options})
    return wrapper, p, queries(7, 4, 8)


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [False, True])
def test_requests_of_all_kinds_in_one_call(order, causal):
    wrapper, p, q = mixed(order, causal=causal, sm_scale=0.4, logits_soft_cap=2.0)
    out, lse = wrapper.run(q, p.cache, k_scale=torch.tensor(0.5), v_scale=3.0)
    want, want_lse = oracle(
        q, p.keys, p.values, Q_LENS, causal=causal, sm_scale=0.4, cap=2.0, k_scale=0.5, v_scale=3.0
    )
    close(out, want, 6e-6)
    close(lse, want_lse, 2e-6)
    into, lse_into = torch.empty_like(out), torch.empty_like(lse)
    both = wrapper.run(q, p.cache, into, lse_into, k_scale=0.5, v_scale=3.0)
    assert both[0] is into
    assert both[1] is lse_into
    assert same_bits(into, out)


def test_soft_cap_of_run_needs_one_of_plan_and_holds_for_the_call():
    wrapper, p, q = mixed(logits_soft_cap=2.0)
    plain, _ = wrapper.run(q, p.cache)
    assert same_bits(wrapper.run(q, p.cache, logits_soft_cap=2.0)[0], plain)
    other, _ = wrapper.run(q, p.cache, logits_soft_cap=0.5)
    close(other, oracle(q, p.keys, p.values, Q_LENS, cap=0.5)[0], 2e-6)
    assert same_bits(wrapper.run(q, p.cache)[0], plain)
    wrapper, p, q = mixed()
    with pytest.raises(ValueError, match="logits_soft_cap"):
        wrapper.run(q, p.cache, logits_soft_cap=2.0)


def test_defaults_and_refusals():
    wrapper, p, q = mixed()
    assert wrapper.device == torch.device("cpu")
    assert BatchAttention(device=None).device.type in ("cpu", "cuda")
    given = (offsets(Q_LENS), p.indptr, p.indices, ints(*KV_LENS), 4, 2, 8, 8, 4)
    with pytest.raises(NotImplementedError, match="use_profiler"):
        wrapper.plan(*given, use_profiler=True)
    with pytest.raises(ValueError, match=r"kv_len_arr\[1\]: needs 0 to 12"):
        wrapper.plan(*given[:3], ints(9, 13, 0), *given[4:])
    with pytest.raises(NotImplementedError, match="profiler_buffer"):
        wrapper.run(q, p.cache, profiler_buffer=torch.empty(1))
    with pytest.raises(ValueError, match="prior plan"):
        BatchAttention(device="cpu").run(q, p.cache)
    wrapper.plan(*given)
    assert wrapper._state.query.problem.q_dtype is torch.bfloat16


# ---- sinks -------------------------------------------------------------------------------------------

SINK = torch.tensor([0.5, -2.0, 30.0, -math.inf])


def with_sink(out, lse):
    """Weights shared with one more logit per head, from the definition."""
    mass = torch.exp(lse * math.log(2)) + torch.exp(SINK.double())
    return out * (torch.exp(lse * math.log(2)) / mass)[..., None].nan_to_num(0.0), mass.log2()


def sinks(order="NHD", **options):
    p = pages(KV_LENS, order=order)
    wrapper = BatchAttentionWithAttentionSinkWrapper(workspace(), order, head_dim_qk=8, window_left=5)
    wrapper.plan(offsets(Q_LENS), *p.table, 4, 2, 8, 4, q_data_type=torch.float32, **options)
    return wrapper, p, queries(7, 4, 8)


@pytest.mark.parametrize("causal", [False, True])
def test_a_sink_takes_its_share_of_the_weights(causal):
    wrapper, p, q = sinks(causal=causal, window_left=5)
    plain, plain_lse = oracle(q, p.keys, p.values, Q_LENS, causal=causal, window=5)
    want, want_lse = with_sink(plain, plain_lse)
    out, lse = wrapper.run(q, p.cache, SINK, return_lse=True)
    close(out, want, 4e-6)
    close(lse, want_lse, 4e-6)
    into = torch.empty_like(out)
    assert wrapper.run(q, p.cache, sinks=SINK, out=into) is into
    assert same_bits(into, out)
    assert same_bits(wrapper.run_return_lse(q, p.cache, SINK.to(torch.float64))[1], lse)


def test_the_scale_of_run_replaces_the_planned_one():
    wrapper, p, q = sinks(sm_scale=0.7)
    want, _ = with_sink(*oracle(q, p.keys, p.values, Q_LENS, sm_scale=0.2))
    close(wrapper.run(q, p.cache, SINK, 0.2), want, 4e-6)
    want, _ = with_sink(*oracle(q, p.keys, p.values, Q_LENS, sm_scale=0.4))
    close(wrapper.run(q, p.cache, SINK, 0.2, q_scale=2.0), want, 4e-6)


def test_a_missing_or_wrong_sink_is_refused():
    wrapper, p, q = sinks()
    for args, error in (
        ((), TypeError), ((SINK, 0.5, 1), TypeError), ((0.5,), TypeError), ((SINK[:2],), ValueError),
        ((SINK.int(),), ValueError), ((SINK, "x"), TypeError),
    ):  # fmt: skip
        with pytest.raises(error, match="core"):
            wrapper.run(q, p.cache, *args)


@pytest.mark.parametrize("device", ["cuda:99", "cuda:99:0", "xpu", -1])
def test_a_device_that_is_not_here_is_named(device):
    with pytest.raises(ValueError, match=r"device: needs .*, got .* \[core\.device\]"):
        BatchAttention(device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="device 0 is there")
@pytest.mark.parametrize("device", [0, "cuda"])
def test_a_gpu_where_there_is_none_is_named(device):
    with pytest.raises(ValueError, match=r"device: needs a device .*cuda.* \[core\.device\]"):
        BatchAttention(device=device)
