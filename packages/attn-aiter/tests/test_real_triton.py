"""AITER's own Triton kernel under the path ``unified``; see ``real_triton.py`` for what it needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_the_real_kernel_agrees_with_the_oracle() -> None:
    if not os.environ.get("ATTN_AITER_TREE"):
        pytest.skip("ATTN_AITER_TREE is not set")
    numpy = pytest.importorskip("numpy")
    pytest.importorskip("triton")
    if tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4):
        pytest.skip("triton's interpreter needs numpy below 2.4")
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("real_triton.py"))],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("e-0") >= 6
