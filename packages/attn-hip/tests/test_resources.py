"""Every AMD kernel, by every compiler, within the committed budget; ``ATTN_WRITE_BUDGET=1`` writes a new one.

``ATTN_WRITE_BUDGET=1 uv run pytest -n 0 -m amd packages/attn-hip/tests/test_resources.py`` measures and
writes; ``uv run attn docs --write docs/reference`` then renews the table.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from attn_hip import budget
from attn_hip.budget import LOOP_COUNTS, waves_per_simd

from .device import CSRC, TARGETS, Device, has, made
from .measure import LOOPS, all_variants, loop_row, resource_row, write

WRITES = bool(os.environ.get("ATTN_WRITE_BUDGET"))
SLACK = 1.02
BUILD_SECONDS = 60 * 2  # of one core, for one arch by one compiler: a minute on two cores
JOBS = [(variant, *target) for target in TARGETS for variant in all_variants(target[0])]
MOST_CONFLICTS = 1.0
Key = tuple[str, str, str]
pytestmark = [pytest.mark.amd, pytest.mark.xdist_group("resources")]


@pytest.fixture(scope="module")
def measured() -> dict[Key, dict[str, Any]]:
    """Build everything; the time is that of the compilers that ran."""
    for arch, compiler in TARGETS:
        if not has(arch, compiler):
            pytest.skip(f"{compiler} for {arch} is not here")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = list(pool.map(lambda job: resource_row(*job), JOBS))
    for target in TARGETS:
        assert sum(made(variant, *target).seconds for variant in all_variants(target[0])) <= BUILD_SECONDS
    return {_key(row): row for row in rows}


@pytest.fixture(scope="module")
def loops(native: Any, measured: dict[Key, dict[str, Any]]) -> dict[Key, dict[str, Any]]:
    rows = [loop_row(Device(native, *target), loop) for target in TARGETS for loop in LOOPS]
    if WRITES:
        write(list(measured.values()), rows)
    return {(row["case"], row["arch"], row["compiler"]): row for row in rows}


def _key(row: Any) -> Key:
    return row["variant"], row["arch"], row["compiler"]


def test_builds_keep_to_their_budget(
    measured: dict[Key, dict[str, Any]], loops: dict[Key, dict[str, Any]]
) -> None:
    allowed = {_key(row): row for row in budget.load()["resources"]}
    assert measured.keys() == allowed.keys()
    over = [
        f"{' '.join(key)}: {name} {row[name]}, budget {allowed[key][name]}"
        for key, row in measured.items()
        for name in ("vgpr", "lds", "scratch", "vgpr_spills", "sgpr_spills")
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


def spilling(rows: Mapping[Key, Mapping[str, Any]]) -> dict[Key, dict[str, int]]:
    """Return what kernels keep in memory, or in lanes, for want of registers."""
    kept = {
        key: {name: row[name] for name in ("vgpr_spills", "sgpr_spills", "scratch") if row[name]}
        for key, row in rows.items()
    }
    return {key: some for key, some in kept.items() if some}


def test_nothing_spills(measured: dict[Key, dict[str, Any]]) -> None:
    """Whatever the budget says: no register is spilled and no kernel takes scratch memory."""
    assert spilling(measured) == {}


@pytest.mark.parametrize(("arch", "compiler"), TARGETS)
def test_spills_and_scratch_are_seen(arch: str, compiler: str, tmp_path: Path) -> None:
    """A kernel that is squeezed into too few registers is reported."""
    if not has(arch, compiler):
        pytest.skip(f"{compiler} for {arch} is not here")
    sources = tmp_path / "csrc"
    shutil.copytree(CSRC, sources)
    kernel = sources / "kernels_gpu.cpp"
    text = kernel.read_text()
    assert text.count("void ATTN_ENTRY(") == 1
    kernel.write_text(
        text.replace("void ATTN_ENTRY(", "__attribute__((amdgpu_num_vgpr(64))) void ATTN_ENTRY(")
    )
    variant = next(v for v in all_variants(arch) if v.name == "attend_bf16_same_128_64")
    row = resource_row(variant, arch, compiler, sources)
    kept = spilling({_key(row): row})[_key(row)]
    assert kept["vgpr_spills"] > 0
    assert kept["scratch"] > 0


def test_prefill_and_decode_have_waves_to_hide_latency(measured: dict[Key, dict[str, Any]]) -> None:
    """Two waves a SIMD; decode four up to head dim 128; one where all features meet 256 on gfx942."""
    few = {}
    for key, row in measured.items():
        least = 1 if "any_256_16" in key[0] and key[1] == "gfx942" else 2
        if re.match(r"attend_\w+_(?:same|fp8)_(64|128)_16$", key[0]):
            least = 4
        if key[0].startswith("attend") and row["waves"] < least:
            few[key] = row["waves"]
    assert few == {}


def test_loops_read_memory_in_whole_lines(loops: dict[Key, dict[str, Any]]) -> None:
    """All of K and V comes by 128-bit loads, once."""
    assert {
        key: row["wide_loads"] for key, row in loops.items() if not 0.99 <= row["wide_loads"] <= 1.01
    } == {}


def test_shared_memory_has_no_bank_conflicts(loops: dict[Key, dict[str, Any]]) -> None:
    assert {key: row["conflicts"] for key, row in loops.items() if row["conflicts"] > MOST_CONFLICTS} == {}


def test_matrix_units_are_what_prefill_keeps_busy(loops: dict[Key, dict[str, Any]]) -> None:
    """Clocks of matrix instructions over those of vector instructions.

    At head dim 64 gfx950 cannot get there: a score takes 4 clocks of products and 4 of its exponential alone.
    """
    few = {}
    for key, row in loops.items():
        least = 0.5 if key[:2] == ("prefill 64", "gfx950") else 0.8
        if key[0] in ("prefill 64", "prefill 128", "prefill 256") and row["matrix_over_vector"] < least:
            few[key] = row["matrix_over_vector"]
    assert few == {}


def test_decode_issues_in_a_part_of_the_time_that_memory_takes(loops: dict[Key, dict[str, Any]]) -> None:
    slow = {
        key: row["issue_over_memory"]
        for key, row in loops.items()
        if re.match(r"decode 128, group", key[0]) and row["issue_over_memory"] > 0.25
    }
    assert slow == {}


def test_decode_is_bound_by_memory_alike_for_every_group(loops: dict[Key, dict[str, Any]]) -> None:
    for arch, compiler in TARGETS:
        four, eight, sixteen = (
            loops[f"decode 128, group {group}", arch, compiler]["issue_over_memory"] for group in (4, 8, 16)
        )
        assert max(eight, sixteen) <= 1.05 * four


def test_blocks_leave_room_for_others() -> None:
    assert waves_per_simd("gfx942", 128, 16384, 256) == 4
    assert waves_per_simd("gfx942", 129, 16384, 256) == 3
    assert waves_per_simd("gfx942", 64, 32768, 256) == 2
    assert waves_per_simd("gfx950", 64, 32768, 256) == 5
    assert waves_per_simd("gfx950", 24, 0, 256) == 8
