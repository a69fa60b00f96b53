"""``attn doctor``: shape, exit codes, and that no fault of what it looks at becomes its own."""

import json
import os
import stat
import sys
import time
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from attn_core import plugins
from attn_core.cli import doctor, tools
from attn_core.reasons import Reason
from attn_core.target import DeviceTarget

from .cli_kit import NARROW, attn, quick_backend
from .fakes import ABSENT, FakeBackend


@pytest.fixture(autouse=True)
def _quick_tools(monkeypatch):
    """Compilers are looked for in the tests about them only."""
    monkeypatch.setattr(tools, "found", lambda: [])


def facts(exit_code=0):
    result = attn("doctor", "--json")
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


def text(exit_code=0, columns=120):
    result = attn("doctor", columns=columns)
    assert result.exit_code == exit_code, result.output
    return " ".join(result.stdout.split())


def backend_of(said, name):
    return next(b for b in said["backends"] if b["name"] == name)


def test_shape():
    said = facts()
    assert set(said) == {
        "ok", "versions", "devices", "device_error", "known_archs", "tools", "backends", "broken", "commands",
        "environment", "config", "cache", "thresholds", "tuned", "compile",
    }  # fmt: skip
    assert said["ok"] is True
    assert said["versions"]["torch"] == str(torch.__version__)
    assert said["versions"]["attn-core"]
    assert said["devices"][0]["arch"] == "cpu"
    assert said["devices"][0]["num_cus"] == os.cpu_count()
    (reference,) = said["backends"]
    assert reference["paths"] == [
        {
            "candidate": "reference/torch",
            "usable": True,
            "targets": [
                {"arch": t["arch"], "index": t["index"], "missing": None, "code": None}
                for t in said["devices"]
            ],
        }
    ]


def test_text_names_what_can_run(use):
    use(quick_backend())
    said = text()
    assert "quick rank 10 native on cpu: needs a device of gfx942, got cpu [core.arch]" in said
    assert "gather, tile on cpu: available reference rank 1000" in said  # neighbours share a line
    assert said.endswith("This machine can run attention with: quick, reference.")


@pytest.mark.parametrize("columns", [20, 80, 120])
def test_text_fits_the_terminal(use, columns):
    use(quick_backend())
    lines = attn("doctor", columns=columns).stdout.splitlines()
    assert max(map(len, lines)) <= columns


def test_backends_are_in_order_with_rank_and_source(use):
    first, second = FakeBackend("b", rank=1), FakeBackend("a", rank=2)
    plugins.use(plugins.Registry((first, second), (), (), {"b": "b-wheel 1.2"}))
    said = facts()
    assert [(b["name"], b["rank"], b["source"]) for b in said["backends"]] == [
        ("b", 1, "b-wheel 1.2"),
        ("a", 2, None),
    ]
    assert "b rank 1, from b-wheel 1.2" in text()


def test_exit_one_when_nothing_can_run(use):
    absent = Reason(ABSENT, "gone", "libgone.so", "no such file")
    use(FakeBackend("gone", unavailable=absent), FakeBackend("far", paths=[("p", NARROW)]), reference=False)
    said = facts(exit_code=1)
    assert said["ok"] is False
    target = backend_of(said, "gone")["paths"][0]["targets"][0]
    assert target["missing"] == "needs libgone.so, got no such file"
    assert target["code"] == "fake.absent"
    assert text(exit_code=1).endswith("No backend can run on this machine.")


def test_every_gpu_is_judged_for_itself(use, monkeypatch):
    use(FakeBackend("far", paths=[("p", NARROW)]), reference=False)
    gpus = {0: "gfx942", 1: "gfx950"}

    def target_of(device):
        if device.type == "cpu":
            return DeviceTarget("cpu", "cpu", 4, 1)
        return DeviceTarget("hip", gpus[device.index], 304, 64, device.index)

    monkeypatch.setattr(doctor, "target_of", target_of)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card {device.index}")
    said = facts()
    assert [(d["arch"], d["name"]) for d in said["devices"][1:]] == [
        ("gfx942", "card 0"),
        ("gfx950", "card 1"),
    ]
    targets = backend_of(said, "far")["paths"][0]["targets"]
    assert [t["missing"] is None for t in targets] == [False, True, False]
    assert "hip:1 gfx950, 304 compute units, card 1" in text()
    assert "on gfx942: available" in text()


def test_gpu_runtime_is_left_alone_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("device_count", "_lazy_init", "get_device_properties", "get_device_name"):
        monkeypatch.setattr(torch.cuda, name, lambda *a, name=name: pytest.fail(f"torch.cuda.{name}"))
    assert [d["arch"] for d in facts()["devices"]] == ["cpu"]


