"""``attn selftest``: that it asks every kernel, and that a wrong one cannot pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from attn_core import plugins
from attn_core.backend import AppendIO, RunIO, SamplingIO
from attn_core.batch import paged_batch
from attn_core.query import Query
from attn_core.target import parse_target
from attn_hip import plan, selftest, selftest_command, variants
from attn_hip.backend import Fa2Backend
from attn_hip.toolchain import ARCHS

from .mockhip import TARGETS, Mock


@pytest.mark.parametrize("arch", sorted(ARCHS))
def test_every_attention_kernel_of_a_device_is_asked(native: Any, arch: str) -> None:
    """A case's batch is planned with the kernel that the case is about, and no kernel is left out."""
    target = parse_target("sm_90:132" if arch == "sm_90" else arch)
    cases = selftest.cases(target)
    assert [case.kernel for case in cases] == [v.name for v in variants.attend_variants(arch)]
    for case in cases:
        ends = torch.tensor([0, *case.q_len]).cumsum(0).int()
        kv_len = torch.tensor(selftest.kv_len_of(case))
        pages = torch.cat([torch.zeros(1, dtype=torch.int64), ((kv_len + 15) // 16).cumsum(0)]).int()
        last = (kv_len - 1) % 16 + 1
        batch = paged_batch(ends, pages, torch.arange(int(pages[-1])).int(), last.int(), 16)
        kernel = plan.style_of(native, Query(target, case.problem, batch.shape)).variant
        assert kernel is not None
        assert kernel.name == case.kernel


def check(*arguments: str) -> Any:
    return CliRunner().invoke(APP, list(arguments))


APP = typer.Typer()
APP.command()(selftest_command.selftest)
ON_CPU = ("--device", "cpu")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the CPU's attention cases: there is nothing that only the others would show."""
    real = selftest.cases
    monkeypatch.setattr(selftest, "cases", lambda target: real(target)[:5:4])


def test_the_cpu_passes_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = check(*ON_CPU, "--report", str(file))
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line.split()[:2] for line in lines[:8]] == [["ok", "cpu"]] * 6 + [
        ["ok", "append"],
        ["ok", "chain_sample"],
    ]
    assert lines[8].startswith("8 of 8 checks passed on ")
    assert lines[9:] == [f"report: {file}"]
    found = json.loads(file.read_text(encoding="utf-8"))
    assert (found["passed"], found["failed"], found["note"]) == (8, 0, None)
    assert found["device"]["arch"] == "cpu"
    assert {"attn-core", "attn-hip", "torch", "python"} <= set(found["versions"])
    assert [row["ok"] for row in found["results"]] == [True] * 8
    assert all(row["seconds"] >= 0 and row["error"] is not None for row in found["results"])


def test_json_is_all_there_is_on_stdout(few: None) -> None:
    result = check(*ON_CPU, "--json")
    assert (result.exit_code, json.loads(result.stdout)["passed"]) == (0, 4)


def _off_by(change: Callable[[RunIO], None]) -> Callable[[Any, Any, Any, RunIO], None]:
    real = Fa2Backend.run

    def run(self: Any, launch: Any, image: Any, io: RunIO) -> None:
        real(self, launch, image, io)
        if io.q.dtype is torch.bfloat16:
            change(io)

    return run


WRONG = {
    "one element": lambda io: io.out[-1, -1, -1:].add_(0.1),
    "a NaN": lambda io: io.out[0, 0, :1].fill_(torch.nan),
    "an infinity": lambda io: io.out[0, 0, :1].fill_(torch.inf),
    "the log-sum-exp": lambda io: io.lse[0, :1].add_(0.02),
    "a log-sum-exp that is none": lambda io: io.lse[0, :1].fill_(torch.nan),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_result_is_named_and_fails_the_command(
    fault: str, few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [case.problem.q_dtype for case in selftest.cases(parse_target("cpu"))]
    assert asked == [torch.float32, torch.bfloat16]
    monkeypatch.setattr(Fa2Backend, "run", _off_by(WRONG[fault]))
    result = check(*ON_CPU)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].startswith("ok      cpu")
    assert lines[1].startswith("FAILED  cpu")
    assert "wrong: error" in lines[1]
    assert lines[2].strip().startswith("q bfloat16, k/v bfloat16, head_dim 64")
    assert lines[-1].startswith("3 of 4 checks passed")


def test_a_check_that_raises_is_a_result_and_stops_no_other(
    few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("the driver\nsays no")

    monkeypatch.setattr(Fa2Backend, "append", broken)
    result = check(*ON_CPU, "--json")
    assert result.exit_code == 1
    rows = json.loads(result.stdout)["results"]
    assert [row["ok"] for row in rows] == [True, True, False, True]
    assert (rows[2]["kernel"], rows[2]["said"]) == ("append", "RuntimeError: the driver says no")
    assert rows[2]["error"] is None


def test_a_cause_that_all_share_is_said_once(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("the driver says no")

    for name in ("run", "append"):
        monkeypatch.setattr(Fa2Backend, name, broken)
    result = check(*ON_CPU)
    assert result.exit_code == 1
    assert result.stdout.count("the driver says no") == 1
    assert f"FAILED  {'cpu, append':26} RuntimeError: the driver says no\n" in result.stdout
    assert "1 of 4 checks passed" in result.stdout


def test_one_wrong_byte_of_an_append_and_one_wrong_token_fail(
    few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, sample = Fa2Backend.append, Fa2Backend.sample

    def bad_append(self: Any, path: str, problem: Any, io: AppendIO) -> None:
        append(self, path, problem, io)
        io.k.view(-1)[-1] = 1e-30

    def bad_sample(self: Any, path: str, io: SamplingIO) -> None:
        sample(self, path, io)
        io.tokens[-1, 0] += 1

    monkeypatch.setattr(Fa2Backend, "append", bad_append)
    monkeypatch.setattr(Fa2Backend, "sample", bad_sample)
    result = check(*ON_CPU)
    assert result.exit_code == 1
    failed = [line.split()[1] for line in result.stdout.splitlines() if line.startswith("FAILED")]
    assert failed == ["append", "chain_sample"]


@pytest.mark.parametrize(
    "name", ["cuda:99", "meta", "nonsense", *([] if torch.cuda.is_available() else ["cuda"])]
)
def test_a_device_that_is_not_here(name: str) -> None:
    result = check("--device", name)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert f"got '{name}' [fa2.device-name]" in result.stderr


def test_a_report_that_cannot_be_written(few: None, tmp_path: Path) -> None:
    result = check(*ON_CPU, "--report", str(tmp_path / "no" / "where.json"))
    assert result.exit_code == 2
    assert result.stderr.startswith("attn selftest: --report: needs a file to write, got ")
    assert result.stderr.endswith(" [fa2.report]\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="takes the GPU")
def test_the_default_without_a_gpu_is_the_cpu(few: None) -> None:
    assert json.loads(check("--json").stdout)["device"]["kind"] == "cpu"


def test_amd_reports_ask_to_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "target_of", lambda device: parse_target("gfx942"))
    found = selftest.report(torch.device("cpu"), [])
    assert "please send it" in str(found["note"])
    assert found["compilers"]


@pytest.fixture
def fresh_fa2() -> Any:
    """An fa2 that has loaded nothing, beside the other backends."""
    others = tuple(b for b in plugins.registry().backends if b.name != "fa2")
    made = (Fa2Backend(), *others)
    old = plugins.use(plugins.Registry(made, (), (), {b.name: "test" for b in made}))
    yield
    plugins.use(old)


@pytest.mark.usefixtures("fresh_fa2")
@pytest.mark.parametrize("mock", ["gfx942", "gfx950"], indirect=True)
@pytest.mark.parametrize("wrong", [False, True])
def test_a_kernel_of_a_gpu_that_is_not_there(
    mock: Mock, wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiled instructions run in the interpreter; one bit of a result turned shows."""
    target = TARGETS[mock.arch]
    case = selftest.cases(target)[0]
    real = selftest._paged

    def on_device(device: torch.device, backend: str, *rest: Any) -> Any:
        with monkeypatch.context() as patch:
            if backend == "fa2":
                patch.setattr("attn_core.planner.target_of", lambda device: target)
            return real(device, backend, *rest)

    run = Fa2Backend.run

    def over(self: Any, launch: Any, image: Any, io: RunIO) -> None:
        written = [t for t in (io.out, io.lse, io.workspace) if t is not None]
        with mock.over([io.q, io.k, io.v, *image.values()], written):
            run(self, launch, image, io)
        if wrong:
            io.out.view(torch.int16)[2, 3, 4:5].bitwise_xor_(1 << 13)

    monkeypatch.setattr(selftest, "_paged", on_device)
    monkeypatch.setattr(Fa2Backend, "run", over)
    result = selftest._timed(case.kernel, "", lambda: selftest._attend(case, torch.device("cpu")))
    assert mock.fault is None
    assert mock.launched[0][0] == variants.attend_variants(mock.arch)[0].entry
    assert result.ok is not wrong, result
