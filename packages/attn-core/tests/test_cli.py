"""The command itself: entry, help, usage errors, commands of other packages, the missing extra."""

import os
import subprocess
import sys
import types
from importlib.metadata import EntryPoint, version
from itertools import pairwise
from pathlib import Path

import pytest
import typer

from attn_core import cli
from attn_core.cli import mount

from .cli_kit import attn

PACKAGE = Path(cli.__file__).parents[1]


def python(code, *args, **env):
    """Run code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONWARNINGS": "ignore", **env},
    )


@pytest.fixture
def commands(monkeypatch):
    """Offer commands as other packages do: ``commands(name=object)``; an exception is raised on import."""

    def offer(**offered):
        points = []
        for name, what in offered.items():
            module = types.ModuleType(f"offered_{name}")
            module.command = what
            monkeypatch.setitem(sys.modules, module.__name__, module)
            points.append(EntryPoint(name, f"offered_{name}:command", mount.GROUP))
        monkeypatch.setattr(mount, "entry_points", lambda group: points if group == mount.GROUP else [])
        return points

    return offer


def test_version():
    result = attn("--version")
    assert result.exit_code == 0
    assert result.stdout == f"attn {version('attn-core')}\n"


@pytest.mark.parametrize("name", ["explain", "tune", "doctor", "reasons", "fuzz", "docs"])
def test_help_is_filled_to_the_terminal(name):
    """No type beside an option without a value, and no line broken where the docstring breaks."""
    said = attn(name, "--help").stdout
    assert "bool" not in said
    prose = [line.strip() for line in said.partition("╭")[0].splitlines()]
    for line, after in pairwise(prose):
        if line and after and not line.startswith("Usage"):
            assert len(line) + 1 + len(after.split()[0]) > 78, line


def test_no_command_prints_help():
    result = attn()
    assert result.exit_code == 0
    assert "explain" in result.stdout
    assert "doctor" in result.stdout


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["bogus"], "no such command 'bogus'"),
        (["explain", "--bogus"], "no such option: --bogus"),
        (["explain", "--op"], "--op"),
        (["explain", "decode"], "decode"),
        (["explain", "--op"], "'attn explain --help': option '--op' requires an argument"),
        (["--bogus"], "no such option: --bogus"),
    ],
)
def test_usage_error_is_one_line(args, told):
    result = attn(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert told in result.stderr
    assert result.stderr.endswith("[cli.usage]\n")
    assert "needs arguments as in 'attn" in result.stderr


def test_a_shell_completes_commands_and_options():
    def completed(words: str, at: int) -> list[str]:
        asked = {"_ATTN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(at)}
        code = f"import os; os.environ.update({asked}); from attn_core.cli import main; main()"
        return python(code).stdout.split()

    assert completed("attn ex", 1) == ["explain"]
    assert completed("attn explain --head", 2) == ["--heads", "--head-dim"]


def test_missing_extra_is_one_line():
    code = "import sys; sys.modules['typer'] = None; from attn_core.cli import main; main()"
    ran = python(code)
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr.count("\n") == 1
    assert "pip install 'attn-core[cli]'" in ran.stderr


def test_another_missing_module_is_not_taken_for_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "attn_core.cli.app", None)
    with pytest.raises(ModuleNotFoundError, match=r"attn_core\.cli\.app"):
        cli.main()


def test_help_needs_no_torch():
    """The package's own import is stood in for: the commands must add nothing to it."""
    code = """
import sys, types
package = types.ModuleType("attn_core")
package.__path__ = [sys.argv.pop(1)]
sys.modules["attn_core"] = package
from attn_core.cli import main
try:
    main()
except SystemExit as end:
    assert end.code == 0, end
assert "torch" not in sys.modules
"""
    ran = python(code, str(PACKAGE), "--help")
    assert ran.returncode == 0, ran.stderr
    assert "explain" in ran.stdout


def test_function_is_mounted(commands):
    def greet(name: str = "you") -> None:
        """Say hello."""
        typer.echo(f"hello {name}")

    commands(greet=greet)
    assert attn("greet", "--name", "gfx942").stdout == "hello gfx942\n"
    assert "Say hello." in attn("greet", "--help").stdout


