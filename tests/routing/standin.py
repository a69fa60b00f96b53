"""A backend in the place of the in-tree kernels: decisions then do not depend on what is installed."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from attn_aiter.backend import AiterBackend
from attn_core.backend import API_VERSION, AppendIO, Backend, Path, PlanResult, RunIO
from attn_core.batch import BatchShape, HostBatch
from attn_core.capability import E5M2, FLOATS, FP8, Capability, GraphSupport
from attn_core.problem import AttentionProblem, MaskMode, Op, PosEncoding
from attn_core.query import GraphLimits, Query
from attn_core.reasons import Reason
from attn_core.reference import ReferenceBackend
from attn_core.route import AUTO, RouteDecision, choose, screen
from attn_core.rules import Rule
from attn_core.target import DeviceTarget

TARGETS = {
    "gfx942": DeviceTarget("hip", "gfx942", 304, 64),
    "gfx950": DeviceTarget("hip", "gfx950", 256, 64),
    "gfx90a": DeviceTarget("hip", "gfx90a", 104, 64),
    "sm_90": DeviceTarget("cuda", "sm_90", 132, 32),
    "cpu": DeviceTarget("cpu", "cpu", 8, 1),
}


class Fa2:
    """Says it can do everything, by one path on three GPUs and by another on the CPU; computes nothing."""

    api_version = API_VERSION
    name = "fa2"
    rank = 100
    rules: tuple[Rule, ...] = ()
    paths = tuple(
        Path(
            name,
            Capability(
                archs=archs,
                ops=frozenset(Op),
                q_dtypes=FLOATS if name == "cpu" else FLOATS - {torch.float32},
                kv_dtypes=FLOATS | FP8 | E5M2,
                masks=frozenset(MaskMode),
                pos_encodings=frozenset(PosEncoding),
                window=True,
                soft_cap=True,
                batch_invariant=True,
                graph=GraphSupport.ALWAYS,
            ),
        )
        for name, archs in (
            ("tile", frozenset({"gfx942", "gfx950", "sm_90"})),
            ("cpu", frozenset({"cpu"})),
        )
    )

    def unavailable(self, target: DeviceTarget) -> Reason | None:
        return None

    def prepare(self, target: DeviceTarget, problem: AttentionProblem, path: str) -> Reason | None:
        return None

    def plan(self, query: Query, path: str, batch: HostBatch) -> PlanResult:
        return PlanResult(query.problem)

    def run(self, launch: object, image: Mapping[str, torch.Tensor], io: RunIO) -> None:
        raise NotImplementedError

    def append(self, path: str, problem: AttentionProblem, io: AppendIO) -> None:
        raise NotImplementedError


def backends(release: str | AiterBackend = "0.1.20") -> tuple[Backend, ...]:
    """The three backends in rank order; the first as if a release, or ``none``, were installed."""
    made = AiterBackend({"assume_version": release}) if isinstance(release, str) else release
    return (made, Fa2(), ReferenceBackend())


def shape(q_len: int, kv_len: int = 4096, batch: int = 4, page: int | None = 16) -> BatchShape:
    """A batch of equal requests."""
    return BatchShape(
        batch_size=batch,
        total_q=batch * q_len,
        max_q_len=q_len,
        uniform_q_len=q_len,
        max_kv_len=kv_len,
        total_kv=batch * kv_len,
        total_pages=0 if page is None else batch * -(-kv_len // page),
    )


def route(
    problem: AttentionProblem,
    q_len: int,
    *,
    arch: str = "gfx942",
    release: str | AiterBackend = "0.1.20",
    requested: str = AUTO,
    kv_len: int = 4096,
    graph: GraphLimits | None = None,
    pinned: str | None = None,
    using: tuple[Backend, ...] | None = None,
) -> RouteDecision:
    """Decide one question from nothing."""
    target = TARGETS[arch]
    using = backends(release) if using is None else using
    screened = screen(target, problem, using, graph=graph, requested=requested, pinned=pinned)
    return choose(screened, Query(target, problem, shape(q_len, kv_len, page=problem.page_size), graph))
