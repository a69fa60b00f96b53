"""``mha_batch_prefill_func``: attention straight over the pages, the path ``native``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from attn_core.backend import DeviceImage, PlanResult, RunIO
from attn_core.batch import INT32_MAX, HostBatch
from attn_core.capability import FP8
from attn_core.errors import needs
from attn_core.problem import AttentionProblem, MaskMode
from attn_core.query import Query

from .. import rows
from ..gates import max_kv_len, max_q_len
from ..probe import AiterApi, Function
from ..versions import version
from .common import ONE, Call, check_dense, clear, finish, fold_scales, scalar, window_size

PAGED_SINCE = "kv_last_page_lens"
"""The parameter that came with pages of more than one token."""
_WIDE_OFFSETS = version("0.1.13")
_STEP = 128
"""Keys of a step of the kernel; smaller pages are gathered with 32-bit offsets from the first."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Scalars of a call.

    Attributes:
        problem: What to compute.
        function: The declared function.
        max_q: Most query rows of one request.
        max_kv: Most keys of one request.
        narrow: Offsets into the cache are 32 bits wide in this release.
        scattered: Pages are smaller than a step of the kernel.
        empty: There is nothing to call the kernel for.
    """

    path: ClassVar[str] = rows.NATIVE
    problem: AttentionProblem
    function: Function
    max_q: int
    max_kv: int
    narrow: bool
    scattered: bool
    empty: bool


class BatchPrefill:
    """Native paging."""

    call = Call(
        "batch_prefill",
        (
            "q", "k", "v", "cu_seqlens_q", "kv_indptr", "kv_page_indices", "max_seqlen_q", "max_seqlen_k",
            "softmax_scale", "logits_soft_cap", "causal", "window_size", "return_lse", "out",
        ),
        ("dropout_p", PAGED_SINCE, "q_descale", "k_descale", "v_descale"),
    )  # fmt: skip

    def missing(self, api: AiterApi) -> tuple[str, ...]:
        """Return what does not bind."""
        return self.call.missing(api)

    def plan(self, api: AiterApi, query: Query, batch: HostBatch) -> PlanResult:
        """Fix the scalars."""
        shape, page = batch.shape, query.problem.page_size
        scattered = page is not None and page < _STEP
        launch = Launch(
            query.problem,
            api.functions[self.call.key],
            max_q_len(query),
            max_kv_len(query),
            api.release < _WIDE_OFFSETS and scattered,
            scattered,
            query.graph is None and (shape.total_q == 0 or shape.total_kv == 0),
        )
        image = {"aiter_one": ONE} if query.problem.q_dtype in FP8 else {}
        return PlanResult(launch, image)

    def run(self, function: Callable[..., Any], launch: Launch, image: DeviceImage, io: RunIO) -> None:
        """Attend.

        Raises:
            ValueError: The cache is beyond the reach of this release, or a page lies where it cannot read.
            NotImplementedError: A scale that has to be a number is not.
        """
        p, function_ = launch.problem, launch.function
        fp8 = p.q_dtype in FP8
        if fp8 and io.lse is not None:
            raise ValueError(needs("return_lse", "inputs other than fp8", p.q_dtype, "aiter.fp8-lse"))
        logits, v_scale = (1.0, 1.0) if fp8 else fold_scales(io)
        check_dense("out", io.out)
        _check_cache(launch, io.k, io.v)
        if launch.empty:
            clear(io)
            return
        k, v = io.k, io.v
        if PAGED_SINCE not in function_:
            k, v = k[:, 0], v[:, 0]  # that release knows tokens only, which is pages of one
        returned = function(**self.call.bind(function_, {
            "q": io.q, "k": k, "v": v, "cu_seqlens_q": image["qo_indptr"], "kv_indptr": image["kv_indptr"],
            "kv_page_indices": image["kv_indices"], "max_seqlen_q": launch.max_q,
            "max_seqlen_k": launch.max_kv, "dropout_p": 0.0, "softmax_scale": p.sm_scale * logits,
            "logits_soft_cap": p.logits_soft_cap, "causal": p.mask is MaskMode.CAUSAL,
            "window_size": window_size(p, function_), "return_lse": io.lse is not None, "out": io.out,
            PAGED_SINCE: image["kv_last_page_len"], **_descales(fp8, image, io),
        }))  # fmt: skip
        finish(io, returned, v_scale)


def _descales(fp8: bool, image: DeviceImage, io: RunIO) -> dict[str, torch.Tensor | None]:
    """Per-tensor float32 scales on the device; the plan's own 1.0 where none was given."""
    found: dict[str, torch.Tensor | None] = dict.fromkeys(("q_descale", "k_descale", "v_descale"))
    if fp8:
        for name in found:
            given = getattr(io, name.replace("descale", "scale"))
            if isinstance(given, torch.Tensor):
                found[name] = given.reshape(1)
            elif given == 1.0:
                found[name] = scalar(image, "aiter_one")
            else:
                found[name] = torch.full((1,), given, dtype=torch.float32, device=io.q.device)
    return found


def _check_cache(launch: Launch, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, t in (("k", k), ("v", v)):
        size = t.element_size()
        if not _whole_tokens(t):
            want = "pages of whole tokens, every stride a multiple of 16 bytes"
            raise ValueError(needs(f"aiter/native: {name}", want, f"strides {t.stride()}", "aiter.kv-stride"))
        reach = t.shape[0] * t.stride(0) * size
        if launch.narrow and reach > INT32_MAX:
            want = f"at most {INT32_MAX} bytes of cache before amd-aiter 0.1.13"
            raise ValueError(needs(f"aiter/native: {name}", want, reach, "aiter.cache-bytes"))
        if launch.scattered and reach <= INT32_MAX:
            _check_address(name, address(t), reach)


def _check_address(name: str, start: int, reach: int) -> None:
    """Refuse a cache over whose inside the low word of an address wraps: the gather drops the carry."""
    low = start & 0xFFFFFFFF
    if low + reach > 1 << 32:
        want = f"pages of {_STEP}, or no multiple of 4 GiB inside the cache; aiter/gather has no such limit"
        got = f"{reach} bytes at {start:#x}"
        raise ValueError(needs(f"aiter/native: {name}", want, got, "aiter.cache-address"))


def address(t: torch.Tensor) -> int:
    """Return where a tensor starts in the device's address space."""
    return t.data_ptr()


def _whole_tokens(t: torch.Tensor) -> bool:
    """Whether heads lie one after another inside a token, and tokens inside a page, on 16-byte borders."""
    least = t.shape[3]
    for size, stride in ((t.shape[2], t.stride(2)), (t.shape[1], t.stride(1)), (t.shape[0], t.stride(0))):
        if size > 1:  # a dimension of one has no stride
            if stride < least or stride * t.element_size() % 16:
                return False
            least = stride
        least *= size
    return True
