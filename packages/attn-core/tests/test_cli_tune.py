"""`attn tune`: what it writes is what routing then does, and no fault of anything leaves half a file."""

import json
import os
import tomllib
from dataclasses import replace

import pytest
import torch

from attn_core import plugins, tuned
from attn_core.cli import tune_plot
from attn_core.problem import Op
from attn_core.reference import CAPABILITY
from attn_core.rules import Rule
from attn_core.target import target_of
from attn_core.thresholds import Thresholds

from .cli_kit import SHORT, attn
from .test_thresholds import row
from .tune_kit import GRID, LAYER, Clock, Timed, crossing, install, install_two, tune


@pytest.fixture
def out(tmp_path):
    return tmp_path / "deep" / "tuned.toml"


@pytest.fixture(autouse=True)
def _no_picture(request, monkeypatch):
    """Drawing takes longer than all the rest; the tests about it draw."""
    if "picture" not in request.fixturenames:
        monkeypatch.setattr(tune_plot, "draw", lambda pairs, path: None)


@pytest.fixture
def picture():
    """Draw for real."""
    return pytest.importorskip("matplotlib")


@pytest.fixture
def two(monkeypatch):
    """a costs 8 ms, b crosses it."""
    return install_two(monkeypatch)


def test_it_writes_what_it_measured_and_routing_follows(two, out, monkeypatch):
    result = tune("--pair", "b/p,a/p", *GRID, "--out", str(out), "--json")
    assert result.exit_code == 0, result.stderr
    said = json.loads(result.stdout)
    assert (said["out"], said["failures"], said["gates"]) == (str(out), [], [])
    (pair,) = said["pairs"]
    assert pair["candidates"] == ["a/p", "b/p"]  # in the order of auto, however they were named
    steps = {b["kv_len"]: [(s["q_len"], s["fastest"]) for s in b["steps"]] for b in pair["buckets"]}
    assert steps == {
        64: [(1, "a/p"), (8, "b/p")],
        128: [(1, "a/p"), (16, "b/p")],  # added: its neighbours differ at 16 rows
        256: [(1, "a/p"), (32, "b/p")],
    }
    assert pair["provenance"]["versions"].count("a 1.0") == 1
    assert tomllib.loads(out.read_text())["format"] == 1
    registry = plugins.registry()
    plugins.use(replace(registry, measured=tuned.read(out).pairs))
    question = ("--op", "prefill_paged", *LAYER, "--batch", "2", "--kv-len", "64")
    for q_len, chosen in ((7, "a/p"), (8, "b/p")):
        explained = json.loads(attn("explain", *question, "--q-len", str(q_len), "--json").stdout)
        assert explained["chosen"] == chosen
        (ground,) = explained["grounds"]
        assert (ground["about"], ground["kind"], ground["file"]) == ("a/p, b/p", "measured", str(out))
    shown = " ".join(attn("explain", *question, "--q-len", "8", columns=120).stdout.split())
    assert "was measured slower on this device than b/p" in shown
    assert (
        f"b/p is faster at batch 2, q_len 8, kv_len 64 measured: {said['pairs'][0]['provenance']['device']}"
        in shown
    )


def test_the_check_finds_nothing_to_regret_in_the_tuned_table_and_much_without(two, out):
    assert tune("--pair", "a/p,b/p", *GRID, "--out", str(out)).exit_code == 0
    plain = tune("--check", "--pair", "a/p,b/p", *GRID, "--json")
    said = json.loads(plain.stdout)
    assert (plain.exit_code, said["ok"]) == (1, False)
    assert said["worst_regret"] == pytest.approx(2.0)
    assert "NOT within 1.03x and 1.25x" in tune("--check", "--pair", "a/p,b/p", *GRID, columns=120).stdout
    known = plugins.registry()
    plugins.use(replace(known, measured=tuned.read(out).pairs))
    tuned_too = tune("--check", *GRID, "--json")  # the candidates are those of the file
    said = json.loads(tuned_too.stdout)
    assert (tuned_too.exit_code, said["ok"]) == (0, True)
    assert said["mean_regret"] == pytest.approx(1.0)
    assert {cell["chosen"] for cell in said["cells"]} == {"a/p", "b/p"}
    assert all(len(cell["us"]) == 2 for cell in said["cells"])
    assert len(said["cells"]) == 8


