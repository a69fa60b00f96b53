"""attn-core's conformance kit on what can be held against this backend without its device: all but run()."""

from __future__ import annotations

import pytest

from attn_aiter import codes
from attn_aiter.backend import AiterBackend
from attn_core.errors import Unsupported
from attn_core.target import DeviceTarget
from attn_core.testing import cases_of, checks

from .conftest import GFX942, GFX950

RELEASES = ("0.1.7.post2.dev18", "0.1.20")


@pytest.mark.parametrize("target", [GFX942, GFX950], ids=str)
@pytest.mark.parametrize("release", RELEASES)
def test_what_it_says_of_itself(release: str, target: DeviceTarget) -> None:
    backend = AiterBackend({"assume_version": release, "min_version": "0.1.0"})
    checks.declared.is_well_formed(backend, target)
    checks.declared.answers_unavailable_without_side_effects(backend, target)
    checks.declared.rules_are_pure(backend, target)


def test_plans_are_functions() -> None:
    """For every case its rows claim; a plan may still find late that a batch is not for it."""
    backend = AiterBackend({"assume_version": "0.1.20"})
    late: set[str] = set()
    planned: set[str] = set()
    for case in cases_of(backend, GFX942).attention:
        try:
            checks.plan.plan_is_deterministic_and_comparable(case)
            checks.plan.plan_leaves_the_batch_alone(case)
            if case.problem.op.paged and not case.path.host_indices:
                checks.plan.plan_needs_no_page_ids(case)
            planned.add(case.path.name)
        except Unsupported as err:
            late.add(err.reason.code.slug)
    assert planned == {"native", "gather", "varlen", "single", "pa_v1", "unified"}
    assert late <= {codes.ONE_ROW.slug, codes.KV_SHORTER.slug, codes.EMPTY_REQUEST.slug}
