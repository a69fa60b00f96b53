"""One case: one path, one problem, one batch, one way the tensors lie. And all that a path claims."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from .. import rules
from ..backend import Backend, Path
from ..capability import GraphSupport
from ..problem import AttentionProblem, MaskMode, Op, PagedKV, PosEncoding, RaggedKV
from ..query import GraphLimits, Query
from ..reasons import Stage
from ..target import DeviceTarget
from . import axes as ax
from .batches import GRAPH_OPS, Lengths, batches_of, replays_of
from .pairwise import Row, cover
from .tables import host_batch, table_of


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Case:
    """One run of one path.

    Attributes:
        backend: Under test.
        path: Under test.
        target: Device of the run.
        problem: What is asked.
        lengths: The batch.
        form: How q, k and v lie in memory; see ``world.py``.
        out: ``own`` (run() allocates), ``given``, or ``strided``.
        lse: ``no``, ``lse`` (planned and asked for), ``late`` (asked for, not planned).
        scales: ``none``, ``number`` or ``tensor``.
        mask: ``none``, ``causal``, ``custom`` (a bool mask) or ``packed`` (its bits).
        default_scale: sm_scale is left to the default.
        graph: Batches of a captured wrapper, the first one captured; empty for an eager case.
        bounded: The graph wrapper is told the longest sequence.
    """

    backend: Backend
    path: Path
    target: DeviceTarget
    problem: AttentionProblem
    lengths: Lengths
    form: str = "plain"
    out: str = "given"
    lse: str = "no"
    scales: str = "none"
    mask: str = "none"
    default_scale: bool = True
    graph: tuple[Lengths, ...] = ()
    bounded: bool = False

    @property
    def candidate(self) -> str:
        """``backend/path``."""
        return f"{self.backend.name}/{self.path.name}"

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.target.device

    @property
    def seed(self) -> int:
        """Of the random data; the same in every process."""
        return zlib.crc32(str(self).encode())

    @property
    def wants_lse(self) -> bool:
        """Whether run() is asked for the log-sum-exp."""
        return self.lse != "no"

    def query(self, limits: GraphLimits | None = None) -> Query:
        """Return the routing query of the case's batch."""
        table = table_of(self.lengths, self.problem.page_size)
        return Query(self.target, self.problem, host_batch(self.problem, self.lengths, table).shape, limits)

    def __str__(self) -> str:
        p = self.problem
        parts = [f"{self.candidate}-{p.op.value}", ax.dtype_name(p.q_dtype)]
        if p.kv_dtype is not p.q_dtype:
            parts.append(f"kv_{ax.dtype_name(p.kv_dtype)}")
        if p.o_dtype is not p.q_dtype:
            parts.append(f"o_{ax.dtype_name(p.o_dtype)}")
        if p.page_size is not None:
            parts.append(f"page{p.page_size}")
        parts.append(p.kv.order)
        if p.op is not Op.APPEND:
            parts += [self.mask, *_options(self)]
        dims = {p.head_dim_qk: None, p.head_dim_vo: None}
        parts += [f"h{p.num_qo_heads}x{p.num_kv_heads}", f"d{'x'.join(map(str, dims))}", self.form]
        if self.graph:
            parts.append("graph_bounded" if self.bounded else "graph")
        else:
            parts.append(self.lengths.name)
        return "-".join(parts)


def _options(case: Case) -> Iterator[str]:
    p = case.problem
    if p.window_left >= 0:
        yield f"window{p.window_left}"
    if p.logits_soft_cap:
        yield f"cap{p.logits_soft_cap:g}"
    if p.pos_encoding is not PosEncoding.NONE:
        yield p.pos_encoding.value.lower() + ("" if p.rope_scale == 1 else f"{p.rope_scale:g}")
    if p.disable_split_kv:
        yield "nosplit"
    if p.fixed_split_size:
        yield f"split{p.fixed_split_size}"
    if case.scales != "none":
        yield f"scale_{case.scales}"
    if not case.default_scale:
        yield "smscale"
    if p.op in (Op.DECODE, Op.DECODE_SINGLE):
        yield "tc" if p.use_tensor_cores else "notc"
    yield {"no": "nolse", "lse": "lse", "late": "latelse"}[case.lse]
    if case.out != "given":
        yield f"out_{case.out}"


