"""The ratios as a picture."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from .measure import CONTIGUOUS, FLEX, GATHER, Result

MARKS = {GATHER: ("o", "#2a6f97"), CONTIGUOUS: ("s", "#e07a1f"), FLEX: ("^", "#5a8f29")}
_ROW_INCHES, _FRAME_INCHES = 0.2, 1.6


def available() -> bool:
    """Whether the drawing library is installed; asked before anything is measured."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(path: Path, results: Sequence[Result], about: str) -> None:
    """Draw one row per cell: how many times faster than each peer. The line at 1 is the peer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter

    figure, axes = plt.subplots(figsize=(9, _FRAME_INCHES + _ROW_INCHES * len(results)), layout="constrained")
    for peer, (mark, colour) in MARKS.items():
        points = [(ratio, at) for at, r in enumerate(results) if (ratio := r.ratio(peer)) is not None]
        if points:
            xs, ys = zip(*points, strict=True)
            axes.scatter(xs, ys, marker=mark, color=colour, s=24, label=f"over {peer}", zorder=3)
    axes.axvline(1, color="black", linewidth=0.9)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_formatter(FuncFormatter(lambda x, _: f"{x:g}" if f"{x:e}"[0] in "25" else ""))
    axes.tick_params(axis="x", which="both", labelsize=8)
    axes.set_yticks(range(len(results)), [r.cell.label for r in results], fontsize=7, family="monospace")
    axes.set_ylim(len(results) - 0.5, -0.5)
    axes.grid(axis="both", which="major", linewidth=0.4, alpha=0.6)
    for at in range(1, len(results)):
        if (results[at].cell.op, results[at].cell.kind) != (
            results[at - 1].cell.op,
            results[at - 1].cell.kind,
        ):
            axes.axhline(at - 0.5, color="grey", linewidth=0.8)
    axes.set_xlabel(
        "times faster (log); rows: operation, type, query/KV heads, batch x q_len x kv_len", fontsize=8
    )
    axes.set_title(f"fa2 on {results[0].threads} CPU thread(s): {about}", fontsize=9)
    figure.legend(loc="outside lower center", ncols=len(MARKS), fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)
