"""Decode through the pointer-level stand-in, and what happens when one guard is taken away."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest
import torch

from attn_aiter import codes, rows
from attn_aiter.backend import AiterBackend
from attn_aiter.routes.pa_v1 import PARTITION
from attn_core.backend import RunIO
from attn_core.batch import paged_batch
from attn_core.errors import Unsupported
from attn_core.problem import Op
from attn_core.query import GraphLimits
from attn_core.state import check_contract, fit_q

from .standins import PaV1

LENGTHS = [19, 33, 1, 300]
CONTRACT = rows.CONTRACTS[rows.PA_V1]


@pytest.fixture
def kernel() -> PaV1:
    return PaV1()


@pytest.fixture
def backend(kernel: PaV1) -> AiterBackend:
    return AiterBackend({"assume_version": "0.1.20"}, loader=lambda module, name: kernel)


def batch_of(lengths: list[int], page: int) -> Any:
    """Requests of these lengths over shuffled pages."""
    counts = torch.tensor([-(-n // page) for n in lengths])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    ids = torch.randperm(int(indptr[-1]), generator=torch.Generator().manual_seed(3))
    last = torch.tensor([(n - 1) % page + 1 for n in lengths])
    return paged_batch(1, indptr, ids, last, page)


def tensors(p: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    count, page = batch.shape.total_pages, p.page_size
    q = torch.randn(batch.shape.batch_size, p.num_qo_heads, p.head_dim_qk) * 8  # peaked: misreads show
    k, v = (torch.randn(count, page, p.num_kv_heads, p.head_dim_qk).to(p.kv_dtype) for _ in range(2))
    return q.to(p.q_dtype), k, v


def run(backend, p, query, image, batch, q, k, v, guarded: bool = True, graph=None, out=None, **scales):
    """One run with the wrapper's checks in front of it, or without them."""
    if guarded:
        check_contract(CONTRACT, k, v)
        q = fit_q(CONTRACT, q)
    asked = query(p, batch, graph=graph)
    assert backend.prepare(asked.target, p, rows.PA_V1) is None
    result = backend.plan(asked, rows.PA_V1, batch)
    work = torch.empty(result.workspace_bytes, dtype=torch.uint8)
    out = torch.full(q.shape, 7.0, dtype=p.o_dtype) if out is None else out
    backend.run(result.launch, image(batch, result), RunIO(q, k, v, out, None, work, **scales))
    return out, result


def wrong(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).abs().max())


@pytest.mark.parametrize("page", sorted(rows.PA_PAGES))
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window_left": 7},
        {"window_left": 0},
        {"logits_soft_cap": 3.0},
        {"dtype": torch.float16, "head_dim": 64},
        {"num_qo_heads": 16, "num_kv_heads": 1},
        {"num_qo_heads": 2},
    ],
    ids=str,
)
def test_equals_the_reference(
    backend, problem, query, device_image, reference, page: int, changes: dict[str, Any]
) -> None:
    p = problem(Op.DECODE, page_size=page, **changes)
    batch = batch_of(LENGTHS, page)
    q, k, v = tensors(p, batch)
    out, _ = run(backend, p, query, device_image, batch, q, k, v)
    assert wrong(out, reference(p, batch, q, k, v)[0]) < 3e-2


def test_views_of_one_pool_and_a_slice_of_a_fused_qkv(
    backend, problem, query, device_image, reference
) -> None:
    p = problem(Op.DECODE)
    batch = batch_of(LENGTHS, 16)
    q, k, v = tensors(p, batch)
    pool = torch.stack((k, v), 1)
    fused = torch.randn(4, 12, 128).to(p.q_dtype)
    fused[:, :8] = q
    out, _ = run(backend, p, query, device_image, batch, fused[:, :8], pool[:, 0], pool[:, 1])
    assert wrong(out, reference(p, batch, q, k, v)[0]) < 3e-2


# One entry per guard: with it the answer is right or refused, without it silently wrong.


def test_mutation_v_with_other_strides(backend, problem, query, device_image, reference) -> None:
    p = problem(Op.DECODE)
    batch = batch_of(LENGTHS, 16)
    q, k, v = tensors(p, batch)
    hnd = v.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="identical strides"):
        run(backend, p, query, device_image, batch, q, k, hnd)
    out, _ = run(backend, p, query, device_image, batch, q, k, hnd, guarded=False)
    assert wrong(out, reference(p, batch, q, k, v)[0]) > 0.5


