"""Compiled free functions equal eager ones bit for bit; what cannot be exact is refused by name."""

import os
import subprocess
import sys

import pytest
import torch
import torch._dynamo.testing

import attn_core
from attn_compile import plugin
from attn_core import (
    append_paged_kv_cache,
    chain_speculative_sampling,
    get_batch_indices_positions,
    get_seq_lens,
    merge_state,
    merge_state_in_place,
    merge_states,
    packbits,
    segment_packbits,
    single_decode_with_kv_cache,
    single_prefill_with_kv_cache,
)


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def same(got, want):
    got, want = ((x,) if isinstance(x, torch.Tensor) else x for x in (got, want))
    for g, w in zip(got, want, strict=True):
        assert g.dtype is w.dtype
        assert torch.equal(g, w)
        assert g.stride() == w.stride()


def compiled_equals_eager(f, *sizes, dynamic=None):
    """``f(n)`` gives a function and its arguments for size n; one compiled function meets every size."""
    step = torch.compile(lambda g, *a: g(*a), fullgraph=True, dynamic=dynamic)
    for n in sizes:
        torch.manual_seed(n)
        g, args = f(n)
        mine, theirs = ([x.clone() if isinstance(x, torch.Tensor) else x for x in args] for _ in "ab")
        want = g(*mine)
        got = step(g, *theirs)
        if want is not None:
            same(got, want)
        same(
            [x for x in theirs if isinstance(x, torch.Tensor)],
            [x for x in mine if isinstance(x, torch.Tensor)],
        )


def states(n, dtype=torch.float32):
    s = torch.randn(n, 2)
    s[0] = -torch.inf
    return torch.randn(n, 2, 8, dtype=dtype), s


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_merge_state(dtype):
    compiled_equals_eager(lambda n: (merge_state, (*states(n, dtype), *states(n, dtype))), 3, 5, 8)


def test_merge_states():
    compiled_equals_eager(
        lambda n: (lambda v, s: merge_states(v * 1, s), (torch.randn(n, 3, 2, 8), torch.randn(n, 3, 2))),
        2,
        5,
        8,
    )


@pytest.mark.parametrize("dynamic", [False, None, True], ids=["static", "default", "dynamic"])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_merge_state_in_place_of_slices_made_in_the_graph(masked, dynamic):
    def merge(v, s, v_other, s_other, mask):
        merge_state_in_place(v[1, : v_other.shape[0]], s[1], v_other * 2, s_other, mask)
        return v * 2, s + 1

    def case(n):
        mask = torch.arange(n) % 2 == 0 if masked else None
        return merge, (torch.randn(3, 16, 2, 8), torch.randn(3, n, 2), *states(n), mask)

    compiled_equals_eager(case, 3, 5, 8, dynamic=dynamic)


def test_merging_under_grad_is_refused_not_dropped():
    v, s = states(3)
    step = torch.compile(merge_state, fullgraph=True)
    with pytest.raises(Exception, match=r"without requires_grad.*compile\.grad"):
        step(v.clone().requires_grad_(), s, v, s)


def test_an_in_place_merge_into_an_expanded_tensor_is_refused():
    v, s = states(3)
    step = torch.compile(merge_state_in_place, fullgraph=True)
    with pytest.raises(Exception, match="single memory location"):
        step(v[:1].expand(3, 2, 8), s, v, s)


@pytest.mark.parametrize("order", ["big", "little"])
def test_packbits(order):
    def case(n):
        bits = torch.randint(2, (n,), dtype=torch.bool)
        return lambda x: packbits(x, order), (bits,)

    compiled_equals_eager(case, 5, 16, 33)


