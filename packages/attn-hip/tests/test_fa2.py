"""The backend beyond the conformance kit: equal bits of equal questions, workspaces, reasons, routes."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_core import plugins
from attn_core.batch import HostBatch, paged_batch
from attn_core.capability import ARCH
from attn_core.decode import BatchDecodeWithPagedKVCacheWrapper
from attn_core.errors import NoRoute
from attn_core.prefill import BatchPrefillWithPagedKVCacheWrapper
from attn_core.problem import AttentionProblem, Op, PagedKV
from attn_core.query import GraphLimits, Query
from attn_core.reasons import Reason
from attn_core.target import DeviceTarget, parse_target
from attn_hip import build, codes, launch_gpu, plan, variants
from attn_hip.backend import Fa2Backend
from attn_hip.host import Host
from attn_hip.plan import Style, style_of

PAGE, HEADS, DIM = 16, 2, 64
KV_LEN = (1500, 70, 3000, 8)
CPU = DeviceTarget("cpu", "cpu", 2, 1)


def workspace(size: int = 32 << 20) -> torch.Tensor:
    return torch.full((size,), 0xFF, dtype=torch.uint8)


class Cache:
    """A paged cache of requests of the given lengths."""

    def __init__(self, kv_len: tuple[int, ...] = KV_LEN, dtype: torch.dtype = torch.float32) -> None:
        pages = [-(-n // PAGE) for n in kv_len]
        make = torch.Generator().manual_seed(1)
        self.kv = torch.randn(sum(pages), 2, PAGE, HEADS, DIM, generator=make).to(dtype)
        self.indptr = torch.tensor([0, *pages], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        self.ids = torch.randperm(sum(pages), generator=make).to(torch.int32)
        self.last = torch.tensor([n - (p - 1) * PAGE for n, p in zip(kv_len, pages, strict=True)]).int()
        self.dtype, self.batch = dtype, len(kv_len)

    def q(self, rows: int, group: int) -> torch.Tensor:
        make = torch.Generator().manual_seed(2)
        return torch.randn(rows, HEADS * group, DIM, generator=make).to(self.dtype)

    def decode(self, q_len: int, group: int, bytes_: int = 32 << 20, **options: Any) -> Any:
        wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(bytes_), use_tensor_cores=True, backend="fa2")
        if q_len > 1:
            options["q_len_per_req"] = q_len
        wrapper.plan(
            self.indptr,
            self.ids,
            self.last,
            HEADS * group,
            HEADS,
            DIM,
            PAGE,
            q_data_type=self.dtype,
            **options,
        )
        return wrapper

    def prefill(self, q_len: int, group: int, **options: Any) -> Any:
        wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace(), backend="fa2")
        qo = torch.arange(0, (self.batch + 1) * q_len, q_len, dtype=torch.int32)
        wrapper.plan(
            qo, self.indptr, self.ids, self.last, HEADS * group, HEADS, DIM, PAGE, q_data_type=self.dtype,
            causal=True, **options,
        )  # fmt: skip
        return wrapper


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("q_len", "group"), [(1, 4), (2, 1), (4, 4), (7, 5)])
def test_verify_gives_the_bits_of_a_causal_prefill(dtype: torch.dtype, q_len: int, group: int) -> None:
    cache = Cache(dtype=dtype)
    q = cache.q(cache.batch * q_len, group)
    out, lse = cache.decode(q_len, group).run(q, cache.kv, return_lse=True)
    want, want_lse = cache.prefill(q_len, group).run(q, cache.kv, return_lse=True)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)


def test_a_row_of_verify_gives_the_bits_of_a_decode_of_its_length() -> None:
    """With fixed cuts, a draft's last row is the decode that a server without drafts would have run."""
    cache, group = Cache(), 4
    q = cache.q(cache.batch * 4, group)
    last = q.view(cache.batch, 4, -1, DIM)[:, -1].contiguous()
    for options in ({"fixed_split_size": 20}, {"disable_split_kv": True}):
        many = cache.prefill(4, group, **options).run(q, cache.kv).view(cache.batch, 4, -1, DIM)[:, -1]
        one = cache.prefill(1, group, **options).run(last, cache.kv)
        # More packed rows may be summed by another kind of tile: equal in value, not in bits.
        torch.testing.assert_close(many, one, atol=1e-5, rtol=1e-5)


def test_a_captured_decode_gives_the_bits_of_an_eager_one() -> None:
    cache = Cache()
    q = cache.q(cache.batch, 4)
    want = cache.decode(1, 4).run(q, cache.kv)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        workspace(), use_cuda_graph=True, use_tensor_cores=True, backend="fa2",
        paged_kv_indptr_buffer=torch.zeros_like(cache.indptr),
        paged_kv_indices_buffer=torch.zeros(cache.ids.numel() + 9, dtype=torch.int32),
        paged_kv_last_page_len_buffer=torch.zeros_like(cache.last),
    )  # fmt: skip
    wrapper.plan(cache.indptr, cache.ids, cache.last, HEADS * 4, HEADS, DIM, PAGE, q_data_type=torch.float32)
    assert torch.equal(wrapper.run(q, cache.kv), want)


