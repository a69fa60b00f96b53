"""Each rule by itself: where it begins and ends, whom it binds, and what it says."""

from __future__ import annotations

import pytest
import torch

from attn_aiter import codes
from attn_aiter.backend import AiterBackend
from attn_core.errors import NoRoute
from attn_core.problem import MaskMode, Op
from attn_core.query import GraphLimits
from attn_core.reasons import Reason, Stage
from attn_core.route import RouteDecision

from .golden_table import make
from .standin import backends, route

PAGED, RAGGED = make(Op.PREFILL_PAGED, 64), make(Op.PREFILL_RAGGED, None)
CAP = {"logits_soft_cap": 30.0}


def said(decision: RouteDecision, candidate: str) -> list[Reason]:
    return [reason for reason in decision.refused if reason.candidate == candidate]


def slugs(decision: RouteDecision, candidate: str) -> list[str]:
    return [reason.code.slug for reason in said(decision, candidate)]


# Flat gather.


@pytest.mark.parametrize(
    ("arch", "q_len", "candidate"),
    [
        ("gfx942", 1, "fa2/tile"),
        ("gfx942", 16, "fa2/tile"),
        ("gfx942", 17, "aiter/gather"),
        ("gfx950", 8, "fa2/tile"),
        ("gfx950", 9, "aiter/gather"),
    ],
)
def test_gather_gate_arms_at_the_limit_and_not_beyond(arch: str, q_len: int, candidate: str) -> None:
    decision = route(PAGED, q_len, arch=arch)
    assert decision.candidate == candidate
    if candidate == "aiter/gather":
        assert decision.fallback_reason is None
    else:
        (reason,) = said(decision, "aiter/gather")
        assert (reason.code, reason.limit, reason.got) == (
            codes.GATHER_SHORT,
            16 if arch == "gfx942" else 8,
            q_len,
        )
        assert "aiter.gather-short-query" in (decision.fallback_reason or "")


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("q_len", [1, 4, 256])
def test_native_paging_is_never_gated(arch: str, q_len: int) -> None:
    decision = route(make(Op.PREFILL_PAGED, 1024), q_len, arch=arch)
    assert decision.candidate == "aiter/native"
    assert decision.fallback_reason is None


@pytest.mark.parametrize("page", [1, 16])
def test_a_size_that_is_capable_but_not_routed_takes_the_gather(page: int) -> None:
    p = make(Op.PREFILL_PAGED, page)
    decision = route(p, 256)
    assert decision.candidate == "aiter/gather"
    assert slugs(decision, "aiter/native") == ["aiter.page-route"]
    assert route(p, 16).candidate == "fa2/tile"  # the gate is armed by the route set
    assert route(p, 16, requested="aiter").candidate == "aiter/native"  # a preference binds auto only


class _NativeDoesNotBuild(AiterBackend):
    def prepare(self, target, problem, path):
        return Reason(codes.BUILD_FAILED, "x", None, "no instance") if path == "native" else None


@pytest.mark.parametrize(("q_len", "candidate"), [(4, "fa2/tile"), (16, "fa2/tile"), (17, "aiter/gather")])
def test_a_native_size_that_turns_out_to_be_missing_meets_the_gate_again(q_len: int, candidate: str) -> None:
    backend = _NativeDoesNotBuild({"assume_version": "0.1.20"})
    decision = route(make(Op.PREFILL_PAGED, 1024), q_len, release=backend)
    assert decision.candidate == candidate
    assert slugs(decision, "aiter/native") == ["aiter.build-failed"]
    assert "aiter.build-failed" in (decision.fallback_reason or "")  # told, though aiter may still serve
    gated = [] if candidate == "aiter/gather" else ["aiter.gather-short-query"]
    assert slugs(decision, "aiter/gather") == gated


def test_explicit_aiter_survives_the_gate() -> None:
    for requested in ("aiter", "aiter/gather"):
        decision = route(PAGED, 4, requested=requested)
        assert decision.candidate == "aiter/gather"
    with pytest.raises(NoRoute, match=r"core.page-size"):
        route(PAGED, 4, requested="aiter/native")


