"""Availability, preparation and its failures, and the promises of the backend contract."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_aiter import codes, load, rows, warm
from attn_aiter.backend import AiterBackend
from attn_core.backend import AppendBackend, Backend, RunIO
from attn_core.batch import paged_batch
from attn_core.problem import Op

ASSUMED = {"assume_version": "0.1.20"}
PREFILLS = [
    (Op.PREFILL_PAGED, rows.NATIVE),
    (Op.PREFILL_PAGED, rows.GATHER),
    (Op.PREFILL_RAGGED, rows.VARLEN),
    (Op.PREFILL_SINGLE, rows.SINGLE),
    (Op.PREFILL_PAGED, rows.UNIFIED),
]


def test_it_is_a_backend() -> None:
    backend = AiterBackend(ASSUMED)
    assert isinstance(backend, Backend)
    assert isinstance(backend, AppendBackend)
    assert backend.rank < 100
    assert [path.name for path in backend.paths] == list(rows.CAPABILITIES)
    assert backend.codes == codes.CODES


def test_an_assumed_release_is_decided_about_and_never_loaded(problem, gfx942, query, device_image) -> None:
    backend = AiterBackend(ASSUMED)
    assert backend.unavailable(gfx942) is None
    p = problem(Op.DECODE)
    batch = paged_batch(1, torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([3]), 16)
    assert backend.prepare(gfx942, p, rows.PA_V1) is None
    result = backend.plan(query(p, batch), rows.PA_V1, batch)
    q, cache = torch.zeros(1, 8, 128).to(p.q_dtype), torch.zeros(1, 16, 2, 128).to(p.q_dtype)
    with pytest.raises(RuntimeError, match=r"got assume_version 0.1.20 \[aiter.not-loaded\]"):
        backend.run(result.launch, device_image(batch, result), RunIO(q, cache, cache, torch.empty_like(q)))


def test_a_failed_import_is_another_cause(problem, gfx942, monkeypatch: pytest.MonkeyPatch) -> None:
    def loader(module: str, name: str) -> Callable[..., Any]:
        raise load.Failed("RuntimeError: ROCm version file not found")

    backend = AiterBackend(ASSUMED, loader=loader)
    for op, path in [*PREFILLS, (Op.DECODE, rows.PA_V1), (Op.APPEND, rows.APPEND)]:
        reason = backend.prepare(gfx942, problem(op), path)
        assert reason is not None
        assert reason.code == codes.IMPORT_FAILED
        assert reason.got == "RuntimeError: ROCm version file not found"
    monkeypatch.setenv(load.STRICT_VARIABLE, "1")
    with pytest.raises(RuntimeError, match="ROCm version file not found"):
        AiterBackend(ASSUMED, loader=loader).prepare(gfx942, problem(Op.DECODE), rows.PA_V1)


def test_a_real_installation_that_does_not_import(
    install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, problem, gfx942
) -> None:
    """The whole way: find_spec says yes, the signatures are there, and the import ends the process."""
    body = "raise SystemExit('module_aiter_enum: build failed')"
    function = "def flash_attn_varlen_func(q): ..."
    monkeypatch.syspath_prepend(install("0.1.20", body=body, aiter__ops__mha=function))
    backend = AiterBackend()
    assert backend.unavailable(gfx942) is None
    reason = backend.prepare(gfx942, problem(Op.PREFILL_RAGGED), rows.VARLEN)
    assert reason is not None
    assert (reason.code, reason.got) == (codes.IMPORT_FAILED, "SystemExit: module_aiter_enum: build failed")


def test_a_switched_soft_cap_is_refused(problem, gfx942, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(warm.SOFTSIGN_VARIABLE, "1")
    backend = AiterBackend(ASSUMED, loader=lambda module, name: lambda **given: given["out"])
    capped = problem(Op.PREFILL_RAGGED, logits_soft_cap=3.0)
    reason = backend.prepare(gfx942, capped, rows.VARLEN)
    assert reason is not None
    assert reason.code == codes.SOFTSIGN
    assert backend.prepare(gfx942, problem(Op.PREFILL_RAGGED), rows.VARLEN) is None


def test_a_bad_overlay_is_not_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_THRESHOLDS", str(tmp_path / "missing.toml"))
    with pytest.raises(ValueError, match="ATTN_THRESHOLDS"):
        AiterBackend(ASSUMED)