def test_segment_packbits_has_a_size_only_its_values_know():
    def case(n):
        bits = torch.randint(2, (n,), dtype=torch.uint8)
        return lambda x, p: segment_packbits(x, p, "little"), (bits, i32(0, n // 3, n // 3, n))

    compiled_equals_eager(case, 5, 16, 33)


def chain(n):
    probs = torch.rand(2, n + 1, 11).softmax(-1)
    ids = torch.randint(11, (2, n), dtype=torch.int32)
    return torch.rand(2, n, 11).softmax(-1), ids, probs


def test_chain_sampling_with_seed_tensors_and_counters():
    def run(draft, ids, probs, counter, seed, offset):
        return chain_speculative_sampling(draft, ids, probs, counter, None, seed=seed, offset=offset)

    def case(n):
        return run, (*chain(n), i32(4, 5), torch.tensor([n]), torch.tensor([7]))

    compiled_equals_eager(case, 2, 3, 5)


def test_chain_sampling_with_a_new_seed_number_per_step_does_not_recompile_for_ever():
    counter = torch._dynamo.testing.CompileCounter()
    draft, ids, probs = chain(3)

    def run(seed):
        return chain_speculative_sampling(draft, ids, probs, seed=seed, offset=2**64 - 1)

    step, seen = torch.compile(run, fullgraph=True, backend=counter), set()
    for seed in range(100, 112):
        got = step(seed)
        same(got, run(seed))
        seen.add(str(got[0].tolist()))
    assert counter.frame_count <= 2
    assert len(seen) > 1


@pytest.mark.parametrize("given", [{}, {"generator": torch.Generator()}], ids=["neither", "generator"])
def test_chain_sampling_without_a_seed_is_refused(given):
    step = torch.compile(lambda *a: chain_speculative_sampling(*a, **given), fullgraph=True)
    with pytest.raises(Exception, match=r"needs seed and offset.*compile\.seed"):
        step(*chain(2))


def test_index_functions():
    def case(n):
        def run(indptr, lens, pages, last, kept):
            b, p = get_batch_indices_positions(indptr, lens, n + 2, None, kept)
            return b, p, get_seq_lens(pages, last, 4)

        pages, last = i32(0, 2, 2, 3), i32(1, 1, 4)
        return run, (i32(0, 1, 2, n), i32(3, 4, n), pages, last, torch.zeros(n + 2, dtype=torch.int32))

    compiled_equals_eager(case, 4, 6, 9)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_single_request_functions(layout):
    def run(q, k, v, scale):
        one = single_decode_with_kv_cache(q[0], k, v, layout, k_scale=0.5, return_lse=True)
        more = single_prefill_with_kv_cache(
            q, k, v, causal=True, kv_layout=layout, o_dtype="float64", v_scale=scale
        )
        mask = torch.ones(q.shape[0], k.shape[0 if layout == "NHD" else 1], dtype=torch.bool).tril(1)
        return (*one, more, single_prefill_with_kv_cache(q, k, v, custom_mask=mask, kv_layout=layout))

    def case(n):
        shape = (n + 3, 2, 8) if layout == "NHD" else (2, n + 3, 8)
        return run, (torch.randn(n, 4, 8), torch.randn(shape), torch.randn(shape), torch.tensor([2.0]))

    compiled_equals_eager(case, 2, 3, 5)


def append_to(pair, order="NHD"):
    tables = i32(0, 0, 1), i32(1, 2, 4), pair, i32(2, 1, 0), i32(0, 1, 3), i32(3, 1)
    rows = torch.randn(3, 2, 8)
    append_paged_kv_cache(rows, rows * 2, *tables, order)


def test_an_append_whose_values_do_not_fit_leaves_the_keys_alone():
    k, v = torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 4)
    with pytest.raises(Exception, match=r"append_value: needs.*core\.append-shape"):
        torch.compile(append_to, fullgraph=True)((k, v))
    assert not k.any()


def test_an_append_to_a_page_only_the_keys_have_leaves_the_keys_alone():
    k, v = torch.zeros(3, 4, 2, 8), torch.zeros(2, 4, 2, 8)
    with pytest.raises(ValueError, match=r"kv_indices: a page\[0\]: needs 0 to 1, got 2"):
        torch.compile(append_to, fullgraph=True)((k, v))
    assert not k.any()


def test_a_caller_s_mistake_has_its_eager_text():
    cache = torch.zeros(3, 2, 4, 2, 8)
    for pair, order, text in ((cache, "XYZ", "kv_layout"), ([cache], "NHD", "paged_kv_cache")):
        with pytest.raises((TypeError, ValueError), match=text):
            append_to(pair, order)
        with pytest.raises(Exception, match=text):
            torch.compile(append_to, fullgraph=True)(pair, order)


@pytest.mark.parametrize("function", ["append_to((k, k))", "attn_core.packbits(torch.ones(9) > 0)"])
def test_the_switch_gives_a_clear_error(function):
    code = f"""
import torch, attn_core
i = lambda *x: torch.tensor(x, dtype=torch.int32)
def append_to(pair):
    rows = torch.randn(1, 1, 8)
    attn_core.append_paged_kv_cache(rows, rows, i(0), i(1), pair, i(0), i(0, 1), i(2))
k = torch.zeros(1, 4, 1, 8)
{function}
torch.compile(lambda k: {function}, fullgraph=True, backend="aot_eager")(k)
"""
    env = {**os.environ, plugin.SWITCH: "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 1
    name = "append_paged_kv_cache" if "append" in function else "packbits"
    assert f"torch.compile of {name}: needs a registered operator" in done.stderr
    assert f"{plugin.SWITCH}=0 switches attn-compile off" in done.stderr
    assert hasattr(attn_core, name)
