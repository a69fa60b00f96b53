"""A backend's own checks of a run (``DirectBackend``): as strict as the wrapper's, and the same answer."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeGuard

import torch

from ...backend import Backend, DirectBackend, DirectRun, RunShapes
from ...problem import PagedKV
from ...target import DeviceTarget
from ..cases import Case, cases_of
from ..drive import Planned, io_of, plan_direct, run_direct
from ..memory import as_bytes, same_bits
from ..world import World, world_of
from .expect import expect
from .plan import other_world

Arguments = dict[str, object]
"""What the function is called with, by name and in order."""


_EVERY, _RARELY = 4, 16  # cases between those that are looked at


def a_direct_run_equals_a_checked_run(backend: Backend, target: DeviceTarget) -> None:
    """Where the function takes a call, it gives the bits of run(); where it declines, it writes nothing."""
    _look(_equals, backend, target, _EVERY)


def a_direct_run_declines_what_is_wrong(backend: Backend, target: DeviceTarget) -> None:
    """Calls that the wrapper would refuse: False, no exception, and no byte changed."""
    _look(_declines, backend, target, _RARELY)


def a_direct_run_stays_with_its_plan(backend: Backend, target: DeviceTarget) -> None:
    """It keeps what it needs alive, runs as before after newer plans, and lets go of it all in the end."""
    _look(_stays, backend, target, _EVERY)


def _look(check: Callable[[Case], None], backend: Backend, target: DeviceTarget, every: int) -> None:
    if isinstance(backend, DirectBackend):
        for case in cases_of(backend, target).attention[::every]:
            try:
                check(case)
            except AssertionError as err:
                raise AssertionError(f"{case}: {err}") from err


def _equals(case: Case) -> None:
    world = world_of(case)
    made = _made(case, world)
    if made is not None:
        for cache in made.caches():
            _same(made, made.call, cache)
            _same(made, made.call, cache, lse=False)


def _declines(case: Case) -> None:
    world = world_of(case)
    made = _made(case, world)
    if made is None:
        return
    for what, arguments in _wrong(made):
        before = world.bytes()
        given = [t for name in ("out", "lse") if _plain(t := arguments[name])]
        was = [as_bytes(t) for t in given]
        try:
            took = made.call(*arguments.values())
        except Exception as err:
            text = f"the direct function raises for {what}: {type(err).__name__}: {err}"
            raise AssertionError(text) from err
        expect(took is False, f"the direct function takes {what}: {took!r}")
        same = all(torch.equal(a, b) for a, b in zip(world.bytes(), before, strict=True) if a.numel())
        same = same and all(torch.equal(as_bytes(t), b) for t, b in zip(given, was, strict=True))
        expect(same, f"the direct function declines {what} and writes all the same")


def _stays(case: Case) -> None:
    world = world_of(case)
    made = _made(case, world)
    if made is None:
        return
    newer = _made(case, other_world(case))
    if newer is not None:
        _same(newer, newer.call, newer.caches()[0])
    arrays = [weakref.ref(t) for t in made.planned.image.values()]
    call, cache = made.call, made.caches()[0]
    made.release()
    _same(made, call, cache)
    made.call = _gone
    del call
    if any(ref() is not None for ref in arrays):
        gc.collect()
    held = sum(ref() is not None for ref in arrays)
    expect(held == 0, f"{held} index arrays outlive the direct function and its plan")


@dataclass(slots=True)
class Made:
    """A function for further runs of a plan, and a checked run of the plan."""

    case: Case
    world: World
    planned: Planned
    call: DirectRun
    shapes: RunShapes
    out: torch.Tensor
    lse: torch.Tensor | None
    workspace_bytes: int

    def release(self) -> None:
        """Forget the plan."""
        del self.planned

    def caches(self) -> list[object]:
        """Return the forms of the cache that a caller may hand over."""
        found: list[object] = [(self.world.k, self.world.v)]
        if isinstance(self.world.kv.cache, torch.Tensor):
            found.append(self.world.kv.cache)
        return found

    def arguments(self, cache: object) -> Arguments:
        """Return a right call with outputs full of NaN."""
        case, s = self.case, self.world.scales
        io = io_of(case, self.world, self.workspace_bytes)
        scales = [None if scale == 1.0 else scale for scale in (s.q, s.k, s.v)]
        workspace = io.workspace if self.workspace_bytes else None
        values = (self.world.q, cache, io.out, io.lse, workspace, *scales)
        names = ("q", "cache", "out", "lse", "workspace", "q_scale", "k_scale", "v_scale")
        return dict(zip(names, values, strict=True))


def _made(case: Case, world: World) -> Made | None:
    """Ask a backend for its function after a run, as the wrapper does; None where it has none."""
    backend = case.backend
    if not isinstance(backend, DirectBackend):
        return None
    planned = plan_direct(case, world)
    io = run_direct(case, planned, io_of(case, world, planned.result.workspace_bytes))
    shapes = _shapes(case, planned)
    call = backend.direct(planned.result.launch, planned.image, io, shapes)
    if call is None:
        return None
    return Made(case, world, planned, call, shapes, io.out, io.lse, planned.result.workspace_bytes)


def _shapes(case: Case, planned: Planned) -> RunShapes:
    p, rows = case.problem, planned.batch.shape.total_q
    least = planned.batch.shape.total_kv
    front: tuple[int, ...] = (p.num_kv_heads,)
    if isinstance(p.kv, PagedKV):
        size, heads = p.kv.page_size, p.num_kv_heads
        front = (size, heads) if p.kv.order == "NHD" else (heads, size)
        assert planned.batch.max_page_id is not None
        least = planned.batch.max_page_id + 1
    return RunShapes(
        (rows, p.num_qo_heads, p.head_dim_qk), (rows, p.num_qo_heads, p.head_dim_vo),
        (*front, p.head_dim_qk), (*front, p.head_dim_vo), least, case.path.capability.lse,
    )  # fmt: skip


def _same(made: Made, call: DirectRun, cache: object, *, lse: bool = True) -> None:
    arguments = made.arguments(cache)
    if not lse:
        arguments["lse"] = None
    took = call(*arguments.values())
    expect(took is True or took is False, f"the direct function returned {took!r}, not a bool")
    for name, want in (("out", made.out), ("lse", made.lse)):
        got = arguments[name]
        if isinstance(got, torch.Tensor) and want is not None:
            if took:
                expect(same_bits(got, want), f"a direct run and a checked one differ in {name}")
            else:
                expect(bool(got.isnan().all()), f"the direct function declined a call and wrote to {name}")


def _gone(*arguments: object) -> bool:
    raise AssertionError(arguments)


def _plain(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a tensor that can be compared before and after."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and value.device.type != "meta"
        and value.untyped_storage().nbytes() >= value.nbytes
    )


def _wrong(made: Made) -> Iterator[tuple[str, Arguments]]:
    """Yield calls with one thing wrong, and its name."""
    pair = made.caches()[0]
    assert isinstance(pair, tuple)
    k, v = pair
    right = made.arguments(pair)
    for name in ("q", "out", "lse"):
        given = right[name]
        if isinstance(given, torch.Tensor):
            for what, changed in _changes(made, name, given):
                yield f"{name}: {what}", made.arguments(pair) | {name: changed}
    for what, changed in _changes(made, "k", k):
        yield f"k: {what}", made.arguments((changed, v))
    for what, changed in _changes(made, "v", v):
        yield f"v: {what}", made.arguments((k, changed))
    for cache in ((k,), (k, v, v), [k, v], None, "cache", 3):
        yield f"cache: {type(cache).__name__}", made.arguments(cache)
    for what, change in _together(made, k):
        yield what, made.arguments(pair) | change


def _changes(made: Made, name: str, t: torch.Tensor) -> Iterator[tuple[str, object]]:
    yield "no tensor", "tensor"
    yield "another type", t.to(torch.float64 if t.dtype is not torch.float64 else torch.float32)
    yield "on another device", t.to("meta")
    yield "one more dimension", t[None]
    yield "a narrower last dimension", t[..., :-1]
    if name in ("k", "v"):
        if made.shapes.least_rows:
            yield "rows fewer than the plan reads", t[: made.shapes.least_rows - 1]
    elif t.shape[0]:
        yield "a row less", t[:-1]
    if not t.numel():
        return
    if t.dtype.itemsize > 1:
        yield "a negated view", torch._neg_view(t)
    for what, size in (("freed", 0), ("shrunk", t.nbytes - 1)):
        moved = t.clone(memory_format=torch.contiguous_format)
        moved.untyped_storage().resize_(size)
        yield f"{what} storage", moved
    if name in ("out", "lse") and t.shape[0] > 1:
        yield "rows that share memory", t[:1].expand(t.shape)


def _together(made: Made, k: torch.Tensor) -> Iterator[tuple[str, Arguments]]:
    """Yield arguments that are wrong beside the others."""
    right = made.arguments((k, k))
    out = right["out"]
    assert isinstance(out, torch.Tensor)
    if out.dtype is k.dtype and 0 < out.numel() <= k.numel() and k.is_contiguous():
        yield "an out inside k", {"out": k.view(-1)[: out.numel()].view(out.shape)}
    if out.dtype is torch.float32 and out.numel():
        inside = out.view(-1)[: out[..., 0].numel()].view(out.shape[:2])
        yield "an lse inside out", {"out": out, "lse": inside}
    if not made.shapes.lse:
        yield "an lse that the plan does not serve", {"lse": torch.empty(out.shape[:2], device=out.device)}
    for name in ("q_scale", "k_scale", "v_scale"):
        for value in ("1", torch.ones(2), 1j, True, math.nan, -math.inf, 1e39):
            yield f"{name}: {value!r}", {name: value}
        if not made.case.path.contract.scales:
            yield f"{name}, which the path does not take", {name: 0.5}
