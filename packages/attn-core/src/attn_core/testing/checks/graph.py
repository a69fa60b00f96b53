"""Under capture a replan changes index bytes and nothing else; a replay then computes the new batch.

On a GPU the run is captured in a CUDA graph and replayed. On the CPU the contract is held to by hand:
the launch and the arrays of the first plan are used again after every later one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...backend import RunIO
from ...problem import MaskMode, Op
from ...query import GraphLimits
from ...state import PlanState
from ..batches import Lengths
from ..cases import Case
from ..drive import GARBAGE, Wrapper, io_of, make_wrapper, only, plan, plan_direct, scale_options
from ..memory import as_bytes, same_bits, workspace_of
from ..tables import SPARE_PAGES
from ..world import World, world_of
from .expect import expect
from .run import check_world

Replay = Callable[[], None]


def launch_depends_on_the_capacities_only(case: Case) -> None:
    """Plans of unlike batches under equal limits give equal launches and arrays of equal size."""
    worlds = worlds_of(case)
    limits = _limits(case, worlds)
    plans = [plan_direct(case, world, limits).result for world in worlds]
    sizes = [{name: t.numel() for name, t in result.image.items()} for result in plans]
    for lengths, result, size in zip(case.graph, plans, sizes, strict=True):
        text = f"{lengths.kv_len} after {case.graph[0].kv_len}"
        expect(result.launch == plans[0].launch, f"the launch depends on the batch under capture: {text}")
        expect(size == sizes[0], f"array sizes depend on the batch under capture: {size}, {text}")


def replays_later_plans(case: Case) -> None:
    """One capture serves every later plan: same launch, same addresses, the new batch's answer."""
    worlds = worlds_of(case)
    stage = Stage(case, worlds)
    with only(case.backend, case.path):
        for n, world in enumerate(worlds):
            stage.load(world)
            plan(case, world, stage.wrapper)
            if n == 0:
                stage.capture()
            stage.check_same_memory()
            stage.replay()
            rows = world.q.shape[0]
            lse = None if stage.io.lse is None else stage.io.lse[:rows]
            check_world(case, world, stage.io.out[:rows], lse)


def a_refused_replan_leaves_the_replay_unchanged(case: Case) -> None:
    """A plan of another batch size raises and changes no byte that a replay reads."""
    worlds = worlds_of(case)
    stage = Stage(case, worlds)
    with only(case.backend, case.path):
        stage.load(worlds[0])
        plan(case, worlds[0], stage.wrapper)
        stage.capture()
        stage.replay()
        out, image = stage.io.out.clone(), stage.image_bytes()
        first = case.graph[0]
        other = Lengths("other", first.q_len[:-1], first.kv_len[:-1], first.q_len_per_req)
        try:
            plan(case, world_of(case, other), stage.wrapper)
        except ValueError:
            pass
        else:
            raise AssertionError("a graph wrapper took a plan of another batch size")
        expect(stage.image_bytes() == image, "a refused plan changed index arrays")
        stage.replay()
        expect(same_bits(stage.io.out, out), "a refused plan changed what a replay computes")


class Stage:
    """The fixed memory of one captured wrapper, and the capture itself."""

    def __init__(self, case: Case, worlds: list[World]) -> None:
        self.case, self.world = case, world_of(case, pool=worlds[0].table.pool)
        limits = _limits(case, worlds)
        size = plan_direct(case, self.world, limits).result.workspace_bytes
        self.workspace, _ = workspace_of(size, GARBAGE, case.device)
        longest = max(max(lengths.kv_len) for lengths in case.graph)
        self.wrapper: Wrapper = make_wrapper(
            case, self.workspace, _buffers(case, worlds), longest if case.bounded else None
        )
        self.io = io_of(case, self.world, 0)
        self.io.q, self.io.workspace = self.world.q, self.workspace
        self.replay: Replay = lambda: None

    @property
    def state(self) -> PlanState:
        """The plan in force."""
        state = self.wrapper._state
        assert state is not None
        return state

    def load(self, world: World) -> None:
        """Bring a batch's q, k and v into the fixed memory; what it does not fill becomes NaN."""
        self.world.lay(torch.nan)
        self.world.q.nan_to_num_()
        self.world.q[: world.q.shape[0]].copy_(world.q)
        for mine, its in ((self.world.k, world.k), (self.world.v, world.v)):
            mine[: its.shape[0]].copy_(its)
        self.io.out.fill_(torch.nan)
        if self.io.lse is not None:
            self.io.lse.fill_(torch.nan)

    def capture(self) -> None:
        """Keep what a graph keeps: the launch and the addresses of the plan in force."""
        state, backend, io = self.state, self.case.backend, self.io
        self.launch, self.places = state.launch, self._places()
        if self.case.device.type == "cpu":
            image = {name: state.image[name] for name in state.image}
            self.replay = lambda: _no_grad(lambda: backend.run(state.launch, image, io))
            return
        self._call()  # warms up whatever loads lazily
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._call()
        self.replay = graph.replay

    def _call(self) -> None:
        io: RunIO = self.io
        options: dict[str, Any] = {"out": io.out, **scale_options(self.case, self.world)}
        if io.lse is not None:
            options |= {"lse": io.lse, "return_lse": True}
        kv = self.world.kv
        cache = (kv.k, kv.v) if self.case.problem.op is Op.PREFILL_RAGGED else (kv.cache,)
        wrapper: Any = self.wrapper
        wrapper.run(io.q, *cache, **options)

    def _places(self) -> dict[str, int]:
        return {name: self.state.image[name].data_ptr() for name in self.state.image}

    def image_bytes(self) -> dict[str, list[int]]:
        """Return every byte that a replay reads of the plan's arrays."""
        return {name: as_bytes(self.state.image[name]).tolist() for name in self.state.image}

    def check_same_memory(self) -> None:
        """Hold a replan to the launch and the addresses of the capture."""
        expect(self.state.launch == self.launch, "a replan changed the launch")
        expect(self._places() == self.places, "a replan moved index arrays")


def _no_grad(call: Replay) -> None:
    with torch.no_grad():
        call()


def worlds_of(case: Case) -> list[World]:
    """Return the batches of a captured case over pools of one size."""
    pool = max(world_of(case, lengths).table.pool for lengths in case.graph) + SPARE_PAGES
    return [world_of(case, lengths, pool=pool) for lengths in case.graph]


def _limits(case: Case, worlds: list[World]) -> GraphLimits:
    first = worlds[0]
    pages = first.table.pool if case.problem.op.paged else sum(first.lengths.kv_len)
    longest = max(max(lengths.kv_len) for lengths in case.graph)
    return GraphLimits(
        len(first.lengths.q_len), sum(first.lengths.q_len), pages, longest if case.bounded else None
    )


def _buffers(case: Case, worlds: list[World]) -> dict[str, torch.Tensor]:
    batch = len(case.lengths.q_len)

    def new(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=case.device)

    buffers = {
        "qo_indptr": new(batch + 1),
        "kv_indptr": new(batch + 1),
        "kv_indices": new(worlds[0].table.pool),
        "kv_last_page_len": new(batch),
    }
    if case.problem.mask is MaskMode.CUSTOM:
        size = max(int(world.mask_bits()[0].numel()) for world in worlds)
        buffers |= {"custom_mask": new(size, torch.uint8), "mask_indptr": new(batch + 1)}
    return buffers
