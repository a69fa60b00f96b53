"""``attn tune``: measure, write, and say what was found. The measuring itself is in :mod:`attn_core.tune`."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .. import plugins, tuned
from ..errors import needs
from ..measured import Pair, Scope
from ..plugins import Registry
from ..thresholds import Limit, Never, Row
from ..tune import check, fit
from ..tune.sweep import Failure, Found, Report, sweep
from ..tune.timing import Timer, timer_for
from ..tune.workload import Shape
from .doctor import device_name
from .installed import installed
from .tune_grid import Grid


@dataclass(frozen=True, slots=True)
class Gate:
    """A threshold as measured, and what it replaces."""

    row: Row
    before: Row | None


@dataclass(slots=True)
class Outcome:
    """What one run found.

    Attributes:
        grid: What was asked for.
        pairs: What was measured, ready to be written.
        gates: Thresholds of the pairs' rules.
        failures: Cells that could not be measured.
        path: Overlay file, when one was written.
        plot: Picture, when one was drawn.
        plot_fault: Why none was.
    """

    grid: Grid
    pairs: list[Pair] = field(default_factory=list)
    gates: list[Gate] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    path: Path | None = None
    plot: Path | None = None
    plot_fault: str | None = None


@dataclass(slots=True)
class Checked:
    """What ``--check`` found."""

    grid: Grid
    overlay: Path | None
    judged: list[check.Judged]
    failures: list[Failure]


def registry_for(overlay: Path | None) -> Registry:
    """Return the backends, with one overlay file in force; the process's own when none is named."""
    if overlay is None:
        return installed()
    with tuned.using(overlay):
        return plugins.discover()


def place(out: Path | None) -> Path:
    """Return where the overlay is to be written.

    Raises:
        ValueError: Nowhere, or onto a file that is not one.
    """
    path = out or tuned.location()
    if path is None:
        raise ValueError(needs("--out", f"a file, since {tuned.VARIABLE} is off", "none", "cli.tune-out"))
    previous(path)
    return path


def previous(path: Path) -> tuned.Tuned:
    """Return what a file holds already; measurements are added to it.

    Raises:
        ValueError: It is not an overlay file: it would be lost.
    """
    try:
        return tuned.read(path)
    except FileNotFoundError:
        return tuned.EMPTY
    except (OSError, ValueError) as err:
        want = "a file of attn tune to add to, or none"
        raise ValueError(needs("--out", want, err, "cli.tune-out")) from err


def measure(wanted: Grid, registry: Registry, timer: Timer | None = None) -> Outcome:
    """Measure every pair on every layer.

    Raises:
        WrongResult: A candidate computed something else than the reference.
        RuntimeError: No cell could be measured.
    """
    outcome = Outcome(wanted)
    timer = timer or timer_for(wanted.device)
    with _progress(wanted.cells) as report:
        for names in wanted.pairs:
            found = [
                sweep(p, names, wanted.shapes, wanted.device, timer, report, refine=wanted.refine)
                for p in wanted.problems
            ]
            outcome.failures += [failure for one in found for failure in one.failures]
            outcome.pairs += [_pair(wanted, names, one, registry) for one in found if one.buckets]
            outcome.gates += _gates(wanted, names, found, registry)
    if not outcome.pairs:
        first = outcome.failures[0]
        want = "at least one cell that both candidates serve"
        raise RuntimeError(needs("tune", want, f"{first.candidate}: {first.text}", "core.tune-failed"))
    return outcome


def write(outcome: Outcome, path: Path) -> None:
    """Add the measurements to the overlay file, as a whole or not at all.

    Raises:
        OSError: It cannot be written.
        ValueError: What is there is no overlay file.
    """
    rows, pairs = tuned.merged(previous(path), [gate.row for gate in outcome.gates], outcome.pairs)
    tuned.save(path, tuned.text_of(rows, pairs))
    outcome.path = path