def test_app_is_mounted_with_its_commands(commands):
    sub = typer.Typer()

    @sub.command()
    def one() -> None:
        typer.echo("one")

    @sub.command()
    def two() -> None:
        raise typer.Exit(7)

    commands(sub=sub)
    assert attn("sub", "one").stdout == "one\n"
    assert attn("sub", "two").exit_code == 7
    assert "two" in attn("sub", "--help").stdout
    wrong = attn("sub", "three")
    assert wrong.exit_code == 2
    assert wrong.stderr.startswith("attn sub: needs arguments as in 'attn sub --help': no such command")


def test_returned_value_is_no_exit_code(commands):
    def three() -> int:
        return 3

    commands(three=three)
    assert attn("three").exit_code == 0


def test_help_loads_no_command(commands, monkeypatch):
    (point,) = commands(late=lambda: None)
    monkeypatch.delitem(sys.modules, "offered_late")  # loading would now fail
    result = attn("--help")
    assert result.exit_code == 0
    assert "late" in result.stdout
    assert f"Command of {point.value}." in result.stdout


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('def command():\n    """Do it now.\n\n    More."""', "Do it now."),
        ('@command.callback()\ndef own():\n    """Many commands."""', "Many commands."),
        ('def other():\n    """Not this."""\n\ndef command(): ...', "Command of late_command:command."),
        ("def command(:", "Command of late_command:command."),
        ("b = 1\x00", "Command of late_command:command."),
    ],
)
def test_help_reads_the_summary_and_runs_nothing(tmp_path, monkeypatch, text, told):
    (tmp_path / "late_command.py").write_text(text + "\nraise RuntimeError('was run')\n")
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("late", "late_command:command", mount.GROUP)
    monkeypatch.setattr(mount, "entry_points", lambda group: [point])
    result = attn("--help")
    assert result.exit_code == 0, result.output
    assert told in result.stdout
    assert "late_command" not in sys.modules


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("raise ImportError('no libfoo.so')", "ImportError: no libfoo.so"),
        ("raise SystemExit('gave\\nup')", "SystemExit: gave up"),
        ("command = None", "TypeError: attn.commands: needs a function or a typer.Typer, got NoneType"),
        ("def command(x: 'NoSuchType'): pass", "NameError: name 'NoSuchType' is not defined"),
    ],
)
def test_command_that_fails_to_load_says_why(monkeypatch, tmp_path, fault, told):
    (tmp_path / "broken_command.py").write_text(fault)
    monkeypatch.syspath_prepend(tmp_path)
    point = EntryPoint("bad", "broken_command:command", mount.GROUP)
    monkeypatch.setattr(mount, "entry_points", lambda group: [point])
    for args in (["bad"], ["bad", "--help"], ["bad", "--anything", "at", "all"]):
        sys.modules.pop("broken_command", None)
        result = attn(*args)
        assert result.exit_code == 1
        assert result.stdout == ""
        assert result.stderr.count("\n") == 1
        assert result.stderr.startswith("attn bad: broken_command:command: needs to load, got ")
        assert told in result.stderr
    assert attn("reasons").exit_code == 0
    assert "bad" in attn("--help").stdout


@pytest.mark.parametrize("what", [3, type("NotACommand", (), {}), None])
def test_what_is_no_command_is_told(commands, what):
    commands(odd=what)
    result = attn("odd")
    assert result.exit_code == 1
    assert "needs a function or a typer.Typer, got " in result.stderr


def test_own_commands_cannot_be_replaced(commands):
    commands(doctor=lambda: typer.echo("mine"))
    assert attn("--help").stdout.count("doctor") == 1
    assert "mine" not in attn("doctor", "--help").stdout


def test_first_of_two_packages_has_the_name(monkeypatch):
    points = [EntryPoint("same", f"{owner}:command", mount.GROUP) for owner in ("zeta", "alpha")]
    monkeypatch.setattr(mount, "entry_points", lambda group: points)
    assert mount.mounted()["same"].value == "alpha:command"


def test_without_numpy_torch_has_nothing_to_say():
    program = "import sys; sys.modules['numpy'] = None; from attn_core.cli import main; main()"
    ran = subprocess.run(
        [sys.executable, "-c", program, "explain", "--op", "decode", "--page-size", "x"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.stderr == "attn explain: --page-size: needs a whole number, got 'x' [cli.page-size]\n"
