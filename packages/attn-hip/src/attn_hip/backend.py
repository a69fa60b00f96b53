"""Backend ``fa2``: the in-tree kernels, path ``tile`` on GPUs and path ``cpu`` on the host."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_core.backend import (
    API_VERSION,
    AppendIO,
    DeviceImage,
    DirectRun,
    Path,
    PlanResult,
    RunIO,
    RunShapes,
    SamplingIO,
    SamplingPath,
    TensorContract,
)
from attn_core.batch import HostBatch
from attn_core.capability import E5M2, FLOATS, FP8, Capability, Dims, GraphSupport
from attn_core.problem import AttentionProblem, MaskMode, Op, PosEncoding
from attn_core.query import Query
from attn_core.reasons import Reason
from attn_core.rules import Rule, Verdict
from attn_core.target import DeviceTarget, target_of

from . import budget, codes, direct, launch, launch_gpu, plan, toolchain, variants
from .gpu import Gpu
from .host import CANDIDATE, Host

NAME = CANDIDATE
TILE, CPU = "tile", "cpu"
_HALVES = frozenset({torch.float16, torch.bfloat16})
_BYTES = FP8 | E5M2

CPU_CAPABILITY = Capability(
    archs=frozenset({"cpu"}),
    ops=frozenset(Op),
    q_dtypes=FLOATS,
    kv_dtypes=FLOATS | _BYTES,
    o_dtypes=FLOATS,
    head_dims=Dims(at_most=1024),
    masks=frozenset(MaskMode),
    pos_encodings=frozenset(PosEncoding),
    window=True,
    soft_cap=True,
    batch_invariant=True,
    graph=GraphSupport.ALWAYS,
)
GPU_CAPABILITY = replace(
    CPU_CAPABILITY,
    archs=frozenset(toolchain.ARCHS),
    q_dtypes=_HALVES,
    kv_dtypes=_HALVES | _BYTES,
    head_dims=Dims(at_most=256),
)


def _mixed(query: Query) -> Verdict:
    p = query.problem
    return None if p.kv_dtype in (p.q_dtype, *_BYTES) else (_name(p.q_dtype), _name(p.kv_dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_ATTENDS = frozenset(Op) - {Op.APPEND}
MOST_SOFT_CAP = 1000


def _large_cap(query: Query) -> Verdict:
    cap = query.problem.logits_soft_cap
    return (MOST_SOFT_CAP, cap) if cap > MOST_SOFT_CAP else None


RULES = (
    Rule(codes.MIXED_TYPES, _ATTENDS, frozenset({TILE}), _mixed),
    Rule(codes.SOFT_CAP, _ATTENDS, frozenset({TILE}), _large_cap),
)


class Fa2Backend:
    """The kernels of attn-hip, built on first use."""

    api_version = API_VERSION
    name = NAME
    rank = 100
    paths = (
        Path(TILE, GPU_CAPABILITY, TensorContract(q="dense")),
        Path(CPU, CPU_CAPABILITY, TensorContract(q="dense")),
    )
    sampling = (
        SamplingPath(name=TILE, archs=GPU_CAPABILITY.archs, dtypes=frozenset(launch.PROBABILITIES)),
        SamplingPath(name=CPU, archs=CPU_CAPABILITY.archs, dtypes=frozenset(launch.PROBABILITIES)),
    )
    rules: tuple[Rule, ...] = RULES
    codes = codes.CODES
    pages = budget.PAGES

    def __init__(self) -> None:
        self._host = Host()
        self._gpu = Gpu()

    def unavailable(self, target: DeviceTarget) -> Reason | None:
        """Say that something is missing on this machine; a GPU elsewhere is assumed to have what it needs."""
        if target.kind == "cpu":
            return self._host.unavailable()
        return self._gpu.unavailable(target)

    def prepare(self, target: DeviceTarget, problem: AttentionProblem, path: str) -> Reason | None:
        """Load the native module, and a GPU's kernels; the first time on a machine this compiles them.

        Raises:
            ValueError: ``ATTN_CPU_ISA`` names what this CPU cannot run.
        """
        failed = self._host.prepare()
        if failed is not None or path != TILE:
            return failed
        return self._gpu.prepare(self._host.module(), target, problem)

    def plan(self, query: Query, path: str, batch: HostBatch) -> PlanResult:
        """Cut the batch into work items, in native code."""
        if path == CPU:
            return plan.plan(self._host.module(), query, batch)
        return plan.plan_gpu(self._host.module(), self._gpu, query, batch)

    def run(self, launched: object, image: DeviceImage, io: RunIO) -> None:
        """Compute: on torch's number of threads, or enqueued on the current stream of the GPU."""
        if isinstance(launched, launch_gpu.GpuLaunch):
            launch_gpu.run(launched, image, io)
            return
        assert isinstance(launched, launch.Launch)
        launch.run(launched, image, io)

    def direct(self, launched: object, image: DeviceImage, io: RunIO, shapes: RunShapes) -> DirectRun | None:
        """Return a native function for further runs of a plan, where torch lets it see tensors."""
        assert isinstance(launched, launch.Launch | launch_gpu.GpuLaunch)
        return direct.direct(self._host.module(), launched, image, io, shapes)

    def append(self, path: str, problem: AttentionProblem, io: AppendIO) -> None:
        """Write the rows into their slots."""
        native, candidate = self._host.module(), f"{NAME}/{path}"
        if path == CPU:
            launch.append(native, candidate, problem, io)
            return
        target = target_of(io.k.device)
        kernel = self._gpu.get(target, variants.misc_variants(target.arch)["append"])
        launch_gpu.append(native, kernel, candidate, problem, io)

    def prepare_sampling(self, target: DeviceTarget, path: str) -> Reason | None:
        """Load the native module, and a GPU's kernel unless a graph is being captured."""
        failed = self._host.prepare()
        if failed is not None or path != TILE:
            return failed
        return self._gpu.ready(self._host.module(), target, self._sampler(target))

    def sample(self, path: str, io: SamplingIO) -> None:
        """Take an acceptance step."""
        native = self._host.module()
        if path == CPU:
            launch.sample(native, io)
            return
        target = target_of(io.tokens.device)
        launch_gpu.sample(native, self._gpu.get(target, self._sampler(target)), io)

    def _sampler(self, target: DeviceTarget) -> variants.Variant:
        return variants.misc_variants(target.arch)["chain_sample"]

    def doctor(self) -> dict[str, object]:
        """Return instruction set, compilers, cache and builds."""
        return {**self._host.state(), **self._gpu.state()}
