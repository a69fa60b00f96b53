"""Looking at an installation without importing it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from attn_aiter import codes, probe
from attn_aiter.backend import AiterBackend
from attn_aiter.versions import version
from attn_core.target import DeviceTarget

Install = Callable[..., Path]
BOMB = "raise SystemExit('imported')"


def test_nothing_installed() -> None:
    assert probe.look().cause == (codes.NOT_INSTALLED, "0.1.20", "none")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("0.1.20", None),
        ("0.1.20+rocm10.1.0a20260819.3135022", None),
        ("0.1.21.dev3", None),
        ("0.1.20.dev12", codes.TOO_OLD),
        ("0.1.7.post2.dev18", codes.TOO_OLD),
    ],
)
def test_version_decides(install: Install, monkeypatch: pytest.MonkeyPatch, text: str, code: object) -> None:
    monkeypatch.syspath_prepend(install(text, body=BOMB))
    found = probe.look()
    assert found.text == text
    assert (found.cause[0] if found.cause else None) == code
    if found.cause is not None:
        assert found.cause[1:] == ("0.1.20", text)
    assert "aiter" not in sys.modules


def test_the_floor_can_be_lowered(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(install("0.1.10"))
    assert probe.look(floor="0.1.10").cause is None
    assert probe.look(floor="0.1.11").cause is not None


def test_the_other_package_called_aiter(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(install("0.13.0", distribution="aiter", body=BOMB))
    assert probe.look().cause == (codes.FOREIGN, "amd-aiter", "aiter 0.13.0")


def test_a_source_tree_without_metadata(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(install(None))
    assert probe.look().cause == (codes.VERSION_UNKNOWN, "0.1.20", "no metadata")


def test_a_version_nobody_can_read(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(install("main"))
    assert probe.look().cause == (codes.VERSION_UNKNOWN, "0.1.20", "'main'")


def test_the_causes_are_different_codes() -> None:
    causes = (codes.WRONG_ARCH, codes.NOT_INSTALLED, codes.FOREIGN, codes.VERSION_UNKNOWN, codes.TOO_OLD)
    assert len({code.slug for code in causes}) == len(causes)


def test_signatures_are_read_from_the_files(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {
        "aiter__ops__mha": "def mha_batch_prefill_func(q, k, *, out=None): ...",
        "aiter__ops__triton__attention__unified_attention": (
            "def unified_attention(q, window_size=(-1, -1)): ..."
        ),
        "aiter_meta__csrc__cpp_itfs__pa__pa_v1": "def compile(gqa_ratio: int, folder: str = None): ...",
    }
    root = install("0.1.20", body=BOMB, **tree)
    (root / "aiter_meta/csrc/cpp_itfs/pa/pa_v1.cpp.jinja").write_text(
        'extern "C" {\nvoid {{func_name}}(void* out_ptr,\n    const float   scale);\n}'
    )
    monkeypatch.syspath_prepend(root)
    api = probe.read(probe.look())
    assert api.functions["batch_prefill"].parameters == (("q", None), ("k", None), ("out", "None"))
    assert api.functions["unified"].module == "aiter.ops.triton.attention.unified_attention"
    assert api.functions["unified"].default("window_size") == "(-1, -1)"
    assert "varlen" not in api.functions
    assert api.pa_v1_arguments == ("void* out_ptr", "const float scale")
    assert "aiter" not in sys.modules


def test_a_file_that_does_not_parse_is_a_function_that_is_not_there(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(install("0.1.20", aiter__ops__mha="def ("))
    assert probe.read(probe.look()).functions == {}


def test_an_assumed_version_takes_the_newest_recording_before_it() -> None:
    api = probe.read(probe.look("0.1.12", floor="0.1.7"))
    assert api.assumed
    assert api.text == "0.1.12"
    assert api.functions == probe.recorded(version("0.1.10")).functions


def test_an_assumed_version_older_than_all_recordings() -> None:
    with pytest.raises(ValueError, match=r"needs 0.1.7.post2.dev18 or newer"):
        probe.read(probe.look("0.1.6", floor="0.1.0"))


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match=r"got asume_version \[aiter.option\]"):
        AiterBackend({"asume_version": "0.1.20"})
    with pytest.raises(ValueError, match=r"\[aiter.version\]"):
        AiterBackend({"assume_version": "latest"})


def test_the_device_comes_before_the_package(gfx942: DeviceTarget) -> None:
    backend = AiterBackend({"assume_version": "none"})
    for target in (DeviceTarget("cpu", "cpu"), DeviceTarget("cuda", "sm_90"), DeviceTarget("hip", "gfx90a")):
        found = backend.unavailable(target)
        assert found is not None
        assert found.code == codes.WRONG_ARCH
        assert found.code.quiet
    found = backend.unavailable(gfx942)
    assert found is not None
    assert found.code == codes.NOT_INSTALLED
    assert not found.code.quiet


def test_discovery_imports_no_aiter(install: Install) -> None:
    root = install("0.1.20", body=BOMB)
    code = (
        "import sys; from attn_core import plugins; r = plugins.discover(config={})\n"
        "assert 'aiter' in [b.name for b in r.backends], r.broken\n"
        "assert not [m for m in sys.modules if m.split('.')[0] == 'aiter']\n"
        "assert {t.arch: (t.num_cus, t.wave_size) for t in r.targets if t.arch.startswith('gfx')}.items() >= "
        "{'gfx942': (304, 64), 'gfx950': (256, 64)}.items()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(root), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
