"""Random sessions with wrappers that are made of others: POD, block-sparse attention, pools of plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

import torch

from ..backend import Backend, Path
from ..capability import FLOATS, GraphSupport
from ..pod import BatchPODWithPagedKVCacheWrapper, PODWithPagedKVCacheWrapper
from ..pool import DecodePlanPool
from ..problem import AttentionProblem, MaskMode, Op, PagedKV
from ..sparse import BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper
from ..target import DeviceTarget
from .axes import dims_of, page_sizes_of
from .fuzz_calls import Call
from .fuzz_wrappers import Planned, near
from .memory import workspace_of
from .oracle import Request, Scales, attention
from .tables import offsets

_WORKSPACE = 16 << 20
_GARBAGE = 0xFF
_TABLE = ("indptr", "indices", "last_page_len")
_PLAN_VALUES: dict[str, tuple[object, ...]] = {
    "num_qo_heads": (0, -1, 2.0, None, True), "num_kv_heads": (0, 3.0, "x"), "head_dim": (0, -8, 1.5, None),
    "q_data_type": ("int99", 3), "kv_data_type": ("int99", torch.int8), "pos_encoding_mode": ("ROPE", 3),
    "sm_scale": ("x", float("nan"), True),
}  # fmt: skip
_PAGED_VALUES = {**_PLAN_VALUES, "page_size": (0, -1, 1.5), "window_left": ("x", 2.0)}
_SCALES: dict[str, tuple[object, ...]] = {
    "q_scale": ("x", torch.ones(2)), "k_scale": (True, [], float("nan")), "v_scale": ("x", 1j),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """What a session is about, apart from lengths."""

    path: Path
    device: torch.device
    make: torch.Generator
    dtype: torch.dtype
    dim: int
    kv_heads: int
    group: int
    page: int

    def random(self, *shape: int, by: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=self.make) * by).to(self.dtype)

    def q(self, rows: int) -> torch.Tensor:
        return self.random(rows, self.kv_heads * self.group, self.dim, by=2.0)

    def problem(self, op: Op, mask: MaskMode, *, one_head: bool = False) -> AttentionProblem:
        heads = 1 if one_head else self.kv_heads
        return AttentionProblem(
            op=op, num_qo_heads=heads * self.group, num_kv_heads=heads, head_dim_qk=self.dim,
            head_dim_vo=self.dim, q_dtype=self.dtype, kv_dtype=self.dtype, o_dtype=self.dtype,
            kv=PagedKV(self.page), mask=mask, sm_scale=self.dim**-0.5,
        )  # fmt: skip

    @property
    def sizes(self) -> dict[str, int]:
        return {
            "num_qo_heads": self.kv_heads * self.group, "num_kv_heads": self.kv_heads, "head_dim": self.dim
        }  # fmt: skip

    def workspace(self) -> torch.Tensor:
        return workspace_of(_WORKSPACE, _GARBAGE, self.device)[0]

    def close(self, what: str, out: torch.Tensor, want: torch.Tensor) -> None:
        near(out, want, self.path, self.dtype, what)


def _facts(
    backend: Backend,
    target: DeviceTarget,
    rng: Random,
    ops: set[Op],
    *masks: MaskMode,
    page: int | None = None,
) -> _Facts:
    found = [
        p
        for p in backend.paths
        if (p.capability.archs is None or target.arch in p.capability.archs)
        and ops <= set(p.capability.ops)
        and set(masks) <= set(p.capability.masks)
        and p.capability.latent in (None, False)
        and "NHD" in p.capability.kv_orders
        and (page is None or p.capability.page_sizes is None or page in p.capability.page_sizes)
        and p.capability.q_dtypes & p.capability.kv_dtypes & FLOATS
    ]
    if not found:
        raise LookupError("no path of the kind")
    path = rng.choice(found)
    cap = path.capability
    dims = [pair[0] if isinstance(pair, tuple) else int(str(pair)) for pair in dims_of(cap, split=False)]
    return _Facts(
        path=path, device=target.device, make=torch.Generator().manual_seed(rng.getrandbits(40)),
        dtype=rng.choice(sorted(cap.q_dtypes & cap.kv_dtypes & FLOATS, key=str)),
        dim=min(dims, key=lambda size: abs(size - 64)), kv_heads=rng.choice((1, 2, 3)),
        group=rng.choice((1, 4) if cap.max_group is None or cap.max_group >= 4 else (1,)),
        page=int(str(rng.choice(page_sizes_of(cap)))) if page is None else page,
    )  # fmt: skip


class _Paged:
    """Requests in pages of a cache of their own."""

    def __init__(self, facts: _Facts, kv_len: list[int]) -> None:
        counts = [-(-n // facts.page) for n in kv_len]
        ids = torch.randperm(sum(counts) + 1, generator=facts.make)[: sum(counts)].int()
        self.k, self.v = (
            facts.random(sum(counts) + 1, facts.page, facts.kv_heads, facts.dim) for _ in range(2)
        )
        last = [(n - 1) % facts.page + 1 if n else 1 for n in kv_len]
        self.indptr, self.indices = offsets(tuple(counts)), ids
        self.last = torch.tensor(last, dtype=torch.int32)
        self.kv_len, self.ends = kv_len, self.indptr.tolist()
        self.cache = (self.k.to(facts.device), self.v.to(facts.device))

    def table(self, *names: str) -> dict[str, Any]:
        return dict(zip(names, (self.indptr, self.indices, self.last), strict=True))

    def requests(self, q: torch.Tensor, q_len: list[int]) -> Iterator[Request]:
        row = 0
        for n, (rows, length) in enumerate(zip(q_len, self.kv_len, strict=True)):
            pages = self.indices[self.ends[n] : self.ends[n + 1]].long()
            k, v = (t[pages].flatten(0, 1)[:length] for t in (self.k, self.v))
            yield Request(q[row : row + rows], k, v)
            row += rows

    def wrong(self) -> tuple[object, ...]:
        k, v = self.cache
        empty = ((k[:0], v[:0]),) if self.indices.numel() else ()
        return (None, k, (k,), (k, v[..., :0]), *empty, (k.to(torch.int8), v), "x")


def _nothing(_: object) -> None:
    """A plan returns nothing to look at."""


def pod(backend: Backend, target: DeviceTarget, rng: Random) -> Planned:
    """Return a session of one request that prefills and a batch that decodes."""
    f = _facts(backend, target, rng, {Op.DECODE, Op.PREFILL_SINGLE}, MaskMode.NONE, MaskMode.CAUSAL)
    batch = _Paged(f, [rng.randint(0, 70) for _ in range(rng.randint(0, 4))])
    rows, keys = rng.randint(1, 40), rng.randint(1, 90)
    causal = rng.random() < 0.5
    q_p, q_d = f.q(rows), f.q(len(batch.kv_len))
    k_p, v_p = (f.random(keys, f.kv_heads, f.dim) for _ in range(2))
    mask = MaskMode.CAUSAL if causal else MaskMode.NONE
    want_p = attention(f.problem(Op.PREFILL_SINGLE, mask), [Request(q_p, k_p, v_p)], Scales())[0]
    requests = list(batch.requests(q_d, [1] * len(batch.kv_len)))
    want_d = attention(f.problem(Op.DECODE, MaskMode.NONE), requests, Scales())[0]
    wrapper = PODWithPagedKVCacheWrapper(f.workspace(), backend=backend.name)

    def check(found: tuple[torch.Tensor, torch.Tensor]) -> None:
        f.close("pod, prefill", found[0], want_p)
        f.close("pod, decode", found[1], want_d)

    plan = Call(
        name="pod plan", function=wrapper.plan, check=_nothing,
        right={
            **batch.table(*_TABLE), **f.sizes, "page_size": f.page,
            "q_data_type": f.dtype, "kv_data_type": f.dtype,
        },
        fits=frozenset({"indices:one row more"}), values=_PAGED_VALUES,
    )  # fmt: skip
    tensors = {name: t.to(f.device) for name, t in (("q_p", q_p), ("k_p", k_p), ("v_p", v_p), ("q_d", q_d))}
    run = Call(
        name="pod run", function=wrapper.run, check=check,
        right={**tensors, "paged_kv_cache_d": batch.cache, "causal_p": causal},
        fits=frozenset({"q_p:one row more", "q_p:one row less"}),
        values={
            "paged_kv_cache_d": batch.wrong(), "causal_p": ("x", 2), "custom_mask_p": (tensors["q_p"],),
            "packed_custom_mask_p": (torch.zeros(0, dtype=torch.uint8),), "kv_layout_p": ("NDH", None),
            "window_left_p": ("x", 1.5), "window_left_d": (3,), "kv_layout_d": ("HND",), "sm_scale_d": (9.0,),
            "pos_encoding_mode_d": ("ALIBI", "x"), "custom_mask_d": (tensors["q_d"],), **_SCALES,
        },
    )  # fmt: skip
    return Planned(plan=plan, run=run, states=lambda: (wrapper._decode._state,))


def batch_pod(backend: Backend, target: DeviceTarget, rng: Random) -> Planned:
    """Return a session of a batch that prefills and a batch that decodes."""
    f = _facts(backend, target, rng, {Op.PREFILL_PAGED}, MaskMode.NONE, MaskMode.CAUSAL)
    batches, q_lens = [], []
    for most in (20, 2):
        q_lens.append([rng.randint(0, most) for _ in range(rng.randint(0, 3))])
        batches.append(_Paged(f, [rng.randint(0, 60) for _ in q_lens[-1]]))
    q = [f.q(sum(q_len)) for q_len in q_lens]
    masks = (MaskMode.CAUSAL if rng.random() < 0.5 else MaskMode.NONE, MaskMode.NONE)
    want = [
        attention(f.problem(Op.PREFILL_PAGED, mask), list(batch.requests(rows, q_len)), Scales())[0]
        for mask, batch, rows, q_len in zip(masks, batches, q, q_lens, strict=True)
    ]
    wrapper = BatchPODWithPagedKVCacheWrapper(f.workspace(), backend=f"{backend.name}/{f.path.name}")

    def check(found: tuple[torch.Tensor, torch.Tensor]) -> None:
        for part, out, right in zip(("prefill", "decode"), found, want, strict=True):
            f.close(f"batch pod, {part}", out, right)

    tables: dict[str, Any] = {}
    for end, batch, q_len in zip("pd", batches, q_lens, strict=True):
        tables[f"qo_indptr_{end}"] = offsets(tuple(q_len))
        tables |= batch.table(*(f"{name}_{end}" for name in ("kv_indptr", "kv_indices", "last_page_len")))
    plan = Call(
        name="batch pod plan", function=wrapper.plan, check=_nothing,
        right={**tables, **f.sizes, "page_size": f.page, "q_data_type": f.dtype, "kv_data_type": f.dtype},
        fits=frozenset(f"kv_indices_{end}:one row more" for end in "pd"), values=_PAGED_VALUES,
    )  # fmt: skip
    run = Call(
        name="batch pod run", function=wrapper.run, check=check,
        right={
            "q_p": q[0].to(f.device), "paged_kv_cache_p": batches[0].cache, "q_d": q[1].to(f.device),
            "paged_kv_cache_d": batches[1].cache, "causal_p": masks[0] is MaskMode.CAUSAL,
        },
        values={
            "paged_kv_cache_p": batches[0].wrong(), "paged_kv_cache_d": batches[1].wrong(),
            "causal_p": ("x", 2), "return_lse": ("x", 2), "custom_mask_p": (q[0],), **_SCALES,
        },
    )  # fmt: skip
    return Planned(plan=plan, run=run, states=lambda: (wrapper._prefill._state, wrapper._decode._state))


def block_sparse(backend: Backend, target: DeviceTarget, rng: Random) -> Planned:
    """Return a session of blocks that all heads share, with a mask inside of them or without."""
    f = _facts(backend, target, rng, {Op.PREFILL_PAGED}, MaskMode.NONE, MaskMode.CUSTOM)
    height, width, down, across = rng.randint(1, 9), f.page, rng.randint(1, 4), rng.randint(1, 4)
    rows, keys = down * height - rng.randint(0, height - 1), across * width
    kept = torch.rand(down, across, generator=f.make) < 0.6
    indptr, indices = offsets(tuple(kept.sum(1).tolist())), kept.nonzero()[:, 1].int()
    inside = torch.rand(indices.numel(), height, width, generator=f.make) < 0.7
    masked = rng.random() < 0.5
    seen = torch.zeros(down * height, keys, dtype=torch.bool)
    for n, (i, j) in enumerate(kept.nonzero().tolist()):
        block = seen[i * height : (i + 1) * height, j * width : (j + 1) * width]
        block.copy_(inside[n] if masked else torch.ones_like(block))
    q, (k, v) = f.q(rows), (f.random(keys, f.kv_heads, f.dim) for _ in range(2))
    request = Request(q, k, v, seen[:rows])
    want = attention(f.problem(Op.PREFILL_PAGED, MaskMode.CUSTOM), [request], Scales())[0]
    wrapper = BlockSparseAttentionWrapper(f.workspace(), backend=f"{backend.name}/{f.path.name}")
    plan = Call(
        name="block sparse plan", function=wrapper.plan, check=_nothing,
        right={
            "indptr": indptr, "indices": indices, "M": rows, "N": keys, "R": height, "C": width, **f.sizes,
            "q_data_type": f.dtype, "o_data_type": f.dtype, **({"mask": inside} if masked else {}),
        },
        fits=frozenset({"mask:nothing", "indices:one row more"}),
        values={
            **_PLAN_VALUES, "M": (-1, 1.5, rows + height, None), "R": (0, 1.5), "C": (0, None),
            "N": (-1, "x", keys + 1 if width > 1 else 1.5),
            "indices": (indices + across, indices - across - 1) if indices.numel() else (None,),
            "causal": ("x", 2), "block_mask": (kept,), "logits_soft_cap": (-1.0, "x"),
        },
    )  # fmt: skip
    run = Call(
        name="block sparse run",
        function=wrapper.run,
        check=lambda out: f.close("block sparse", out, want),
        right={name: t.to(f.device) for name, t in (("q", q), ("k", k), ("v", v))},
        values={"scale_q": (q,), "out": (q[..., :0], [], 3), "lse": (q, "x"), "return_lse": ("x", 2)},
    )
    return Planned(plan=plan, run=run, states=lambda: (wrapper._paged._state,))


def variable_sparse(backend: Backend, target: DeviceTarget, rng: Random) -> Planned:
    """Return a session of blocks of any size, others for every key/value head."""
    f = _facts(backend, target, rng, {Op.PREFILL_PAGED}, MaskMode.NONE, page=1)
    down, across, heads = rng.randint(1, 4), rng.randint(1, 5), f.kv_heads
    rows, keys = rng.randint(1, 30), rng.randint(1, 60)
    cuts = [_cuts(total, parts, heads, rng) for total, parts in ((rows, down), (keys, across))]
    kept = torch.rand(heads, down, across, generator=f.make) < 0.6
    q = f.random(heads * f.group, rows, f.dim, by=2.0)
    k, v = (f.random(heads, keys, f.dim) for _ in range(2))
    problem, outs = f.problem(Op.PREFILL_PAGED, MaskMode.CUSTOM, one_head=True), []
    for head in range(heads):
        seen = kept[head].repeat_interleave(cuts[0][head], 0).repeat_interleave(cuts[1][head], 1)
        mine = q[head * f.group : (head + 1) * f.group].transpose(0, 1)
        request = Request(mine, k[head, :, None], v[head, :, None], seen)
        outs.append(attention(problem, [request], Scales())[0].transpose(0, 1))
    want = torch.cat(outs)
    wrapper = VariableBlockSparseAttentionWrapper(f.workspace(), backend=f"{backend.name}/{f.path.name}")
    huge = torch.full_like(cuts[1], 2**31, dtype=torch.int64)  # one is beyond what an int32 counts
    plan = Call(
        name="variable sparse plan", function=wrapper.plan, check=_nothing,
        right={
            "block_mask_map": kept, "block_row_sz": cuts[0], "block_col_sz": cuts[1], **f.sizes,
            "q_data_type": f.dtype,
        },
        fits=frozenset({"block_mask_map:complex"}),
        values={
            **_PLAN_VALUES, "block_row_sz": (-cuts[0] - 1, cuts[0].float()),
            "block_col_sz": (huge, -cuts[1] - 1),
            "causal": ("x", 2), "logits_soft_cap": (-1.0, "x"),
        },
    )  # fmt: skip
    run = Call(
        name="variable sparse run",
        function=wrapper.run,
        check=lambda out: f.close("variable sparse", out, want),
        right={name: t.to(f.device) for name, t in (("q", q), ("k", k), ("v", v))},
        values={"out": (q[..., :0], [], 3), "lse": (q, "x"), "return_lse": ("x", 2)},
    )
    return Planned(plan=plan, run=run, states=lambda: (wrapper._paged._state,))


def _cuts(total: int, parts: int, heads: int, rng: Random) -> torch.Tensor:
    """Return ``[heads, parts]`` sizes, some of them 0, of one sum."""
    rows = []
    for _ in range(heads):
        ends = [0, *sorted(rng.randint(0, total) for _ in range(parts - 1)), total]
        rows.append([b - a for a, b in pairwise(ends)])
    return torch.tensor(rows, dtype=torch.int32)


@dataclass(frozen=True, slots=True)
class _Member:
    table: dict[str, Any]
    q: torch.Tensor
    batch: _Paged
    want: torch.Tensor


def pool(backend: Backend, target: DeviceTarget, rng: Random) -> Planned:
    """Return a session of a pool with several shapes; what is planned and run is the last one's."""
    f = _facts(backend, target, rng, {Op.DECODE, Op.VERIFY}, MaskMode.NONE, MaskMode.CAUSAL)
    if f.path.capability.graph < GraphSupport.UNIFORM_BATCH:
        raise LookupError("no graphs")
    made = DecodePlanPool(f.workspace(), 200, backend=f"{backend.name}/{f.path.name}")
    facts: dict[str, Any] = {**f.sizes, "page_size": f.page, "q_data_type": f.dtype, "kv_data_type": f.dtype}
    members: dict[tuple[int, int], _Member] = {}
    for _ in range(rng.randint(1, 3)):
        size, q_len = rng.randint(1, 4), rng.randint(1, 3)
        batch, q = _Paged(f, [rng.randint(q_len, 60) for _ in range(size)]), f.q(size * q_len)
        problem = f.problem(*((Op.VERIFY, MaskMode.CAUSAL) if q_len > 1 else (Op.DECODE, MaskMode.NONE)))
        want = attention(problem, list(batch.requests(q, [q_len] * size)), Scales())[0]
        members.pop((size, q_len), None)  # the last of a shape is the one in force
        members[size, q_len] = _Member({**batch.table(*_TABLE), "q_len_per_req": q_len}, q, batch, want)
    *others, last = members

    def run(**given: Any) -> object:
        return made[last].run(**given)

    def all_right(_: object) -> None:
        for key, member in members.items():
            out = made[key].run(member.q.to(f.device), member.batch.cache)
            assert isinstance(out, torch.Tensor)
            f.close("a member of a pool", out, member.want)

    def planned(_: object) -> None:
        for key in others:
            made.plan(**members[key].table, **facts)
        all_right(None)

    plan = Call(
        name="pool plan", function=made.plan, check=planned, right={**members[last].table, **facts},
        fits=frozenset({"indices:one row more"}),
        values={
            **_PAGED_VALUES, "q_len_per_req": (0, -1, None, "x", [], 2.0, True, 2**40),
            "indices": (torch.zeros(201, dtype=torch.int64)[None], torch.full_like(batch.indices, -1)),
        },
    )  # fmt: skip
    run_last = Call(
        name="pool run", function=run, check=all_right,
        right={"q": members[last].q.to(f.device), "paged_kv_cache": members[last].batch.cache},
        values={"paged_kv_cache": members[last].batch.wrong()},
    )  # fmt: skip
    return Planned(
        plan=plan, run=run_last,
        states=lambda: tuple(made[key]._state for key in made.keys),
    )  # fmt: skip


SESSIONS: dict[str, Callable[[Backend, DeviceTarget, Random], Planned]] = {
    "pod": pod, "batch_pod": batch_pod, "block_sparse": block_sparse, "variable_sparse": variable_sparse,
    "pool": pool,
}  # fmt: skip
