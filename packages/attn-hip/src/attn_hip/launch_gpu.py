"""Hands the tensors of one run to the kernels of a GPU: one native call, no memory, no waiting."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from attn_core.backend import AppendIO, DeviceImage, RunIO, SamplingIO
from attn_core.errors import needs
from attn_core.problem import AttentionProblem, PosEncoding

from .gpu import Loaded
from .launch import (
    DTYPES,
    MASKS,
    POSITIONS,
    append_params,
    append_rows,
    neutral,
    pointers,
    run_strided,
    sample_params,
    scales_of,
)

TURNS, SLOPES = "rope_turns", "alibi_slopes"
_ARRAYS = (
    "qo_indptr", "kv_indptr", "kv_indices", "kv_len", "custom_mask", "mask_indptr", TURNS, SLOPES,
    "items", "merges", "counts",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bound:
    """A launch joined to the memory of its index arrays."""

    image: DeviceImage
    plan: Any


@dataclass(slots=True)
class _Memo:
    bound: Bound | None = None


@dataclass(frozen=True, slots=True)
class GpuLaunch:
    """What run() needs besides memory.

    Attributes:
        problem: What to compute.
        tile_q: Packed rows per tile.
        items: Blocks of the attention kernel; blocks without an item return at once. There can be
            more items where blocks take turns.
        merges: Blocks of the merge kernel; 0 when nothing can be split, or the attention kernel joins what
            is.
        slots: Partial results that the workspace holds, as in :class:`attn_hip.launch.Launch`.
        variant: Name of the attention kernel.
        native: The host module.
        attend: Attention kernel.
        merge: Merge kernel; any kernel when nothing can be split.
    """

    problem: AttentionProblem
    tile_q: int
    items: int
    merges: int
    slots: int
    variant: str
    native: Any = field(compare=False, repr=False)
    attend: Loaded = field(compare=False, repr=False)
    merge: Loaded = field(compare=False, repr=False)
    memo: _Memo = field(default_factory=_Memo, compare=False, repr=False)

    def bind(self, image: DeviceImage) -> Any:
        """Return the native plan over an image's memory; made by the first run of a plan."""
        bound = self.memo.bound
        if bound is None or bound.image is not image:
            at = [image[name].data_ptr() if name in image else 0 for name in _ARRAYS]
            plan = self.native.GpuPlan(
                self.attend.native_driver, self.attend.native, self.merge.native,
                problem_of(self.native, self.problem), self.problem.kv.order == "HND", self.tile_q,
                self.native.GpuArrays(at), self.items, self.merges, self.slots,
            )  # fmt: skip
            bound = self.memo.bound = Bound(image, plan)
        return bound.plan


@lru_cache(maxsize=256)
def problem_of(native: Any, problem: AttentionProblem) -> Any:
    """Return the facts of a problem as native code takes them."""
    p = problem
    return native.problem(
        DTYPES[p.q_dtype], DTYPES[p.kv_dtype], DTYPES[p.o_dtype], p.num_qo_heads, p.num_kv_heads,
        p.head_dim_qk, p.head_dim_vo, p.page_size or 0, MASKS[p.mask], POSITIONS[p.pos_encoding],
        p.window_left, p.sm_scale, p.logits_soft_cap,
    )  # fmt: skip


@lru_cache(maxsize=64)
def tables_of(native: Any, problem: AttentionProblem) -> dict[str, torch.Tensor]:
    """Return the constant tables of a position encoding, as int32 arrays of a plan image."""
    if problem.pos_encoding is PosEncoding.ROPE_LLAMA:
        turns = torch.empty(problem.head_dim_qk // 2, dtype=torch.float64, device="cpu")
        native.rope_turns(problem.head_dim_qk, problem.rope_theta, problem.rope_scale, turns.data_ptr())
        return {TURNS: turns.view(torch.int32)}
    if problem.pos_encoding is PosEncoding.ALIBI:
        slopes = torch.empty(problem.num_qo_heads, dtype=torch.float32, device="cpu")
        native.alibi_slopes(problem.num_qo_heads, slopes.data_ptr())
        return {SLOPES: slopes.view(torch.int32)}
    return {}


def _stream(tensor: torch.Tensor) -> int:
    """Return the raw current stream of a tensor's device; 0 where there is none."""
    if not tensor.is_cuda:
        return 0
    return torch._C._cuda_getCurrentRawStream(tensor.device.index)


def run(launch: GpuLaunch, image: DeviceImage, io: RunIO) -> None:
    """Enqueue a plan on the current stream of q's device. Writes ``io.out``, ``io.lse`` and ``io.workspace``.

    May be captured: allocates nothing, unless ``out`` or ``lse`` are strided as no kernel writes them.

    Raises:
        RuntimeError: The driver refused the launch; the text is its own.
        ValueError: A tensor has no memory.
    """
    out, lse = io.out, io.lse
    if (out.stride(2) != 1 and out.shape[2] > 1) or (lse is not None and not lse.is_contiguous()):
        run_strided(lambda dense: run(launch, image, dense), io)
        return
    q, k, v = io.q, io.k, io.v
    plan = launch.bind(image)
    tensors = (
        _stream(q), *pointers(io), q.stride(), k.stride(), v.stride(), out.stride(),
    )  # fmt: skip
    if neutral(io.q_scale, io.k_scale, io.v_scale):
        error = plan.run(*tensors)
    else:
        floats, scale_pointers = scales_of(io.q_scale, io.k_scale, io.v_scale)
        error = plan.run_scaled(*tensors, *floats, *scale_pointers)
    if error:
        raise _refused(launch.attend, error)


def _refused(kernel: Loaded, error: int) -> RuntimeError:
    said = kernel.driver.error_text(error)
    return RuntimeError(
        needs(f"fa2: launch of {kernel.variant.name}", "the driver's consent", said, "fa2.launch")
    )


def append(native: Any, kernel: Loaded, candidate: str, problem: AttentionProblem, io: AppendIO) -> None:
    """Write rows into a paged cache, on the current stream.

    Raises:
        Unsupported: A head of the cache is not dense.
        RuntimeError: The driver refused the launch.
    """
    key, value = append_rows(candidate, io)
    error = native.gpu_append(
        append_params(native, problem, key, value, io), kernel.native_driver, kernel.native,
        kernel.variant.rows, _stream(io.k),
    )  # fmt: skip
    if error:
        raise _refused(kernel, error)


def sample(native: Any, kernel: Loaded, io: SamplingIO) -> None:
    """Take an acceptance step on the current stream: a block per request. May be captured.

    Raises:
        RuntimeError: The driver refused the launch.
    """
    error = native.gpu_sample(
        sample_params(native, io), kernel.native_driver, kernel.native, io.tokens.shape[0], _stream(io.tokens)
    )
    if error:
        raise _refused(kernel, error)
