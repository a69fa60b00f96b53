"""Decisions depend on the question alone, whatever was asked, planned or said before."""

from __future__ import annotations

import logging
import random

import pytest
import torch

from attn_aiter.backend import AiterBackend
from attn_core import notices, plugins
from attn_core.problem import MaskMode, Op
from attn_core.query import GraphLimits, Query
from attn_core.route import choose, screen

from .golden_table import make
from .standin import TARGETS, backends, route, shape


def test_long_short_long_short() -> None:
    """Whichever came first, a short query is gated and a long one is not."""
    for op, page, long in ((Op.PREFILL_PAGED, 64, "aiter/gather"), (Op.PREFILL_RAGGED, None, "aiter/varlen")):
        p, target = make(op, page), TARGETS["gfx942"]
        for order in ((256, 4, 256, 4), (4, 256, 4, 256)):
            screened = screen(target, p, backends())
            for q_len in order:
                found = choose(screened, Query(target, p, shape(q_len, page=page)))
                assert found.candidate == (long if q_len == 256 else "fa2/tile"), (op, order)


def test_equal_questions_equal_answers_in_any_order() -> None:
    questions = [
        (make(op, page, **changes), arch, q_len)
        for op, page in (
            (Op.DECODE, 16),
            (Op.PREFILL_PAGED, 64),
            (Op.PREFILL_PAGED, 1024),
            (Op.PREFILL_RAGGED, None),
        )
        for changes in ({}, {"logits_soft_cap": 30.0}, {"head_dim_qk": 64, "head_dim_vo": 64})
        for arch in ("gfx942", "gfx950", "cpu")
        for q_len in (1, 16, 17)
    ]
    using = backends()
    first = [route(p, q_len, arch=arch, using=using) for p, arch, q_len in questions]
    order = list(range(len(questions)))
    random.Random(0).shuffle(order)
    for at in order:
        p, arch, q_len = questions[at]
        assert route(p, q_len, arch=arch, using=using) == first[at]
    assert [route(p, q_len, arch=arch) for p, arch, q_len in questions] == first


def test_a_mask_does_not_poison_the_next_plan() -> None:
    using = backends()
    fp8 = torch.float8_e4m3fnuz
    assert route(make(Op.PREFILL_PAGED, 16, mask=MaskMode.CUSTOM), 32, using=using).candidate == "fa2/tile"
    assert (
        route(make(Op.PREFILL_PAGED, 16, q_dtype=fp8, kv_dtype=fp8), 32, using=using).candidate
        == "aiter/native"
    )


@pytest.mark.parametrize("q_len", [1, 4, 256])
def test_a_captured_graph_keeps_its_candidate(q_len: int) -> None:
    """No demotion of a gather already captured, no promotion of the kernels that were."""
    p, limits = make(Op.PREFILL_PAGED, 64), GraphLimits(4, 1024, 4096)
    for pinned in ("aiter/gather", "fa2/tile"):
        assert route(p, q_len, graph=limits, pinned=pinned).candidate == pinned


def test_demotion_on_the_first_captured_plan_is_free() -> None:
    limits = GraphLimits(4, 1024, 4096)
    assert route(make(Op.PREFILL_PAGED, 64), 4, graph=limits).candidate == "fa2/tile"
    assert route(make(Op.PREFILL_RAGGED, None), 4, graph=limits).candidate == "fa2/tile"


def announced(caplog: pytest.LogCaptureFixture, *asked: tuple[object, int, str]) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING, "attn_core"):
        for problem, q_len, arch in asked:
            found = route(problem, q_len, arch=arch)  # type: ignore[arg-type]
            notices.announce(TARGETS[arch], found.refused, found.candidate)
    return [record.getMessage() for record in caplog.records]


def test_a_gate_warns_once_for_all_lengths_and_names_the_threshold(caplog: pytest.LogCaptureFixture) -> None:
    p = make(Op.PREFILL_PAGED, 64)
    said = announced(caplog, *((p, q_len, "gfx942") for q_len in (4, 256, 1, 16, 256, 9)))
    gates = [text for text in said if "gather" in text]
    assert len(gates) == 1
    assert "up to 16" in gates[0]
    assert "got" not in gates[0]
    assert "using fa2/tile" in gates[0]


def test_two_devices_are_two_warnings(caplog: pytest.LogCaptureFixture) -> None:
    p = make(Op.PREFILL_PAGED, 64)
    said = announced(caplog, (p, 4, "gfx942"), (p, 4, "gfx950"), (p, 4, "gfx942"))
    assert [text.split("up to ")[1].split()[0] for text in said if "gather" in text] == ["16", "8"]


def test_choosing_among_its_own_paths_is_no_fallback(caplog: pytest.LogCaptureFixture) -> None:
    p = make(Op.PREFILL_PAGED, 64)
    found = route(p, 256)
    assert (found.candidate, found.fallback_reason) == ("aiter/gather", None)
    assert announced(caplog, (p, 256, "gfx942")) == []


def test_a_missing_package_is_said_once_for_all_its_paths(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "attn_core"):
        for p in (make(Op.DECODE, 16), make(Op.PREFILL_PAGED, 64), make(Op.PREFILL_RAGGED, None)):
            found = route(p, 4 if p.op is not Op.DECODE else 1, release="none")
            assert (found.fallback_reason or "").count("needs amd-aiter 0.1.20 or newer") == 1
            assert ";" not in (found.fallback_reason or "")
            notices.announce(TARGETS["gfx942"], found.refused, found.candidate)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("release", "code"),
    [
        ("none", "aiter.not-installed"),
        ("0.1.7.post2.dev18", "aiter.too-old"),
        ("0.1.20.dev12", "aiter.too-old"),
    ],
)
def test_missing_and_old_are_causes_of_their_own(release: str, code: str) -> None:
    found = route(make(Op.PREFILL_PAGED, 64), 4, release=release)
    assert found.candidate == "fa2/tile"
    causes = {reason.code.slug for reason in found.refused if reason.candidate.startswith("aiter/")}
    assert causes == {code}


@pytest.mark.parametrize("arch", ["cpu", "sm_90", "gfx90a"])
def test_a_device_without_kernels_is_told_nothing(arch: str) -> None:
    for release in ("none", "0.1.7.post2.dev18", "0.1.20"):
        assert route(make(Op.DECODE, 16), 1, arch=arch, release=release).fallback_reason is None


def test_through_discovery_and_configuration() -> None:
    """The plugin as installed, with the release stated by configuration."""
    found = plugins.discover(config={"aiter": {"assume_version": "0.1.20"}})
    assert {"gfx942", "gfx950"} <= {target.arch for target in found.targets}
    assert any(isinstance(backend, AiterBackend) for backend in found.backends), found.broken
    target = next(target for target in found.targets if target.arch == "gfx942")
    p = make(Op.DECODE, 16)
    decision = choose(screen(target, p, found.backends), Query(target, p, shape(1)))
    assert decision.candidate == "aiter/pa_v1"


def test_leaving_the_decode_kernel_out_on_request_is_no_fallback() -> None:
    """The matrix path was asked for; nothing was passed over."""
    found = route(make(Op.DECODE, 16, use_tensor_cores=True), 1)
    assert found.candidate == "fa2/tile"
    assert found.fallback_reason is None
    assert "core.tensor-cores" in [reason.code.slug for reason in found.refused]
