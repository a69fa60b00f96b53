"""Builder and cache, on sources that compile in a second."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from attn_hip import build, cache, codes, isa
from attn_hip.host import Host, load

from . import small

GXX = shutil.which("g++")
pytestmark = pytest.mark.skipif(GXX is None, reason="needs g++")
NOBODY = 65534


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = small.write_sources(tmp_path / "src")
    monkeypatch.setattr(build, "_SOURCES", place)
    monkeypatch.setattr(build, "UNITS", small.UNITS)
    for name in ("CXX", build.COMPILER_VARIABLE, build.FLAGS_VARIABLE, isa.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    return place


def works() -> list[Path]:
    return list(cache.root().glob("work-*"))


def test_builds_once(sources: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    first = build.ensure("generic", lambda *step: seen.append(step))
    assert load(first).answer == 2
    assert [step[:2] for step in seen] == [(1, 3), (2, 3), (3, 3)]
    assert build.ensure("generic", lambda *step: pytest.fail("built again")) == first
    said = json.loads((first.parent / "manifest.json").read_text())
    assert said["size"] == first.stat().st_size
    assert said["isa"] == "generic"
    assert cache.root().stat().st_mode & 0o777 == 0o700
    assert first.stat().st_mode & 0o777 == 0o644
    assert works() == []


def test_a_changed_header_rebuilds_whatever_its_time_says(sources: Path) -> None:
    first = build.ensure("generic")
    header = sources / "two.h"
    header.write_text(header.read_text().replace("TWO 2", "TWO 3"))
    os.utime(header, (0, 0))
    second = build.ensure("generic")
    assert second.parent != first.parent
    assert load(second).answer == 3
    assert first.exists()
    (sources / "unused.h").write_text("still nobody")
    assert build.ensure("generic") == second


def test_changed_flags_rebuild(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build.ensure("generic")
    monkeypatch.setenv(build.FLAGS_VARIABLE, "-UTWO -O0")
    assert build.ensure("generic").parent != first.parent
    if "avx2" in isa.known():
        assert build.recipe("avx2").key(None) != build.recipe("generic").key(None)


def test_another_compiler_rebuilds(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build.ensure("generic")
    other = small.script(
        tmp_path / "cxx", f'[ "$1" = --version ] && echo "other 1.0" && exit\nexec {GXX} "$@"'
    )
    monkeypatch.setenv(build.COMPILER_VARIABLE, str(other))
    second = build.ensure("generic")
    assert second.parent != first.parent
    small.script(other, f'[ "$1" = --version ] && echo "other 2.00" && exit\nexec {GXX} "$@"')
    assert build.ensure("generic").parent not in (first.parent, second.parent)


@pytest.mark.parametrize("harm", ["cut", "empty", "flip", "gone", "manifest", "other name"])
def test_a_damaged_entry_is_built_again(sources: Path, harm: str) -> None:
    built = build.ensure("generic")
    data, listed = built.read_bytes(), built.parent / "manifest.json"
    if harm == "gone":
        built.unlink()
    elif harm == "manifest":
        listed.write_text(listed.read_text()[:20])
    elif harm == "other name":
        listed.write_text(json.dumps({**json.loads(listed.read_text()), "file": "../native.so"}))
    else:
        built.write_bytes({"cut": data[:-100], "empty": b"", "flip": b"\0" + data[1:]}[harm])
    assert build.existing("generic") is None
    again = build.ensure("generic")
    assert cache.find(build.recipe("generic").key(build.find_compiler())) == again
    assert again.stat().st_size == len(data)


def test_two_processes_at_once(sources: Path) -> None:
    both = [small.start(sources) for _ in range(2)]
    said = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert load(Path(said[0][0].strip())).answer == 2
    assert Path(said[1][0].strip()).exists()
    assert build.existing("generic") is not None
    assert works() == []


def test_a_killed_build_is_in_nobodys_way(sources: Path, tmp_path: Path) -> None:
    slow = small.script(tmp_path / "cxx", '[ "$1" = --version ] && echo slow && exit\nsleep 100')
    process = small.start(sources, ATTN_CXX=str(slow))
    until(lambda: any((work / "build.log").exists() for work in works()))
    small.kill(process)
    (left,) = works()
    assert load(build.ensure("generic")).answer == 2
    assert works() == [left]  # too young: it may be a build that is going on
    os.utime(left, (time.time() - 90000,) * 2)
    shutil.rmtree(build.ensure("generic").parent)
    build.ensure("generic")
    assert works() == []


def until(holds: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_no_compiler_is_a_reason_unless_something_is_built(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = os.environ["PATH"]
    monkeypatch.setenv(isa.VARIABLE, "generic")
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = Host().unavailable()
    assert reason is not None
    assert reason.code is codes.COMPILER
    assert "g++" in reason.text
    with pytest.raises(build.NoCompiler, match=r"^needs a C\+\+17 compiler \(g\+\+, .*\), got none that can"):
        build.ensure("generic")
    host = Host()
    assert host.prepare() == reason  # the same words, and each once
    monkeypatch.setenv("PATH", path)
    built = build.ensure("generic")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Host().unavailable() is None
    assert build.ensure("generic") == built
    assert Host().prepare() is None


def test_a_compiler_that_was_named_is_not_replaced(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.COMPILER_VARIABLE, "no-such-compiler")
    reason = Host().unavailable()
    assert reason is not None
    assert "ATTN_CXX=no-such-compiler" in reason.text


def test_a_failed_build_quotes_the_first_error_and_is_not_repeated(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    noisy = small.script(
        tmp_path / "cxx",
        f'[ "$1" = --version ] && echo noisy && exit\necho x >> {calls}\n'
        'i=0; while [ $i -lt 10000 ]; do echo "note: line $i"; i=$((i + 1)); done\n'
        "echo 'one.cpp:3:1: error: the first one'; echo 'one.cpp:4:1: error: the second'; exit 1",
    )
    monkeypatch.setenv(build.COMPILER_VARIABLE, str(noisy))
    monkeypatch.setenv(isa.VARIABLE, "generic")
    host = Host()
    assert host.unavailable() is None
    reason = host.prepare()
    assert reason is not None
    assert reason.code is codes.BUILD
    assert "one.cpp:3:1: error: the first one" in reason.text
    assert "second" not in reason.text
    assert len(reason.text) < 700
    (log,) = cache.root().glob("failed-*.log")
    assert str(log) in reason.text
    assert log.read_text().count("note: line") >= 10000
    assert works() == []
    before = calls.read_text()
    assert host.prepare() == reason
    assert calls.read_text() == before
    assert "failed" in host.state()
    monkeypatch.delenv(build.COMPILER_VARIABLE)
    host.forget()
    assert host.prepare() is None
    assert host.module().answer == 2


def test_a_module_that_does_not_load_is_a_reason(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sources / "two.cpp").write_text('#include "two.h"\n')
    monkeypatch.setenv(isa.VARIABLE, "generic")
    reason = Host().prepare()
    assert reason is not None
    assert reason.code is codes.BUILD
    assert "does not load" in reason.text


def test_a_directory_that_cannot_be_made_is_named(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.VARIABLE, "/proc/attn")
    monkeypatch.setenv(isa.VARIABLE, "generic")
    reason = Host().prepare()
    assert reason is not None
    assert reason.code is codes.CACHE
    assert cache.VARIABLE in reason.text
    assert "/proc/attn" in reason.text


def test_without_a_home_the_variable_is_named(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in (cache.VARIABLE, "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(cache.CacheError, match="ATTN_CACHE_DIR or HOME"):
        cache.root()
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache.root() == Path("/x/attn/attn-hip")


@pytest.fixture
def as_nobody() -> Iterator[None]:
    """Root may write anywhere, so be somebody else meanwhile."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    yield
    os.seteuid(0)


