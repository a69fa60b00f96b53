"""Random calls of functions without a plan: append, merge, chain sampling."""

from __future__ import annotations

import math
from random import Random

import torch

from .. import merge, page
from ..backend import Backend, SamplingIO
from ..capability import FLOATS
from ..problem import Op
from ..sampling import chain_speculative_sampling
from ..sampling_math import sample
from ..sampling_route import paths_of
from ..target import DeviceTarget
from .axes import page_sizes_of
from .checks.expect import expect
from .fuzz_calls import Call
from .tables import offsets
from .tolerance import DEFAULTS, compare

_LARGE = 2**40


def calls(backend: Backend, target: DeviceTarget, rng: Random, kind: str) -> list[Call]:
    """Return the right calls of a session.

    Args:
        backend: Under test.
        target: Device.
        rng: Where the choices come from.
        kind: ``append``, ``merge`` or ``chain_sampling``.

    Raises:
        LookupError: The backend does not serve it there.
    """
    device = target.device
    make = torch.Generator().manual_seed(rng.getrandbits(40))
    if kind == "merge":
        return _merges(rng, make, device)
    if kind == "append":
        return [_append(backend, target, rng, make, device)]
    return [_sampling(backend, target, rng, make, device)]


def _here(archs: frozenset[str] | None, target: DeviceTarget) -> bool:
    return archs is None or target.arch in archs


