"""Appending through the pointer-level stand-in, and what happens when one guard is taken away."""

from __future__ import annotations

import pytest
import torch

from attn_aiter import codes, rows
from attn_aiter.backend import AiterBackend
from attn_aiter.routes import append
from attn_core.backend import AppendIO
from attn_core.errors import Unsupported
from attn_core.problem import Op
from attn_core.reference import ReferenceBackend

from .standins import reshape_and_cache_flash

PAGES, PAGE, HEADS, DIM = 6, 4, 2, 8


@pytest.fixture
def backend() -> AiterBackend:
    return AiterBackend({"assume_version": "0.1.20"}, loader=lambda module, name: reshape_and_cache_flash)


def caches(layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Two zeroed caches as views: separate, halves of one pool, or something the kernel cannot see."""
    if layout == "pair":
        return torch.zeros(PAGES, PAGE, HEADS, DIM), torch.zeros(PAGES, PAGE, HEADS, DIM)
    if layout == "pool":
        pool = torch.zeros(PAGES, 2, PAGE, HEADS, DIM)
        return pool[:, 0], pool[:, 1]
    if layout == "heads outside":
        k, v = (torch.zeros(PAGES, HEADS, PAGE, DIM).transpose(1, 2) for _ in range(2))
        return k, v
    if layout == "padded tokens":
        k, v = (torch.zeros(PAGES, PAGE, HEADS, DIM + 8)[..., :DIM] for _ in range(2))
        return k, v
    assert layout == "unlike pages"
    return torch.zeros(PAGES, PAGE, HEADS, DIM), torch.zeros(PAGES, 2, PAGE, HEADS, DIM)[:, 0]


def rows_of(k: torch.Tensor, v: torch.Tensor) -> AppendIO:
    """Seven rows of two requests: one skipped, one beyond its pages, one to a page that does not exist."""
    torch.manual_seed(0)
    i32 = torch.int32
    fused = torch.randn(7, 3 * HEADS, DIM)
    return AppendIO(
        fused[:, HEADS : 2 * HEADS],
        fused[:, 2 * HEADS :],
        k,
        v,
        torch.tensor([0, 0, 0, 1, -1, 0, 1], dtype=i32),
        torch.tensor([2, 3, 4, 0, 1, 8, 4], dtype=i32),
        torch.tensor([4, 0, 2, 99], dtype=i32),
        torch.tensor([0, 2, 4], dtype=i32),
    )


def prepared(backend: AiterBackend, problem, target):
    p = problem(
        Op.APPEND, dtype=torch.float32, head_dim=DIM, page_size=PAGE, num_qo_heads=HEADS, num_kv_heads=HEADS
    )
    assert backend.prepare(target, p, rows.APPEND) is None
    return p


@pytest.mark.parametrize("layout", ["pair", "pool"])
def test_equals_the_reference(backend, problem, gfx942, layout: str) -> None:
    p = prepared(backend, problem, gfx942)
    io, want = rows_of(*caches(layout)), rows_of(*caches("pair"))
    assert append.slots(io).tolist() == [4 * PAGE + 2, 4 * PAGE + 3, 0, 2 * PAGE, -1, -1, -1]
    backend.append(rows.APPEND, p, io)
    kept = [0, 1, 2, 3]  # the others are for nobody
    ReferenceBackend().append(
        "torch",
        p,
        AppendIO(
            want.key[kept], want.value[kept], want.k, want.v, want.batch_indices[kept],
            want.positions[kept], want.kv_indices, want.kv_indptr,
        ),
    )  # fmt: skip
    assert torch.equal(io.k, want.k)
    assert torch.equal(io.v, want.v)


@pytest.mark.parametrize("layout", ["heads outside", "padded tokens"])
def test_mutation_layouts_the_kernel_cannot_see(
    backend, problem, gfx942, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    p = prepared(backend, problem, gfx942)
    io = rows_of(*caches(layout))
    with pytest.raises(Unsupported) as caught:
        backend.append(rows.APPEND, p, io)
    assert caught.value.reason.code == codes.APPEND_LAYOUT
    assert not io.k.any()
    assert not io.v.any()
    monkeypatch.setattr(append, "check_layout", lambda io: None)
    backend.append(rows.APPEND, p, io)
    assert not torch.equal(io.k[4, 2], io.key[0])  # corrupted: the row is not where it belongs


def test_mutation_unlike_page_strides(backend, problem, gfx942) -> None:
    p = prepared(backend, problem, gfx942)
    with pytest.raises(Unsupported, match="same page stride"):
        backend.append(rows.APPEND, p, rows_of(*caches("unlike pages")))


def test_mutation_rows_with_spread_heads(backend, problem, gfx942, monkeypatch: pytest.MonkeyPatch) -> None:
    p = prepared(backend, problem, gfx942)

    def spread() -> AppendIO:
        io = rows_of(*caches("pair"))
        wide = torch.randn(7, HEADS, DIM + 8)
        return AppendIO(wide[..., :DIM], io.value, io.k, io.v, io.batch_indices, io.positions, io.kv_indices,
                        io.kv_indptr)  # fmt: skip

    io = spread()
    backend.append(rows.APPEND, p, io)
    assert torch.equal(io.k[4, 2], io.key[0])
    monkeypatch.setattr(append, "_rows_packed", lambda t: True)
    io = spread()
    backend.append(rows.APPEND, p, io)
    assert not torch.equal(io.k[4, 2], io.key[0])


def test_mutation_rows_outside_their_request(
    backend, problem, gfx942, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the mask, position 8 of a request of two pages lands in its neighbour's page."""
    p = prepared(backend, problem, gfx942)
    io = rows_of(*caches("pair"))
    backend.append(rows.APPEND, p, io)
    assert torch.equal(io.k[2, 0], io.key[3])

    def unchecked(io: AppendIO) -> torch.Tensor:
        entry = io.kv_indptr.long()[io.batch_indices.long().clamp(min=0)] + io.positions.long() // PAGE
        slot = io.kv_indices.long()[entry] * PAGE + io.positions.long() % PAGE
        return torch.where(io.batch_indices >= 0, slot, -1)[:6]

    monkeypatch.setattr(append, "slots", unchecked)
    backend.append(rows.APPEND, p, io)
    assert not torch.equal(io.k[2, 0], io.key[3])


def test_a_cache_without_pages_skips_all(backend, problem, gfx942) -> None:
    prepared(backend, problem, gfx942)
    io = rows_of(*caches("pair"))
    none = torch.zeros(0, dtype=torch.int32)
    empty = AppendIO(io.key, io.value, io.k, io.v, io.batch_indices, io.positions, none,
                     torch.zeros(3, dtype=torch.int32))  # fmt: skip
    assert append.slots(empty).tolist() == [-1] * 7
