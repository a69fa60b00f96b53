"""Two ways to run a case: through the public entry points, and through Backend.plan and run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .. import plugins
from ..backend import (
    AppendBackend,
    AppendIO,
    Backend,
    DeviceImage,
    Path,
    PlanResult,
    RunIO,
    SamplingBackend,
    SamplingIO,
    SamplingPath,
)
from ..batch import HostBatch
from ..decode import BatchDecodeWithPagedKVCacheWrapper, single_decode_with_kv_cache
from ..prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
)
from ..problem import AttentionProblem, MaskMode, Op
from ..query import GraphLimits, Query
from ..reasons import Reason, Stage
from ..rules import Rule
from ..run_options import Result
from ..target import DeviceTarget
from .axes import SINGLES
from .cases import Case
from .memory import lay_out, workspace_of
from .tables import host_batch
from .world import World

Wrapper = (
    BatchDecodeWithPagedKVCacheWrapper
    | BatchPrefillWithPagedKVCacheWrapper
    | BatchPrefillWithRaggedKVCacheWrapper
)
GARBAGE = 0xFF
"""Byte that fills a workspace before a run: NaN in every float type."""


class _OnePath:
    """A backend reduced to one path, for entry points that take no ``backend=``."""

    def __init__(self, backend: Backend, path: Path) -> None:
        self._backend = backend
        self.api_version, self.name, self.rank = backend.api_version, backend.name, backend.rank
        self.paths = (path,)
        self.rules: tuple[Rule, ...] = tuple(
            rule for rule in backend.rules if rule.code.stage is not Stage.PREFERENCE
        )

    def unavailable(self, target: DeviceTarget) -> Reason | None:
        return self._backend.unavailable(target)

    def prepare(self, target: DeviceTarget, problem: AttentionProblem, path: str) -> Reason | None:
        return self._backend.prepare(target, problem, path)

    def plan(self, query: Query, path: str, batch: HostBatch) -> PlanResult:
        return self._backend.plan(query, path, batch)

    def run(self, launch: object, image: DeviceImage, io: RunIO) -> None:
        self._backend.run(launch, image, io)


class _OneAppendPath(_OnePath):
    def append(self, path: str, problem: AttentionProblem, io: AppendIO) -> None:
        assert isinstance(self._backend, AppendBackend)
        self._backend.append(path, problem, io)


_registries: dict[tuple[int, str], plugins.Registry] = {}


def _registry(backend: Backend, path: Path) -> plugins.Registry:
    """Made once per path: wrappers remember what they found in a registry by the registry."""
    key = (id(backend), path.name)
    if key not in _registries:
        kind = _OneAppendPath if isinstance(backend, AppendBackend) else _OnePath
        one = kind(backend, path)
        _registries[key] = plugins.Registry((one,), (), (), {backend.name: "the backend under test"})
    return _registries[key]


@contextmanager
def only(backend: Backend, path: Path) -> Iterator[None]:
    """Make one path the process's only candidate; what was installed comes back afterwards."""
    old = plugins.use(_registry(backend, path))
    try:
        yield
    finally:
        plugins.use(old)


@contextmanager
def only_one(backend: Backend) -> Iterator[None]:
    """Make a backend, with all of its paths, the process's only one."""
    old = plugins.use(plugins.Registry((backend,), (), (), {backend.name: "the backend under test"}))
    try:
        yield
    finally:
        plugins.use(old)


class _OneSamplingPath(_OnePath):
    def __init__(self, backend: SamplingBackend, path: SamplingPath) -> None:
        super().__init__(backend, backend.paths[0])
        self._sampler = backend
        self.sampling = (path,)

    def prepare_sampling(self, target: DeviceTarget, path: str) -> Reason | None:
        return self._sampler.prepare_sampling(target, path)

    def sample(self, path: str, io: SamplingIO) -> None:
        self._sampler.sample(path, io)


@contextmanager
def only_sampling(backend: SamplingBackend, path: SamplingPath) -> Iterator[None]:
    """Make one sampling path the process's only candidate; what was installed comes back afterwards."""
    one = _OneSamplingPath(backend, path)
    old = plugins.use(plugins.Registry((one,), (), (), {backend.name: "the backend under test"}))
    try:
        yield
    finally:
        plugins.use(old)


@dataclass(slots=True)
class Planned:
    """What a direct plan gave, with its index arrays on the device."""

    query: Query
    batch: HostBatch
    result: PlanResult
    image: dict[str, torch.Tensor]


def prepare(case: Case) -> None:
    """Call ``Backend.prepare`` as the core does before a plan."""
    unready = case.backend.prepare(case.target, case.problem, case.path.name)
    if unready is not None:
        raise AssertionError(f"prepare() refuses what the capability row claims: {unready}")


