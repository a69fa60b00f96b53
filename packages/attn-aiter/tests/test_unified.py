"""The Triton path: what reaches unified_attention, in both layouts and for verify."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_aiter import codes, rows
from attn_aiter.backend import AiterBackend
from attn_core.backend import RunIO
from attn_core.batch import paged_batch
from attn_core.errors import Unsupported
from attn_core.problem import MaskMode, Op

from .functions import Unified


@pytest.fixture
def fake() -> Unified:
    return Unified()


@pytest.fixture
def backend(fake: Unified) -> AiterBackend:
    return AiterBackend({"assume_version": "0.1.20"}, loader=lambda module, name: fake)


def batch_of(qo: Any, page: int) -> Any:
    ids = torch.tensor([4, 0, 5, 2, 6])
    last = torch.tensor([min(3, page), page])
    return paged_batch(qo, torch.tensor([0, 3, 5]), ids, last, page)


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize(
    ("op", "qo", "changes"),
    [
        (Op.DECODE, 1, {}),
        (Op.DECODE, 1, {"window_left": 5, "logits_soft_cap": 2.0}),
        (Op.VERIFY, 4, {}),
        (Op.VERIFY, 4, {"window_left": 2}),
        (Op.PREFILL_PAGED, torch.tensor([0, 7, 10]), {}),
        (Op.PREFILL_PAGED, torch.tensor([0, 1, 2]), {"mask": MaskMode.NONE}),
    ],
)
def test_equals_the_reference(
    backend, problem, query, device_image, reference, order, page, op, qo, changes
) -> None:
    p = problem(op, page_size=page, order=order, **changes)
    batch = batch_of(qo, page)
    torch.manual_seed(0)
    inner = (page, 2) if order == "NHD" else (2, page)
    k, v = (torch.randn(7, *inner, 128).to(p.kv_dtype) for _ in range(2))
    q = torch.randn(batch.shape.total_q, 8, 128).to(p.q_dtype)
    asked = query(p, batch)
    assert backend.prepare(asked.target, p, rows.UNIFIED) is None
    result = backend.plan(asked, rows.UNIFIED, batch)
    out = torch.full_like(q, 7.0)
    backend.run(result.launch, device_image(batch, result), RunIO(q, k, v, out, v_scale=2.0))
    want, _ = reference(p, batch, q, k, v * 2)
    torch.testing.assert_close(out.float(), want.float(), atol=4e-2, rtol=2e-2)


def test_more_rows_than_keys_is_found_at_plan(backend, problem, query) -> None:
    """Of one request: the rule, which sees the longest lengths only, lets this batch pass."""
    p = problem(Op.PREFILL_PAGED)
    batch = paged_batch(
        torch.tensor([0, 3, 8]), torch.tensor([0, 2, 3]), torch.arange(3), torch.tensor([16, 2]), 16
    )
    asked = query(p, batch)
    said = [rule.decline(asked, rows.UNIFIED, "aiter/unified") for rule in backend.rules]
    assert codes.KV_SHORTER not in [reason.code for reason in said if reason]
    with pytest.raises(Unsupported) as caught:
        backend.plan(asked, rows.UNIFIED, batch)
    assert caught.value.reason.code == codes.KV_SHORTER


def test_an_empty_batch_has_nothing_to_launch(backend, fake, problem, query, device_image) -> None:
    p = problem(Op.DECODE)
    none = torch.tensor([], dtype=torch.int32)
    batch = paged_batch(1, torch.tensor([0]), none, none, 16)
    result = backend.plan(query(p, batch), rows.UNIFIED, batch)
    q, cache = torch.empty(0, 8, 128).to(p.q_dtype), torch.empty(1, 16, 2, 128).to(p.q_dtype)
    backend.run(result.launch, device_image(batch, result), RunIO(q, cache, cache, torch.empty_like(q)))
    assert fake.calls == []
