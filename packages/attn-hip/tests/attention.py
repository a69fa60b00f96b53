"""Small attention problems of every kind, run on a device of the interpreter and by the reference."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch

from attn_core.arguments import MaskBits
from attn_core.backend import AppendIO, RunIO
from attn_core.batch import HostBatch, paged_batch, ragged_batch
from attn_core.plan_image import index_parts
from attn_core.problem import AttentionProblem, MaskMode, Op, PagedKV, PosEncoding, RaggedKV
from attn_core.query import Query
from attn_core.reference import ReferenceBackend
from attn_core.target import DeviceTarget
from attn_hip import launch_gpu
from attn_hip.plan import plan_gpu
from attn_hip.variants import misc_variants

from .device import Device

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FNUZ, FN = torch.float8_e4m3fnuz, torch.float8_e4m3fn
E5_FNUZ, E5 = torch.float8_e5m2fnuz, torch.float8_e5m2
FP8 = (FNUZ, FN, E5_FNUZ, E5)
CPU = DeviceTarget("cpu", "cpu", 1, 1)


@dataclass(frozen=True)
class Case:
    """One problem.

    Attributes:
        name: For reports.
        q_len: Query rows of each request.
        kv_len: Keys of each request.
        heads: Query and KV heads.
        dims: Head dimensions of q and k, and of v and out.
        page: Tokens of a page; 0 for ragged keys.
        order: Layout of the cache.
        dtypes: Of q, of the cache, of out.
        split: Pages (tokens when ragged) of a chunk; 0 leaves it to the planner.
        options: More of :class:`AttentionProblem`.
        scales: Of q, k and v: floats or tensors.
        sharp: Factor of q: the larger, the more do scores outgrow those before them.
        core: Whether it runs by default, and not only with the whole matrix.
    """

    name: str
    q_len: tuple[int, ...]
    kv_len: tuple[int, ...]
    heads: tuple[int, int] = (4, 1)
    dims: tuple[int, int] = (64, 64)
    page: int = 16
    order: str = "NHD"
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype] = (BF16, BF16, BF16)
    split: int = 0
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    scales: tuple[Any, Any, Any] = (1.0, 1.0, 1.0)
    sharp: float = 1.0
    core: bool = False

    @property
    def problem(self) -> AttentionProblem:
        rows = set(self.q_len)
        op = Op.PREFILL_PAGED if self.page else Op.PREFILL_RAGGED
        if self.page and rows == {1}:
            op = Op.DECODE
        elif self.page and len(rows) == 1 and max(rows) <= 8 and self.options.get("mask") is MaskMode.CAUSAL:
            op = Op.VERIFY
        return AttentionProblem(
            op=op, num_qo_heads=self.heads[0], num_kv_heads=self.heads[1], head_dim_qk=self.dims[0],
            head_dim_vo=self.dims[1], q_dtype=self.dtypes[0], kv_dtype=self.dtypes[1], o_dtype=self.dtypes[2],
            kv=PagedKV(self.page, self.order) if self.page else RaggedKV(self.order), needs_lse=True,
            fixed_split_size=self.split or None, sm_scale=self.dims[0] ** -0.5, **self.options,
        )  # fmt: skip


@dataclass
class Inputs:
    """Tensors of a case."""

    batch: HostBatch
    mask: MaskBits | None
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def _random(make: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=make).to(dtype)


def inputs(case: Case, seed: int = 0) -> Inputs:
    """Make tensors; what no request owns of a cache is NaN."""
    make = torch.Generator().manual_seed(seed)
    qo = torch.tensor([0, *accumulate(case.q_len)], dtype=torch.int32)
    q = _random(make, case.dtypes[0], sum(case.q_len), case.heads[0], case.dims[0]) * case.sharp
    mask = _mask(case, make) if case.options.get("mask") is MaskMode.CUSTOM else None
    if case.page:
        batch, caches = _paged(case, qo, make)
    else:
        kv = torch.tensor([0, *accumulate(case.kv_len)], dtype=torch.int32)
        batch = ragged_batch(qo, kv)
        caches = [_random(make, case.dtypes[1], sum(case.kv_len), case.heads[1], dim) for dim in case.dims]
        if case.order == "HND":
            caches = [cache.transpose(0, 1).contiguous().transpose(0, 1) for cache in caches]
    return Inputs(batch, mask, q, *caches)


def _paged(case: Case, qo: torch.Tensor, make: torch.Generator) -> tuple[HostBatch, list[torch.Tensor]]:
    pages = [-(-n // case.page) for n in case.kv_len]
    ids = torch.randperm(sum(pages) + 2, generator=make)[: sum(pages)].to(torch.int32)
    indptr = torch.tensor([0, *accumulate(pages)], dtype=torch.int32)
    last = torch.tensor(
        [n - (p - 1) * case.page if n else 0 for n, p in zip(case.kv_len, pages, strict=True)]
    ).int()
    batch = paged_batch(qo, indptr, ids, last, case.page)
    caches = []
    for dim in case.dims:
        cache = torch.full((sum(pages) + 2, case.page, case.heads[1], dim), float("nan")).to(case.dtypes[1])
        if case.order == "HND":
            cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
        for request, count in enumerate(case.kv_len):
            mine = ids[indptr[request] : indptr[request + 1]].tolist()
            for n, page in enumerate(mine):
                rows = min(case.page, count - n * case.page)
                cache[page, :rows] = _random(make, case.dtypes[1], rows, case.heads[1], dim)
        caches.append(cache.transpose(1, 2) if case.order == "HND" else cache)
    return batch, caches


def _mask(case: Case, make: torch.Generator) -> MaskBits:
    sizes = [q * kv for q, kv in zip(case.q_len, case.kv_len, strict=True)]
    bits = [torch.rand(size, generator=make) < 0.6 for size in sizes]
    packed = []
    for request, some in enumerate(bits):
        some[: case.kv_len[request]] = False  # a row without keys
        padded = torch.nn.functional.pad(some, (0, -len(some) % 8)).view(-1, 8).to(torch.uint8)
        packed.append((padded << torch.arange(8, dtype=torch.uint8)).sum(1).to(torch.uint8))
    indptr = torch.tensor([0, *accumulate(len(part) for part in packed)], dtype=torch.int32)
    return MaskBits(torch.cat(packed), indptr)


def expected(case: Case, given: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse by the reference, in float32."""
    problem = replace(case.problem, o_dtype=FP32)
    if problem.fixed_split_size:
        problem = replace(problem, fixed_split_size=None)
    backend = ReferenceBackend()
    query = Query(CPU, problem, given.batch.shape)
    made = backend.plan(query, "torch", given.batch)
    image = _image(given, made)
    out = torch.empty(sum(case.q_len), case.heads[0], case.dims[1])
    lse = torch.empty(sum(case.q_len), case.heads[0])
    backend.run(made.launch, image, RunIO(given.q, given.k, given.v, out, lse, None, *case.scales))
    return out, lse


