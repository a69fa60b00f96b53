"""``mla_decode_fwd``: latent attention of one to four rows per request, the path ``mla``.

The keys lie in pages of one token, ``[ckv | kpe]`` in 576 columns, of which the values are the first 512. The
function lays out its split in a tensor of its own on the current device, kept in a cache that does not tell
devices apart: one device per process, and no graph.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from attn_core.backend import DeviceImage, PlanResult, RunIO
from attn_core.batch import HostBatch
from attn_core.errors import Unsupported, needs
from attn_core.problem import AttentionProblem
from attn_core.query import Query
from attn_core.reasons import Reason

from .. import codes, rows
from ..probe import AiterApi, Function
from .common import Call, check_dense


@dataclass(frozen=True, slots=True)
class Launch:
    """Scalars of a call.

    Attributes:
        problem: What to compute.
        function: The declared function.
        max_q: Query rows of every request.
        max_kv: Keys of the longest request.
    """

    path: ClassVar[str] = rows.MLA
    empty: ClassVar[bool] = False
    problem: AttentionProblem
    function: Function
    max_q: int
    max_kv: int


class Mla:
    """Latent decode and chain verify."""

    call = Call(
        "mla_decode",
        (
            "q", "kv_buffer", "o", "qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_lens",
            "max_seqlen_q", "sm_scale", "logit_cap",
        ),
        ("page_size", "nhead_kv", "causal"),
    )  # fmt: skip

    def __init__(self) -> None:
        self._device: torch.device | None = None

    def missing(self, api: AiterApi) -> tuple[str, ...]:
        """Return what does not bind."""
        return self.call.missing(api)

    def plan(self, api: AiterApi, query: Query, batch: HostBatch) -> PlanResult:
        """Fix the scalars.

        Raises:
            Unsupported: A request has fewer keys than query rows, or none.
        """
        shape = batch.shape
        if shape.total_q == 0:
            return PlanResult(None)
        if batch.min_kv_len < 1:
            raise Unsupported(Reason(codes.EMPTY_REQUEST, "aiter/mla", None, "kv_len 0"))
        if batch.min_kv_len < shape.max_q_len:
            got = f"{batch.min_kv_len} keys for {shape.max_q_len} rows"
            raise Unsupported(Reason(codes.KV_SHORTER, "aiter/mla", None, got))
        function = api.functions[self.call.key]
        return PlanResult(Launch(query.problem, function, shape.max_q_len, shape.max_kv_len))

    def run(self, function: Callable[..., Any], launch: Launch, image: DeviceImage, io: RunIO) -> None:
        """Attend. AITER allocates the partial results of its split; they do not outlive the call.

        Raises:
            ValueError: ``out`` is not dense, or the values are not the first columns of the keys.
            NotImplementedError: A second device in one process.
        """
        p, device = launch.problem, io.q.device
        check_dense("out", io.out)
        check_latent(io)
        if self._device not in (None, device):
            want = f"one device per process, {self._device}"
            raise NotImplementedError(needs("aiter/mla", want, device, "aiter.latent-device"))
        self._device = device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            function(**self.call.bind(launch.function, {
                "q": io.q.contiguous(), "kv_buffer": io.k, "o": io.out, "qo_indptr": image["qo_indptr"],
                "kv_indptr": image["kv_indptr"], "kv_indices": image["kv_indices"],
                "kv_last_page_lens": image["kv_last_page_len"], "max_seqlen_q": launch.max_q,
                "sm_scale": p.sm_scale, "logit_cap": 0.0, "page_size": 1, "nhead_kv": 1, "causal": True,
            }))  # fmt: skip


def check_latent(io: RunIO) -> None:
    """Refuse keys that are not whole rows, and values that are anything but their first columns.

    Raises:
        ValueError: The kernel would read something else.
    """
    if io.v.data_ptr() != io.k.data_ptr() or io.v.stride() != io.k.stride():
        got = f"strides {io.v.stride()} beside {io.k.stride()}"
        raise ValueError(needs("aiter/mla: v", "the first columns of k", got, "aiter.kv-stride"))
    if io.k.shape[0] > 1 and io.k.stride(0) != io.k.shape[-1]:
        want = f"pages of {io.k.shape[-1]} elements, one after another"
        raise ValueError(needs("aiter/mla: k", want, f"stride {io.k.stride(0)}", "aiter.kv-stride"))
