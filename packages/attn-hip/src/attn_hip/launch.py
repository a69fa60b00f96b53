"""Hands the tensors of one run to the native kernels of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

import torch

from attn_core.backend import AppendIO, DeviceImage, RunIO, SamplingIO
from attn_core.errors import Unsupported, needs
from attn_core.problem import AttentionProblem, MaskMode, PosEncoding
from attn_core.reasons import Reason

from . import codes

_ITEM_WORDS = 8
DTYPES = {
    torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float8_e4m3fn: 3, torch.float8_e4m3fnuz: 4,
    torch.float8_e5m2: 6, torch.float8_e5m2fnuz: 7,
}  # fmt: skip
PROBABILITIES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 5}
MASKS = {MaskMode.NONE: 0, MaskMode.CAUSAL: 1, MaskMode.CUSTOM: 2}
POSITIONS = {PosEncoding.NONE: 0, PosEncoding.ROPE_LLAMA: 1, PosEncoding.ALIBI: 2}


@dataclass(frozen=True, slots=True)
class Launch:
    """What run() needs besides memory.

    Attributes:
        problem: What to compute.
        tile_q: Packed rows per tile.
        slots: Partial results that the workspace holds: ``[slots, tile_q, head_dim_vo]`` outputs, then
            ``[slots, tile_q]`` log-sum-exps, both float32.
        kernel: The native kernel of the problem.
    """

    problem: AttentionProblem
    tile_q: int
    slots: int
    kernel: Any = field(compare=False, repr=False)


@lru_cache(maxsize=256)
def kernel_of(native: Any, problem: AttentionProblem) -> Any:
    """Return the native kernel of a problem."""
    p = problem
    return native.Kernel(
        DTYPES[p.q_dtype], DTYPES[p.kv_dtype], DTYPES[p.o_dtype], p.num_qo_heads, p.num_kv_heads,
        p.head_dim_qk, p.head_dim_vo, p.page_size or 0, p.kv.order == "HND", MASKS[p.mask],
        POSITIONS[p.pos_encoding], p.window_left, p.sm_scale, p.logits_soft_cap, p.rope_theta, p.rope_scale,
    )  # fmt: skip


def run(launch: Launch, image: DeviceImage, io: RunIO) -> None:
    """Run a plan. Writes ``io.out`` and ``io.lse``; uses ``io.workspace``.

    Takes torch's number of threads, with the caller among them; releases the interpreter's lock meanwhile.

    Raises:
        ValueError: A tensor has no memory.
    """
    out, lse = io.out, io.lse
    if (out.stride(2) != 1 and out.shape[2] > 1) or (lse is not None and not lse.is_contiguous()):
        run_strided(lambda dense: run(launch, image, dense), io)
        return
    q, k, v = io.q, io.k, io.v
    floats, scale_pointers = _NEUTRAL
    q_scale, k_scale, v_scale = io.q_scale, io.k_scale, io.v_scale
    if not neutral(q_scale, k_scale, v_scale):
        floats, scale_pointers = scales_of(q_scale, k_scale, v_scale)
    launch.kernel.run(
        arrays_of(launch, image), *pointers(io), q.stride(), k.stride(), v.stride(), out.stride(),
        *floats, *scale_pointers, torch.get_num_threads(),
    )  # fmt: skip


_ARRAYS = (
    "qo_indptr", "kv_indptr", "kv_indices", "kv_len", "custom_mask", "mask_indptr",
    "items", "merges", "counts",
)  # fmt: skip


def arrays_of(launch: Launch, image: DeviceImage) -> Any:
    """Return where a plan's index arrays are, as native code takes them."""
    at = [image[name].data_ptr() if name in image else 0 for name in _ARRAYS]
    capacity = (image[name].shape[0] // _ITEM_WORDS for name in ("items", "merges"))
    return launch.kernel.arrays(at, *capacity, launch.slots, launch.tile_q)


def pointers(io: RunIO) -> tuple[int, int, int, int, int, int]:
    """Return where q, k, v, out, lse and workspace are; 0 for what there is none of.

    Raises:
        ValueError: A tensor has no memory.
    """
    lse, workspace = io.lse, io.workspace
    found = (
        io.q.data_ptr(), io.k.data_ptr(), io.v.data_ptr(), io.out.data_ptr(),
        0 if lse is None else lse.data_ptr(), 0 if workspace is None else workspace.data_ptr(),
    )  # fmt: skip
    if 0 in found:
        check_memory(io, "q", "k", "v", "out", "lse", "workspace")
    return found


def check_memory(io: object, *names: str) -> None:
    """Raise ValueError for a tensor with elements and no memory behind them: a kernel would fault."""
    for name in names:
        tensor = getattr(io, name)
        if tensor is not None and tensor.numel() and not tensor.data_ptr():
            got = "none: its storage was freed, or it is a fake tensor"
            raise ValueError(needs(name, "memory behind its elements", got, "fa2.memory"))


Scales = tuple[list[float], list[int]]
_NEUTRAL: Scales = ([1.0, 1.0, 1.0], [0, 0, 0])


def neutral(*scales: float | torch.Tensor) -> bool:
    """Say whether no scale changes anything, as far as is known without reading a tensor."""
    return all(type(scale) is float and scale == 1.0 for scale in scales)


def scales_of(*scales: float | torch.Tensor) -> Scales:
    """Return each scale as a number and a pointer; one of them is neutral.

    A tensor that the caller holds is read by the kernel, when it runs; its type was settled by the core.
    """
    floats, pointers = [1.0] * len(scales), [0] * len(scales)
    for n, scale in enumerate(scales):
        if not isinstance(scale, torch.Tensor):
            floats[n] = scale
        elif scale.dtype is torch.float32:
            pointers[n] = scale.data_ptr()
        else:
            floats[n] = float(scale)
    return floats, pointers


@torch.no_grad()
def run_strided(run_dense: Callable[[RunIO], None], io: RunIO) -> None:
    """Run into dense memory and copy: kernels write a head in one piece, and lse without gaps."""
    out = torch.empty_like(io.out, memory_format=torch.contiguous_format)
    lse = None if io.lse is None else torch.empty_like(io.lse, memory_format=torch.contiguous_format)
    run_dense(RunIO(io.q, io.k, io.v, out, lse, io.workspace, io.q_scale, io.k_scale, io.v_scale))
    io.out.copy_(out)
    if io.lse is not None and lse is not None:
        io.lse.copy_(lse)


def append(native: Any, candidate: str, problem: AttentionProblem, io: AppendIO) -> None:
    """Write rows into a paged cache.

    Raises:
        Unsupported: A head of the cache is not dense.
    """
    rows = append_rows(candidate, io)
    native.append(append_params(native, problem, *rows, io), torch.get_num_threads())


def append_rows(candidate: str, io: AppendIO) -> tuple[torch.Tensor, torch.Tensor]:
    """Return key and value with dense heads.

    Raises:
        Unsupported: A head of the cache is not dense.
    """
    for cache in (io.k, io.v):
        if cache.stride(3) != 1 and cache.shape[3] > 1:
            raise Unsupported(Reason(codes.CACHE_STRIDE, candidate, 1, cache.stride(3)))
    key, value = (rows if rows.stride(2) == 1 else rows.contiguous() for rows in (io.key, io.value))
    return key, value


def append_params(
    native: Any, problem: AttentionProblem, key: torch.Tensor, value: torch.Tensor, io: AppendIO
) -> Any:
    """Return the parameters of an append as native code takes them."""
    k, v = io.k, io.v
    check_memory(io, *(field.name for field in fields(io)))
    return native.Append(
        key.data_ptr(), value.data_ptr(), k.data_ptr(), v.data_ptr(),
        io.batch_indices.data_ptr(), io.positions.data_ptr(),
        io.kv_indices.data_ptr(), io.kv_indptr.data_ptr(),
        key.stride(), value.stride(), k.stride(), v.stride(), problem.kv.order == "HND",
        key.shape[0], min(k.shape[0], v.shape[0]), io.kv_indptr.numel() - 1, io.kv_indices.numel(),
        DTYPES[k.dtype], key.shape[1], key.shape[2], value.shape[2], problem.page_size or 0,
    )  # fmt: skip


def sample(native: Any, io: SamplingIO) -> None:
    """Take an acceptance step; requests go to torch's number of threads."""
    native.sample(sample_params(native, io), io.tokens.shape[0], torch.get_num_threads())


def sample_params(native: Any, io: SamplingIO) -> Any:
    """Return the parameters of an acceptance step as native code takes them."""
    draft, target = io.draft_probs, io.target_probs
    check_memory(io, *(field.name for field in fields(io)))
    return native.Sample(
        draft.data_ptr(), target.data_ptr(), io.draft_token_ids.data_ptr(), io.seed.data_ptr(),
        io.offset.data_ptr(), io.tokens.data_ptr(), io.accepted.data_ptr(), io.emitted.data_ptr(),
        draft.stride(), target.stride(), io.accepted.stride(0), io.emitted.stride(0),
        draft.shape[2], draft.shape[1], io.seed.numel(), io.offset.numel(),
        PROBABILITIES[draft.dtype], PROBABILITIES[target.dtype],
    )  # fmt: skip