def _append(
    backend: Backend, target: DeviceTarget, rng: Random, make: torch.Generator, device: torch.device
) -> Call:
    found = [p for p in backend.paths if Op.APPEND in p.capability.ops and _here(p.capability.archs, target)]
    if not found:
        raise LookupError("no append")
    path = rng.choice(found)
    cap = path.capability
    order = rng.choice(sorted(cap.kv_orders))
    size, heads = int(str(rng.choice(page_sizes_of(cap)))), rng.choice((1, 2, 3, 8))
    values = [64] if cap.head_dims.values is None else sorted(cap.head_dims.values)
    dim_k = dim_v = rng.choice([d for d in (8, 40, 64, 128, *values) if d in cap.head_dims])
    dtype = rng.choice(sorted(cap.kv_dtypes & FLOATS, key=str))
    counts = [rng.randint(0, 3) for _ in range(rng.randint(1, 4))]
    pages = torch.randperm(sum(counts) + 2, generator=make)[: sum(counts)].int()
    indptr = offsets(tuple(counts))
    last = torch.tensor([rng.randint(1, size) for _ in counts], dtype=torch.int32)
    slots = [(n, at) for n, count in enumerate(counts) for at in range(count * size)]
    rng.shuffle(slots)
    slots = slots[: rng.randint(0, 12)]
    rows = [(-1, 1 << 20) if rng.random() < 0.2 else slot for slot in slots]
    shape = (sum(counts) + 2, size, heads) if order == "NHD" else (sum(counts) + 2, heads, size)
    caches = [torch.randn(*shape, dim, generator=make).to(dtype).to(device) for dim in (dim_k, dim_v)]
    keys = [torch.randn(len(rows), heads, d, generator=make).to(dtype).to(device) for d in (dim_k, dim_v)]
    want = [cache.clone() for cache in caches]
    for n, (request, at) in enumerate(rows):
        if request >= 0:
            place = int(pages[int(indptr[request]) + at // size])
            for cache, row in zip(want, keys, strict=True):
                (cache[place, at % size] if order == "NHD" else cache[place, :, at % size]).copy_(row[n])

    def check(_: object) -> None:
        same = all(map(torch.equal, caches, want))
        expect(same, "append_paged_kv_cache left another cache than a loop over the rows")

    batch = torch.tensor([request for request, _ in rows], dtype=torch.int32)
    positions = torch.tensor([at for _, at in rows], dtype=torch.int32)
    bad = {"batch_indices": len(counts), "positions": _LARGE} if any(r >= 0 for r, _ in rows) else {}
    wrong = {name: (torch.full_like(batch, value, dtype=torch.int64),) for name, value in bad.items()}
    return Call(
        name="append", function=page.append_paged_kv_cache, check=check,
        right={
            "append_key": keys[0], "append_value": keys[1], "batch_indices": batch.to(device),
            "positions": positions.to(device), "paged_kv_cache": tuple(caches),
            "kv_indices": pages.to(device), "kv_indptr": indptr.to(device),
            "kv_last_page_len": last.to(device), "kv_layout": order,
            "backend": f"{backend.name}/{path.name}",
        },
        # A page table may be longer than it is used.
        fits=frozenset({"kv_indices:one row more", "kv_indices:one row less"}),
        values={
            "kv_layout": ("NDH", None, 3), "backend": ("nobody", 3, None),
            "paged_kv_cache": (None, caches[0][0], (caches[0],), (caches[0], None)),
            **(wrong if device.type == "cpu" else {}),
        },
    )  # fmt: skip


def _merges(rng: Random, make: torch.Generator, device: torch.device) -> list[Call]:
    rows, heads, dim, states = rng.randint(0, 9), rng.randint(1, 5), rng.choice((1, 8, 64)), rng.randint(1, 4)
    dtype = rng.choice((torch.float16, torch.bfloat16, torch.float32))
    v = torch.randn(rows, states, heads, dim, generator=make).to(dtype)
    s = torch.randn(rows, states, heads, generator=make) * rng.choice((1, 30))
    s[torch.rand(s.shape, generator=make) < 0.2] = rng.choice((-math.inf, math.inf))
    v, s = v.to(device), s.to(device)
    both = [t[:, n % states].contiguous() for n in range(2) for t in (v, s)]
    two = (torch.stack(both[::2], 1), torch.stack(both[1::2], 1))
    inout = [t.clone() for t in both[:2]]
    pair = {"v_a": both[0], "s_a": both[1], "v_b": both[2], "s_b": both[3]}
    mask = torch.rand(rows, generator=make) < 0.5
    kept = [t.clone() for t in inout]

    def in_place(_: object) -> None:
        merged = [torch.empty_like(t) for t in kept]
        for n, t in enumerate(_merged(*two)):
            merged[n] = torch.where(mask.to(device).view(-1, *[1] * (t.ndim - 1)), t, kept[n].double())
        _compare(tuple(inout), tuple(merged), dtype)

    return [
        Call(
            name="merge_state", function=merge.merge_state, right=pair,
            check=lambda found: _compare(found, _merged(*two), dtype),
        ),
        Call(
            name="merge_states", function=merge.merge_states, right={"v": v, "s": s},
            check=lambda found: _compare(found, _merged(v, s), dtype),
        ),
        Call(
            name="merge_state_in_place", function=merge.merge_state_in_place, check=in_place,
            right={
                "v": inout[0], "s": inout[1], "v_other": both[2], "s_other": both[3], "mask": mask.to(device)
            },
            fits=frozenset({"mask:nothing"}),
        ),
    ]  # fmt: skip


def _merged(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s = torch.where(s == math.inf, -math.inf, s.double())
    lse = torch.logsumexp(s * math.log(2), 1) / math.log(2)
    weights = torch.exp2(s - torch.where(lse.isinf(), 0.0, lse)[:, None])
    return (weights[..., None] * v.double()).sum(1), lse


def _compare(found: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], dtype: torch.dtype) -> None:
    for name, got, right in zip(("v", "s"), found, want, strict=True):
        tolerance = DEFAULTS[dtype if name == "v" else torch.float32]
        wrong = compare(got, right.cpu(), tolerance, 1.0, name)
        expect(wrong is None, f"merging: {wrong}")


def _sampling(
    backend: Backend, target: DeviceTarget, rng: Random, make: torch.Generator, device: torch.device
) -> Call:
    found = [p for p in paths_of(backend) if _here(p.archs, target)]
    if not found:
        raise LookupError("no chain sampling")
    path = rng.choice(found)
    most = min(2000, path.max_vocab_size or 2000)
    batch, n = rng.randint(0, 6), rng.randint(0, 5)
    vocab = min(most, rng.choice((1, 2, 31, 32, 33, rng.randint(1, most))))
    draft = torch.randn(batch, n, vocab, generator=make).softmax(-1)
    goal = torch.randn(batch, n + 1, vocab, generator=make).softmax(-1)
    goal[:, :n] = goal[:, :n] * rng.random() + draft * rng.random()
    for law in (goal, draft):
        law[torch.rand(law.shape, generator=make) < 0.01] = rng.choice((0.0, 0.0, math.nan, -1.0, math.inf))
    probs = [t.to(rng.choice(sorted(path.dtypes, key=str))) for t in (draft, goal)]
    ids = torch.randint(-1, vocab, (batch, n), generator=make)
    count = batch if batch and rng.random() < 0.5 else 1
    seed = torch.randint(-(2**63), 2**63 - 1, (count,), generator=make)
    offset = torch.randint(-(2**63), 2**63 - 1, (rng.choice((1, count)),), generator=make)
    counters = torch.full((2, batch), 3, dtype=torch.int32)
    tokens, (accepted, emitted) = torch.empty(batch, n + 1, dtype=torch.int32), counters.clone()
    want = SamplingIO(probs[0], probs[1], ids, seed, offset, tokens, accepted, emitted)
    sample(want)
    given = counters.to(device)
    checked = ids.numel() and device.type == "cpu"
    outside = {"draft_token_ids": (torch.full_like(ids, vocab),)} if checked else {}

    def check(found: tuple[torch.Tensor, ...]) -> None:
        right = (want.tokens, want.accepted, want.emitted)
        same = all(torch.equal(a.cpu(), b) for a, b in zip(found, right, strict=True))
        expect(same, f"chain sampling: {[t.tolist() for t in found]}, not {[t.tolist() for t in right]}")
        given.copy_(counters)  # the next call is compared with this one's arguments

    return Call(
        name="chain_sampling", function=chain_speculative_sampling, check=check,
        right={
            "draft_probs": probs[0].to(device), "draft_token_ids": ids.to(device),
            "target_probs": probs[1].to(device), "maybe_output_accepted_token_num": given[0],
            "maybe_output_emitted_draft_token_num": given[1], "seed": seed.to(device),
            "offset": offset.to(device), "backend": f"{backend.name}/{path.name}",
        },
        # No counters are as good as any, and one seed as good as one per request.
        fits=frozenset(
            {f"maybe_output_{name}_token_num:nothing" for name in ("accepted", "emitted_draft")}
            | {f"{name}:one row {more}" for name in ("seed", "offset") for more in ("more", "less")}
        ),
        values={"backend": ("nobody", 3, None), "seed": (1.5, "x", True, 2**64, 7), **outside},
    )  # fmt: skip
