"""Kernels that are wrong on purpose: each check of the interpreter, and the oracle, must find its mistake."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .attention import CASES, attend, close, expected, inputs
from .device import CSRC, LLVM19, Device
from .isa import OutOfBounds, Race

pytestmark = [pytest.mark.amd, pytest.mark.xdist_group("mutants")]
BY_NAME = {case.name: case for case in CASES}


@dataclass(frozen=True)
class Mutant:
    """A change of the sources.

    Attributes:
        file: Which.
        old: Text that stands there once.
        new: What it becomes.
        case: A case that shows it.
        fault: How it shows.
        words: What the report says.
    """

    file: str
    old: str
    new: str
    case: str
    fault: type[Exception]
    words: str


MUTANTS = {
    "no barrier before a step is staged": Mutant(
        "stage_gpu.h", "join();\n      if constexpr (!kAhead) fetch();", "if constexpr (!kAhead) fetch();",
        "paged-causal", Race, r"writes byte \d+, which wave \d read since the last barrier",
    ),
    "no barrier after a step is staged": Mutant(
        "stage_gpu.h", "put();\n      join();", "put();",
        "paged-causal", Race, r"reads byte \d+, which wave \d wrote since the last barrier",
    ),
    "no barrier before waves join": Mutant(
        "stage_gpu.h", "if constexpr (kAsync) await_copies<0>();\n    barrier();",
        "if constexpr (kAsync) await_copies<0>();", "decode-4", Race, "since the last barrier",
    ),
    "no bound on page ids": Mutant(
        "stage_gpu.h", "pages_.look(least(token, end_ - 1), true);", "pages_.look(token, true);",
        "decode-4", OutOfBounds, "of kv_indices, which has",
    ),
    "no bound on query rows": Mutant(
        "tile_gpu_query.h", "query_line(least(first + row, last_), line", "query_line(first + row, line",
        "decode-4", OutOfBounds, "of q, which has",
    ),
    "no bound on output rows": Mutant(
        "tile_gpu.h", "if (packed > last_) return;", "", "decode-4", OutOfBounds, "which has",
    ),
    "no mask": Mutant(
        "logits.h", "if (cut) {", "if (false) {",
        "paged-causal", AssertionError, "not close",
    ),
    "no mask bits": Mutant(
        "logits.h", "p.mask == kMaskCustom;", "p.mask == kMaskCustom && false;",
        "custom-mask", AssertionError, "not close",
    ),
    "no window": Mutant(
        "rows.h", "if (p.window_left >= 0 &&", "if (false && p.window_left >= 0 &&", "ragged-window",
        AssertionError, "not close",
    ),
    "outputs keep their worth where scores grow": Mutant(
        "softmax_patient.h", "fade_out(fade);", "", "sharp-decode", AssertionError, "not close",
    ),
    "sums keep their worth where scores grow": Mutant(
        "softmax_patient.h", "state.sum[r] *= fade[r];", "", "sharp-decode", AssertionError, "not close",
    ),
    "scores may grow without end": Mutant(
        "softmax_patient.h", "kPatience = 8.f;", "kPatience = 800.f;",
        "sharp-decode-split-half", AssertionError, "not close",
    ),
    "a lane's sum is taken for a row's": Mutant(
        "softmax_patient.h", "= T::sum_across(state.sum[r]);", "= state.sum[r];",
        "decode-4", AssertionError, "not close",
    ),
    "a chunk is forgotten": Mutant(
        "merge_gpu.h", "= from_lane(weight, k);", "= k ? from_lane(weight, k) : 0.f;",
        "decode-split", AssertionError, "not close",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_kernel_is_found(
    name: str, native: Any, tmp_path: Path, device: Callable[[str, str], Device]
) -> None:
    mutant = MUTANTS[name]
    device("gfx942", LLVM19)  # skips without a compiler
    sources = tmp_path / "csrc"
    shutil.copytree(CSRC, sources)
    text = (sources / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    (sources / mutant.file).write_text(text.replace(mutant.old, mutant.new))
    case = BY_NAME[mutant.case]
    given = inputs(case)
    wrong = Device(native, "gfx942", LLVM19, sources)
    with pytest.raises(mutant.fault, match=mutant.words):
        close(case, attend(wrong, case, given), expected(case, given))
