"""What is asked of AITER's Triton attention."""

from __future__ import annotations

from typing import Any

import torch

from attn_core.batch import HostBatch, paged_batch
from attn_core.problem import AttentionProblem, MaskMode, Op, PagedKV

Case = tuple[Op, Any, list[int], int, dict[str, Any]]
"""Entry point, query rows (or where they end), keys, page size, changes to the problem."""

ENDS = torch.tensor([0, 3, 10])
SMALL: dict[str, Case] = {
    "decode": (Op.DECODE, 1, [19, 33], 16, {}),
    "decode split over keys": (Op.DECODE, 1, [600], 16, {}),
    "decode HND, page 32": (Op.DECODE, 1, [19, 40], 32, {"order": "HND"}),
    "verify": (Op.VERIFY, 4, [19, 4], 16, {}),
    "verify with window": (Op.VERIFY, 4, [40, 9], 16, {"window_left": 5}),
    "prefill with soft cap": (Op.PREFILL_PAGED, ENDS, [19, 40], 64, {"logits_soft_cap": 2.0}),
}
LARGE: dict[str, Case] = {
    "decode of many": (Op.DECODE, 1, list(range(1, 130)), 16, {"heads": (32, 8), "dim": 128}),
    "decode of long ones": (Op.DECODE, 1, [5000, 17, 900, 1], 64, {"heads": (32, 8), "dim": 128}),
    "decode, page 32, window": (Op.DECODE, 1, [700, 40], 32, {"heads": (16, 1), "window_left": 100}),
    "decode HND, soft cap": (Op.DECODE, 1, [700, 3], 64, {"order": "HND", "logits_soft_cap": 20.0}),
    "verify of 8": (Op.VERIFY, 8, [2000, 8, 77], 16, {"heads": (32, 8), "dim": 128}),
    "prefill of 300": (Op.PREFILL_PAGED, torch.tensor([0, 300, 301]), [700, 90], 16, {"dim": 128}),
    "prefill head_dim 256": (Op.PREFILL_PAGED, ENDS, [190, 40], 64, {"dim": 256}),
    "prefill head_dim 80": (Op.PREFILL_PAGED, ENDS, [190, 40], 16, {"dim": 80, "window_left": 30}),
}


def asked(case: Case, dtype: torch.dtype) -> tuple[AttentionProblem, HostBatch]:
    """Return the problem, of 4 heads over 2 and head_dim 64 unless said, and a batch over shuffled pages."""
    op, qo, lengths, page, changes = case
    more = dict(changes)
    order, dim, (heads, kv_heads) = more.pop("order", "NHD"), more.pop("dim", 64), more.pop("heads", (4, 2))
    counts = torch.tensor([-(-n // page) for n in lengths])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    last = torch.tensor([(n - 1) % page + 1 for n in lengths])
    problem = AttentionProblem(
        op=op, num_qo_heads=heads, num_kv_heads=kv_heads, head_dim_qk=dim, head_dim_vo=dim, q_dtype=dtype,
        kv_dtype=dtype, o_dtype=dtype, kv=PagedKV(page, order), sm_scale=dim**-0.5,
        mask=MaskMode.NONE if op is Op.DECODE else MaskMode.CAUSAL, **more,
    )  # fmt: skip
    return problem, paged_batch(qo, indptr, torch.randperm(int(indptr[-1])), last, page)


def tensors(problem: AttentionProblem, batch: HostBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random q, and k and v as halves of one pool."""
    p, page = problem, problem.page_size
    inner = (page, p.num_kv_heads) if p.kv.order == "NHD" else (p.num_kv_heads, page)
    pool = torch.randn(batch.shape.total_pages, 2, *inner, p.head_dim_qk).to(p.kv_dtype)
    return (
        torch.randn(batch.shape.total_q, p.num_qo_heads, p.head_dim_qk).to(p.q_dtype),
        pool[:, 0],
        pool[:, 1],
    )