def plan_direct(case: Case, world: World, limits: GraphLimits | None = None) -> Planned:
    """Call ``Backend.prepare`` and ``plan``, and put the image together without the core's help."""
    prepare(case)
    batch = host_batch(case.problem, world.lengths, world.table)
    query = Query(case.target, case.problem, batch.shape, limits)
    result = case.backend.plan(query, case.path.name, batch)
    parts: dict[str, torch.Tensor | None] = {
        "qo_indptr": batch.qo_indptr,
        "kv_indptr": batch.kv_indptr,
        "kv_len": batch.kv_len,
        "kv_indices": batch.kv_indices,
        "kv_last_page_len": batch.kv_last_page_len,
        **result.image,
    }
    if case.problem.mask is MaskMode.CUSTOM:
        parts["custom_mask"], parts["mask_indptr"] = world.mask_bits()
    image = {name: t.clone().to(case.device) for name, t in parts.items() if t is not None}
    return Planned(query, batch, result, image)


def io_of(case: Case, world: World, workspace_bytes: int, *, out: str = "given") -> RunIO:
    """Return the tensors of a direct run: outputs full of NaN, a workspace full of garbage."""
    p, rows = case.problem, world.q.shape[0]
    q = world.q if case.path.contract.q == "any" else world.q.contiguous()
    workspace, _ = workspace_of(workspace_bytes, GARBAGE, case.device)
    lse = None
    if case.wants_lse:
        lse = lay_out(out, (rows, p.num_qo_heads), torch.float32, case.device)
    s = world.scales
    return RunIO(
        q, world.k, world.v,
        lay_out(out, (rows, p.num_qo_heads, p.head_dim_vo), p.o_dtype, case.device), lse, workspace,
        s.q, s.k, s.v,
    )  # fmt: skip


def run_direct(case: Case, planned: Planned, io: RunIO) -> RunIO:
    """Run a direct plan; returns the tensors it wrote to."""
    with torch.no_grad():
        case.backend.run(planned.result.launch, planned.image, io)
    return io


@dataclass(slots=True)
class Answer:
    """What a public entry point returned, and the block around its workspace."""

    out: torch.Tensor
    lse: torch.Tensor | None
    chosen: str | None
    guard: torch.Tensor | None = None


def run_public(case: Case, world: World, workspace_bytes: int) -> Answer:
    """Plan and run through the wrapper or function a user would call.

    Between plan and run every array given to plan() is overwritten: a plan owns what it needs.
    """
    with only(case.backend, case.path):
        if case.problem.op in SINGLES:
            return _single(case, world)
        workspace, guard = workspace_of(workspace_bytes, GARBAGE, case.device)
        wrapper = make_wrapper(case, workspace)
        mask = plan(case, world, wrapper)
        for array in (*world.table.tensors().values(), mask):
            if array is not None:
                array.fill_(1)
        out, lse = run(case, world, wrapper)
        assert wrapper.route is not None
        return Answer(out, lse, wrapper.route.candidate, guard)


def make_wrapper(
    case: Case,
    workspace: torch.Tensor,
    buffers: Mapping[str, torch.Tensor] | None = None,
    max_seq_len: int | None = None,
) -> Wrapper:
    """Construct the public wrapper of a case; with ``buffers``, in graph mode."""
    p, name, graph = case.problem, case.candidate, buffers is not None
    b = buffers or {}
    if p.op in (Op.DECODE, Op.VERIFY):
        return BatchDecodeWithPagedKVCacheWrapper(
            workspace, p.kv.order, graph, p.use_tensor_cores, b.get("kv_indptr"), b.get("kv_indices"),
            b.get("kv_last_page_len"), name, max_seq_len=max_seq_len,
        )  # fmt: skip
    masks = b.get("custom_mask"), b.get("mask_indptr")
    if p.op is Op.PREFILL_PAGED:
        return BatchPrefillWithPagedKVCacheWrapper(
            workspace, p.kv.order, graph, b.get("qo_indptr"), b.get("kv_indptr"), b.get("kv_indices"),
            b.get("kv_last_page_len"), *masks, name,
        )  # fmt: skip
    return BatchPrefillWithRaggedKVCacheWrapper(
        workspace, p.kv.order, graph, b.get("qo_indptr"), b.get("kv_indptr"), *masks, name
    )


