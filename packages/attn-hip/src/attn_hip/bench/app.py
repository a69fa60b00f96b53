"""The command ``attn bench``."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from attn_core.errors import needs
from attn_hip.host import Host

from . import plot as plotting
from . import report
from .cells import DTYPES, OPS, Cell, grid
from .measure import Effort, Result, Wrong, measure

app = typer.Typer(add_completion=False, no_args_is_help=True)
_FAILED, _BAD_INPUT = 1, 2
_QUICK, _FULL = Effort(1.2, 3, 9), Effort(4.0, 3, 21)
_CODE = "fa2.bench"


@app.callback()
def bench() -> None:
    """Measure the kernels of attn-hip against what a user would run instead."""


@app.command()
def cpu(
    quick: Annotated[bool, typer.Option("--quick", help="A dozen cells, in two minutes on 2 cores.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="OP", help=f"Of {', '.join(OPS)}; may be repeated. By default all."),
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(metavar="DTYPE", help=f"Of {', '.join(DTYPES)}; may be repeated. By default all."),
    ] = None,
    match: Annotated[str, typer.Option(metavar="TEXT", help="Only cells whose label holds this text.")] = "",
    threads: Annotated[
        int | None, typer.Option(metavar="N", help="Threads of every call. By default torch's.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(metavar="S", help="Seconds per cell; there are three rounds however long.")
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(metavar="GIB", help="GiB to use at most. By default half of what is available."),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(metavar="MIN", help="Start no cell after so long; what is left is listed.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the rows that --csv already has.")] = False,
    flex: Annotated[bool, typer.Option(help="Ask FlexAttention too, where a cell says so.")] = True,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the rows to this file, after every cell.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the table to this file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the ratios to this file (matplotlib).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Compare fa2 on this CPU with torch's attention over the same keys and values.

    Peers take turns in one process: scaled_dot_product_attention over gathered pages and over contiguous
    keys, compiled FlexAttention over a paged cache (compiling is not timed), and a plain read of the bytes.
    Every answer is checked against a float64 oracle first. Figures are medians; ratios are of one process.
    """
    try:
        cells = chosen(grid(quick), only or [], kind or [], match)
        _check(
            {"--threads": threads, "--seconds": seconds, "--memory": memory, "--minutes": minutes},
            (csv, markdown, plot),
            plot,
        )
        if threads is not None:
            torch.set_num_threads(threads)
        earlier = _earlier(csv, cells, resume=resume)
    except ValueError as err:
        _give_up(str(err), _BAD_INPUT)
    if (reason := Host().prepare()) is not None:
        _give_up(str(reason), _FAILED)
    effort = _QUICK if quick else _FULL
    if seconds is not None:
        effort = Effort(seconds, effort.least, effort.most)
    room = available_bytes() // 2 if memory is None else int(memory * 2**30)
    fitting, skipped = fit(cells, room)
    try:
        with redirect_stdout(sys.stderr):  # compilers talk
            results, late = _run(
                [cell for cell in fitting if cell.label not in earlier],
                lambda cell: measure(cell, effort, with_flex=flex),
                lambda found: _keep_rows(csv, fitting, earlier | found),
                until=None if minutes is None else time.monotonic() + 60 * minutes,
                quiet=as_json,
            )
    except Wrong as err:
        _give_up(str(err), _FAILED)
    every = _ordered(fitting, earlier | results)
    _tell(every, skipped + late, as_json=as_json)
    if every:
        _keep(every, csv, markdown, plot)


def chosen(cells: Sequence[Cell], ops: Sequence[str], kinds: Sequence[str], match: str) -> list[Cell]:
    """Return the cells that are asked for, in order.

    Raises:
        ValueError: A name is unknown, or nothing is left.
    """
    for option, names, known in (("--only", ops, OPS), ("--kind", kinds, tuple(DTYPES))):
        for name in names:
            if name not in known:
                raise ValueError(needs(option, f"one of {', '.join(known)}", name, _CODE))
    left = [
        c for c in cells if (not ops or c.op in ops) and (not kinds or c.kind in kinds) and match in c.label
    ]
    if not left:
        raise ValueError(needs("--only, --kind and --match", "some cells", "none", _CODE))
    return left


