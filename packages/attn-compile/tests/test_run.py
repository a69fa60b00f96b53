"""Compiled runs equal eager ones bit for bit, and leave the cache alone."""

import os
import subprocess
import sys

import pytest
import torch
import torch._dynamo.testing

import attn_compile.plugin as plugin
from attn_core import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    CacheView,
)

PAGES, PAGE, HKV, HQ, DIM = 7, 4, 2, 4, 16
GUARD = 64  # elements before and after every allocation, so that none starts at storage offset 0


def guarded(*shape):
    """A tensor inside poisoned memory, and that memory."""
    size = torch.Size(shape).numel()
    whole = torch.full((size + 2 * GUARD,), torch.nan)
    whole[GUARD : GUARD + size] = torch.randn(size, generator=torch.Generator().manual_seed(size))
    return whole[GUARD : GUARD + size].view(shape), whole


LAYOUTS = {
    "pair": ((PAGES, PAGE, HKV, DIM), None),
    "stacked": ((2, PAGES, PAGE, HKV, DIM), lambda t: (t[0], t[1])),
    "interleaved": ((PAGES, 2, PAGE, HKV, DIM), lambda t: (t[:, 0], t[:, 1])),
    "one": ((PAGES, 2, PAGE, HKV, DIM), lambda t: t),
    "pool": ((3, 2, PAGES, PAGE, HKV, DIM), lambda t: (t[1, 0], t[1, 1])),
    "view": ((3, PAGES, 2, PAGE, HKV, DIM), lambda t: CacheView.split(t, 1, (0, 1))),
}


def cache_of(layout):
    shape, take = LAYOUTS[layout]
    if take is None:
        (k, whole_k), (v, whole_v) = guarded(*shape), guarded(*shape)
        return (k, v), [whole_k, whole_v], lambda pair: pair
    storage, whole = guarded(*shape)
    return storage, [whole], take


def planned(q_len=1, kv_lens=(9, 14), wrapper=None):
    wrapper = wrapper or BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(64, dtype=torch.uint8), use_tensor_cores=True
    )
    kv = torch.tensor(kv_lens, dtype=torch.int32)
    pages = (kv + PAGE - 1) // PAGE
    indptr = torch.cat([torch.zeros(1), pages.cumsum(0)]).int()
    order = torch.randperm(PAGES, generator=torch.Generator().manual_seed(3))[: int(indptr[-1])].int()
    wrapper.plan(
        indptr,
        order,
        kv - (pages - 1) * PAGE,
        HQ,
        HKV,
        DIM,
        PAGE,
        q_data_type=torch.float32,
        q_len_per_req=q_len,
    )
    return wrapper


@pytest.mark.parametrize("dynamic", [False, None, True], ids=["static", "default", "dynamic"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_decode_equals_eager_and_leaves_the_cache(layout, dynamic):
    storage, wholes, take = cache_of(layout)
    wrapper, q = planned(q_len=3), torch.randn(6, HQ, DIM)
    eager = wrapper.run(q, take(storage), return_lse=True)
    kept = [whole.clone() for whole in wholes]

    @torch.compile(fullgraph=True, dynamic=dynamic)
    def step(q, storage):
        out, lse = wrapper.run(q * 1.0, take(storage), return_lse=True)
        return out + 0.0, lse

    for got, want in zip(step(q, storage), eager, strict=True):
        assert torch.equal(got, want)
    for now, was in zip(wholes, kept, strict=True):
        assert torch.equal(now.view(torch.int32), was.view(torch.int32))


@pytest.mark.parametrize("kind", ["paged", "ragged"])
def test_compiled_prefill_equals_eager(kind):
    qo = torch.tensor([0, 3, 8], dtype=torch.int32)
    q = torch.randn(8, HQ, DIM)
    workspace = torch.empty(64, dtype=torch.uint8)
    if kind == "paged":
        wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace)
        indptr, last = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([3, 4], dtype=torch.int32)
        indices = torch.tensor([6, 0, 2, 5, 1], dtype=torch.int32)
        wrapper.plan(qo, indptr, indices, last, HQ, HKV, DIM, PAGE, causal=True, q_data_type=torch.float32)
        kv = (torch.randn(2, PAGES, PAGE, HKV, DIM).unbind(0),)
    else:
        wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace)
        indptr = torch.tensor([0, 7, 20], dtype=torch.int32)
        wrapper.plan(qo, indptr, HQ, HKV, DIM, causal=True, q_data_type=torch.float32)
        kv = tuple(torch.randn(20, HKV, DIM) for _ in "kv")
    step = torch.compile(lambda q, kv: wrapper.run(q, *kv), fullgraph=True)
    assert torch.equal(step(q, kv), wrapper.run(q, *kv))


def test_a_replan_changes_the_result_and_does_not_recompile():
    wrapper, (storage, _, take) = planned(), cache_of("pair")
    counter = torch._dynamo.testing.CompileCounter()
    step = torch.compile(lambda q, kv: wrapper.run(q, kv) * 1.0, fullgraph=True, backend=counter)
    q, seen = torch.randn(2, HQ, DIM), []
    for kv_lens in ((9, 14), (4, 20), (1, 1), (12, 12), (16, 3)):
        planned(kv_lens=kv_lens, wrapper=wrapper)
        seen.append(step(q, take(storage)))
        assert torch.equal(seen[-1], wrapper.run(q, take(storage)))
    assert counter.frame_count == 1
    assert not torch.equal(seen[0], seen[1])


def test_out_lse_and_scales_reach_the_operator():
    wrapper, (storage, _, take) = planned(), cache_of("stacked")
    q, out, lse = torch.randn(2, HQ, DIM), torch.zeros(2, HQ, DIM), torch.zeros(2, HQ)
    scale = torch.tensor([0.5])

    @torch.compile(fullgraph=True)
    def step(q, storage, out, lse):
        return wrapper.run(q, take(storage), k_scale=scale, v_scale=2.0, out=out, lse=lse, return_lse=True)

    want = wrapper.run(q, take(storage), k_scale=0.5, v_scale=2.0, return_lse=True)
    step(q, storage, out, lse)
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])
    assert not torch.equal(want[0], wrapper.run(q, take(storage)))


def test_checks_hold_in_a_compiled_run():
    wrapper, (storage, _, take) = planned(), cache_of("pair")
    step = torch.compile(lambda q, kv: wrapper.run(q, kv), fullgraph=True)
    with pytest.raises(ValueError, match="q: needs 2 rows"):
        step(torch.randn(3, HQ, DIM), take(storage))


@pytest.mark.parametrize("switch", [plugin.SWITCH, plugin.FORKS_SWITCH])
@pytest.mark.parametrize(("value", "works"), [("0", False), ("1", True)])
def test_the_switch_gives_a_clear_error(switch, value, works):
    code = """
import torch, attn_core as a
w = a.BatchDecodeWithPagedKVCacheWrapper(torch.empty(64, dtype=torch.uint8), backend="reference")
i = lambda *x: torch.tensor(x, dtype=torch.int32)
w.plan(i(0, 1), i(0), i(3), 2, 1, 8, 4, q_data_type=torch.float32)
q, kv = torch.randn(1, 2, 8), torch.randn(1, 2, 4, 1, 8)
want = w.run(q, kv)
step = torch.compile(lambda q, kv: w.run(q, kv), fullgraph=True, backend="aot_eager")
print(torch.equal(step(q, kv), want))
"""
    env = {**os.environ, switch: value}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert (done.returncode == 0) == works
    assert "True" in done.stdout if works else f"{switch}={value} switches" in done.stderr
