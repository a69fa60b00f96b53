"""Every fp8 code of every encoding, as the CPU kernels read them from a cache."""

from __future__ import annotations

import math

import pytest
import torch

from attn_core.prefill import BatchPrefillWithPagedKVCacheWrapper

CODES = torch.arange(256, dtype=torch.uint8)
TYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
SHAPES = [(1, 256), (1, 257), (37, 7)]
"""Heads and dims: whole vectors in place, copied vectors with a rest, and nothing but rests."""


def attend(rows: int, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each request has one key, in a page of its own."""
    requests, _, heads, dim = k.shape
    wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(8 << 20, dtype=torch.uint8), backend="fa2")
    count = torch.arange(requests + 1, dtype=torch.int32)
    wrapper.plan(
        count * rows, count, count[:-1], torch.ones(requests, dtype=torch.int32), heads, heads, dim, 1,
        sm_scale=1.0, q_data_type=q.dtype, kv_data_type=k.dtype,
    )  # fmt: skip
    out, lse = wrapper.run(q, (k, v), return_lse=True)
    return out, lse


@pytest.mark.parametrize(("heads", "dim"), SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 4, 20])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_values_are_exact(dtype: torch.dtype, rows: int, heads: int, dim: int) -> None:
    v = CODES.repeat(2)[: heads * dim].view(1, 1, heads, dim).view(dtype)
    q = torch.zeros(rows, heads, dim)
    out, _ = attend(rows, torch.zeros_like(v), v, q)
    torch.testing.assert_close(out, v[0].float().expand_as(out), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dim", [256, 257, 7])
@pytest.mark.parametrize("rows", [1, 2, 4, 20])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_keys_are_exact(dtype: torch.dtype, rows: int, dim: int) -> None:
    """Request n has code n in one dim of its key: its log-sum-exp is the value."""
    real = CODES.view(dtype).float()
    k = torch.zeros(256, 1, 1, dim, dtype=torch.uint8)
    k[torch.arange(256), 0, 0, torch.arange(256) * 37 % dim] = CODES
    v = torch.zeros_like(k).view(dtype)
    _, lse = attend(rows, k.view(dtype), v, torch.ones(256 * rows, 1, dim))
    found, wanted = lse.view(256, rows), (real * (1 / math.log(2))).view(256, 1).expand(256, rows)
    finite = wanted.isfinite()
    torch.testing.assert_close(found[finite], wanted[finite], rtol=1e-6, atol=1e-6)
    assert not found[~finite].isfinite().any()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_auto_takes_these_kernels(dtype: torch.dtype) -> None:
    wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(8 << 20, dtype=torch.uint8))
    wrapper.plan(
        torch.tensor([0, 3]), torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([5]), 4, 2, 64, 16,
        causal=True, q_data_type=torch.bfloat16, kv_data_type=dtype,
    )  # fmt: skip
    assert wrapper.route.candidate == "fa2/cpu"
