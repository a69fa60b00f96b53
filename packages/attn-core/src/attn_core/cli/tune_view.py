"""What ``attn tune`` found, as text for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..measured import Bucket, Pair
from ..thresholds import Limit, Row
from ..tune import check
from ..tune.sweep import Failure
from .output import heading, styled
from .tune import Checked, Outcome
from .tune_grid import Grid


def planned(wanted: Grid, path: object) -> RenderableType:
    """Return what a run would measure and write."""
    shapes = wanted.shapes
    heads = ", ".join(f"{p.num_qo_heads}/{p.num_kv_heads}" for p in wanted.problems)
    rows = [
        ("device", f"{wanted.target}"),
        ("layer", f"{wanted.problems[0].op.value}, heads {heads}"),
        *(("pair", f"{a} against {b}") for a, b in wanted.pairs),
        ("batch", _listed(s.batch_size for s in shapes)),
        ("kv_len", _listed(s.kv_len for s in shapes)),
        ("q_len", _listed(s.q_len for s in shapes)),
        ("cells", f"{wanted.cells}{' and those that site a crossover' if wanted.refine else ''}"),
        ("would write", str(path)),
    ]
    return Group(heading("Nothing was measured (--dry-run)."), _facts(rows))


def planned_json(wanted: Grid, path: object) -> dict[str, object]:
    """Return the same as one object."""
    return {
        "dry_run": True,
        "device": str(wanted.target),
        "pairs": wanted.pairs,
        "heads": [f"{p.num_qo_heads}/{p.num_kv_heads}" for p in wanted.problems],
        "shapes": [asdict(shape) for shape in wanted.shapes],
        "cells": wanted.cells,
        "out": str(path),
    }


def _listed(values: Iterable[int]) -> str:
    return ", ".join(str(value) for value in sorted(set(values)))


def _facts(rows: Sequence[tuple[str, str]]) -> RenderableType:
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, value in rows:
        table.add_row(styled(name, "dim"), Text(value, overflow="fold"))
    return Padding(table, (0, 0, 0, 2))


def render(outcome: Outcome) -> RenderableType:
    """Return a table of ratios and the verdicts, pair by pair."""
    parts: list[RenderableType] = []
    for pair in outcome.pairs:
        parts += [_title(pair), _ratios(pair), *_verdicts(pair), Text()]
    for gate in outcome.gates:
        was = (
            "not measured before" if gate.before is None else f"was {limit(gate.before)}, {gate.before.kind}"
        )
        line = f"gate {gate.row.code} on {gate.row.arch}: {limit(gate.row)} ({was})"
        parts.append(Text(line))
    parts += _failures(outcome.failures)
    if outcome.path is not None:
        parts.append(Text.assemble("Wrote ", (str(outcome.path), "bold"), "; routing reads it from now on."))
    if outcome.plot is not None:
        parts.append(Text.assemble("Drew ", (str(outcome.plot), "bold"), "."))
    if outcome.plot_fault is not None:
        parts.append(styled(outcome.plot_fault, "yellow"))
    return Group(*parts)


def limit(row: Row) -> str:
    """Return a row's limit as the file has it."""
    return f"{row.verdict.value:g}" if isinstance(row.verdict, Limit) else "never"


def _title(pair: Pair) -> RenderableType:
    s = pair.scope
    page = f", page_size {s.page_size}" if s.page_size else ""
    facts = (
        f"{s.op} on {pair.arch}, heads {s.num_qo_heads}/{s.num_kv_heads}, {s.q_dtype}{page}, mask {s.mask}"
    )
    names = Text.assemble((pair.candidates[0], "bold green"), " against ", (pair.candidates[1], "bold cyan"))
    return Group(Text.assemble(names, (f"  {facts}", "dim")))


def _ratios(pair: Pair) -> RenderableType:
    """Rows by q_len, columns by batch and kv_len: how many times faster, and in whose colour."""
    many = len({bucket.batch_size for bucket in pair.buckets}) > 1
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("q_len", justify="right")
    for bucket in pair.buckets:
        batch = f"batch {bucket.batch_size}, " if many else ""
        table.add_column(f"{batch}kv_len {bucket.kv_len}", justify="right")
    for q_len in sorted({cell.q_len for bucket in pair.buckets for cell in bucket.cells}):
        table.add_row(str(q_len), *(_ratio(bucket, q_len) for bucket in pair.buckets))
    note = f"time of {pair.candidates[1]} over time of {pair.candidates[0]}; above 1 the latter is faster"
    return Padding(Group(table, styled(note, "dim")), (0, 0, 0, 2))


def _ratio(bucket: Bucket, q_len: int) -> Text:
    for cell in bucket.cells:
        if cell.q_len == q_len:
            value = cell.seconds[1] / cell.seconds[0]
            digits = f"{value:.2f}" if value >= 0.1 else f"{value:.1g}"
            return styled(digits, "green" if value >= 1 else "cyan")
    return Text("")


def _verdicts(pair: Pair) -> list[RenderableType]:
    many = len({bucket.batch_size for bucket in pair.buckets}) > 1
    lines: list[RenderableType] = []
    for bucket in pair.buckets:
        batch = f"batch {bucket.batch_size}, " if many else ""
        lines.append(Text(f"  {batch}kv_len {bucket.kv_len}: {verdict(bucket)}"))
    return lines


