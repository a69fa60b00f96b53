"""Tensors whose memory does not hold their values in the usual way: right, or refused unwritten."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import attn_core

HEADS, DIM, PAGE = 2, 16, 4
Change = Callable[[torch.Tensor], torch.Tensor]


def negated(t: torch.Tensor) -> torch.Tensor:
    """Return the same values as a view that is negated when it is read."""
    view = torch.complex(torch.zeros_like(t), -t).conj().imag
    assert view.is_neg()
    assert torch.equal(view, t)
    return view


def freed(t: torch.Tensor) -> torch.Tensor:
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def decode(**t: torch.Tensor) -> object:
    wrapper = attn_core.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(1 << 20, dtype=torch.uint8), backend="reference"
    )
    wrapper.plan(i32(0, 2), i32(1, 0), i32(3), HEADS, HEADS, DIM, PAGE, q_data_type=torch.float32)
    return wrapper.run(t["q"], (t["k"], t["v"]), out=t["out"])


def ragged(**t: torch.Tensor) -> object:
    wrapper = attn_core.BatchPrefillWithRaggedKVCacheWrapper(
        torch.zeros(1 << 20, dtype=torch.uint8), backend="reference"
    )
    wrapper.plan(i32(0, 1), i32(0, 5), HEADS, HEADS, DIM, q_data_type=torch.float32)
    return wrapper.run(t["q"], t["k"], t["v"], out=t["out"])


def merge(**t: torch.Tensor) -> object:
    return attn_core.merge_state(t["q"], t["s"], t["out"], t["s"])


PAGED = {"q": (1, HEADS, DIM), "k": (2, PAGE, HEADS, DIM), "v": (2, PAGE, HEADS, DIM), "out": (1, HEADS, DIM)}
RAGGED = {**PAGED, "k": (5, HEADS, DIM), "v": (5, HEADS, DIM)}
MERGED = {"q": (1, HEADS, DIM), "out": (1, HEADS, DIM), "s": (1, HEADS)}
CASES = [
    pytest.param(call, shapes, name, id=f"{call.__name__}-{name}")
    for call, shapes in ((decode, PAGED), (ragged, RAGGED), (merge, MERGED))
    for name in shapes
]


@pytest.mark.parametrize(("call", "shapes", "name"), CASES)
def test_a_negated_view_is_refused(
    call: Callable[..., object], shapes: dict[str, tuple[int, ...]], name: str
) -> None:
    """A kernel would read the values with the other sign."""
    tensors = {key: random(*shape) for key, shape in shapes.items()}
    call(**tensors)
    before = tensors["out"].clone()
    tensors[name] = negated(tensors[name])
    with pytest.raises(TypeError, match=r"needs a tensor that holds its values .* got a negated view"):
        call(**tensors)
    assert torch.equal(tensors["out"], before)


ROWS, PAGES = 3, 3
INDICES = {
    "batch_indices": i32(0, 1, 1), "positions": i32(5, 0, 2), "kv_indices": i32(2, 0, 1),
    "kv_indptr": i32(0, 2, 3), "kv_last_page_len": i32(2, 3),
}  # fmt: skip


def append(indices: dict[str, torch.Tensor], **changed: torch.Tensor) -> torch.Tensor:
    key, value = random(ROWS, HEADS, DIM), random(ROWS, HEADS, DIM) + 1
    cache = torch.zeros(PAGES, 2, PAGE, HEADS, DIM)
    rows = {"append_key": key, "append_value": value, **changed}
    attn_core.append_paged_kv_cache(**rows, paged_kv_cache=cache, **indices)
    return cache


@pytest.mark.parametrize("name", INDICES)
def test_index_arrays_of_an_append_may_have_strides(name: str) -> None:
    array = INDICES[name]
    strided = torch.stack([array, torch.full_like(array, 99)], dim=1)[:, 0]
    assert not strided.is_contiguous()
    assert torch.equal(append({**INDICES, name: strided}), append(INDICES))


@pytest.mark.parametrize("name", ["append_key", "append_value"])
@pytest.mark.parametrize("change", [negated, freed])
def test_rows_of_an_append_hold_their_values(name: str, change: Change) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"{name}: needs .*core\.append-shape"):
        append(INDICES, **{name: change(random(ROWS, HEADS, DIM))})


@pytest.mark.parametrize("name", INDICES)
def test_index_arrays_of_an_append_have_memory(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}: needs memory behind its elements"):
        append({**INDICES, name: freed(INDICES[name])})


@pytest.mark.parametrize("name", ["v_a", "s_a", "v_b", "s_b"])
def test_a_merge_of_freed_memory_is_refused(name: str) -> None:
    """torch's own operators fault on it."""
    shapes = {"v_a": (1, HEADS, DIM), "s_a": (1, HEADS), "v_b": (1, HEADS, DIM), "s_b": (1, HEADS)}
    tensors = {key: random(*shape) for key, shape in shapes.items()}
    tensors[name] = freed(tensors[name])
    with pytest.raises(ValueError, match="needs memory behind its elements"):
        attn_core.merge_state(**tensors)


@pytest.mark.parametrize("name", ["batch_indices", "positions"])
def test_positions_are_not_written_over_one_another(name: str) -> None:
    out = {name: torch.zeros(1, dtype=torch.int32).expand(3)}
    with pytest.raises(ValueError, match=rf"{name}: needs distinct memory"):
        attn_core.get_batch_indices_positions(i32(0, 3), i32(3), 3, **out)
