"""Random cases a path claims to serve: any value of a row where the kit's own tables take a few."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import torch

from .. import rules
from ..backend import Backend, Path
from ..capability import Dims, GraphSupport
from ..problem import AttentionProblem, MaskMode, Op, PagedKV, PosEncoding, RaggedKV
from ..reasons import Stage
from ..target import DeviceTarget
from . import axes as ax
from .batches import GRAPH_OPS, Lengths
from .cases import Case

_DECODES = (Op.DECODE, Op.VERIFY)
_TRIES = 200
_WORK = 1 << 21
"""Bound on query rows x keys x heads of a batch: the oracle goes through them one by one."""


def draw(backend: Backend, target: DeviceTarget, rng: Random, name: str) -> Case:
    """Return a random case of one of a backend's paths.

    Args:
        backend: Whose rows to draw from.
        target: A device of this machine.
        rng: Where the choices come from; equal states give equal cases.
        name: Of the batch; the case's random data depend on it.

    Raises:
        LookupError: The backend claims nothing for the device.
    """
    paths = [p for p in backend.paths if p.capability.archs is None or target.arch in p.capability.archs]
    for _ in range(_TRIES):
        if not paths:
            break
        path = rng.choice(paths)
        ops = [op for op in ax.ATTENTION if op in path.capability.ops]
        if not ops:
            continue
        case = _case(backend, path, target, rng.choice(ops), rng, name)
        if case is not None and _claimed(case):
            return case
    raise LookupError(f"backend {backend.name!r} claims no attention on {target.arch} that can be drawn")


def draw_lengths(problem: AttentionProblem, rng: Random, name: str, q_len_per_req: int = 1) -> Lengths:
    """Return a random batch for a problem: empty requests, page borders, rows that outnumber the keys."""
    op = problem.op
    single = op in ax.SINGLES
    count = 1 if single else rng.choice((0, 1, 1, 2, 3, 4, 5, 7, 12))
    kv_len = tuple(_kv_len(rng, problem.page_size or 16) for _ in range(count))
    if op is Op.DECODE_SINGLE or op is Op.DECODE:
        q_len: tuple[int, ...] = (1,) * count
    elif op is Op.VERIFY:
        q_len = (q_len_per_req,) * count
        kv_len = tuple(max(n, q_len_per_req) for n in kv_len)
    else:
        q_len = tuple(rng.choice((0, 1, 1, 2, 3, 5, 8, 16, 17, rng.randint(1, 80))) for _ in range(count))
    lengths = Lengths(name, q_len, kv_len, q_len_per_req)
    return _cut(lengths, problem.num_qo_heads)


def _cut(lengths: Lengths, heads: int) -> Lengths:
    """Drop requests from the end until the oracle can cope."""
    q_len, kv_len = lengths.q_len, lengths.kv_len
    while len(q_len) > 1 and sum(q * k for q, k in zip(q_len, kv_len, strict=True)) * heads > _WORK:
        q_len, kv_len = q_len[:-1], kv_len[:-1]
    return replace(lengths, q_len=q_len, kv_len=kv_len)


def _kv_len(rng: Random, page: int) -> int:
    near = max(0, rng.randint(1, 3) * page + rng.randint(-1, 1))
    return rng.choice((0, 1, 2, near, near, rng.randint(1, 40), rng.randint(1, 300), rng.randint(1, 1200)))


def _case(backend: Backend, path: Path, target: DeviceTarget, op: Op, rng: Random, name: str) -> Case | None:
    axes = ax.axes_of(path, op)
    if not all(axes.values()):
        return None
    row = {axis: rng.choice(values) for axis, values in axes.items()}
    row["dims"], row["heads"] = _dims(path, op, rng), _heads(path, rng)
    clash = ax.clash_of(path)
    names = list(row)
    if any(clash(a, row[a], b, row[b]) for i, a in enumerate(names) for b in names[i + 1 :]):
        return None
    problem = _problem(path, op, row, rng)
    q_len_per_req = rng.choice((2, 3, 4, 5, 8)) if op is Op.VERIFY else 1
    first = draw_lengths(problem, rng, name, q_len_per_req)
    case = Case(
        backend=backend, path=path, target=target, problem=problem, lengths=first, form=str(row["form"]),
        out=str(row["out"]), lse=str(row["lse"]), scales=str(row["scales"]), mask=str(row["mask"]),
        default_scale=row["sm_scale"] == "default",
    )  # fmt: skip
    need = GraphSupport.UNIFORM_BATCH if op in _DECODES else GraphSupport.ALWAYS
    if op in GRAPH_OPS and path.capability.graph >= need and rng.random() < 0.25:
        return _captured(case, rng, name)
    return case


def _captured(case: Case, rng: Random, name: str) -> Case | None:
    """Turn a case into a captured one: a few batches of the first one's size and capacity."""
    first = case.lengths
    count = len(first.q_len)
    if count == 0 or case.mask == "packed" or case.problem.batch_invariant:
        return None
    batches = [first]
    for n in range(rng.randint(1, 3)):
        q_len = first.q_len if case.problem.op in _DECODES else tuple(rng.randint(0, q) for q in first.q_len)
        least = first.q_len_per_req if case.problem.op is Op.VERIFY else 0
        most = first.kv_len if not case.problem.op.paged else (max(*first.kv_len, 64),) * count
        kv_len = tuple(rng.randint(min(least, m), m) for m in most)
        batches.append(Lengths(f"{name}.{n}", q_len, kv_len, first.q_len_per_req))
    bounded = case.problem.op in _DECODES and rng.random() < 0.5
    return replace(
        case, out="given", scales="none", form="plain", graph=(*batches, first), bounded=bounded,
        lse="no" if case.lse == "late" else case.lse,
    )  # fmt: skip


