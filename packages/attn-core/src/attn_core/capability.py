"""What a path can compute, as one table. The selector and every entry point read the same row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

import torch

from .problem import UNIFORM_OPS, AttentionProblem, MaskMode, Op, PagedKV, PosEncoding
from .query import GraphLimits
from .reasons import Code, Reason, Stage
from .target import DeviceTarget

_C = Stage.CAPABILITY
ARCH = Code(
    "core.arch",
    Stage.AVAILABILITY,
    "needs a device of {limit}",
    quiet=True,
    meaning="The path has no kernel for this device.",
)
OP = Code("core.op", _C, "serves {limit}", quiet=True, meaning="The path is for other entry points.")
LATENT = Code(
    "core.latent",
    _C,
    "serves {limit}",
    quiet=True,
    meaning="Values inside the keys are another kernel's business.",
)
Q_DTYPE = Code("core.q-dtype", _C, "takes q of {limit}", meaning="The query type has no kernel.")
KV_DTYPE = Code("core.kv-dtype", _C, "takes k/v of {limit}", meaning="The cache type has no kernel.")
SAME_DTYPE = Code(
    "core.same-dtype", _C, "needs k/v of q's type {limit}", meaning="Mixed types have no kernel."
)
O_DTYPE = Code("core.o-dtype", _C, "writes out of {limit}", meaning="The output type has no kernel.")
HEAD_DIM = Code("core.head-dim", _C, "takes head_dim {limit}", meaning="The head size has no kernel.")
HEAD_DIM_SPLIT = Code(
    "core.head-dim-split",
    _C,
    "needs head_dim_qk == head_dim_vo",
    meaning="Keys and values of unlike head size have no kernel.",
)
GROUP = Code(
    "core.gqa-group",
    _C,
    "takes gqa_group_size up to {limit}",
    meaning="Too many query heads share a key/value head.",
)
KV_ORDER = Code("core.kv-order", _C, "takes kv_layout {limit}", meaning="The layout has no kernel.")
PAGE_SIZE = Code("core.page-size", _C, "pages at {limit}", meaning="The page size has no kernel.")
MASK = Code("core.mask", _C, "takes mask {limit}", meaning="The mask mode has no kernel.")
POS_ENCODING = Code(
    "core.pos-encoding",
    _C,
    "takes pos_encoding_mode {limit}",
    meaning="The position encoding is not applied by this kernel.",
)
WINDOW = Code("core.window", _C, "has no sliding window", meaning="window_left is not supported.")
SOFT_CAP = Code("core.soft-cap", _C, "has no logits soft cap", meaning="logits_soft_cap is not supported.")
LSE = Code("core.lse", _C, "does not return the log-sum-exp", meaning="Planned with needs_lse=True.")
TENSOR_CORES = Code(
    "core.tensor-cores",
    _C,
    "serves use_tensor_cores=False only",
    quiet=True,
    meaning="Decode was asked for on the matrix path: leaving this one out is what was asked for.",
)
BATCH_INVARIANT = Code(
    "core.batch-invariant",
    _C,
    "does not honour fixed_split_size or disable_split_kv",
    meaning="The path's bits depend on the rest of the batch.",
)
GRAPH = Code("core.graph", _C, "captures {limit}", meaning="The path cannot be replayed with other lengths.")


class GraphSupport(IntEnum):
    """Which captured batches a path may serve; a higher level includes the lower ones."""

    NEVER = 0
    UNIFORM_BATCH = 1
    """Every request has the same number of query rows."""
    ALWAYS = 2


@dataclass(frozen=True, slots=True)
class Dims:
    """Head sizes a path takes: listed values, or a range with a step.

    Attributes:
        values: The exact sizes, or None for the range.
        multiple_of: Step of the range.
        at_most: Largest size of the range, or None.
    """

    values: frozenset[int] | None = None
    multiple_of: int = 1
    at_most: int | None = None

    def __contains__(self, dim: object) -> bool:
        if not isinstance(dim, int):
            return False
        if self.values is not None:
            return dim in self.values
        return dim % self.multiple_of == 0 and (self.at_most is None or dim <= self.at_most)

    def __str__(self) -> str:
        if self.values is not None:
            return str(sorted(self.values))
        step = "any" if self.multiple_of == 1 else f"multiple of {self.multiple_of}"
        return step if self.at_most is None else f"{step} up to {self.at_most}"


FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})
FP8 = frozenset({torch.float8_e4m3fn, torch.float8_e4m3fnuz})
E5M2 = frozenset({torch.float8_e5m2, torch.float8_e5m2fnuz})


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """One row per path. None in a set-valued field means 'no restriction'.

    Attributes:
        archs: Devices, by ``DeviceTarget.arch``.
        ops: Entry points.
        q_dtypes: Query types.
        kv_dtypes: Cache types.
        same_dtype: Cache type must equal query type.
        o_dtypes: Output types; None means the query's own only.
        head_dims: Sizes of ``head_dim_qk`` and ``head_dim_vo``.
        head_dim_split: Whether the two may differ.
        max_group: Largest ``gqa_group_size``.
        kv_orders: Layouts.
        page_sizes: Page sizes.
        masks: Mask modes.
        pos_encodings: Position encodings.
        window: Sliding window.
        soft_cap: Logits soft cap.
        lse: Returns the log-sum-exp.
        tensor_cores: Serves decode planned with ``use_tensor_cores=True``.
        batch_invariant: Honours ``fixed_split_size`` and ``disable_split_kv``.
        graph: Capture support.
        latent: Serves problems with ``latent``, or those without; None for both.
    """

    archs: frozenset[str] | None
    ops: frozenset[Op]
    q_dtypes: frozenset[torch.dtype] = FLOATS
    kv_dtypes: frozenset[torch.dtype] = FLOATS
    same_dtype: bool = False
    o_dtypes: frozenset[torch.dtype] | None = None
    head_dims: Dims = Dims()
    head_dim_split: bool = True
    max_group: int | None = None
    kv_orders: frozenset[str] = frozenset({"NHD", "HND"})
    page_sizes: frozenset[int] | None = None
    masks: frozenset[MaskMode] = frozenset({MaskMode.NONE, MaskMode.CAUSAL})
    pos_encodings: frozenset[PosEncoding] = frozenset({PosEncoding.NONE})
    window: bool = False
    soft_cap: bool = False
    lse: bool = True
    tensor_cores: bool = True
    batch_invariant: bool = False
    graph: GraphSupport = GraphSupport.NEVER
    latent: bool | None = None

    def refusals(
        self, target: DeviceTarget, problem: AttentionProblem, graph: GraphLimits | None, candidate: str
    ) -> Iterator[Reason]:
        """Yield every field that does not fit, not only the first."""
        if self.archs is not None and target.arch not in self.archs:
            yield Reason(ARCH, candidate, ", ".join(sorted(self.archs)), target.arch)
        if problem.op not in self.ops:
            yield Reason(OP, candidate, ", ".join(sorted(op.value for op in self.ops)), problem.op.value)
            return  # the other fields describe those entry points
        if self.latent is not None and self.latent is not problem.latent:
            kinds = ("keys beside values", "latent attention")
            yield Reason(LATENT, candidate, kinds[self.latent], kinds[problem.latent])
            return
        for code, refuses in _CACHE_CHECKS if problem.op is Op.APPEND else _CHECKS:
            found = refuses(self, problem)
            if found is not None:
                yield Reason(code, candidate, *found)
        if graph is not None:
            need = GraphSupport.UNIFORM_BATCH if problem.op in UNIFORM_OPS else GraphSupport.ALWAYS
            if self.graph < need:
                yield Reason(GRAPH, candidate, self.graph.name.lower().replace("_", " "), need.name.lower())


_Found = tuple[object, object] | None


def _names(values: frozenset[torch.dtype]) -> str:
    return ", ".join(sorted(str(v).removeprefix("torch.") for v in values))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _o_dtype(c: Capability, p: AttentionProblem) -> _Found:
    ok = p.o_dtype == p.q_dtype if c.o_dtypes is None else p.o_dtype in c.o_dtypes
    return None if ok else (_name(p.q_dtype) if c.o_dtypes is None else _names(c.o_dtypes), _name(p.o_dtype))


def _head_dim(c: Capability, p: AttentionProblem) -> _Found:
    bad = [d for d in (p.head_dim_qk, p.head_dim_vo) if d not in c.head_dims]
    return (str(c.head_dims), bad[0]) if bad else None


def _split(c: Capability, p: AttentionProblem) -> _Found:
    same = c.head_dim_split or p.head_dim_qk == p.head_dim_vo
    return None if same else (None, f"{p.head_dim_qk} and {p.head_dim_vo}")


def _group(c: Capability, p: AttentionProblem) -> _Found:
    ok = c.max_group is None or p.gqa_group_size <= c.max_group
    return None if ok else (c.max_group, p.gqa_group_size)


def _kv_order(c: Capability, p: AttentionProblem) -> _Found:
    return None if p.kv.order in c.kv_orders else (", ".join(sorted(c.kv_orders)), p.kv.order)


def _page_size(c: Capability, p: AttentionProblem) -> _Found:
    if c.page_sizes is None or not isinstance(p.kv, PagedKV) or p.kv.page_size in c.page_sizes:
        return None
    return ", ".join(map(str, sorted(c.page_sizes))), p.kv.page_size


def _same_dtype(c: Capability, p: AttentionProblem) -> _Found:
    return (_name(p.q_dtype), _name(p.kv_dtype)) if c.same_dtype and p.q_dtype != p.kv_dtype else None


_CHECKS: tuple[tuple[Code, Callable[[Capability, AttentionProblem], _Found]], ...] = (
    (Q_DTYPE, lambda c, p: None if p.q_dtype in c.q_dtypes else (_names(c.q_dtypes), _name(p.q_dtype))),
    (KV_DTYPE, lambda c, p: None if p.kv_dtype in c.kv_dtypes else (_names(c.kv_dtypes), _name(p.kv_dtype))),
    (SAME_DTYPE, _same_dtype),
    (O_DTYPE, _o_dtype),
    (HEAD_DIM, _head_dim),
    (HEAD_DIM_SPLIT, _split),
    (GROUP, _group),
    (KV_ORDER, _kv_order),
    (PAGE_SIZE, _page_size),
    (
        MASK,
        lambda c, p: (
            None if p.mask in c.masks else (", ".join(sorted(m.value for m in c.masks)), p.mask.value)
        ),
    ),
    (
        POS_ENCODING,
        lambda c, p: (
            None
            if p.pos_encoding in c.pos_encodings
            else (", ".join(sorted(e.value for e in c.pos_encodings)), p.pos_encoding.value)
        ),
    ),
    (WINDOW, lambda c, p: None if c.window or p.window_left < 0 else (None, p.window_left)),
    (SOFT_CAP, lambda c, p: None if c.soft_cap or not p.logits_soft_cap else (None, p.logits_soft_cap)),
    (LSE, lambda c, p: None if c.lse or not p.needs_lse else (None, None)),
    (BATCH_INVARIANT, lambda c, p: None if c.batch_invariant or not p.batch_invariant else (None, None)),
    (TENSOR_CORES, lambda c, p: None if c.tensor_cores or not p.use_tensor_cores else (None, True)),
)

# An append moves bytes: it has a cache, and neither a query nor an output.
_OF_THE_CACHE = (KV_DTYPE, HEAD_DIM, HEAD_DIM_SPLIT, KV_ORDER, PAGE_SIZE)
_CACHE_CHECKS = tuple(check for check in _CHECKS if check[0] in _OF_THE_CACHE)

CODES = (ARCH, OP, LATENT, *(code for code, _ in _CHECKS), GRAPH)
