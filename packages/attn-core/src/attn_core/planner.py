"""From a problem and a batch to a published PlanState: the half of a wrapper that plans."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch.compiler import is_dynamo_compiling

from . import capture, notices, plugins, tracing
from .arena import Copy, GraphArena, Image, Layout, pack, upload
from .arguments import MaskBits, check_workspace
from .backend import DeviceImage, PlanResult
from .batch import HostBatch, with_host_indices
from .checking import backend_name, dense
from .errors import NoPlan, needs
from .frozen import FrozenShape, check_capacity
from .plan_image import captured_layout, index_parts
from .problem import AttentionProblem, check_kv_order
from .query import GraphLimits, Query
from .route import RouteDecision, Screened, screen, serve
from .state import PlanState
from .target import DeviceTarget, target_of

_KEPT_SCREENS = 64


@dataclass(frozen=True, slots=True)
class GraphBuffers:
    """What a CUDA-graph wrapper was constructed with.

    Attributes:
        batch_size: Requests of every plan.
        max_pages: Entries of the page index buffer; None for ragged keys, where the first plan's tokens
            are the capacity.
        bound: The caller's buffers by image name. Kernels read these; plan() fills them.
        max_kv_len: Longest sequence promised, in tokens, or None.
    """

    batch_size: int
    max_pages: int | None
    bound: Mapping[str, torch.Tensor]
    max_kv_len: int | None = None


@dataclass(slots=True)
class _Undo:
    """Takes a half-published plan back."""

    was: PlanState | None = None
    arena: GraphArena | None = None
    armed: bool = False
    bytes: list[Copy] = field(default_factory=list)


class Planner:
    """Holds one reference to one PlanState; replacing it is all that planning does.

    Planning may raise at any point, for any cause: the previous plan then stays in force, bit for bit.
    Plans of one object are serialised by a lock that run() never takes.
    """

    def __init__(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str, backend: str, graph: GraphBuffers | None
    ) -> None:
        self._float_workspace_buffer = check_workspace("float_workspace_buffer", float_workspace_buffer)
        self._kv_layout = check_kv_order(kv_layout)
        self._requested = backend_name(backend)
        self._graph = graph
        self.device = float_workspace_buffer.device
        self._described: DeviceTarget | None = None
        self._state: PlanState | None = None
        self._arena: GraphArena | None = None
        self._instead: tuple[PlanState, PlanState] | None = None
        self._lock = threading.RLock()
        self._handle = tracing.register(self)
        self._screens: dict[object, Screened] = {}
        # Of a plan() traced by torch.compile: the number of the plan, which orders run() behind it.
        self._traced_plan: torch.Tensor | None = None
        self._traced_o_dtype = torch.float16

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse copies and pickles: two wrappers cannot own one plan's memory, a graph's least of all.

        Raises:
            TypeError: Always.
        """
        want = "to be constructed and planned where it is used (it owns memory of a device and a lock)"
        raise TypeError(needs(type(self).__name__, want, "a copy or a pickle", "core.copy"))

    def _target(self) -> DeviceTarget:
        if self._described is None:
            self._described = target_of(self.device)
        return self._described

    def _planned(self) -> PlanState:
        if self._state is None:
            raise NoPlan("run: needs a prior plan, got none [core.no-plan]; call plan() first")
        return self._state

    def _plan(
        self,
        problem: AttentionProblem,
        batch: HostBatch,
        *,
        mask: MaskBits | None = None,
        q_len_per_req: int | None = None,
    ) -> None:
        """Compute a PlanState and publish it. The last thing plan() does."""
        self._traced_plan = None
        self._instead = None
        undo = _Undo()
        try:
            # Not a with statement: an interrupt on its way out would leave the lock held and the new plan
            # in force. This way the one handler below undoes both, the bytes while the lock is still ours.
            self._lock.acquire()
            self._publish(*self._compute(problem, batch, mask, q_len_per_req), undo)
            self._lock.release()
        except BaseException:
            self._take_back(undo)
            with suppress(RuntimeError):  # raised where the lock is not held by this thread
                self._lock.release()
            raise

    def _take_back(self, undo: _Undo) -> None:
        if undo.armed:
            for place, was in undo.bytes:
                place.detach().copy_(was)
            self._arena = undo.arena
            self._state = undo.was

    def _publish(self, new: PlanState, arena: GraphArena | None, copies: list[Copy], undo: _Undo) -> None:
        """Change the wrapper: the copies of a graph plan, then one assignment."""
        undo.bytes = [(place, place.clone()) for place, _ in copies]
        undo.was, undo.arena = self._state, self._arena
        undo.armed = True
        for place, source in copies:
            place.detach().copy_(source, non_blocking=True)  # it may have been made in inference mode
        self._arena = arena
        self._state = new

    def _compute(
        self, problem: AttentionProblem, batch: HostBatch, mask: MaskBits | None, q_len_per_req: int | None
    ) -> tuple[PlanState, GraphArena | None, list[Copy]]:
        capture.refuse_plan(self.device)
        if mask is not None and self._graph is not None and "custom_mask" not in self._graph.bound:
            want = "custom_mask_buf and mask_indptr_buf given to the constructor"
            raise ValueError(needs("custom mask in CUDA-graph mode", want, "none", "core.graph-mask"))
        old = self._state
        limits = None if self._graph is None else self._limits(old, batch)
        query = Query(self._target(), problem, batch.shape, limits, self._available())
        decision, result = self._route(query, batch, old)
        self._provide(result.workspace_bytes)
        parts = index_parts(batch, mask, result)
        # From here on the plan holds its own copy: the caller may reuse the tensors it passed.
        packed = pack({n: part for n, part in parts.items() if part.device.type == "cpu"}, self.device)
        arena, copies, frozen = self._arena, [], None
        image: DeviceImage
        if limits is None:
            image = self._fresh_image(packed, parts, mask)
        else:
            layout = captured_layout(parts, limits)
            frozen = FrozenShape(q_len_per_req, problem, limits, decision.candidate, result.launch, layout)
            if old is not None and old.frozen is not None:
                old.frozen.require(frozen)
            arena = arena or self._make_arena(layout, mask)
            copies = self._copies(arena, packed, parts, mask)
            image = arena.image
        new = PlanState.make(
            0 if old is None else old.revision + 1,
            query, decision, result.launch, image, packed, batch.max_page_id, frozen, q_len_per_req,
            self.device, result.workspace_bytes,
        )  # fmt: skip
        notices.announce(query.target, decision.refused, decision.candidate)
        return new, arena, copies

    def _available(self) -> int | None:
        """Bytes of float workspace a plan may use; None for as many as it asks for."""
        buffer = self._float_workspace_buffer
        return buffer.numel() * buffer.element_size()

    def _provide(self, workspace_bytes: int) -> None:
        check_bytes(self._float_workspace_buffer, workspace_bytes)

    def _limits(self, old: PlanState | None, batch: HostBatch) -> GraphLimits:
        graph, shape = self._graph, batch.shape
        assert graph is not None
        limits = None if old is None else old.query.graph
        if limits is None:
            most = shape.total_kv if graph.max_pages is None else graph.max_pages
            limits = GraphLimits(graph.batch_size, shape.total_q, most, graph.max_kv_len)
        check_capacity(
            limits,
            batch_size=shape.batch_size,
            total_q=shape.total_q,
            pages=shape.total_kv if batch.kv_indices is None else shape.total_pages,
            max_kv_len=shape.max_kv_len,
        )
        return limits

    def _screened(self, query: Query, pinned: str | None) -> Screened:
        known = plugins.registry()
        key = (query.problem, query.graph, pinned, known)
        found = self._screens.get(key)
        if found is None:
            found = screen(
                query.target, query.problem, known.backends,
                graph=query.graph, requested=self._requested, pinned=pinned, measured=known.measured,
            )  # fmt: skip
            if len(self._screens) >= _KEPT_SCREENS:
                self._screens.clear()
            self._screens[key] = found
        return found

    def _workspace_size(
        self, problem: AttentionProblem, batch: HostBatch, mask: MaskBits | None
    ) -> tuple[int, int]:
        """Return (float workspace bytes, index array bytes) of a plan; changes nothing."""
        old = self._state
        limits = None if self._graph is None else self._limits(old, batch)
        _, result = self._route(Query(self._target(), problem, batch.shape, limits), batch, old)
        parts = index_parts(batch, mask, result)
        sizes = captured_layout(parts, limits) if limits else [(n, p.numel()) for n, p in parts.items()]
        return result.workspace_bytes, 4 * sum(size + -size % 4 for _, size in sizes)

    def _route(
        self, query: Query, batch: HostBatch, old: PlanState | None
    ) -> tuple[RouteDecision, PlanResult]:
        """Choose, and plan with the choice; a backend that finds late that it cannot is passed over."""
        pinned = None if old is None or self._graph is None else old.decision.candidate

        def plan(decision: RouteDecision) -> PlanResult:
            nonlocal batch
            if decision.path.host_indices:
                batch = with_host_indices(batch)
            return decision.backend.plan(query, decision.path.name, batch)

        return serve(self._screened(query, pinned), query, plan)

    def _fresh_image(self, packed: Image, parts: dict[str, torch.Tensor], mask: MaskBits | None) -> Image:
        beside = {name: part.to(torch.int32, copy=True) for name, part in parts.items() if name not in packed}
        if mask is not None:
            beside["custom_mask"] = mask.bits
        return upload(packed, self.device, beside)

    def _make_arena(self, layout: Layout, mask: MaskBits | None) -> GraphArena:
        assert self._graph is not None
        bound = {name: t for name, t in self._graph.bound.items() if name in dict(layout)}
        if mask is not None:
            bound["custom_mask"] = self._graph.bound["custom_mask"]
        return GraphArena.make(layout, bound, self.device)

    def _copies(
        self, arena: GraphArena, packed: Image, parts: dict[str, torch.Tensor], mask: MaskBits | None
    ) -> list[Copy]:
        copies = arena.writes(packed, parts)
        if mask is not None:
            place = arena.image["custom_mask"]
            if place.numel() < mask.bits.numel():
                raise ValueError(
                    needs("custom_mask_buf", f"{mask.bits.numel()} bytes", place.numel(), "core.graph-mask")
                )
            copies.append((place[: mask.bits.numel()], mask.bits))
        return copies

    def _plan_instead(self, old: PlanState, problem: AttentionProblem) -> None:
        """Plan another problem for the batch in force, or take what an equal call planned before.

        Layers of a model ask for the same one in turns. (In graph mode the problem is frozen: this raises.)
        """
        kept = self._instead
        if kept is not None and kept[0] is old and kept[1].query.problem == problem:
            self._provide(kept[1].workspace_bytes)
            self._state = kept[1]
            return
        mask = None
        if "custom_mask" in old.image:
            mask = MaskBits(old.image["custom_mask"], old.host["mask_indptr"])
        self._plan(problem, old.batch, mask=mask, q_len_per_req=old.q_len_per_req)
        self._instead = (old, self._planned())

    def _refuse_changes(self, planned: AttentionProblem, changes: Mapping[str, Any]) -> None:
        """Refuse, in a traced call, what only another plan would serve."""
        for name, value in changes.items():
            if getattr(planned, name) != value:
                tracing.refuse_plan(f"another {name} than planned")

    @contextmanager
    def _for_one_call(self, **changes: Any) -> Iterator[None]:
        """Hold another problem for the same batch while the body runs (the deprecated ``forward``)."""
        old = self._planned()
        if is_dynamo_compiling():
            self._refuse_changes(old.query.problem, changes)
            yield
            return
        problem = replace(old.query.problem, **changes)
        if problem != old.query.problem:
            self._plan_instead(old, problem)
        mine = self._state
        try:
            yield
        finally:
            if self._state is mine:
                self._state = old


