"""Code objects: built once, packed, refused when they are not of these sources; clear words when it fails."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from attn_core.target import DeviceTarget
from attn_hip import build, cache, device_build, gpu, plan, toolchain, variants
from attn_hip.build import BuildError, NoCompiler
from attn_hip.device_build import Built, Job
from attn_hip.variants import Variant

from .test_command import APP

KERNEL = """
extern "C" __attribute__((global)) void one(int* out) { *out = VALUE; }
"""
ONE = Variant("one", "one.cpp", ("VALUE=1",), "one", 64)


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (toolchain.AMD_VARIABLE, toolchain.NVIDIA_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    if not toolchain.compilers("gfx942"):
        pytest.skip("needs a compiler for gfx942")
    place = tmp_path / "src"
    place.mkdir()
    (place / "one.cpp").write_text(KERNEL)
    monkeypatch.setattr(build, "_SOURCES", place)
    monkeypatch.setattr(device_build, "PACKED", tmp_path / "packed")
    monkeypatch.setattr(gpu, "all_variants", lambda arch: (ONE,))
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    return place


def test_builds_once_and_again_for_other_sources(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_build.existing(ONE, "gfx942") is None
    first = device_build.ensure(ONE, "gfx942")
    row = Built(Job(ONE, "gfx942"), first, "x").row()
    assert (row["variant"], row["arch"], row["spills"], row["scratch"]) == ("one", "gfx942", 0, 0)
    monkeypatch.setattr(device_build, "_compile", lambda *_: pytest.fail("built again"))
    assert device_build.ensure(ONE, "gfx942") == first


def test_other_sources_and_defines_are_other_code_objects(sources: Path) -> None:
    before = device_build.content(ONE, "gfx942")
    other = Variant("one", "one.cpp", ("VALUE=2",), "one", 64)
    assert device_build.content(other, "gfx942") != before != device_build.content(ONE, "gfx950")
    (sources / "one.cpp").write_text(KERNEL + "// changed\n")
    assert device_build.content(ONE, "gfx942") != before


def test_a_packed_object_needs_no_compiler_until_the_sources_change(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device_build.pack([device_build.build(ONE, "gfx942")], device_build.PACKED)
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "empty"))
    monkeypatch.setattr(toolchain, "commands", lambda arch: [])
    found = device_build.ensure(ONE, "gfx942")
    assert found.parent == device_build.PACKED / "gfx942"
    assert device_build.missing("gfx942", [ONE]) is None
    found.write_bytes(found.read_bytes()[:-1])
    assert device_build.existing(ONE, "gfx942") is None
    (sources / "one.cpp").write_text(KERNEL + "// changed\n")
    with pytest.raises(NoCompiler, match=r"needs a compiler for gfx942 .* got none$"):
        device_build.ensure(ONE, "gfx942")
    assert "a compiler for gfx942" in str(device_build.missing("gfx942", [ONE]))


def test_a_compiler_that_cannot_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an old one that does not know the target: what is wanted and what is there, each once."""
    old = tmp_path / "amdclang++"
    old.write_text("#!/bin/sh\ncase $1 in --version) echo clang version 15.0.0;; *) exit 1;; esac\n")
    old.chmod(0o755)
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "empty"))
    monkeypatch.setenv(toolchain.AMD_VARIABLE, str(old))
    (variant,) = (v for v in gpu.all_variants("gfx942") if v.name == "append")
    made = gpu.Gpu()
    monkeypatch.setattr(gpu, "driver", lambda kind: None)
    reason = made.ready(None, DeviceTarget("hip", "gfx942", 304, 64), variant)
    assert reason is not None
    assert reason.text == (
        f"needs ATTN_HIP_CXX={old} to compile for gfx942, or code objects built ahead of time, got "
        "amdclang++, which cannot"
    )
    ran = CliRunner().invoke(APP, ["--arch", "gfx942"])
    needed = f"ATTN_HIP_CXX={old} to compile for gfx942, got amdclang++, which cannot"
    assert (ran.exit_code, ran.stderr) == (1, f"attn build: needs {needed} [fa2.device-compiler]\n")