def options_of(case: Case) -> dict[str, Any]:
    """Return the keyword arguments that the plan of every wrapper takes."""
    p = case.problem
    return {
        "pos_encoding_mode": p.pos_encoding.value, "window_left": p.window_left,
        "logits_soft_cap": p.logits_soft_cap or None, "q_data_type": p.q_dtype, "kv_data_type": p.kv_dtype,
        "o_data_type": p.o_dtype, "sm_scale": None if case.default_scale else p.sm_scale,
        "rope_scale": p.rope_scale, "rope_theta": p.rope_theta, "fixed_split_size": p.fixed_split_size,
        "disable_split_kv": p.disable_split_kv, "needs_lse": p.needs_lse,
    }  # fmt: skip


def plan(case: Case, world: World, wrapper: Wrapper) -> torch.Tensor | None:
    """Plan a wrapper for a world's batch; returns the mask tensor handed over, if any."""
    p, t = case.problem, world.table
    heads = (p.num_qo_heads, p.num_kv_heads)
    options = options_of(case)
    mask: torch.Tensor | None = None
    if isinstance(wrapper, BatchDecodeWithPagedKVCacheWrapper):
        wrapper.plan(
            t.kv_indptr, t.kv_indices, t.kv_last_page_len, *heads, p.head_dim_qk, p.page_size or 1,
            q_len_per_req=world.lengths.q_len_per_req, **options,
        )  # fmt: skip
        return None
    if case.mask == "packed":
        mask = options["packed_custom_mask"] = world.mask_bits()[0]
    elif case.mask == "custom":
        mask = options["custom_mask"] = world.mask()
    options |= {"causal": case.mask == "causal", "head_dim_vo": p.head_dim_vo}
    if isinstance(wrapper, BatchPrefillWithPagedKVCacheWrapper):
        wrapper.plan(
            t.qo_indptr, t.kv_indptr, t.kv_indices, t.kv_last_page_len, *heads, p.head_dim_qk,
            p.page_size or 1, **options,
        )  # fmt: skip
    else:
        wrapper.plan(t.qo_indptr, t.kv_indptr, *heads, p.head_dim_qk, **options)
    return mask


def run(case: Case, world: World, wrapper: Wrapper) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a planned wrapper with the outputs the case wants."""
    p, rows = case.problem, world.q.shape[0]
    options: dict[str, Any] = {"return_lse": case.wants_lse, **scale_options(case, world)}
    if case.out != "own":
        shape = (rows, p.num_qo_heads, p.head_dim_vo)
        options["out"] = lay_out(case.out, shape, p.o_dtype, case.device)
        if case.wants_lse:
            options["lse"] = lay_out(case.out, shape[:2], torch.float32, case.device)
    call: Any = wrapper.run
    ragged = isinstance(wrapper, BatchPrefillWithRaggedKVCacheWrapper)
    cache = (world.kv.k, world.kv.v) if ragged else (world.kv.cache,)
    found: Result = call(world.q, *cache, **options)
    out, lse = found if isinstance(found, tuple) else (found, None)
    given = options.get("out", out)
    if out is not given:
        raise AssertionError("run() returned another tensor than the out= it was given")
    return out, lse


def scale_options(case: Case, world: World) -> dict[str, Any]:
    """Return the scale arguments of a public run."""
    if case.scales == "none":
        return {}
    s = world.scales
    values: dict[str, object] = {"q_scale": s.q, "k_scale": s.k, "v_scale": s.v}
    if case.problem.op is Op.PREFILL_SINGLE:
        del values["q_scale"]
    if case.scales == "tensor":
        return {name: torch.tensor([value], device=case.device) for name, value in values.items()}
    return values


def _single(case: Case, world: World) -> Answer:
    p, k, v = case.problem, world.kv.k, world.kv.v
    options: dict[str, Any] = {
        "kv_layout": p.kv.order, "pos_encoding_mode": p.pos_encoding.value, "window_left": p.window_left,
        "logits_soft_cap": p.logits_soft_cap or None, "sm_scale": None if case.default_scale else p.sm_scale,
        "rope_scale": p.rope_scale, "rope_theta": p.rope_theta, "return_lse": case.wants_lse,
        **scale_options(case, world),
    }  # fmt: skip
    if p.op is Op.DECODE_SINGLE:
        options["use_tensor_cores"] = p.use_tensor_cores
        found = single_decode_with_kv_cache(world.q[0], k, v, **options)
        out, lse = found if isinstance(found, tuple) else (found, None)
        return Answer(out[None], None if lse is None else lse[None], None)
    options |= {"causal": case.mask == "causal", "o_dtype": p.o_dtype, "backend": case.candidate}
    if case.mask == "packed":
        options["packed_custom_mask"] = world.mask_bits()[0]
    elif case.mask == "custom":
        mask = world.mask()
        options["custom_mask"] = mask
    found = single_prefill_with_kv_cache(world.q, k, v, **options)
    out, lse = found if isinstance(found, tuple) else (found, None)
    return Answer(out, lse, None)
