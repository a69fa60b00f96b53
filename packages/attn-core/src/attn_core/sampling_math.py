"""The acceptance step in plain torch: what every backend's result is compared with, bit for bit.

Meaning and guarantees are those of :func:`attn_core.sampling.chain_speculative_sampling`.
"""

from __future__ import annotations

import torch

from .backend import SamplingIO
from .philox import philox4x32, uniform53

PAD = -1
# Weights are scaled so that the largest of a row has this many bits in front of the point ...
_WEIGHT_BITS = 40
# ... which keeps a row's sum in int64 for this many of them.
MAX_VOCAB = 2**22
_FLOAT32_BIAS = 127
# Rows that nowhere reach 2**-80 are scaled as if they did: the scale itself has to be a float32.
_MIN_EXPONENT = -80
_SMALLEST = 2.0 ** (_MIN_EXPONENT + 1 - _WEIGHT_BITS)  # the smallest weight that is not truncated to 0 then


def sample(io: SamplingIO) -> None:
    """Take one acceptance step: fills ``io.tokens``, adds to the counters."""
    ids, (batch_size, n, vocab_size) = io.draft_token_ids, io.draft_probs.shape
    is_draft = ((ids >= 0) & (ids < vocab_size)).cumprod(1).bool()
    u_accept, u_token = uniforms(io.seed, io.offset, batch_size, n + 1)
    passed = is_draft & _passes(
        io.draft_probs, io.target_probs, ids.clamp(0, vocab_size - 1), u_accept[:, :n]
    )
    emitted = passed.cumprod(1).sum(1)
    rejected = emitted < is_draft.sum(1)
    weights = _weights(io.draft_probs, io.target_probs, emitted, rejected)
    token = _draw(weights, u_token.gather(1, emitted[:, None]))

    position = torch.arange(n + 1, device=ids.device)
    tokens = torch.nn.functional.pad(ids, (0, 1)).masked_fill_(position >= emitted[:, None], PAD)
    io.tokens.copy_(torch.where(position == emitted[:, None], token[:, None], tokens))
    io.accepted.add_(passed.sum(1))
    io.emitted.add_(emitted)


def _passes(
    draft_probs: torch.Tensor, target_probs: torch.Tensor, ids: torch.Tensor, u: torch.Tensor
) -> torch.Tensor:
    """Test every draft on its own, ``[batch_size, n]``. NaN, infinite and negative numbers fail."""
    q = draft_probs.gather(2, ids[..., None]).squeeze(2).to(torch.float64)
    p = target_probs[:, : ids.shape[1]].gather(2, ids[..., None]).squeeze(2).to(torch.float64)
    usable = (q >= 0) & (p > 0) & (p < float("inf"))
    # The second term is implied where u < 1 and nothing rounds or underflows; it is what must hold.
    return usable & ((u * q < p) | (q <= p))


def _weights(
    draft_probs: torch.Tensor, target_probs: torch.Tensor, position: torch.Tensor, rejected: torch.Tensor
) -> torch.Tensor:
    """Return ``[batch_size, vocab_size]``: what each last token is drawn from, zero if none can be."""
    rows = torch.arange(position.numel(), device=position.device)
    weights = target = target_probs[rows, position].to(torch.float32)
    drawable = _is_law(target)
    if draft_probs.shape[1] > 0:
        draft = draft_probs[rows, position.clamp(max=draft_probs.shape[1] - 1)].to(torch.float32)
        drawable &= _is_law(draft) | ~rejected
        residual = torch.sub(target, draft, out=draft).clamp_(min=0)
        use_residual = rejected & (residual.amax(1) >= _SMALLEST)
        weights = torch.where(use_residual[:, None], residual, target)
    return weights.masked_fill_(~drawable[:, None], 0.0)


def _is_law(rows: torch.Tensor) -> torch.Tensor:
    """Whether all numbers of a row are finite and not negative (NaN makes every comparison false)."""
    low, high = torch.aminmax(rows, dim=1)
    return (low >= 0) & (high < float("inf"))


def _draw(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Draw one index per row: the first whose running sum exceeds ``u`` ``[rows, 1]`` times the total.

    That is never an index of weight 0; a row of zeros gives -1.
    """
    running = _fixed_point(weights).cumsum_(1)
    total = running[:, -1:].contiguous()
    # u is at most 1 - 2**-53, so the product stays below the total also where both are rounded.
    threshold = (u * total.to(torch.float64)).to(torch.int64)
    return torch.searchsorted(running, threshold, right=True).masked_fill_(total == 0, PAD).squeeze(1)


def _fixed_point(weights: torch.Tensor) -> torch.Tensor:
    """Scale each row by a power of two and truncate to integers below ``2**_WEIGHT_BITS``.

    Overwrites its input. Sums of integers do not depend on their order. With them the draw is reproducible on
    and across devices, which a floating-point scan is not. The scale is put together from exponent bits, so
    it too is exact.
    """
    exponent = (weights.amax(1, keepdim=True).view(torch.int32) >> 23) - _FLOAT32_BIAS
    scale_exponent = _WEIGHT_BITS - 1 - exponent.clamp_(min=_MIN_EXPONENT)
    scale = ((scale_exponent + _FLOAT32_BIAS) << 23).view(torch.float32)
    return weights.mul_(scale).to(torch.int64)


def uniforms(
    seed: torch.Tensor, offset: torch.Tensor, rows: int, positions: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two float64 uniforms in [0, 1) for each row and position, ``[rows, positions]`` each.

    The counter is (offset, row, position + 1). Torch's and FlashInfer's own kernels have 0 in the last word,
    so a seed used there too gives other numbers here.
    """
    row = torch.arange(rows, device=seed.device)[:, None]
    if seed.numel() > 1:
        row = torch.zeros_like(row)  # a seed per request replaces the row number
    position = torch.arange(1, positions + 1, device=seed.device)
    offset = offset[:, None]
    counter = (offset & 0xFFFFFFFF, (offset >> 32) & 0xFFFFFFFF, row, position)
    words = philox4x32(counter, seed[:, None])
    return uniform53(words[0], words[1]), uniform53(words[2], words[3])
