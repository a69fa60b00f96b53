"""Every kernel family, compiled for gfx942 and gfx950, executed and compared with the reference.

The core of the matrix runs by default; ``--amd`` runs all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from .attention import APPENDS, CASES, Case, append, attend, close, expected, inputs
from .device import LLVM19, TARGETS, Device

BY_DEFAULT = ("gfx942", LLVM19)


def _marks(case: Case, arch: str, compiler: str) -> list[Any]:
    """A worker compiles each kernel once, so a target's cases stay with one."""
    group = pytest.mark.xdist_group(f"{arch}-{compiler}")
    return [group] if case.core and (arch, compiler) == BY_DEFAULT else [group, pytest.mark.amd]


def _matrix(cases: tuple[Case, ...]) -> list[Any]:
    return [
        pytest.param(case, *target, id=f"{case.name}-{'-'.join(target)}", marks=_marks(case, *target))
        for case in cases
        for target in TARGETS
    ]


@pytest.mark.parametrize(("case", "arch", "compiler"), _matrix(CASES))
def test_attention(case: Case, arch: str, compiler: str, device: Callable[[str, str], Device]) -> None:
    here = device(arch, compiler)
    given = inputs(case)
    answer = attend(here, case, given)
    close(case, answer, expected(case, given))
    if case.split or "split" in case.name:
        assert answer.merges > 0


@pytest.mark.parametrize(("case", "arch", "compiler"), _matrix(APPENDS))
def test_append(case: Case, arch: str, compiler: str, device: Callable[[str, str], Device]) -> None:
    k, v, wanted_k, wanted_v = append(device(arch, compiler), case, inputs(case), 40)
    for made, wanted in ((k, wanted_k), (v, wanted_v)):
        torch.testing.assert_close(made.float(), wanted.float(), atol=0, rtol=0, equal_nan=True)
