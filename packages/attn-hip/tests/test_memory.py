"""Tensors that kernels cannot read, seen before a kernel faults on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import attn_core

HEADS, DIM, PAGE = 2, 64, 16


def freed(t: torch.Tensor) -> torch.Tensor:
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def fake(t: torch.Tensor) -> torch.Tensor:
    return FakeTensorMode().from_tensor(t)


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
@pytest.mark.parametrize("change", [freed, fake])
@pytest.mark.parametrize("name", ["q", "k", "v", "out", "lse"])
def test_a_tensor_without_memory_is_refused(name: str, change: Any) -> None:
    wrapper = attn_core.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(1 << 20, dtype=torch.uint8), backend="fa2"
    )
    wrapper.plan(i32(0, 2), i32(1, 0), i32(3), HEADS, HEADS, DIM, PAGE, q_data_type=torch.float32)
    tensors = {
        "q": torch.randn(1, HEADS, DIM), "k": torch.randn(2, PAGE, HEADS, DIM),
        "v": torch.randn(2, PAGE, HEADS, DIM),
        "out": torch.zeros(1, HEADS, DIM), "lse": torch.zeros(1, HEADS),
    }  # fmt: skip
    right = dict(tensors)

    def run(t: dict[str, torch.Tensor]) -> Any:
        return wrapper.run(t["q"], (t["k"], t["v"]), out=t["out"], lse=t["lse"], return_lse=True)

    tensors[name] = change(tensors[name])
    wanted = "(memory behind its elements|a tensor with values)"
    with pytest.raises((TypeError, ValueError), match=f"{name}: needs {wanted}"):
        run(tensors)
    assert not right["out"].any()
    assert run(right)[0].abs().sum() > 0


INDICES = {
    "batch_indices": i32(0, 1, 1), "positions": i32(17, 0, 2), "kv_indices": i32(2, 0, 1),
    "kv_indptr": i32(0, 2, 3), "kv_last_page_len": i32(2, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", INDICES)
def test_index_arrays_of_an_append_may_have_strides(name: str) -> None:
    """The kernel reads them as they lie in memory."""
    key, value = torch.randn(2, 3, HEADS, DIM, generator=torch.Generator().manual_seed(1))

    def append(indices: dict[str, torch.Tensor]) -> torch.Tensor:
        cache = torch.zeros(3, 2, PAGE, HEADS, DIM)
        attn_core.append_paged_kv_cache(key, value, paged_kv_cache=cache, **indices, backend="fa2")
        return cache

    array = INDICES[name]
    strided = torch.stack([array, torch.zeros_like(array)], dim=1)[:, 0]
    assert not strided.is_contiguous()
    assert torch.equal(append({**INDICES, name: strided}), append(INDICES))


@pytest.mark.parametrize("times", [1, 4])
def test_outputs_with_gaps_may_be_leaves_or_made_in_inference_mode(times: int) -> None:
    wrapper = attn_core.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(1 << 20, dtype=torch.uint8), backend="fa2"
    )
    wrapper.plan(i32(0, 2), i32(1, 0), i32(3), HEADS, HEADS, DIM, PAGE, q_data_type=torch.float32)
    q, cache = torch.randn(1, HEADS, DIM), torch.randn(2, 2, PAGE, HEADS, DIM)
    want = wrapper.run(q, cache, return_lse=True)
    with torch.inference_mode():
        made = (torch.zeros(1, HEADS, DIM + 8)[..., :DIM], torch.zeros(1, 2 * HEADS)[:, ::2])
    leaves = (torch.zeros(1, HEADS, DIM, 2).select(3, 0).requires_grad_(), torch.zeros(1, HEADS))
    for out, lse in (made, leaves):
        for _ in range(times):
            wrapper.run(q, cache, out=out, lse=lse, return_lse=True)
        assert torch.equal(out.detach(), want[0])
        assert torch.equal(lse, want[1])
