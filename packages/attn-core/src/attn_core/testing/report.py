"""Count what the kit tested and print it: a row per candidate, and the features the cases covered."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypedDict

from ..backend import Backend
from ..target import DeviceTarget
from .axes import dtype_name
from .cases import Case, cases_of
from .tolerance import declared

Facts = dict[str, str]


class About(TypedDict):
    """What a test is about. Plain values: under pytest-xdist they travel between processes."""

    candidate: str
    case: str
    on: str
    tolerance: str
    declined: str


_COLUMNS = ("candidate", "on", "cases", "passed", "failed", "checks", "declined", "tolerance")


def facts_of(case: Case) -> Facts:
    """Return the features of one case as text."""
    p = case.problem
    facts = {
        "op": p.op.value,
        "kv": dtype_name(p.kv_dtype),
        "page": "" if p.page_size is None else str(p.page_size),
        "layout": p.kv.order,
        "head_dim": f"{p.head_dim_qk}x{p.head_dim_vo}",
        "form": case.form,
    }
    if p.op.value != "append":
        facts |= {
            "q": dtype_name(p.q_dtype),
            "out": dtype_name(p.o_dtype),
            "group": str(p.gqa_group_size),
            "mask": p.mask.value,
            "pos": p.pos_encoding.value,
            "window": "yes" if p.window_left >= 0 else "",
            "soft_cap": "yes" if p.logits_soft_cap else "",
            "lse": "yes" if case.wants_lse else "",
            "scales": "" if case.scales == "none" else case.scales,
            "batch_invariant": "yes" if p.batch_invariant else "",
            "graph": "yes" if case.graph else "",
            "batch": case.lengths.name,
        }
    return facts


def about_case(case: Case) -> About:
    """Return what a test of one case is about."""
    own = {dtype_name(d): f"{value:g}" for d, value in declared(case.path).items()}
    refused = sorted(cases_of(case.backend, case.target).declined.items())
    return {
        "candidate": case.candidate,
        "case": str(case),
        "on": str(case.target),
        "tolerance": ", ".join(f"{d} {value}" for d, value in own.items()) or "default",
        "declined": ", ".join(f"{code} {n}" for code, n in refused) or "0",
    }


def about_backend(backend: Backend, target: DeviceTarget) -> About:
    """Return what a test of a backend as a whole is about."""
    name = backend.name
    return {"candidate": name, "case": name, "on": str(target), "tolerance": "default", "declined": "0"}


@dataclass(slots=True)
class Row:
    """What is known of one candidate.

    Attributes:
        on: Device it ran on.
        declined: Cases its own rules refuse, by code.
        tolerance: Its own tolerances, or ``default``.
        cases: Outcome of each case: whether all of its checks passed.
        checks: Number of checks run.
        covered: Values met, by feature.
        failed: Tests that failed.
    """

    on: str = ""
    declined: str = "0"
    tolerance: str = "default"
    cases: dict[str, bool] = field(default_factory=dict)
    checks: int = 0
    covered: dict[str, set[str]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)


class Tally:
    """Rows by candidate."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}

    def add(self, test: str, passed: bool, about: About, facts: Mapping[str, str]) -> None:
        """Count one finished check."""
        row = self.rows.setdefault(about["candidate"], Row())
        row.on, row.tolerance, row.declined = about["on"], about["tolerance"], about["declined"]
        row.checks += 1
        row.cases[about["case"]] = row.cases.get(about["case"], True) and passed
        for name, value in facts.items():
            if value:
                row.covered.setdefault(name, set()).add(value)
        if not passed:
            row.failed.append(test)

    def tested(self) -> dict[str, Row]:
        """Return the rows of which at least one check ran."""
        return {name: row for name, row in sorted(self.rows.items()) if row.checks}

    def lines(self) -> Iterator[str]:
        """Yield the table, then the features of each candidate."""
        table = [_COLUMNS, *(_cells(name, row) for name, row in self.tested().items())]
        width = [max(len(cells[n]) for cells in table) for n in range(len(_COLUMNS))]
        for cells in table:
            yield "  ".join(cell.ljust(w) for cell, w in zip(cells, width, strict=True)).rstrip()
        for name, row in self.tested().items():
            if row.covered:
                yield f"{name} covered:"
                for feature, values in sorted(row.covered.items()):
                    yield f"  {feature}: {', '.join(sorted(values, key=_natural))}"

    def json(self) -> str:
        """Return the same as JSON: ``{candidate: {cases, passed, failed, ...}}``."""
        return json.dumps({name: _plain(row) for name, row in self.tested().items()}, indent=2) + "\n"


def _cells(name: str, row: Row) -> tuple[str, ...]:
    passed = sum(row.cases.values())
    counts = (len(row.cases), passed, len(row.cases) - passed, row.checks)
    return (name, row.on, *map(str, counts), row.declined, row.tolerance)


def _plain(row: Row) -> dict[str, object]:
    passed = sum(row.cases.values())
    return {
        "on": row.on,
        "cases": len(row.cases),
        "passed": passed,
        "failed": len(row.cases) - passed,
        "checks": row.checks,
        "declined": row.declined,
        "tolerance": row.tolerance,
        "covered": {name: sorted(values, key=_natural) for name, values in sorted(row.covered.items())},
        "failed_tests": row.failed,
    }


def _natural(value: str) -> tuple[int, str]:
    digits = value.split("x")[0]
    return (int(digits), value) if digits.isdigit() else (0, value)
