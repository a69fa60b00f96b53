"""The steps of ``attn tune``, and what each fault of one ends with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import tuned
from ..errors import NoRoute, needs
from ..plugins import Registry
from ..tune import check as regret
from ..tune.sweep import WrongResult
from . import tune as run
from . import tune_plot, tune_view
from .output import BAD_INPUT, give_up, one_line, refusing, say_json, show
from .tune_grid import Grid, Wanted, grid

INTERRUPTED = 130


def tune(
    given: Mapping[str, Any], *, check: bool, dry_run: bool, out: Path | None, plot: Path | None, json: bool
) -> int:
    """Run the command; returns the exit code.

    Args:
        given: Options of the grid.
        check: Compare ``auto`` instead of writing.
        dry_run: Only say what would be done.
        out: Overlay file.
        plot: Picture.
        json: Print one JSON object.
    """
    with refusing("tune"):
        if check and (dry_run or plot is not None):
            other = "--dry-run" if dry_run else "--plot"
            raise ValueError(needs("--check", "no other thing to do", other, "cli.tune-check"))
        if check and out is not None:
            tuned_or_refused(out)
        registry = run.registry_for(out if check else None)
        wanted = grid(Wanted(**given), registry, pairs_needed=not check or not registry.measured)
        path = out if check else run.place(out)
    if dry_run:
        assert path is not None
        _tell(json, tune_view.planned_json(wanted, path), tune_view.planned(wanted, path))
        return 0
    try:
        if check:
            return _check(wanted, registry, path, json=json)
        assert path is not None
        return _measure(wanted, registry, path, plot, json=json)
    except KeyboardInterrupt:
        give_up("tune", "interrupted; nothing was written", INTERRUPTED)
    except WrongResult as err:
        give_up("tune", f"{err}; nothing was written", 1)


def tuned_or_refused(path: Path) -> None:
    """Refuse a file that could not be in force: the check would be of something else.

    Raises:
        ValueError: It cannot be read or is not valid.
    """
    try:
        tuned.read(path)
    except OSError as err:
        raise ValueError(needs("--out", "a readable file", one_line(err), "cli.tune-out")) from err


def _measure(wanted: Grid, registry: Registry, path: Path, plot: Path | None, *, json: bool) -> int:
    try:
        outcome = run.measure(wanted, registry)
    except RuntimeError as err:
        if isinstance(err, WrongResult):
            raise
        give_up("tune", f"{err}; nothing was written", 1)
    try:
        run.write(outcome, path)
    except OSError as err:
        want = "a file in a writable directory"
        give_up("tune", needs("--out", want, f"{path}: {err.strerror or err}", "cli.tune-out"), BAD_INPUT)
    picture = plot or path.with_name(f"{path.stem}-{wanted.problems[0].op.value}-{wanted.target.arch}.png")
    try:
        tune_plot.draw(outcome.pairs, picture)
        outcome.plot = picture
    except tune_plot.NoPlot as err:
        outcome.plot_fault = str(err)
    _tell(json, tune_view.as_json(outcome), tune_view.render(outcome))
    return 0


def _check(wanted: Grid, registry: Registry, overlay: Path | None, *, json: bool) -> int:
    try:
        checked = run.regret(wanted, registry, overlay)
    except NoRoute as err:
        give_up("tune", err, 1)
    except RuntimeError as err:
        if isinstance(err, WrongResult):
            raise
        give_up("tune", err, 1)
    _tell(json, tune_view.check_json(checked), tune_view.render_check(checked))
    return 0 if regret.good(checked.judged) else 1


def _tell(json: bool, value: object, text: Any) -> None:
    if json:
        say_json(value)
    else:
        show(text)
