"""The contract of a backend. Everything a third party must write is on this page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import torch

from .batch import HostBatch
from .capability import Capability
from .problem import AttentionProblem
from .query import Query
from .reasons import Reason
from .rules import Rule
from .target import DeviceTarget

API_VERSION = 1
"""Version of this page. A backend states the version it was written for as ``api_version``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorContract:
    """What a path asks of the tensors of a run. The wrapper checks it on every call.

    Attributes:
        dense_head_dim: k and v need stride 1 over the head dimension.
        same_kv_strides: k and v must have identical strides (a kernel that is given one set).
        q: ``any`` strides, or a ``dense`` head dimension, or ``packed`` heads (only the row stride is
            free). A q that is not so is copied, never misread.
        scales: Takes q_scale, k_scale and v_scale.
    """

    dense_head_dim: bool = True
    same_kv_strides: bool = False
    q: Literal["any", "dense", "packed"] = "any"
    scales: bool = True


@dataclass(frozen=True, slots=True)
class Path:
    """One way a backend can run. Each path is routed as a candidate of its own, ``backend/path``.

    Attributes:
        name: Path name.
        capability: What it can compute.
        contract: What it asks of the tensors.
        host_indices: plan() reads the values of ``HostBatch.kv_indices``; costs a copy when the caller
            has them on the device.
        by_name: For callers that name it: a PREFERENCE rule keeps it out of ``auto``, so what it cannot do
            explains no fallback. Its refusals are listed in a decision all the same.
    """

    name: str
    capability: Capability
    contract: TensorContract = TensorContract()
    host_indices: bool = False
    by_name: bool = False


@dataclass(frozen=True, slots=True)
class PlanResult:
    """Result of planning: host memory and scalars only; nothing on a device has changed.

    Attributes:
        launch: Hashable value that run() needs besides device memory. Under capture it may depend on
            ``query.graph`` only, since a graph replays the first one.
        image: Extra int32 CPU arrays, by name, that run() reads on the device. Under capture their
            sizes may depend on ``query.graph`` only.
        workspace_bytes: Bytes of float workspace that run() uses.
    """

    launch: object
    image: Mapping[str, torch.Tensor] = field(default_factory=dict)
    workspace_bytes: int = 0


class RunIO:
    """Tensors of one run. ``out`` and ``lse`` are written, ``workspace`` is scratch, the rest is read.

    Attributes:
        q: ``[total_q, num_qo_heads, head_dim_qk]``.
        k: Pages ``[pages, page_size, num_kv_heads, head_dim_qk]`` (NHD) or ``[pages, num_kv_heads,
            page_size, head_dim_qk]`` (HND); ragged ``[total_kv, num_kv_heads, head_dim_qk]``.
        v: As ``k``, with ``head_dim_vo``.
        out: ``[total_q, num_qo_heads, head_dim_vo]``.
        lse: ``[total_q, num_qo_heads]`` float32, base 2, or None.
        workspace: Uninitialised bytes, at least what the plan asked for, or None.
        q_scale: Multiplies q. A float, or a one-element tensor read on its device.
        k_scale: Multiplies k.
        v_scale: Multiplies the output.
    """

    __slots__ = ("k", "k_scale", "lse", "out", "q", "q_scale", "v", "v_scale", "workspace")

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
        q_scale: float | torch.Tensor = 1.0,
        k_scale: float | torch.Tensor = 1.0,
        v_scale: float | torch.Tensor = 1.0,
    ) -> None:
        self.q, self.k, self.v, self.out, self.lse = q, k, v, out, lse
        self.workspace = workspace
        self.q_scale, self.k_scale, self.v_scale = q_scale, k_scale, v_scale


@dataclass(frozen=True, slots=True)
class RunShapes:
    """What the tensors of every run of a plan are held to, besides their types and their device.

    Attributes:
        q: Shape of q.
        out: Shape of out; that of lse without the last dimension.
        k: Shape of k after its first dimension.
        v: Shape of v after its first dimension.
        least_rows: Least size of the first dimension of k and v.
        lse: Whether the plan serves the log-sum-exp; a call with ``lse`` is wrong where it does not.
    """

    q: tuple[int, ...]
    out: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    least_rows: int
    lse: bool


DirectRun = Callable[[object, object, object, object, object, object, object, object], bool]
"""``(q, cache, out, lse, workspace, q_scale, k_scale, v_scale) -> bool``: see :class:`DirectBackend`."""


@dataclass(frozen=True, slots=True)
class AppendIO:
    """Tensors of one append. ``k`` and ``v`` (the cache) are written, the rest is read.

    Attributes:
        key: ``[nnz, num_kv_heads, head_dim_qk]`` rows to write.
        value: ``[nnz, num_kv_heads, head_dim_vo]``.
        k: Cache pages in the problem's layout.
        v: Cache pages.
        batch_indices: ``[nnz]`` int32, contiguous as all that follow: request of each row; -1 skips the row.
        positions: ``[nnz]`` int32, position of each row in its request.
        kv_indices: Page ids, int32.
        kv_indptr: ``[batch_size + 1]`` int32, in pages.
    """

    key: torch.Tensor
    value: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    batch_indices: torch.Tensor
    positions: torch.Tensor
    kv_indices: torch.Tensor
    kv_indptr: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPath:
    """One way a backend can sample chains; routed as the candidate ``backend/path``.

    Attributes:
        name: Path name; one of ``Backend.paths`` may have the same.
        archs: Devices, by ``DeviceTarget.arch``; None for all.
        dtypes: Types of probabilities; those of draft and target may differ.
        max_vocab_size: Longest row, or None.
    """

    name: str
    archs: frozenset[str] | None
    dtypes: frozenset[torch.dtype]
    max_vocab_size: int | None = None