def test_less_workspace_gives_fewer_chunks_and_the_same_answer() -> None:
    cache = Cache()
    q = cache.q(cache.batch, 4)
    free = cache.decode(1, 4)
    need = free._state.workspace_bytes
    assert need > 0
    want = free.run(q, cache.kv)
    for size in (need // 2 // 16 * 16, 16):
        tight = cache.decode(1, 4, size)
        assert tight._state.workspace_bytes <= size
        torch.testing.assert_close(tight.run(q, cache.kv), want, atol=1e-5, rtol=1e-5)


def test_a_fixed_split_says_how_much_workspace_it_needs() -> None:
    cache = Cache()
    need = cache.decode(1, 4, fixed_split_size=4)._state.workspace_bytes
    with pytest.raises(ValueError, match=rf"{need} bytes, got 64 \[core\.workspace\]"):
        cache.decode(1, 4, 64, fixed_split_size=4)


def query(target: DeviceTarget, q_len: int, captured: bool, **changes: Any) -> Query:
    batch = batch_of(q_len)
    problem = AttentionProblem(
        op=Op.VERIFY if q_len > 1 else Op.DECODE, num_qo_heads=32, num_kv_heads=8, head_dim_qk=128,
        head_dim_vo=128, q_dtype=torch.float16, kv_dtype=torch.float16, o_dtype=torch.float16,
        kv=PagedKV(PAGE),
    )  # fmt: skip
    limits = GraphLimits(4, 4 * q_len, 1000) if captured else None
    return Query(target, replace(problem, **changes), batch.shape, limits)


def batch_of(q_len: int) -> HostBatch:
    cache = Cache()
    return paged_batch(q_len, cache.indptr, cache.ids, cache.last, PAGE)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "sm_90"])
@pytest.mark.parametrize(("q_len", "tile"), [(1, 16), (4, 16), (5, 64)])
def test_a_captured_verify_gets_the_tile_of_an_eager_one(
    native: Any, monkeypatch: pytest.MonkeyPatch, arch: str, q_len: int, tile: int
) -> None:
    monkeypatch.setattr(variants, "tiles", lambda arch, problem: (16, 64))
    target = parse_target(arch)
    for captured in (False, True):
        style = style_of(native, query(target, q_len, captured))
        assert (style.tile_q, style.max_heads) == (tile, 1)
    prefill = query(target, q_len, True, op=Op.PREFILL_PAGED)
    assert style_of(native, prefill).tile_q == (16 if q_len == 1 else 64)


@pytest.mark.parametrize(("q_len", "tile"), [(4, 16), (5, 64), (16, 64), (17, 128), (63, 128), (64, 128)])
def test_a_verify_takes_the_tallest_tile_where_two_lower_ones_would_read_its_keys_twice(
    native: Any, q_len: int, tile: int
) -> None:
    for captured in (False, True):
        style = style_of(native, query(parse_target("sm_90"), q_len, captured))
        assert style.tile_q == tile
        assert style.joined == (2**31 - 1 if tile == 16 else 2)
        assert style_of(native, query(parse_target("gfx942"), q_len, captured)).joined == 0


@pytest.mark.parametrize("captured", [False, True])
def test_a_block_that_has_a_multiprocessor_to_itself_takes_a_tile_whole(native: Any, captured: bool) -> None:
    """128 tiles on 132 of them: nothing is split, which the smaller blocks of fp8 need."""
    target, kv = parse_target("sm_90:132"), torch.full((16,), 8192, dtype=torch.int32)
    lower = torch.arange(17, dtype=torch.int32)
    batch = paged_batch(8, lower * 512, torch.arange(8192).int(), torch.full((16,), 16).int(), 16)
    limits = GraphLimits(16, 128, 8192) if captured else None
    paired = Query(target, query(target, 8, False).problem, batch.shape, limits)
    narrow = replace(paired, problem=replace(paired.problem, kv_dtype=torch.float8_e4m3fn))
    assert batch.kv_len.equal(kv)
    for asked, step, items in ((paired, 128, 128), (narrow, 64, 256)):
        style = style_of(native, asked)
        assert (style.tile_q, style.kv_tile, style.min_chunk, style.fine) == (64, step, step, step)
        cut = plan._cut(native, asked, batch, style)
        assert cut.image["counts"][0] == items
        assert cut.launched is captured


