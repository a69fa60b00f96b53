"""Through attn-core's public wrappers: CPU tensors, a device said to be an Instinct, stand-in kernels."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

import attn_core

from .wrapping import DIM, HEADS, KV_HEADS, PAGE, Kernels, cache, close, table, workspace


def decode(backend: str, lengths: list[int], q: torch.Tensor, kv: torch.Tensor, **options: Any) -> Any:
    wrapper = attn_core.BatchDecodeWithPagedKVCacheWrapper(workspace(), backend=backend)
    wrapper.plan(*table(lengths), HEADS, KV_HEADS, DIM, PAGE, **options)
    return wrapper, wrapper.run(q, kv)


def test_decode(kernels: Kernels) -> None:
    lengths, kv = [5, 40, 33], cache()
    fused = torch.randn(3, HEADS + 4, DIM).half()
    for options in ({}, {"window_left": 3}, {"logits_soft_cap": 5.0}, {"sm_scale": 0.3}):
        wrapper, out = decode("auto", lengths, fused[:, :HEADS], kv, **options)
        assert wrapper.route is not None
        assert wrapper.route.candidate == "aiter/pa_v1"
        assert wrapper.backend_fallback_reason is None
        close(out, decode("reference", lengths, fused[:, :HEADS], kv, **options)[1])
    assert kernels.pa.calls == 4


def test_decode_with_v_elsewhere_is_refused(kernels: Kernels) -> None:
    kv = cache()
    wrapper, _ = decode("auto", [5, 40], torch.randn(2, HEADS, DIM).half(), kv)
    calls = kernels.pa.calls
    v = kv[:, 1].transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="identical strides"):
        wrapper.run(torch.randn(2, HEADS, DIM).half(), (kv[:, 0], v))
    assert kernels.pa.calls == calls


def test_decode_with_lse_is_routed_by_the_plan(kernels: Kernels) -> None:
    q, kv = torch.randn(2, HEADS, DIM).half(), cache()
    wrapper, _ = decode("auto", [5, 40], q, kv, needs_lse=True)
    assert wrapper.backend == "reference"
    assert "core.lse" in (wrapper.backend_fallback_reason or "")
    wrapper, _ = decode("auto", [5, 40], q, kv)
    with pytest.raises(ValueError, match=r"needs a plan with needs_lse=True \(aiter/pa_v1 has no LSE\)"):
        wrapper.run(q, kv, return_lse=True)


def test_a_workspace_that_is_too_small_is_another_route(kernels: Kernels) -> None:
    wrapper = attn_core.BatchDecodeWithPagedKVCacheWrapper(workspace(64))
    wrapper.plan(*table([5, 40]), HEADS, KV_HEADS, DIM, PAGE)
    assert wrapper.backend == "reference"
    assert "aiter.workspace" in (wrapper.backend_fallback_reason or "")
    enough, _ = wrapper.workspace_size(*table([5, 40]), HEADS, KV_HEADS, DIM, PAGE)
    assert enough == 2 * HEADS * (8 + 2 * DIM)
    wrapper = attn_core.BatchDecodeWithPagedKVCacheWrapper(workspace(enough))
    wrapper.plan(*table([5, 40]), HEADS, KV_HEADS, DIM, PAGE)
    assert wrapper.backend == "aiter"


def test_an_empty_request_is_another_route_for_that_plan_only(kernels: Kernels) -> None:
    wrapper = attn_core.BatchDecodeWithPagedKVCacheWrapper(workspace())
    empty = (torch.tensor([0, 1, 1]), torch.tensor([0]), torch.tensor([5, 1]))
    for metadata, backend in ((table([5, 40]), "aiter"), (empty, "reference"), (table([5, 40]), "aiter")):
        wrapper.plan(*metadata, HEADS, KV_HEADS, DIM, PAGE)
        assert wrapper.backend == backend


def test_decode_in_graph_mode_keeps_its_launch(kernels: Kernels) -> None:
    wrapper = attn_core.BatchDecodeWithPagedKVCacheWrapper(
        workspace(), use_cuda_graph=True, max_seq_len=128,
        paged_kv_indptr_buffer=torch.zeros(3, dtype=torch.int32),
        paged_kv_indices_buffer=torch.zeros(12, dtype=torch.int32),
        paged_kv_last_page_len_buffer=torch.ones(2, dtype=torch.int32),
    )  # fmt: skip
    kv, launches, tables = cache(), [], []
    for lengths in ([5, 40], [90, 17], [1, 1]):
        q = torch.randn(2, HEADS, DIM).half()
        wrapper.plan(*table(lengths), HEADS, KV_HEADS, DIM, PAGE)
        assert wrapper.backend == "aiter"
        close(wrapper.run(q, kv), decode("reference", lengths, q, kv)[1])
        launches.append(wrapper._plan_info.launch)
        tables.append(wrapper._plan_info.image["aiter_block_table"].data_ptr())
    assert launches[0] == launches[1] == launches[2]
    assert len(set(tables)) == 1
    with pytest.raises(ValueError, match="max_seq_len 128"):
        wrapper.plan(*table([129, 1]), HEADS, KV_HEADS, DIM, PAGE)
    close(wrapper.run(q, kv), decode("reference", [1, 1], q, kv)[1])  # the refused plan changed nothing


@pytest.mark.parametrize(("page_size", "path"), [(16, "aiter/gather"), (1024, "aiter/native")])
def test_paged_prefill(kernels: Kernels, page_size: int, path: str) -> None:
    lengths = [20, 33]
    metadata = table(lengths, page_size)
    kv = cache(int(metadata[0][-1]), page_size)
    qo = torch.tensor([0, 20, 38], dtype=torch.int32)
    q = torch.randn(38, HEADS, DIM).half()
    found = {}
    for backend in ("auto", "reference"):
        wrapper = attn_core.BatchPrefillWithPagedKVCacheWrapper(workspace(), backend=backend)
        wrapper.plan(qo, *metadata, HEADS, KV_HEADS, DIM, page_size, causal=True)
        found[backend] = wrapper.run(q, kv, return_lse=True)
        if backend == "auto":
            assert wrapper.route.candidate == path
            assert wrapper.backend_fallback_reason is None
    for mine, want in zip(found["auto"], found["reference"], strict=True):
        close(mine, want)


def test_ragged_prefill_is_gated_per_plan(kernels: Kernels) -> None:
    wrapper = attn_core.BatchPrefillWithRaggedKVCacheWrapper(workspace())
    for q_len, backend in ((32, "aiter"), (4, "reference"), (32, "aiter")):
        qo = torch.tensor([0, q_len, 2 * q_len], dtype=torch.int32)
        wrapper.plan(qo, torch.tensor([0, 40, 80]), HEADS, KV_HEADS, DIM, causal=True)
        assert wrapper.backend == backend
        q, kv = torch.randn(2 * q_len, HEADS, DIM).half(), torch.randn(2, 80, KV_HEADS, DIM).half()
        out, lse = wrapper.run(q, kv[0], kv[1], return_lse=True)
        for n in range(2):
            own, keys = slice(n * q_len, (n + 1) * q_len), slice(n * 40, (n + 1) * 40)
            want, want_lse = attn_core.single_prefill_with_kv_cache(
                q[own], kv[0][keys], kv[1][keys], causal=True, return_lse=True, backend="reference"
            )
            close(out[own], want)
            close(lse[own], want_lse)


def test_single_prefill_and_append(kernels: Kernels) -> None:
    q, kv = torch.randn(7, HEADS, DIM).half(), torch.randn(2, 20, KV_HEADS, DIM).half()
    mine = attn_core.single_prefill_with_kv_cache(q, kv[0], kv[1], causal=True, backend="aiter")
    close(mine, attn_core.single_prefill_with_kv_cache(q, kv[0], kv[1], causal=True, backend="reference"))
    rows = torch.arange(20, dtype=torch.int32)
    pools = {}
    for backend in ("aiter", "reference", "auto"):
        pools[backend] = torch.zeros(3, 2, PAGE, KV_HEADS, DIM).half()
        attn_core.append_paged_kv_cache(
            kv[0], kv[1], torch.zeros(20, dtype=torch.int32), rows, pools[backend],
            torch.tensor([2, 0], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32),
            torch.tensor([4], dtype=torch.int32), backend=backend,
        )  # fmt: skip
    assert pools["aiter"].any()
    assert torch.equal(pools["aiter"], pools["reference"])
    assert torch.equal(pools["auto"], pools["reference"])


@pytest.mark.parametrize("page_size", [PAGE, 1024, 3])
def test_plans_made_under_another_default_device(kernels: Kernels, page_size: int) -> None:
    """Engines set one while they load a model and warm up; plans are made of host arrays."""
    lengths, kv = [5, 40, 33], cache(27, page_size)
    q = torch.randn(6, HEADS, DIM).half()
    rows = torch.tensor([0, 2, 4, 6], dtype=torch.int32)
    found = []
    for backend in ("reference", "aiter"):
        prefill = attn_core.BatchPrefillWithPagedKVCacheWrapper(workspace(), backend=backend)
        arrays = (rows, *table(lengths, page_size))
        prefill.plan(*arrays, HEADS, KV_HEADS, DIM, page_size, causal=True)  # tries the stand-in
        with torch.device("meta"):
            prefill.plan(*arrays, HEADS, KV_HEADS, DIM, page_size, causal=True)
        found.append(prefill.run(q, kv))
    close(*found)
    arrays = table(lengths)
    decodes = attn_core.BatchDecodeWithPagedKVCacheWrapper(workspace(), backend="aiter")
    decodes.plan(*arrays, HEADS, KV_HEADS, DIM, PAGE)
    with torch.device("meta"):
        decodes.plan(*arrays, HEADS, KV_HEADS, DIM, PAGE)
    close(decodes.run(q[:3], cache()), decode("reference", lengths, q[:3], cache())[1])


def test_a_scale_of_one_has_its_bits_whatever_type_is_the_default() -> None:
    """Backends are imported while a model is loaded, where bfloat16 may be the default."""
    spec = importlib.util.find_spec("attn_aiter.routes.common")
    assert spec is not None
    assert spec.loader is not None
    torch.set_default_dtype(torch.bfloat16)
    try:
        again = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(again)
    finally:
        torch.set_default_dtype(torch.float32)
    assert again.ONE.view(torch.float32).tolist() == [1.0]
