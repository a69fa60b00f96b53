"""A right and slow backend in small methods: to plant faults in, and to read before writing a real one.

CPU only. One request at a time, in float64; whatever a method does can be got wrong on its own by a
subclass, which is how the kit is tested.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..backend import API_VERSION, AppendIO, DeviceImage, Path, PlanResult, RunIO, TensorContract
from ..batch import HostBatch
from ..capability import Capability, Dims, GraphSupport
from ..problem import AttentionProblem, MaskMode, Op, PagedKV, PosEncoding
from ..query import Query
from ..reasons import Reason
from ..rules import Rule
from ..target import DeviceTarget
from .mini_direct import MiniDirect
from .mini_sampling import MiniSampler

WORKSPACE = 64
CAPABILITY = Capability(
    archs=frozenset({"cpu"}),
    ops=frozenset(Op),
    q_dtypes=frozenset({torch.float32}),
    kv_dtypes=frozenset({torch.float32, torch.float8_e4m3fn}),
    head_dims=Dims(frozenset({8, 16})),
    max_group=5,
    page_sizes=frozenset({4}),
    masks=frozenset(MaskMode),
    pos_encodings=frozenset({PosEncoding.NONE, PosEncoding.ROPE_LLAMA}),
    window=True,
    soft_cap=True,
    batch_invariant=True,
    graph=GraphSupport.ALWAYS,
)


@dataclass(frozen=True, slots=True)
class Launch:
    """What run() needs: the problem, and whatever a subclass adds."""

    problem: AttentionProblem
    extra: object = None


class Mini(MiniDirect, MiniSampler):
    """The backend; see the module."""

    api_version, name, rank = API_VERSION, "mini", 1
    paths: tuple[Path, ...] = (Path("torch", CAPABILITY, TensorContract(dense_head_dim=False)),)
    rules: tuple[Rule, ...] = ()

    def unavailable(self, target: DeviceTarget) -> Reason | None:
        """Torch is there."""
        return None

    def prepare(self, target: DeviceTarget, problem: AttentionProblem, path: str) -> Reason | None:
        """Nothing to build."""
        return None

    def plan(self, query: Query, path: str, batch: HostBatch) -> PlanResult:
        """Plan."""
        return PlanResult(self.launch(query, batch), self.image(query, batch), WORKSPACE)

    def launch(self, query: Query, batch: HostBatch) -> Launch:
        """Return the launch."""
        return Launch(query.problem)

    def image(self, query: Query, batch: HostBatch) -> dict[str, torch.Tensor]:
        """Return extra index arrays: the order in which requests are computed."""
        return {"order": torch.arange(batch.shape.batch_size, dtype=torch.int32)}

    def run(self, launch: object, image: DeviceImage, io: RunIO) -> None:
        """Compute request after request."""
        assert isinstance(launch, Launch)
        self.scratch(io)
        p, ends = launch.problem, image["qo_indptr"].tolist()
        for n in image["order"].tolist():
            k, v = self.keys(p, n, image, io)
            q = self.rows(io)[ends[n] : ends[n + 1]]
            out, lse = self.attend(p, q, k, v, self.hidden(p, n, q.shape[0], k.shape[0], image), io)
            self.store(io, slice(ends[n], ends[n + 1]), out, lse)

    def scratch(self, io: RunIO) -> None:
        """Use the workspace."""
        assert io.workspace is not None
        io.workspace[:WORKSPACE].zero_()

    def rows(self, io: RunIO) -> torch.Tensor:
        """Return q."""
        return io.q

    def keys(
        self, p: AttentionProblem, n: int, image: DeviceImage, io: RunIO
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of request ``n``, ``[kv_len, heads, dim]``."""
        first, count = int(image["kv_indptr"][n]), self.kv_len(p, n, image)
        k, v = self.caches(io)
        if not isinstance(p.kv, PagedKV):
            return self.decode(k[first : first + count]), self.decode(v[first : first + count])
        pages = self.pages(image["kv_indices"][first : first + -(-count // p.kv.page_size)].long())
        return self.take(k, pages, p.kv.order)[:count], self.take(v, pages, p.kv.order)[:count]

    def caches(self, io: RunIO) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k and v as they were given."""
        return io.k, io.v

    def pages(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the pages of a request, in order."""
        return ids

    def kv_len(self, p: AttentionProblem, n: int, image: DeviceImage) -> int:
        """Return the keys of request ``n``."""
        return int(image["kv_len"][n])

    def take(self, t: torch.Tensor, pages: torch.Tensor, order: str) -> torch.Tensor:
        """Return tokens of pages, one after another."""
        found = t.view(torch.uint8)[pages].view(t.dtype) if t.dtype.itemsize == 1 else t[pages]
        return self.decode((found if order == "NHD" else found.transpose(1, 2)).flatten(0, 1))

    def decode(self, t: torch.Tensor) -> torch.Tensor:
        """Return stored values as numbers to compute with."""
        return t.double()

    def hidden(
        self, p: AttentionProblem, n: int, q_len: int, kv_len: int, image: DeviceImage
    ) -> torch.Tensor:
        """Return which keys each row does not see, ``[q_len, kv_len]``."""
        i, j = torch.arange(q_len)[:, None], torch.arange(kv_len)
        own = i + self.diagonal(q_len, kv_len)
        hidden = (j > own) & (p.mask is MaskMode.CAUSAL)
        if p.window_left >= 0:
            hidden = hidden | (j < own - self.window(p))
        if p.mask is MaskMode.CUSTOM and hidden.numel():
            bit, bits = i * kv_len + j, image["custom_mask"]
            byte = bits[(self.mask_start(n, image) + bit // 8) % bits.numel()]
            hidden = hidden | ((byte >> self.bit(bit)) & 1 == 0)
        return hidden

    def diagonal(self, q_len: int, kv_len: int) -> int:
        """Return the position of the first row: rows are the last tokens."""
        return kv_len - q_len

    def window(self, p: AttentionProblem) -> int:
        """Return how many keys left of its own a row sees."""
        return p.window_left

    def mask_start(self, n: int, image: DeviceImage) -> int:
        """Return the first byte of a request's mask."""
        return int(image["mask_indptr"][n])

    def bit(self, bit: torch.Tensor) -> torch.Tensor:
        """Return where in its byte a mask bit is."""
        return (bit % 8).to(torch.uint8)

    def attend(
        self, p: AttentionProblem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor,
        io: RunIO,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return out ``[q_len, heads, dim]`` and lse ``[q_len, heads]``."""
        q, heads = q.double() * io.q_scale, self.kv_heads(p)
        if p.pos_encoding is PosEncoding.ROPE_LLAMA:
            q, k = self.rope(q, self.q_start(q.shape[0], k.shape[0]), p), self.rope(k, 0, p)
        x = torch.einsum("qhd,khd->hqk", q, k[:, heads]) * self.scale(p, io)
        x = self.mask_logits(p, x, hidden)
        total = torch.logsumexp(x, -1) if x.shape[-1] else x.new_full(x.shape[:2], -math.inf)
        weights = torch.exp(x - total.masked_fill(total == -math.inf, 0)[..., None])
        out = torch.einsum("hqk,khd->qhd", weights, v[:, heads]) * io.v_scale
        return out, self.lse(total.T, k.shape[0])

    def kv_heads(self, p: AttentionProblem) -> torch.Tensor:
        """Return the key/value head of each query head."""
        return torch.arange(p.num_qo_heads) // p.gqa_group_size

    def scale(self, p: AttentionProblem, io: RunIO) -> float | torch.Tensor:
        """Return the factor of the logits."""
        return p.sm_scale * io.k_scale

    def rope(self, x: torch.Tensor, start: int, p: AttentionProblem) -> torch.Tensor:
        """Rotate halves by position."""
        half = x.shape[-1] // 2
        turn = p.rope_theta ** (-torch.arange(half).double() / half) / p.rope_scale
        angle = (start + torch.arange(x.shape[0]).double())[:, None, None] * turn
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    def q_start(self, q_len: int, kv_len: int) -> int:
        """Return the position that rope gives the first row."""
        return kv_len - q_len

    def mask_logits(self, p: AttentionProblem, x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Cap, then mask."""
        if p.logits_soft_cap:
            x = p.logits_soft_cap * torch.tanh(x / p.logits_soft_cap)
        return x.masked_fill(hidden, -math.inf)

    def lse(self, natural: torch.Tensor, kv_len: int) -> torch.Tensor:
        """Return the log-sum-exp in base 2."""
        return natural / math.log(2)

    def store(self, io: RunIO, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Write a request's rows."""
        io.out[rows] = out.to(io.out.dtype)
        if io.lse is not None:
            io.lse[rows] = lse.float()

    def append(self, path: str, problem: AttentionProblem, io: AppendIO) -> None:
        """Write row after row."""
        assert isinstance(problem.kv, PagedKV)
        for n, (request, position) in enumerate(zip(io.batch_indices, io.positions, strict=True)):
            if request < 0:
                continue
            page = io.kv_indices[io.kv_indptr[request] + position // problem.kv.page_size]
            slot = self.slot(int(position) % problem.kv.page_size)
            for cache, rows in ((io.k, io.key), (io.v, io.value)):
                place = self.raw(cache)[page]
                (place if problem.kv.order == "NHD" else place.transpose(0, 1))[slot] = self.raw(
                    self.source(rows)
                )[n]

    def source(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows to append."""
        return rows

    def slot(self, slot: int) -> int:
        """Return the slot of a page that a row goes to."""
        return slot

    def raw(self, t: torch.Tensor) -> torch.Tensor:
        """Return a view that indexing can copy bit for bit."""
        return t.view(torch.uint8) if t.dtype.itemsize == 1 else t