def test_a_failed_build_quotes_the_compiler_and_stops_no_other(sources: Path) -> None:
    bad = Variant("bad", "one.cpp", ("VALUE=nonsense",), "one", 64)
    (_, failed), (_, made) = device_build.build_all([Job(bad, "gfx942"), Job(ONE, "gfx942")])
    assert isinstance(failed, BuildError)
    assert "bad for gfx942: " in str(failed)
    assert "undeclared identifier 'nonsense'" in str(failed)
    assert isinstance(made, Built)


def test_the_command_prints_a_row_per_variant(sources: Path, tmp_path: Path) -> None:
    place = tmp_path / "wheel"
    ran = CliRunner().invoke(APP, ["--arch", "gfx942", "--json", "--pack", str(place)])
    assert ran.exit_code == 0, ran.stderr
    (row,) = json.loads(ran.stdout)
    assert set(row) == {"variant", "arch", "compiler", "vgpr", "agpr", "sgpr", "lds", "scratch", "spills"}
    assert set(json.loads((place / "gfx942" / "index.json").read_text())) == {"one"}


def test_no_number_of_the_table_is_cut(sources: Path) -> None:
    asked = ["--arch", "gfx942"]
    (row,) = json.loads(CliRunner().invoke(APP, [*asked, "--json"]).stdout)
    ran = CliRunner().invoke(APP, asked, env={"COLUMNS": "30"})
    head, line = ran.stdout.splitlines()
    assert dict(zip(head.split(), line.split(), strict=True)) == {k: str(v) for k, v in row.items()}


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--arch", "gfx1"], 2, "[fa2.arch]"),
        (["--arch", "cpu,gfx942"], 2, "[fa2.arch]"),
        (["--arch", "gfx942", "--isa", "avx2"], 2, "[fa2.option]"),
        (["--compiler", "clang-19"], 2, "[fa2.option]"),
        (["--arch", "gfx942", "--compiler", "tcc"], 2, "--compiler: needs one of "),
    ],
)
def test_what_the_command_refuses(sources: Path, arguments: list[str], status: int, said: str) -> None:
    ran = CliRunner().invoke(APP, arguments)
    assert ran.exit_code == status
    assert said in ran.stderr


def test_which_tiles_join_their_partials() -> None:
    """Plans of low tiles launch once; whatever a tile is, one on AMD leaves it to the merge kernel."""
    assert {v.tile_q for v in variants.attend_variants("sm_90") if variants.joins_all(v)} == {16}
    assert all(variants.joins_all(v) for v in variants.attend_variants("sm_90") if v.tile_q == 16)
    assert {v.name.split("_")[3] for v in variants.attend_variants("sm_90") if v.joins == 2} == {"64", "128"}
    assert not any(v.joins for arch in ("gfx942", "gfx950") for v in variants.attend_variants(arch))


@pytest.mark.parametrize(("dim", "turns"), [(64, 4), (128, 2), (256, 1)])
def test_blocks_that_take_turns_are_as_many_as_shared_memory_holds(dim: int, turns: int) -> None:
    """One block less in all, where a multiprocessor has several; eager plans get all."""
    found = {v.name: v for v in variants.attend_variants("sm_90")}
    plain = found[f"attend_bf16_same_{dim}_16"]
    assert plain.turns == turns
    paired = {v for v in found.values() if v.name.endswith("_paired")}
    assert {(v.tile_q, v.turns, v.blocks, v.step, v.threads) for v in paired} == {(64, 1, 1, 128, 256)}
    tall = {found[f"attend_bf16_same_{d}_{tile}"] for d in (64, 128) for tile in (64, 128)}
    assert {(v.turns, v.blocks, v.step, v.threads) for v in tall} == {(2, 2, 64, 128)}
    others = {v for v in found.values() if "same" not in v.name or "256_64" in v.name}
    assert {(v.turns, v.blocks, v.step, v.threads) for v in others} == {(0, 2, 64, 128)}
    captured = SimpleNamespace(graph=object(), target=SimpleNamespace(num_cus=132))
    eager = SimpleNamespace(graph=None, target=captured.target)
    most = 132 * turns - (turns > 1)
    assert [plan._grid(captured, plain, n) for n in (1, most, most + 1, 5000)] == [1, most, most, most]
    assert plan._grid(eager, plain, 5000) == 5000
    assert plan._grid(captured, found["attend_bf16_same_128_64_paired"], 5000) == 132
    assert plan._grid(captured, found["attend_bf16_same_64_128"], 5000) == 263
    assert plan._grid(captured, found["attend_bf16_any_128_64"], 5000) == 5000