# Ragged.


@pytest.mark.parametrize(
    ("arch", "q_len", "candidate"),
    [
        ("gfx942", 16, "fa2/tile"),
        ("gfx942", 17, "aiter/varlen"),
        ("gfx950", 1, "aiter/varlen"),
        ("gfx950", 16, "aiter/varlen"),
    ],
)
def test_ragged_gate(arch: str, q_len: int, candidate: str) -> None:
    decision = route(RAGGED, q_len, arch=arch)
    assert decision.candidate == candidate
    if candidate == "fa2/tile":
        assert slugs(decision, "aiter/varlen") == ["aiter.ragged-short-query"]


def test_the_two_gates_are_different_causes_with_different_words() -> None:
    assert codes.GATHER_SHORT.slug != codes.RAGGED_SHORT.slug
    assert "copying" in codes.GATHER_SHORT.template
    assert "ragged" in codes.RAGGED_SHORT.template
    assert "copying" not in codes.RAGGED_SHORT.template


def test_single_prefill_is_not_gated() -> None:
    assert route(make(Op.PREFILL_SINGLE, None), 1).candidate == "aiter/single"


def test_an_explicit_backend_survives_the_ragged_gate() -> None:
    assert route(RAGGED, 4, requested="aiter").candidate == "aiter/varlen"


# Soft cap: a wrong answer, so it binds everybody.

WRONG_CAP = [
    (make(Op.PREFILL_PAGED, 64, **CAP), "aiter/gather"),
    (make(Op.PREFILL_RAGGED, None, **CAP), "aiter/varlen"),
    (make(Op.PREFILL_SINGLE, None, **CAP), "aiter/single"),
]


@pytest.mark.parametrize(("problem", "candidate"), WRONG_CAP)
def test_soft_cap_defect(problem, candidate: str) -> None:
    decision = route(problem, 256, arch="gfx950")
    assert decision.candidate == "fa2/tile"
    assert slugs(decision, candidate) == ["aiter.soft-cap"]
    with pytest.raises(NoRoute, match=r"computes causal soft cap at head_dim 128 from kv_len 512 wrongly"):
        route(problem, 256, arch="gfx950", requested=candidate)
    assert route(problem, 256, arch="gfx942").candidate == candidate
    assert route(problem, 256, arch="gfx950", kv_len=511).candidate == candidate
    assert route(problem, 256, arch="gfx950", kv_len=512).candidate == "fa2/tile"


def test_soft_cap_is_exact_where_it_was_found_exact() -> None:
    for changes in ({"mask": MaskMode.NONE}, {"head_dim_qk": 64, "head_dim_vo": 64}):
        assert (
            route(make(Op.PREFILL_RAGGED, None, **CAP, **changes), 256, arch="gfx950").candidate
            == "aiter/varlen"
        )
    assert route(make(Op.PREFILL_PAGED, 1024, **CAP), 256, arch="gfx950").candidate == "aiter/native"


def test_explicit_aiter_with_a_cap_pages_natively_where_it_can() -> None:
    p = make(Op.PREFILL_PAGED, 16, **CAP)
    assert route(p, 256, arch="gfx950").candidate == "fa2/tile"
    assert route(p, 256, arch="gfx950", requested="aiter").candidate == "aiter/native"


def test_under_capture_the_capacity_counts_for_the_defect() -> None:
    p = make(Op.PREFILL_RAGGED, None, **CAP)
    short = GraphLimits(batch_size=4, total_q=1024, max_pages=511)
    assert route(p, 256, arch="gfx950", kv_len=100, graph=short).candidate == "aiter/varlen"
    longer = GraphLimits(batch_size=4, total_q=1024, max_pages=512)
    assert route(p, 256, arch="gfx950", kv_len=100, graph=longer).candidate == "fa2/tile"


# One query row.