def test_paired_blocks_are_for_whole_tiles_that_fill_the_device(native: Any) -> None:
    target = parse_target("sm_90:132")

    def paired(batch: int, q_len: int = 8, **made: Any) -> bool:
        problem = query(target, q_len, False, **made).problem
        pages = torch.arange(batch + 1, dtype=torch.int32)
        shape = paged_batch(
            q_len, pages * 2, torch.arange(2 * batch).int(), torch.full((batch,), 16).int(), 16
        ).shape
        limits = GraphLimits(batch, batch * q_len, 2 * batch)
        found = [style_of(native, Query(target, problem, shape, graph)).variant for graph in (None, limits)]
        assert found[0] == found[1]
        assert found[0] is not None
        return found[0].blocks == 1

    assert [paired(n) for n in (1, 13, 14, 16, 17, 64)] == [False, False, True, True, False, False]
    assert [paired(16, q) for q in (1, 4, 5, 16, 17)] == [False, False, True, True, False]
    # The sum of a row's keys must not depend on how many requests there are.
    assert not paired(16, fixed_split_size=4)
    assert not paired(16, disable_split_kv=True)
    assert not paired(16, kv_dtype=torch.float8_e4m3fn)
    assert not paired(16, logits_soft_cap=30.0)


@pytest.mark.parametrize(
    ("q_len", "kv_len", "tile"),
    [(512, 2048, 64), (512, 2064, 128), (64, 2048, 64), (64, 2064, 128), (1024, 1024, 128), (528, 2048, 64)],
)
def test_a_short_prefill_takes_lower_tiles_if_all_run_at_once(
    native: Any, q_len: int, kv_len: int, tile: int
) -> None:
    target = parse_target("sm_90:132")
    problem = query(target, q_len, False, op=Op.PREFILL_PAGED).problem
    ends, pages = torch.tensor([0, q_len]).int(), kv_len // 16
    batch = paged_batch(
        ends, torch.tensor([0, pages]).int(), torch.arange(pages).int(), torch.tensor([16]).int(), 16
    )
    assert style_of(native, Query(target, problem, batch.shape)).tile_q == tile
    captured = Query(target, problem, batch.shape, GraphLimits(1, q_len, pages))
    assert style_of(native, captured).tile_q == 128


@pytest.mark.parametrize(
    ("q_len", "pages", "blocks"),
    [(208, 128, 2), (216, 128, 1), (256, 128, 1), (264, 128, 2), (224, 16, 1), (224, 15, 2)],
)
def test_the_tiles_of_one_request_may_be_what_pairs_fill_the_device(
    native: Any, q_len: int, pages: int, blocks: int
) -> None:
    """13, 14, 16, 17 tiles of 8 KV heads on 132 multiprocessors; then 256 keys and fewer."""
    problem = query(parse_target("sm_90:132"), q_len, False, op=Op.PREFILL_PAGED).problem
    ends, starts = torch.tensor([0, q_len]).int(), torch.tensor([0, pages]).int()
    batch = paged_batch(ends, starts, torch.arange(pages).int(), torch.tensor([16]).int(), 16)
    variant = style_of(native, Query(parse_target("sm_90:132"), problem, batch.shape)).variant
    assert variant is not None
    assert (variant.tile_q, variant.blocks) == (64, blocks)


def test_a_batch_invariant_prefill_has_one_tile(native: Any) -> None:
    """A row's bits depend on the tile's height, so the other requests' rows must not choose it."""
    target = parse_target("gfx942")
    for q_len in (1, 4, 70):
        fixed = query(target, q_len, False, op=Op.PREFILL_PAGED, disable_split_kv=True)
        assert style_of(native, fixed).tile_q == 64
    assert style_of(native, query(target, 1, False, op=Op.PREFILL_PAGED)).tile_q == 16


def test_cpu_styles(native: Any) -> None:
    tile = native.kv_tile()
    assert style_of(native, query(CPU, 1, False)) == Style(4, tile, 512, 32)
    assert style_of(native, query(CPU, 4, True)) == Style(16, tile, 512, 32)
    assert style_of(native, query(CPU, 5, False)) == Style(32, tile, 512, 1)
    wide = query(CPU, 1, False, head_dim_qk=512, head_dim_vo=512, kv_dtype=torch.float32)
    assert style_of(native, wide).max_heads == 4


def test_a_gpu_elsewhere_is_answered_for_a_complete_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTN_HIP_RUNTIME", raising=False)
    backend = Fa2Backend()
    for arch in ("gfx942", "gfx950", "sm_90", "gfx1201"):
        target = replace(parse_target(arch), index=7)  # no machine of ours has eight
        assert backend.unavailable(target) is None
    assert backend.unavailable(CPU) is None


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> plugins.Registry:
    """The installed backends, with an fa2 whose build fails."""

    def fail(*_: object) -> None:
        raise build.BuildError("kernels.cpp:1:1: error: no (log: /x)")

    monkeypatch.setattr(build, "ensure", fail)
    others = tuple(b for b in plugins.registry().backends if b.name != "fa2")
    return plugins.Registry((Fa2Backend(), *others), (), (), {})


