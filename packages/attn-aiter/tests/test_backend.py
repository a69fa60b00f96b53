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
from attn_core.errors import Unsupported
from attn_core.problem import Op

ASSUMED = {"assume_version": "0.1.20"}
PREFILLS = [
    (Op.PREFILL_PAGED, rows.NATIVE),
    (Op.PREFILL_PAGED, rows.GATHER),
    (Op.PREFILL_RAGGED, rows.VARLEN),
    (Op.PREFILL_SINGLE, rows.SINGLE),
    (Op.PREFILL_PAGED, rows.UNIFIED),
]


def raising(err: BaseException) -> Callable[[str, str], Callable[..., Any]]:
    def function(**given: Any) -> Any:
        raise err

    return lambda module, name: function


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


@pytest.mark.parametrize(("op", "path"), PREFILLS)
@pytest.mark.parametrize("err", [RuntimeError("hipcc\nfailed"), SystemExit(1), AssertionError("arch")])
def test_a_failed_build_passes_the_path_over(problem, gfx942, op, path, err) -> None:
    backend = AiterBackend(ASSUMED, loader=raising(err))
    reason = backend.prepare(gfx942, problem(op), path)
    assert reason is not None
    assert reason.code == codes.BUILD_FAILED
    assert type(err).__name__ in str(reason.got)
    assert "\n" not in str(reason)
    assert backend.prepare(gfx942, problem(op), path) is reason


@pytest.mark.parametrize(("op", "path"), PREFILLS)
def test_strict_raises_instead(problem, gfx942, monkeypatch: pytest.MonkeyPatch, op, path) -> None:
    monkeypatch.setenv(load.STRICT_VARIABLE, "1")
    backend = AiterBackend(ASSUMED, loader=raising(SystemExit("hipcc failed")))
    with pytest.raises(RuntimeError, match=r"hipcc failed \[aiter.build-failed\]; ATTN_AITER_STRICT is set"):
        backend.prepare(gfx942, problem(op), path)


@pytest.mark.parametrize("err", [ValueError("window"), torch.OutOfMemoryError("full"), KeyboardInterrupt()])
def test_what_is_no_matter_of_the_installation_is_raised(problem, gfx942, err: BaseException) -> None:
    backend = AiterBackend(ASSUMED, loader=raising(err))
    for _ in range(2):  # and is not remembered as a verdict
        with pytest.raises(type(err)):
            backend.prepare(gfx942, problem(Op.PREFILL_RAGGED), rows.VARLEN)


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


def test_a_variant_is_built_once_per_what_aiter_compiles_for(problem, gfx942, gfx950) -> None:
    calls: list[dict[str, Any]] = []

    def function(**given: Any) -> Any:
        calls.append(given)
        lse = torch.zeros(given["q"].shape[1], given["q"].shape[0])
        return (given["out"], lse) if given["return_lse"] else given["out"]

    backend = AiterBackend(ASSUMED, loader=lambda module, name: function)
    same = [problem(Op.PREFILL_RAGGED), problem(Op.PREFILL_RAGGED, sm_scale=0.5)]
    other = problem(Op.PREFILL_RAGGED, logits_soft_cap=3.0, needs_lse=True)
    for p in (*same, other, other):
        assert backend.prepare(gfx942, p, rows.VARLEN) is None
    assert len(calls) == 2
    assert calls[1]["logits_soft_cap"] == 3.0
    assert calls[1]["return_lse"] is True
    assert calls[0]["causal"] is True
    assert backend.prepare(gfx950, other, rows.VARLEN) is None
    assert len(calls) == 3


def test_a_decode_kernel_that_does_not_build_is_found_at_plan(
    problem, query, gfx942, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = AiterBackend(ASSUMED, loader=raising(RuntimeError("static_assert")))
    p = problem(Op.DECODE)
    batch = paged_batch(1, torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([3]), 16)
    assert backend.prepare(gfx942, p, rows.PA_V1) is None
    with pytest.raises(Unsupported, match=r"static_assert \[aiter.build-failed\]"):
        backend.plan(query(p, batch), rows.PA_V1, batch)
    monkeypatch.setenv(load.STRICT_VARIABLE, "1")
    with pytest.raises(RuntimeError, match="ATTN_AITER_STRICT is set"):
        backend.plan(query(p, batch), rows.PA_V1, batch)


def test_a_switched_soft_cap_is_refused(problem, gfx942, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(warm.SOFTSIGN_VARIABLE, "1")
    backend = AiterBackend(ASSUMED, loader=lambda module, name: lambda **given: given["out"])
    capped = problem(Op.PREFILL_RAGGED, logits_soft_cap=3.0)
    reason = backend.prepare(gfx942, capped, rows.VARLEN)
    assert reason is not None
    assert reason.code == codes.SOFTSIGN
    assert backend.prepare(gfx942, problem(Op.PREFILL_RAGGED), rows.VARLEN) is None


def test_a_slow_build_is_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(warm, "_SLOW_SECONDS", 0.0)
    import time

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


def test_a_bad_overlay_is_not_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTN_THRESHOLDS", str(tmp_path / "missing.toml"))
    with pytest.raises(ValueError, match="ATTN_THRESHOLDS"):
        AiterBackend(ASSUMED)
