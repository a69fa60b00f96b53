from __future__ import annotations

import math

import pytest
import torch
from torch.overrides import TorchFunctionMode

import attn_core

from .support import (
    D_TC,
    S1,
    Asked,
    D,
    P,
    R,
    Rule,
    agrees,
    base,
    close,
    i32,
    plan,
    run,
    same_bits,
    served,
    wrapper,
)


@pytest.mark.parametrize("way", [D, D_TC, P, R])
@pytest.mark.parametrize("length", [0, 1])
def test_b22_request_without_keys_is_written(backend, way, length):
    """Rows without keys kept what was in the output buffer. https://github.com/flashinfer-ai/flashinfer/pull/4975"""
    full = base()
    case = full.but(q=full.q[[0, 0, 1]], tables=(full.tables[0], (), full.tables[1]), last=(5, length, 16))
    w = wrapper(way, backend)
    with served(backend):
        plan(w, case)
    out, lse = torch.full_like(case.q, math.nan), torch.full((3, 4), math.nan)
    got = run(w, case, out=out, lse=lse)
    assert got[0] is out
    assert got[1] is lse
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert torch.equal(lse[1], torch.full((4,), -math.inf))
    close((out[[0, 2]], lse[[0, 2]]), full.want(), torch.float16)


def test_x2_lengths_of_requests_without_pages(backend):
    """The planner believed last_page_len where the kernel saw no page. https://github.com/flashinfer-ai/flashinfer/issues/4484"""
    lengths = attn_core.get_seq_lens(i32(0, 3, 3, 4), i32(5, 9, 16), 16)
    assert lengths.tolist() == [37, 0, 16]
    # a verify of two rows needs two keys; the 9 must not stand in for them
    full = base()
    case = full.but(q=full.q[[0, 0, 1, 1]], tables=(full.tables[0], ()), last=(5, 9), q_lens=(2, 2))
    w = wrapper(D_TC, backend)
    with pytest.raises(ValueError, match="kv_len 0 in request 1"):
        plan(w, case)


class _Products(TorchFunctionMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func.__name__ in ("mm", "bmm", "matmul", "__matmul__", "einsum", "addmm", "baddbmm")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", [D, D_TC, P, R])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_b24_batch_of_nothing(backend, way, dtype):
    """An idle rank's empty batch divided by zero in launch code. https://github.com/Dao-AILab/flash-attention/issues/1159"""
    case = base(dtype).but(q=base(dtype).q[:0], tables=(), last=())
    for rule in (Rule(), Rule(causal=True)):
        w = wrapper(way, backend)
        with served(backend):
            plan(w, case, Asked(rule))
        with _Products() as products:
            out, lse = run(w, case)
        assert products.count == 0
        assert (tuple(out.shape), out.dtype) == ((0, 4, 64), dtype)
        assert (tuple(lse.shape), lse.dtype) == ((0, 4), torch.float32)
    # and back to work
    plan(w, base(dtype), Asked())
    close(run(w, base(dtype)), base(dtype).want(), dtype)


@pytest.mark.parametrize("way", [P, R, S1])
def test_b24_no_rows_but_keys(backend, way):
    """An idle rank's empty batch divided by zero in launch code. https://github.com/Dao-AILab/flash-attention/issues/1159"""
    full = base()
    none = full.but(q=full.q[:0], q_lens=(0, 0))
    mixed = full.but(q=full.q[1:], q_lens=(0, 1))
    for case in (none, mixed):
        for rule in (Rule(), Rule(causal=True)):
            agrees(way, backend, case, Asked(rule))


def test_b24_verify_of_nothing(backend):
    """An idle rank's empty batch divided by zero in launch code. https://github.com/Dao-AILab/flash-attention/issues/1159"""
    case = base().but(q=base().q[:0], tables=(), last=())
    w = wrapper(D_TC, backend)
    with served(backend):
        plan(w, case, Asked(plan={"q_len_per_req": 4}))
    out, lse = run(w, case)
    assert (tuple(out.shape), tuple(lse.shape)) == ((0, 4, 64), (0, 4))
    with pytest.raises(ValueError, match=r"q: needs 0 rows .*, got 4"):
        run(w, case.but(q=base().q[[0, 0, 0, 0]]))


def test_b24_append_of_nothing(backend):
    """An idle rank's empty batch divided by zero in launch code. https://github.com/Dao-AILab/flash-attention/issues/1159"""
    case = base()
    k, v = case.k.clone(), case.v.clone()
    for indptr, last in ((case.indptr, case.last_page_len), (i32(0), i32())):
        attn_core.append_paged_kv_cache(
            k[0, :0], v[0, :0], i32(), i32(), (k, v), case.indices, indptr, last, backend=backend
        )
    batch, positions = attn_core.get_batch_indices_positions(i32(0), i32(), 0)
    assert (batch.numel(), positions.numel()) == (0, 0)
    assert attn_core.get_seq_lens(i32(0), i32(), 16).numel() == 0
    assert same_bits(k, case.k)
    assert same_bits(v, case.v)


def test_b24_sampling_and_merging_of_nothing():
    """An idle rank's empty batch divided by zero in launch code. https://github.com/Dao-AILab/flash-attention/issues/1159"""
    tokens, accepted, emitted = attn_core.chain_speculative_sampling(
        torch.zeros(0, 3, 8), torch.zeros(0, 3, dtype=torch.int32), torch.zeros(0, 4, 8)
    )
    assert (tuple(tokens.shape), tokens.dtype) == ((0, 4), torch.int32)
    assert (tuple(accepted.shape), tuple(emitted.shape)) == ((0,), (0,))
    v, s = torch.zeros(0, 2, 8, dtype=torch.float16), torch.zeros(0, 2)
    for got in (attn_core.merge_state(v, s, v, s), attn_core.merge_states(v[:, None], s[:, None])):
        assert (tuple(got[0].shape), got[0].dtype, tuple(got[1].shape)) == ((0, 2, 8), torch.float16, (0, 2))
    attn_core.merge_state_in_place(v, s, v.clone(), s.clone())