def test_one_row_goes_elsewhere_on_gfx942() -> None:
    half = make(Op.PREFILL_SINGLE, None, q_dtype=torch.float16, kv_dtype=torch.float16, o_dtype=torch.float16)
    assert slugs(route(half, 1), "aiter/single") == ["aiter.one-row"]
    assert route(half, 1, arch="gfx950").candidate == "aiter/single"
    assert route(half, 2).candidate == "aiter/single"
    with pytest.raises(NoRoute, match=r"aiter.one-row"):
        route(half, 1, requested="aiter")


# fp8.


def fp8(page: int, arch: str, **changes):
    dtype = torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn
    return make(Op.PREFILL_PAGED, page, **{"q_dtype": dtype, "kv_dtype": dtype, **changes})


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("page", [1, 16, 1024])
@pytest.mark.parametrize("q_len", [1, 256])
def test_fp8_is_routed_at_every_native_size_and_never_gated(arch: str, page: int, q_len: int) -> None:
    assert route(fp8(page, arch), q_len, arch=arch).candidate == "aiter/native"


def test_fp8_at_another_page_size_names_the_gather_and_no_threshold() -> None:
    for requested in ("auto", "aiter"):
        with pytest.raises(NotImplementedError) as caught:
            route(fp8(64, "gfx942"), 4, requested=requested)
        text = str(caught.value)
        assert "aiter/gather: takes q of bfloat16, float16, got float8_e4m3fnuz [core.q-dtype]" in text
        assert "aiter/native: pages at 1, 16, 1024, got 64 [core.page-size]" in text
        assert "short-query" not in text


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"q_dtype": torch.float8_e4m3fn, "kv_dtype": torch.float8_e4m3fn}, "aiter.fp8-encoding"),
        ({"o_dtype": torch.float16}, "aiter.fp8-out"),
        ({"needs_lse": True}, "aiter.fp8-lse"),
    ],
)
def test_fp8_limits(changes, code: str) -> None:
    with pytest.raises(NoRoute, match=code):
        route(fp8(16, "gfx942", **changes), 256, requested="aiter/native")


def test_fp8_on_ragged_and_single_is_refused_by_type() -> None:
    dtype = torch.float8_e4m3fnuz
    for op in (Op.PREFILL_RAGGED, Op.PREFILL_SINGLE):
        with pytest.raises(NotImplementedError, match=r"takes q of bfloat16, float16"):
            route(make(op, None, q_dtype=dtype, kv_dtype=dtype), 256, requested="aiter")


# Decode.


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("kv_len", [1, 128, 32768])
def test_decode_has_no_gate(arch: str, kv_len: int) -> None:
    assert route(make(Op.DECODE, 16), 1, arch=arch, kv_len=kv_len).candidate == "aiter/pa_v1"


@pytest.mark.parametrize(
    ("page", "changes", "code"),
    [
        (64, {}, "core.page-size"),
        (24, {}, "core.page-size"),
        (16, {"head_dim_qk": 96, "head_dim_vo": 96}, "core.head-dim"),
        (16, {"num_qo_heads": 136}, "core.gqa-group"),
        (16, {"needs_lse": True}, "core.lse"),
        (16, {"use_tensor_cores": True}, "core.tensor-cores"),
        (16, {"order": "HND"}, "core.kv-order"),
        (16, {"q_dtype": torch.float32, "kv_dtype": torch.float32, "o_dtype": torch.float32}, "core.q-dtype"),
        (16, {"logits_soft_cap": 3.0, "window_left": 7}, "aiter.cap-and-window"),
    ],
)
def test_decode_limits(page: int, changes, code: str) -> None:
    p = make(Op.DECODE, page, **changes)
    decision = route(p, 1)
    # No kernel of a GPU takes float32: AITER's neither.
    assert decision.candidate == ("reference/torch" if code == "core.q-dtype" else "fa2/tile")
    assert code in slugs(decision, "aiter/pa_v1")
    with pytest.raises(NoRoute, match=code):
        route(p, 1, requested="aiter/pa_v1")