@dataclass(frozen=True, slots=True)
class SamplingIO:
    """Tensors of one acceptance step, all on one device. ``tokens`` is written, the counters are added to.

    Attributes:
        draft_probs: ``[batch_size, n, vocab_size]``, stride 1 over the vocabulary; ``n`` may be 0.
        target_probs: ``[batch_size, n + 1, vocab_size]``, likewise.
        draft_token_ids: ``[batch_size, n]`` int64, contiguous; one outside [0, vocab_size) ends a chain.
        seed: ``[1]`` or ``[batch_size]`` int64, contiguous: the 64 bits of the key.
        offset: ``[1]`` or ``[batch_size]`` int64, contiguous: the low 64 bits of the counter.
        tokens: ``[batch_size, n + 1]`` int32, contiguous.
        accepted: ``[batch_size]`` int32, any stride.
        emitted: ``[batch_size]`` int32, any stride; may be the memory of ``accepted``.
    """

    draft_probs: torch.Tensor
    target_probs: torch.Tensor
    draft_token_ids: torch.Tensor
    seed: torch.Tensor
    offset: torch.Tensor
    tokens: torch.Tensor
    accepted: torch.Tensor
    emitted: torch.Tensor


DeviceImage = Mapping[str, torch.Tensor]
"""Index arrays of a plan on the device, int32 unless said.

Always there: ``qo_indptr``, ``kv_indptr``, ``kv_len``; paged: ``kv_indices``, ``kv_last_page_len``;
custom mask: ``custom_mask`` (uint8, little-endian bits, each request on a byte border) and
``mask_indptr`` (byte offsets); and the arrays of ``PlanResult.image`` under their own names.
"""


@runtime_checkable
class Backend(Protocol):
    """A provider of attention kernels."""

    @property
    def api_version(self) -> int:
        """The :data:`API_VERSION` it was written for."""

    @property
    def name(self) -> str:
        """Stable lower-case name, a value of ``backend=``."""

    @property
    def rank(self) -> int:
        """Backends are tried in ascending rank under ``auto``, then by name."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """Candidates, in this backend's own order of preference."""

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Per-batch limits and preferences. They can decline this backend's paths only."""

    def unavailable(self, target: DeviceTarget) -> Reason | None:
        """Say why this process cannot use the backend on ``target`` at all, or None.

        Cheap, and free of side effects: it may be asked about a device that is not here. Raises nothing:
        what it raises is a reason not to use the backend (``core.unavailable-raised``).
        """

    def prepare(self, target: DeviceTarget, problem: AttentionProblem, path: str) -> Reason | None:
        """Build or load what the path needs. Idempotent. A Reason means: not this path.

        Called from plan(), never from run(), and for a target of this machine only.
        """

    def plan(self, query: Query, path: str, batch: HostBatch) -> PlanResult:
        """Compute a launch from sizes and host arrays. Has nothing to undo when it raises.

        Raises:
            Unsupported: Found late that it cannot serve this; under ``auto`` the next is tried.
        """

    def run(self, launch: object, image: DeviceImage, io: RunIO) -> None:
        """Enqueue on the current stream. Writes ``io.out`` and ``io.lse`` and no other tensor.

        Allocates no memory that outlives it and reads nothing back from the device.
        """


@runtime_checkable
class DirectBackend(Backend, Protocol):
    """A backend that can do the checks of a run itself, faster than the wrapper does."""

    def direct(self, launch: object, image: DeviceImage, io: RunIO, shapes: RunShapes) -> DirectRun | None:
        """Return a function for further runs of a plan, or None. Called after a plan's second run.

        The function is handed what the caller passed, unchecked: ``cache`` is a (k, v) pair or one tensor
        ``[pages, 2, ...]``, lse and workspace may be None, a scale is None for 1.0. It enqueues the run and
        returns True only for a call that :meth:`run` would be handed too; for any other it does nothing,
        raises nothing and returns False, and the wrapper's checks say what is wrong. It may return False for
        a right call as well: that takes the other way.

        Args:
            launch: As for :meth:`run`.
            image: As for :meth:`run`; the function keeps it alive.
            io: The tensors of that run; types and device are those of all.
            shapes: What further tensors must be.
        """


@runtime_checkable
class AppendBackend(Backend, Protocol):
    """A backend with a path for :attr:`Op.APPEND`."""

    def append(self, path: str, problem: AttentionProblem, io: AppendIO) -> None:
        """Write the rows into the cache: those slots change, no other byte does."""


@runtime_checkable
class SamplingBackend(Backend, Protocol):
    """A backend that takes the acceptance step of speculative decoding."""

    @property
    def sampling(self) -> tuple[SamplingPath, ...]:
        """Candidates for it, in this backend's own order of preference."""

    def prepare_sampling(self, target: DeviceTarget, path: str) -> Reason | None:
        """Build or load what the path needs. Idempotent. A Reason means: not this path, not now.

        There is no plan: it is called by the first call on a device, which may be one during graph capture.
        A path that would then have to load something says so instead.
        """

    def sample(self, path: str, io: SamplingIO) -> None:
        """Enqueue one acceptance step on the current stream: bit for bit what ``docs/sampling.md`` says.

        Random numbers are a function of seed, offset, row and position, and tokens are found in integers, so
        there is one right answer. Reads nothing back from the device; may be captured.

        Raises:
            Unsupported: Cannot serve this; nothing was written. Under ``auto`` the next is tried.
        """
