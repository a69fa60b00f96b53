"""One layer and one batch on a device: tensors, calls through the public wrappers, and a check of results."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..decode import BatchDecodeWithPagedKVCacheWrapper
from ..errors import needs
from ..prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper
from ..problem import UNIFORM_OPS, AttentionProblem, MaskMode, Op, PagedKV
from ..wrapper import AttentionWrapper

OPS = (Op.PREFILL_PAGED, Op.PREFILL_RAGGED, Op.DECODE, Op.VERIFY)
"""Entry points that can be tuned: those whose plan stays while run() is called again and again."""

_WORKSPACE = 128 << 20
_ROWS = 8
"""Query rows at either end of a request that are compared with the reference."""
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
_TOLERANCE_8BIT = 1.5e-1
_SEED = 20


def check_problem(problem: AttentionProblem) -> None:
    """Raise ValueError when an entry point or a mask cannot be tuned."""
    if problem.op not in OPS or problem.mask is MaskMode.CUSTOM:
        want = f"an op of {', '.join(OPS)} without a custom mask"
        raise ValueError(needs("tune", want, f"{problem.op.value}, {problem.mask.value}", "core.tune-op"))


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """A batch of equal requests."""

    batch_size: int
    kv_len: int
    q_len: int

    def __str__(self) -> str:
        return f"batch {self.batch_size}, q_len {self.q_len}, kv_len {self.kv_len}"


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows ``first .. first + rows`` of a request, and the keys up to ``keys``, attended by themselves."""

    request: int
    first: int
    rows: int
    keys: int


