"""AITER's own Triton attention under the path ``unified``: interpreted, and on a GPU where there is one."""

from __future__ import annotations

import json

import pytest
import torch

from .trees import require, script
from .triton_cases import LARGE, SMALL

TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2}


@pytest.fixture(scope="module")
def interpreted() -> dict[str, float]:
    """Largest error of every case in Triton's interpreter."""
    tree = require()
    numpy = pytest.importorskip("numpy")
    old = tuple(map(int, numpy.__version__.split(".")[:2])) < (2, 4)
    assert old, "Triton's interpreter needs numpy below 2.4"
    lines = script("triton_run.py", str(tree.root), "cpu", TRITON_INTERPRET="1").splitlines()
    return {said["case"]: said["error"] for said in map(json.loads, lines)}


@pytest.mark.parametrize("case", SMALL)
def test_the_interpreted_kernel_agrees_with_the_oracle(interpreted: dict[str, float], case: str) -> None:
    assert interpreted[case] < TOLERANCE["float16"]


def test_the_kernel_on_a_gpu_agrees_with_the_oracle() -> None:
    """For real, float16 and bfloat16; on NVIDIA by leaving out the launch options only AMD knows."""
    tree = require()
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    said = list(map(json.loads, script("triton_run.py", str(tree.root), "cuda").splitlines()))
    assert len(said) == 2 * len(SMALL | LARGE)
    assert [case for case in said if not case["error"] < TOLERANCE[case["dtype"]]] == []