def _image(given: Inputs, made: Any) -> dict[str, torch.Tensor]:
    image = {
        name: part.to(torch.int32).clone()  # memory of its own, so that its bounds are checked
        for name, part in index_parts(given.batch, given.mask, made).items()
    }
    if given.mask is not None:
        image["custom_mask"] = given.mask.bits
    return image


@dataclass
class Answer:
    """What a device made of a case."""

    out: torch.Tensor
    lse: torch.Tensor
    variant: str
    items: int
    merges: int


def attend(device: Device, case: Case, given: Inputs) -> Answer:
    """Plan and run a case as the product does.

    Raises:
        Fault: A kernel did what it must not.
    """
    query = Query(device.target, case.problem, given.batch.shape)
    made = plan_gpu(device.native, device, query, given.batch)
    image = _image(given, made)
    out = torch.full((sum(case.q_len), case.heads[0], case.dims[1]), float("nan")).to(case.dtypes[2])
    lse = torch.full((sum(case.q_len), case.heads[0]), float("nan"))
    workspace = torch.full((made.workspace_bytes,), 0xFF, dtype=torch.uint8)
    scalars = {f"scale{n}": s for n, s in enumerate(case.scales) if isinstance(s, torch.Tensor)}
    device.register(
        {"q": given.q, "k": given.k, "v": given.v, **image, **scalars},
        {"out": out, "lse": lse, "workspace": workspace},
    )
    io = RunIO(given.q, given.k, given.v, out, lse, workspace, *case.scales)
    try:
        launch_gpu.run(made.launch, image, io)
    except RuntimeError:
        device.check()
        raise
    launched: Any = made.launch
    return Answer(out, lse, launched.variant, launched.items, launched.merges)


