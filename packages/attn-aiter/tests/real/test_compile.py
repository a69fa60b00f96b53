"""AITER's Triton attention, as the path ``unified`` would launch it, builds for both devices with no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .trees import require, script

EM_AMDGPU = 224
MACH = {"gfx942": 0x4C, "gfx950": 0x4F}
LOCAL_MEMORY = {"gfx942": 65536, "gfx950": 163840}
KERNELS = {"kernel_unified_attention_2d", "kernel_unified_attention_3d", "reduce_segments"}


@pytest.mark.parametrize("arch", MACH)
def test_it_builds(arch: str, tmp_path: Path) -> None:
    tree = require()
    lines = script("compile_targets.py", str(tree.root), arch, TRITON_CACHE_DIR=str(tmp_path)).splitlines()
    said = list(map(json.loads, lines))
    assert [kernel for kernel in said if "raised" in kernel] == []
    assert {kernel["kernel"] for kernel in said} == KERNELS
    assert len(said) == 9
    for kernel in said:
        assert kernel["machine"] == EM_AMDGPU
        assert kernel["flags"] & 0xFF == MACH[arch]
        assert kernel["shared"] <= LOCAL_MEMORY[arch], kernel["case"]
        assert kernel["mfma"] > 0 or kernel["kernel"] == "reduce_segments"
