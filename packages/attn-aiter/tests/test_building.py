"""When AITER compiles, and what happens where it cannot: a fallback with its reason, or an error."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attn_aiter import codes, load, rows, warm
from attn_aiter.backend import AiterBackend
from attn_core.backend import RunIO
from attn_core.batch import HostBatch, paged_batch, ragged_batch, single_batch
from attn_core.errors import Unsupported
from attn_core.problem import AttentionProblem, MaskMode, Op
from attn_core.query import GraphLimits

ASSUMED = {"assume_version": "0.1.20"}
CALLED = [
    (Op.PREFILL_PAGED, rows.NATIVE),
    (Op.PREFILL_PAGED, rows.GATHER),
    (Op.PREFILL_RAGGED, rows.VARLEN),
    (Op.PREFILL_SINGLE, rows.SINGLE),
    (Op.PREFILL_PAGED, rows.UNIFIED),
    (Op.DECODE, rows.PA_V1),
]
FAILURES = [
    RuntimeError("hipcc\nfailed"),
    SystemExit(1),
    AssertionError("arch"),
    ImportError("undefined symbol"),
]


class Kernels:
    """AITER functions that keep what they are called with, and raise on request."""

    def __init__(self, err: BaseException | None = None, *, only_with_lse: bool = False) -> None:
        self.err, self.only_with_lse = err, only_with_lse
        self.calls: list[dict[str, Any]] = []

    def __call__(self, module: str, name: str) -> Callable[..., Any]:
        return self.function

    def function(self, **given: Any) -> Any:
        self.calls.append(given)
        lse = given.get("return_lse", False)
        if self.err is not None and (lse or not self.only_with_lse):
            raise self.err
        if "gqa_ratio" in given:
            return lambda *c: None
        if not lse:
            return given.get("out")
        return given["out"], torch.zeros(given["q"].shape[1], given["q"].shape[0])


def batch_of(problem: AttentionProblem, q_len: int = 4, kv_len: int = 40) -> HostBatch:
    """Two requests of these lengths, or one."""
    ends = torch.tensor([0, q_len, 2 * q_len])
    if problem.op is Op.PREFILL_SINGLE:
        return single_batch(q_len, kv_len)
    if problem.page_size is None:
        return ragged_batch(ends, torch.tensor([0, kv_len, 2 * kv_len]))
    page = problem.page_size
    pages = -(-kv_len // page)
    last = torch.full((2,), kv_len - (pages - 1) * page)
    indptr = torch.tensor([0, pages, 2 * pages])
    return paged_batch(1 if problem.op is Op.DECODE else ends, indptr, torch.arange(2 * pages), last, page)


def plan(backend: AiterBackend, query: Any, problem: AttentionProblem, path: str, **more: Any) -> Any:
    target, graph = more.pop("target", None), more.pop("graph", None)
    batch = batch_of(problem, **more)
    asked = query(problem, batch, graph=graph) if target is None else query(problem, batch, target, graph)
    assert backend.prepare(asked.target, problem, path) is None
    return batch, backend.plan(asked, path, batch)


@pytest.mark.parametrize(("op", "path"), CALLED)
@pytest.mark.parametrize("err", FAILURES, ids=repr)
def test_a_failed_build_passes_the_path_over(problem, query, op, path, err) -> None:
    kernels = Kernels(err)
    backend = AiterBackend(ASSUMED, loader=kernels)
    for _ in range(2):
        with pytest.raises(Unsupported) as caught:
            plan(backend, query, problem(op), path)
        reason = caught.value.reason
        assert (reason.code, reason.candidate) == (codes.BUILD_FAILED, f"aiter/{path}")
        assert type(err).__name__ in str(reason.got)
        assert "\n" not in str(reason)
    assert len(kernels.calls) == 1  # the verdict is kept


@pytest.mark.parametrize(("op", "path"), CALLED)
def test_strict_raises_instead(problem, query, monkeypatch: pytest.MonkeyPatch, op, path) -> None:
    monkeypatch.setenv(load.STRICT_VARIABLE, "1")
    backend = AiterBackend(ASSUMED, loader=Kernels(SystemExit("hipcc failed")))
    with pytest.raises(RuntimeError, match=r"hipcc failed \[aiter.build-failed\]; ATTN_AITER_STRICT is set"):
        plan(backend, query, problem(op), path)


@pytest.mark.parametrize("err", [ValueError("window"), torch.OutOfMemoryError("full"), KeyboardInterrupt()])
def test_what_is_no_matter_of_the_installation_is_raised(problem, query, err: BaseException) -> None:
    backend = AiterBackend(ASSUMED, loader=Kernels(err))
    for _ in range(2):  # and is not remembered as a verdict
        with pytest.raises(type(err)):
            plan(backend, query, problem(Op.PREFILL_RAGGED), rows.VARLEN)


@pytest.mark.parametrize("err", FAILURES, ids=repr)
def test_an_append_is_built_before_the_first_one(problem, gfx942, err: BaseException) -> None:
    p = problem(Op.APPEND)
    kernels = Kernels()
    backend = AiterBackend(ASSUMED, loader=kernels)
    for _ in range(2):
        assert backend.prepare(gfx942, p, rows.APPEND) is None
    (given,) = kernels.calls
    assert given["slot_mapping"].tolist() == [-1]  # a row that is skipped
    reason = AiterBackend(ASSUMED, loader=Kernels(err)).prepare(gfx942, p, rows.APPEND)
    assert reason is not None
    assert reason.code == codes.BUILD_FAILED


# A kernel is built once for all plans that share it, and by a call with the scalars of the plan.


@pytest.mark.parametrize(
    ("changes", "lengths", "builds"),
    [
        ({}, [(4, 40), (7, 60), (4, 40)], 1),
        ({}, [(1, 40), (4, 40)], 2),  # one row is another mask
        (
            {"window_left": 50},
            [(4, 40), (4, 50), (4, 51), (4, 400)],
            2,
        ),  # a window in force is another kernel
        ({"window_left": 50, "mask": MaskMode.NONE}, [(4, 40), (4, 400)], 2),
        ({}, [(128, 200), (129, 200), (255, 300), (256, 300), (300, 500)], 3),
        ({}, [(4, 512), (4, 513)], 2),
    ],
)
def test_a_variant_is_built_once_and_as_planned(problem, query, changes, lengths, builds: int) -> None:
    kernels = Kernels()
    backend = AiterBackend(ASSUMED, loader=kernels)
    p = problem(Op.PREFILL_RAGGED, **changes)
    for q_len, kv_len in lengths:
        plan(backend, query, p, rows.VARLEN, q_len=q_len, kv_len=kv_len)
    assert len(kernels.calls) == builds
    for given in kernels.calls:
        assert (given["max_seqlen_q"], given["max_seqlen_k"]) in lengths
        assert given["q"].shape[0] == (1 if given["max_seqlen_q"] == 1 else 2)


@pytest.mark.parametrize(
    "changes", [{"logits_soft_cap": 3.0}, {"needs_lse": True}, {"head_dim": 64}, {"mask": MaskMode.NONE}]
)
def test_other_facts_are_other_variants(problem, query, gfx950, changes) -> None:
    kernels = Kernels()
    backend = AiterBackend(ASSUMED, loader=kernels)
    plan(backend, query, problem(Op.PREFILL_RAGGED), rows.VARLEN)
    plan(backend, query, problem(Op.PREFILL_RAGGED, sm_scale=0.5), rows.VARLEN)
    assert len(kernels.calls) == 1
    plan(backend, query, problem(Op.PREFILL_RAGGED, **changes), rows.VARLEN)
    assert len(kernels.calls) == 2
    assert kernels.calls[1]["return_lse"] is ("needs_lse" in changes)
    plan(backend, query, problem(Op.PREFILL_RAGGED, **changes), rows.VARLEN, target=gfx950)
    assert len(kernels.calls) == 3


def test_under_capture_the_capacity_is_what_is_built(problem, query) -> None:
    kernels = Kernels()
    backend = AiterBackend(ASSUMED, loader=kernels)
    p, limits = problem(Op.PREFILL_PAGED), GraphLimits(batch_size=2, total_q=64, max_pages=100)
    plan(backend, query, p, rows.GATHER, graph=limits)
    (given,) = kernels.calls
    assert (given["max_seqlen_q"], given["max_seqlen_k"]) == (64, 1600)
    assert given["k"].shape[0] == 2  # of two tokens all the same


# The log-sum-exp that nobody planned for is another kernel, found missing by run().


def run_with_lse(backend: AiterBackend, problem: AttentionProblem, planned: Any, image: Any) -> None:
    batch, result = planned
    p, total = problem, batch.shape.total_q
    q = torch.zeros(total, p.num_qo_heads, p.head_dim_qk, dtype=p.q_dtype)
    k = torch.zeros(batch.shape.total_kv, p.num_kv_heads, p.head_dim_qk, dtype=p.q_dtype)
    lse = torch.empty(q.shape[:2])
    backend.run(result.launch, image(batch, result), RunIO(q, k, k, torch.empty_like(q), lse))


@pytest.mark.parametrize("err", FAILURES, ids=repr)
def test_an_unplanned_lse_that_does_not_build(problem, query, device_image, err: BaseException) -> None:
    kernels = Kernels(err, only_with_lse=True)
    backend = AiterBackend(ASSUMED, loader=kernels)
    p = problem(Op.PREFILL_RAGGED)
    planned = plan(backend, query, p, rows.VARLEN)
    with pytest.raises(
        RuntimeError, match=r"\[aiter.build-failed\]; plan with needs_lse=True, and auto passes"
    ):
        run_with_lse(backend, p, planned, device_image)
    kernels.err = None  # not asked again: building takes minutes, and the verdict is kept
    with pytest.raises(Unsupported) as caught:
        plan(backend, query, problem(Op.PREFILL_RAGGED, needs_lse=True), rows.VARLEN)
    assert caught.value.reason.code == codes.BUILD_FAILED
    plan(backend, query, p, rows.VARLEN)  # what was built before is not taken away


def test_an_unplanned_lse_that_did_build_raises_what_it_raises(problem, query, device_image) -> None:
    kernels = Kernels()
    backend = AiterBackend(ASSUMED, loader=kernels)
    p = problem(Op.PREFILL_RAGGED)
    planned = plan(backend, query, p, rows.VARLEN)
    run_with_lse(backend, p, planned, device_image)
    kernels.err = RuntimeError("device lost")
    with pytest.raises(RuntimeError, match=r"^device lost$"):
        run_with_lse(backend, p, planned, device_image)


def test_a_slow_build_is_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(warm, "_SLOW_SECONDS", 0.0)
    with warm.watched("aiter/native"):
        deadline = time.monotonic() + 5
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "stale locks" in caplog.text
    caplog.clear()
    monkeypatch.setattr(warm, "_SLOW_SECONDS", 60.0)
    with warm.watched("aiter/native"):
        pass
    assert not caplog.records
