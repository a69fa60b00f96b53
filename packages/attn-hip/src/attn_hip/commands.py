"""``attn build``: build kernels ahead of time, for this CPU or for any GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from attn_core.errors import needs

from . import build as builder
from . import cache, codes, device_build, gpu, isa, toolchain
from .device_build import Built, Job, Outcome

_ALL, _CPU = "all", "cpu"
_FAILED, _BAD_INPUT = 1, 2
_COLUMNS = ("variant", "arch", "compiler", "vgpr", "agpr", "sgpr", "lds", "scratch", "spills")


def build(
    archs: Annotated[
        str,
        typer.Option(
            "--arch", metavar="ARCH", help="cpu, gfx942, gfx950, sm_90, separated by commas; or 'all' GPUs."
        ),
    ] = _CPU,
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--isa",
            metavar="ISA",
            help="Of a CPU: instruction set, or 'all'; may be repeated. By default the best.",
        ),
    ] = None,
    compilers: Annotated[
        list[str] | None,
        typer.Option(
            "--compiler",
            metavar="NAME",
            help="Of a GPU: compiler, or 'all' there are; may be repeated. By default the first.",
        ),
    ] = None,
    place: Annotated[
        Path | None,
        typer.Option(
            "--pack", metavar="DIR", help="Of a GPU: also copy the code objects to DIR, for a wheel."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Build the kernels of attn-hip ahead of time.

    Sets that this CPU cannot run and GPUs that are not here can be built for, too. ATTN_CACHE_DIR says where;
    ATTN_CXX, ATTN_HIP_CXX, ATTN_NVCC and ATTN_CXXFLAGS say with what.
    """
    try:
        targets = _archs(archs)
        if targets == [_CPU]:
            _refuse("--compiler", compilers, "a GPU in --arch (ATTN_CXX names that of the CPU)")
            _refuse("--pack", place, "a GPU in --arch")
            wanted = _wanted(names or [])
        else:
            _refuse("--isa", names, "--arch cpu")
            jobs = _jobs(targets, compilers or [])
    except ValueError as err:
        typer.echo(f"attn build: {err}", err=True)
        raise typer.Exit(_BAD_INPUT) from None
    except builder.NoCompiler as err:
        typer.echo(f"attn build: {_coded(err, gpu=True)}", err=True)
        raise typer.Exit(_FAILED) from None
    failed = _for_cpu(wanted, as_json) if targets == [_CPU] else _for_gpus(jobs, place, as_json)
    if failed:
        raise typer.Exit(_FAILED)


def _refuse(option: str, given: object, want: str) -> None:
    if given:
        raise ValueError(needs(option, want, "none", "fa2.option"))


def _archs(text: str) -> list[str]:
    named = [name.strip() for name in text.split(",")]
    if named == [_ALL]:
        return list(toolchain.ARCHS)
    known = (*toolchain.ARCHS, _CPU)
    for name in named:
        if name not in known:
            raise ValueError(needs("--arch", f"names of {', '.join(known)}", repr(name), "fa2.arch"))
    if _CPU in named and len(named) > 1:
        raise ValueError(needs("--arch", "cpu alone, or GPUs", repr(text), "fa2.arch"))
    return list(dict.fromkeys(named))


def _jobs(archs: list[str], compilers: list[str]) -> list[Job]:
    """Return what to build: every variant of every arch, by every compiler asked for.

    Raises:
        builder.NoCompiler: An arch has no compiler, or not the one that was named.
    """
    jobs: list[Job] = []
    for arch in archs:
        able = [compiler.name for compiler in toolchain.compilers(arch)]
        if _ALL in compilers and able:
            chosen = able
        elif compilers and _ALL not in compilers:
            # With several targets a compiler may be meant for some of them.
            chosen = [name for name in compilers if name in able]
            if able and not chosen:
                want = f"one of {', '.join(able)} for {arch}"
                raise ValueError(needs("--compiler", want, repr(compilers[0]), "fa2.compiler-name"))
            chosen = chosen or [toolchain.find(arch).name]
        else:
            chosen = [toolchain.find(arch).name]
        jobs += [Job(variant, arch, name) for name in chosen for variant in gpu.all_variants(arch)]
    return jobs