def fit(cells: Sequence[Cell], room: int) -> tuple[list[Cell], list[report.Skipped]]:
    """Part the cells into those that fit ``room`` bytes, and those that do not."""
    fitting: list[Cell] = []
    skipped: list[report.Skipped] = []
    for cell in cells:
        if cell.need_bytes <= room:
            fitting.append(cell)
        else:
            reason = f"needs {cell.need_bytes / 2**30:.1f} GiB of memory, got {room / 2**30:.1f}"
            skipped.append(report.Skipped(cell, reason))
    return fitting, skipped


def available_bytes() -> int:
    """Return the memory that Linux can give without swapping; without /proc, all there is."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _check(numbers: Mapping[str, float | None], files: Sequence[Path | None], plot: Path | None) -> None:
    """Refuse before anything is measured what would fail, or mean nothing, after it."""
    for option, value in numbers.items():
        if option == "--threads" and value is not None and value < 1:
            raise ValueError(needs(option, "1 or more", value, _CODE))
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(needs(option, "more than 0", value, _CODE))
    for file in files:
        if file is not None and not file.absolute().parent.is_dir():
            raise ValueError(needs(str(file), "a directory that exists", file.absolute().parent, _CODE))
    if plot is not None and not plotting.available():
        raise ValueError(needs("--plot", "matplotlib", "none installed", _CODE))


def _earlier(csv: Path | None, cells: Sequence[Cell], *, resume: bool) -> dict[str, Result]:
    if not resume:
        return {}
    if csv is None:
        raise ValueError(needs("--resume", "--csv with the file to go on with", "none", _CODE))
    return report.kept(csv, cells, report.machine(), torch.get_num_threads()) if csv.exists() else {}


def _run(
    cells: Sequence[Cell],
    measured: Callable[[Cell], Result],
    keep: Callable[[dict[str, Result]], None],
    *,
    until: float | None,
    quiet: bool,
) -> tuple[dict[str, Result], list[report.Skipped]]:
    """Measure cell by cell, keeping the rows after each; returns results by label, and what time forbade."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(file=sys.stderr)
    results: dict[str, Result] = {}
    late: list[report.Skipped] = []
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("", total=len(cells))
        for cell in cells:
            if until is not None and time.monotonic() > until:
                late.append(report.Skipped(cell, "the minutes are over"))
                continue
            bar.update(task, description=cell.label)
            results[cell.label] = measured(cell)
            keep(results)
            bar.advance(task)
    return results, late


def _ordered(cells: Sequence[Cell], results: Mapping[str, Result]) -> list[Result]:
    return [results[cell.label] for cell in cells if cell.label in results]


def _keep_rows(csv: Path | None, cells: Sequence[Cell], results: Mapping[str, Result]) -> None:
    if csv is not None:
        report.write(csv, report.csv_text(_ordered(cells, results), report.machine()))


def _tell(results: Sequence[Result], skipped: Sequence[report.Skipped], *, as_json: bool) -> None:
    about = report.machine()
    if as_json:
        said = {
            "machine": about,
            "threads": torch.get_num_threads(),
            "rows": [report.row(result) for result in results],
            "summary": report.summary(results),
            "skipped": [{"label": left.cell.label, "reason": left.reason} for left in skipped],
        }
        typer.echo(json.dumps(said, indent=2))
        return
    console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=140)
    console.print(about)
    if results:
        console.print(report.table(results))
    for line in report.summary_lines(results):
        console.print(line)
    for left in skipped:
        console.print(f"skipped {left.cell.label}: {left.reason}")


def _keep(results: Sequence[Result], csv: Path | None, markdown: Path | None, plot: Path | None) -> None:
    about = report.machine()
    if csv is not None:
        report.write(csv, report.csv_text(results, about))
    if markdown is not None:
        report.write(markdown, report.markdown(results))
    if plot is not None:
        plotting.draw(plot, results, about)


def _give_up(text: str, code: int) -> NoReturn:
    typer.echo(f"attn bench cpu: {text}", err=True)
    raise typer.Exit(code)
