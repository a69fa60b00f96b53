"""Tensors without values, or with elements that share memory: named, and nothing written."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import attn_core
from attn_core import checking

HEADS, DIM, PAGE, PAGES = 2, 16, 4, 3
Change = Callable[[torch.Tensor], torch.Tensor]
Tensors = dict[str, torch.Tensor]


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def fake(t: torch.Tensor) -> torch.Tensor:
    return FakeTensorMode().from_tensor(t)


def freed(t: torch.Tensor) -> torch.Tensor:
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def inference(t: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return t.clone()


def nested(t: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor(list(t))


def overlapping(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the shape whose rows start one element apart."""
    return torch.zeros(t.numel()).as_strided(t.shape, [1] * t.ndim)


def decode(t: Tensors) -> object:
    wrapper = attn_core.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(1 << 20, dtype=torch.uint8), backend="reference"
    )
    wrapper.plan(t["indptr"], t["indices"], t["last"], HEADS, HEADS, DIM, PAGE, q_data_type=torch.float32)
    return wrapper.run(t["q"], t["cache"], out=t["out"], lse=t["lse"], return_lse=True)


def append(t: Tensors) -> object:
    return attn_core.append_paged_kv_cache(
        t["key"], t["value"], t["batch"], t["positions"], t["cache"], t["indices"], t["indptr"], t["last"],
        backend="reference",
    )  # fmt: skip


def positions(t: Tensors) -> object:
    return attn_core.get_batch_indices_positions(
        t["indptr"], t["lens"], 3, batch_indices=t["at"], positions=t["to"]
    )


PAGED = {
    "indptr": i32(0, 2, 3), "indices": i32(2, 0, 1), "last": i32(2, 3),
    "cache": random(PAGES, 2, PAGE, HEADS, DIM),
}  # fmt: skip
TENSORS = {
    decode: {
        **PAGED, "q": random(2, HEADS, DIM), "out": torch.zeros(2, HEADS, DIM), "lse": torch.zeros(2, HEADS),
    },
    append: {
        **PAGED, "key": random(3, HEADS, DIM), "value": random(3, HEADS, DIM) + 1, "batch": i32(0, 1, 1),
        "positions": i32(5, 0, 2),
    },
    positions: {
        "indptr": i32(0, 2, 3), "lens": i32(6, 3), "at": torch.zeros(3, dtype=torch.int32),
        "to": torch.zeros(3, dtype=torch.int32),
    },
}  # fmt: skip
WRITTEN = {decode: ("out", "lse"), append: ("cache",), positions: ("at", "to")}
Call = Callable[[Tensors], object]


def given(call: Call, name: str, change: Change) -> tuple[Tensors, Tensors]:
    """Return what to call with, one tensor of it changed, and copies of the others."""
    tensors = {key: t.clone() for key, t in TENSORS[call].items()}
    tensors[name] = change(tensors[name])
    return tensors, {key: t.clone() for key, t in tensors.items() if key != name}


ALL = [pytest.param(call, name, id=f"{call.__name__}-{name}") for call in TENSORS for name in TENSORS[call]]
OUTPUTS = [
    pytest.param(call, name, id=f"{call.__name__}-{name}") for call in WRITTEN for name in WRITTEN[call]
]


@pytest.mark.parametrize(("call", "name"), ALL)
@pytest.mark.parametrize("change", [fake, freed])
def test_a_tensor_without_values_is_named(call: Call, name: str, change: Change) -> None:
    """torch's own texts speak of fake modes, data-dependent operators and sizes of storages."""
    tensors, others = given(call, name, change)
    with pytest.raises(
        (TypeError, ValueError), match=r"needs (a tensor with values|memory behind).*\[core\."
    ):
        call(tensors)
    assert all(torch.equal(tensors[key], t) for key, t in others.items())


@pytest.mark.parametrize(("call", "name"), OUTPUTS)
def test_a_tensor_made_in_inference_mode_is_written(call: Call, name: str) -> None:
    right, _ = given(call, name, torch.clone)
    call(right)
    tensors, _ = given(call, name, inference)
    call(tensors)
    for key in WRITTEN[call]:
        assert torch.equal(tensors[key], right[key])
        assert tensors[key].any()


@pytest.mark.parametrize(("call", "name"), OUTPUTS)
def test_elements_that_share_memory_are_not_written(call: Call, name: str) -> None:
    tensors, others = given(call, name, overlapping if call is not positions else lambda t: t[:1].expand(3))
    before = tensors[name].clone()
    with pytest.raises(ValueError, match=r"needs distinct memory for every element, got strides"):
        call(tensors)
    assert torch.equal(tensors[name], before)
    assert all(torch.equal(tensors[key], t) for key, t in others.items())


