"""What the paged and the ragged prefill wrappers share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .arguments import MaskBits, mask_bits
from .batch import HostBatch, first_true, to_host
from .checking import flag, flat, whole
from .errors import needs
from .item_mask import asks_items, item_bits
from .problem import MaskMode


def mask_mode(
    causal: bool, custom_mask: torch.Tensor | None, packed_custom_mask: torch.Tensor | None
) -> MaskMode:
    """Return the mask a plan asks for: a custom mask replaces causal."""
    causal = flag("causal", causal)
    if custom_mask is not None or packed_custom_mask is not None:
        return MaskMode.CUSTOM
    return MaskMode.CAUSAL if causal else MaskMode.NONE


def planned_mask(a: Mapping[str, Any], device: torch.device) -> MaskMode:
    """Return the mask a prefill plan asks for by its named arguments.

    Multi-item scoring replaces causal too; it is causal by itself.
    """
    mode = mask_mode(a["causal"], a["custom_mask"], a["packed_custom_mask"])
    return MaskMode.CUSTOM if asks_items(a, device) else mode


def masked_keys(a: Mapping[str, Any], batch: HostBatch, device: torch.device) -> MaskBits | None:
    """Return the bits of the mask a plan asks for, or None; see :func:`planned_mask`."""
    if a.get("prefix_len_ptr") is not None:
        return item_bits(a, batch, device)
    return mask_bits(a["custom_mask"], a["packed_custom_mask"], batch, device)


def check_lengths(
    batch: HostBatch,
    seq_lens_q: torch.Tensor | None,
    max_token_per_sequence: int | None,
    max_sequence_kv: int | None,
    device: torch.device,
) -> None:
    """Check what a caller states beside the metadata.

    Raises:
        TypeError: It is of the wrong type.
        ValueError: It contradicts the metadata.
    """
    shape = batch.shape
    for name, stated, actual in (
        ("max_token_per_sequence", max_token_per_sequence, shape.max_q_len),
        ("max_sequence_kv", max_sequence_kv, shape.max_kv_len),
    ):
        if stated is not None and whole(name, stated, "core.max-length") < actual:
            raise ValueError(
                needs(name, f"at least {actual}, the longest request", stated, "core.max-length")
            )
    if seq_lens_q is None:
        return
    given = to_host({"seq_lens_q": flat(seq_lens_q)}, device)["seq_lens_q"]
    q_len = batch.qo_indptr[1:] - batch.qo_indptr[:-1]
    if given.numel() < q_len.numel():
        want = f"at least batch size {q_len.numel()} entries"
        raise ValueError(needs("seq_lens_q", want, given.numel(), "core.seq-lens"))
    differs = given[: q_len.numel()] != q_len
    if bool(differs.any()):
        at = first_true(differs)
        want = f"{int(q_len[at])}, the rows in qo_indptr"
        raise ValueError(needs(f"seq_lens_q[{at}]", want, int(given[at]), "core.seq-lens"))
