"""`attn tune`: what does not fit, fails or cannot be written is told on one line, and nothing is written."""

import json
import os

import pytest

from attn_core.capability import Capability
from attn_core.cli import tune_plot
from attn_core.problem import Op

from .tune_kit import GRID, Clock, Timed, crossing, install, install_two, tune


@pytest.fixture
def out(tmp_path):
    return tmp_path / "deep" / "tuned.toml"


@pytest.fixture(autouse=True)
def _no_picture(monkeypatch):
    """Drawing takes longer than all the rest."""
    monkeypatch.setattr(tune_plot, "draw", lambda pairs, path: None)


@pytest.fixture
def two(monkeypatch):
    """a costs 8 ms, b crosses it."""
    return install_two(monkeypatch)


def refused(*args, code=2):
    """The one line of a call that ends in nothing."""
    result = tune(*args)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("attn tune: ").rstrip("\n")


def test_nothing_to_compare_is_told_with_what_could_be(two):
    assert refused(*GRID, "--out", "x") == (
        "--pair: needs A,B out of a/p, b/p, reference/torch, since no routing gate applies here, got none "
        "[cli.pair]"
    )


BAD = {
    "a pair of one": (
        ("--pair", "a/p"),
        "--pair: needs two candidates A,B that differ, got 'a/p' [cli.pair]",
    ),
    "a pair of equals": (("--pair", "a/p,a/p"), "--pair: needs two candidates"),
    "a backend": (
        ("--pair", "a,b/p"),
        "--pair: needs candidates that can serve here (a/p, b/p, reference/torch), got a",
    ),
    "unknown": (("--pair", "a/p,c/p"), "got c/p [cli.pair]"),
    "no number": (
        ("--pair", "a/p,b/p", "--q-len", "1,x"),
        "--q-len: needs whole numbers of 1 or more with commas, got '1,x'",
    ),
    "zero": (("--pair", "a/p,b/p", "--batch", "0"), "--batch: needs whole numbers"),
    "huge": (("--pair", "a/p,b/p", "--batch", "9999999999"), "--batch: needs at most 2147483647"),
    "q beyond kv": (
        ("--pair", "a/p,b/p", "--q-len", "8", "--kv-len", "4"),
        "--q-len: needs one of at most --kv-len",
    ),
    "op": (("--pair", "a/p,b/p", "--op", "prefill_single"), "needs an op"),
    "no op": (("--pair", "a/p,b/p", "--op", "fly"), "--op: needs one of"),
    "mask": (("--pair", "a/p,b/p", "--mask", "custom"), "tune: needs an op of"),
    "device": (
        ("--pair", "a/p,b/p", "--device", "moon"),
        "--device: needs a torch device, got 'moon' [cli.device]",
    ),
    "no device": (("--pair", "a/p,b/p", "--device", "cuda:99"), "--device: needs a device of this machine"),
    "two tasks": (
        ("--check", "--dry-run"),
        "--check: needs no other thing to do, got --dry-run [cli.tune-check]",
    ),
    "check of nothing": (("--check", "--out", "none.toml"), "--out: needs a readable file"),
    "off": (("--pair", "a/p,b/p"), "--out: needs a file, since ATTN_TUNED is off, got none [cli.tune-out]"),
}


@pytest.mark.parametrize(("args", "told"), BAD.values(), ids=BAD)
def test_an_option_that_does_not_fit_is_told_on_one_line(two, args, told):
    assert told in refused(*args)


def test_a_dry_run_measures_and_writes_nothing(two, out):
    result = tune("--pair", "a/p,b/p", *GRID, "--out", str(out), "--dry-run")
    assert result.exit_code == 0
    assert "a/p against b/p" in result.stdout
    assert "would write" in result.stdout
    said = json.loads(tune("--pair", "a/p,b/p", *GRID, "--out", str(out), "--dry-run", "--json").stdout)
    assert (said["cells"], said["dry_run"]) == (8, True)
    assert not out.parent.exists()
    assert two[0].planned == []


def test_what_would_be_lost_is_not_written_over(two, tmp_path):
    path = tmp_path / "notes.toml"
    path.write_text("my notes")
    assert "--out: needs a file of attn tune to add to, or none" in refused(
        "--pair", "a/p,b/p", *GRID, "--out", str(path)
    )
    assert path.read_text() == "my notes"
    assert two[0].planned == []  # refused before anything was measured


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_may_not_be_written_is_told_of(two, tmp_path):
    tmp_path.chmod(0o500)
    try:
        told = refused("--pair", "a/p,b/p", *GRID, "--out", str(tmp_path / "t.toml"))
    finally:
        tmp_path.chmod(0o700)
    assert "--out: needs a file in a writable directory" in told


def test_a_place_that_is_no_directory_is_told_of(two, tmp_path):
    (tmp_path / "file").write_text("")
    told = refused("--pair", "a/p,b/p", *GRID, "--out", str(tmp_path / "file" / "t.toml"))
    assert told.startswith("--out: needs ")
    assert os.listdir(tmp_path) == ["file"]


def test_a_write_that_fails_leaves_what_was_there(two, out, monkeypatch):
    assert tune("--pair", "a/p,b/p", *GRID, "--out", str(out)).exit_code == 0
    before = out.read_text()

    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    told = refused("--pair", "a/p,b/p", *GRID, "--out", str(out))
    assert "No space left on device [cli.tune-out]" in told
    assert out.read_text() == before
    assert [name for name in os.listdir(out.parent) if name.endswith(".toml")] == ["tuned.toml"]


def test_an_interrupt_writes_nothing(two, out):
    def stop(io):
        if len(two[1].planned) > 3:
            raise KeyboardInterrupt

    two[1].fault = stop
    assert (
        refused("--pair", "a/p,b/p", *GRID, "--out", str(out), code=130) == "interrupted; nothing was written"
    )
    assert not out.parent.exists()


def test_a_wrong_result_writes_nothing(two, out):
    two[1].fault = lambda io: io.out.mul_(1.5) if io.q.shape[0] >= 32 else None
    told = refused("--pair", "a/p,b/p", *GRID, "--out", str(out), code=1)
    assert told.startswith(
        "b/p: needs the reference's result at batch 2, q_len 16, kv_len 64, got rows 8 to 15 of request 0"
    )
    assert told.endswith("nothing was written")
    assert not out.parent.exists()


def test_a_candidate_that_fails_everywhere_writes_nothing(two, out):
    two[1].fault = lambda io: 1 / 0
    told = refused("--pair", "a/p,b/p", *GRID, "--out", str(out), code=1)
    assert told == (
        "tune: needs at least one cell that both candidates serve, got b/p: ZeroDivisionError: division by "
        "zero [core.tune-failed]; nothing was written"
    )
    assert not out.parent.exists()


def test_a_candidate_that_fails_in_places_is_told_of(two, out):
    two[1].fault = lambda io: 1 / 0 if io.q.shape[0] == 2 else None
    result = tune("--pair", "a/p,b/p", *GRID, "--out", str(out), columns=120)
    assert result.exit_code == 0
    text = " ".join(result.stdout.split())
    assert "Not measured in 3 cells, the first at batch 2, q_len 1, kv_len 64: b/p: ZeroDivisionError" in text


def test_a_candidate_that_cannot_serve_is_not_offered(monkeypatch):
    clock = Clock()
    narrow = Capability(archs=None, ops=frozenset({Op.DECODE}))
    install(monkeypatch, clock, Timed("a", clock, crossing), Timed("n", clock, crossing, able=narrow))
    assert "needs candidates that can serve here (a/p, reference/torch), got n/p" in refused(
        "--pair", "a/p,n/p"
    )
