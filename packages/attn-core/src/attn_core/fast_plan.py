"""Upstream's ``fast_decode_plan``, the plan() that serving engines bind over a wrapper's own."""

from __future__ import annotations

import torch

from .checking import dense, size_of, whole
from .decode_paged import BatchDecodeWithPagedKVCacheWrapper
from .errors import NoPlan, needs
from .options import DecodeOptions, Dtype


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: Dtype | None = None,
    kv_data_type: Dtype | None = None,
    data_type: Dtype | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: torch.Tensor | None = None,
) -> None:
    """Plan a decode wrapper again without waiting for the device.

    All of ``plan()`` holds: every check, and that a failure changes nothing. In graph mode the
    wrapper's buffers are filled from the arguments; arguments that *are* the buffers are not copied.

    Args:
        self: A wrapper that has been planned before; the function is meant to be bound over its ``plan``
            or ``begin_forward`` with ``functools.partial``.
        indptr: As for ``plan()``, like all that follow but ``global_override_indptr_cpu``.
        indices: See there.
        last_page_len: See there. For page size 1 its values are known and not fetched.
        num_qo_heads: See there.
        num_kv_heads: See there.
        head_dim: See there.
        page_size: See there.
        pos_encoding_mode: See there.
        window_left: See there.
        logits_soft_cap: See there.
        q_data_type: See there.
        kv_data_type: See there.
        data_type: See there.
        sm_scale: See there.
        rope_scale: See there.
        rope_theta: See there.
        non_blocking: See there.
        fixed_split_size: See there.
        disable_split_kv: See there.
        q_len_per_req: See there.
        global_override_indptr_cpu: ``indptr`` on the host, at least ``batch_size + 1`` entries; spares
            fetching it.

    Raises:
        ValueError: The wrapper has no prior plan, or as ``plan()``.
    """
    if not isinstance(self, BatchDecodeWithPagedKVCacheWrapper):
        want = "a BatchDecodeWithPagedKVCacheWrapper"
        raise TypeError(needs("fast_decode_plan", want, type(self).__name__, "core.arguments"))
    if self._state is None:
        raise NoPlan(needs("fast_decode_plan", "a wrapper with a prior plan", "none", "core.no-plan"))
    batch = size_of("last_page_len", last_page_len)
    if global_override_indptr_cpu is not None:
        got = dense(
            "global_override_indptr_cpu", global_override_indptr_cpu, "core.index-type", "an int32 tensor"
        ).numel()
        if got < batch + 1:
            want = f"at least {batch + 1} entries"
            raise ValueError(needs("global_override_indptr_cpu", want, got, "core.indptr"))
        indptr = global_override_indptr_cpu[: batch + 1]
        if whole("page_size", page_size, "core.page-size") == 1 and last_page_len.device.type != "cpu":
            last_page_len = torch.ones(batch, dtype=torch.int32, device="cpu")
    options: DecodeOptions = {
        "pos_encoding_mode": pos_encoding_mode,
        "window_left": window_left,
        "logits_soft_cap": logits_soft_cap,
        "q_data_type": q_data_type,
        "kv_data_type": kv_data_type,
        "data_type": data_type,
        "sm_scale": sm_scale,
        "rope_scale": rope_scale,
        "rope_theta": rope_theta,
        "non_blocking": non_blocking,
        "fixed_split_size": fixed_split_size,
        "disable_split_kv": disable_split_kv,
        "q_len_per_req": q_len_per_req,
    }
    # The class's plan(): the instance's may be this function.
    self._plan_options(
        indptr, indices, last_page_len, (num_qo_heads, num_kv_heads), head_dim, page_size, options
    )
