"""Backend ``reference``: every feature in plain torch, float32 accumulation, on any device.

It is the oracle of all tests and the last resort of ``auto``. Requests are computed in padded groups
of bounded size; nothing loops over tokens or heads, and run() never asks the device for a value, so
the same code can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import reference_math as math
from . import sampling_math
from .backend import (
    API_VERSION,
    AppendIO,
    DeviceImage,
    Path,
    PlanResult,
    RunIO,
    SamplingIO,
    SamplingPath,
    TensorContract,
)
from .batch import HostBatch
from .capability import E5M2, FLOATS, FP8, Capability, GraphSupport
from .checking import dense
from .problem import UNIFORM_OPS, AttentionProblem, MaskMode, Op, PosEncoding
from .query import Query
from .reasons import Code, Reason, Stage
from .rules import Rule, Verdict
from .target import DeviceTarget

_ALL = FLOATS | {torch.float64}
CAPABILITY = Capability(
    archs=None,
    ops=frozenset(Op),
    q_dtypes=_ALL,
    kv_dtypes=_ALL | FP8 | E5M2,
    o_dtypes=_ALL,
    masks=frozenset(MaskMode),
    pos_encodings=frozenset(PosEncoding),
    window=True,
    soft_cap=True,
    batch_invariant=True,
    graph=GraphSupport.ALWAYS,
)
SAMPLED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
CONTRACT = TensorContract(dense_head_dim=False)

_GATHER_BYTES = 64 << 20
"""Bound on the float32 keys and values gathered for one group of requests."""


CAPTURED_SPLIT = Code(
    "reference.captured-split",
    Stage.CAPABILITY,
    "honours fixed_split_size and disable_split_kv in an eager prefill only",
    meaning="A captured prefill is padded to its batch's rows, and that shows in a request's bits.",
)
_PREFILL = frozenset({Op.PREFILL_PAGED, Op.PREFILL_RAGGED})


def _captured_split(query: Query) -> Verdict:
    return (None, "a captured one") if query.graph is not None and query.problem.batch_invariant else None


@dataclass(frozen=True, slots=True)
class Launch:
    """A plan of the reference.

    Attributes:
        problem: What to compute.
        groups: Per group of requests: first, end, padded query rows, most and least keys, first and end
            row of the output (both -1 when only the device knows them).
    """

    problem: AttentionProblem
    groups: tuple[math.Group, ...]


class ReferenceBackend:
    """Plain torch attention."""

    api_version = API_VERSION
    name = "reference"
    rank = 1000
    paths = (Path("torch", CAPABILITY, CONTRACT),)
    sampling = (
        SamplingPath(name="torch", archs=None, dtypes=SAMPLED, max_vocab_size=sampling_math.MAX_VOCAB),
    )
    rules = (Rule(CAPTURED_SPLIT, _PREFILL, frozenset({"torch"}), _captured_split),)

    def unavailable(self, target: DeviceTarget) -> Reason | None:
        """Torch is always there."""
        return None

    def prepare(self, target: DeviceTarget, problem: AttentionProblem, path: str) -> Reason | None:
        """Nothing to build."""
        return None

    def plan(self, query: Query, path: str, batch: HostBatch) -> PlanResult:
        """Cut the batch into groups whose gathered keys and values stay small."""
        problem, shape, graph = query.problem, query.batch, query.graph
        if graph is not None:
            return PlanResult(Launch(problem, self._captured(query)))
        per_key = 4 * problem.num_kv_heads * (problem.head_dim_qk + problem.head_dim_vo)
        size = max(1, _GATHER_BYTES // max(1, per_key * shape.max_kv_len))
        if problem.batch_invariant:
            size = 1  # padding to a neighbour's length may change how a product is summed
        return PlanResult(Launch(problem, _groups(batch, min(size, max(1, shape.batch_size)))))

    def _captured(self, query: Query) -> tuple[math.Group, ...]:
        """One group (one per request if batches must not show) at full capacity: shapes of the first plan."""
        graph, problem = query.graph, query.problem
        assert graph is not None
        keys = graph.max_pages * (problem.page_size or 1)
        if graph.max_kv_len is not None:
            keys = min(keys, graph.max_kv_len)
        decode = problem.op in UNIFORM_OPS
        rows = graph.total_q // max(1, graph.batch_size) if decode else graph.total_q
        if problem.batch_invariant:
            return tuple((n, n + 1, rows, keys, 0, n * rows, (n + 1) * rows) for n in range(graph.batch_size))
        return ((0, graph.batch_size, rows, keys, 0, -1, -1),)

    @torch.inference_mode()  # where alone a tensor made in it may be written
    def run(self, launch: object, image: DeviceImage, io: RunIO) -> None:
        """Compute group after group."""
        assert isinstance(launch, Launch)
        for name in io.__slots__:  # before the first of them is written
            value = getattr(io, name)
            if isinstance(value, torch.Tensor):
                dense(name, value, "core.layout")
        for group in launch.groups:
            math.attend(launch.problem, group, image, io)

    @torch.inference_mode()
    def append(self, path: str, problem: AttentionProblem, io: AppendIO) -> None:
        """Scatter the rows into their slots."""
        math.append(problem, io)

    def prepare_sampling(self, target: DeviceTarget, path: str) -> Reason | None:
        """Nothing to build."""
        return None

    @torch.inference_mode()
    def sample(self, path: str, io: SamplingIO) -> None:
        """Take an acceptance step."""
        sampling_math.sample(io)


def _groups(batch: HostBatch, size: int) -> tuple[math.Group, ...]:
    count = batch.shape.batch_size
    firsts = torch.arange(0, count, size, device="cpu")
    ends = torch.clamp(firsts + size, max=count)
    q_len = batch.qo_indptr[1:] - batch.qo_indptr[:-1]
    longest = (_group_max(q_len, size), _group_max(batch.kv_len, size))
    least = torch.full_like(firsts, batch.min_kv_len)
    columns = (firsts, ends, *longest, least, batch.qo_indptr[firsts], batch.qo_indptr[ends])
    return tuple(zip(*(column.tolist() for column in columns), strict=True))


def _group_max(lengths: torch.Tensor, size: int) -> torch.Tensor:
    padded = torch.nn.functional.pad(lengths, (0, -lengths.numel() % size))
    return padded.view(-1, size).amax(1) if padded.numel() else padded
