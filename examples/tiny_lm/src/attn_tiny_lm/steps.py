"""The forward passes over a paged cache, as plain functions of tensors.

Each one appends the keys and values of its tokens and then attends, block by block, with the plan that the
wrapper holds. None of them plans, allocates pages or reads a value back from the device, so a step can be
captured in a graph or compiled as a whole. All blocks share one allocation, which a compiled step takes as it
is: a block's part of it is named by a CacheView, not sliced.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from attn_core import CacheView, append_paged_kv_cache
from attn_tiny_lm.model import TinyLM
from attn_tiny_lm.paged import StepCache


class Attention(Protocol):
    """What a step needs of a wrapper: attend `q` to one block's pages."""

    def run(self, q: Tensor, paged_kv_cache: CacheView) -> Tensor | tuple[Tensor, Tensor]:
        """Return `[rows, num_qo_heads, head_dim]`."""
        ...


def paged_forward(
    model: TinyLM, tokens: Tensor, positions: Tensor, wrapper: Attention, cache: StepCache
) -> Tensor:
    """Run every block over new tokens, writing their keys and values into `cache.pool`.

    Args:
        model: the model.
        tokens: `[rows]` integer, the new tokens, request after request.
        positions: `[rows]` integer, position of each in its request.
        wrapper: planned for a page table in which the new tokens already count.
        cache: the same page table, and the pool.

    Returns:
        The residual stream `[rows, d_model]` after the last block.
    """
    cos_sin = model.rope[positions]
    x: Tensor = model.embed(tokens)
    for layer, block in enumerate(model.layers()):
        pages = CacheView.split(cache.pool, 1, lead=(0, layer))
        q, k, v = block.qkv(x, cos_sin)
        append_paged_kv_cache(
            k,
            v,
            cache.batch_indices,
            positions,
            pages,
            cache.kv_indices,
            cache.kv_indptr,
            cache.kv_last_page_len,
        )
        attn_out = wrapper.run(q, pages)
        assert isinstance(attn_out, Tensor)  # a pair only when the LSE is asked for
        x = block.finish(x, attn_out)
    return x


def prefill_step(
    model: TinyLM, tokens: Tensor, positions: Tensor, last_rows: Tensor, wrapper: Attention, cache: StepCache
) -> Tensor:
    """Read prompts: logits `[batch, vocab_size]` after each request's last row, `last_rows` `[batch]`."""
    return model.logits(paged_forward(model, tokens, positions, wrapper, cache)[last_rows])


def decode_step(
    model: TinyLM, tokens: Tensor, positions: Tensor, wrapper: Attention, cache: StepCache
) -> Tensor:
    """Read one token per request, `[batch]`: logits `[batch, vocab_size]` for the next one."""
    return model.logits(paged_forward(model, tokens, positions, wrapper, cache))


def verify_step(
    model: TinyLM, tokens: Tensor, positions: Tensor, wrapper: Attention, cache: StepCache
) -> Tensor:
    """Read each request's last token and its n drafts at once.

    Args:
        model: the model.
        tokens: `[batch, n + 1]`, the last token and then the drafts.
        positions: `[batch * (n + 1)]`.
        wrapper: planned with `q_len_per_req = n + 1`.
        cache: see `paged_forward`.

    Returns:
        Logits `[batch, n + 1, vocab_size]`: row i judges draft i, the last row gives one token more.
    """
    x = paged_forward(model, tokens.flatten(), positions, wrapper, cache)
    return model.logits(x).view(*tokens.shape, -1)
