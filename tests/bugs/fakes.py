"""Backends with small capability tables: they compute with the reference and count what is asked of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from attn_core.backend import API_VERSION, AppendIO, DeviceImage, Path, PlanResult, RunIO, TensorContract
from attn_core.batch import HostBatch
from attn_core.capability import Capability
from attn_core.problem import AttentionProblem
from attn_core.query import Query
from attn_core.reasons import Code, Reason, Stage
from attn_core.reference import CAPABILITY, ReferenceBackend
from attn_core.rules import Rule
from attn_core.target import DeviceTarget

LATE = Code("fake.late", Stage.CAPABILITY, "cannot after all", meaning="Found in plan().")
BUILD = Code("fake.build", Stage.PREPARE, "did not build", meaning="Found in prepare().")
ANY_TENSOR = TensorContract()
ABSENT = Code("fake.absent", Stage.AVAILABILITY, "is not installed", meaning="Found by unavailable().")


def capability(**limits: object) -> Capability:
    """The reference's table, narrowed."""
    return replace(CAPABILITY, **limits)  # type: ignore[arg-type]


class Fake:
    """A backend of one or more paths; the hooks decide what goes wrong."""

    api_version = API_VERSION

    def __init__(
        self,
        table: Capability = CAPABILITY,
        name: str = "fake",
        *,
        rank: int = 0,
        paths: Sequence[Path] = (),
        rules: Sequence[Rule] = (),
        contract: TensorContract = ANY_TENSOR,
        workspace_bytes: int = 0,
        on_unavailable: Callable[[DeviceTarget], Reason | None] = lambda target: None,
        on_prepare: Callable[[str], Reason | None] = lambda path: None,
        on_plan: Callable[[Query], None] = lambda query: None,
    ) -> None:
        self.name, self.rank, self.rules = name, rank, tuple(rules)
        self.paths = tuple(paths) or (Path("only", table, contract),)
        self.workspace_bytes = workspace_bytes
        self.on_unavailable, self.on_prepare, self.on_plan = on_unavailable, on_prepare, on_plan
        self.plans = self.runs = self.appends = 0
        self._inner = ReferenceBackend()

    def unavailable(self, target: DeviceTarget) -> Reason | None:
        return self.on_unavailable(target)

    def prepare(self, target: DeviceTarget, problem: AttentionProblem, path: str) -> Reason | None:
        return self.on_prepare(path)

    def plan(self, query: Query, path: str, batch: HostBatch) -> PlanResult:
        self.plans += 1
        self.on_plan(query)
        return replace(self._inner.plan(query, path, batch), workspace_bytes=self.workspace_bytes)

    def run(self, launch: object, image: DeviceImage, io: RunIO) -> None:
        self.runs += 1
        self._inner.run(launch, image, io)

    def append(self, path: str, problem: AttentionProblem, io: AppendIO) -> None:
        self.appends += 1
        self._inner.append(path, problem, io)