@pytest.mark.parametrize("power", [0.3, 1.0])
@pytest.mark.parametrize("kv_power", [-0.5, 0.0, 0.5])
def test_auto_on_a_tuned_table_loses_little_on_a_finer_grid(monkeypatch, out, power, kv_power):
    """Times that cross smoothly, anywhere: at most 3 % in the mean and 25 % in a cell, between cells too."""
    clock = Clock()
    a = Timed("a", clock, lambda q, kv: 4e-3)
    b = Timed("b", clock, lambda q, kv: 4e-3 * (12 / q) ** power * (kv / 128) ** kv_power, rank=20)
    known = install(monkeypatch, clock, a, b)
    grid = ("--q-len", "1,4,16,64", "--kv-len", "64,128,256", "--batch", "1")
    assert tune("--pair", "a/p,b/p", *grid, "--out", str(out), "--quick").exit_code == 0
    plugins.use(replace(known, measured=tuned.read(out).pairs))
    fine = ("--q-len", "1,2,3,4,6,9,12,16,24,40,64", "--kv-len", "64,80,128,180,256", "--batch", "1")
    said = json.loads(tune("--check", *fine, "--json").stdout)
    assert said["mean_regret"] <= 1.03
    assert said["worst_regret"] <= 1.25
    assert len({cell["fastest"] for cell in said["cells"]}) == 2


def test_the_text_has_ratios_verdicts_and_files(two, out, picture):
    result = tune("--pair", "a/p,b/p", *GRID, "--out", str(out), columns=100)
    assert result.exit_code == 0, result.stderr
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert lines[0] == "a/p against b/p  prefill_paged on cpu, heads 2/1, float32, page_size 4, mask causal"
    assert lines[1].split() == ["q_len", "kv_len", "64", "kv_len", "128", "kv_len", "256"]
    assert "      1       2.00        2.00        2.00" in lines
    assert "     64       0.50        0.50        0.50" in lines
    assert "  kv_len 256: a/p up to q_len 31, b/p from 32" in lines
    shown = "".join(lines)
    drawn = out.parent / "tuned-prefill_paged-cpu.png"
    assert f"Wrote {out}; routing reads it".replace(" ", "") in shown.replace(" ", "")
    assert drawn.read_bytes()[1:4] == b"PNG"
    assert result.stderr == ""


def test_without_matplotlib_it_says_so_and_writes_the_rest(two, out, monkeypatch, picture):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    result = tune("--pair", "a/p,b/p", *GRID, "--out", str(out), columns=120)
    assert result.exit_code == 0
    assert "plot: needs matplotlib (pip install matplotlib), got none" in " ".join(result.stdout.split())
    assert os.listdir(out.parent) == ["tuned.toml"]


def test_a_picture_that_cannot_be_written_is_no_failure(two, out, tmp_path, picture):
    result = tune(
        "--pair", "a/p,b/p", *GRID, "--out", str(out), "--plot", str(tmp_path / "no" / "x.png"), "--json"
    )
    said = json.loads(result.stdout)
    assert (result.exit_code, said["plot"]) == (0, None)
    assert said["plot_error"].startswith("plot: needs a writable file")
    assert out.exists()


def test_a_second_run_adds_and_replaces(two, out):
    assert tune("--pair", "a/p,b/p", *GRID, "--out", str(out)).exit_code == 0
    assert (
        tune("--pair", "a/p,b/p", *GRID, "--out", str(out), "--op", "prefill_ragged").exit_code == 2
    )  # page_size
    before = out.read_text()
    assert (
        attn(
            "tune", *LAYER[:-2], "--op", "prefill_ragged", "--pair", "a/p,b/p", *GRID, "--out", str(out)
        ).exit_code
        == 0
    )
    two[1].cost = lambda q, kv: 1e-3
    assert tune("--pair", "a/p,b/p", *GRID, "--out", str(out)).exit_code == 0
    pairs = list(tuned.read(out).pairs)
    assert {pair.scope.op: pair.buckets[0].steps for pair in pairs} == {
        "prefill_paged": ((1, "b/p"),),
        "prefill_ragged": ((1, "a/p"), (8, "b/p")),
    }
    assert out.read_text() != before


def gated(clock, cost, limit, rank=5):
    """A backend whose path is left out up to a threshold."""
    backend = Timed("g", clock, cost, rank=rank)
    backend.thresholds = Thresholds.load(row(code=SHORT.slug, arch="cpu", limit=limit), "shipped.toml")

    def test(query):
        found = backend.thresholds.get(SHORT.slug, query.target.arch)
        got = query.batch.max_q_len
        return (found.value, got) if got <= getattr(found, "value", 0) else None

    backend.rules = (Rule(SHORT, frozenset({Op.PREFILL_PAGED}), frozenset({"p"}), test, "q_len"),)
    return backend


