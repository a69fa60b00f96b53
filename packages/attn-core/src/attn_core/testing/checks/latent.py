"""Latent attention: values inside the keys, through the wrapper that asks for it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ... import rules
from ...backend import Backend, Path
from ...batch import BatchShape, paged_batch
from ...mla import BatchMLAPagedAttentionWrapper
from ...problem import AttentionProblem, MaskMode, Op, PagedKV
from ...query import Query
from ...reasons import Stage
from ...target import DeviceTarget
from ..axes import dims_of, page_sizes_of
from ..drive import only
from ..memory import workspace_of
from ..oracle import Request, Scales, attention
from ..tables import offsets
from ..tolerance import DEFAULTS, FP8_DEFAULT, compare, declared
from .expect import expect

HEADS = 16
BATCHES = (((1, 1, 1), (17, 1, 90)), ((2, 2), (33, 2)), ((3, 0, 1), (9, 4, 0)))
"""Query rows and keys per request: decode, verify, and whatever a prefill may bring."""


def attends_with_values_inside_keys(backend: Backend, target: DeviceTarget) -> None:
    """What a path that serves latent attention computes is the oracle's, from a joint cache and from two."""
    for path in backend.paths:
        cap = path.capability
        here = cap.archs is None or target.arch in cap.archs
        if cap.latent is False or Op.PREFILL_PAGED not in cap.ops or "NHD" not in cap.kv_orders or not here:
            continue
        for problem, (q_lens, kv_lens) in itertools.product(_problems(path), BATCHES):
            _attend(backend, path, target, problem, _World.make(problem, q_lens, kv_lens))


def _problems(path: Path) -> Iterator[AttentionProblem]:
    cap = path.capability
    unlike = [pair for pair in dims_of(cap, split=True) if isinstance(pair, tuple) and pair[0] > pair[1]]
    masks = [mode for mode in (MaskMode.CAUSAL, MaskMode.NONE) if mode in cap.masks]
    heads = HEADS if cap.max_group is None else min(HEADS, cap.max_group)
    for (qk, vo), dtype, page, mask in itertools.product(
        unlike[:1], sorted(cap.q_dtypes & cap.kv_dtypes, key=str), page_sizes_of(cap)[:2], masks
    ):
        if cap.o_dtypes is None or dtype in cap.o_dtypes:
            yield AttentionProblem(
                op=Op.PREFILL_PAGED, num_qo_heads=heads, num_kv_heads=1, head_dim_qk=qk, head_dim_vo=vo,
                q_dtype=dtype, kv_dtype=dtype, o_dtype=dtype, kv=PagedKV(int(str(page))), mask=mask,
                sm_scale=qk**-0.5, needs_lse=cap.lse, use_tensor_cores=True, latent=True,
            )  # fmt: skip


@dataclass(slots=True)
class _World:
    """One batch over a joint cache."""

    qo: torch.Tensor
    indptr: torch.Tensor
    ids: torch.Tensor
    lengths: torch.Tensor
    q: torch.Tensor
    cache: torch.Tensor

    @classmethod
    def make(cls, p: AttentionProblem, q_lens: tuple[int, ...], kv_lens: tuple[int, ...]) -> _World:
        page, made = p.page_size or 1, torch.Generator().manual_seed(7)
        counts = tuple(-(-n // page) for n in kv_lens)
        qo = offsets(q_lens)
        return cls(
            qo, offsets(counts), torch.randperm(sum(counts), generator=made).int(),
            torch.tensor(kv_lens, dtype=torch.int32),
            (torch.randn(int(qo[-1]), p.num_qo_heads, p.head_dim_qk, generator=made) * 2).to(p.q_dtype),
            torch.randn(sum(counts), page, p.head_dim_qk, generator=made).to(p.kv_dtype),
        )  # fmt: skip

    def shape(self, page: int) -> BatchShape:
        last = (self.lengths - 1) % page + 1
        return paged_batch(self.qo, self.indptr, self.ids, last, page).shape

    def want(self, p: AttentionProblem) -> tuple[torch.Tensor, torch.Tensor]:
        requests = []
        for n, length in enumerate(self.lengths.tolist()):
            pages = self.ids[self.indptr[n] : self.indptr[n + 1]].long()
            keys = self.cache[pages].flatten(0, 1)[:length, None]
            requests.append(Request(self.q[self.qo[n] : self.qo[n + 1]], keys, keys[..., : p.head_dim_vo]))
        return attention(p, requests, Scales())

    def parts(self, p: AttentionProblem, device: torch.device) -> list[torch.Tensor]:
        """q_nope, q_pe, ckv and kpe, as views of joint tensors on the device."""
        at = p.head_dim_vo
        return [
            part for t in (self.q.to(device), self.cache.to(device)) for part in (t[..., :at], t[..., at:])
        ]


def _attend(backend: Backend, path: Path, target: DeviceTarget, p: AttentionProblem, world: _World) -> None:
    page, name = p.page_size or 1, f"{backend.name}/{path.name}"
    said = rules.apply(backend.rules, Query(target, p, world.shape(page)), path.name, name)
    if any(reason.code.stage is Stage.CAPABILITY for reason in said):
        return
    device = target.device
    want, want_lse = world.want(p)
    tolerance = declared(path).get(p.q_dtype, DEFAULTS.get(p.q_dtype, FP8_DEFAULT))
    joint = world.parts(p, device)
    with only(backend, path):
        wrapper = BatchMLAPagedAttentionWrapper(workspace_of(16 << 20, 0xFF, device)[0], backend=name)
        wrapper.plan(
            world.qo, world.indptr, world.ids, world.lengths, p.num_qo_heads, p.head_dim_vo,
            p.head_dim_qk - p.head_dim_vo, page, p.mask is MaskMode.CAUSAL, p.sm_scale, p.q_dtype,
            p.kv_dtype, needs_lse=p.needs_lse,
        )  # fmt: skip
        for tensors in (joint, [t.clone() for t in joint]):
            q_nope, q_pe, ckv, kpe = tensors
            found = wrapper.run(q_nope, q_pe, ckv, kpe, return_lse=p.needs_lse)
            out, lse = found if isinstance(found, tuple) else (found, None)
            wrong = compare(out, want, tolerance, 1.0, "out")
            if wrong is None and lse is not None:
                wrong = compare(lse, want_lse, tolerance, 1.0, "lse")
            expect(wrong is None, f"{name}: latent attention, {p.q_dtype}, {world.lengths.tolist()}: {wrong}")