def test_mutation_q_with_spread_heads(backend, problem, query, device_image, reference) -> None:
    p = problem(Op.DECODE)
    batch = batch_of(LENGTHS, 16)
    q, k, v = tensors(p, batch)
    spread = torch.cat([q, torch.randn_like(q)], -1)[..., :128]
    want, _ = reference(p, batch, q, k, v)
    out, _ = run(backend, p, query, device_image, batch, spread, k, v)
    assert wrong(out, want) < 3e-2
    out, _ = run(backend, p, query, device_image, batch, spread, k, v, guarded=False)
    assert wrong(out, want) > 0.5


def test_mutation_out_that_is_not_dense(
    backend, problem, query, device_image, reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem(Op.DECODE)
    batch = batch_of(LENGTHS, 16)
    q, k, v = tensors(p, batch)
    want, _ = reference(p, batch, q, k, v)
    out = torch.full((8, 4, 128), 7.0, dtype=p.o_dtype).transpose(0, 1)
    with pytest.raises(ValueError, match=r"\[aiter.out\]"):
        run(backend, p, query, device_image, batch, q, k, v, out=out)
    assert (out == 7).all()
    monkeypatch.setattr("attn_aiter.routes.pa_v1.check_dense", lambda name, t: None)
    run(backend, p, query, device_image, batch, q, k, v, out=out)
    assert wrong(out, want) > 0.5


def test_mutation_window_without_its_own_token(
    backend, problem, query, device_image, reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem(Op.DECODE, window_left=3)
    batch = batch_of(LENGTHS, 16)
    q, k, v = tensors(p, batch)
    want, _ = reference(p, batch, q, k, v)
    plan = backend._routes[rows.PA_V1].plan

    def off_by_one(*args: Any) -> Any:
        result = plan(*args)
        return replace(result, launch=replace(result.launch, window=result.launch.window - 1))

    assert wrong(run(backend, p, query, device_image, batch, q, k, v)[0], want) < 3e-2
    monkeypatch.setattr(backend._routes[rows.PA_V1], "plan", off_by_one, raising=False)
    assert wrong(run(backend, p, query, device_image, batch, q, k, v)[0], want) > 0.5


def test_mutation_cap_and_window_together(backend, problem, query, device_image, reference) -> None:
    p = problem(Op.DECODE, window_left=3, logits_soft_cap=3.0)
    batch = batch_of(LENGTHS, 16)
    declined = [rule.decline(query(p, batch), rows.PA_V1, "aiter/pa_v1") for rule in backend.rules]
    assert codes.CAP_AND_WINDOW in [reason.code for reason in declined if reason]
    q, k, v = tensors(p, batch)
    out, _ = run(backend, p, query, device_image, batch, q / 8, k, v)  # what the rule keeps from happening
    assert wrong(out, reference(p, batch, q / 8, k, v)[0]) > 0.1


def test_mutation_head_dim_that_is_no_multiple_of_64(
    backend, problem, query, device_image, reference
) -> None:
    p = problem(Op.DECODE, head_dim=96)
    assert 96 not in rows.CAPABILITIES[rows.PA_V1].head_dims
    batch = batch_of(LENGTHS, 16)
    q, k, v = tensors(p, batch)
    out, _ = run(backend, p, query, device_image, batch, q, k, v)
    assert (out[..., 64:] == 7).all()  # never written


def test_mutation_page_size_that_does_not_divide_the_tile(
    backend, problem, query, device_image, reference
) -> None:
    assert all(32 % page == 0 for page in rows.PA_PAGES)
    p = problem(Op.DECODE, page_size=24)
    batch = batch_of(LENGTHS, 24)
    q, k, v = tensors(p, batch)
    out, _ = run(backend, p, query, device_image, batch, q, k, v)
    assert wrong(out, reference(p, batch, q, k, v)[0]) > 0.5


def test_mutation_page_size_beyond_the_tile(backend, problem, query) -> None:
    p = problem(Op.DECODE, page_size=64)
    batch = batch_of(LENGTHS, 64)
    with pytest.raises(Unsupported, match=r"static_assert.*\[aiter.build-failed\]"):
        backend.plan(query(p, batch), rows.PA_V1, batch)


@pytest.mark.parametrize(("group", "exact"), [(16, True), (17, False), (32, False)])
def test_mutation_group_beyond_16(
    backend, problem, query, device_image, reference, group: int, exact: bool
) -> None:
    assert rows.CAPABILITIES[rows.PA_V1].max_group == 16
    p = problem(Op.DECODE, num_qo_heads=2 * group)
    batch = batch_of(LENGTHS, 16)
    q, k, v = tensors(p, batch)
    out, _ = run(backend, p, query, device_image, batch, q, k, v)
    error = wrong(out, reference(p, batch, q, k, v)[0])
    assert error < 3e-2 if exact else error > 0.5


def test_mutation_cache_of_another_type(backend, problem, query, device_image, reference) -> None:
    """The kernel is told q's type alone; fp8 would be another entry, with scales."""
    assert rows.CAPABILITIES[rows.PA_V1].same_dtype
    p = problem(Op.DECODE)
    batch = batch_of(LENGTHS, 16)
    q, k, v = tensors(p, batch)
    out, _ = run(backend, p, query, device_image, batch, q, k.half(), v.half())
    assert not wrong(out, reference(p, batch, q, k, v)[0]) < 0.5


def test_mutation_workspace_too_small(backend, problem, query, device_image) -> None:
    """Without aiter.workspace the partial results go on past the buffer, into somebody else's memory."""
    p = problem(Op.DECODE)
    batch = batch_of([600, 5], 16)
    q, k, v = tensors(p, batch)
    backend.prepare(query(p, batch).target, p, rows.PA_V1)
    result = backend.plan(query(p, batch), rows.PA_V1, batch)
    memory = torch.zeros(2 * result.workspace_bytes, dtype=torch.uint8)
    short = memory[: result.workspace_bytes - 64]
    io = RunIO(q, k, v, torch.empty_like(q), None, short)
    backend.run(result.launch, device_image(batch, result), io)
    assert memory[result.workspace_bytes - 64 : result.workspace_bytes].all()
    assert not memory[result.workspace_bytes :].any()  # what the plan asked for is enough
    with pytest.raises(Unsupported):
        backend.plan(query(p, batch, workspace_bytes=short.numel()), rows.PA_V1, batch)


def test_mutation_capacity_below_the_sequence(
    backend, problem, query, device_image, reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem(Op.DECODE)
    batch = batch_of([600], 16)
    q, k, v = tensors(p, batch)
    q = q / 8  # flat: the lost keys count
    want, _ = reference(p, batch, q, k, v)
    assert wrong(run(backend, p, query, device_image, batch, q, k, v)[0], want) < 3e-2
    monkeypatch.setattr("attn_aiter.routes.pa_v1.PARTITION", 512)  # grid for half of the keys
    assert wrong(run(backend, p, query, device_image, batch, q, k, v)[0], want) > 3e-2


def test_mutation_an_empty_request(backend, problem, query, device_image) -> None:
    p = problem(Op.DECODE)
    batch = paged_batch(1, torch.tensor([0, 1, 1]), torch.tensor([0]), torch.tensor([4, 1]), 16)
    with pytest.raises(Unsupported) as caught:
        backend.plan(query(p, batch), rows.PA_V1, batch)
    assert caught.value.reason.code == codes.EMPTY_REQUEST
    unseen = replace(batch, min_kv_len=1)
    out, _ = run(backend, p, query, device_image, unseen, *tensors(p, batch))
    assert not out[1].isfinite().any()


def test_an_empty_batch_calls_nothing(backend, kernel, problem, query, device_image) -> None:
    p = problem(Op.DECODE)
    none = torch.tensor([], dtype=torch.int32)
    batch = paged_batch(1, torch.tensor([0]), none, none, 16)
    q, cache = torch.empty(0, 8, 128).to(p.q_dtype), torch.empty(0, 16, 2, 128).to(p.q_dtype)
    _, result = run(backend, p, query, device_image, batch, q, cache, cache)
    assert result.launch is None
    assert kernel.calls == 0


def test_workspace_holds_every_partial_result(backend, problem, query, device_image) -> None:
    p = problem(Op.DECODE)
    batch = batch_of([PARTITION * 2 + 1, 5], 16)
    result = backend.plan(query(p, batch), rows.PA_V1, batch)
    assert result.workspace_bytes == 2 * 8 * 3 * (8 + 128 * 2)
    with pytest.raises(Unsupported) as caught:
        backend.plan(query(p, batch, workspace_bytes=result.workspace_bytes - 1), rows.PA_V1, batch)
    assert caught.value.reason.code == codes.WORKSPACE
    backend.plan(query(p, batch, workspace_bytes=result.workspace_bytes), rows.PA_V1, batch)


def test_under_capture_everything_has_the_capacitys_size(
    backend, kernel, problem, query, device_image, reference
) -> None:
    p = problem(Op.DECODE)
    limits = GraphLimits(batch_size=2, total_q=2, max_pages=64, max_kv_len=20000)
    plans = []
    for lengths in ([5, 40], [300, 17]):
        batch = batch_of(lengths, 16)
        q, k, v = tensors(p, batch)
        out, result = run(backend, p, query, device_image, batch, q, k, v, graph=limits)
        assert wrong(out, reference(p, batch, q, k, v)[0]) < 3e-2
        plans.append((result.launch, result.workspace_bytes, {n: t.numel() for n, t in result.image.items()}))
    assert plans[0] == plans[1]
    assert hash(plans[0][0]) == hash(plans[1][0])
    assert plans[0][0].width == 64  # the index buffer holds no more, whatever max_seq_len says
    assert len(kernel.built) == 1


def test_the_variant_is_that_of_the_capacity_and_built_once(backend, kernel, problem, query) -> None:
    p = problem(Op.DECODE)
    backend.prepare(query(p, batch_of([1], 16)).target, p, rows.PA_V1)
    for longest, loops in ((256 * 64, 1), (256 * 64 + 1, 2), (256 * 64 - 5, 1)):
        batch = batch_of([longest], 16)
        backend.plan(query(p, batch), rows.PA_V1, batch)
        assert dict(kernel.built[-1] if loops == 2 else kernel.built[0])["npar_loops"] == loops
    assert len(kernel.built) == 2


def test_scales_are_folded(backend, problem, query, device_image, reference) -> None:
    p = problem(Op.DECODE)
    batch = batch_of(LENGTHS, 16)
    q, k, v = tensors(p, batch)
    out, _ = run(backend, p, query, device_image, batch, q, k, v, q_scale=0.5, k_scale=0.5, v_scale=2.0)
    assert wrong(out, reference(p, batch, q * 0.5, k * 0.5, v * 2.0)[0]) < 6e-2


def test_the_arguments_have_the_types_of_the_c_list(backend, problem, query, device_image) -> None:
    from attn_aiter.routes.pa_v1 import arguments

    p = problem(Op.DECODE)
    batch = batch_of(LENGTHS, 16)
    q, k, v = tensors(p, batch)
    result = backend.plan(query(p, batch), rows.PA_V1, batch)
    io = RunIO(q, k, v, torch.empty_like(q), None, torch.empty(8, dtype=torch.uint8))
    given = arguments(result.launch, device_image(batch, result), io, 1.0)
    kinds = {"*": ctypes.c_void_p, "float": ctypes.c_float, "int": ctypes.c_int}
    declared = backend.api.pa_v1_arguments
    assert len(given) == len(declared) == 26
    for value, text in zip(given, declared, strict=True):
        type_ = text.rsplit(" ", 1)[0].removeprefix("const ")
        assert isinstance(value, kinds["*" if "*" in type_ else type_]), text


def test_a_page_stride_beyond_a_c_int_is_refused(backend, problem, query, device_image) -> None:
    p = problem(Op.DECODE)
    batch = batch_of([3], 16)
    q = tensors(p, batch)[0]
    far = torch.empty(1, dtype=p.kv_dtype, device="meta").as_strided((1, 16, 2, 128), (2**31, 256, 128, 1))
    with pytest.raises(ValueError, match=r"needs strides up to 2147483647.*\[aiter.kv-stride\]"):
        run(backend, p, query, device_image, batch, q, far, far, guarded=False)
