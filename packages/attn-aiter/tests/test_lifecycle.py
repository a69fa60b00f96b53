"""One wrapper, several plans: each decides afresh, a captured one keeps its kernel, a cause is said once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import attn_core
from attn_aiter import load
from attn_aiter.backend import AiterBackend
from attn_core import plugins
from attn_core.errors import NoRoute, Unsupported
from attn_core.reference import ReferenceBackend

from .wrapping import DIM, HEADS, KV_HEADS, Kernels, cache, close, table, workspace

PAGE = 64
LONG, SHORT = [20, 20], [4, 4]
FP8 = torch.float8_e4m3fnuz


@pytest.fixture
def said(kernels: Kernels, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What is logged from here on."""
    caplog.set_level(logging.WARNING, "attn_core")
    return caplog


def ends(q_lens: list[int]) -> torch.Tensor:
    return torch.tensor([0, *q_lens], dtype=torch.int32).cumsum(0).int()


class Paged:
    """Prefill over pages of 64: the gather is gated at 16 rows."""

    served, code = "aiter/gather", "aiter.gather-short-query"

    def __init__(self, backend: str = "auto", **graph: Any) -> None:
        self.wrapper: Any = attn_core.BatchPrefillWithPagedKVCacheWrapper(
            workspace(), backend=backend, **graph
        )
        self.kv, self.kv_lens = cache(6, PAGE), [100, 70]

    def plan(self, q_lens: list[int], **options: Any) -> None:
        self.q_lens = q_lens
        self.wrapper.plan(
            ends(q_lens),
            *table(self.kv_lens, PAGE),
            HEADS,
            KV_HEADS,
            DIM,
            PAGE,
            **{"causal": True, **options},
        )

    def run(self) -> torch.Tensor:
        self.q = torch.randn(sum(self.q_lens), HEADS, DIM).half()
        return self.wrapper.run(self.q, self.kv)

    def want(self) -> torch.Tensor:
        oracle = Paged("reference")
        oracle.plan(self.q_lens)
        return oracle.wrapper.run(self.q, self.kv)


class Ragged:
    """Prefill over contiguous keys: gated at 16 rows on gfx942, without any copy."""

    served, code = "aiter/varlen", "aiter.ragged-short-query"

    def __init__(self, backend: str = "auto") -> None:
        self.wrapper: Any = attn_core.BatchPrefillWithRaggedKVCacheWrapper(workspace(), backend=backend)
        self.kv = torch.randn(2, 170, KV_HEADS, DIM, generator=torch.Generator().manual_seed(2)).half()

    def plan(self, q_lens: list[int]) -> None:
        self.q_lens = q_lens
        self.wrapper.plan(ends(q_lens), ends([100, 70]), HEADS, KV_HEADS, DIM, causal=True)

    def run(self) -> torch.Tensor:
        self.q = torch.randn(sum(self.q_lens), HEADS, DIM).half()
        return self.wrapper.run(self.q, self.kv[0], self.kv[1])

    def want(self) -> torch.Tensor:
        oracle = Ragged("reference")
        oracle.plan(self.q_lens)
        return oracle.wrapper.run(self.q, self.kv[0], self.kv[1])


# Eager.


@pytest.mark.parametrize("make", [Paged, Ragged])
@pytest.mark.parametrize(
    "order", [(LONG, SHORT), (SHORT, LONG), (SHORT, LONG, SHORT), (LONG, SHORT, LONG, SHORT)], ids=str
)
def test_a_length_decides_for_its_own_plan_only(said, make: Any, order: tuple[list[int], ...]) -> None:
    one = make()
    for q_lens in order:
        one.plan(q_lens)
        assert one.wrapper.route.candidate == (one.served if q_lens is LONG else "reference/torch")
        reason = one.wrapper.backend_fallback_reason
        assert (reason is None) if q_lens is LONG else (one.code in reason)
        close(one.run(), one.want())
    gates = [record.getMessage() for record in said.records if one.code in record.getMessage()]
    assert len(gates) == 1  # however often it was met
    assert "up to 16" in gates[0]


def test_several_short_lengths_are_one_warning(said) -> None:
    one = Paged()
    for rows in (2, 3, 16, 4, 9):
        one.plan([rows, rows])
        assert one.wrapper.backend == "reference"
        assert f"got {rows}" in one.wrapper.backend_fallback_reason
    assert sum(Paged.code in record.getMessage() for record in said.records) == 1