def regret(wanted: Grid, registry: Registry, overlay: Path | None, timer: Timer | None = None) -> Checked:
    """Measure how far ``auto`` is from the fastest candidate.

    Raises:
        WrongResult: A candidate computed something else than the reference.
        RuntimeError: No cell could be measured.
    """
    names = [name for pair in wanted.pairs for name in pair]
    checked = Checked(wanted, overlay, [], [])
    timer = timer or timer_for(wanted.device)
    before = plugins.use(registry)
    try:
        with _progress(len(wanted.problems) * len(wanted.shapes)) as report:
            for problem in wanted.problems:
                scoped = [
                    n for pair in registry.measured.about(wanted.target, problem) for n in pair.candidates
                ]
                some, failures = check.judge(
                    problem, names or scoped, wanted.shapes, wanted.device, timer, report
                )
                checked.judged += some
                checked.failures += failures
    finally:
        plugins.use(before)
    if not checked.judged:
        first = checked.failures[0]
        want = "at least one cell that auto's choice serves"
        raise RuntimeError(needs("tune", want, f"{first.candidate}: {first.text}", "core.tune-failed"))
    return checked


@contextmanager
def _progress(cells: int) -> Iterator[Report]:
    """A bar on stderr, where that is a terminal, with the time left and the last ratio."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("cells, left"),
        TimeRemainingColumn(), TextColumn("{task.fields[last]}"),
    )  # fmt: skip
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("measuring", total=cells, last="")
        done = 0

        def report(shape: Shape, seconds: dict[str, float]) -> None:
            nonlocal done
            done += 1
            texts = [f"{name} {value * 1e6:.0f} us" for name, value in seconds.items()]
            # Refining adds cells as it goes.
            bar.update(
                task, completed=done, total=max(cells, done), last=f"{shape}: {', '.join(texts) or 'failed'}"
            )

        yield report


def _pair(wanted: Grid, names: tuple[str, str], found: Found, registry: Registry) -> Pair:
    provenance = tuple(_provenance(wanted, registry).items())
    buckets = tuple(found.buckets)
    target = wanted.target
    return Pair(names, target.arch, target.num_cus, Scope.of(found.problem), buckets, provenance, "attn tune")


def _gates(wanted: Grid, names: tuple[str, str], found: Sequence[Found], registry: Registry) -> list[Gate]:
    """Thresholds of the rules that decline one candidate of the pair, by the statistic of those shipped."""
    gates = []
    buckets = [bucket for one in found for bucket in one.buckets]
    for backend in registry.backends:
        for rule in backend.rules:
            gated = [name for name in names if name in {f"{backend.name}/{path}" for path in rule.paths}]
            if rule.gate in (None, "verdict") or wanted.problems[0].op not in rule.ops or len(gated) != 1:
                continue
            verdict = fit.threshold(buckets, str(rule.gate), names.index(gated[0]))
            if verdict is not None:
                table = getattr(backend, "thresholds", None)
                before = None if table is None else table.find(rule.code.slug, wanted.target.arch)
                gates.append(Gate(_row(wanted, rule.code.slug, str(rule.gate), verdict, registry), before))
    return gates


def _row(wanted: Grid, slug: str, gate: str, verdict: Limit | Never, registry: Registry) -> Row:
    facts = _provenance(wanted, registry)
    facts["statistic"] = f"largest {gate} at which the worst time ratio exceeds 1.03; {facts['statistic']}"
    kept = tuple((name, facts[name]) for name in ("source", "statistic", "grid", "versions"))
    return Row(slug, wanted.target.arch, verdict, "measured", kept, "attn tune")


def _provenance(wanted: Grid, registry: Registry) -> dict[str, str]:
    scopes = [Scope.of(problem) for problem in wanted.problems]
    sizes = {
        name: ",".join(str(size) for size in sorted({getattr(shape, name) for shape in wanted.shapes}))
        for name in ("batch_size", "q_len", "kv_len")
    }
    layer = {k: v for k, v in asdict(scopes[0]).items() if k not in ("num_qo_heads", "num_kv_heads")}
    heads = ",".join(f"{scope.num_qo_heads}/{scope.num_kv_heads}" for scope in scopes)
    return {
        "kind": "measured",
        "source": "attn tune on this machine",
        "statistic": "median of 3 samples in alternating turns, every cell checked against the reference",
        "grid": f"heads {heads}; " + "; ".join(f"{k} {v}" for k, v in {**sizes, **layer}.items()),
        "versions": ", ".join(f"{name} {text}" for name, text in versions(registry).items()),
        "device": device_name(wanted.device),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def versions(registry: Registry) -> dict[str, str]:
    """Return the versions that a measurement depends on."""
    found = {"torch": str(torch.__version__), "threads": str(torch.get_num_threads())}
    for source in sorted({*registry.sources.values(), "attn-core"}):
        name, _, stated = source.partition(" ")
        try:
            found[name] = stated or version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found
