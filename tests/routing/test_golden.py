"""Every decision of the table is the committed one."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attn_core import plugins
from attn_core.problem import Op
from attn_core.query import Query
from attn_core.route import explain, screen

from .golden_table import FOLDER, OF_OP, STATES, make, table
from .standin import TARGETS, backends, shape

WRITE = "python tests/routing/golden_table.py --write"


@pytest.mark.parametrize("state", STATES)
def test_decisions_are_the_committed_ones(state: str) -> None:
    committed = (FOLDER / f"{state}.csv").read_text(encoding="utf-8").splitlines()
    differ = [
        f"- {old}\n+ {new}"
        for old, new in zip(committed, table(state).splitlines(), strict=False)
        if old != new
    ]
    assert not differ, f"decisions changed; if that is meant: {WRITE}\n" + "\n".join(differ)
    assert len(committed) == len(table(state).splitlines())


def test_the_files_are_those_of_the_states() -> None:
    assert {file.stem for file in FOLDER.iterdir()} == set(STATES)


def test_the_command_says_what_differs() -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("golden_table.py"))],
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "ATTN_THRESHOLDS"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{state}.csv: as decided" for state in STATES]


def rows(state: str) -> list[dict[str, str]]:
    return list(csv.DictReader((FOLDER / f"{state}.csv").read_text().splitlines()))


def test_no_device_without_aiter_kernels_is_told_about_aiter() -> None:
    for state in STATES:
        for row in rows(state):
            for arch in ("cpu", "sm_90", "gfx90a"):
                assert "aiter" not in row[arch], row


def test_only_the_told_cause_differs_between_missing_and_old() -> None:
    for missing, old in zip(rows("none"), rows("too-old"), strict=True):
        assert {k: v.replace("aiter.not-installed", "aiter.too-old") for k, v in missing.items()} == old


def test_a_missing_package_is_the_only_thing_told_of_aiter() -> None:
    """No threshold and no limit is named on a machine where AITER could not have run."""
    for row in rows("none"):
        for arch in ("gfx942", "gfx950"):
            assert row[arch].count("aiter.") == row[arch].count("aiter.not-installed") == 1, row


def test_the_real_kernels_take_the_stand_ins_place() -> None:
    """With attn-hip's fa2 registered, plain questions have the answers of the table."""
    (fa2,) = (b for b in plugins.discover(config={}).backends if b.name == "fa2")
    stand_in = backends()
    real = (stand_in[0], fa2, stand_in[2])
    for op in (Op.DECODE, Op.VERIFY, Op.PREFILL_PAGED, Op.PREFILL_RAGGED):
        for arch in ("gfx942", "gfx950", "sm_90", "gfx90a"):
            for length in OF_OP.get(op, (1, 16, 17, 256)):
                p, target = make(op, 64 if op.paged else None), TARGETS[arch]
                query = Query(target, p, shape(length, page=p.page_size))
                # Not by choose(): nothing is prepared for a device that is not here.
                answers = [explain(screen(target, p, using), query) for using in (stand_in, real)]
                chosen = [[v.candidate for v in verdicts if v.chosen] for verdicts in answers]
                assert chosen[0] == chosen[1] != [], (op, arch, length)
