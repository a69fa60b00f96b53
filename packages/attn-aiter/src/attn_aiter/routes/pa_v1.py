"""``paged_attention_v1``: decode of one row per request, the path ``pa_v1``.

The compiled entry is a plain C function. plan() has AITER build the variant and keeps the function; run()
fills in 26 arguments. Their list is compared with the shipped template's before that, because the kernel
checks nothing: it believes K's strides for V too, packed heads of q, dense out, int32 tables.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from attn_core import notices
from attn_core.backend import DeviceImage, PlanResult, RunIO
from attn_core.batch import INT32_MAX, HostBatch
from attn_core.errors import Unsupported, needs
from attn_core.query import Query
from attn_core.reasons import Reason

from .. import codes, rows
from ..gates import max_kv_len
from ..probe import AiterApi, recordings
from .common import ONE, Call, check_dense, finish, fold_scales, scalar
from .tables import block_table

PARTITION = 256
"""Tokens a block of the kernel reduces; it is written for this number only."""
_WAVE = 64
_TYPES = {torch.float16: "_Float16", torch.bfloat16: "__hip_bfloat16"}

_CAPTURES_ALL = (
    "aiter/pa_v1: captured for sequences as long as the whole index buffer; a wrapper with max_seq_len has a "
    f"cheaper graph [{codes.GRAPH_CAPACITY.slug}]"
)

Variant = tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """Scalars of a call.

    Attributes:
        variant: Arguments of AITER's ``compile``, as sorted pairs: identifies the C function.
        scale: Multiplies ``q @ k``.
        soft_cap: 0 for none.
        window: Tokens a row sees, itself included; 0 for all.
        batch_size: Requests.
        heads: Query heads and key/value heads.
        width: Columns of the page table.
        partitions: Partitions of the longest sequence, or of the capacity.
    """

    path: ClassVar[str] = rows.PA_V1
    variant: Variant
    scale: float
    soft_cap: float
    window: int
    batch_size: int
    heads: tuple[int, int]
    width: int
    partitions: int


class PagedAttentionV1:
    """Decode over pages."""

    call = Call(
        "pa_v1_compile",
        (
            "gqa_ratio", "head_size", "npar_loops", "dtype", "kv_dtype", "fp8_kv_dtype", "out_dtype",
            "block_size", "alibi_enabled", "logits_soft_cap_enabled", "partition_size", "mtp",
            "sliding_window_enabled",
        ),
    )  # fmt: skip

    def missing(self, api: AiterApi) -> tuple[str, ...]:
        """Return what does not bind; the C argument list must be the one this was written for."""
        same = api.pa_v1_arguments == recordings()[-1].pa_v1_arguments
        return self.call.missing(api) if same else (*self.call.missing(api), "pa_v1 C arguments as recorded")

    def plan(self, api: AiterApi, query: Query, batch: HostBatch) -> PlanResult:
        """Fix variant and sizes, and lay out the dense page table.

        Under capture everything is sized for the capacity: the wrapper's ``max_seq_len``, or all pages of
        its index buffer. A longer sequence would be cut without a word, so the wrapper refuses it first.

        Raises:
            Unsupported: A request has no key, or the workspace is too small.
        """
        p, size = query.problem, batch.shape.batch_size
        if query.graph is None and batch.shape.total_q == 0:
            return PlanResult(None)
        if batch.min_kv_len < 1:
            raise Unsupported(Reason(codes.EMPTY_REQUEST, "aiter/pa_v1", None, "kv_len 0"))
        assert p.page_size is not None
        if query.graph is not None and query.graph.max_kv_len is None:
            notices.warn_once((query.target, codes.GRAPH_CAPACITY), _CAPTURES_ALL)
        longest = max_kv_len(query)
        partitions = -(-longest // PARTITION)
        width = -(-longest // p.page_size)
        window = p.window_left + 1
        variant: dict[str, object] = {
            "gqa_ratio": p.gqa_group_size, "head_size": p.head_dim_qk, "npar_loops": -(-partitions // _WAVE),
            "dtype": _TYPES[p.q_dtype], "kv_dtype": _TYPES[p.kv_dtype], "fp8_kv_dtype": "auto",
            "out_dtype": _TYPES[p.o_dtype], "block_size": p.page_size, "alibi_enabled": False,
            "logits_soft_cap_enabled": p.logits_soft_cap > 0, "partition_size": PARTITION, "mtp": 1,
            "sliding_window_enabled": window > 0,
        }  # fmt: skip
        launch = Launch(
            tuple(sorted(variant.items())), p.sm_scale, p.logits_soft_cap, window,
            size, (p.num_qo_heads, p.num_kv_heads), width, partitions,
        )  # fmt: skip
        bytes_ = size * p.num_qo_heads * partitions * (2 * 4 + p.head_dim_vo * p.q_dtype.itemsize)
        if query.workspace_bytes is not None and query.workspace_bytes < bytes_:
            got = f"{query.workspace_bytes} of {bytes_} bytes"
            raise Unsupported(Reason(codes.WORKSPACE, "aiter/pa_v1", None, got))
        image = {"aiter_block_table": block_table(batch, width), "aiter_one": ONE}
        return PlanResult(launch, image, bytes_)

    def run(self, function: Callable[..., Any], launch: Launch, image: DeviceImage, io: RunIO) -> None:
        """Call the C function ``function``. Allocates nothing.

        Raises:
            ValueError: A stride does not fit the C argument, or ``out`` is not dense.
        """
        logits, v_scale = fold_scales(io)
        check_dense("out", io.out)
        for name, t in (("q", io.q), ("k", io.k)):
            if max(t.stride()) > INT32_MAX:
                want = f"strides up to {INT32_MAX} elements"
                raise ValueError(needs(f"aiter/pa_v1: {name}", want, t.stride(), "aiter.kv-stride"))
        function(*arguments(launch, image, io, logits))
        finish(io, io.out, v_scale)


def arguments(launch: Launch, image: DeviceImage, io: RunIO, logits: float) -> tuple[object, ...]:
    """Return the C arguments in the order of ``AiterApi.pa_v1_arguments``."""
    assert io.workspace is not None
    pointer, number, real = ctypes.c_void_p, ctypes.c_int, ctypes.c_float
    one = pointer(scalar(image, "aiter_one").data_ptr())
    page, token, head, _ = io.k.stride()
    q_heads, kv_heads = launch.heads
    null = pointer(None)
    return (
        pointer(io.out.data_ptr()),
        pointer(io.workspace.data_ptr()),
        pointer(io.q.data_ptr()),
        pointer(io.k.data_ptr()),
        pointer(io.v.data_ptr()),
        pointer(image["aiter_block_table"].data_ptr()),
        null,  # cu_query_lens
        pointer(image["kv_len"].data_ptr()),
        null,  # alibi_slopes
        null,  # q_scale
        one,  # k_scale: read for fp8 only, but a real address that a replay can read too
        one,  # v_scale
        null,  # fp8_out_scale
        real(launch.scale * logits),
        number(launch.width),
        number(launch.partitions),
        real(launch.soft_cap),
        number(launch.batch_size),
        number(kv_heads),
        number(q_heads),
        number(io.q.stride(0)),
        number(page),
        number(head),
        number(token),
        number(launch.window),
        pointer(_stream(io.q.device)),
    )


def _stream(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
