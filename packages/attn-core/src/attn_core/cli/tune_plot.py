"""The picture of ``attn tune``: time ratio of two candidates over q_len, and where it crosses 1."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import needs
from ..measured import Pair

MISSING = needs(
    "plot", "matplotlib (pip install matplotlib)", "none; the figures are in the file", "cli.tune-plot"
)
_COLOURS = ("#440154", "#31688e", "#35b779", "#d8a800", "#b5367a", "#777777")


class NoPlot(RuntimeError):
    """The picture cannot be drawn; the text says why."""


def draw(pairs: Sequence[Pair], path: Path) -> None:
    """Draw one panel per pair and layer.

    Raises:
        NoPlot: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as err:
        raise NoPlot(MISSING) from err
    columns = min(len(pairs), 3)
    rows = -(-len(pairs) // columns)
    figure = Figure(figsize=(6.4 * columns, 4.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    for number, axis in enumerate(axes.flat):
        if number < len(pairs):
            _panel(axis, pairs[number])
        else:
            axis.set_visible(False)
    facts = dict(pairs[0].provenance)
    figure.suptitle(f"{facts['device']}, {facts['date']}", fontsize=9, color="#555555")
    try:
        figure.savefig(path, dpi=130)
    except OSError as err:
        raise NoPlot(needs("plot", "a writable file", f"{path}: {err.strerror}", "cli.tune-plot")) from err


def _panel(axis: Any, pair: Pair) -> None:
    first, second = pair.candidates
    scope = pair.scope
    many = len({bucket.batch_size for bucket in pair.buckets}) > 1
    ratios = [1.0]
    for number, bucket in enumerate(pair.buckets):
        colour = _COLOURS[number % len(_COLOURS)]
        x = [cell.q_len for cell in bucket.cells]
        y = [cell.seconds[1] / cell.seconds[0] for cell in bucket.cells]
        label = f"kv_len {bucket.kv_len}" + (f", batch {bucket.batch_size}" if many else "")
        axis.plot(x, y, marker="o", markersize=4, linewidth=1.5, color=colour, label=label)
        for q_len, _ in bucket.steps[1:]:
            axis.plot([q_len], [1.0], "D", markersize=7, color=colour, markeredgecolor="white", zorder=5)
            # In turns above and below, since crossovers of neighbours lie close together.
            height = (7, -14, 18, -25)[number % 4]
            beside = {"xytext": (0, height), "textcoords": "offset points", "ha": "center", "fontsize": 8}
            axis.annotate(str(q_len), (q_len, 1.0), color=colour, **beside)
        ratios += y
    axis.axhline(1.0, color="black", linewidth=1)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    low, high = min(ratios) / 1.3, max(ratios) * 1.3
    axis.set_ylim(low, high)
    axis.axhspan(1.0, high, color="#2a9d5c", alpha=0.07, linewidth=0)
    axis.axhspan(low, 1.0, color="#d1495b", alpha=0.07, linewidth=0)
    side = {"transform": axis.transAxes, "fontsize": 9, "rotation": 270, "ha": "left"}
    axis.text(1.012, 1.0, f"{first} faster", va="top", color="#1d6b3f", **side)
    axis.text(1.012, 0.0, f"{second} faster", va="bottom", color="#9b2c3c", **side)
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axis.set_xlabel("q_len (query rows per request)")
    axis.set_ylabel(f"time of {second} / time of {first}")
    page = f", page {scope.page_size}" if scope.page_size else ""
    title = (
        f"{scope.op} on {pair.arch}: heads {scope.num_qo_heads}/{scope.num_kv_heads}, {scope.q_dtype}{page}"
    )
    batch = "" if many else f", batch {pair.buckets[0].batch_size}"
    axis.set_title(title + batch, fontsize=10)
    axis.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axis.legend(fontsize=8, loc="best")
