"""The guarded import: every way it is known to fail, once, without side effects."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from attn_aiter import load

Install = Callable[..., Path]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("raise RuntimeError('ROCm version file\\nnot found')", "RuntimeError: ROCm version file not found"),
        ("raise SystemExit('build failed')", "SystemExit: build failed"),
        ("import no_such_module_of_torch_abi", "ModuleNotFoundError: No module named"),
        ("raise ImportError('undefined symbol: _ZN3c103hip')", "ImportError: undefined symbol"),
    ],
)
def test_a_failed_import_is_one_line_and_leaves_the_path_alone(
    install: Install, monkeypatch: pytest.MonkeyPatch, body: str, text: str
) -> None:
    monkeypatch.syspath_prepend(install(body=f"import sys\nsys.path.insert(0, '/aiter/jit/utils')\n{body}"))
    before = list(sys.path)
    with pytest.raises(load.Failed) as caught:
        load.function("aiter.ops.mha", "flash_attn_varlen_func")
    assert str(caught.value).startswith(text)
    assert "\n" not in str(caught.value)
    assert sys.path == before


def test_the_verdict_is_kept(install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "log"
    body = f"with open({str(log)!r}, 'a') as f:\n    f.write('x')\nraise RuntimeError('no')"
    monkeypatch.syspath_prepend(install(body=body))
    for _ in range(3):
        with pytest.raises(load.Failed, match="no"):
            load.function("aiter", "f")
    assert log.read_text() == "x"


def test_a_long_message_is_cut() -> None:
    text = load.one_line(RuntimeError("x" * 1000))
    assert len(text) == 200
    assert text.endswith("...")


def test_an_interrupt_is_the_users(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(
        install(body="import sys\nsys.path.insert(0, '/junk')\nraise KeyboardInterrupt")
    )
    with pytest.raises(KeyboardInterrupt):
        load.function("aiter", "f")
    assert "/junk" not in sys.path
    with pytest.raises(KeyboardInterrupt):  # not a verdict
        load.function("aiter", "f")


def test_what_the_import_puts_in_front_goes_to_the_end(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = install(body="import sys\nsys.path.insert(0, '/aiter/jit/utils')", aiter__ops__mha="def f(): ...")
    monkeypatch.syspath_prepend(root)
    first = sys.path[0]
    assert callable(load.function("aiter.ops.mha", "f"))
    assert sys.path[0] == first
    assert sys.path[-1] == "/aiter/jit/utils"


def test_a_function_that_is_not_there(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(install(aiter__ops__mha="f = 1"))
    with pytest.raises(load.Failed, match="AttributeError"):
        load.function("aiter.ops.mha", "g")
    with pytest.raises(load.Failed, match="not callable"):
        load.function("aiter.ops.mha", "f")


@pytest.mark.parametrize(("value", "strict"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_strict_is_an_environment_variable(monkeypatch: pytest.MonkeyPatch, value: str, strict: bool) -> None:
    monkeypatch.setenv(load.STRICT_VARIABLE, value)
    assert load.strict() is strict