@dataclass(slots=True)
class Cases:
    """Everything one backend claims on one device.

    Attributes:
        attention: Eager runs.
        graph: Captured wrappers and their replays.
        append: Appends.
        declined: Cases that the backend's own CAPABILITY rules refuse, by code.
    """

    attention: list[Case] = field(default_factory=list)
    graph: list[Case] = field(default_factory=list)
    append: list[Case] = field(default_factory=list)
    declined: Counter[str] = field(default_factory=Counter)

    def of(self, kind: str) -> list[Case]:
        """Return the cases for checks of one kind (a key of ``KINDS``), those it applies to."""
        return KINDS[kind](self)

    def __iter__(self) -> Iterator[Case]:
        yield from self.attention
        yield from self.graph
        yield from self.append


def _plain_logits(case: Case) -> bool:
    p = case.problem
    return not p.logits_soft_cap and p.pos_encoding is PosEncoding.NONE and p.q_dtype.itemsize > 1


KINDS: dict[str, Callable[[Cases], list[Case]]] = {
    "case": lambda found: found.attention,
    "device_pages_case": lambda found: [
        c for c in found.attention if c.problem.op.paged and not c.path.host_indices
    ],
    "plain_logits_case": lambda found: [c for c in found.attention if _plain_logits(c)],
    "invariant_case": lambda found: [c for c in found.attention if c.problem.batch_invariant],
    "graph_case": lambda found: found.graph,
    "append_case": lambda found: found.append,
}
"""Which cases a kind of check applies to."""


_kept: dict[tuple[int, DeviceTarget], tuple[Backend, Cases]] = {}


def cases_of(backend: Backend, target: DeviceTarget) -> Cases:
    """Return the cases that the capability rows of a backend claim on a device; made once."""
    key = (id(backend), target)
    if key not in _kept:
        _kept[key] = (backend, _cases(backend, target))  # held, so that the id stays its own
    return _kept[key][1]


def _cases(backend: Backend, target: DeviceTarget) -> Cases:
    found = Cases()
    for path in backend.paths:
        archs = path.capability.archs
        if archs is not None and target.arch not in archs:
            continue
        if path.capability.latent:
            continue  # has a wrapper, and so a check, of its own
        for op in sorted(path.capability.ops):
            if op is Op.APPEND:
                _keep(found, found.append, (_append(backend, path, target, r) for r in _append_rows(path)))
                continue
            made = [_attention(backend, path, target, op, row) for row in rows_of(path, op)]
            _keep(found, found.attention, iter(made))
            if _captures(path, op):
                _keep(found, found.graph, _graph(backend, path, target, op))
    return found


def rows_of(path: Path, op: Op) -> list[Row]:
    """Return the combinations for one entry point; none where the row contradicts itself."""
    axes = ax.axes_of(path, op)
    return cover(axes, ax.clash_of(path)) if all(axes.values()) else []


def _keep(found: Cases, into: list[Case], made: Iterator[Case]) -> None:
    for case in made:
        query = case.query()
        said = rules.apply(case.backend.rules, query, case.path.name, case.candidate)
        wrong = [reason for reason in said if reason.code.stage is Stage.CAPABILITY]
        if wrong:
            found.declined[wrong[0].code.slug] += 1
            continue
        refused = list(case.path.capability.refusals(query.target, query.problem, None, case.candidate))
        assert not refused, f"the kit made a case that is not claimed: {refused[0]}"
        into.append(case)


def _captures(path: Path, op: Op) -> bool:
    need = GraphSupport.UNIFORM_BATCH if op in (Op.DECODE, Op.VERIFY) else GraphSupport.ALWAYS
    return op in GRAPH_OPS and path.capability.graph >= need


def _attention(backend: Backend, path: Path, target: DeviceTarget, op: Op, row: Row) -> Case:
    problem = _problem(op, row)
    batch = batches_of(op, problem.page_size)[str(row["batch"])]
    return Case(
        backend=backend, path=path, target=target, problem=problem, lengths=batch, form=str(row["form"]),
        out=str(row["out"]), lse=str(row["lse"]), scales=str(row["scales"]), mask=str(row["mask"]),
        default_scale=row["sm_scale"] == "default",
    )  # fmt: skip