def test_gpu_that_does_not_answer_is_a_row(monkeypatch):
    def fails():
        raise RuntimeError("HIP error:\n  no driver")

    monkeypatch.setattr(torch.cuda, "is_available", fails)
    said = facts()
    assert said["device_error"] == "RuntimeError: HIP error: no driver"
    assert [d["arch"] for d in said["devices"]] == ["cpu"]
    assert "no driver" in text()


def test_broken_plugins_are_rows(monkeypatch, tmp_path):
    (tmp_path / "gives_up.py").write_text("raise SystemExit('no ROCm')")
    monkeypatch.syspath_prepend(tmp_path)
    points = [
        EntryPoint("bad", "no_such_module_anywhere", plugins.GROUP),
        EntryPoint("worse", "gives_up", plugins.GROUP),
    ]
    plugins.use(plugins.discover(points, config={}))
    said = facts()
    assert [b["name"] for b in said["broken"]] == ["bad", "worse"]
    assert said["broken"][0]["error"].startswith("ModuleNotFoundError: No module named 'no_such")
    assert "worse plugin is broken: SystemExit: no ROCm" in text()


class Faulty(FakeBackend):
    """A backend whose every answer is a fault."""

    broken_paths = False

    @property
    def paths(self):
        if self.broken_paths:
            raise RuntimeError("no paths today")
        return self._paths

    @paths.setter
    def paths(self, value):
        self._paths = value

    def doctor(self):
        raise OSError("disk\ngone")


def test_faults_of_a_backend_stay_in_its_rows(use):
    faulty = use(Faulty("faulty", unavailable=ZeroDivisionError("by zero")))
    row = backend_of(facts(), "faulty")
    assert row["usable"] is False
    assert row["paths"][0]["targets"][0]["missing"] == "ZeroDivisionError: by zero"
    assert row["paths"][0]["targets"][0]["code"] == "cli.backend-raised"
    assert row["notes"] == {"doctor": "OSError: disk gone"}
    assert "OSError: disk gone" in text()
    faulty.broken_paths = True
    row = backend_of(facts(), "faulty")
    assert row["error"] == "RuntimeError: no paths today"
    assert row["paths"] == []
    assert "no paths today" in text()


def test_rows_of_a_backends_own(use):
    class Talker(FakeBackend):
        def doctor(self):
            return {"library": "1.2", "bytes": 3, "path": os, "seen": {"b", "a"}}

    use(Talker("talker"))
    notes = backend_of(facts(), "talker")["notes"]
    assert notes["library"] == "1.2"
    assert notes["bytes"] == 3
    assert notes["seen"] == ["a", "b"]
    assert "library 1.2" in text()


def test_rows_that_are_no_mapping(use):
    class Talker(FakeBackend):
        def doctor(self):
            return ["no mapping"]

    use(Talker("talker"))
    notes = backend_of(facts(), "talker")["notes"]
    assert notes == {"doctor": "TypeError: doctor() returned list, not a mapping"}


def test_unreadable_configuration_is_told_and_the_rest_stays(monkeypatch, tmp_path):
    file = tmp_path / "attn.toml"
    file.write_text("[backend")
    monkeypatch.setenv("ATTN_CONFIG", str(file))
    monkeypatch.setattr(plugins, "_installed", lambda: [])
    plugins.use(None)
    said = facts()
    assert said["config"]["path"] == str(file)
    assert said["config"]["error"].startswith("ATTN_CONFIG: needs a readable TOML file")
    assert [b["name"] for b in said["backends"]] == ["reference"]
    assert "needs a readable TOML file" in text()


def test_environment(monkeypatch):
    monkeypatch.setenv("ATTN_SOMETHING", "on")
    monkeypatch.setenv("OTHER_THING", "off")
    assert facts()["environment"]["ATTN_SOMETHING"] == "on"
    assert "OTHER_THING" not in facts()["environment"]
    assert "ATTN_SOMETHING on" in text()


def test_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTN_CACHE_DIR", str(tmp_path))
    assert facts()["cache"] == {"path": str(tmp_path), "exists": True, "writable": True}
    monkeypatch.setenv("ATTN_CACHE_DIR", str(tmp_path / "new" / "er"))
    assert facts()["cache"] == {"path": str(tmp_path / "new" / "er"), "exists": False, "writable": True}
    assert "(will be created, writable)" in text()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ATTN_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert facts()["cache"]["writable"] is False
    assert "NOT writable" in text()


