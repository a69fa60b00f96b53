"""Every kernel family, compiled for gfx942 and gfx950, executed and compared with the reference.

The core of the matrix runs by default; ``--amd`` runs all of it.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch

from attn_core.query import Query
from attn_hip.plan import plan_gpu
from attn_hip.variants import attend_variants

from .attention import APPENDS, BF16, CASES, CAUSAL, Case, append, attend, close, expected, inputs
from .device import LLVM19, TARGETS, Device

BY_DEFAULT = ("gfx942", LLVM19)
LAZY = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which Python names from 3.13 on


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


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_the_matrix_runs_every_attention_kernel(native: Any, arch: str) -> None:
    device = Device(native, arch, LLVM19)  # which compiles nothing
    planned = set()
    for case in CASES:
        batch = inputs(case).batch
        made: Any = plan_gpu(native, device, Query(device.target, case.problem, batch.shape), batch)
        planned.add(made.launch.variant)
    assert planned == {variant.name for variant in attend_variants(arch)}


@pytest.mark.parametrize(("case", "arch", "compiler"), _matrix(APPENDS))
def test_append(case: Case, arch: str, compiler: str, device: Callable[[str, str], Device]) -> None:
    k, v, wanted_k, wanted_v = append(device(arch, compiler), case, inputs(case), 40)
    for made, wanted in ((k, wanted_k), (v, wanted_v)):
        torch.testing.assert_close(made.float(), wanted.float(), atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("arch", "compiler"), [pytest.param(*t, marks=_marks(CASES[0], *t)) for t in TARGETS]
)
@pytest.mark.parametrize("rows", [1, 20])
def test_pages_may_be_far_apart(
    arch: str, compiler: str, rows: int, device: Callable[[str, str], Device]
) -> None:
    """A stride of pages that 32 bits do not hold, in memory that is there where it is touched."""
    case = Case("far", (rows,), (40,), (2, 2), options=CAUSAL)
    given = inputs(case)
    near = (given.k, given.v)
    apart = 2**31 + 64  # elements
    size = (apart * (given.k.shape[0] - 1) + given.k[0].numel()) * 2
    places = [mmap.mmap(-1, size, flags=LAZY) for _ in near]
    far = [torch.frombuffer(place, dtype=BF16) for place in places]
    given.k, given.v = (
        x.as_strided(y.shape, (apart, *y.stride()[1:])).copy_(y) for x, y in zip(far, near, strict=True)
    )
    close(case, attend(device(arch, compiler), case, given), expected(case, given))
