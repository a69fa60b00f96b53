"""``attn bench cpu``, on cells small enough to run in a second."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from attn_hip.bench import app as command
from attn_hip.bench import cells, flex, measure, plot, report, world
from attn_hip.bench.cells import Cell
from attn_hip.bench.measure import CONTIGUOUS, FA2, FLEX, GATHER, READ, Effort, Result

TINY = [
    Cell("decode", "float32", 32, 1, (64, 64)),
    Cell("ragged", "bfloat16", 64, 1, (5, 33)),
    Cell("verify", "fp8", 32, 3, (40, 40)),
    Cell("prefill", "float32", 32, 24, (24,)),
    Cell("prefill", "bfloat16", 32, 9, (50,)),
]
BRIEF = Effort(0.01, 2, 2)


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(command.app, ["cpu", *arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "LEAST_BYTES", 1)
    monkeypatch.setattr(command, "grid", lambda quick: TINY)
    monkeypatch.setattr(command, "_FULL", BRIEF)


def test_every_format_tells_the_same_rows(tiny: None, tmp_path: Path) -> None:
    files = {name: tmp_path / f"rows.{name}" for name in ("csv", "markdown")}
    status, out, err = run(
        "--json", *(word for name, file in files.items() for word in (f"--{name}", str(file)))
    )
    assert (status, err) == (0, "")
    said = json.loads(out)
    labels = [cell.label for cell in TINY]
    assert [row["label"] for row in said["rows"]] == labels
    rows = list(csv.DictReader(io.StringIO(files["csv"].read_text())))
    assert [row["label"] for row in rows] == labels
    assert {row["machine"] for row in rows} == {said["machine"]}
    for row, listed in zip(rows, said["rows"], strict=True):
        assert float(row["fa2 ms"]) == listed["fa2 ms"] > 0
        assert listed["error"] < 1e-2
        assert (row["Flex paged ms"], listed["Flex paged ms"]) == ("", None)
    lines = files["markdown"].read_text().splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| {label}" for label in labels]
    assert {line.count("|") for line in lines} == {9}
    assert [row["op"] for row in said["summary"]] == ["decode", "ragged", "verify", "prefill", "prefill"]


def test_a_table_names_the_machine_and_what_was_skipped(tiny: None) -> None:
    status, out, err = run("--only", "decode", "--only", "verify", "--memory", "1e-9")
    assert (status, err) == (0, "")
    assert report.machine() in out
    assert [line for line in out.splitlines() if line.startswith("skipped ")] == [
        f"skipped {cell.label}: needs {cell.need_bytes / 2**30:.1f} GiB of memory, got 0.0"
        for cell in (TINY[0], TINY[2])
    ]
    status, out, _ = run("--match", "2 x 1 x 64", "--kind", "float32")
    assert status == 0
    assert "decode float32 32/8 2 x 1 x 64" in out
    assert "decode float32: " in out
    assert "verify" not in out


def test_a_run_that_ends_early_keeps_its_rows_and_is_gone_on_with(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.csv"
    measured: list[str] = []

    def counted(cell: Cell, *rest: Any, **options: Any) -> Result:
        measured.append(cell.label)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return measure.measure(cell, *rest, **options)

    monkeypatch.setattr(command, "measure", counted)
    labels = [cell.label for cell in TINY]
    run("--csv", str(file))  # interrupted in the third cell
    assert measured == labels[:3]
    first = file.read_text().splitlines()
    assert len(first) == 1 + 2
    status, out, err = run("--csv", str(file), "--resume", "--json")
    assert (status, err) == (0, "")
    assert measured == labels[:3] + labels[2:]
    assert file.read_text().splitlines()[:3] == first
    assert [row["label"] for row in json.loads(out)["rows"]] == labels
    file.write_text(file.read_text().replace(report.machine(), "another"))  # rows of elsewhere do not count
    assert report.kept(file, TINY, report.machine(), 1) == {}
    file.write_text("label,machine\nx,y\n" + f"{labels[0]},{report.machine()}\n")
    status, _, err = run("--csv", str(file), "--resume")
    assert (status, "needs rows of attn bench cpu" in err) == (2, True)


def test_no_cell_is_started_after_the_minutes(tiny: None) -> None:
    status, out, _ = run("--minutes", "1e-9", "--json")
    said = json.loads(out)
    assert (status, said["rows"]) == (0, [])
    assert {row["reason"] for row in said["skipped"]} == {"the minutes are over"}
    assert len(said["skipped"]) == len(TINY)


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
def test_a_plot_is_drawn(tiny: None, tmp_path: Path) -> None:
    status, _, err = run("--only", "decode", "--only", "prefill", "--plot", str(tmp_path / "p.png"))
    assert (status, err) == (0, "")
    assert (tmp_path / "p.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--only", "mla"), "--only: needs one of decode, ragged, verify, prefill, got mla"),
        (("--kind", "int8"), "--kind: needs one of float32, bfloat16, fp8, got int8"),
        (("--match", "nothing"), "--only, --kind and --match: needs some cells, got none"),
        (("--threads", "0"), "--threads: needs 1 or more, got 0"),
        (("--seconds", "0"), "--seconds: needs more than 0, got 0.0"),
        (("--seconds", "nan"), "--seconds: needs more than 0, got nan"),
        (("--minutes", "0"), "--minutes: needs more than 0, got 0.0"),
        (("--resume",), "--resume: needs --csv with the file to go on with, got none"),
        (("--memory", "-1"), "--memory: needs more than 0, got -1.0"),
        (("--csv", "/no/such/x.csv"), "/no/such/x.csv: needs a directory that exists, got /no/such"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr(command, "measure", lambda *_, **__: pytest.fail("measured"))
    assert run(*arguments) == (2, "", f"attn bench cpu: {said} [fa2.bench]\n")


def test_a_plot_without_its_library_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot, "available", lambda: False)
    monkeypatch.setattr(command, "measure", lambda *_, **__: pytest.fail("measured"))
    status, _, err = run("--plot", "x.png")
    assert (status, err) == (2, "attn bench cpu: --plot: needs matplotlib, got none installed [fa2.bench]\n")


def test_without_kernels_it_says_why(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def prepare(self) -> str:
            return "fa2: needs a compiler [fa2.compiler]"

    monkeypatch.setattr(command, "Host", Broken)
    assert run() == (1, "", "attn bench cpu: fa2: needs a compiler [fa2.compiler]\n")


@pytest.mark.parametrize("quick", [True, False])
def test_labels_are_distinct(quick: bool) -> None:
    labels = [cell.label for cell in cells.grid(quick)]
    assert len(set(labels)) == len(labels)


def test_the_grid_spans_what_the_goals_name() -> None:
    full = cells.grid(False)
    decodes = [c for c in full if c.op == "decode"]
    assert {c.batch for c in decodes} >= {1, 64}
    assert {c.kv_lens[0] for c in decodes} >= {512, 32768}
    assert {c.num_qo_heads for c in decodes} == {32, 64}
    assert {c.q_len for c in full if c.op == "verify"} == {1, 2, 4, 8, 16}
    assert {c.q_len for c in full if c.op == "prefill"} >= {64, 2048}
    assert all(min(c.kv_lens) < max(c.kv_lens) for c in full if c.op == "ragged")
    assert {c.op for c in full if c.flex} == set(cells.OPS)
    assert {c.op for c in full if c.kind == "fp8"} == set(cells.OPS)
    assert any(c.flex for c in cells.grid(True))


def wrong(plus: float) -> Callable[[world.World], world.Call]:
    def made(of: world.World) -> world.Call:
        return lambda copy: of.sdpa(of.dense[copy]) + plus

    return made


@pytest.mark.parametrize("plus", [0.1, float("nan")])
def test_a_wrong_answer_ends_it(tiny: None, monkeypatch: pytest.MonkeyPatch, plus: float) -> None:
    monkeypatch.setattr(measure, "fa2", wrong(plus))
    status, out, err = run("--only", "decode")
    assert (status, out) == (1, "")
    assert "decode float32 32/8 2 x 1 x 64: fa2 is off by " in err


def test_the_oracle_sees_the_last_request_and_head(tiny: None) -> None:
    made = world.World(TINY[1])
    got = made.sdpa(made.dense[0])
    assert measure.oracle_error(made, got) < 1e-2
    got[-1, -1, -1] += 1
    assert measure.oracle_error(made, got) > 1e-1


def test_copies_keep_small_batches_out_of_the_caches() -> None:
    small = Cell("decode", "bfloat16", 32, 1, (512,))
    assert small.copies * small.kv_bytes >= cells.LEAST_BYTES
    assert Cell("decode", "float32", 32, 1, (32768,) * 4).copies == 1


def test_the_bytes_and_flops_of_a_cell() -> None:
    cell = Cell("prefill", "bfloat16", 32, 2, (3,))
    assert cell.kv_bytes == 2 * 3 * 8 * 128 * 2
    assert cell.flops == 2 * 2 * 32 * 128 * (2 + 3)


def test_flex_is_asked_where_it_can_answer(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its compiler: the layout, the page table and the mask are what is tested."""
    monkeypatch.setattr(flex, "_compiled", lambda call: call)
    for cell in (
        Cell("decode", "float32", 32, 1, (256, 256), True),
        Cell("verify", "bfloat16", 32, 3, (128,), True),
        Cell("ragged", "float32", 32, 1, (5, 300, 128), True),
        Cell("prefill", "float32", 32, 40, (150,), True),
    ):
        result = measure.measure(cell, BRIEF)
        assert set(result.ms) == {FA2, GATHER, CONTIGUOUS, FLEX, READ}
        assert result.ratio(FLEX) is not None
        assert FLEX not in measure.measure(cell, BRIEF, with_flex=False).ms
    for cell in (TINY[0], Cell("decode", "fp8", 32, 1, (128,), True)):
        assert not flex.serves(world.World(cell))


def test_a_summary_is_a_geometric_mean() -> None:
    def result(own: float, **ms: float) -> Result:
        times: dict[str, Any] = {FA2: own, GATHER: ms["gather"], CONTIGUOUS: own, READ: own / 2}
        return Result(TINY[0], times, dict.fromkeys(times, 3), 1e-7, 1)

    (row,) = report.summary([result(1.0, gather=2.0), result(2.0, gather=16.0)])
    assert row["over"] == {GATHER: 4.0, CONTIGUOUS: 1.0, FLEX: None}
    assert row["of_read"] == 0.5
    (line,) = report.summary_lines([result(1.0, gather=2.0)])
    line, _, cells_of = line.partition(" (")
    assert cells_of == "geometric mean of 1)"
    assert line == "decode float32: 2.00x gather + SDPA, 1.00x contiguous SDPA, 50% of the read rate"
