"""Random sessions with wrappers that are more than attention over one table: cascades, latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from ..backend import Backend, Path
from ..capability import FLOATS
from ..cascade import MultiLevelCascadeAttentionWrapper
from ..mla import BatchMLAPagedAttentionWrapper
from ..problem import AttentionProblem, MaskMode, Op, PagedKV
from ..target import DeviceTarget
from .axes import dims_of, page_sizes_of
from .checks.expect import expect
from .fuzz_calls import Call
from .memory import workspace_of
from .oracle import Request, Scales, attention
from .tables import offsets
from .tolerance import DEFAULTS, compare, declared

_WORKSPACE = 16 << 20
_GARBAGE = 0xFF


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A wrapper's session: a plan, and a run of it."""

    plan: Call
    run: Call
    states: Any
    """Returns what must stay the same when a plan is refused."""


def cascade(backend: Backend, target: DeviceTarget, rng: Random) -> Planned:
    """Return a session of two levels: a prefix of every request, and keys of its own.

    Raises:
        LookupError: No path of the backend serves it there.
    """
    path = _path(backend, target, rng, latent=False)
    cap, device = path.capability, target.device
    make = torch.Generator().manual_seed(rng.getrandbits(40))
    sizes = [pair[0] if isinstance(pair, tuple) else int(str(pair)) for pair in dims_of(cap, split=False)]
    dim = min(sizes, key=lambda size: abs(size - 64))
    size, heads = int(str(page_sizes_of(cap)[0])), rng.choice((1, 2))
    group = rng.choice((1, 4) if cap.max_group is None or cap.max_group >= 4 else (1,))
    dtype = rng.choice(sorted(cap.q_dtypes & cap.kv_dtypes & FLOATS, key=str))
    q_len = [rng.randint(1, 5) for _ in range(rng.randint(1, 4))]
    own = [rng.randint(q, q + 40) for q in q_len]
    shared = rng.randint(1, 60)
    counts = [-(-n // size) for n in (shared, *own)]
    ids = torch.randperm(sum(counts) + 1, generator=make)[: sum(counts)].int()
    cache = [torch.randn(sum(counts) + 1, size, heads, dim, generator=make).to(dtype) for _ in range(2)]
    q = (torch.randn(sum(q_len), heads * group, dim, generator=make) * 2).to(dtype)
    ends = [0, *torch.tensor(counts).cumsum(0).tolist()]

    def tokens(t: torch.Tensor, n: int, length: int) -> torch.Tensor:
        return t[ids[ends[n] : ends[n + 1]].long()].flatten(0, 1)[:length]

    problem = AttentionProblem(
        op=Op.PREFILL_PAGED, num_qo_heads=heads * group, num_kv_heads=heads, head_dim_qk=dim, head_dim_vo=dim,
        q_dtype=dtype, kv_dtype=dtype, o_dtype=dtype, kv=PagedKV(size), mask=MaskMode.CAUSAL,
        sm_scale=dim**-0.5,
    )  # fmt: skip
    requests, row = [], 0
    for n, (rows, length) in enumerate(zip(q_len, own, strict=True)):
        k, v = (torch.cat([tokens(t, 0, shared), tokens(t, n + 1, length)]) for t in cache)
        requests.append(Request(q[row : row + rows], k, v))
        row += rows
    want = attention(problem, requests, Scales())[0]
    wrapper = MultiLevelCascadeAttentionWrapper(
        2, workspace_of(_WORKSPACE, _GARBAGE, device)[0], backend=f"{backend.name}/{path.name}"
    )
    lasts = [torch.tensor([(n - 1) % size + 1 for n in some], dtype=torch.int32) for some in ([shared], own)]
    arrays: dict[str, list[torch.Tensor]] = {
        "qo_indptr_arr": [torch.tensor([0, sum(q_len)], dtype=torch.int32), offsets(tuple(q_len))],
        "paged_kv_indptr_arr": [offsets((counts[0],)), offsets(tuple(counts[1:]))],
        "paged_kv_indices_arr": [ids[: counts[0]], ids[counts[0] :]],
        "paged_kv_last_page_len": lasts,
    }
    facts = {
        "num_qo_heads": heads * group, "num_kv_heads": heads, "head_dim": dim, "page_size": size,
        "causal": True, "q_data_type": dtype, "kv_data_type": dtype,
    }  # fmt: skip
    wrong: dict[str, tuple[object, ...]] = {
        name: (both[:1], both[0], None, [both[0].float(), both[1]], [both[0], both[1][None]], [both[0], None])
        for name, both in arrays.items()
    }
    rows_differ = [arrays["qo_indptr_arr"][0] + torch.tensor([0, 1]), arrays["qo_indptr_arr"][1]]
    wrong["qo_indptr_arr"] += (rows_differ,)
    plan = Call(
        name="cascade plan", function=wrapper.plan, check=_nothing, right={**arrays, **facts},
        values={
            **wrong, "num_qo_heads": (0, -1, 2.0, None), "num_kv_heads": (0, 3.0), "page_size": (0, -1, 1.5),
            "pos_encoding_mode": ("ROPE_LLAMA", "ROPE"), "window_left": (3, -2, "x"),
            "q_data_type": ("int99", 3), "logits_soft_cap": (-1.0, "x"), "sm_scale": ("x",),
        },
    )  # fmt: skip
    k, v = (t.to(device) for t in cache)
    run = Call(
        name="cascade run", function=wrapper.run, right={"q": q.to(device), "paged_kv_cache": (k, v)},
        check=lambda out: near(out, want, path, dtype, "cascade"),
        values={"paged_kv_cache": (None, k, (k,), (k, v[..., :1]), (k[:0], v[:0]), (k.to(torch.int8), v))},
    )  # fmt: skip
    return Planned(plan=plan, run=run, states=lambda: tuple(level._state for level in wrapper.levels))


def latent(backend: Backend, target: DeviceTarget, rng: Random) -> Planned:
    """Return a session of latent attention.

    Raises:
        LookupError: No path of the backend serves it there.
    """
    path = _path(backend, target, rng, latent=True)
    cap, device = path.capability, target.device
    make = torch.Generator().manual_seed(rng.getrandbits(40))
    pairs = [pair for pair in dims_of(cap, split=True) if isinstance(pair, tuple) and pair[0] > pair[1]]
    if not pairs:
        raise LookupError("no latent attention")
    qk, vo = rng.choice(pairs)
    size, dtype = (
        int(str(rng.choice(page_sizes_of(cap)))),
        rng.choice(sorted(cap.q_dtypes & cap.kv_dtypes, key=str)),
    )
    heads = 16 if cap.max_group is None else min(16, cap.max_group)
    q_len = [rng.randint(0, 4) for _ in range(rng.randint(1, 4))]
    kv_len = [rng.randint(n, n + 50) for n in q_len]
    counts = [-(-n // size) for n in kv_len]
    ids = torch.randperm(sum(counts) + 1, generator=make)[: sum(counts)].int()
    ends = [0, *torch.tensor(counts).cumsum(0).tolist()]
    cache = torch.randn(sum(counts) + 1, size, qk, generator=make).to(dtype)
    q = (torch.randn(sum(q_len), heads, qk, generator=make) * 2).to(dtype)
    causal = MaskMode.CAUSAL in cap.masks
    problem = AttentionProblem(
        op=Op.PREFILL_PAGED, num_qo_heads=heads, num_kv_heads=1, head_dim_qk=qk, head_dim_vo=vo,
        q_dtype=dtype, kv_dtype=dtype, o_dtype=dtype, kv=PagedKV(size),
        mask=MaskMode.CAUSAL if causal else MaskMode.NONE,
        sm_scale=qk**-0.5, latent=True,
    )  # fmt: skip
    requests, row = [], 0
    for n, (rows, length) in enumerate(zip(q_len, kv_len, strict=True)):
        keys = cache[ids[ends[n] : ends[n + 1]].long()].flatten(0, 1)[:length, None]
        requests.append(Request(q[row : row + rows], keys, keys[..., :vo]))
        row += rows
    want = attention(problem, requests, Scales())[0]
    wrapper = BatchMLAPagedAttentionWrapper(
        workspace_of(_WORKSPACE, _GARBAGE, device)[0], backend=f"{backend.name}/{path.name}"
    )
    plan = Call(
        name="latent plan", function=wrapper.plan, check=_nothing,
        right={
            "qo_indptr": offsets(tuple(q_len)), "kv_indptr": offsets(tuple(counts)), "kv_indices": ids,
            "kv_len_arr": torch.tensor(kv_len, dtype=torch.int32), "num_heads": heads, "head_dim_ckv": vo,
            "head_dim_kpe": qk - vo, "page_size": size, "causal": causal, "sm_scale": qk**-0.5,
            "q_data_type": dtype, "kv_data_type": dtype,
        },
        fits=frozenset(
            {"kv_indices:one row more", "kv_indptr:one row more", "kv_len_arr:one more dimension"}
        ),
        values={
            "num_heads": (0, -1, 2.0, None, True), "head_dim_ckv": (0, 1.5, None), "head_dim_kpe": (-1, True),
            "page_size": (0, -1, 2.5), "sm_scale": (None, "x", True, float("nan"), float("inf")),
            "q_data_type": ("int99", 3, None),
            "use_profiler": (True,),
            "kv_len_arr": (torch.tensor(kv_len) + size * 9, -torch.tensor(kv_len) - 1),
        },
    )  # fmt: skip
    on, at = [q.to(device), cache.to(device)], vo
    parts = [part for t in on for part in (t[..., :at], t[..., at:])]
    if rng.random() < 0.5:
        parts = [part.clone() for part in parts]
    run = Call(
        name="latent run", function=wrapper.run,
        right=dict(zip(("q_nope", "q_pe", "ckv_cache", "kpe_cache"), parts, strict=True)),
        check=lambda out: near(out, want, path, dtype, "latent"),
        # Pages that no request has may be missing or there.
        fits=frozenset({"ckv_cache:one row less"}),
        values={
            "out": (parts[0][..., :1], [], parts[0].to(torch.int16)), "lse": (parts[0], 3), "kv_len": (3,),
            "page_table": (ids,), "o_scale": (2.0,), "profiler_buffer": (q,),
        },
    )  # fmt: skip
    return Planned(plan=plan, run=run, states=lambda: (wrapper._state,))


def _nothing(_: object) -> None:
    """A plan returns nothing to look at."""


def near(out: torch.Tensor, want: torch.Tensor, path: Path, dtype: torch.dtype, what: str) -> None:
    """Raise Violation for an output that is further from float64 attention than the path declares."""
    tolerance = declared(path).get(dtype, DEFAULTS[dtype])
    # Levels are rounded to the output's type before they are merged.
    wrong = compare(out, want, 2 * tolerance if what == "cascade" else tolerance, 1.0, "out")
    expect(wrong is None, f"{what}: {wrong}")


def _path(backend: Backend, target: DeviceTarget, rng: Random, *, latent: bool) -> Path:
    found = [
        p
        for p in backend.paths
        if (p.capability.archs is None or target.arch in p.capability.archs)
        and Op.PREFILL_PAGED in p.capability.ops
        and p.capability.latent in (None, latent)
        and "NHD" in p.capability.kv_orders
        and (p.capability.lse and MaskMode.CAUSAL in p.capability.masks)
        and p.capability.q_dtypes & p.capability.kv_dtypes & FLOATS
    ]
    if not found:
        raise LookupError("no paged prefill of the kind")
    return rng.choice(found)
