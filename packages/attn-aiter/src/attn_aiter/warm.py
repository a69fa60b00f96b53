"""Building a kernel variant before the first real call, by a call of two tokens that asks for it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from attn_core.backend import RunIO
from attn_core.batch import HostBatch, paged_batch, ragged_batch
from attn_core.plan_image import index_parts
from attn_core.problem import AttentionProblem, Op
from attn_core.query import Query
from attn_core.target import DeviceTarget

if TYPE_CHECKING:
    from .backend import AiterBackend

SOFTSIGN_VARIABLE = "CK_TILE_ATTENTION_LOGITS_SOFT_CAP_DEFAULT"
_LOGGER = logging.getLogger("attn_aiter")
_SLOW_SECONDS = 60.0


def softsign() -> bool:
    """Whether AITER's soft cap was switched away from tanh at build time."""
    return os.environ.get(SOFTSIGN_VARIABLE, "") == "1"


def variant(problem: AttentionProblem) -> tuple[object, ...]:
    """Return the facts of a problem that AITER compiles for; problems with equal ones share a kernel."""
    p = problem
    return (
        p.op, p.q_dtype, p.kv_dtype, p.o_dtype, p.head_dim_qk, p.head_dim_vo, p.page_size, p.mask,
        p.gqa_group_size, p.logits_soft_cap > 0, p.window_left >= 0, p.needs_lse,
    )  # fmt: skip


@contextmanager
def watched(what: str) -> Iterator[None]:
    """Say so when a build takes long: AITER waits without end for the lock of a builder that was killed."""
    where = os.environ.get("AITER_ROOT_DIR", "~/.aiter")
    message = "%s: AITER has been building for a minute; if nothing compiles, remove stale locks below %s"
    timer = threading.Timer(_SLOW_SECONDS, _LOGGER.warning, (message, what, where))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def call(backend: AiterBackend, target: DeviceTarget, problem: AttentionProblem, path: str) -> None:
    """Plan and run two tokens of one request through a path; what it computes is thrown away."""
    device = torch.device("cuda", target.index) if torch.version.hip else torch.device("cpu")
    batch = _batch(problem)
    result = backend.plan(Query(target, problem, batch.shape), path, batch)
    image = {name: part.to(device) for name, part in index_parts(batch, None, result).items()}
    with watched(f"aiter/{path}"):
        backend.run(result.launch, image, _tensors(problem, batch, device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _batch(problem: AttentionProblem) -> HostBatch:
    rows = 1 if problem.op is Op.DECODE else 2  # one row per request is another configuration
    ends = torch.tensor([0, rows], dtype=torch.int32)
    page = problem.page_size
    if page is None:
        return ragged_batch(ends, torch.tensor([0, 2], dtype=torch.int32))
    pages = 2 if page == 1 else 1
    return paged_batch(
        ends,
        torch.tensor([0, pages], dtype=torch.int32),
        torch.arange(pages, dtype=torch.int32),
        torch.tensor([min(page, 2)], dtype=torch.int32),
        page,
    )


def _tensors(problem: AttentionProblem, batch: HostBatch, device: torch.device) -> RunIO:
    p, rows = problem, batch.shape.total_q
    if p.page_size is None:
        front: tuple[int, ...] = (2, p.num_kv_heads)
    else:
        inner = (p.page_size, p.num_kv_heads) if p.kv.order == "NHD" else (p.num_kv_heads, p.page_size)
        front = (2, *inner)
    lse = torch.empty(rows, p.num_qo_heads, dtype=torch.float32, device=device) if p.needs_lse else None
    return RunIO(
        torch.zeros(rows, p.num_qo_heads, p.head_dim_qk, device=device).to(p.q_dtype),
        torch.zeros(*front, p.head_dim_qk, device=device).to(p.kv_dtype),
        torch.zeros(*front, p.head_dim_vo, device=device).to(p.kv_dtype),
        torch.empty(rows, p.num_qo_heads, p.head_dim_vo, dtype=p.o_dtype, device=device),
        lse,
    )