def test_a_mask_then_fp8_then_neither(said) -> None:
    """No refusal outlives its plan: fp8 goes to native paging, which a mask was refused one plan before."""
    one = attn_core.BatchPrefillWithPagedKVCacheWrapper(workspace())
    lengths, qo = [20, 33], ends([20, 18])
    kv = cache(5, 16)
    metadata = (qo, *table(lengths), HEADS, KV_HEADS, DIM, 16)
    q = torch.randn(38, HEADS, DIM).half()
    tree = torch.cat([torch.ones(20, 20).tril().flatten(), torch.ones(18, 33).flatten()]).bool()
    for options, candidate, code in (
        ({"custom_mask": tree}, "reference/torch", "core.mask"),
        ({"q_data_type": FP8, "kv_data_type": FP8, "o_data_type": torch.bfloat16, "causal": True},
         "aiter/native", None),
        ({"custom_mask": tree}, "reference/torch", "core.mask"),
        ({"causal": True}, "aiter/gather", None),
    ):  # fmt: skip
        one.plan(*metadata, **options)
        assert one.route is not None
        assert one.route.candidate == candidate
        assert code is None or code in (one.backend_fallback_reason or "")
        fp8 = options.get("q_data_type") is FP8
        found = one.run(q.to(FP8), kv.to(FP8)) if fp8 else one.run(q, kv)
        oracle = attn_core.BatchPrefillWithPagedKVCacheWrapper(workspace(), backend="reference")
        oracle.plan(*metadata, **{name: x for name, x in options.items() if not name.endswith("data_type")})
        torch.testing.assert_close(
            found.float(), oracle.run(q, kv).float(), atol=0.25 if fp8 else 1e-2, rtol=0
        )
    masks = [record.getMessage() for record in said.records if "[core.mask]" in record.getMessage()]
    assert [text.split(":")[0] for text in masks] == [
        "aiter/native",
        "aiter/gather",
    ]  # once each, of two plans


# Captured. On CPU tensors a graph wrapper keeps the same promises, without the graph.


def graph_buffers(mask: bool = False) -> dict[str, Any]:
    def i32(n: int) -> torch.Tensor:
        return torch.zeros(n, dtype=torch.int32)

    found = {
        "use_cuda_graph": True, "qo_indptr_buf": i32(3), "paged_kv_indptr_buf": i32(3),
        "paged_kv_indices_buf": i32(8), "paged_kv_last_page_len_buf": i32(2),
    }  # fmt: skip
    if mask:
        found.update(custom_mask_buf=torch.zeros(4096, dtype=torch.uint8), mask_indptr_buf=i32(3))
    return found


@pytest.mark.parametrize(
    ("order", "candidate", "warnings"),
    [
        (([38, 2], [20, 20], [4, 36], [38, 2]), "aiter/gather", 0),
        (([16, 16], [30, 2], [16, 16]), "reference/torch", 1),
        (([38, 2], [4, 4], [38, 2]), "aiter/gather", 0),
    ],
    ids=["long", "short, long, short", "long, short, long"],
)
def test_a_captured_candidate_is_neither_demoted_nor_promoted(
    said, order, candidate: str, warnings: int
) -> None:
    one = Paged(**graph_buffers())
    launches = set()
    for q_lens in order:
        one.plan(q_lens)
        assert one.wrapper.route.candidate == candidate
        launches.add(one.wrapper._plan_info.launch)
        close(one.run(), one.want())
    assert len(launches) == 1
    assert sum(Paged.code in record.getMessage() for record in said.records) == warnings


def test_a_mask_then_fp8_in_one_captured_wrapper_is_refused(said) -> None:
    """The graph holds a kernel with a mask; what is asked for is another graph."""
    one = Paged(**graph_buffers(mask=True))
    q_lens = [20, 18]
    tree = torch.cat([torch.ones(n, length).flatten() for n, length in zip(q_lens, one.kv_lens, strict=True)])
    one.plan(q_lens, custom_mask=tree.bool(), causal=False)
    assert one.wrapper.route.candidate == "reference/torch"
    held = one.wrapper._plan_info
    with pytest.raises(NoRoute, match=r"reference/torch: takes q of .*\[core.q-dtype\]"):
        one.plan(q_lens, q_data_type=FP8, kv_data_type=FP8, o_data_type=torch.bfloat16)
    with pytest.raises(ValueError, match=r"mask is frozen at custom, asked for causal.*DecodePlanPool"):
        one.plan(q_lens)
    assert one.wrapper._plan_info is held


