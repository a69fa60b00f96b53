"""Commands of other packages, loaded when they are called and not before."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from ..errors import needs
from .output import BAD_INPUT, give_up, one_line, told

GROUP = "attn.commands"

# The parent of BadParameter is click's UsageError, whether typer depends on click or carries its own.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def mounted() -> Mapping[str, EntryPoint]:
    """Return the commands that installed packages add, by name, from metadata alone.

    Two packages with one name: the first in alphabetical order of the packages has it.
    """
    found: dict[str, EntryPoint] = {}
    for ep in sorted(entry_points(group=GROUP), key=lambda ep: (ep.name, source(ep))):
        found.setdefault(ep.name, ep)
    return found


def source(ep: EntryPoint) -> str:
    """Return ``distribution version`` of an entry point, or where it points when it has none."""
    return ep.value if ep.dist is None else f"{ep.dist.name} {ep.dist.version}"


def summary(ep: EntryPoint) -> str:
    """Return the first line of a command's docstring, read from its source: no module of the command runs.

    Of a Typer app it is its callback's. Where there is none, or no source, the package is named instead.
    """
    try:
        body = ast.parse(_source_file(ep.module).read_bytes()).body
    except (ImportError, OSError, SyntaxError, ValueError):
        body = []
    for node in body:
        if isinstance(node, ast.FunctionDef) and _is_command(node, ep.attr):
            text = ast.get_docstring(node)
            if text:
                return text.splitlines()[0]
    return f"Command of {source(ep)}."


def _source_file(module: str) -> Path:
    """Find a module's file beside its top-level package; asking for a submodule imports what is above it."""
    top, *rest = module.split(".")
    spec = find_spec(top)
    origin = Path(spec.origin if spec and spec.origin else "")
    place = origin.parent.joinpath(*rest) if rest else origin
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def _is_command(node: ast.FunctionDef, attr: str) -> bool:
    return node.name == attr or f"{attr}.callback()" in map(ast.unparse, node.decorator_list)


class MountingGroup(TyperGroup):
    """The group ``attn``: its own commands first, then those of other packages."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options before the command's name."""
        return _untyped(super().get_params(ctx))

    def list_commands(self, ctx: Any) -> list[str]:
        """Name every command; loads none."""
        own = list(super().list_commands(ctx))
        return own + [name for name in mounted() if name not in own]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; one of another package is a stand-in that loads it when it is called."""
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return tidy(own, ctx)
        ep = mounted().get(cmd_name)
        return None if ep is None else _Deferred(ep)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Parse the arguments before the command's name."""
        try:
            return super().make_context(info_name, args, parent, **extra)
        except _UsageError as err:
            _tell_usage(err, "attn")
            raise

    def invoke(self, ctx: Any) -> Any:
        """Parse the command's own arguments and run it."""
        try:
            return super().invoke(ctx)
        except _UsageError as err:
            _tell_usage(err, " ".join(["attn", *filter(None, [ctx.invoked_subcommand])]))
            raise


class _Deferred(TyperCommand):
    """A command known by name and package only."""

    def __init__(self, ep: EntryPoint) -> None:
        super().__init__(name=ep.name, help=summary(ep), add_help_option=False)
        self._ep = ep

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Load the real command and let it parse; from here on the stand-in has no part."""
        return tidy(_load(self._ep), parent).make_context(info_name, args, parent, **extra)


def tidy(command: Any, ctx: Any) -> Any:
    """Return a command whose help fits the terminal, not its source file.

    Typer keeps the line breaks of a docstring, which then fall into the middle of a line.
    """
    command.help = "\n\n".join(" ".join(part.split()) for part in (command.help or "").split("\n\n"))
    _untyped(command.get_params(ctx))
    for each in getattr(command, "commands", {}).values():
        tidy(each, ctx)
    return command


def _untyped(params: list[Any]) -> list[Any]:
    """Of options that take no value, name no type in the help."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


def _load(ep: EntryPoint) -> Any:
    """Return the command an entry point names, or say why not and exit 1."""
    try:
        return _command(ep.name, ep.load())
    except (Exception, SystemExit) as err:  # a package that gives up on import must not look like success
        give_up(ep.name, needs(source(ep), "to load", told(err), "cli.command"), 1)


def _command(name: str, loaded: object) -> Any:
    if isinstance(loaded, typer.Typer):
        return typer.main.get_command(loaded)
    if not inspect.isroutine(loaded):
        raise TypeError(needs(GROUP, "a function or a typer.Typer", type(loaded).__name__, "cli.command"))
    app = typer.Typer(add_completion=False)
    app.command(name)(loaded)
    return typer.main.get_command(app)


def _tell_usage(err: Any, command: str) -> None:
    """Say a parser's complaint on one line; a request for help (a bare group) is left as it is.

    Args:
        err: The complaint.
        command: Whose it is, where the parser does not say.
    """
    if type(err).__name__ == "NoArgsIsHelpError":
        return
    where = err.ctx.command_path if err.ctx is not None else command
    said = one_line(err.format_message()).rstrip(".")
    # The parser says what it got in a sentence of its own, so this one is not put as "got ...".
    text = f"{where}: needs arguments as in '{where} --help': {said[:1].lower()}{said[1:]} [cli.usage]"
    typer.echo(text, err=True)
    raise typer.Exit(BAD_INPUT) from None
