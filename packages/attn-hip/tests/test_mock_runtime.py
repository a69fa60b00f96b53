"""From plan() to a kernel's output on a GPU that is not there: launcher, parameters, compiled code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_core import plugins
from attn_core.backend import AppendIO
from attn_core.batch import HostBatch, paged_batch
from attn_core.decode import BatchDecodeWithPagedKVCacheWrapper
from attn_core.errors import NoRoute
from attn_core.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from attn_core.problem import AttentionProblem, Op, PagedKV
from attn_core.query import Query
from attn_hip import backend as backend_module
from attn_hip import codes, gpu, variants
from attn_hip.backend import Fa2Backend

from .mockhip import TARGETS, Mock

ARCHS = pytest.mark.parametrize("mock", ["gfx942", "gfx950"], indirect=True)
PAGE, KV_HEADS, GROUP, DIM = 16, 2, 4, 64
HEADS = KV_HEADS * GROUP
TYPE = torch.bfloat16


@pytest.fixture(autouse=True)
def fresh_fa2() -> Any:
    """An fa2 that has loaded nothing, beside the other backends."""
    others = tuple(b for b in plugins.registry().backends if b.name != "fa2")
    made = Fa2Backend()
    old = plugins.use(plugins.Registry((made, *others), (), (), {b.name: "test" for b in (made, *others)}))
    yield made
    plugins.use(old)


class Batch:
    """A paged cache with requests of the given lengths, and queries."""

    def __init__(self, q_len: tuple[int, ...], kv_len: tuple[int, ...], seed: int = 3) -> None:
        make = torch.Generator().manual_seed(seed)
        pages = [-(-n // PAGE) for n in kv_len]
        self.q_len, self.kv_len = q_len, kv_len
        self.kv = torch.randn(sum(pages) + 2, 2, PAGE, KV_HEADS, DIM, generator=make).to(TYPE)
        self.q = torch.randn(sum(q_len), HEADS, DIM, generator=make).to(TYPE)
        self.qo = torch.tensor([0, *q_len]).cumsum(0).int()
        self.indptr = torch.tensor([0, *pages]).cumsum(0).int()
        self.ids = torch.randperm(sum(pages) + 2, generator=make)[: sum(pages)].int()
        self.last = torch.tensor([n - max(0, p - 1) * PAGE for n, p in zip(kv_len, pages, strict=True)]).int()

    @property
    def index(self) -> tuple[torch.Tensor, ...]:
        return self.indptr, self.ids, self.last

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return HEADS, KV_HEADS, DIM, PAGE


def workspace() -> torch.Tensor:
    return torch.full((4 << 20,), 0xFF, dtype=torch.uint8)


def on(wrapper: Any, arch: str) -> Any:
    """Tell a wrapper of CPU tensors that its device is a GPU."""
    wrapper._described = TARGETS[arch]
    return wrapper


def run(mock: Mock, wrapper: Any, batch: Batch, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = torch.full_like(batch.q, float("nan")), torch.full(batch.q.shape[:2], float("nan"))
    image = wrapper._state.image
    read = [batch.q, batch.kv, *(image[name] for name in image)]
    with mock.over(read, [out, lse, wrapper._float_workspace_buffer]):
        wrapper.run(batch.q, batch.kv, out=out, lse=lse, return_lse=True, **options)
    return out, lse


def want(wrapper_type: Any, batch: Batch, *first: torch.Tensor, options: dict[str, Any], **made: Any) -> Any:
    """What the reference says to the same plan."""
    wrapper = wrapper_type(workspace(), backend="reference", **made)
    wrapper.plan(*first, *batch.index, *batch.shape, q_data_type=TYPE, **options)
    return wrapper.run(batch.q, batch.kv, return_lse=True)


def check(found: tuple[torch.Tensor, torch.Tensor], right: tuple[torch.Tensor, torch.Tensor]) -> None:
    torch.testing.assert_close(found[0].float(), right[0].float(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(found[1], right[1], atol=2e-3, rtol=2e-3)


def decode(mock: Mock, batch: Batch, **options: Any) -> Any:
    wrapper = on(
        BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True, backend="fa2"), mock.arch
    )
    wrapper.plan(*batch.index, *batch.shape, q_data_type=TYPE, **options)
    return wrapper


@ARCHS
def test_a_decode_with_split_keys(mock: Mock) -> None:
    batch = Batch((1, 1, 1), (300, 1, 40))
    wrapper = decode(mock, batch)
    assert wrapper.route.candidate == "fa2/tile"
    found = run(mock, wrapper, batch)
    assert mock.fault is None
    tile, merge = mock.launched
    assert merge[0] == variants.misc_variants(mock.arch)["merge"].entry
    assert merge[1] == wrapper._state.launch.merges > 0
    assert tile[1] == wrapper._state.launch.items
    made = {"use_tensor_cores": True}
    check(found, want(BatchDecodeWithPagedKVCacheWrapper, batch, options={}, **made))


@ARCHS
def test_one_launch_when_nothing_is_split(mock: Mock) -> None:
    batch = Batch((4, 4), (40, 9))
    options: dict[str, Any] = {"q_len_per_req": 4}
    found = run(mock, decode(mock, batch, **options), batch)
    assert len(mock.launched) == 1
    check(found, want(BatchDecodeWithPagedKVCacheWrapper, batch, options=options, use_tensor_cores=True))


@ARCHS
def test_a_paged_prefill(mock: Mock) -> None:
    batch = Batch((21, 0, 3), (70, 5, 3))
    wrapper = on(BatchPrefillWithPagedKVCacheWrapper(workspace(), backend="fa2"), mock.arch)
    wrapper.plan(batch.qo, *batch.index, *batch.shape, causal=True, q_data_type=TYPE)
    found = run(mock, wrapper, batch)
    check(found, want(BatchPrefillWithPagedKVCacheWrapper, batch, batch.qo, options={"causal": True}))


@ARCHS
def test_a_ragged_prefill_with_scales_and_a_window(mock: Mock) -> None:
    make = torch.Generator().manual_seed(5)
    q = torch.randn(13, HEADS, DIM, generator=make).to(TYPE)
    k, v = (torch.randn(60, KV_HEADS, DIM, generator=make).to(TYPE) for _ in range(2))
    qo, kv = torch.tensor([0, 5, 13]).int(), torch.tensor([0, 20, 60]).int()
    results = []
    for name in ("fa2", "reference"):
        wrapper: Any = BatchPrefillWithRaggedKVCacheWrapper(workspace(), backend=name)
        if name == "fa2":
            on(wrapper, mock.arch)
        wrapper.plan(qo, kv, HEADS, KV_HEADS, DIM, causal=True, window_left=9, q_data_type=TYPE)
        out, lse = torch.empty_like(q), torch.empty(13, HEADS)
        image = wrapper._state.image
        with mock.over([q, k, v, *(image[n] for n in image)], [out, lse]):
            wrapper.run(q, k, v, out=out, lse=lse, return_lse=True)
        results.append((out, lse))
    check(*results)


@ARCHS
@pytest.mark.parametrize("mode", ["ROPE_LLAMA", "ALIBI"])
def test_tables_of_a_position_encoding_travel_with_the_plan(mock: Mock, mode: str) -> None:
    batch = Batch((1, 1), (33, 70))
    options = {"pos_encoding_mode": mode, "logits_soft_cap": 20.0}
    found = run(mock, decode(mock, batch, **options), batch)
    check(found, want(BatchDecodeWithPagedKVCacheWrapper, batch, options=options, use_tensor_cores=True))


@ARCHS
def test_an_append(mock: Mock, monkeypatch: pytest.MonkeyPatch, fresh_fa2: Fa2Backend) -> None:
    batch = Batch((1, 1), (33, 70))
    problem = AttentionProblem(
        op=Op.APPEND, num_qo_heads=KV_HEADS, num_kv_heads=KV_HEADS, head_dim_qk=DIM, head_dim_vo=DIM,
        q_dtype=TYPE, kv_dtype=TYPE, o_dtype=TYPE, kv=PagedKV(PAGE),
    )  # fmt: skip
    monkeypatch.setattr(backend_module, "target_of", lambda device: TARGETS[mock.arch])
    assert fresh_fa2.prepare(TARGETS[mock.arch], problem, "tile") is None
    rows = torch.randn(3, 2, KV_HEADS, DIM).to(TYPE)
    index = {
        "batch_indices": torch.tensor([1, -1, 0]).int(), "positions": torch.tensor([69, 0, 32]).int(),
        "kv_indices": batch.ids, "kv_indptr": batch.indptr,
    }  # fmt: skip
    right = batch.kv.clone()
    for row, request, position in ((0, 1, 69), (2, 0, 32)):
        page = int(batch.ids[int(batch.indptr[request]) + position // PAGE])
        right[page, :, position % PAGE] = rows[row]
    io = AppendIO(rows[:, 0], rows[:, 1], batch.kv[:, 0], batch.kv[:, 1], **index)
    with mock.over([rows, *index.values()], [batch.kv]):
        fresh_fa2.append("tile", problem, io)
    assert torch.equal(batch.kv, right)


def graph_decode(mock: Mock, batch: Batch, pages: int) -> Any:
    sizes = (len(batch.kv_len) + 1, pages, len(batch.kv_len))
    indptr, indices, last = (torch.zeros(size, dtype=torch.int32) for size in sizes)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        workspace(), use_cuda_graph=True, use_tensor_cores=True, paged_kv_indptr_buffer=indptr,
        paged_kv_indices_buffer=indices, paged_kv_last_page_len_buffer=last, backend="fa2",
    )  # fmt: skip
    on(wrapper, mock.arch).plan(*batch.index, *batch.shape, q_data_type=TYPE)
    return wrapper


def test_a_captured_launch_serves_other_lengths(mock: Mock) -> None:
    """Grid and parameters stay those of the first plan; the memory they point to is the plan of the day."""
    short, long = Batch((1, 1), (20, 3)), Batch((1, 1), (400, 130))
    wrapper = graph_decode(mock, short, 40)
    first = run(mock, wrapper, short)
    native = wrapper._state.launch.memo.bound.plan
    wrapper.plan(*long.index, *long.shape, q_data_type=TYPE)
    replayed = replace(wrapper._state.launch)
    second = run(mock, wrapper, long)
    assert wrapper._state.launch == replayed
    assert native is not None
    made: dict[str, Any] = {"options": {}, "use_tensor_cores": True}
    check(first, want(BatchDecodeWithPagedKVCacheWrapper, short, **made))
    check(second, want(BatchDecodeWithPagedKVCacheWrapper, long, **made))
    assert mock.launched[0] == mock.launched[2]
    assert mock.launched[1] == mock.launched[3]


def test_a_failing_launch_raises_the_runtimes_words_and_the_plan_stays(mock: Mock) -> None:
    batch = Batch((1,), (40,))
    wrapper = decode(mock, batch)
    state = wrapper._state
    mock.fail(launch=719)
    with pytest.raises(RuntimeError, match=r"launch of .*unspecified launch failure \(719\) \[fa2\.launch\]"):
        run(mock, wrapper, batch)
    mock.fail()
    assert wrapper._state is state
    check(
        run(mock, wrapper, batch),
        want(BatchDecodeWithPagedKVCacheWrapper, batch, options={}, use_tensor_cores=True),
    )


@ARCHS
def test_runs_that_native_code_checks_launch_the_same(mock: Mock) -> None:
    batch = Batch((1, 1), (70, 40))
    wrapper = decode(mock, batch)
    found = [run(mock, wrapper, batch) for _ in range(2)]
    slot, took = wrapper._state.direct, []
    call = slot.call
    slot.call = lambda *given: took.append(call(*given)) or took[-1]
    found.append(run(mock, wrapper, batch))
    assert took == [True]
    launches = len(mock.launched) // 3
    assert mock.launched[:launches] == mock.launched[2 * launches :]
    assert all(map(torch.equal, found[0], found[2]))
    mock.fail(launch=719)
    with pytest.raises(RuntimeError, match=r"unspecified launch failure \(719\) \[fa2\.launch\]"):
        run(mock, wrapper, batch)
    assert took == [True, False]
    mock.fail()
    assert all(map(torch.equal, found[0], run(mock, wrapper, batch)))


def test_a_failing_load_refuses_and_the_earlier_plan_still_runs(mock: Mock, fresh_fa2: Fa2Backend) -> None:
    batch = Batch((1,), (40,))
    wrapper = decode(mock, batch)
    mock.fail(load=2)
    with pytest.raises(NoRoute, match=r"hipModuleLoadData: out of memory \(2\) \[fa2\.load\]") as raised:
        wrapper.plan(*batch.index, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.float16)
    assert codes.LOAD in [reason.code for reason in raised.value.reasons]
    mock.fail()
    with pytest.raises(NoRoute):  # a failure is remembered
        wrapper.plan(*batch.index, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.float16)
    fresh_fa2._gpu.forget()
    check(
        run(mock, wrapper, batch),
        want(BatchDecodeWithPagedKVCacheWrapper, batch, options={}, use_tensor_cores=True),
    )
    auto = on(BatchDecodeWithPagedKVCacheWrapper(workspace(), use_tensor_cores=True), mock.arch)
    mock.fail(load=2)
    auto.plan(*batch.index, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.float16)
    assert auto.backend == "reference"
    assert "out of memory" in auto.backend_fallback_reason


def test_code_for_another_arch_is_refused_by_the_runtime(mock: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    other = gpu.device_build.ensure
    monkeypatch.setattr(gpu.device_build, "ensure", lambda variant, arch: other(variant, "gfx950"))
    with pytest.raises(NoRoute, match=r"no kernel image is available .*\(209\) \[fa2\.load\]"):
        decode(mock, Batch((1,), (40,)))


def test_a_missing_symbol_is_named(mock: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    real = variants.attend_variant
    monkeypatch.setattr(variants, "attend_variant", lambda *asked: replace(real(*asked), entry="gone"))
    with pytest.raises(
        NoRoute, match=r"hipModuleGetFunction\(gone\): named symbol not found \(500\) \[fa2\.load\]"
    ):
        decode(mock, Batch((1,), (40,)))


def test_a_library_that_is_no_runtime(mock: Mock, mock_library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch((1,), (40,))
    for path, said in (
        ("/nowhere/libamdhip64.so", "/nowhere"),
        ("libc.so.6", "has no function hipModuleLoadData"),
    ):
        monkeypatch.setenv("ATTN_HIP_RUNTIME", path)
        with pytest.raises(NoRoute, match=rf"{said}.*\[fa2\.driver\]"):
            decode(mock, batch)


def test_without_compiler_and_code_objects_the_device_is_not_served(
    mock: Mock, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("ATTN_HIP_CXX", "/nowhere/clang")
    reason = Fa2Backend().unavailable(TARGETS[mock.arch])
    assert reason is not None
    assert reason.code is codes.DEVICE_COMPILER
    assert "ATTN_HIP_CXX=/nowhere/clang" in reason.text


def test_a_query_plans_the_same_every_time(mock: Mock, fresh_fa2: Fa2Backend) -> None:
    batch = Batch((1, 1), (300, 20))
    problem = AttentionProblem(
        op=Op.DECODE, num_qo_heads=HEADS, num_kv_heads=KV_HEADS, head_dim_qk=DIM, head_dim_vo=DIM,
        q_dtype=TYPE, kv_dtype=TYPE, o_dtype=TYPE, kv=PagedKV(PAGE), use_tensor_cores=True,
    )  # fmt: skip
    host: HostBatch = paged_batch(1, *batch.index, PAGE)
    query = Query(TARGETS[mock.arch], problem, host.shape)
    assert fresh_fa2.prepare(query.target, problem, "tile") is None
    first, second = (fresh_fa2.plan(query, "tile", host) for _ in range(2))
    assert first.launch == second.launch
    assert all(torch.equal(first.image[name], second.image[name]) for name in first.image)