def verdict(bucket: Bucket) -> str:
    """Return a bucket's step function in words."""
    if len(bucket.steps) == 1:
        return f"{bucket.steps[0][1]} at every q_len measured"
    ends = [q_len - 1 for q_len, _ in bucket.steps[1:]]
    parts = [f"{name} up to q_len {end}" for (_, name), end in zip(bucket.steps, ends, strict=False)]
    last_q, last = bucket.steps[-1]
    return f"{', then '.join(parts)}, {last} from {last_q}"


def _failures(failures: Sequence[Failure]) -> list[RenderableType]:
    """One line per candidate and cause, with the number of cells."""
    told: dict[tuple[str, str], list[Failure]] = {}
    for failure in failures:
        told.setdefault((failure.candidate, failure.text), []).append(failure)
    return [
        styled(f"Not measured in {len(some)} cells, the first at {some[0].shape}: {name}: {text}", "yellow")
        for (name, text), some in told.items()
    ]


def as_json(outcome: Outcome) -> dict[str, object]:
    """Return the outcome as one object; times in microseconds."""
    return {
        "out": None if outcome.path is None else str(outcome.path),
        "plot": None if outcome.plot is None else str(outcome.plot),
        "plot_error": outcome.plot_fault,
        "pairs": [_pair_json(pair) for pair in outcome.pairs],
        "gates": [
            {
                "code": gate.row.code,
                "arch": gate.row.arch,
                "limit": limit(gate.row),
                "before": None if gate.before is None else limit(gate.before),
            }
            for gate in outcome.gates
        ],
        "failures": [_failure_json(failure) for failure in outcome.failures],
    }


def _pair_json(pair: Pair) -> dict[str, object]:
    buckets = [
        {
            "batch_size": b.batch_size,
            "kv_len": b.kv_len,
            "steps": [{"q_len": q_len, "fastest": name} for q_len, name in b.steps],
            "cells": [{"q_len": c.q_len, "us": [round(s * 1e6, 3) for s in c.seconds]} for c in b.cells],
        }
        for b in pair.buckets
    ]
    head = {"candidates": pair.candidates, "arch": pair.arch, "num_cus": pair.num_cus}
    return {**head, "scope": asdict(pair.scope), "provenance": dict(pair.provenance), "buckets": buckets}


def _failure_json(failure: Failure) -> dict[str, object]:
    return {"candidate": failure.candidate, "shape": asdict(failure.shape), "error": failure.text}


def render_check(checked: Checked) -> RenderableType:
    """Return auto's choice and its regret in every cell, and what they come to."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for name in ("heads", "batch", "kv_len", "q_len", "auto took", "us", "fastest", "us", "regret"):
        table.add_column(name, justify="left" if name in ("auto took", "fastest") else "right")
    for one in checked.judged:
        style = "red" if one.regret > check.WORST_GOAL else "yellow" if one.regret > check.MEAN_GOAL else ""
        table.add_row(
            f"{one.problem.num_qo_heads}/{one.problem.num_kv_heads}", str(one.shape.batch_size),
            str(one.shape.kv_len), str(one.shape.q_len), one.chosen, f"{one.seconds[one.chosen] * 1e6:.1f}",
            one.fastest, f"{one.seconds[one.fastest] * 1e6:.1f}", styled(f"{one.regret:.3f}", style),
        )  # fmt: skip
    parts: list[RenderableType] = [table, Text(), *_failures(checked.failures), Text(summary(checked))]
    return Group(*parts)


def summary(checked: Checked) -> str:
    """Return what the cells come to, in one sentence."""
    mean, worst = check.mean_regret(checked.judged), check.worst(checked.judged)
    where = f"{worst.shape}, heads {worst.problem.num_qo_heads}/{worst.problem.num_kv_heads}"
    goal = "within" if check.good(checked.judged) else "NOT within"
    return (
        f"auto takes {mean:.3f}x the time of the fastest candidate in the geometric mean of "
        f"{len(checked.judged)} cells, {worst.regret:.3f}x in the worst ({where}): {goal} "
        f"{check.MEAN_GOAL:g}x and {check.WORST_GOAL:g}x."
    )


def check_json(checked: Checked) -> dict[str, object]:
    """Return a check as one object; times in microseconds."""
    cells = [
        {
            "num_qo_heads": one.problem.num_qo_heads,
            "num_kv_heads": one.problem.num_kv_heads,
            **asdict(one.shape),
            "chosen": one.chosen,
            "fastest": one.fastest,
            "regret": one.regret,
            "us": {name: round(value * 1e6, 3) for name, value in one.seconds.items()},
        }
        for one in checked.judged
    ]
    return {
        "ok": check.good(checked.judged),
        "mean_regret": check.mean_regret(checked.judged),
        "worst_regret": check.worst(checked.judged).regret,
        "overlay": None if checked.overlay is None else str(checked.overlay),
        "cells": cells,
        "failures": [_failure_json(failure) for failure in checked.failures],
    }