def test_every_failing_fact_is_kept() -> None:
    p = make(Op.DECODE, 64, head_dim_qk=96, head_dim_vo=96, needs_lse=True, order="HND")
    assert set(slugs(route(p, 1), "aiter/pa_v1")) == {
        "core.page-size",
        "core.head-dim",
        "core.lse",
        "core.kv-order",
    }


def test_a_group_of_17_is_beyond_the_kernel_and_16_is_not() -> None:
    assert route(make(Op.DECODE, 16, num_qo_heads=128), 1).candidate == "aiter/pa_v1"
    assert route(make(Op.DECODE, 16, num_qo_heads=136), 1).candidate == "fa2/tile"


def test_decode_under_capture_needs_a_stated_capacity() -> None:
    p = make(Op.DECODE, 16)
    silent = route(p, 1, graph=GraphLimits(4, 4, 1024))
    assert silent.candidate == "fa2/tile"
    assert slugs(silent, "aiter/pa_v1") == ["aiter.graph-capacity"]
    assert silent.fallback_reason is None
    assert route(p, 1, graph=GraphLimits(4, 4, 1024, max_kv_len=8192)).candidate == "aiter/pa_v1"
    assert route(p, 1, graph=GraphLimits(4, 4, 1024), requested="aiter").candidate == "aiter/pa_v1"


# By name only.


def test_the_triton_path_serves_when_named() -> None:
    verify = make(Op.VERIFY, 64)
    assert route(verify, 4).candidate == "fa2/tile"
    assert route(verify, 4).fallback_reason is None
    assert route(verify, 4, requested="aiter").candidate == "aiter/unified"
    assert route(make(Op.DECODE, 64), 1, requested="aiter").candidate == "aiter/unified"
    assert route(make(Op.DECODE, 16), 1, requested="aiter").candidate == "aiter/pa_v1"


@pytest.mark.parametrize(
    ("problem", "q_len", "kv_len", "code"),
    [
        (make(Op.PREFILL_PAGED, 64, mask=MaskMode.NONE), 4, 4096, "aiter.causal-only"),
        (make(Op.PREFILL_PAGED, 64), 5, 3, "aiter.kv-shorter-than-q"),
        (make(Op.PREFILL_PAGED, 64, mask=MaskMode.CUSTOM), 4, 4096, "core.mask"),
        (make(Op.VERIFY, 64, needs_lse=True), 4, 4096, "core.lse"),
        (make(Op.DECODE, 12), 1, 4096, "core.page-size"),
        (make(Op.DECODE, 1024), 1, 4096, "core.page-size"),
    ],
)
def test_limits_of_the_triton_path(problem, q_len: int, kv_len: int, code: str) -> None:
    with pytest.raises(NoRoute, match=code):
        route(problem, q_len, kv_len=kv_len, requested="aiter/unified")


def test_append_serves_when_named() -> None:
    p = make(Op.APPEND, 16)
    assert route(p, 1).candidate == "fa2/tile"
    assert route(p, 1).fallback_reason is None
    assert route(p, 1, requested="aiter").candidate == "aiter/append"


# Masks.


def test_a_tree_never_reaches_aiter() -> None:
    for p in (
        make(Op.PREFILL_PAGED, 1024, mask=MaskMode.CUSTOM),
        make(Op.PREFILL_RAGGED, None, mask=MaskMode.CUSTOM),
    ):
        assert route(p, 256).candidate == "fa2/tile"
        with pytest.raises(NoRoute, match=r"takes mask causal, none, got custom \[core.mask\]"):
            route(p, 256, requested="aiter")


def test_rules_belong_to_their_backend_and_stage() -> None:
    backend = backends()[0]
    names = {path.name for path in backend.paths}
    for rule in backend.rules:
        assert rule.code.slug.startswith("aiter.")
        assert rule.code.stage in (Stage.CAPABILITY, Stage.PREFERENCE)
        assert rule.paths <= names