class Cache:
    """Keys and values of a batch, with its page table; shared by the cells of one bucket.

    Attributes:
        batch_size: Requests.
        kv_len: Keys of each.
        k: Keys in the problem's layout.
        v: Values.
        pages: ``[batch_size, pages]`` int32 page ids in drawn order; empty for contiguous keys.
    """

    def __init__(self, problem: AttentionProblem, batch_size: int, kv_len: int, device: torch.device) -> None:
        self.batch_size, self.kv_len = batch_size, kv_len
        made = torch.Generator(device).manual_seed(_SEED)
        slots: tuple[int, ...] = (batch_size * kv_len,)
        self.pages = torch.empty(0, dtype=torch.int32)
        if isinstance(problem.kv, PagedKV):
            each = -(-kv_len // problem.kv.page_size)
            slots = (batch_size * each, problem.kv.page_size)
            order = torch.randperm(batch_size * each, generator=torch.Generator().manual_seed(_SEED))
            self.pages = order.to(torch.int32).view(batch_size, each)
        heads = problem.num_kv_heads
        self.k, self.v = (
            _random((*slots, heads, dim), problem.kv_dtype, made, device)
            for dim in (problem.head_dim_qk, problem.head_dim_vo)
        )
        if problem.kv.order == "HND":
            self.k, self.v = (t.transpose(-3, -2).contiguous() for t in (self.k, self.v))


def _random(
    shape: tuple[int, ...], dtype: torch.dtype, made: torch.Generator, device: torch.device
) -> torch.Tensor:
    if dtype.itemsize == 1:
        return torch.randn(shape, generator=made, device=device).to(dtype)
    return torch.empty(shape, dtype=dtype, device=device).normal_(generator=made)


class Workload:
    """Everything a candidate is given for one cell. Candidates get the same tensors.

    Args:
        problem: The layer.
        cache: Keys and values.
        q_len: Query rows of every request.

    Raises:
        ValueError: The entry point or the mask cannot be tuned.
    """

    def __init__(self, problem: AttentionProblem, cache: Cache, q_len: int) -> None:
        check_problem(problem)
        self.problem, self.device, self._cache = problem, cache.k.device, cache
        self.shape = Shape(cache.batch_size, cache.kv_len, q_len)
        self._workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=self.device)
        made = torch.Generator(self.device).manual_seed(_SEED + 1)
        p, rows = problem, cache.batch_size * q_len
        self._q = _random((rows, p.num_qo_heads, p.head_dim_qk), p.q_dtype, made, self.device)
        self.out = torch.empty((rows, p.num_qo_heads, p.head_dim_vo), dtype=p.o_dtype, device=self.device)
        self._want: list[tuple[_Piece, torch.Tensor]] | None = None

    def planned(self, candidate: str) -> AttentionWrapper:
        """Return a wrapper planned with one candidate, or with ``auto``.

        Raises:
            NoRoute: It cannot serve the layer or the batch.
            Exception: Whatever its plan() raises.
        """
        requests = range(self.shape.batch_size)
        whole = [_Piece(n, 0, self.shape.q_len, self.shape.kv_len) for n in requests]
        if self.problem.op in UNIFORM_OPS:
            return self._decode(candidate)
        return self._prefill(candidate, whole)

    def call(self, wrapper: AttentionWrapper) -> None:
        """Run a planned wrapper into ``out``."""
        cache = self._cache
        keys = ((cache.k, cache.v),) if isinstance(self.problem.kv, PagedKV) else (cache.k, cache.v)
        wrapper.run(self._q, *keys, out=self.out)  # type: ignore[attr-defined]

    def wrong(self, wrapper: AttentionWrapper) -> str | None:
        """Run, and return what is wrong with the result; None when the reference agrees.

        Compared are the first and last rows of the first and last request, on all heads.
        """
        self.out.fill_(torch.nan)
        self.call(wrapper)
        if self._want is None:
            self._want = self._reference()
        base = _TOLERANCE.get(self.problem.q_dtype, _TOLERANCE_8BIT)
        tolerance = max(base, _TOLERANCE.get(self.problem.kv_dtype, _TOLERANCE_8BIT))
        for piece, want in self._want:
            at = piece.request * self.shape.q_len + piece.first
            got = self.out[at : at + piece.rows].to(torch.float32)
            size = want.square().mean().sqrt()
            over = ((got - want).abs() / (tolerance * (want.abs() + size) + 1e-12)).nan_to_num(torch.inf)
            worst = float(over.max()) if over.numel() else 0.0
            if worst > 1:
                rows = f"rows {piece.first} to {piece.first + piece.rows - 1} of request {piece.request}"
                return f"{rows} differ from the reference by {worst:.3g} times the tolerance {tolerance:g}"
        return None

    def _reference(self) -> list[tuple[_Piece, torch.Tensor]]:
        """Results of the reference for rows at both ends of the first and the last request."""
        q_len, kv_len = self.shape.q_len, self.shape.kv_len
        rows = min(_ROWS, q_len)
        found = []
        for request in sorted({0, self.shape.batch_size - 1}):
            ends = [_Piece(request, q_len - rows, rows, kv_len)]
            if q_len > rows:
                # A mask that is aligned bottom-right moves with the last key; without one all keys are seen.
                keys = kv_len - (q_len - rows) if self._moves else kv_len
                if self._moves or self.problem.window_left < 0:
                    ends.append(_Piece(request, 0, rows, keys))
            found += [(piece, self._alone(piece)) for piece in ends]
        return found

    @property
    def _moves(self) -> bool:
        return self.problem.mask is MaskMode.CAUSAL

    def _alone(self, piece: _Piece) -> torch.Tensor:
        wrapper = self._prefill("reference", [piece])
        at = piece.request * self.shape.q_len + piece.first
        q = self._q[at : at + piece.rows]
        if isinstance(self.problem.kv, PagedKV):
            got = wrapper.run(q, (self._cache.k, self._cache.v))  # type: ignore[attr-defined]
        else:
            start = piece.request * self.shape.kv_len
            cut = slice(start, start + piece.keys)
            k, v = (
                t[cut] if self.problem.kv.order == "NHD" else t[:, cut]
                for t in (self._cache.k, self._cache.v)
            )
            got = wrapper.run(q, k, v)  # type: ignore[attr-defined]
        found: torch.Tensor = got.to(torch.float32)
        return found

    def _decode(self, candidate: str) -> AttentionWrapper:
        p, size = self.problem, self.problem.page_size or 1
        each = self._cache.pages.shape[1]
        wrapper = BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, p.kv.order, use_tensor_cores=p.use_tensor_cores, backend=candidate
        )
        batch_size = self.shape.batch_size
        wrapper.plan(
            torch.arange(0, (batch_size + 1) * each, each, dtype=torch.int32),
            self._cache.pages.reshape(-1).to(self.device),
            torch.full((batch_size,), (self.shape.kv_len - 1) % size + 1, dtype=torch.int32),
            p.num_qo_heads, p.num_kv_heads, p.head_dim_qk, size,
            q_len_per_req=self.shape.q_len, pos_encoding_mode=p.pos_encoding.value,
            window_left=p.window_left, logits_soft_cap=p.logits_soft_cap or None, sm_scale=p.sm_scale,
            q_data_type=p.q_dtype, kv_data_type=p.kv_dtype, o_data_type=p.o_dtype,
        )  # fmt: skip
        return wrapper

    def _prefill(self, candidate: str, pieces: list[_Piece]) -> AttentionWrapper:
        p = self.problem
        qo = _indptr([piece.rows for piece in pieces])
        options = {
            "causal": p.mask is MaskMode.CAUSAL, "pos_encoding_mode": p.pos_encoding.value,
            "window_left": p.window_left, "logits_soft_cap": p.logits_soft_cap or None,
            "sm_scale": p.sm_scale, "q_data_type": p.q_dtype, "kv_data_type": p.kv_dtype,
            "o_data_type": p.o_dtype,
        }  # fmt: skip
        heads = (p.num_qo_heads, p.num_kv_heads, p.head_dim_qk)
        if not isinstance(p.kv, PagedKV):
            ragged = BatchPrefillWithRaggedKVCacheWrapper(self._workspace, p.kv.order, backend=candidate)
            kv = _indptr([piece.keys for piece in pieces])
            ragged.plan(qo, kv, *heads, head_dim_vo=p.head_dim_vo, **options)  # type: ignore[arg-type]
            return ragged
        size = p.kv.page_size
        paged = BatchPrefillWithPagedKVCacheWrapper(self._workspace, p.kv.order, backend=candidate)
        pages = [self._cache.pages[piece.request, : -(-piece.keys // size)] for piece in pieces]
        last = torch.tensor([(piece.keys - 1) % size + 1 for piece in pieces], dtype=torch.int32)
        paged.plan(
            qo, _indptr([len(some) for some in pages]), torch.cat(pages).to(self.device), last, *heads, size,
            head_dim_vo=p.head_dim_vo, **options,  # type: ignore[arg-type]
        )  # fmt: skip
        return paged


def _indptr(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
