"""What the replays share: seeded tensors, a float64 oracle, and every way to ask for attention.

The notation is that of the bug log: ``D`` decode, ``P`` paged prefill, ``R`` ragged, ``S1`` single.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
import torch

import attn_core
from attn_core import NoRoute, Unsupported, plugins
from attn_core.capability import Capability
from attn_core.target import target_of

REFERENCE = "reference"
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}
LSE_TOLERANCE = 1e-3
LOG_TYPES = {torch.float16, torch.bfloat16}


def available() -> tuple[str, ...]:
    """Backends of this machine with a path for its CPU that takes the log's types."""
    here = target_of(torch.device("cpu"))
    return tuple(
        b.name
        for b in plugins.registry().backends
        if b.unavailable(here) is None and any(_serves(p.capability, here.arch) for p in b.paths)
    )


def _serves(row: Capability, arch: str) -> bool:
    return (row.archs is None or arch in row.archs) and not row.q_dtypes.isdisjoint(LOG_TYPES)


BACKENDS = ("auto", *available())


def rnd(seed: int, *shapes: Sequence[int], dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    """Float32 normals of one CPU generator in the order listed, then cast."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tuple(shape), generator=generator).to(dtype) for shape in shapes]


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def indptr_of(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def workspace(megabytes: int = 64) -> torch.Tensor:
    """Scratch whose pages the system commits only where a backend writes them."""
    return torch.empty(megabytes << 20, dtype=torch.uint8)


# --- oracle ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """What the logits go through, and which keys a row sees."""

    causal: bool = False
    window: int = -1
    cap: float = 0.0
    sm_scale: float | None = None


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rule: Rule = Rule(), mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One request in float64: out ``[rows, heads, dim]``, base 2 lse ``[rows, heads]``."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    x = torch.einsum("nhd,mhd->hnm", q, k) * (rule.sm_scale or 1 / math.sqrt(q.shape[2]))
    if rule.cap:
        x = rule.cap * torch.tanh(x / rule.cap)
    i, j = torch.arange(len(q))[:, None] + len(k) - len(q), torch.arange(len(k))
    seen = torch.ones(len(q), len(k), dtype=torch.bool) if mask is None else mask.clone()
    if rule.causal and mask is None:
        seen &= j <= i
    if rule.window >= 0:
        seen &= j >= i - rule.window
    x = x.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(x, -1)
    weight = torch.exp(x - lse.masked_fill(lse == -math.inf, 0)[..., None])
    return torch.einsum("hnm,mhd->nhd", weight, v), lse.T / math.log(2)


# --- cases -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A paged batch. ``tables`` has the pages of each request, ``last`` the tokens in its last page."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tables: tuple[tuple[int, ...], ...]
    last: tuple[int, ...]
    q_lens: tuple[int, ...] = ()
    layout: str = "NHD"
    masks: tuple[torch.Tensor, ...] = ()
    cache: object = None

    @property
    def rows(self) -> tuple[int, ...]:
        return self.q_lens or (1,) * len(self.last)

    @property
    def page_size(self) -> int:
        return self.k.shape[1 if self.layout == "NHD" else 2]

    @property
    def kv_lens(self) -> tuple[int, ...]:
        pairs = zip(self.tables, self.last, strict=True)
        return tuple((len(t) - 1) * self.page_size + n if t else 0 for t, n in pairs)

    @property
    def indptr(self) -> torch.Tensor:
        return indptr_of([len(t) for t in self.tables])

    @property
    def indices(self) -> torch.Tensor:
        return i32(*(page for table in self.tables for page in table))

    @property
    def last_page_len(self) -> torch.Tensor:
        return i32(*self.last)

    @property
    def qo_indptr(self) -> torch.Tensor:
        return indptr_of(self.rows)

    @property
    def heads(self) -> tuple[int, int]:
        return self.q.shape[1], self.k.shape[2 if self.layout == "NHD" else 1]

    @property
    def types(self) -> dict[str, torch.dtype]:
        return {"q_data_type": self.q.dtype, "kv_data_type": self.k.dtype}

    def keys(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Contiguous keys and values of one request, NHD."""
        pages = torch.tensor(self.tables[request], dtype=torch.long)
        pair = []
        for t in (self.k, self.v):
            bits = t.view(torch.uint8) if t.dtype.itemsize == 1 else t
            found = bits[pages] if self.layout == "NHD" else bits[pages].transpose(1, 2)
            pair.append(found.flatten(0, 1)[: self.kv_lens[request]].view(t.dtype))
        return pair[0], pair[1]

    def queries(self, request: int) -> torch.Tensor:
        start = sum(self.rows[:request])
        return self.q[start : start + self.rows[request]]

    def want(
        self, rule: Rule = Rule(), k_scale: float = 1.0, v_scale: float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The oracle's answer for the whole batch."""
        found = []
        for n in range(len(self.last)):
            k, v = self.keys(n)
            mask = self.masks[n] if self.masks else None
            found.append(attention(self.queries(n), k.double() * k_scale, v.double() * v_scale, rule, mask))
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])

    def but(self, **changes: object) -> Case:
        return replace(self, **changes)  # type: ignore[arg-type]