def test_by_default_the_candidates_with_a_gate_are_measured_and_its_limit_with_them(monkeypatch, out):
    clock = Clock()
    install(monkeypatch, clock, gated(clock, crossing, "40"), Timed("a", clock, lambda q, kv: 8e-3))
    result = tune(*GRID, "--out", str(out), "--json")
    assert result.exit_code == 0, result.stderr
    said = json.loads(result.stdout)
    assert [pair["candidates"] for pair in said["pairs"]] == [["g/p", "a/p"]]
    assert said["gates"] == [{"code": SHORT.slug, "arch": "cpu", "limit": "31", "before": "40"}]
    (written,) = tuned.read(out).rows
    assert (written.kind, written.verdict.value, written.origin) == ("measured", 31, str(out))
    assert dict(written.provenance)["statistic"].startswith("largest q_len at which the worst time ratio")
    shown = tune(*GRID, "--out", str(out)).stdout
    assert f"gate {SHORT.slug} on cpu: 31 (was 40, reported)" in shown


def test_a_measurement_overrules_the_gate_in_both_directions(monkeypatch, out):
    clock = Clock()
    known = install(monkeypatch, clock, gated(clock, crossing, "40"), Timed("a", clock, lambda q, kv: 8e-3))
    assert tune(*GRID, "--out", str(out)).exit_code == 0
    plugins.use(replace(known, measured=tuned.read(out).pairs))
    chosen = {
        (q, kv): json.loads(
            attn(
                "explain",
                "--op",
                "prefill_paged",
                *LAYER,
                "--batch",
                "2",
                "--q-len",
                q,
                "--kv-len",
                kv,
                "--json",
            ).stdout
        )["chosen"]
        for q in ("7", "8", "64")
        for kv in ("64", "256")
    }
    assert chosen == {
        ("7", "64"): "a/p", ("8", "64"): "g/p", ("64", "64"): "g/p",
        ("7", "256"): "a/p", ("8", "256"): "a/p", ("64", "256"): "g/p",
    }  # fmt: skip


def test_doctor_shows_what_was_tuned_and_what_is_outdated(two, out, monkeypatch):
    assert tune("--pair", "a/p,b/p", *GRID, "--out", str(out)).exit_code == 0
    monkeypatch.setenv(tuned.VARIABLE, str(out))
    monkeypatch.setattr("attn_core.cli.tools.found", lambda: [])
    said = json.loads(attn("doctor", "--json").stdout)["tuned"]
    assert (said["path"], said["exists"], said["error"]) == (str(out), True, None)
    assert said["pairs"][0]["outdated"] == []
    known = plugins.registry()
    plugins.use(replace(known, sources={"a": "a 2.0", "b": "b 1.0"}))
    assert json.loads(attn("doctor", "--json").stdout)["tuned"]["pairs"][0]["outdated"] == ["a 1.0"]
    shown = " ".join(attn("doctor", columns=120).stdout.split())
    assert "a/p against b/p: prefill_paged on cpu, heads 2/1, float32, measured" in shown
    assert "with a 1.0, so tune again" in shown
    out.write_text("format = 1\nbad")
    said = json.loads(attn("doctor", "--json").stdout)["tuned"]
    assert str(out) in said["error"]
    assert "line 2" in said["error"]


def test_the_generated_pages_do_not_depend_on_it(two, out, monkeypatch, tmp_path):
    clock = Clock()
    install(monkeypatch, clock, gated(clock, crossing, "40"), Timed("a", clock, lambda q, kv: 8e-3))
    assert tune(*GRID, "--out", str(out)).exit_code == 0
    plugins.use(None)
    monkeypatch.setattr(plugins, "_installed", lambda: [])
    pages = []
    for value in ("", str(out)):
        monkeypatch.setenv(tuned.VARIABLE, value)
        plugins.use(None)
        assert attn("docs", "--write", str(tmp_path / "pages")).exit_code == 0
        pages.append({p.name: p.read_text() for p in sorted((tmp_path / "pages").iterdir())})
    assert pages[0] == pages[1]


def test_the_target_is_the_one_that_routing_asks_about(two, out):
    assert tune("--pair", "a/p,b/p", *GRID, "--out", str(out)).exit_code == 0
    (pair,) = tuned.read(out).pairs
    here = target_of(torch.device("cpu"))
    assert (pair.arch, pair.num_cus) == (here.arch, here.num_cus)
    assert CAPABILITY.archs is None