def close(case: Case, answer: Answer, wanted: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Assert that an answer is right to the rounding of its types."""
    out, lse = wanted
    coarse = max({BF16: 2**-8, FP16: 2**-11, FP32: 0.0}[d] for d in (case.dtypes[0], case.dtypes[2]))
    scale = case.scales[2] if isinstance(case.scales[2], float) else 1.0
    bound = max(3e-3, 4 * coarse) * max(1.0, scale)
    # Rotated keys and queries are rounded once more, to the type of the product.
    rotated = case.problem.pos_encoding is PosEncoding.ROPE_LLAMA
    torch.testing.assert_close(answer.lse, lse, atol=5e-3 if rotated else 1e-3, rtol=1e-4)
    torch.testing.assert_close(answer.out.float(), out, atol=bound, rtol=4 * coarse)
    empty = torch.isneginf(lse)
    assert (answer.out[empty] == 0).all()


def append(device: Device, case: Case, given: Inputs, rows: int) -> tuple[torch.Tensor, ...]:
    """Append rows to a case's cache on the device; returns k, v and what the reference makes of them."""
    make = torch.Generator().manual_seed(5)
    problem = replace(case.problem, op=Op.APPEND)
    key, value = (_random(make, FP32, rows, case.heads[1], dim) * 100 for dim in case.dims)
    key, value = key.to(case.dtypes[1]), value.to(case.dtypes[1])
    batch = len(case.q_len)
    request = torch.randint(-1, batch + 1, (rows,), generator=make, dtype=torch.int32)
    position = torch.randperm(max(case.kv_len) + 40, generator=make)[:rows].to(torch.int32) - 3
    assert given.batch.kv_indices is not None
    indices, indptr = given.batch.kv_indices.clone(), given.batch.kv_indptr.clone()
    made = []
    for cache in ("device", "reference"):
        k, v = (torch.zeros_like(x) if x.dtype in FP8 else x.clone() for x in (given.k, given.v))
        io = AppendIO(key, value, k, v, request, position, indices, indptr)
        if cache == "reference":
            ReferenceBackend().append("torch", problem, io)
        else:
            device.register(
                {"key": key, "value": value, "request": request, "position": position, "indices": indices,
                 "indptr": indptr}, {"k": k, "v": v},
            )  # fmt: skip
            kernel = device.get(device.target, misc_variants(device.arch)["append"])
            try:
                launch_gpu.append(device.native, kernel, "fa2/tile", problem, io)
            except RuntimeError:
                device.check()
                raise
        made += [k, v]
    return tuple(made)


CAUSAL = {"mask": MaskMode.CAUSAL}
CUSTOM = {"mask": MaskMode.CUSTOM}
WINDOW = {"mask": MaskMode.CAUSAL, "window_left": 20}
ROPE = {"mask": MaskMode.CAUSAL, "pos_encoding": PosEncoding.ROPE_LLAMA}
ALIBI = {"mask": MaskMode.CAUSAL, "pos_encoding": PosEncoding.ALIBI}
CAP = {"mask": MaskMode.CAUSAL, "logits_soft_cap": 8.0}
HALF = (FP16, FP16, FP16)
TENSORS = (torch.tensor([0.5]), torch.tensor([1.5]), torch.tensor([0.25]))
LONG = (300,)

CASES = (
    # Decode: groups of every size, pages of every size, both layouts.
    Case("decode-4", (1, 1, 1), (70, 5, 0), core=True),
    Case("decode-group-1", (1, 1), (33, 64), (2, 2), page=1),
    Case("decode-group-5", (1, 1), (33, 64), (10, 2), (128, 128)),
    Case("decode-group-8-hnd", (1, 1), (90, 17), (8, 1), (128, 128), order="HND", core=True),
    Case("decode-group-16", (1,), (40,), (16, 1), page=64),
    Case("decode-group-24", (1,), (40,), (24, 1)),
    Case("decode-half-256", (1, 1), (70, 20), (4, 2), (256, 256), dtypes=HALF),
    Case("decode-half", (1,), (70,), (4, 2), (128, 128), dtypes=HALF),
    Case("decode-window-cap", (1, 1), (70, 20), options={"window_left": 20, "logits_soft_cap": 8.0}),
    Case("decode-float-out", (1,), (70,), dtypes=(BF16, BF16, FP32), core=True),
    Case("decode-scales", (1, 1), (70, 20), scales=(0.5, 1.5, 2.0)),
    Case("decode-scale-tensors", (1, 1), (70, 20), scales=TENSORS),
    # Keys in chunks, joined by the merge kernel.
    Case("decode-split", (1, 1), (300, 20), options={}, split=8, core=True),
    Case("decode-split-auto", (1,), (700,), (8, 2), (128, 128)),
    Case("prefill-split", (20,), LONG, options=CAUSAL, split=8),
    Case("prefill-split-window", (20,), LONG, options=WINDOW, split=1),
    # Verify: a chain of draft tokens.
    Case("verify-4", (4, 4), (70, 9), options=CAUSAL, core=True),
    Case("verify-8", (8, 8), (70, 24), (8, 1), (128, 128), options=CAUSAL),
    Case("verify-split", (3, 3), (300, 9), options=CAUSAL, split=8),
    # Prefill.
    Case("paged-causal", (70, 3), (100, 64), (4, 2), options=CAUSAL, core=True),
    Case("paged-full", (20, 17), (40, 77), (4, 2), (128, 128)),
    Case("paged-page-1", (20,), (40,), page=1, options=CAUSAL),
    Case("paged-more-rows-than-keys", (20, 5), (7, 0), options=CAUSAL),
    Case("ragged-causal", (40, 25), (40, 90), (2, 1), (128, 128), page=0, options=CAUSAL, core=True),
    Case("ragged-hnd", (20,), (50,), (4, 2), page=0, order="HND", options=CAUSAL),
    Case("ragged-window", (30, 30), (90, 30), (2, 1), page=0, options=WINDOW),
    Case("ragged-long-tile", (300,), (300,), (2, 2), page=0, options=CAUSAL),
    Case("ragged-long-tile-128", (260,), (310,), (2, 2), (128, 128), page=0, options=CAUSAL),
    Case("ragged-half", (40,), (80,), (2, 1), page=0, dtypes=HALF, options=CAUSAL),
    Case("ragged-256", (40,), (80,), (2, 1), (256, 256), page=0, options=CAUSAL),
    Case("ragged-half-256", (40,), (80,), (2, 1), (256, 256), page=0, dtypes=HALF, options=CAUSAL),
    # Scores that outgrow those before them by little and by much.
    Case("sharp-decode", (1, 1), (300, 70), sharp=30.0, core=True),
    Case("sharp-decode-split-half", (1,), (700,), (8, 2), (128, 128), dtypes=HALF, sharp=20.0),
    Case("sharp-prefill", (40, 25), (40, 190), (2, 1), (128, 128), page=0, options=CAUSAL, sharp=8.0),
    Case("sharp-window-half", (30,), (190,), (2, 1), page=0, dtypes=HALF, options=WINDOW, sharp=40.0),
    Case("sharp-mask-cap", (20, 9), (150, 30), options={**CUSTOM, "logits_soft_cap": 50.0}, sharp=30.0),
    # Everything that is more than causal and window.
    Case("custom-mask", (20, 9), (50, 30), options=CUSTOM, core=True),
    Case("custom-mask-tree", (6, 6), (50, 30), (4, 2), (128, 128), options=CUSTOM),
    Case("soft-cap", (20,), (90,), options=CAP, core=True),
    Case("rope", (20, 3), (90, 33), options=ROPE, core=True),
    Case("rope-128-decode", (1, 1), (90, 33), (4, 2), (128, 128),
         options={"pos_encoding": PosEncoding.ROPE_LLAMA, "rope_scale": 2.0, "rope_theta": 5e5}),
    Case("alibi", (20, 3), (90, 33), (6, 2), options=ALIBI, core=True),
    Case("alibi-decode", (1, 1), (90, 33), (6, 2), options={"pos_encoding": PosEncoding.ALIBI}),
    Case("rope-256-half", (20,), (70,), (2, 1), (256, 256), dtypes=HALF, options=ROPE),
    # Head dimensions between and unlike.
    Case("dim-96", (20,), (70,), dims=(96, 96), options=CAUSAL),
    Case("dim-192-128", (20,), (70,), dims=(192, 128), page=0, options=CAUSAL),
    Case("dim-40-decode", (1, 1), (70, 9), dims=(40, 24)),
    Case("dim-half-80", (20,), (70,), dims=(80, 80), dtypes=HALF, options=CAUSAL),
    # fp8 caches.
    Case("fp8-decode", (1, 1), (70, 20), dtypes=(BF16, FNUZ, BF16), scales=(1.0, 0.5, 2.0), core=True),
    Case("fp8-fn-decode", (1, 1), (70, 20), (8, 1), (128, 128), dtypes=(BF16, FN, BF16)),
    Case("fp8-fn-split", (1,), (300,), (8, 1), (128, 128), dtypes=(BF16, FN, BF16), split=8, options={}),
    Case("fp8-half-prefill", (20,), (70,), (4, 2), (128, 128), dtypes=(FP16, FN, FP16), options=CAUSAL),
    Case("fp8-prefill", (70,), (100,), (4, 2), (128, 128), dtypes=(BF16, FNUZ, BF16), options=CAUSAL),
    Case("fp8-rope", (20,), (70,), dtypes=(BF16, FNUZ, BF16), options=ROPE),
    Case("fp8-256", (20,), (70,), (2, 1), (256, 256), dtypes=(BF16, FN, BF16), options=CAUSAL),
    Case("e5m2-decode", (1, 1), (70, 20), (8, 1), (128, 128), dtypes=(BF16, E5, BF16), scales=(1.0, 0.5, 2.0),
         core=True),
    Case("e5m2-split", (1,), (300,), (8, 1), dtypes=(BF16, E5, BF16), split=8, options={}),
    Case("e5m2-half-prefill", (20,), (70,), (4, 2), (128, 128), dtypes=(FP16, E5, FP16), options=CAUSAL),
    Case("e5m2-prefill", (70,), (100,), dtypes=(BF16, E5, BF16), options=CAUSAL),
    Case("e5m2-rope", (20,), (70,), dtypes=(BF16, E5, BF16), options=ROPE),
    Case("e5m2-256", (20,), (70,), (2, 1), (256, 256), page=0, dtypes=(BF16, E5, BF16), options=CAUSAL),
    Case("e5m2fnuz-decode", (1, 1), (70, 20), dtypes=(BF16, E5_FNUZ, BF16)),
    Case("e5m2fnuz-half", (20,), (70,), (4, 2), (128, 128), dtypes=(FP16, E5_FNUZ, FP16), options=CAUSAL),
    Case("e5m2fnuz-cap", (20,), (70,), (2, 1), (128, 128), dtypes=(FP16, E5_FNUZ, FP16), options=CAP),
    # Kernels that nothing above runs.
    Case("half-64-decode", (1, 1), (70, 5), dtypes=HALF),
    Case("half-128-prefill", (20,), (70,), (2, 1), (128, 128), dtypes=HALF, options=CAUSAL),
    Case("256-decode", (1, 1), (70, 20), (4, 2), (256, 256)),
    Case("fp8-half-64-decode", (1, 1), (70, 20), dtypes=(FP16, FN, FP16)),
    Case("fp8-half-64-prefill", (20,), (70,), dtypes=(FP16, FNUZ, FP16), options=CAUSAL),
    Case("fp8-half-128-decode", (1, 1), (70, 20), (8, 1), (128, 128), dtypes=(FP16, FNUZ, FP16)),
    Case("fp8-half-256-decode", (1,), (40,), (4, 1), (256, 256), dtypes=(FP16, FN, FP16)),
    Case("fp8-half-256-prefill", (20,), (40,), (1, 1), (256, 256), dtypes=(FP16, FNUZ, FP16), options=CAUSAL),
    Case("fp8-64-prefill", (20, 5), (70, 9), dtypes=(BF16, FN, BF16), options=CAUSAL),
    Case("fp8-256-decode", (1, 1), (70, 20), (4, 1), (256, 256), dtypes=(BF16, FNUZ, BF16)),
    Case("alibi-half-decode", (1, 1), (70, 9), (6, 2), dtypes=HALF,
         options={"pos_encoding": PosEncoding.ALIBI}),
    Case("mask-half-cap", (20, 9), (50, 30), dtypes=HALF, options={**CUSTOM, "logits_soft_cap": 8.0}),
    Case("rope-half-128-decode", (1, 1), (50, 33), (4, 2), (128, 128), dtypes=HALF, options=ROPE),
    Case("cap-half-256-decode", (1,), (40,), (2, 1), (256, 256), dtypes=(FP16, FN, FP16), options=CAP),
    Case("dim-200-decode", (1, 1), (40, 9), (2, 1), (200, 192)),
)  # fmt: skip
APPENDS = (
    Case("append", (1, 1), (70, 20), (4, 2), core=True),
    Case("append-hnd-fp8", (1, 1), (70, 20), (4, 2), (128, 64), order="HND", dtypes=(BF16, FNUZ, BF16)),
    Case("append-fp8-fn", (1, 1), (70, 20), (4, 2), dtypes=(FP16, FN, FP16)),
    Case("append-e5m2", (1, 1), (70, 20), (4, 2), dtypes=(FP16, E5, FP16)),
    Case("append-half", (1, 1), (70, 20), (2, 2), (40, 24), page=1, dtypes=HALF),
)
