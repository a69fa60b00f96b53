"""Every AMD kernel, by every compiler, within the committed budget; ``ATTN_WRITE_BUDGET=1`` writes a new one.

``ATTN_WRITE_BUDGET=1 uv run pytest -m amd packages/attn-hip/tests/test_resources.py`` measures and writes;
``uv run attn docs --write docs/reference`` then renews the table.
"""

from __future__ import annotations

import os
import resource
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from attn_hip import budget
from attn_hip.budget import LOOP_COUNTS, waves_per_simd

from .device import TARGETS, Device, has
from .measure import LOOPS, all_variants, loop_row, resource_row, resources, write

WRITES = bool(os.environ.get("ATTN_WRITE_BUDGET"))
SLACK = 1.02
BUILD_SECONDS = 60 * 2  # of one core, for one arch by one compiler: a minute on two cores
LEAST_WAVES = {"decode": 2, "prefill": 2}
JOBS = [(variant, *target) for target in TARGETS for variant in all_variants(target[0])]
Key = tuple[str, str, str]
pytestmark = pytest.mark.amd


@pytest.fixture(scope="module")
def measured() -> dict[Key, dict[str, Any]]:
    """Build everything; the time is that of the compilers that ran."""
    for arch, compiler in TARGETS:
        if not has(arch, compiler):
            pytest.skip(f"{compiler} for {arch} is not here")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = list(pool.map(lambda job: resource_row(*job), JOBS))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent <= BUILD_SECONDS * len(TARGETS)
    return {_key(row): row for row in rows}


@pytest.fixture(scope="module")
def loops(native: Any, measured: dict[Key, dict[str, Any]]) -> dict[Key, dict[str, Any]]:
    rows = [loop_row(Device(native, *target), loop) for target in TARGETS for loop in LOOPS]
    if WRITES:
        write(list(measured.values()), rows)
    return {(row["case"], row["arch"], row["compiler"]): row for row in rows}


def _key(row: Any) -> Key:
    return row["variant"], row["arch"], row["compiler"]


def test_nothing_spills_or_uses_scratch(measured: dict[Key, dict[str, Any]]) -> None:
    wrong = {}
    for job in JOBS:
        r = resources(*job)
        if r.scratch or r.vgpr_spills or r.sgpr_spills:
            wrong[job[0].name, job[1], job[2]] = (r.scratch, r.vgpr_spills, r.sgpr_spills)
    assert wrong == {}


def test_builds_keep_to_their_budget(
    measured: dict[Key, dict[str, Any]], loops: dict[Key, dict[str, Any]]
) -> None:
    allowed = {_key(row): row for row in budget.load()["resources"]}
    assert measured.keys() == allowed.keys()
    over = [
        f"{' '.join(key)}: {name} {row[name]}, budget {allowed[key][name]}"
        for key, row in measured.items()
        for name in ("vgpr", "lds")
        if row[name] > allowed[key][name]
    ]
    over += [
        f"{' '.join(key)}: {row['waves']} waves"
        for key, row in measured.items()
        if row["waves"] < allowed[key]["waves"]
    ]
    assert over == []


def test_loops_execute_no_more_than_their_budget(loops: dict[Key, dict[str, Any]]) -> None:
    allowed = {(r["case"], r["arch"], r["compiler"]): r for r in budget.load()["loops"]}
    assert loops.keys() == allowed.keys()
    over = [
        f"{' '.join(key)}: {name} {row[name]}, budget {allowed[key][name]}"
        for key, row in loops.items()
        for name in (*LOOP_COUNTS, "conflicts")
        if row[name] > allowed[key][name] * SLACK + 0.001
    ]
    assert over == []


def test_blocks_leave_room_for_others() -> None:
    assert waves_per_simd("gfx942", 128, 16384, 256) == 4
    assert waves_per_simd("gfx942", 129, 16384, 256) == 3
    assert waves_per_simd("gfx942", 64, 32768, 256) == 2
    assert waves_per_simd("gfx950", 64, 32768, 256) == 5
    assert waves_per_simd("gfx950", 24, 0, 256) == 8