def plan_all(asked: Sequence[tuple[Planner, AttentionProblem, HostBatch]]) -> None:
    """Plan several planners, all or none: every one is computed before the first changes.

    Raises:
        ValueError: As for the first plan that does not fit; nothing has changed.
    """
    undos = [(planner, _Undo()) for planner, _, _ in asked]
    try:
        for planner, _ in undos:
            planner._lock.acquire()
        made = [planner._compute(problem, batch, None, None) for planner, problem, batch in asked]
        for (planner, undo), new in zip(undos, made, strict=True):
            planner._publish(*new, undo)
        for planner, _ in undos:
            planner._lock.release()
    except BaseException:
        for planner, undo in reversed(undos):
            planner._take_back(undo)
            with suppress(RuntimeError):
                planner._lock.release()
        raise


def check_bytes(buffer: torch.Tensor, wanted: int) -> None:
    """Raise ValueError when a workspace is smaller than a plan needs, or its storage was shrunk."""
    if wanted:
        dense("float_workspace_buffer", buffer, "core.workspace")
    given = buffer.numel() * buffer.element_size()
    if given < wanted:
        text = needs("float_workspace_buffer", f"{wanted} bytes", given, "core.workspace")
        raise ValueError(f"{text}; workspace_size() tells the size for the same arguments")
