"""A soft cap far above the logits changes them little, and exactly so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import attn_core
from attn_core.batch import single_batch
from attn_core.problem import AttentionProblem, MaskMode, Op, RaggedKV
from attn_core.query import Query
from attn_core.target import parse_target
from attn_hip.backend import RULES, TILE


@pytest.mark.parametrize("cap", [30.0, 1e3, 1e4, 1e6, 2.0**31, 1e18])
@pytest.mark.parametrize("rows", [1, 6, 70])
def test_caps_of_any_size(cap: float, rows: int) -> None:
    """tanh(x) as a quotient of numbers near 1 has few digits for a small x, and none below 1e-7."""
    make = torch.Generator().manual_seed(rows)
    q, k, v = (torch.randn(n, heads, 64, generator=make) for n, heads in ((rows, 4), (300, 2), (300, 2)))
    found = attn_core.single_prefill_with_kv_cache(3 * q, k, v, logits_soft_cap=cap, backend="fa2")
    keys, values = (t.double().repeat_interleave(2, 1) for t in (k, v))
    x = torch.einsum("qhd,khd->hqk", 3 * q.double(), keys) / 8
    want = torch.einsum("hqk,khd->qhd", (cap * torch.tanh(x / cap)).softmax(-1), values)
    torch.testing.assert_close(found.double(), want, rtol=0, atol=1e-5)


def test_gpu_kernels_leave_large_caps_to_others() -> None:
    problem = AttentionProblem(
        op=Op.PREFILL_SINGLE, num_qo_heads=4, num_kv_heads=2, head_dim_qk=64, head_dim_vo=64,
        q_dtype=torch.float16, kv_dtype=torch.float16, o_dtype=torch.float16, kv=RaggedKV("NHD"),
        mask=MaskMode.CAUSAL, logits_soft_cap=1000.0,
    )  # fmt: skip
    said = {}
    for cap in (0.0, 1000.0, 1000.5):
        query = Query(parse_target("gfx942"), replace(problem, logits_soft_cap=cap), single_batch(3, 9).shape)
        found = (rule.decline(query, TILE, "fa2/tile") for rule in RULES)
        said[cap] = [str(reason) for reason in found if reason is not None]
    assert said[0.0] == said[1000.0] == []
    assert said[1000.5] == ["fa2/tile: on a GPU takes logits_soft_cap up to 1000, got 1000.5 [fa2.soft-cap]"]
