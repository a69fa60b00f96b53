"""Native paging: what reaches mha_batch_prefill_func, release by release."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attn_aiter import rows
from attn_aiter.backend import AiterBackend
from attn_aiter.routes import batch_prefill
from attn_core.backend import RunIO
from attn_core.batch import paged_batch
from attn_core.problem import MaskMode, Op

from .functions import Prefill

PAGES = 7


@pytest.fixture
def fake() -> Prefill:
    return Prefill()


def backend_of(fake: Prefill, release: str = "0.1.20") -> AiterBackend:
    options = {"assume_version": release, "min_version": "0.1.0"}
    return AiterBackend(options, loader=lambda module, name: fake)


def batch_of(page: int) -> Any:
    return paged_batch(
        torch.tensor([0, 5, 7, 12]),
        torch.tensor([0, 3, 3, 5]),
        torch.tensor([4, 0, 5, 2, 6]),
        torch.tensor([min(3, page), page, page]),
        page,
    )


def run(backend, p, query, device_image, page: int, q, k, v, lse: bool = True, **scales):
    batch = batch_of(page)
    asked = query(p, batch)
    assert backend.prepare(asked.target, p, rows.NATIVE) is None
    result = backend.plan(asked, rows.NATIVE, batch)
    out = torch.full((12, 8, 128), 7.0, dtype=p.o_dtype)
    found = torch.full((12, 8), 7.0) if lse else None
    backend.run(result.launch, device_image(batch, result), RunIO(q, k, v, out, found, **scales))
    return batch, out, found


def pages(p: Any, page: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    pool = torch.randn(PAGES, 2, page, 2, 128).to(p.kv_dtype)
    return torch.randn(12, 8, 128).to(p.q_dtype), pool[:, 0], pool[:, 1]


@pytest.mark.parametrize(
    ("release", "page"),
    [("0.1.20", 1), ("0.1.20", 16), ("0.1.16", 16), ("0.1.10", 128), ("0.1.7.post2.dev18", 1)],
)
@pytest.mark.parametrize(
    "changes", [{}, {"mask": MaskMode.NONE}, {"window_left": 2}, {"logits_soft_cap": 2.0}]
)
def test_equals_the_reference(
    fake, problem, query, device_image, reference, release: str, page: int, changes: dict[str, Any]
) -> None:
    p = problem(Op.PREFILL_PAGED, page_size=page, **changes)
    q, k, v = pages(p, page)
    batch, out, lse = run(backend_of(fake, release), p, query, device_image, page, q, k, v)
    want_out, want_lse = reference(p, batch, q, k, v)
    torch.testing.assert_close(out.float(), want_out.float(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse, want_lse, atol=2e-2, rtol=2e-2)


def test_an_old_release_gets_tokens_and_a_new_one_pages(fake, problem, query, device_image) -> None:
    p = problem(Op.PREFILL_PAGED, page_size=1)
    for release, dims in (("0.1.7.post2.dev18", 3), ("0.1.20", 4)):
        run(backend_of(fake, release), p, query, device_image, 1, *pages(p, 1))
        given = fake.calls[-1]
        assert given["k"].ndim == dims
        assert ("kv_last_page_lens" in given) is (dims == 4)
        assert ("q_descale" in given) is (dims == 4)


def test_fp8_gets_scales_on_the_device(fake, problem, query, device_image, reference) -> None:
    fp8 = torch.float8_e4m3fnuz
    p = problem(Op.PREFILL_PAGED, dtype=fp8, o_dtype=torch.bfloat16)
    q, k, v = pages(p, 16)
    batch, out, _ = run(
        backend_of(fake), p, query, device_image, 16, q, k, v, lse=False,
        q_scale=0.5, v_scale=torch.tensor(2.0),
    )  # fmt: skip
    given = fake.calls[-1]
    for name, value in (("q_descale", 0.5), ("k_descale", 1.0), ("v_descale", 2.0)):
        assert given[name].shape == (1,)
        assert given[name].dtype is torch.float32
        assert given[name].item() == value
    half = problem(Op.PREFILL_PAGED)
    want, _ = reference(
        half, batch, *(t.to(torch.bfloat16) for t in (q.float() * 0.5, k.float(), v.float() * 2))
    )
    torch.testing.assert_close(out.float(), want.float(), atol=3e-2, rtol=3e-2)


def test_fp8_without_lse_says_so_at_run(fake, problem, query, device_image) -> None:
    p = problem(Op.PREFILL_PAGED, dtype=torch.float8_e4m3fnuz, o_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"return_lse: needs inputs other than fp8.*\[aiter.fp8-lse\]"):
        run(backend_of(fake), p, query, device_image, 16, *pages(p, 16))


def test_a_cache_beyond_32_bits_is_refused_where_offsets_are_narrow(
    fake, problem, query, device_image
) -> None:
    p = problem(Op.PREFILL_PAGED, page_size=16)
    q = torch.randn(12, 8, 128).to(p.q_dtype)
    k = torch.empty(300_000, 16, 2, 128, dtype=p.kv_dtype, device="meta")  # strides without memory
    with pytest.raises(ValueError, match=r"needs at most 2147483647 bytes.*\[aiter.cache-bytes\]"):
        run(backend_of(fake, "0.1.12"), p, query, device_image, 16, q, k, k)
    batch = batch_of(128)
    wide = problem(Op.PREFILL_PAGED, page_size=128)
    backend = backend_of(fake, "0.1.12")
    assert backend.plan(query(wide, batch), rows.NATIVE, batch).launch.narrow is False
    assert backend_of(fake).plan(query(p, batch_of(16)), rows.NATIVE, batch_of(16)).launch.narrow is False


@pytest.mark.parametrize("release", ["0.1.12", "0.1.20"])
@pytest.mark.parametrize("which", ["k", "v"])
def test_a_cache_across_4_gib_is_refused_where_pages_are_gathered(
    fake, problem, query, device_image, monkeypatch, release, which
) -> None:
    """The low word of an address wraps without a carry. https://github.com/ROCm/aiter/issues/3824"""
    p = problem(Op.PREFILL_PAGED, page_size=16)
    q, k, v = pages(p, 16)
    reach = k.shape[0] * k.stride(0) * k.element_size()
    across = k if which == "k" else v
    start = {id(k): 3 << 32, id(v): 7 << 32, id(across): (5 << 32) - reach}
    monkeypatch.setattr(batch_prefill, "address", lambda t: start.get(id(t), 0))
    run(backend_of(fake, release), p, query, device_image, 16, q, k, v)
    start[id(across)] += 1
    with pytest.raises(ValueError, match=rf"aiter/native: {which}: needs .*4 GiB.*\[aiter.cache-address\]"):
        run(backend_of(fake, release), p, query, device_image, 16, q, k, v)


def test_pages_of_a_step_may_lie_anywhere(fake, problem, query, device_image, monkeypatch) -> None:
    monkeypatch.setattr(batch_prefill, "address", lambda t: (1 << 32) - 16)
    p = problem(Op.PREFILL_PAGED, page_size=128)
    run(backend_of(fake), p, query, device_image, 128, *pages(p, 128))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),  # heads outside tokens
        lambda t: torch.randn(PAGES, 16, 2, 132).to(t.dtype)[..., :128],  # strides off 16 bytes
    ],
    ids=["hnd", "unaligned"],
)
def test_pages_it_cannot_read_are_refused(fake, problem, query, device_image, spoil) -> None:
    p = problem(Op.PREFILL_PAGED, page_size=16)
    q, k, v = pages(p, 16)
    for cache in ((spoil(k), v), (k, spoil(v))):
        with pytest.raises(ValueError, match=r"\[aiter.kv-stride\]"):
            run(backend_of(fake), p, query, device_image, 16, q, *cache)
