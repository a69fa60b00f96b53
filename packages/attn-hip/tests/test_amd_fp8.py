"""Every fp8 code of every encoding, as the compiled kernels read them from a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from .attention import BF16, FP8, FP16, FP32, Case, attend, expected, inputs
from .device import TARGETS, Device

CODES = torch.arange(256, dtype=torch.uint8)
TYPES = pytest.mark.parametrize(("half", "narrow"), [(h, n) for h in (BF16, FP16) for n in FP8], ids=str)


def _targets() -> list[Any]:
    marks = [(pytest.mark.amd, pytest.mark.xdist_group(f"{arch}-{compiler}")) for arch, compiler in TARGETS]
    return [pytest.param(*t, id="-".join(t), marks=m) for t, m in zip(TARGETS, marks, strict=True)]


@TYPES
@pytest.mark.parametrize(("arch", "compiler"), _targets())
@pytest.mark.parametrize("rows", [1, 20])
def test_values_are_exact(
    arch: str, compiler: str, half: torch.dtype, narrow: torch.dtype, rows: int,
    device: Callable[[str, str], Device],
) -> None:  # fmt: skip
    """One key, whose value has every code: the output is the values, bit for bit."""
    case = Case("codes", (rows,), (1,), (1, 1), (256, 256), dtypes=(half, narrow, FP32))
    given = inputs(case)
    real = given.v[given.batch.kv_indices[0]]  # type: ignore[index]
    real[0] = CODES.view(narrow)
    given.q.zero_()  # so that the weight is exactly 1
    answer = attend(device(arch, compiler), case, given)
    assert "fp8" in answer.variant
    wanted = CODES.view(narrow).float().expand(rows, 1, 256)
    torch.testing.assert_close(answer.out, wanted, rtol=0, atol=0, equal_nan=True)


@TYPES
@pytest.mark.parametrize(("arch", "compiler"), _targets())
@pytest.mark.parametrize("rows", [1, 20])
def test_keys_are_exact(
    arch: str, compiler: str, half: torch.dtype, narrow: torch.dtype, rows: int,
    device: Callable[[str, str], Device],
) -> None:  # fmt: skip
    """Key n has code n in one dim, value n the n-th dim: the output is a weight per code."""
    case = Case("codes", (rows,), (256,), (1, 1), (256, 256), page=256, dtypes=(half, narrow, FP32))
    given = inputs(case)
    page = int(given.batch.kv_indices[0])  # type: ignore[index]
    keys = torch.zeros(256, 256)
    real = CODES.view(narrow).float().nan_to_num(0, 0, 0)
    keys[torch.arange(256), torch.arange(256) * 37 % 256] = real
    given.k[page, :, 0] = keys.to(narrow)
    given.v[page, :, 0] = torch.eye(256).to(narrow)
    given.q.fill_(1.0)
    case = replace(case, scales=(28 / float(real.max()), 1.0, 1.0))
    answer = attend(device(arch, compiler), case, given)
    out, lse = expected(case, given)
    torch.testing.assert_close(answer.lse, lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(answer.out, out, rtol=2**-7 if half is BF16 else 2**-10, atol=1e-7)