def test_a_layer_of_a_pool_has_memory_of_its_own() -> None:
    """Strides in any order, with gaps: slots of a pool ``[page, head, layer, slot, 2, dim]``."""
    pool = torch.zeros(PAGES, HEADS, 2, PAGE, 2, DIM)
    cache = tuple(pool[:, :, 1, :, half].transpose(1, 2) for half in (0, 1))
    tensors, _ = given(append, "cache", torch.zeros_like)
    append(tensors)
    want = tensors["cache"]
    append({**tensors, "cache": cache})  # type: ignore[dict-item]
    assert torch.equal(torch.stack(cache, 1), want)
    assert not pool[:, :, 0].any()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_rows_that_are_nested_are_named() -> None:
    q, k, v = random(3, HEADS, DIM), random(5, HEADS, DIM), random(5, HEADS, DIM)
    for name in ("q", "k", "v"):
        tensors = {"q": q, "k": k, "v": v} | {name: nested({"q": q, "k": k, "v": v}[name])}
        with pytest.raises(TypeError, match=rf"{name}: needs a dense tensor, got a nested one"):
            attn_core.single_prefill_with_kv_cache(**tensors, backend="reference")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("change", [nested, torch.Tensor.to_mkldnn])
def test_a_cache_without_views_is_named(change: Change) -> None:
    tensors, _ = given(decode, "cache", change)
    with pytest.raises(TypeError, match=r"paged_kv_cache: needs a dense tensor"):
        decode(tensors)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_query_that_is_nested_is_named() -> None:
    tensors, _ = given(decode, "q", nested)
    with pytest.raises(TypeError, match=r"q: needs a dense tensor, got a nested one"):
        decode(tensors)


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_a_log_sum_exp_over_another_tensor_is_refused_and_nothing_written(name: str) -> None:
    tensors, _ = given(decode, "lse", torch.clone)
    halves = {"k": tensors["cache"][1, 0], "v": tensors["cache"][-1, 1]}  # v reaches further than k
    over = halves[name] if name in halves else tensors[name]
    before = {key: t.clone() for key, t in tensors.items()}
    lse = over.view(-1)[-2 * HEADS :].view(2, HEADS)
    with pytest.raises(ValueError, match=f"lse: needs memory apart from {name}, got memory inside it"):
        decode({**tensors, "lse": lse})
    assert all(torch.equal(tensors[key], t) for key, t in before.items())


def test_a_log_sum_exp_beside_the_output_in_one_allocation_is_written() -> None:
    tensors, _ = given(decode, "lse", torch.clone)
    want, arena = decode(tensors), torch.zeros(2 * HEADS * (DIM + 1))
    out, lse = arena[: 2 * HEADS * DIM].view(2, HEADS, DIM), arena[2 * HEADS * DIM :].view(2, HEADS)
    decode({**tensors, "out": out, "lse": lse})
    assert isinstance(want, tuple)
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("times", [1, 4])
def test_an_output_inside_the_cache_is_refused_and_the_cache_left_as_it_was(half: int, times: int) -> None:
    tensors, _ = given(decode, "out", torch.clone)
    cache = tensors["cache"]
    for _ in range(times):
        decode(tensors)
    inside = cache[1, half].view(-1)[: 2 * HEADS * DIM].view(2, HEADS, DIM)
    with pytest.raises(ValueError, match=r"out: needs memory apart from [kv], got memory inside it"):
        decode({**tensors, "out": inside})
    assert torch.equal(cache, TENSORS[decode]["cache"])


@pytest.mark.parametrize("times", [1, 4])
def test_an_output_may_be_the_query_itself_but_not_lie_across_it(times: int) -> None:
    tensors, _ = given(decode, "out", torch.clone)
    want = decode(tensors)
    assert isinstance(want, tuple)
    arena = torch.cat([tensors["q"].flatten(), torch.zeros(HEADS * DIM)])
    q, shifted = (arena[at : at + 2 * HEADS * DIM].view(2, HEADS, DIM) for at in (0, HEADS * DIM))
    q.copy_(tensors["q"])
    for _ in range(times):
        decode({**tensors, "q": q})
    with pytest.raises(ValueError, match="out: needs memory apart from q, got memory inside it"):
        decode({**tensors, "q": q, "out": shifted})
    assert torch.equal(q, tensors["q"])
    decode({**tensors, "q": q, "out": q})
    assert torch.equal(q, want[0])


def test_an_output_beside_the_cache_in_one_allocation_is_written() -> None:
    tensors, _ = given(decode, "out", torch.clone)
    cache, want = tensors["cache"], decode(tensors)
    arena = torch.cat([cache.flatten(), torch.zeros(2 * HEADS * DIM)])
    beside = arena[cache.numel() :].view(2, HEADS, DIM)
    decode({**tensors, "cache": arena[: cache.numel()].view_as(cache), "out": beside})
    assert isinstance(want, tuple)
    assert torch.equal(beside, want[0])


BUFFERS = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")