def test_a_directory_of_mode_0555(tmp_path: Path, sources: Path, request: pytest.FixtureRequest) -> None:
    place = tmp_path / "cache"
    place.mkdir(mode=0o555)
    for part in (tmp_path, *tmp_path.parents):
        if part.name.startswith("pytest-") or "pytest" in str(part.parent):
            part.chmod(part.stat().st_mode | 0o055)
    if os.geteuid() == 0:
        os.chown(place, NOBODY, NOBODY)
    request.getfixturevalue("as_nobody")
    with pytest.raises(cache.CacheError, match=r"ATTN_CACHE_DIR: a writable directory.*Permission denied"):
        build.ensure("generic")


def test_a_directory_others_can_write_to_is_not_trusted(sources: Path) -> None:
    build.ensure("generic")
    cache.root().chmod(0o777)
    with pytest.raises(cache.CacheError, match="others cannot write to"):
        build.ensure("generic")
    if os.geteuid() == 0:
        cache.root().chmod(0o700)
        os.chown(cache.root(), NOBODY, NOBODY)
        with pytest.raises(cache.CacheError, match="a directory of this user"):
            build.ensure("generic")


def test_an_instruction_set_this_cpu_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "supported", lambda: ("avx2", "generic"))
    monkeypatch.setenv(isa.VARIABLE, "avx512")
    with pytest.raises(
        ValueError, match=r"ATTN_CPU_ISA: needs one of avx2, generic.*got avx512 \[fa2\.isa\]"
    ):
        isa.chosen()
    monkeypatch.setenv(isa.VARIABLE, " AVX2 ")
    assert isa.chosen() == "avx2"


@pytest.mark.parametrize(
    ("vendor", "flags", "supported", "preferred"),
    [
        ("AuthenticAMD", "fma f16c avx2 avx512f avx512bw avx512dq avx512vl avx512_bf16", 4, "avx512bf16"),
        ("GenuineIntel", "fma f16c avx2 avx512f avx512bw avx512dq avx512vl avx512_bf16", 4, "avx512"),
        ("GenuineIntel", "fma f16c avx2 avx512f avx512bw avx512dq", 2, "avx2"),
        ("AuthenticAMD", "avx2 fma", 1, "generic"),
        ("", "", 1, "generic"),
    ],
)
def test_choice_by_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vendor: str, flags: str, supported: int, preferred: str
) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text(
        f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: {flags}\nprocessor\t: 1\nflags\t: x\n"
    )
    monkeypatch.setattr(isa, "_CPUINFO", info)
    monkeypatch.setattr(isa.platform, "machine", lambda: "x86_64")
    isa.supported.cache_clear()
    try:
        assert isa.supported() == tuple(isa.FLAGS)[-supported:]
        assert isa.preferred() == preferred
        monkeypatch.setattr(isa, "_CPUINFO", tmp_path / "none")
        isa.supported.cache_clear()
        assert isa.supported() == ("generic",)
        monkeypatch.setattr(isa.platform, "machine", lambda: "aarch64")
        assert isa.known() == ("generic",)
    finally:
        isa.supported.cache_clear()
