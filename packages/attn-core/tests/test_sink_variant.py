"""The kernel variant AttentionSink, which upstream's callers hand to a wrapper as jit_args."""

import math

import pytest
import torch

from attn_core import BatchAttentionWithAttentionSinkWrapper

from .kit import (
    SIZES,
    close,
    decode_wrapper,
    ints,
    offsets,
    oracle,
    paged_wrapper,
    pages,
    queries,
    ragged_wrapper,
    same_bits,
    workspace,
)

SINK = torch.tensor([-1.0, 0.5, 3.0, -math.inf])
KV_LENS, Q_LENS = [9, 3, 12, 0], [4, 3, 1, 2]


def variant(name="AttentionSink", tensors=("sink",), scalars=("sm_scale",), more=()):
    f32 = torch.float32
    types = [["float"] * len(names) for names in (tensors, scalars)]
    added = [list(tensors), types[0], list(scalars), types[1]]
    return ["a_uri", f32, f32, f32, torch.int32, 8, 8, *added, name, "its source", *more]


def with_sink(out, lse):
    """Attention with one more logit, from attention without."""
    log2 = SINK.double() / math.log(2)
    total = torch.logaddexp2(lse, log2.expand_as(lse))
    kept = torch.where(lse == -math.inf, 0.0, torch.exp2(lse - total))
    return out * kept[..., None], total


def prefill(wrapper, p, **options):
    wrapper.plan(offsets(Q_LENS), *p.table, *SIZES, q_data_type="float32", **options)


@pytest.mark.parametrize("form", [list, tuple])
@pytest.mark.parametrize("flags", [None, {"use_sliding_window": True, "pos_encoding_mode": 0}])
def test_paged_prefill(form, flags):
    p, q = pages(KV_LENS), queries(10, 4, 8)
    wrapper = paged_wrapper(jit_args=form(variant()), jit_kwargs=flags)
    prefill(wrapper, p, causal=True, window_left=5)
    want = with_sink(*oracle(q, p.keys, p.values, Q_LENS, causal=True, window=5))
    out, lse = wrapper.run(q, p.cache, SINK, return_lse=True)
    close(out, want[0], 3e-6)
    close(lse, want[1], 3e-6)
    assert same_bits(wrapper.run(q, p.cache, sinks=SINK), out)
    both = wrapper.run_return_lse(q, p.cache, SINK)
    assert same_bits(both[0], out)
    assert same_bits(both[1], lse)
    own = BatchAttentionWithAttentionSinkWrapper(workspace())
    prefill(own, p, causal=True, window_left=5)
    assert same_bits(own.run(q, p.cache, SINK), out)


def test_ragged_prefill_with_a_scale_of_its_own():
    p, q = pages(KV_LENS), queries(10, 4, 8)
    wrapper = ragged_wrapper(jit_args=variant(), jit_kwargs={})
    wrapper.plan(offsets(Q_LENS), offsets(KV_LENS), 4, 2, 8, q_data_type="float32")
    into = torch.empty_like(q)
    out = wrapper.run(q, torch.cat(p.keys), torch.cat(p.values), SINK, 0.2, out=into)
    assert out is into
    close(out, with_sink(*oracle(q, p.keys, p.values, Q_LENS, sm_scale=0.2))[0], 3e-6)


@pytest.mark.parametrize(
    ("planned", "given", "message"),
    [
        (0.0, 0.2, r"sm_scale: needs 0.0 as planned, or a plan with another, got 0.2 \[core.number\]"),
        (1e-30, 1e30, "the planned sm_scale: needs a finite number, as a float32 too"),
    ],
)
def test_a_scale_that_the_planned_one_cannot_become_is_refused(planned, given, message):
    p, q = pages([9, 3, 12]), queries(3, 4, 8)
    wrapper = decode_wrapper(jit_args=variant())
    wrapper.plan(*p.table, *SIZES, q_data_type="float32", sm_scale=planned)
    with pytest.raises(ValueError, match=message):
        wrapper.run(q, p.cache, SINK, given)
    want = oracle(q, p.keys, p.values, [1] * 3, sm_scale=planned)
    for scale in ((), (planned,)):
        close(wrapper.run(q, p.cache, SINK, *scale), with_sink(*want)[0], 3e-6)


@pytest.mark.parametrize("q_len", [1, 2])
def test_decode_and_verify(q_len):
    lens = [9, 3, 12]
    p, q = pages(lens), queries(3 * q_len, 4, 8)
    wrapper = decode_wrapper(jit_args=variant(more=(0, True, False)))
    wrapper.plan(*p.table, *SIZES, q_data_type="float32", q_len_per_req=q_len)
    want = with_sink(*oracle(q, p.keys, p.values, [q_len] * 3, causal=True))
    out, lse = wrapper.run(q, p.cache, SINK, 1 / math.sqrt(8), return_lse=True)
    close(out, want[0], 3e-6)
    close(lse, want[1], 3e-6)