def decode(backend: str = "auto", max_seq_len: int | None = None) -> Any:
    return attn_core.BatchDecodeWithPagedKVCacheWrapper(
        workspace(), use_cuda_graph=True, backend=backend, max_seq_len=max_seq_len,
        paged_kv_indptr_buffer=torch.zeros(3, dtype=torch.int32),
        paged_kv_indices_buffer=torch.zeros(12, dtype=torch.int32),
        paged_kv_last_page_len_buffer=torch.ones(2, dtype=torch.int32),
    )  # fmt: skip


def plan_decode(wrapper: Any, lengths: list[int]) -> None:
    wrapper.plan(*table(lengths), HEADS, KV_HEADS, DIM, 16)


@pytest.mark.parametrize("backend", ["auto", "aiter"])
def test_a_sequence_beyond_the_capacity_is_refused_and_changes_nothing(said, backend: str) -> None:
    one, kv = decode(backend, max_seq_len=64), cache(12)
    plan_decode(one, [64, 5])
    assert one.route.candidate == "aiter/pa_v1"
    held, q = one._plan_info, torch.randn(2, HEADS, DIM).half()
    before = one.run(q, kv)
    for lengths in ([65, 5], [1, 70], [160, 1]):
        with pytest.raises(ValueError, match="max_seq_len 64"):
            plan_decode(one, lengths)
        assert one._plan_info is held
        assert torch.equal(one.run(q, kv), before)
    plan_decode(one, [1, 64])  # and goes on afterwards
    oracle = decode("reference")
    plan_decode(oracle, [1, 64])
    close(one.run(q, kv), oracle.run(q, kv))
    assert said.records == []


def test_without_a_stated_capacity_auto_captures_another_kernel(said) -> None:
    one = decode()
    plan_decode(one, [64, 5])
    assert one.route.candidate == "reference/torch"
    assert "aiter.graph-capacity" in [reason.code.slug for reason in one.route.refused]
    assert one.backend_fallback_reason is None  # quiet: it was the caller's choice not to state one
    assert said.records == []


def test_named_without_a_capacity_it_captures_the_whole_buffer_and_says_so_once(said) -> None:
    for _ in range(2):
        one, kv = decode("aiter"), cache(12)
        for lengths in ([5, 40], [150, 1]):
            plan_decode(one, lengths)
            assert one._plan_info.launch.width == 12
            q = torch.randn(2, HEADS, DIM).half()
            oracle = decode("reference")
            plan_decode(oracle, lengths)
            close(one.run(q, kv), oracle.run(q, kv))
    assert [record.getMessage().count("[aiter.graph-capacity]") for record in said.records] == [1]


# A kernel that does not build.


class Broken(Kernels):
    """AITER whose every build ends the process."""

    def __call__(self, module: str, name: str) -> Any:
        def function(**given: Any) -> Any:
            raise SystemExit("hipcc: no such file")

        return function


@pytest.mark.parametrize("make", [Paged, Ragged])
def test_a_build_that_fails_is_a_fallback_or_an_error(said, make: Any) -> None:
    broken = AiterBackend({"assume_version": "0.1.20"}, loader=Broken())
    before = plugins.use(plugins.Registry((broken, ReferenceBackend()), (), (), {}))
    try:
        one = make()
        for _ in range(3):
            one.plan(LONG)
            assert one.wrapper.backend == "reference"
            assert (
                "SystemExit: hipcc: no such file [aiter.build-failed]" in one.wrapper.backend_fallback_reason
            )
            close(one.run(), one.want())
        named = make(one.served)
        with pytest.raises(Unsupported, match=r"hipcc: no such file \[aiter.build-failed\]"):
            named.plan(LONG)
        assert named.wrapper.route is None
    finally:
        plugins.use(before)
    failures = [record.getMessage() for record in said.records if "build-failed" in record.getMessage()]
    assert len(failures) == 1


def test_strict_makes_that_an_error_for_auto_too(kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(load.STRICT_VARIABLE, "1")
    broken = AiterBackend({"assume_version": "0.1.20"}, loader=Broken())
    before = plugins.use(plugins.Registry((broken, ReferenceBackend()), (), (), {}))
    try:
        with pytest.raises(RuntimeError, match="ATTN_AITER_STRICT is set"):
            Paged().plan(LONG)
    finally:
        plugins.use(before)
