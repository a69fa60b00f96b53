"""Keyword arguments of ``run()`` beside ``return_lse``, which decides what it returns."""

from __future__ import annotations

from typing import TypedDict

import torch

from .cache_view import CacheView

Pair = tuple[torch.Tensor, torch.Tensor]
Result = torch.Tensor | Pair
KVCache = Pair | torch.Tensor | CacheView


class RaggedRun(TypedDict, total=False):
    """Those of the ragged wrapper; see its ``run()``."""

    q_scale: float | torch.Tensor | None
    k_scale: float | torch.Tensor | None
    v_scale: float | torch.Tensor | None
    o_scale: float | torch.Tensor | None
    out: torch.Tensor | None
    lse: torch.Tensor | None
    enable_pdl: bool | None
    kv_cache_sf: object | None


class PagedRun(TypedDict, total=False):
    """Those of both paged wrappers; see their ``run()``."""

    q_scale: float | torch.Tensor | None
    k_scale: float | torch.Tensor | None
    v_scale: float | torch.Tensor | None
    out: torch.Tensor | None
    lse: torch.Tensor | None
    enable_pdl: bool | None
    window_left: int | None
    sinks: torch.Tensor | None
    kv_cache_sf: object | None
    skip_softmax_threshold_scale_factor: float | None


class DecodeRun(PagedRun, total=False):
    """Those of the decode wrapper."""

    q_len_per_req: int | None


class PrefillRun(PagedRun, total=False):
    """Those of the paged prefill wrapper."""

    use_fp16_softmax: bool | None
    uses_spcompress: bool | None
