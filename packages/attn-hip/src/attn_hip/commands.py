"""``attn build``: build the CPU kernels ahead of time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from attn_core.errors import needs

from . import build as builder
from . import cache, isa

_ALL = "all"
_FAILED, _BAD_INPUT = 1, 2


def build(
    names: Annotated[
        list[str] | None,
        typer.Option("--isa", help="Instruction set, or 'all'; may be repeated. By default this CPU's best."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Build the CPU kernels of attn-hip ahead of time.

    Sets that this CPU cannot run can be built too, for an image that other machines use. ATTN_CACHE_DIR,
    ATTN_CXX and ATTN_CXXFLAGS say where and with what.
    """
    try:
        wanted = _wanted(names or [])
    except ValueError as err:
        typer.echo(f"attn build: {err}", err=True)
        raise typer.Exit(_BAD_INPUT) from None
    rows = [_one(name, quiet=as_json) for name in wanted]
    if as_json:
        typer.echo(json.dumps({"ok": all(row["error"] is None for row in rows), "builds": rows}, indent=2))
    else:
        for row in rows:
            if row["error"] is not None:
                typer.echo(f"attn build: {row['isa']}: {row['error']}", err=True)
            else:
                typer.echo(f"{row['isa']}  {row['path']}  {row['seconds']} s")
    if any(row["error"] is not None for row in rows):
        raise typer.Exit(_FAILED)


def _wanted(names: list[str]) -> list[str]:
    if not names:
        return [isa.chosen()]
    known = isa.known()
    for name in names:
        if name != _ALL and name not in known:
            raise ValueError(needs("--isa", f"one of {', '.join((*known, _ALL))}", name, "fa2.isa"))
    return list(known) if _ALL in names else list(dict.fromkeys(names))


def _one(name: str, *, quiet: bool) -> dict[str, object]:
    """Build one instruction set; returns where it is, how long it took and what went wrong."""
    row: dict[str, object] = {"isa": name, "path": None, "seconds": None, "error": None}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[step]}"),
        TimeElapsedColumn(),
    )
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(f"building {name}", total=None, step="")

        def step(done: int, total: int, text: str) -> None:
            bar.update(task, completed=done, total=total, step=text)

        try:
            path: Path = builder.ensure(name, step)
        except (builder.BuildError, cache.CacheError) as err:
            row["error"] = str(err)
        else:
            row |= {"path": str(path), "seconds": cache.manifest(path.parent).get("seconds")}
    return row
