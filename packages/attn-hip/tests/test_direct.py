"""Runs that native code checks and launches: taken when right, refused as Python's own checks do when not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import attn_core
from attn_hip import direct
from attn_hip.backend import Fa2Backend
from attn_hip.host import Host

from .direct_world import (
    DIM,
    HEADS,
    KV_HEADS,
    PAGE,
    PAGES,
    ROWS,
    Call,
    World,
    i32,
    outcome,
    random,
    same,
    workspace,
)

pytestmark = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch shows native code no tensors"
)


@dataclass
class Taken:
    """How many runs native code took, and how many it was offered."""

    taken: int = 0
    offered: int = 0


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    """Count what native code takes."""
    count, made = Taken(), Fa2Backend.direct

    def direct(self: Fa2Backend, *args: Any) -> Any:
        call = made(self, *args)
        assert call is not None

        def counted(*given: object) -> bool:
            count.offered += 1
            took = call(*given)
            count.taken += took
            return took

        return counted

    monkeypatch.setattr(Fa2Backend, "direct", direct)
    return count


KINDS = [
    ("decode", "pair"),
    ("decode", "whole"),
    ("prefill", "pair"),
    ("prefill", "whole"),
    ("ragged", "pair"),
]
WAYS: list[tuple[str, Callable[[Call], None]]] = [
    ("as it is", lambda call: None),
    ("no out", lambda call: call.pop("out")),
    ("no lse", lambda call: call.pop("lse")),
    ("neither", lambda call: [call.pop("out"), call.pop("lse")]),
    ("lse not returned", lambda call: call.update(return_lse=False)),
    ("scales", lambda call: call.update(q_scale=0.5, k_scale=3.0, v_scale=2.0)),
    ("spread rows", lambda call: call.update(q=torch.cat([call["q"]] * 2, 2)[..., :DIM])),
    ("requires grad", lambda call: call["q"].requires_grad_()),
]


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize(("kind", "form"), KINDS)
@pytest.mark.parametrize("way", [way for _, way in WAYS], ids=[name for name, _ in WAYS])
def test_a_right_call_is_taken_from_the_third_run_on(
    taken: Taken, kind: str, form: str, order: str, way: Callable[[Call], None]
) -> None:
    world = World(kind, order)
    call = world.right(form)
    way(call)
    first, second = outcome(world, call), outcome(world, call)
    assert taken.offered == 0
    third = outcome(world, {**call, "q": call["q"].clone() if call["q"].is_contiguous() else call["q"]})
    assert taken.taken == (0 if (kind, order) == ("ragged", "HND") else 1)
    assert same(first, second)
    assert same(first, third)


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_a_single_call_is_taken_from_the_third_on(taken: Taken, order: str) -> None:
    q, k, v = random(7, HEADS, DIM), random(31, KV_HEADS, DIM), random(31, KV_HEADS, DIM) * 2
    if order == "HND":
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()

    def run(other: torch.Tensor = q, **options: Any) -> Any:
        return attn_core.single_prefill_with_kv_cache_return_lse(
            other, k, v, causal=True, kv_layout=order, backend="fa2", **options
        )

    found = [run() for _ in range(4)]
    assert taken.taken == 2
    assert all(same(found[0], other) for other in found)
    run(q[:6])  # a plan of its own
    assert taken.taken == 2
    assert torch.allclose(run(v_scale=2.0)[0], found[0][0] * 2)
    assert taken.taken == 3
    with pytest.raises(TypeError, match=r"negated view"):
        run(torch._neg_view(q))


def freed(t: torch.Tensor) -> torch.Tensor:
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def shrunk(t: torch.Tensor) -> torch.Tensor:
    t = t.clone()
    t.untyped_storage().resize_(t.nbytes - 1)
    return t


def shrunk_behind(t: torch.Tensor) -> torch.Tensor:
    both = torch.cat([t, t])
    half = both[len(t) :]
    both.untyped_storage().resize_(both.nbytes - 1)
    return half


def spread(t: torch.Tensor) -> torch.Tensor:
    return torch.stack([t, t], -1).flatten(-2)[..., ::2]


class Sub(torch.Tensor):
    pass


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "half": lambda t: t.half(),
    "double": lambda t: t.double(),
    "bits": lambda t: t.view(torch.int32),
    "fewer rows": lambda t: t[:2],
    "more rows": lambda t: torch.cat([t, t]),
    "a dimension less": lambda t: t[0],
    "a dimension more": lambda t: t[None],
    "fewer heads": lambda t: t[:, :1],
    "short last": lambda t: t[..., : t.shape[-1] // 2],
    "swapped": lambda t: t.transpose(0, 1),
    "spread": spread,
    "rows apart": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "one row for all": lambda t: t[:1].expand_as(t),
    "negated": torch._neg_view,
    "freed": freed,
    "shrunk": shrunk,
    "shrunk behind an offset": shrunk_behind,
    "fake": lambda t: FakeTensorMode().from_tensor(t),
    "meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "mkldnn": lambda t: t.to_mkldnn(),
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "subclass": lambda t: t.as_subclass(Sub),
    "list": lambda t: t.tolist(),
    "none": lambda t: None,
}
NAMES = {"pair": ("q", "k", "v", "out", "lse"), "whole": ("q", "kv", "out", "lse")}


def with_and_without(monkeypatch: pytest.MonkeyPatch, kind: str, form: str) -> tuple[World, World]:
    """Return a world whose runs native code checks, and one where Python always does."""
    with monkeypatch.context() as patch:
        patch.setattr(Fa2Backend, "direct", lambda *args: None)
        without = World(kind)
        for _ in range(2):
            without.run(without.right(form))
    world = World(kind)
    for _ in range(2):
        world.run(world.right(form))
    return world, without


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("kind", "form"), KINDS)
def test_a_changed_tensor_has_the_same_outcome_as_without(
    monkeypatch: pytest.MonkeyPatch, kind: str, form: str, change: str
) -> None:
    world, without = with_and_without(monkeypatch, kind, form)
    for name in NAMES[form]:
        calls = [{**w.right(form)} for w in (world, without)]
        for call in calls:
            call[name] = CHANGES[change](call[name])
        found, wanted = outcome(world, calls[0]), outcome(without, calls[1])
        assert same(found, wanted), name
        again = outcome(world, world.right(form))
        assert same(again, outcome(without, without.right(form))), name


OTHERS: list[Call] = [
    {"q_scale": 2}, {"k_scale": torch.tensor(2.0)}, {"v_scale": "2"}, {"v_scale": float("nan")},
    {"q_scale": True}, {"v_scale": torch.ones(2)}, {"return_lse": 1}, {"return_lse": None},
    {"return_lse": 2}, {"return_lse": "yes"}, {"lse": None, "return_lse": False}, {"out": None}, {"out": 3},
]  # fmt: skip


@pytest.mark.parametrize("other", OTHERS, ids=str)
@pytest.mark.parametrize(("kind", "form"), KINDS)
def test_another_argument_has_the_same_outcome_as_without(
    monkeypatch: pytest.MonkeyPatch, kind: str, form: str, other: Call
) -> None:
    world, without = with_and_without(monkeypatch, kind, form)
    assert same(outcome(world, world.right(form) | other), outcome(without, without.right(form) | other))


@pytest.mark.parametrize("name", NAMES["pair"])
def test_a_subclass_is_left_to_the_checks(taken: Taken, name: str) -> None:
    world = World("decode")
    call = world.right("pair")
    for _ in range(2):
        wanted = outcome(world, call)
    assert same(outcome(world, call | {name: call[name].as_subclass(Sub)})[:2], wanted[:2])
    assert (taken.offered, taken.taken) == (1, 0)


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_a_log_sum_exp_that_lies_over_another_tensor_is_refused(taken: Taken, name: str) -> None:
    world = World("decode")
    call = world.right("pair")
    for _ in range(3):
        world.run(call)
    call["lse"] = call[name].view(-1)[: ROWS * HEADS].view(ROWS, HEADS)
    before, was = taken.taken, call[name].clone()
    with pytest.raises(ValueError, match=f"lse: needs memory apart from {name}, got memory inside it"):
        world.run(call)
    assert taken.taken == before
    assert torch.equal(call[name], was)


@pytest.mark.parametrize("overlap", ["q", "k", "lse"])
def test_an_output_that_lies_over_an_input_is_left_to_the_checks(taken: Taken, overlap: str) -> None:
    world = World("decode")
    call = world.right("pair")
    for _ in range(3):
        world.run(call)
    call["out"] = {
        "q": lambda: call["q"],
        "k": lambda: call["k"].view(-1)[: ROWS * HEADS * DIM].view(ROWS, HEADS, DIM),
        "lse": lambda: call["out"],
    }[overlap]()
    if overlap == "lse":
        call["lse"] = call["out"].view(-1)[: ROWS * HEADS].view(ROWS, HEADS)
    before = taken.taken
    outcome(world, call)
    assert taken.taken == before


def test_caches_of_the_wrong_form_are_refused_as_without(taken: Taken) -> None:
    world = World("decode")
    call = world.right("whole")
    for _ in range(3):
        world.run(call)
    kv = call["kv"]
    wrong: list[Any] = [
        (kv[:, 0],), (kv[:, 0], kv[:, 1], kv[:, 1]), [kv[:, 0], kv[:, 1]], (kv, kv), kv[:, :1],
        kv.transpose(1, 2), torch.cat([kv, kv], 1), kv[0], kv[:, :, :1], "kv", None, (kv[:, 0], None),
    ]  # fmt: skip
    before = taken.taken
    for cache in wrong:
        with pytest.raises((ValueError, TypeError), match=r"\[core\."):
            world.run({**call, "kv": cache})
    assert taken.taken == before
    view = attn_core.CacheView.split(kv, 1)
    assert same(outcome(world, {**call, "kv": view}), outcome(world, call))


def test_a_new_plan_is_asked_anew_and_a_workspace_is_taken_as_it_is(taken: Taken) -> None:
    world, other = World("decode"), World("decode")
    call = world.right("whole")
    for _ in range(3):
        old = outcome(world, call)
    world.plan(last=1)
    other.plan(last=1)
    new = [outcome(world, call) for _ in range(4)]
    wanted = outcome(other, call)
    assert taken.taken == 3
    assert all(same(found, wanted) for found in new)
    assert not same(old, wanted)
    world.wrapper.reset_workspace_buffer(workspace(), workspace())
    gc.collect()
    assert same(outcome(world, call), wanted)
    with pytest.raises(ValueError, match=r"core\."):
        world.wrapper.plan(i32(0, 2), i32(1, 0), i32(9), HEADS, KV_HEADS, DIM, PAGE)
    assert same(outcome(world, call), wanted)


def test_a_graph_wrapper_follows_its_buffers(taken: Taken) -> None:
    buffers = (torch.zeros(2, dtype=torch.int32), torch.zeros(PAGES, dtype=torch.int32))
    wrapper = attn_core.BatchDecodeWithPagedKVCacheWrapper(
        workspace(), use_cuda_graph=True,
        paged_kv_indptr_buffer=buffers[0], paged_kv_indices_buffer=buffers[1],
        paged_kv_last_page_len_buffer=torch.zeros(1, dtype=torch.int32), backend="fa2",
    )  # fmt: skip
    plain = attn_core.BatchDecodeWithPagedKVCacheWrapper(workspace(), backend="fa2")
    q, kv = random(1, HEADS, DIM), random(PAGES, 2, PAGE, KV_HEADS, DIM)
    for pages in ([3], [1, 2, 0], [4, 3, 2, 1, 0], [0, 4]):
        for w in (wrapper, plain):
            w.plan(
                i32(0, len(pages)), i32(*pages), i32(2), HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.float32
            )
        for _ in range(4):
            assert torch.equal(wrapper.run(q, kv), plain.run(q, kv))
    assert taken.taken == 4 * 2 * 2


@pytest.mark.parametrize("missing", ["_EXCHANGE", "_TORCH"])
def test_a_torch_that_shows_no_tensors_runs_as_before(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setattr(direct, missing, "__no_such_thing__")
    world = World("decode")
    call = world.right("whole")
    found = [outcome(world, call) for _ in range(4)]
    assert world.wrapper._plan_info.direct.call is None
    assert all(same(found[0], other) for other in found)


@pytest.mark.parametrize(("size", "offset"), [(14, 3), (13, 3), (14, 0)])
def test_what_torch_tells_of_a_storage_is_believed_only_if_right(size: int, offset: int) -> None:
    class Native:
        class StorageApi:
            def __init__(self, *given: object) -> None:
                assert all(isinstance(address, int) for address in given[:2])

            def of(self, sample: torch.Tensor) -> tuple[int, int]:
                return size, offset

    assert (direct._storage_api(Native, direct._TORCH) is not None) is ((size, offset) == (14, 3))


def test_the_size_of_a_storage_is_asked_of_tensors_only() -> None:
    host = Host()
    assert host.prepare() is None
    api = direct._storage_api(host.module(), direct._TORCH)
    assert api is not None
    assert api.of(torch.zeros(4, 3)[2:]) == (48, 6)
    for other in (torch.zeros(4).untyped_storage(), 3, None):
        with pytest.raises(TypeError, match="needs a torch tensor"):
            api.of(other)
    with pytest.raises(ValueError, match="needs the descriptor of _cdata"):
        type(api)(0, 0, None)


def test_the_function_keeps_what_it_needs_and_refuses_a_wrong_number_of_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[Any] = []
    made = Fa2Backend.direct
    monkeypatch.setattr(Fa2Backend, "direct", lambda self, *args: kept.append(made(self, *args)) or kept[-1])
    world = World("prefill")
    call = world.right("pair")
    for _ in range(2):
        wanted = world.run({**call, "out": None})[0]
    items = weakref.ref(world.wrapper._plan_info.image["items"])
    del world
    gc.collect()
    assert items() is not None
    out = torch.zeros(ROWS, HEADS, DIM)
    arguments = (call["q"], (call["k"], call["v"]), out, None, workspace(), None, None, None)
    assert kept[0](*arguments) is True
    assert torch.equal(out, wanted)
    assert kept[0](call["q"].half(), *arguments[1:]) is False
    with pytest.raises(TypeError, match="needs 8 arguments, got 7"):
        kept[0](*arguments[:-1])
