"""What the commands share: where text goes, how JSON is written, how a command gives up."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import NoReturn

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

BAD_INPUT = 2
_OPTIONS = {
    "arch": "--arch",
    "backend": "--backend",
    "num_qo_heads": "--heads",
    "num_kv_heads": "--heads",
    "head_dim_qk": "--head-dim",
    "head_dim_vo": "--head-dim",
    "q_data_type": "--dtype",
    "kv_data_type": "--kv-dtype",
    "o_data_type": "--o-dtype",
    "pos_encoding_mode": "--pos-encoding",
    "logits_soft_cap": "--soft-cap",
    "window_left": "--window",
    "latent": "--latent",
}
"""Which option is to blame, by the argument that the library names."""
_WIDEST = 120  # a table stretched over a wide screen is harder to read, not easier


def show(what: RenderableType) -> None:
    """Print on stdout, as wide as the terminal up to 120 columns, without blanks at line ends."""
    width = min(Console().width, _WIDEST)
    console = Console(width=width, highlight=False, markup=False, emoji=False)
    with console.capture() as text:
        console.print(what)
    typer.echo("\n".join(line.rstrip() for line in text.get().splitlines()))


def grid(*widths: int | None) -> Table:
    """Return an empty table without lines.

    Args:
        *widths: Columns of each cell; None takes what is left and wraps.
    """
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    for width in widths:
        if width is None:
            table.add_column(ratio=1, overflow="fold")
        else:
            table.add_column(width=width, overflow="fold")
    return table


def styled(text: object, style: str) -> Text:
    """Return text whose style ends with it: that of a whole cell would colour the blanks behind it too."""
    return Text().append(str(text), style)


def heading(text: str) -> Text:
    """Return the title of a section."""
    return styled(text, "bold")


def say_json(value: object) -> None:
    """Print one JSON object, and nothing else, on stdout."""
    typer.echo(json.dumps(plain(value), indent=2))


def plain(value: object) -> object:
    """Return a value as JSON can hold it; what it cannot hold becomes its text."""
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(str(plain(item)) for item in value)
    return str(value).removeprefix("torch.")


def one_line(text: object) -> str:
    """Return text with every run of white space as one space."""
    return " ".join(str(text).split())


def told(err: BaseException) -> str:
    """Return an exception on one line, with its type."""
    return f"{type(err).__name__}: {one_line(err) or 'no message'}"


def give_up(command: str, text: object, code: int = BAD_INPUT) -> NoReturn:
    """Print one line on stderr and end the command.

    Raises:
        typer.Exit: Always, with ``code``.
    """
    typer.echo(one_line(f"attn {command}: {text}"), err=True)
    raise typer.Exit(code)


@contextmanager
def refusing(command: str) -> Iterator[None]:
    """Turn the refusal of an argument raised inside into one line and exit code 2."""
    try:
        yield
    except (ValueError, TypeError, NotImplementedError) as err:
        argument, colon, rest = str(err).partition(":")
        give_up(command, _OPTIONS.get(argument, argument) + colon + rest)
