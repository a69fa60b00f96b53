"""``attn explain``: verdicts, text, JSON, exit codes."""

import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
import torch

from attn_core import plugins
from attn_core.cli import ask as asking
from attn_core.errors import Unsupported
from attn_core.problem import Op
from attn_core.reasons import Reason
from attn_core.rules import Rule
from attn_core.target import DeviceTarget

from .cli_kit import NARROW, SHORT, answer, explain, quick_backend
from .fakes import ABSENT, FakeBackend


@pytest.fixture
def quick(use):
    return use(quick_backend())


def test_every_candidate_and_every_reason(quick):
    said = answer(
        "--op", "prefill_paged", "--arch", "gfx942", "--page-size", "64", "--q-len", "4", "--kv-dtype",
        "float16",
    )  # fmt: skip
    assert set(said) == {"chosen", "candidates", "query", "grounds", "broken"}
    assert said["chosen"] == "quick/tile"
    native, gather, tile, reference = said["candidates"]
    assert [c["candidate"] for c in said["candidates"]] == [
        "quick/native", "quick/gather", "quick/tile", "reference/torch",
    ]  # fmt: skip
    assert [c["chosen"] for c in said["candidates"]] == [False, False, True, False]
    assert {tuple(c) for c in said["candidates"]} == {("candidate", "chosen", "refusals")}
    assert [r["code"] for r in native["refusals"]] == ["core.same-dtype", "core.page-size"]
    assert native["refusals"][1] == {
        "code": "core.page-size",
        "stage": "capability",
        "limit": "1, 1024",
        "got": 64,
        "text": "pages at 1, 1024, got 64",
    }
    assert gather["refusals"] == [
        {
            "code": "quick.short",
            "stage": "preference",
            "limit": 128,
            "got": "q_len 4",
            "text": "is slower up to 128 rows, got q_len 4",
        }
    ]
    assert tile["refusals"] == reference["refusals"] == []


def test_nothing_is_planned_built_or_run(quick):
    explain("--op", "prefill_paged", "--arch", "gfx942")
    assert {call[0] for call in quick.calls} == {"unavailable"}


def test_no_gpu_is_asked_about_when_the_device_is_named(quick, monkeypatch):
    for name in ("is_available", "device_count", "_lazy_init", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, lambda *a, name=name: pytest.fail(f"torch.cuda.{name}"))
    assert answer("--op", "decode", "--arch", "gfx950")["query"]["target"]["arch"] == "gfx950"