def _problem(path: Path, op: Op, row: dict[str, object], rng: Random) -> AttentionProblem:
    dims, heads, q, kv, o, pos = (row[n] for n in ("dims", "heads", "q", "kv", "o", "pos"))
    assert isinstance(dims, tuple)
    assert isinstance(heads, tuple)
    assert isinstance(q, torch.dtype)
    assert isinstance(kv, torch.dtype)
    cap, order = path.capability, str(row["order"])
    modes = {"causal": MaskMode.CAUSAL, "custom": MaskMode.CUSTOM, "packed": MaskMode.CUSTOM}
    rope = (rng.choice((1.0, 2.0, 0.5)), rng.choice((1e4, 5e5))) if isinstance(pos, tuple) else (1.0, 1e4)
    scale = 1.0 / math.sqrt(dims[0])
    split = str(row["split"])
    return AttentionProblem(
        op=op, num_qo_heads=heads[0], num_kv_heads=heads[1], head_dim_qk=dims[0], head_dim_vo=dims[1],
        q_dtype=q, kv_dtype=kv, o_dtype=o if isinstance(o, torch.dtype) else q,
        kv=PagedKV(_page(path, rng), order) if op.paged else RaggedKV(order),
        mask=modes.get(str(row["mask"]), MaskMode.NONE),
        pos_encoding=PosEncoding.ROPE_LLAMA if isinstance(pos, tuple) else PosEncoding(str(pos)),
        window_left=rng.choice((-1, -1, 0, 1, rng.randint(2, 200))) if cap.window else -1,
        logits_soft_cap=rng.choice((0.0, 0.0, 1.0, 30.0, 1e6, rng.uniform(0.5, 60))) if cap.soft_cap else 0.0,
        sm_scale=scale if row["sm_scale"] == "default" else rng.uniform(0.2, 1.5) * scale,
        rope_scale=rope[0], rope_theta=rope[1], needs_lse=row["lse"] == "lse",
        use_tensor_cores=bool(row["tensor_cores"]),
        fixed_split_size=rng.randint(1, 4 if op.paged else 64) if split == "fixed" else None,
        disable_split_kv=split == "never",
    )  # fmt: skip


def _dims(path: Path, op: Op, rng: Random) -> tuple[int, int]:
    dims, cap = path.capability.head_dims, path.capability
    qk = _dim(dims, rng)
    unlike = op not in _DECODES and cap.head_dim_split and rng.random() < 0.3
    return qk, _dim(dims, rng) if unlike else qk


def _dim(dims: Dims, rng: Random) -> int:
    if dims.values is not None:
        return rng.choice(sorted(dims.values))
    step = dims.multiple_of
    most = (256 if dims.at_most is None else min(dims.at_most, 256)) // step
    usual = [d for d in (64, 128) if d in dims]
    return rng.choice([*usual, step * rng.randint(1, max(1, most))])


def _heads(path: Path, rng: Random) -> tuple[int, int]:
    most = path.capability.max_group
    group = rng.choice((1, 1, 2, 3, 4, 5, 7, 8, 16))
    kv = rng.choice((1, 1, 2, 3, 4))
    return kv * (group if most is None else min(group, most)), kv


def _page(path: Path, rng: Random) -> int:
    sizes = path.capability.page_sizes
    return rng.choice((1, 2, 16, 64, rng.randint(1, 130))) if sizes is None else rng.choice(sorted(sizes))


def _claimed(case: Case) -> bool:
    query = case.query()
    if any(True for _ in case.path.capability.refusals(query.target, query.problem, None, case.candidate)):
        return False
    said = rules.apply(case.backend.rules, query, case.path.name, case.candidate)
    return not any(reason.code.stage is Stage.CAPABILITY for reason in said)
