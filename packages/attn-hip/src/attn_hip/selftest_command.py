"""``attn selftest``: check the kernels of this machine's device and write a report."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from attn_core.errors import needs
from attn_core.target import target_of

from . import selftest as checks

_FAILED, _BAD_INPUT = 1, 2


def selftest(
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="DEVICE",
            help="cpu, cuda, cuda:1 ...; by default the first GPU, else the CPU.",
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Also write the report, as JSON, to this file."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON and nothing else.")
    ] = False,
) -> None:
    """Check every fa2 kernel of a device against the oracle.

    Exit 1 if one disagrees or cannot run. On an AMD GPU please send the report: none was available to the
    authors.
    """
    try:
        where = _device(device)
    except ValueError as err:
        typer.echo(f"attn selftest: {err}", err=True)
        raise typer.Exit(_BAD_INPUT) from None
    found = checks.report(where, _run(where, quiet=as_json))
    text = json.dumps(found, indent=2)
    if to is not None:
        try:
            to.write_text(text + "\n", encoding="utf-8")
        except OSError as err:
            said = needs("--report", "a file to write", err, "fa2.report")
            typer.echo(f"attn selftest: {said}", err=True)
            raise typer.Exit(_BAD_INPUT) from None
    if as_json:
        typer.echo(text)
    else:
        _show(found, to)
    if found["failed"]:
        raise typer.Exit(_FAILED)


def _device(name: str | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(needs("--device", "cpu or cuda[:N]", repr(name), "fa2.device-name")) from None
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", 0)
    here = torch.cuda.device_count() if device.type == "cuda" else int(device.type == "cpu")
    if (device.index or 0) >= here:
        raise ValueError(needs("--device", "a device of this machine", repr(name), "fa2.device-name"))
    return device


def _run(device: torch.device, *, quiet: bool) -> list[checks.Result]:
    console = Console(file=sys.stderr)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[kernel]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("checking kernels", total=checks.total(target_of(device)), kernel="")
        return checks.run(device, lambda result: bar.update(task, advance=1, kernel=result.kernel))


def _show(found: dict[str, object], to: Path | None) -> None:
    device, results = found["device"], found["results"]
    assert isinstance(device, dict)
    assert isinstance(results, list)
    for row in results:
        if row["ok"]:
            figures = f"error {row['error']:.1e}"
            if row["lse_error"] is not None:
                figures += f", lse {row['lse_error']:.1e}"
            typer.echo(f"ok      {row['kernel']:26} {figures}")
            continue
        said = row["said"]
        # A machine that lacks something lacks it for every kernel.
        alike = [other for other in results if said and other["said"] == said] or [row]
        if row is alike[0]:
            kernels = ", ".join(dict.fromkeys(other["kernel"] for other in alike))
            typer.echo(f"FAILED  {kernels:26} {said or 'wrong: error ' + str(row['error'])}")
            if len(alike) == 1:
                typer.echo(f"        {row['about']}")
    typer.echo(f"{found['passed']} of {len(results)} checks passed on {device['name']} ({device['arch']})")
    if to is not None:
        typer.echo(f"report: {to}")
    if found["note"]:
        typer.echo(str(found["note"]))