def test_a_failed_build_falls_back_and_says_so(
    broken: plugins.Registry, caplog: pytest.LogCaptureFixture
) -> None:
    cache, old = Cache(), plugins.use(broken)
    try:
        wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace())
        with caplog.at_level(logging.WARNING):
            wrapper.plan(cache.indptr, cache.ids, cache.last, 8, HEADS, DIM, PAGE)
        assert wrapper.backend == "reference"
        assert "error: no (log: /x)" in str(wrapper.backend_fallback_reason)
        with pytest.raises(NoRoute, match=r"error: no \(log: /x\) \[fa2\.build\]") as raised:
            cache.decode(1, 4)
        assert [(reason.candidate, reason.code) for reason in raised.value.reasons] == [
            ("fa2/tile", ARCH),
            ("fa2/cpu", codes.BUILD),
        ]
    finally:
        plugins.use(old)


def test_nothing_runs_before_prepare() -> None:
    with pytest.raises(RuntimeError, match=r"needs prepare\(\).*\[fa2\.not-prepared\]"):
        Host().module()


def test_a_build_is_announced_and_a_cached_one_is_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build.existing(Host().state()["isa"])  # type: ignore[arg-type]

    def slowly(name: str, step: Any) -> Any:
        step(1, 2, "kernels_cpu.cpp")
        step(2, 2, "bind.cpp")
        return path

    with caplog.at_level(logging.INFO, logger="attn_hip"):
        assert Host().prepare() is None
        assert caplog.records == []
        monkeypatch.setattr(build, "ensure", slowly)
        assert Host().prepare() is None
    first, last = (record.getMessage() for record in caplog.records)
    assert first.startswith("building the ")
    assert last.startswith("built the ")
    assert str(path) in last


def test_doctor_tells_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Fa2Backend()
    rows = backend.doctor()
    assert rows["isa"] in str(rows["supported"])
    assert str(rows["built"]).endswith(".so")
    monkeypatch.setenv("ATTN_CPU_ISA", "mmx")
    assert "got mmx [fa2.isa]" in str(backend.doctor()["isa"])
    assert backend.unavailable(CPU) is None
    # a mistake of the caller's, so an error, and no quiet change of backend
    with pytest.raises(ValueError, match=r"ATTN_CPU_ISA: needs one of .*, got mmx \[fa2\.isa\]"):
        Cache((9,)).decode(1, 1)


def test_scales_may_be_tensors_of_any_float_type() -> None:
    cache = Cache((100, 20))
    wrapper, q = cache.decode(1, 4), cache.q(2, 4)
    want = wrapper.run(q, cache.kv, k_scale=0.5, v_scale=2.0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        scales = {
            name: torch.tensor([value], dtype=dtype) for name, value in (("k_scale", 0.5), ("v_scale", 2.0))
        }
        assert torch.equal(wrapper.run(q, cache.kv, **scales), want)


def test_a_replay_cannot_leave_its_arrays(native: Any) -> None:
    """Counts that do not fit the arrays (a caller wrote over a graph's memory) are refused, not followed."""
    cache = Cache((100, 20))
    wrapper, q = cache.decode(1, 4), cache.q(2, 4)
    wrapper._state.image["counts"][0] = 1 << 20
    with pytest.raises(ValueError, match=r"counts of the plan image.*\[fa2\.native\]"):
        wrapper.run(q, cache.kv)


def test_reasons_are_values() -> None:
    reason = Reason(codes.BUILD, "fa2/cpu", None, "x")
    assert str(reason) == "fa2/cpu: needs its CPU kernels to build, got x [fa2.build]"
    assert len({code.slug for code in codes.CODES}) == len(codes.CODES)


@pytest.mark.parametrize("encoding", ["NONE", "ROPE_LLAMA", "ALIBI"])
def test_a_default_device_changes_no_plan(encoding: str) -> None:
    """Engines set one while they load a model and warm up; tables and work items are host arrays."""
    cache, found = Cache(), []
    launch_gpu.tables_of.cache_clear()
    for device in ("meta", "cpu"):
        with torch.device(device):
            wrapper = BatchDecodeWithPagedKVCacheWrapper(
                torch.full((32 << 20,), 0xFF, dtype=torch.uint8, device="cpu"), backend="fa2"
            )
            wrapper.plan(
                cache.indptr, cache.ids, cache.last, HEADS, HEADS, DIM, PAGE, pos_encoding_mode=encoding,
                q_data_type=torch.float32,
            )  # fmt: skip
        found.append(wrapper.run(cache.q(4, 1), cache.kv))
    assert torch.equal(*found)
