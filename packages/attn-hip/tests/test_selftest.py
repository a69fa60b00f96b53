"""``attn selftest``: that it asks every kernel, and that a wrong one cannot pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_core.batch import paged_batch
from attn_core.query import Query
from attn_core.target import parse_target
from attn_hip import plan, selftest, variants
from attn_hip.toolchain import ARCHS


@pytest.mark.parametrize("arch", sorted(ARCHS))
def test_every_attention_kernel_of_a_device_is_asked(native: Any, arch: str) -> None:
    """A case's batch is planned with the kernel that the case is about, and no kernel is left out."""
    target = parse_target("sm_90:132" if arch == "sm_90" else arch)
    cases = selftest.cases(target)
    assert [case.kernel for case in cases] == [v.name for v in variants.attend_variants(arch)]
    for case in cases:
        ends = torch.tensor([0, *case.q_len]).cumsum(0).int()
        pages = torch.tensor([0, 40, 80, 120]).int()
        batch = paged_batch(ends, pages, torch.arange(120).int(), torch.tensor([16] * 3), 16)
        style = plan.style_of(native, Query(target, case.problem, batch.shape))
        assert variants.attend_variant(arch, case.problem, style.tile_q).name == case.kernel
