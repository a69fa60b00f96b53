"""Checks of the buffers that a CUDA-graph wrapper is constructed with."""

from __future__ import annotations

from itertools import pairwise

import torch

from .checking import dense, extent, flag, whole
from .errors import needs
from .planner import GraphBuffers

_PLUS_1 = "batch_size + 1"


def decode_buffers(
    use_cuda_graph: bool,
    device: torch.device | None,
    indptr: torch.Tensor | None,
    indices: torch.Tensor | None,
    last_page_len: torch.Tensor | None,
    max_seq_len: int | None,
) -> GraphBuffers | None:
    """Return the buffers of a decode wrapper in graph mode, or None for an eager one.

    Raises:
        TypeError: ``max_seq_len`` is not an int.
        ValueError: A buffer is missing or unfit, two share memory, or ``max_seq_len`` comes without
            graph mode.
    """
    if max_seq_len is not None and (
        whole("max_seq_len", max_seq_len, "core.max-seq-len") < 1
        or not flag("use_cuda_graph", use_cuda_graph)
    ):
        want = "use_cuda_graph=True and at least 1"
        raise ValueError(needs("max_seq_len", want, f"{use_cuda_graph}, {max_seq_len}", "core.max-seq-len"))
    if not flag("use_cuda_graph", use_cuda_graph):
        return None
    last = _buffer("paged_kv_last_page_len_buffer", last_page_len, device)
    batch = last.numel()
    bound = {
        # Wrapper-owned, so that its address holds from here on: a graph may capture before any verify.
        "qo_indptr": torch.arange(batch + 1, dtype=torch.int32, device=device),
        "kv_indptr": _buffer("paged_kv_indptr_buffer", indptr, device, batch + 1, said=_PLUS_1),
        "kv_indices": _buffer("paged_kv_indices_buffer", indices, device),
        "kv_last_page_len": last,
    }
    return _apart(GraphBuffers(batch, bound["kv_indices"].numel(), bound, max_seq_len))


def paged_buffers(
    use_cuda_graph: bool,
    device: torch.device | None,
    qo_indptr: torch.Tensor | None,
    indptr: torch.Tensor | None,
    indices: torch.Tensor | None,
    last_page_len: torch.Tensor | None,
    custom_mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
) -> GraphBuffers | None:
    """Return the buffers of a paged prefill wrapper in graph mode, or None for an eager one.

    Raises:
        ValueError: A buffer is missing or unfit, or two share memory.
    """
    if not flag("use_cuda_graph", use_cuda_graph):
        return None
    batch, bound = _rows("qo_indptr_buf", qo_indptr, "paged_kv_indptr_buf", indptr, device)
    bound |= {
        "kv_indices": _buffer("paged_kv_indices_buf", indices, device),
        "kv_last_page_len": _buffer("paged_kv_last_page_len_buf", last_page_len, device, batch),
        **_masks(custom_mask, mask_indptr, device, batch),
    }
    return _apart(GraphBuffers(batch, bound["kv_indices"].numel(), bound))


def latent_buffers(
    use_cuda_graph: bool,
    device: torch.device | None,
    qo_indptr: torch.Tensor | None,
    indptr: torch.Tensor | None,
    indices: torch.Tensor | None,
    kv_len: torch.Tensor | None,
) -> GraphBuffers | None:
    """Return the buffers of a latent-attention wrapper in graph mode, or None for an eager one.

    Raises:
        ValueError: A buffer is missing or unfit, or two share memory.
    """
    if not flag("use_cuda_graph", use_cuda_graph):
        return None
    batch, bound = _rows("qo_indptr", qo_indptr, "kv_indptr", indptr, device)
    bound |= {
        "kv_indices": _buffer("kv_indices", indices, device),
        "kv_len": _buffer("kv_len_arr", kv_len, device, batch),
    }
    return _apart(GraphBuffers(batch, bound["kv_indices"].numel(), bound))


def ragged_buffers(
    use_cuda_graph: bool,
    device: torch.device | None,
    qo_indptr: torch.Tensor | None,
    kv_indptr: torch.Tensor | None,
    custom_mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
) -> GraphBuffers | None:
    """Return the buffers of a ragged prefill wrapper in graph mode, or None for an eager one.

    Raises:
        ValueError: A buffer is missing or unfit, or two share memory.
    """
    if not flag("use_cuda_graph", use_cuda_graph):
        return None
    batch, bound = _rows("qo_indptr_buf", qo_indptr, "kv_indptr_buf", kv_indptr, device)
    bound |= _masks(custom_mask, mask_indptr, device, batch)
    return _apart(GraphBuffers(batch, None, bound))


def _rows(
    qo_name: str,
    qo_indptr: torch.Tensor | None,
    kv_name: str,
    kv_indptr: torch.Tensor | None,
    device: torch.device | None,
) -> tuple[int, dict[str, torch.Tensor]]:
    """Return the batch size, which the first buffer fixes, and both."""
    qo = _buffer(qo_name, qo_indptr, device)
    if qo.numel() == 0:
        raise ValueError(needs(qo_name, "batch size + 1 entries", 0, "core.graph-buffer"))
    kv = _buffer(kv_name, kv_indptr, device, qo.numel(), said=_PLUS_1)
    return qo.numel() - 1, {"qo_indptr": qo, "kv_indptr": kv}


def _masks(
    custom_mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    device: torch.device | None,
    batch: int,
) -> dict[str, torch.Tensor]:
    if custom_mask is None and mask_indptr is None:
        return {}
    return {
        "custom_mask": _buffer("custom_mask_buf", custom_mask, device, dtype=torch.uint8),
        "mask_indptr": _buffer("mask_indptr_buf", mask_indptr, device, batch + 1, said=_PLUS_1),
    }


def _apart(buffers: GraphBuffers) -> GraphBuffers:
    """Return buffers of which a plan writes none over another."""
    spans = sorted((*extent(buffer), name) for name, buffer in buffers.bound.items() if buffer.numel())
    for (_, end, first), (begin, _, second) in pairwise(spans):
        if begin < end:
            want = "graph buffers that share no memory"
            raise ValueError(needs(second, want, f"a place in that of {first}", "core.graph-buffer"))
    return buffers


def _buffer(
    name: str,
    buffer: torch.Tensor | None,
    device: torch.device | None,
    size: int | None = None,
    dtype: torch.dtype = torch.int32,
    said: str = "batch_size",
) -> torch.Tensor:
    if not isinstance(buffer, torch.Tensor):
        text = needs(name, "a tensor in CUDA-graph mode", type(buffer).__name__, "core.graph-buffer")
        raise ValueError(f"{text}; {name} should be a torch.Tensor in cudagraph mode")
    dense(name, buffer, "core.graph-buffer")
    if buffer.dtype is not dtype or buffer.ndim != 1 or not buffer.is_contiguous():
        got = f"{buffer.dtype}, shape {tuple(buffer.shape)}, strides {buffer.stride()}"
        raise ValueError(needs(name, f"a contiguous 1-D {dtype} tensor", got, "core.graph-buffer"))
    if device is not None and buffer.device != device:
        raise ValueError(
            needs(name, f"a tensor on {device}, as the workspace is", buffer.device, "core.device")
        )
    if size is not None and buffer.numel() != size:
        text = needs(name, f"{size} entries", buffer.numel(), "core.graph-buffer")
        raise ValueError(f"{text}; the length of {name} should be {said}")
    return buffer
