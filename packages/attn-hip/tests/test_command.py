"""``attn build``, as the CLI calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from attn_hip import build, cache, commands, isa, toolchain

APP = typer.Typer()
APP.command("build")(commands.build)


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(APP, list(arguments))
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names that were built, in order; nothing is compiled."""
    names: list[str] = []

    def ensure(name: str, progress: build.Progress | None = None) -> Path:
        names.append(name)
        assert progress is not None
        progress(1, 1, "bind.cpp")
        if name == "avx2":
            raise build.BuildError("x.cpp:1: error: bad (log: /l)")
        if name == "avx512":
            raise cache.CacheError("ATTN_CACHE_DIR: a writable directory", "/ro")
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text('{"seconds": 1.5}')
        return tmp_path / name / "native.so"

    monkeypatch.setattr(build, "ensure", ensure)
    monkeypatch.setattr(isa, "known", lambda: tuple(isa.FLAGS))
    return names


def test_builds_what_this_cpu_would_use(asked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(isa.VARIABLE, "generic")
    status, out, err = run()
    assert (status, asked, err) == (0, ["generic"], "")
    assert out.startswith("generic  ")
    assert out.endswith("native.so  1.5 s\n")


def test_all_go_on_after_a_failure(asked: list[str]) -> None:
    status, out, err = run("--isa", "all")
    assert status == 1
    assert asked == list(isa.FLAGS)
    assert "avx2: x.cpp:1: error: bad (log: /l) [fa2.build]\n" in err
    assert "avx512: needs ATTN_CACHE_DIR: a writable directory, got /ro [fa2.cache]\n" in err
    assert out.count("native.so") == 2


def test_a_cause_that_all_share_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(isa, "known", lambda: ("avx2", "generic"))
    status, out, err = run("--isa", "all")
    needed = "a C++17 compiler (g++, c++, clang++), got none that can be run [fa2.compiler]"
    assert (status, out, err) == (1, "", f"attn build: avx2, generic: needs {needed}\n")
    monkeypatch.setattr(toolchain, "commands", lambda arch: [])
    status, out, err = run("--arch", "gfx942")
    assert (status, out) == (1, "")
    assert err.startswith("attn build: needs a compiler for gfx942")
    assert err.endswith("got none [fa2.device-compiler]\n")


def test_json_is_one_object(asked: list[str]) -> None:
    status, out, err = run("--isa", "generic", "--isa", "avx2", "--isa", "generic", "--json")
    said = json.loads(out)
    assert (status, err, said["ok"]) == (1, "", False)
    assert [row["isa"] for row in said["builds"]] == ["generic", "avx2"]
    assert said["builds"][1]["error"] == "x.cpp:1: error: bad (log: /l) [fa2.build]"


@pytest.mark.parametrize("arguments", [("--isa", "mmx"), ("--isa", "generic", "--isa", "")])
def test_an_unknown_name_is_refused(asked: list[str], arguments: tuple[str, ...]) -> None:
    status, out, err = run(*arguments)
    assert (status, out, asked) == (2, "", [])
    assert "attn build: --isa: needs one of" in err
    assert "[fa2.isa]" in err
