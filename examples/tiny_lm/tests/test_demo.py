import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from attn_tiny_lm import demo as module
from attn_tiny_lm.demo import cut, demo
from attn_tiny_lm.generate import Engine

app = typer.Typer()
app.command()(demo)


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def prompt(tmp_path, source):
    path = tmp_path / "prompt.py"
    path.write_bytes(source[:300])
    return path


def test_json_is_one_object_and_nothing_else(prompt):
    result = run("--prompt", prompt, "--tokens", 24, "--json")
    assert result.exit_code == 0
    summary = json.loads(result.stdout)
    assert summary["identical"] is True
    assert summary["accepted_per_step"] > 1
    assert summary["backend"] == summary["routes"]["verify"]["candidate"].split("/")[0]
    assert summary["ms_per_token_plain"] > 0
    assert summary["ms_per_token_spec"] > 0
    assert (summary["requests"], summary["tokens"]) == (4, 24)


def test_the_default_prompt_reports_text_routes_and_speed(monkeypatch):
    monkeypatch.setattr(module, "DEFAULT_PROMPT_CHARS", 200)
    result = run("--tokens", 16, "--drafts", 2, "--backend", "reference")
    assert result.exit_code == 0
    for expected in ("identical", "plain decode", "speculative verify", "reference/torch", "written 16"):
        assert expected in result.stdout, expected


def test_different_texts_give_exit_code_1(prompt, monkeypatch):
    plain = Engine.plain
    monkeypatch.setattr(Engine, "speculative", lambda self, p, n, drafts, bar=None: plain(self, p[::-1], n))
    result = run("--prompt", prompt, "--tokens", 8, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["identical"] is False


def check_refused(result, text):
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("attn demo: ")
    assert text in line


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--tokens", 0], "--tokens: needs at least 1, got 0"),
        (["--tokens", -3], "--tokens: needs at least 1, got -3"),
        (["--tokens", 9999], "--tokens: needs fewer than 2045 (context 2048, 3 drafts), got 9999"),
        (["--drafts", 0], "--drafts: needs at least 1, got 0"),
        (["--backend", "nonsense"], "--backend: needs one of auto"),
    ],
)
def test_a_bad_option_is_one_line_and_exit_code_2(prompt, arguments, told):
    check_refused(run("--prompt", prompt, *arguments), told)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "empty file"),
        (b"caf\xe9 = 1\n", "byte 0xe9 at 3"),
        (b"x" * 2048, "got 2048 [tiny-lm.context]"),
        (b"x" * ((1 << 20) + 1), "at most 1048576 bytes"),
    ],
)
def test_a_bad_prompt_is_one_line_and_exit_code_2(tmp_path, content, text):
    path = tmp_path / "prompt.py"
    path.write_bytes(content)
    check_refused(run("--prompt", path, "--json"), text)


def test_a_prompt_that_cannot_be_read_is_one_line_and_exit_code_2(tmp_path):
    check_refused(run("--prompt", tmp_path / "none.py"), "none.py")
    check_refused(run("--prompt", tmp_path), str(tmp_path))


def test_python_without_its_library_sources_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "stdlib_root", lambda: tmp_path)
    check_refused(run(), module.DEFAULT_PROMPT)


def test_prompts_are_cut_between_characters():
    assert cut("\u00e9\u00e8\u00ea\u00eb") == ["\u00e9\u00e8\u00ea\u00eb".encode()[:n] for n in (8, 6, 4, 2)]
    assert cut("a") == [b"a"] * 4


def test_control_characters_do_not_reach_the_terminal():
    assert module._printable(b"a\x1b[31m\n\tb\xff\x00") == "a\ufffd[31m\n\tb\ufffd\ufffd"


def test_equal_reasons_share_a_line():
    refused = [
        "a/x: needs a GPU, got cpu [core.arch]",
        "b/y: is slow [b.slow]",
        "a/z: needs a GPU, got cpu [core.arch]",
    ]
    assert module._grouped(refused) == "a/x, a/z: needs a GPU, got cpu [core.arch]\nb/y: is slow [b.slow]"
    assert module._grouped([]) == ""


def test_the_number_of_threads_is_put_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run("--tokens", 0)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
