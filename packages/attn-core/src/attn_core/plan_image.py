"""Which index arrays a plan puts on the device."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .arena import Layout
from .arguments import MaskBits
from .backend import PlanResult
from .batch import HostBatch
from .query import GraphLimits


def index_parts(batch: HostBatch, mask: MaskBits | None, result: PlanResult) -> dict[str, torch.Tensor]:
    """Index arrays by image name. Page indices come last: under capture only they may be shorter."""
    parts = {"qo_indptr": batch.qo_indptr, "kv_indptr": batch.kv_indptr, "kv_len": batch.kv_len}
    if batch.kv_last_page_len is not None:
        parts["kv_last_page_len"] = batch.kv_last_page_len
    if mask is not None:
        parts["mask_indptr"] = mask.indptr
    parts.update(result.image)
    if batch.kv_indices is not None:
        parts["kv_indices"] = batch.kv_indices
    return parts


def captured_layout(parts: Mapping[str, torch.Tensor], limits: GraphLimits) -> Layout:
    """Return the sizes that a captured wrapper keeps: page indices at capacity, the rest as they are."""
    return tuple(
        (name, limits.max_pages if name == "kv_indices" else part.numel()) for name, part in parts.items()
    )
