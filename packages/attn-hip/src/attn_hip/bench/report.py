"""Results as a table, as lines, as CSV and as JSON."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table

from attn_core.errors import needs
from attn_hip import isa

from .cells import DIM, PAGE, Cell
from .measure import CONTIGUOUS, FA2, FLEX, GATHER, PEERS, READ, Result

_CALLS = (FA2, GATHER, CONTIGUOUS, FLEX, READ)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A cell that was not measured, and why."""

    cell: Cell
    reason: str


def machine() -> str:
    """Name the CPU, the instruction set that fa2 uses on it, and torch."""
    name = isa.cpu("model name") or "unknown CPU"
    return f"{name}, {isa.chosen()}, torch {torch.__version__}"


def table(results: Sequence[Result]) -> Table:
    """Return one line per cell."""
    made = Table(title=f"fa2 on {results[0].threads} CPU thread(s), page {PAGE}, head_dim {DIM}")
    made.add_column("cell", no_wrap=True)
    for name in ("fa2 ms", "GB/s", "of read", "GFLOP/s", "x gather", "x contig.", "x Flex", "error"):
        made.add_column(name, justify="right", no_wrap=True)
    for r in results:
        ratios = (_times(r.ratio(peer)) for peer in PEERS)
        made.add_row(
            r.cell.label, f"{r.ms[FA2]:.2f}", f"{r.gb_s:.1f}", f"{r.read_share:.0%}", f"{r.gflop_s:.0f}",
            *ratios, f"{r.error:.0e}",
        )  # fmt: skip
    return made


def markdown(results: Sequence[Result]) -> str:
    """Return the table for a document."""
    lines = [
        "| cell | fa2 ms | GB/s | of read | GFLOP/s | x gather | x contiguous | x Flex |",
        "| --- |" + " ---: |" * 7,
    ]
    for r in results:
        figures = (f"{r.ms[FA2]:.2f}", f"{r.gb_s:.1f}", f"{r.read_share:.0%}", f"{r.gflop_s:.0f}")
        ratios = (_times(r.ratio(peer)) for peer in PEERS)
        lines.append(f"| {' | '.join((r.cell.label, *figures, *ratios))} |")
    return "\n".join(lines) + "\n"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def summary(results: Sequence[Result]) -> list[dict[str, object]]:
    """Return geometric means per operation and type."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for r in results:
        groups.setdefault((r.cell.op, r.cell.kind), []).append(r)
    return [
        {
            "op": op,
            "kind": kind,
            "cells": len(found),
            "over": {peer: _mean([r.ratio(peer) for r in found]) for peer in PEERS},
            "of_read": _mean([r.read_share for r in found]),
        }
        for (op, kind), found in groups.items()
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.geometric_mean(known), 3) if known else None


def summary_lines(results: Sequence[Result]) -> list[str]:
    """Return the summary as text."""
    lines = []
    for row in summary(results):
        over = row["over"]
        assert isinstance(over, Mapping)
        parts = [f"{value:.2f}x {peer}" for peer, value in over.items() if value is not None]
        lines.append(
            f"{row['op']} {row['kind']}: {', '.join(parts)}, {row['of_read']:.0%} of the read rate "
            f"(geometric mean of {row['cells']})"
        )
    return lines


def row(result: Result) -> dict[str, object]:
    """Return one result as plain values; also the columns of the CSV."""
    c = result.cell
    return {
        "label": c.label, "op": c.op, "kind": c.kind, "num_qo_heads": c.num_qo_heads, "batch": c.batch,
        "q_len": c.q_len, "kv_len": " ".join(str(n) for n in sorted(set(c.kv_lens))), "kv_bytes": c.kv_bytes,
        "threads": result.threads,
        **{f"{name} ms": _rounded(result.ms.get(name)) for name in _CALLS},
        **{f"{name} samples": result.samples.get(name) for name in _CALLS},
        "error": float(f"{result.error:.3g}"),
    }  # fmt: skip


def _rounded(ms: float | None) -> float | None:
    return None if ms is None else round(ms, 4)


def csv_text(results: Sequence[Result], about: str) -> str:
    """Return the rows with the machine's name in each, so that files of several can be put together."""
    text = io.StringIO()
    rows = [{**row(result), "machine": about} for result in results]
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def kept(path: Path, cells: Sequence[Cell], about: str, threads: int) -> dict[str, Result]:
    """Read the results of an earlier run on this machine, with so many threads, back from its CSV, by label.

    Raises:
        ValueError: The file is not one that :func:`csv_text` made.
    """
    by_label = {cell.label: cell for cell in cells}
    found: dict[str, Result] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for said in csv.DictReader(file):
            try:
                cell = by_label.get(said["label"])
                if cell is not None and (said["machine"], int(said["threads"])) == (about, threads):
                    found[cell.label] = _read(cell, said)
            except (KeyError, TypeError, ValueError) as err:
                raise ValueError(needs(str(path), "rows of attn bench cpu", repr(err), "fa2.bench")) from None
    return found


def _read(cell: Cell, said: Mapping[str, str]) -> Result:
    ms = {name: float(said[f"{name} ms"]) for name in _CALLS if said[f"{name} ms"]}
    samples = {name: int(said[f"{name} samples"]) for name in ms}
    return Result(cell, ms, samples, float(said["error"]), int(said["threads"]))


def write(path: Path, text: str) -> None:
    """Write a file at once."""
    path.write_text(text, encoding="utf-8")