def test_decode_in_graph_mode():
    names = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")
    buffers = {name: ints(*[-7] * size) for name, size in zip(names, (4, 12, 3), strict=True)}
    wrapper = decode_wrapper(use_cuda_graph=True, jit_args=variant(), **buffers)
    for seed, lens in enumerate(([9, 3, 12], [1, 16, 2])):
        p, q = pages(lens, seed=seed), queries(3, 4, 8, seed=seed)
        wrapper.plan(*p.table, *SIZES, q_data_type="float32")
        close(wrapper.run(q, p.cache, SINK), with_sink(*oracle(q, p.keys, p.values, [1] * 3))[0], 3e-6)


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((), TypeError, "sink and at most sm_scale, got 0 after the cache"),
        ((SINK, 0.3, 1), TypeError, "got 3 after the cache"),
        ((0.3,), TypeError, "sink: needs a tensor, got float"),
        ((SINK[:3],), ValueError, r"sink: needs floating point \[4\]"),
        ((SINK.int(),), ValueError, r"sink: needs floating point \[4\]"),
        ((SINK, "0.3"), TypeError, "sm_scale: needs a number, got str"),
        ((SINK, math.nan), ValueError, "sm_scale: needs a finite number"),
    ],
)
def test_what_run_is_given_is_checked(args, error, message):
    p, q = pages([9, 3, 12]), queries(3, 4, 8)
    decode, paged, ragged = (
        make(jit_args=variant()) for make in (decode_wrapper, paged_wrapper, ragged_wrapper)
    )
    decode.plan(*p.table, *SIZES, q_data_type="float32")
    paged.plan(offsets([1] * 3), *p.table, *SIZES, q_data_type="float32")
    ragged.plan(offsets([1] * 3), offsets(p.kv_lens), 4, 2, 8, q_data_type="float32")
    out = torch.full_like(q, 7.0)
    for wrapper, kv in (
        (decode, [p.cache]),
        (paged, [p.cache]),
        (ragged, map(torch.cat, (p.keys, p.values))),
    ):
        with pytest.raises(error, match=message):
            wrapper.run(q, *kv, *args, out=out)
    assert bool((out == 7).all())


def test_a_wrapper_without_the_variant_takes_neither():
    p, q = pages([9, 3, 12]), queries(3, 4, 8)
    wrapper = decode_wrapper()
    wrapper.plan(*p.table, *SIZES, q_data_type="float32")
    with pytest.raises(TypeError, match="run: needs q and paged_kv_cache by position, got 1 more"):
        wrapper.run(q, p.cache, SINK)
    with pytest.raises(NotImplementedError, match="sinks: needs to be left at its default"):
        wrapper.run(q, p.cache, sinks=SINK)


@pytest.mark.parametrize("make", [decode_wrapper, paged_wrapper, ragged_wrapper])
@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        (variant("FlashSigmoid", (), ("logits_scale", "sigmoid_bias")), NotImplementedError,
         r"needs the variant AttentionSink.* got FlashSigmoid, which adds \[\] and \['logits_scale'"),
        (variant(tensors=("sink", "bias")), NotImplementedError, r"adds \['sink', 'bias'\] and"),
        (variant(scalars=("sm_scale", "soft_cap")), NotImplementedError, r"'soft_cap'\]"),
        (variant()[:12], ValueError, "jit_args: needs 13 values, .* got 12"),
        ([1], ValueError, "jit_args: needs 13 values, .* got 1"),
        ("AttentionSink", TypeError, "jit_args: needs a list or a tuple, got str"),
        (variant(name=None), ValueError, r"jit_args\[11\]: needs the name of a variant, got NoneType"),
    ],
)  # fmt: skip
def test_other_variants_are_named(make, args, error, message):
    with pytest.raises(error, match=message):
        make(jit_args=args)


def test_flags():
    with pytest.raises(TypeError, match=r"jit_kwargs: needs names of .* got frobnicate"):
        paged_wrapper(jit_args=variant(), jit_kwargs={"frobnicate": 1})
    with pytest.raises(TypeError, match="jit_kwargs: needs a dict, got list"):
        ragged_wrapper(jit_args=variant(), jit_kwargs=[1])
    with pytest.raises(NotImplementedError, match="jit_kwargs: needs to be left at its default"):
        paged_wrapper(jit_kwargs={"use_sliding_window": True})


def made_in_inference_mode(*shape):
    with torch.inference_mode():
        return torch.zeros(shape)


@pytest.mark.parametrize(
    "outputs", [made_in_inference_mode, lambda *shape: torch.nn.Parameter(torch.zeros(shape))]
)
def test_a_sink_may_be_a_parameter_and_outputs_leaves_or_of_inference_mode(outputs):
    """A model keeps its sinks as a parameter, and need not run without gradients."""
    p, q = pages(KV_LENS), queries(10, 4, 8)
    wrapper = paged_wrapper(jit_args=variant())
    prefill(wrapper, p, causal=True)
    want = wrapper.run(q, p.cache, SINK, return_lse=True)
    found = wrapper.run(q, p.cache, torch.nn.Parameter(SINK), return_lse=True)
    out, lse = outputs(10, 4, 8), outputs(10, 4)
    wrapper.run(q, p.cache, torch.nn.Parameter(SINK), out=out, lse=lse)
    for got in (found, (out.detach(), lse.detach())):
        assert same_bits(got[0], want[0])
        assert same_bits(got[1], want[1])
    assert not found[0].requires_grad