def test_default_device_is_this_machines(quick, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert answer("--op", "decode")["query"]["target"]["arch"] == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(asking, "target_of", lambda device: DeviceTarget("hip", f"gfx942-{device}"))
    assert answer("--op", "decode")["query"]["target"]["arch"] == "gfx942-cuda:0"


def test_known_devices_supply_counts(quick):
    known = DeviceTarget("hip", "gfx942", 304, 64)
    plugins.use(plugins.Registry((quick,), (), (known,), {}))
    assert answer("--op", "decode", "--arch", "gfx942")["query"]["target"]["num_cus"] == 304
    assert answer("--op", "decode", "--arch", "GFX942:80")["query"]["target"]["num_cus"] == 80


GOLDEN = """\
prefill_paged on gfx942 (hip)
batch 8, q_len 4, kv_len 4096, mask causal, heads 32/8, head_dim 128,
bfloat16/float16, page_size 64, NHD, lse

  quick/native     refused
    capability    needs k/v of q's type bfloat16, got float16    core.same-dtype
    capability    pages at 1, 1024, got 64                       core.page-size
  quick/gather     refused
    preference    is slower up to 128 rows, got q_len 4          quick.short
  quick/tile       chosen
  reference/torch  also able

quick/tile would serve prefill_paged on gfx942, since quick/native and
quick/gather are refused.
"""


def test_text(quick):
    result = explain(
        "--op", "prefill_paged", "--arch", "gfx942", "--page-size", "64", "--q-len", "4", "--kv-dtype",
        "fp16", "--needs-lse",
    )  # fmt: skip
    assert result.exit_code == 0
    assert result.stdout == GOLDEN
    assert result.stderr == ""


def test_neighbours_share_what_they_share(use):
    absent = Reason(ABSENT, "gone", "libgone.so")
    paths = [f"p{n}" for n in range(6)]
    use(FakeBackend("gone", paths=paths, unavailable=absent))
    text = explain("--op", "decode", "--arch", "cpu").stdout
    lines = [line.split() for line in text.splitlines()]
    assert lines[4:11] == [
        *([f"gone/p{n}", "refused"] for n in range(6)),
        ["availability", "needs", "libgone.so", "fake.absent"],
    ]
    said = "since gone/p0, gone/p1, gone/p2, gone/p3 and 2 more are refused."
    assert " ".join(text.split()).endswith(said)


def test_quiet_reasons_are_not_blamed(use):
    use(FakeBackend("far", paths=[("p", NARROW)]))
    text = explain("--op", "verify", "--arch", "cpu").stdout
    assert "core.arch" in text
    assert text.endswith("\nreference/torch would serve verify on cpu.\n")


@pytest.mark.parametrize("columns", [20, 80, 120, 300])
def test_text_fits_the_terminal_and_stays_readable(quick, columns):
    result = explain("--op", "prefill_paged", "--arch", "gfx942", "--page-size", "64", columns=columns)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= min(columns, 120)
    assert not any(line.endswith(" ") for line in result.stdout.splitlines())


def test_no_route(use):
    use(FakeBackend("quick", paths=[("native", NARROW)]), reference=False)
    result = explain("--op", "decode", "--arch", "gfx942")
    assert result.exit_code == 1
    assert "refused" in result.stdout
    assert "Nothing installed can serve decode on gfx942 as asked" in " ".join(result.stdout.split())
    as_json = explain("--op", "decode", "--arch", "gfx942", "--json")
    assert as_json.exit_code == 1
    assert json.loads(as_json.stdout)["chosen"] is None


def test_no_backend_at_all():
    plugins.use(plugins.Registry((), (), (), {}))
    result = explain("--op", "decode", "--arch", "cpu", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["candidates"] == []


def test_a_named_backend_is_not_judged_for_speed(quick):
    said = answer("--op", "prefill_paged", "--arch", "gfx942", "--q-len", "4", "--backend", "quick/gather")
    assert said["chosen"] == "quick/gather"
    assert said["query"]["backend"] == "quick/gather"
    others = [r["code"] for c in said["candidates"] if not c["chosen"] for r in c["refusals"]]
    assert others == ["core.not-requested"] * 3


def test_absent_backend_is_refused_at_availability(use):
    use(FakeBackend("gone", unavailable=Reason(ABSENT, "gone", "libgone.so")))
    gone, _ = answer("--op", "decode", "--arch", "gfx942")["candidates"]
    assert [(r["code"], r["stage"]) for r in gone["refusals"]] == [("fake.absent", "availability")]


def test_broken_plugins_are_told(quick):
    broken = plugins.Broken("aiter", "ImportError: no libfoo.so")
    plugins.use(plugins.Registry((quick,), (broken,), (), {}))
    assert answer("--op", "decode", "--arch", "cpu")["broken"] == [
        {"name": "aiter", "error": "ImportError: no libfoo.so"}
    ]
    text = explain("--op", "decode", "--arch", "cpu")
    assert "plugin aiter is broken (ImportError: no libfoo.so)" in text.stdout
    assert text.stderr == ""


def test_discovery_says_nothing_beside_the_answer(monkeypatch, caplog):
    bad = EntryPoint("bad", "no_such_module_anywhere", plugins.GROUP)
    monkeypatch.setattr(plugins, "_installed", lambda: [bad])
    plugins.use(None)
    said = answer("--op", "decode", "--arch", "cpu")
    assert [b["name"] for b in said["broken"]] == ["bad"]
    assert caplog.records == []


@pytest.mark.parametrize("wanted", ["auto", "odd", "odd/p"])
def test_a_backend_that_raises_is_named(use, wanted):
    def wrong(query):
        raise ZeroDivisionError("division\nby zero")

    rule = Rule(SHORT, frozenset(Op), frozenset({"p"}), wrong)
    use(FakeBackend("fine"), FakeBackend("odd", rules=[rule]))
    result = explain("--op", "decode", "--arch", "cpu", "--backend", wanted)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == (
        "attn explain: backend odd: needs an answer, got ZeroDivisionError: division by zero "
        "[cli.backend-raised]\n"
    )


def test_a_named_backend_that_cannot_say_so_now(use):
    late = Unsupported(Reason(ABSENT, "late/p", "a device"))
    use(FakeBackend("late", unavailable=late))
    assert answer("--op", "decode", "--arch", "cpu")["chosen"] == "reference/torch"
    result = explain("--op", "decode", "--arch", "cpu", "--backend", "late")
    assert result.exit_code == 1
    assert result.stderr == "attn explain: late/p: needs a device [fake.absent]\n"


def test_process_prints_one_object_and_starts_nothing(tmp_path):
    """The installed packages as they are, with a library ``aiter`` that must not be imported."""
    (tmp_path / "aiter").mkdir()
    (tmp_path / "aiter" / "__init__.py").write_text("raise SystemExit('imported')")
    code = """
import sys
from attn_core.cli import main
try:
    main()
except SystemExit as end:
    import torch
    assert not torch.cuda.is_initialized()
    assert "aiter" not in sys.modules
    raise
"""
    args = ["explain", "--op", "verify", "--arch", "gfx942", "--json"]
    ran = subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout)
    assert said["chosen"] in [c["candidate"] for c in said["candidates"]]
    assert said["query"]["target"]["arch"] == "gfx942"