def _problem(op: Op, row: Row) -> AttentionProblem:
    dims, heads, pos, q = row["dims"], row["heads"], row["pos"], row["q"]
    assert isinstance(dims, tuple)
    assert isinstance(heads, tuple)
    assert isinstance(q, torch.dtype)
    kv, o, order = row["kv"], row["o"], str(row["order"])
    assert isinstance(kv, torch.dtype)
    rope = pos if isinstance(pos, tuple) else (1.0, 1e4)
    scale = 1.0 / math.sqrt(dims[0])
    modes = {"causal": MaskMode.CAUSAL, "custom": MaskMode.CUSTOM, "packed": MaskMode.CUSTOM}
    return AttentionProblem(
        op=op, num_qo_heads=heads[0], num_kv_heads=heads[1], head_dim_qk=dims[0], head_dim_vo=dims[1],
        q_dtype=q, kv_dtype=kv, o_dtype=o if isinstance(o, torch.dtype) else q,
        kv=PagedKV(int(str(row["page"])), order) if op.paged else RaggedKV(order),
        mask=modes.get(str(row["mask"]), MaskMode.NONE),
        pos_encoding=PosEncoding.ROPE_LLAMA if isinstance(pos, tuple) else PosEncoding(str(pos)),
        window_left=int(str(row["window"])), logits_soft_cap=float(str(row["soft_cap"])),
        sm_scale=scale if row["sm_scale"] == "default" else 0.7 * scale,
        rope_scale=rope[0], rope_theta=rope[1], needs_lse=row["lse"] == "lse",
        use_tensor_cores=bool(row["tensor_cores"]),
        fixed_split_size=(2 if op.paged else 16) if row["split"] == "fixed" else None,
        disable_split_kv=row["split"] == "never",
    )  # fmt: skip


_GRAPH_AXES = ("dims", "q", "kv", "o", "heads", "order", "mask", "window", "soft_cap", "pos", "page")
_GRAPH_CASES = 24


def _graph(backend: Backend, path: Path, target: DeviceTarget, op: Op) -> Iterator[Case]:
    """Fewer values per axis: what a capture may break is the plan, not the arithmetic."""
    full = ax.axes_of(path, op)
    axes = {name: _thin(full[name], 3) for name in _GRAPH_AXES if name in full}
    axes["lse"] = [kind for kind in full["lse"] if kind != "late"]
    axes["mask"] = [kind for kind in full["mask"] if kind != "packed"]
    axes["bounded"] = [False, True] if op in (Op.DECODE, Op.VERIFY) else [False]
    fixed: Row = {"batch": "", "scales": "none", "split": "auto", "sm_scale": "default", "out": "given"}
    fixed |= {"form": "plain", "tensor_cores": True in full["tensor_cores"]}
    if not all(axes.values()):
        return
    batches = replays_of(op)
    for row in cover(axes, ax.clash_of(path))[:_GRAPH_CASES]:
        yield Case(
            backend=backend, path=path, target=target, problem=_problem(op, {**fixed, **row}),
            lengths=batches[0], lse=str(row["lse"]), mask=str(row["mask"]), graph=batches,
            bounded=bool(row["bounded"]),
        )  # fmt: skip


def _thin(values: list[object], most: int) -> list[object]:
    """Keep the first, the last and some between."""
    if len(values) <= most:
        return values
    step = (len(values) - 1) / (most - 1)
    return [values[round(n * step)] for n in range(most)]


def _append_rows(path: Path) -> list[Row]:
    cap = path.capability
    axes: dict[str, list[object]] = {
        "page": ax.page_sizes_of(cap),
        "kv": sorted(cap.kv_dtypes, key=str),
        "form": [form for form in ax.forms_of(path, Op.APPEND) if form != "spread"],
        "dims": ax.dims_of(cap, split=True),
        "order": [*sorted(cap.kv_orders, reverse=True)],
        "heads": [1, 2, 3],
        "rows": ["none", "one", "step", "prefill", "skips", "all_skipped"],
    }
    return cover(axes, ax.clash_of(path)) if all(axes.values()) else []


_APPENDS = {
    # Rows appended to each request, and its tokens afterwards. Which rows are skipped is in append.py.
    "none": ((0, 0), (3, 5)),
    "one": ((1,), (33,)),
    "step": ((1, 1, 1), (1, 16, 40)),
    "prefill": ((5, 0, 40, 2), (5, 9, 77, 17)),
    "skips": ((3, 1, 6), (9, 1, 64)),
    "all_skipped": ((2, 1), (5, 7)),
}


def _append(backend: Backend, path: Path, target: DeviceTarget, row: Row) -> Case:
    dims, kv, heads = row["dims"], row["kv"], int(str(row["heads"]))
    assert isinstance(dims, tuple)
    assert isinstance(kv, torch.dtype)
    problem = AttentionProblem(
        op=Op.APPEND, num_qo_heads=heads, num_kv_heads=heads, head_dim_qk=dims[0], head_dim_vo=dims[1],
        q_dtype=kv, kv_dtype=kv, o_dtype=kv, kv=PagedKV(int(str(row["page"])), str(row["order"])),
    )  # fmt: skip
    name = str(row["rows"])
    return Case(
        backend=backend, path=path, target=target, problem=problem, lengths=Lengths(name, *_APPENDS[name]),
        form=str(row["form"]),
    )  # fmt: skip