@contextmanager
def _bar(quiet: bool) -> Iterator[Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[step]}"),
        TimeElapsedColumn(),
    )
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        yield bar


def _for_gpus(jobs: list[Job], place: Path | None, as_json: bool) -> bool:
    """Build code objects, print a row for each; returns whether any failed."""
    with _bar(as_json) as bar:
        task = bar.add_task("building code objects", total=len(jobs), step="")

        def done(job: Job) -> None:
            bar.update(task, advance=1, step=f"{job.variant.name} {job.arch}")

        outcomes = device_build.build_all(jobs, done)
    found = [result for _, result in outcomes if isinstance(result, Built)]
    _show(found, as_json)
    faults = _faults(outcomes)
    for fault in faults:
        typer.echo(f"attn build: {fault}", err=True)
    if place is not None and not faults:
        try:
            folders = device_build.pack(found, place)
        except OSError as err:
            typer.echo(f"attn build: {needs('--pack', 'a folder to write into', err, 'fa2.pack')}", err=True)
            return True
        if not as_json:
            for folder in folders:
                typer.echo(f"packed {folder}")
    return bool(faults)


def _faults(outcomes: list[Outcome]) -> list[str]:
    """Return what went wrong, each cause once."""
    return list(
        dict.fromkeys(_coded(found, gpu=True) for _, found in outcomes if not isinstance(found, Built))
    )


def _coded(err: Exception, *, gpu: bool) -> str:
    """Return what a build says of its failure, with the code that a plan() would give as its reason."""
    if isinstance(err, cache.CacheError):
        code = codes.CACHE
    elif isinstance(err, builder.NoCompiler):
        code = codes.DEVICE_COMPILER if gpu else codes.COMPILER
    else:
        code = codes.DEVICE_BUILD if gpu else codes.BUILD
    return f"{err} [{code.slug}]"


def _show(found: list[Built], as_json: bool) -> None:
    rows = [one.row() for one in found]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    # As wide as it must be, whatever the terminal: a number that is cut is a wrong number.
    lines = [_COLUMNS, *(tuple(str(row.get(name, "")) for name in _COLUMNS) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [f"{text:{'<' if n < 3 else '>'}{widths[n]}}" for n, text in enumerate(line)]
        typer.echo("  ".join(cells).rstrip())


def _wanted(names: list[str]) -> list[str]:
    if not names:
        return [isa.chosen()]
    known = isa.known()
    for name in names:
        if name != _ALL and name not in known:
            raise ValueError(needs("--isa", f"one of {', '.join((*known, _ALL))}", name, "fa2.isa"))
    return list(known) if _ALL in names else list(dict.fromkeys(names))


def _for_cpu(wanted: list[str], as_json: bool) -> bool:
    """Build native modules, say where they are; returns whether any failed."""
    rows = [_one(name, quiet=as_json) for name in wanted]
    if as_json:
        typer.echo(json.dumps({"ok": all(row["error"] is None for row in rows), "builds": rows}, indent=2))
    else:
        failed: dict[object, list[str]] = {}
        for row in rows:
            if row["error"] is not None:
                failed.setdefault(row["error"], []).append(str(row["isa"]))
            else:
                typer.echo(f"{row['isa']}  {row['path']}  {row['seconds']} s")
        for error, names in failed.items():  # each cause once
            typer.echo(f"attn build: {', '.join(names)}: {error}", err=True)
    return any(row["error"] is not None for row in rows)


def _one(name: str, *, quiet: bool) -> dict[str, object]:
    """Build one instruction set; returns where it is, how long it took and what went wrong."""
    row: dict[str, object] = {"isa": name, "path": None, "seconds": None, "error": None}
    with _bar(quiet) as bar:
        task = bar.add_task(f"building {name}", total=None, step="")

        def step(done: int, total: int, text: str) -> None:
            bar.update(task, completed=done, total=total, step=text)

        try:
            path: Path = builder.ensure(name, step)
        except (builder.BuildError, cache.CacheError) as err:
            row["error"] = _coded(err, gpu=False)
        else:
            row |= {"path": str(path), "seconds": cache.manifest(path.parent).get("seconds")}
    return row
