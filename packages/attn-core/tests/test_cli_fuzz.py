"""``attn fuzz`` tests what can run here, says what it did, and fails when something is wrong."""

import json

import pytest
import torch

from attn_core.cli import fuzz as run
from attn_core.target import parse_target
from attn_core.testing.mini import Mini

from .cli_kit import attn


def wrong():
    """A backend that adds one to every output."""
    backend = Mini()
    backend.name = "wrong"
    backend.store = lambda io, rows, out, lse: Mini.store(backend, io, rows, out + 1, lse)
    return backend


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_every_backend_that_can_run_is_tested(use):
    use(Mini())
    result = attn("fuzz", "--session", "2")
    assert result.exit_code == 0, result.stdout
    assert result.stdout.count("1 sessions") == 2
    assert "mini: seed 0, session 2" in result.stdout
    assert "reference: seed 0, session 2" in result.stdout


def test_a_failure_is_told_with_its_number_and_the_exit_code_is_1(use):
    use(wrong())
    found = json.loads(attn("fuzz", "--backend", "wrong", "--seconds", "2", "--json").stdout)
    failures = found["backends"][0]["failures"]
    assert failures
    number = failures[0]["case"].split()[1]
    result = attn("fuzz", "--backend", "wrong", "--session", number)
    assert result.exit_code == 1
    assert f"session {number} of seed 0: wrong/torch" in result.stdout
    assert "Traceback" in result.stdout
    assert "1 failures" in result.stdout


def test_unknown_backends_are_refused(use):
    use(Mini())
    result = attn("fuzz", "--backend", "nope")
    assert result.exit_code == 2
    assert result.stderr == "attn fuzz: --backend: needs one of mini, reference, got nope [cli.fuzz]\n"


def test_zero_seconds_do_nothing(use):
    use(Mini())
    found = json.loads(attn("fuzz", "--seconds", "0", "--json").stdout)
    assert [one["sessions"] for one in found["backends"]] == [0, 0]


def test_a_device_that_is_not_here_is_refused(use):
    use(Mini())
    result = attn("fuzz", "--device", "cuda:99")
    assert result.exit_code == 2
    assert "--device: needs a device of this machine, got 'cuda:99' [cli.device]" in result.stderr


def test_the_stated_device_is_where_it_runs(use, monkeypatch):
    """Also where the machine has a GPU that the backend would run on otherwise."""
    use(Mini())
    monkeypatch.setattr(run, "_target", lambda backend: parse_target("gfx942"))
    result = attn("fuzz", "--backend", "mini", "--session", "2", "--device", "cpu")
    assert result.exit_code == 0, result.stdout
    assert "mini: seed 0, session 2\n" in result.stdout