def test_default_cache_directory(monkeypatch, tmp_path):
    monkeypatch.delenv("ATTN_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert facts()["cache"]["path"] == str(tmp_path / "attn")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert facts()["cache"]["path"] == str(tmp_path / "home" / ".cache" / "attn")


def test_a_user_without_a_home_has_no_cache_directory(monkeypatch):
    def homeless(*_):
        raise RuntimeError("Could not determine home directory.")

    for name in ("ATTN_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "expanduser", homeless)
    assert facts()["cache"] == {"path": None, "exists": False, "writable": False}
    assert "none: this user has no home directory; set ATTN_CACHE_DIR" in " ".join(text().split())


def test_a_cache_directory_that_may_not_be_looked_into(monkeypatch, tmp_path):
    stat_of = Path.stat

    def locked(path, **options):
        if tmp_path in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        return stat_of(path, **options)

    monkeypatch.setenv("ATTN_CACHE_DIR", str(tmp_path / "a" / "b"))
    monkeypatch.setattr(Path, "stat", locked)
    assert facts()["cache"]["path"] == str(tmp_path / "a" / "b")


def test_threshold_overlay(monkeypatch, tmp_path):
    assert facts()["thresholds"] == {"path": None, "rows": 0, "error": None}
    file = tmp_path / "rows.toml"
    file.write_text(
        '[[row]]\ncode = "a.b"\narch = "gfx942"\nlimit = 3\n[row.provenance]\nkind = "measured"\n'
        'source = "s"\nstatistic = "median"\ngrid = "g"\nversions = "v"\n'
    )
    monkeypatch.setenv("ATTN_THRESHOLDS", str(file))
    assert facts()["thresholds"] == {"path": str(file), "rows": 1, "error": None}
    assert f"{file} (1 rows)" in text(columns=300)
    file.write_text("[[row]]\n")
    assert "needs code and arch as strings" in facts()["thresholds"]["error"]
    assert "needs code and arch as strings" in text()


def test_commands_of_other_packages(monkeypatch):
    point = EntryPoint("bench", "elsewhere:command", "attn.commands")
    monkeypatch.setattr(doctor.mount, "entry_points", lambda group: [point])
    assert facts()["commands"] == [{"name": "bench", "source": "elsewhere:command"}]
    assert "attn bench from elsewhere:command" in text()


# ---- build tools -----------------------------------------------------------------------------------------


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """Put programs that are shell scripts on an otherwise empty PATH, and look for all of them."""
    monkeypatch.undo()  # the stand-in for tools.found
    monkeypatch.setenv("PATH", str(tmp_path))

    def install(**scripts):
        for name, script in scripts.items():
            file = tmp_path / name
            file.write_text(f"#!/bin/sh\n{script}\n")
            file.chmod(file.stat().st_mode | stat.S_IXUSR)
        return {row["name"]: row for row in tools.found([*scripts, "absent"])}

    return install


def test_versions_of_programs(programs, tmp_path):
    found = programs(
        plain="echo 1.11.1",
        banner="echo 'cuda compiler'; echo 'Built on Wed_Aug'; echo 'tools,  release 13.0, V13.0.88'",
        silent="echo nothing numeric",
        failing="echo 2.0; exit 3",
    )
    assert found["plain"]["version"] == "1.11.1"
    assert found["plain"]["path"] == str(tmp_path / "plain")
    assert found["banner"]["version"] == "tools, release 13.0, V13.0.88"
    assert found["silent"]["version"] is None
    assert found["silent"]["error"] is None
    assert found["failing"]["error"] == "--version ended with status 3"
    assert found["absent"] == {"name": "absent", "path": None, "version": None, "error": None}
    assert "ziglang (wheel)" in found


def test_program_that_hangs_is_given_up(programs, monkeypatch):
    monkeypatch.setattr(tools, "TIMEOUT_S", 0.2)
    start = time.monotonic()
    found = programs(hangs=f"exec {sys.executable} -c 'import time; time.sleep(100)'")
    assert found["hangs"]["error"] == "no answer to --version within 0.2 s"
    assert time.monotonic() - start < 60  # the program would have slept on


def test_program_that_cannot_be_run(programs, monkeypatch, tmp_path):
    (tmp_path / "odd").write_bytes(b"\x00\x01 no program")
    (tmp_path / "odd").chmod(0o755)
    rows = {row["name"]: row for row in tools.found(["odd"])}
    assert rows["odd"]["error"].startswith("cannot run: ")


def test_tools_in_text(monkeypatch):
    rows = [
        {"name": "cc", "path": "/bin/cc", "version": "cc 1.2", "error": None},
        {"name": "ld", "path": "/bin/ld", "version": None, "error": None},
        {"name": "as", "path": "/bin/as", "version": None, "error": "no answer"},
        {"name": "nm", "path": None, "version": None, "error": None},
    ]
    monkeypatch.setattr(tools, "found", lambda: rows)
    said = text()
    assert "cc cc 1.2 ld /bin/ld, version not stated as /bin/as: no answer nm not found" in said
    assert facts()["tools"] == rows
