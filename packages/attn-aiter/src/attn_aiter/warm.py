"""Building a kernel variant before the first real call, by a call of two tokens that asks for it.

Which kernel AITER takes, and so which it compiles, follows from the scalars of a call as much as from its
types: one query row drops the causal mask, a window longer than every sequence is turned off, and a window in
force leads away from the assembly kernel. A warm-up therefore carries the scalars of the plan it is for.
"""

from __future__ import annotations

import logging
import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch

from attn_core.backend import AppendIO, RunIO
from attn_core.batch import HostBatch, paged_batch, ragged_batch
from attn_core.plan_image import index_parts
from attn_core.problem import AttentionProblem
from attn_core.query import Query
from attn_core.target import DeviceTarget

from .probe import AiterApi
from .routes.append import Append
from .routes.common import Route

SOFTSIGN_VARIABLE = "CK_TILE_ATTENTION_LOGITS_SOFT_CAP_DEFAULT"
_LOGGER = logging.getLogger("attn_aiter")
_SLOW_SECONDS = 60.0


def softsign() -> bool:
    """Whether AITER's soft cap was switched away from tanh at build time."""
    return os.environ.get(SOFTSIGN_VARIABLE, "") == "1"


class Sized(Protocol):
    """The launch of a path that AITER builds by calling it."""

    @property
    def path(self) -> str:
        """Path of this backend."""

    @property
    def problem(self) -> AttentionProblem:
        """What to compute."""

    @property
    def max_q(self) -> int:
        """Most query rows of one request."""

    @property
    def max_kv(self) -> int:
        """Most keys of one request."""

    @property
    def empty(self) -> bool:
        """There is nothing to call the kernel for."""


_QUERY_STEPS = (1, 128, 255)
_KEY_STEPS = (512,)
"""Lengths beyond which AITER takes, or configures, another kernel, in one of its functions at least."""


def variant(launch: Sized, *, lse: bool | None = None) -> tuple[object, ...]:
    """Return the facts of a launch that AITER compiles for; launches with equal ones share a kernel.

    Args:
        launch: Of any path but ``pa_v1``, which has a variant of its own.
        lse: Whether the log-sum-exp is returned; by default as planned.
    """
    p = launch.problem
    window = -1 if p.window_left >= launch.max_kv else min(p.window_left, 1)
    return (
        launch.path, p.op, p.q_dtype, p.kv_dtype, p.o_dtype, p.head_dim_qk, p.head_dim_vo, p.page_size,
        p.mask, p.gqa_group_size, p.logits_soft_cap > 0, window, bisect_left(_QUERY_STEPS, launch.max_q),
        bisect_left(_KEY_STEPS, launch.max_kv), p.needs_lse if lse is None else lse,
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


def call(
    route: Route, api: AiterApi, function: Callable[..., Any], target: DeviceTarget, launch: Sized
) -> None:
    """Run a launch over one request of two tokens; what it computes is thrown away."""
    p, device = launch.problem, _device(target)
    rows = launch.max_q if p.latent else min(2, launch.max_q)
    batch = _batch(p, rows, min(max(2, rows), launch.max_kv))
    result = route.plan(api, Query(target, p, batch.shape), batch)
    tiny: Any = result.launch
    image = {name: part.to(device) for name, part in index_parts(batch, None, result).items()}
    with watched(f"aiter/{launch.path}"):
        sized = replace(tiny, max_q=launch.max_q, max_kv=launch.max_kv)
        route.run(function, sized, image, _tensors(p, batch, device))
        _wait(device)


def append(
    route: Append,
    api: AiterApi,
    function: Callable[..., Any],
    target: DeviceTarget,
    problem: AttentionProblem,
) -> None:
    """Append one row that is skipped."""
    p, device = problem, _device(target)
    page, heads, dtype = p.page_size or 1, p.num_kv_heads, p.kv_dtype
    row, cache = (
        torch.zeros(1, *shape, p.head_dim_qk, dtype=dtype, device=device)
        for shape in ((heads,), (page, heads))
    )
    skip, first = (torch.tensor([value], dtype=torch.int32, device=device) for value in (-1, 0))
    ends = torch.tensor([0, 1], dtype=torch.int32, device=device)
    with watched(f"aiter/{route.call.key}"):
        route.append(api, function, AppendIO(row, row, cache, cache.clone(), skip, first, first, ends))
        _wait(device)


def _device(target: DeviceTarget) -> torch.device:
    return torch.device("cuda", target.index) if torch.version.hip else torch.device("cpu")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _batch(problem: AttentionProblem, rows: int, keys: int) -> HostBatch:
    ends = torch.tensor([0, rows], dtype=torch.int32, device="cpu")
    page = problem.page_size
    if page is None:
        return ragged_batch(ends, torch.tensor([0, keys], dtype=torch.int32, device="cpu"))
    pages = -(-keys // page)
    return paged_batch(
        ends,
        torch.tensor([0, pages], dtype=torch.int32, device="cpu"),
        torch.arange(pages, dtype=torch.int32, device="cpu"),
        torch.tensor([keys - (pages - 1) * page], dtype=torch.int32, device="cpu"),
        page,
    )


def _tensors(problem: AttentionProblem, batch: HostBatch, device: torch.device) -> RunIO:
    p, rows = problem, batch.shape.total_q
    if p.page_size is None:
        front: tuple[int, ...] = (batch.shape.total_kv, p.num_kv_heads)
    else:
        inner = (p.page_size, p.num_kv_heads) if p.kv.order == "NHD" else (p.num_kv_heads, p.page_size)
        front = (batch.shape.total_pages, *inner)
    lse = torch.empty(rows, p.num_qo_heads, dtype=torch.float32, device=device) if p.needs_lse else None
    k = torch.zeros(*front, p.head_dim_qk, device=device).to(p.kv_dtype)
    apart = torch.zeros(*front, p.head_dim_vo, device=device).to(p.kv_dtype)
    return RunIO(
        torch.zeros(rows, p.num_qo_heads, p.head_dim_qk, device=device).to(p.q_dtype),
        k,
        k[..., : p.head_dim_vo] if p.latent else apart,
        torch.empty(rows, p.num_qo_heads, p.head_dim_vo, dtype=p.o_dtype, device=device),
        lse,
    )