def base(dtype: torch.dtype = torch.float16) -> Case:
    """The log's BASE: lengths 37 and 16 over four shuffled pages."""
    q, k, v = rnd(1, (2, 4, 64), (4, 16, 2, 64), (4, 16, 2, 64), dtype=dtype)
    return Case(q, k, v, ((2, 0, 3), (1,)), (5, 16))


BASE_SUMS, BASE_LSE = (-3.49293, 6.64028), (5.82656, 4.76988)


def base_r0(q_factor: float = 1.0) -> Case:
    """The first request of BASE alone, its query scaled."""
    case = base()
    return case.but(q=case.q[:1] * q_factor, tables=case.tables[:1], last=case.last[:1])


def paged(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, page_size: int, order: Sequence[int] | None = None
) -> Case:
    """One request whose tokens are cut into pages that lie in ``order`` in the pool."""
    pages = -(-len(k) // page_size)
    order = tuple(range(pages)) if order is None else tuple(order)
    pools = []
    for tokens in (k, v):
        filled = tokens.new_zeros(pages * page_size, *tokens.shape[1:])
        filled[: len(tokens)] = tokens
        pool = torch.empty_like(filled).view(pages, page_size, *tokens.shape[1:])
        pool[list(order)] = filled.view_as(pool)
        pools.append(pool)
    last = len(k) - (pages - 1) * page_size
    return Case(q, pools[0], pools[1], (order,), (last,), (len(q),))


# --- ways to ask -----------------------------------------------------------------------------------------

D, D_TC, P, R, S1 = "decode", "decode-tc", "prefill", "ragged", "single"
DECODES, WAYS = (D, D_TC), (D, D_TC, P, R, S1)
Wrapper = (
    attn_core.BatchDecodeWithPagedKVCacheWrapper
    | attn_core.BatchPrefillWithPagedKVCacheWrapper
    | attn_core.BatchPrefillWithRaggedKVCacheWrapper
)


def wrapper(way: str, backend: str, layout: str = "NHD", **options: object) -> Wrapper:
    if way in DECODES:
        return attn_core.BatchDecodeWithPagedKVCacheWrapper(
            workspace(), layout, use_tensor_cores=way == D_TC, backend=backend, **options
        )
    kind = {
        P: attn_core.BatchPrefillWithPagedKVCacheWrapper,
        R: attn_core.BatchPrefillWithRaggedKVCacheWrapper,
    }
    return kind[way](workspace(), layout, backend=backend, **options)


@dataclass(frozen=True)
class Asked:
    """Keywords beside the case: of plan(), of run(), and index tensors that replace the case's own."""

    rule: Rule = Rule()
    plan: dict[str, object] = field(default_factory=dict)
    run: dict[str, object] = field(default_factory=dict)
    indices: dict[str, torch.Tensor] = field(default_factory=dict)


def plan(w: Wrapper, case: Case, asked: Asked = Asked()) -> None:
    """Call plan() of whatever wrapper it is with the case's own metadata."""
    heads, dims = case.heads, (case.q.shape[2], case.v.shape[3])
    rule = asked.rule
    options: dict[str, object] = {
        "window_left": rule.window, "logits_soft_cap": rule.cap or None, "sm_scale": rule.sm_scale,
        **case.types, **asked.plan,
    }  # fmt: skip
    index = {
        "qo_indptr": case.qo_indptr, "indptr": case.indptr, "indices": case.indices,
        "last": case.last_page_len, **asked.indices,
    }  # fmt: skip
    pages = index["indptr"], index["indices"], index["last"]
    if isinstance(w, attn_core.BatchDecodeWithPagedKVCacheWrapper):
        options.setdefault("q_len_per_req", case.rows[0] if case.rows else 1)
        w.plan(*pages, *heads, dims[0], case.page_size, **options)
        return
    options["causal"] = rule.causal
    if case.masks:
        options.setdefault("custom_mask", torch.cat([m.flatten() for m in case.masks]))
    if isinstance(w, attn_core.BatchPrefillWithPagedKVCacheWrapper):
        qo = index["qo_indptr"]
        w.plan(qo, *pages, *heads, dims[0], case.page_size, head_dim_vo=dims[1], **options)
    else:
        kv = asked.indices.get("kv_indptr", indptr_of(case.kv_lens))
        w.plan(index["qo_indptr"], kv, *heads, *dims, **options)


def run(w: Wrapper, case: Case, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Call run() with lse."""
    if isinstance(w, attn_core.BatchPrefillWithRaggedKVCacheWrapper):
        pairs = [case.keys(n) for n in range(len(case.last))]
        # cat() knows no float8; the bytes are what is asked for
        k, v = (_cat([pair[at] for pair in pairs], case, at) for at in (0, 1))
        if case.layout == "HND":
            k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
        return w.run(case.q, k, v, return_lse=True, **options)
    cache = (case.k, case.v) if case.cache is None else case.cache
    return w.run(case.q, cache, return_lse=True, **options)


def _cat(parts: list[torch.Tensor], case: Case, at: int) -> torch.Tensor:
    if not parts:
        return (case.k, case.v)[at].new_zeros(0, case.heads[1], (case.k, case.v)[at].shape[3])
    if parts[0].dtype.itemsize > 1:
        return torch.cat(parts)
    return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


def attend(way: str, backend: str, case: Case, asked: Asked = Asked()) -> tuple[torch.Tensor, torch.Tensor]:
    """Plan and run; skips the test where an explicit backend refuses in the proper form."""
    with served(backend):
        if way == S1:
            return _single(backend, case, asked)
        w = wrapper(way, backend, case.layout)
        plan(w, case, asked)
        return run(w, case, **asked.run)


def _single(backend: str, case: Case, asked: Asked) -> tuple[torch.Tensor, torch.Tensor]:
    found = []
    for n in range(len(case.last)):
        k, v = case.keys(n)
        if case.layout == "HND":
            k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
        options: dict[str, object] = {"custom_mask": case.masks[n]} if case.masks else {}
        options |= {name: value for name, value in asked.run.items() if name in ("k_scale", "v_scale")}
        found.append(
            attn_core.single_prefill_with_kv_cache(
                case.queries(n),
                k,
                v,
                causal=asked.rule.causal,
                kv_layout=case.layout,
                backend=backend,
                window_left=asked.rule.window,
                logits_soft_cap=asked.rule.cap or None,
                sm_scale=asked.rule.sm_scale,
                return_lse=True,
                **options,
            )
        )
    return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])


# --- judging ---------------------------------------------------------------------------------------------


@contextmanager
def served(backend: str) -> Iterator[None]:
    """Let a backend named by the caller refuse by name; ``auto`` and the reference have to answer."""
    try:
        yield
    except (NoRoute, Unsupported) as err:
        reasons = err.reasons if isinstance(err, NoRoute) else (err.reason,)
        if backend in ("auto", REFERENCE) or not reasons:
            raise
        for reason in reasons:
            if not reason.candidate.startswith(f"{backend}/") or reason.code.slug not in str(err):
                raise
        pytest.skip(f"refused, which is allowed: {reasons[0]}")


@contextmanager
def refused(
    *words: object, kind: type[Exception] | tuple[type[Exception], ...] = ValueError
) -> Iterator[None]:
    """Expect an exception whose text has every word: the argument, what was given, what is allowed."""
    with pytest.raises(kind) as caught:
        yield
    text = str(caught.value)
    missing = [str(word) for word in words if str(word) not in text]
    if missing and isinstance(caught.value, NoRoute):
        raise caught.value  # a backend that serves less than the test asks about: for served() to judge
    if missing:
        pytest.fail(f"the message lacks {missing}: {text}")


def close(
    got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype
) -> None:
    """Compare out and lse element by element with the oracle."""
    (out, lse), (want_out, want_lse) = got, want
    assert out.dtype == dtype, out.dtype
    assert lse.dtype == torch.float32, lse.dtype
    torch.testing.assert_close(out.double(), want_out, atol=TOLERANCE[dtype], rtol=0)
    torch.testing.assert_close(lse.double(), want_lse, atol=LSE_TOLERANCE, rtol=0)


def agrees(
    way: str,
    backend: str,
    case: Case,
    asked: Asked = Asked(),
    sums: Sequence[float] = (),
    lse: Sequence[float] = (),
) -> None:
    """Compare one way with the oracle, and the oracle's own sums and first lse with the log's figures."""
    scales = {name: float(asked.run[name]) for name in ("k_scale", "v_scale") if name in asked.run}  # type: ignore[arg-type]
    want = case.want(asked.rule, **scales)
    start = [0, *torch.tensor(case.rows).cumsum(0).tolist()]
    for n, (figure, first) in enumerate(zip(sums, start, strict=False)):
        assert abs(float(want[0][first : start[n + 1]].sum()) - figure) < 1e-4, (n, figure)
    for figure, first in zip(lse, start, strict=False):
        assert abs(float(want[1][first, 0]) - figure) < 1e-4, figure
    close(attend(way, backend, case, asked), want, case.q.dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal shapes and bytes; NaN equals the same NaN, 0 does not equal -0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
