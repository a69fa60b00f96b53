"""The paths over flash_attn_varlen_func: what reaches AITER, and what is made of its answer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from attn_aiter import codes, rows
from attn_aiter.backend import AiterBackend
from attn_core.backend import RunIO
from attn_core.batch import paged_batch, ragged_batch, single_batch
from attn_core.errors import Unsupported
from attn_core.problem import MaskMode, Op
from attn_core.query import GraphLimits

from .functions import Varlen

QO = torch.tensor([0, 5, 12], dtype=torch.int32)
KV = torch.tensor([0, 9, 31], dtype=torch.int32)


@pytest.fixture
def fake() -> Varlen:
    return Varlen()


@pytest.fixture
def backend(fake: Varlen) -> AiterBackend:
    return AiterBackend({"assume_version": "0.1.20"}, loader=lambda module, name: fake)


def tensors(p: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    kv = (batch.shape.total_kv, p.num_kv_heads)
    return (
        torch.randn(batch.shape.total_q, p.num_qo_heads, p.head_dim_qk).to(p.q_dtype),
        torch.randn(*kv, p.head_dim_qk).to(p.kv_dtype),
        torch.randn(*kv, p.head_dim_vo).to(p.kv_dtype),
    )


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 2e-2) -> None:
    torch.testing.assert_close(a.float(), b.float(), atol=tolerance, rtol=tolerance)


def run(backend: AiterBackend, p: Any, query: Any, batch: Any, image: Any, path: str, q, k, v, **more):
    assert backend.prepare(query.target, p, path) is None
    result = backend.plan(query, path, batch)
    out = torch.full((q.shape[0], p.num_qo_heads, p.head_dim_vo), 7.0, dtype=p.o_dtype)
    lse = torch.full(q.shape[:2], 7.0) if more.pop("lse", True) else None
    backend.run(result.launch, image(batch, result), RunIO(q, k, v, out, lse, **more))
    return out, lse


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mask": MaskMode.NONE},
        {"window_left": 3},
        {"window_left": 3, "mask": MaskMode.NONE},
        {"logits_soft_cap": 2.0},
        {"dtype": torch.float16, "head_dim": 64},
    ],
    ids=str,
)
def test_ragged_equals_the_reference(
    backend, problem, query, device_image, reference, changes: dict[str, Any]
) -> None:
    p = problem(Op.PREFILL_RAGGED, **changes)
    batch = ragged_batch(QO, KV)
    q, k, v = tensors(p, batch)
    out, lse = run(backend, p, query(p, batch), batch, device_image, rows.VARLEN, q, k, v)
    want_out, want_lse = reference(p, batch, q, k, v)
    close(out, want_out)
    close(lse, want_lse)


def test_a_row_without_a_key_has_lse_minus_infinity(backend, problem, query, device_image, reference) -> None:
    p = problem(Op.PREFILL_RAGGED)
    batch = ragged_batch(torch.tensor([0, 4, 6]), torch.tensor([0, 2, 2]))
    q, k, v = tensors(p, batch)
    out, lse = run(backend, p, query(p, batch), batch, device_image, rows.VARLEN, q, k, v)
    want_out, want_lse = reference(p, batch, q, k, v)
    assert (want_lse == -math.inf).sum() == 4 * 8
    close(out, want_out)
    close(lse, want_lse)


def test_nothing_to_attend_to_calls_nothing(backend, fake, problem, query, device_image) -> None:
    p = problem(Op.PREFILL_RAGGED)
    batch = ragged_batch(torch.tensor([0, 4]), torch.tensor([0, 0]))
    out, lse = run(backend, p, query(p, batch), batch, device_image, rows.VARLEN, *tensors(p, batch))
    assert fake.calls == []
    assert not out.any()
    assert (lse == -math.inf).all()


def test_never_passes_what_faults_or_skips(backend, fake, problem, query, device_image) -> None:
    p = problem(Op.PREFILL_RAGGED)
    batch = ragged_batch(QO, KV)
    run(backend, p, query(p, batch), batch, device_image, rows.VARLEN, *tensors(p, batch), lse=False)
    given = fake.calls[-1]
    assert "block_table" not in given
    assert given["min_seqlen_q"] == 0
    assert given["window_size"] == (-1, -1, 0)
    assert given["return_lse"] is False
    assert (given["max_seqlen_q"], given["max_seqlen_k"]) == (7, 22)


def test_scales_are_folded_and_must_be_numbers(backend, problem, query, device_image, reference) -> None:
    p = problem(Op.PREFILL_RAGGED)
    batch = ragged_batch(QO, KV)
    q, k, v = tensors(p, batch)
    scales = {"q_scale": 0.5, "k_scale": 0.25, "v_scale": 2.0}
    out, lse = run(backend, p, query(p, batch), batch, device_image, rows.VARLEN, q, k, v, **scales)
    want_out, want_lse = reference(p, batch, q * 0.5, k * 0.25, v * 2.0)
    close(out, want_out)
    close(lse, want_lse)
    with pytest.raises(NotImplementedError, match=r"k_scale: needs a number.*\[aiter.scale\]"):
        run(
            backend, p, query(p, batch), batch, device_image, rows.VARLEN, q, k, v,
            k_scale=torch.tensor(0.5),
        )  # fmt: skip


def test_out_must_be_dense(backend, problem, query, device_image) -> None:
    p = problem(Op.PREFILL_RAGGED)
    batch = ragged_batch(QO, KV)
    q, k, v = tensors(p, batch)
    backend.prepare(query(p, batch).target, p, rows.VARLEN)
    result = backend.plan(query(p, batch), rows.VARLEN, batch)
    out = torch.full((8, 12, 128), 7.0, dtype=p.o_dtype).transpose(0, 1)
    with pytest.raises(ValueError, match=r"needs a contiguous tensor.*\[aiter.out\]"):
        backend.run(result.launch, device_image(batch, result), RunIO(q, k, v, out))
    assert (out == 7).all()


def test_an_answer_in_other_memory_is_brought_home(problem, query, device_image) -> None:
    def elsewhere(**given: Any) -> torch.Tensor:
        return torch.ones_like(given["out"])

    backend = AiterBackend({"assume_version": "0.1.20"}, loader=lambda module, name: elsewhere)
    p = problem(Op.PREFILL_RAGGED)
    batch = ragged_batch(QO, KV)
    out, _ = run(backend, p, query(p, batch), batch, device_image, rows.VARLEN, *tensors(p, batch), lse=False)
    assert (out == 1).all()


def test_single_equals_the_reference(backend, problem, query, device_image, reference) -> None:
    p = problem(Op.PREFILL_SINGLE)
    batch = single_batch(6, 17)
    q, k, v = tensors(p, batch)
    out, lse = run(backend, p, query(p, batch), batch, device_image, rows.SINGLE, q, k, v)
    want_out, want_lse = reference(p, batch, q, k, v)
    close(out, want_out)
    close(lse, want_lse)


def paged(page: int) -> Any:
    """Three requests of 3, 0 and 2 full-ish pages, the page ids out of order."""
    indptr = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    ids = torch.tensor([4, 0, 5, 2, 6], dtype=torch.int32)
    last = torch.tensor([min(2, page), page, page], dtype=torch.int32)
    return paged_batch(torch.tensor([0, 5, 7, 12]), indptr, ids, last, page)


@pytest.mark.parametrize("page", [1, 4, 64])
def test_gather_equals_the_reference(backend, problem, query, device_image, reference, page: int) -> None:
    p = problem(Op.PREFILL_PAGED, page_size=page)
    batch = paged(page)
    torch.manual_seed(1)
    q = torch.randn(12, 8, 128).to(p.q_dtype)
    pool = torch.randn(7, 2, page, 2, 128).to(p.kv_dtype)
    out, lse = run(backend, p, query(p, batch), batch, device_image, rows.GATHER, q, pool[:, 0], pool[:, 1])
    want_out, want_lse = reference(p, batch, q, pool[:, 0], pool[:, 1])
    close(out, want_out)
    close(lse, want_lse)


def test_gather_under_capture_has_the_capacitys_size_and_one_launch(
    backend, fake, problem, query, device_image, reference
) -> None:
    p = problem(Op.PREFILL_PAGED, page_size=4)
    limits = GraphLimits(batch_size=3, total_q=12, max_pages=9)
    ids, last = torch.tensor([3, 1, 6]), torch.tensor([4, 4, 4])
    small = paged_batch(torch.tensor([0, 2, 4, 6]), torch.tensor([0, 1, 2, 3]), ids, last, 4)
    plans = []
    for batch in (paged(4), small):
        asked = query(p, batch, graph=limits)
        backend.prepare(asked.target, p, rows.GATHER)
        result = backend.plan(asked, rows.GATHER, batch)
        plans.append((result.launch, {name: part.numel() for name, part in result.image.items()}))
        image = device_image(batch, result)
        stale = torch.full((9,), 10**6, dtype=torch.int32)  # a caller's buffer beyond the batch
        stale[: batch.kv_indices.numel()] = batch.kv_indices
        image["kv_indices"] = stale
        q, k = torch.randn(batch.shape.total_q, 8, 128).to(p.q_dtype), torch.randn(7, 4, 2, 128).to(p.q_dtype)
        out = torch.empty(batch.shape.total_q, 8, 128, dtype=p.o_dtype)
        backend.run(result.launch, image, RunIO(q, k, k, out))
        close(out, reference(p, batch, q, k, k)[0])
    assert plans[0] == plans[1]
    assert plans[0][1]["aiter_entry"] == 36
    assert fake.calls[-1]["max_seqlen_k"] == 36
    assert fake.calls[-1]["max_seqlen_q"] == 12


def test_gather_of_nothing_under_capture_reads_inside_the_cache(
    backend, problem, query, device_image
) -> None:
    """Without pages the padding reads entry 0 of the caller's index buffer, whatever is there."""
    p = problem(Op.PREFILL_PAGED, page_size=4)
    none = torch.tensor([], dtype=torch.int32)
    batch = paged_batch(torch.tensor([0, 2]), torch.tensor([0, 0]), none, torch.tensor([1]), 4)
    asked = query(p, batch, graph=GraphLimits(batch_size=1, total_q=2, max_pages=3))
    backend.prepare(asked.target, p, rows.GATHER)
    result = backend.plan(asked, rows.GATHER, batch)
    image = device_image(batch, result)
    image["kv_indices"] = torch.full((3,), 10**6, dtype=torch.int32)
    q, k = torch.randn(2, 8, 128).to(p.q_dtype), torch.randn(7, 4, 2, 128).to(p.kv_dtype)
    out, lse = torch.full_like(q, 7.0), torch.full((2, 8), 7.0)
    backend.run(result.launch, image, RunIO(q, k, k, out, lse))
    assert not out.any()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("path", [rows.GATHER, rows.VARLEN])
def test_one_row_among_long_ones_is_found_at_plan(backend, problem, query, gfx942, gfx950, path: str) -> None:
    op = Op.PREFILL_PAGED if path == rows.GATHER else Op.PREFILL_RAGGED
    ends = torch.tensor([0, 20, 21])
    if path == rows.GATHER:
        batch = paged_batch(ends, torch.tensor([0, 2, 3]), torch.arange(3), torch.tensor([16, 16]), 16)
    else:
        batch = ragged_batch(ends, torch.tensor([0, 32, 48]))
    half = problem(op, dtype=torch.float16)
    with pytest.raises(Unsupported) as caught:
        backend.plan(query(half, batch, gfx942), path, batch)
    assert caught.value.reason.code == codes.ONE_ROW
    backend.plan(query(half, batch, gfx950), path, batch)
    backend.plan(query(problem(op), batch, gfx942), path, batch)  # bf16 at 128 is not affected