@pytest.mark.parametrize("made", [inference, torch.clone])
def test_fixed_buffers_made_in_inference_mode_follow_later_plans(made: Change) -> None:
    """Engines load and warm up in inference mode and plan where they like."""
    wrapper = attn_core.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(1 << 20, dtype=torch.uint8), use_cuda_graph=True, backend="reference",
        **dict(zip(BUFFERS, map(made, (i32(0, 0, 0), i32(0, 0, 0), i32(0, 0))), strict=True)),
    )  # fmt: skip
    cache, q = PAGED["cache"], random(2, HEADS, DIM)

    def plan(*indices: int) -> None:
        wrapper.plan(
            i32(0, 2, 3), i32(*indices), PAGED["last"], HEADS, HEADS, DIM, PAGE, q_data_type=torch.float32
        )

    with torch.inference_mode():
        plan(2, 0, 1)
        first = wrapper.run(q, cache)
    plan(1, 0, 2)
    second = wrapper.run(q, cache)
    assert not torch.equal(first, second)
    want = attn_core.BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(1 << 20, dtype=torch.uint8), backend="reference"
    )
    for indices, found in (((2, 0, 1), first), ((1, 0, 2), second)):
        want.plan(
            i32(0, 2, 3), i32(*indices), PAGED["last"], HEADS, HEADS, DIM, PAGE, q_data_type=torch.float32
        )
        torch.testing.assert_close(found, want.run(q, cache), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("layout", "shape"), [("NHD", (3, 2, 16)), ("HND", (2, 3, 16))])
def test_ragged_keys_of_another_length_are_named_as_they_were_given(
    layout: str, shape: tuple[int, ...]
) -> None:
    wrapper = attn_core.BatchPrefillWithRaggedKVCacheWrapper(
        torch.zeros(1 << 20, dtype=torch.uint8), layout, backend="reference"
    )
    wrapper.plan(i32(0, 1), i32(0, 3), 3, 3, DIM, q_data_type=torch.float32)
    sizes = {"NHD": "tokens, 3, 16", "HND": "3, tokens, 16"}[layout]
    wanted = rf"k: needs shape \[{sizes}\] \({layout}\), got {re.escape(str(shape))} \[core.kv-shape\]"
    with pytest.raises(ValueError, match=wanted):
        wrapper.run(random(1, 3, DIM), random(*shape), random(*shape))


def fused_parts(form: str) -> tuple[torch.Tensor, ...]:
    """q, k, v and out as parts of one allocation, whose elements lie apart."""
    if form == "heads":  # [rows, q | k | v | out heads, dim]
        whole = torch.randn(9, 4 + 2 + 2 + 4, 8, generator=torch.Generator().manual_seed(0))
        return whole.split([4, 2, 2, 4], 1)
    if form == "rows":  # every fourth row
        whole = torch.randn(9, 4, 4, 8, generator=torch.Generator().manual_seed(0))
        return whole[:, 0], whole[:, 1, :2], whole[:, 2, 1:3], whole[:, 3]
    # [rows, heads, q | k | v | out, dim]
    whole = torch.randn(9, 4, 4, 8, generator=torch.Generator().manual_seed(0))
    return whole[:, :, 0], whole[:, ::2, 1], whole[:, ::2, 2], whole[:, :, 3]


@pytest.mark.parametrize("form", ["heads", "rows", "inner"])
def test_an_out_between_the_heads_of_one_tensor_is_written(form: str) -> None:
    q, k, v, out = fused_parts(form)
    want = attn_core.single_prefill_with_kv_cache(q.clone(), k.clone(), v.clone(), backend="reference")
    kept = [t.clone() for t in (q, k, v)]
    wrapper = attn_core.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(64, dtype=torch.uint8))
    ends = torch.tensor([0, 9], dtype=torch.int32)
    wrapper.plan(ends, ends, 4, 2, 8, q_data_type=torch.float32)
    assert wrapper.run(q, k, v, out=out) is out
    torch.testing.assert_close(out, want)
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), kept, strict=True))


def test_interleaved_tensors_are_judged_as_their_elements_are() -> None:
    """No pair of strided views that share an element passes; most that share none do."""
    made, passed, apart = Random(0), 0, 0
    for _ in range(3000):
        block = torch.zeros(512)
        views = []
        for _ in range(2):
            shape = [made.choice((1, 2, 3)) for _ in range(3)]
            strides = [made.choice((24, 48, 64)), made.choice((4, 8, 12)), made.choice((1, 2))]
            views.append(block.as_strided(shape, strides, made.randrange(100)))
        a, b = views
        a.fill_(1)
        shares = bool(b.any())
        said = checking._interleaved(a, b)
        assert not (said and shares), (a.shape, a.stride(), b.shape, b.stride())
        passed, apart = passed + said, apart + (not shares)
    assert passed > apart / 4
