"""Traced functions whose arguments are not yet those of an operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from attn_core import page
from attn_core.cache_view import CacheView, unpack
from attn_core.errors import needs
from attn_core.problem import check_kv_order
from attn_core.tracing import Scale

Tensor = torch.Tensor
Calls = Mapping[str, Callable[..., Any]]


def split_scales(scales: tuple[Scale, Scale, Scale]) -> tuple[Any, ...]:
    """Return three optional tensors and three factors: an operator's argument has one type."""
    tensors = [s if isinstance(s, Tensor) else None for s in scales]
    factors = [1.0 if s is None or isinstance(s, Tensor) else float(s) for s in scales]
    return (*tensors, *factors)


def handed_over(found: Any, return_lse: bool, out: Tensor | None, lse: Tensor | None) -> Any:
    """Return the result of a run; a caller's ``out`` or ``lse`` is filled by ``copy_``."""
    made, sums = found if return_lse else (found, None)
    result = made if out is None else out.copy_(made)
    if sums is None:
        return result
    return result, sums if lse is None else lse.copy_(sums)


def run_mla(
    ops: Calls, out: Tensor | None, lse: Tensor | None, handle: int, q_nope: Tensor, q_pe: Tensor,
    ckv_cache: Tensor, kpe_cache: Tensor, o_dtype: torch.dtype, return_lse: bool, base_e: bool,
) -> Any:  # fmt: skip
    """Trace a run of latent attention."""
    found = ops["run_mla"](handle, q_nope, q_pe, ckv_cache, kpe_cache, o_dtype, return_lse, base_e)
    return handed_over(found, return_lse, out, lse)


def append(
    ops: Calls, key: Tensor, value: Tensor, batch_indices: Tensor, positions: Tensor, cache: Any,
    kv_indices: Tensor, kv_indptr: Tensor, kv_last_page_len: Tensor, kv_layout: str, backend: str,
) -> None:  # fmt: skip
    """Trace an append: one operator for one allocation, two for a pair.

    Two tensors that one operator writes may be views of one allocation; torch would then copy a whole cache,
    or write to the wrong place.
    """
    check_kv_order(kv_layout)
    index = (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len, kv_layout, backend)
    if isinstance(cache, CacheView):
        ops["append_paged_kv_cache"](
            key, value, cache.storage, list(cache.k_path), list(cache.v_path), *index
        )
        return
    if isinstance(cache, Tensor):
        unpack(cache, kv_layout)
        ops["append_paged_kv_cache"](key, value, cache, [1, 0], [1, 1], *index)
        return
    k, v = unpack(cache, kv_layout)
    # What is wrong with the values only must be found before the keys are written.
    page.check_rows(key, value, k, v, kv_layout)
    ops["append_to_one"](key, k, v.shape[0], *index)
    ops["append_to_one"](value, v, k.shape[0], *index)


def append_latent(
    ops: Calls, ckv: Tensor, kpe: Tensor, batch_indices: Tensor, positions: Tensor, ckv_cache: Tensor,
    kpe_cache: Tensor, kv_indices: Tensor, kv_indptr: Tensor, kv_last_page_len: Tensor, backend: str,
) -> None:  # fmt: skip
    """Trace an append to a latent cache: one operator for each of its parts, as allocated."""
    index = (batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len, "NHD", backend)
    as_heads = (ckv.unsqueeze(1), kpe.unsqueeze(1), ckv_cache.unsqueeze(2), kpe_cache.unsqueeze(2))
    page.check_rows(*as_heads, "NHD")
    ops["append_to_one"](ckv, ckv_cache, kpe_cache.shape[0], *index)
    ops["append_to_one"](kpe, kpe_cache, ckv_cache.shape[0], *index)


def sample(
    ops: Calls, draft_probs: Tensor, draft_token_ids: Tensor, target_probs: Tensor, accepted: Tensor | None,
    emitted: Tensor | None, deterministic: bool, generator: object, seed: Any, offset: Any,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Trace the acceptance step. Its random numbers must be a function of arguments."""
    if generator is not None or seed is None or offset is None:
        got = "neither" if generator is None else "a generator"
        what = "chain_speculative_sampling under torch.compile"
        raise ValueError(needs(what, "seed and offset (tensors or ints)", got, "compile.seed"))
    if not isinstance(seed, Tensor) and not isinstance(offset, Tensor):
        seed = torch.full((1,), _signed(seed), dtype=torch.int64, device=draft_probs.device)
        offset = torch.full((1,), _signed(offset), dtype=torch.int64, device=draft_probs.device)
    if not isinstance(seed, Tensor) or not isinstance(offset, Tensor):
        wanted = "both tensors or both ints"
        raise ValueError(needs("seed and offset", wanted, "one of each", "core.seed"))
    tokens, a, e = ops["chain_speculative_sampling"](
        draft_probs, draft_token_ids, target_probs, accepted, emitted, deterministic, backend, seed, offset
    )
    return (
        tokens,
        a if accepted is None else accepted.copy_(a),
        e if emitted is None else emitted.copy_(e),
    )


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def batch_indices_positions(
    ops: Calls, append_indptr: Tensor, seq_lens: Tensor, nnz: int, batch_indices: Tensor | None,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Trace ``get_batch_indices_positions``; tensors given are filled by a copy."""
    b, p = ops["get_batch_indices_positions"](append_indptr, seq_lens, nnz)
    return (
        b if batch_indices is None else batch_indices.copy_(b),
        p if positions is None else positions.copy_(p),
    )


def single(
    ops: Calls, scales: tuple[Scale, Scale, Scale], q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> Any:
    """Trace attention of one request."""
    return ops["single"](q, k, v, *split_scales(scales), *rest)


def merge(name: str) -> Callable[..., Any]:
    """Return the traced form of a merge: as its operator, but never with a gradient silently dropped."""

    def call(ops: Calls, *states: Tensor) -> Any:
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in states):
            what = f"{name} under torch.compile"
            raise ValueError(needs(what, "states without requires_grad", "one with it", "compile.grad"))
        return ops[name](*states)

    return call


CALLS: Mapping[str, Callable[..., Any]] = {
    "append_paged_kv_cache": append,
    "append_paged_mla_kv_cache": append_latent,
    "chain_speculative_sampling": sample,
    "get_batch_indices_positions": batch_indices_positions,
    "run_mla": run_mla,
    "single": single,
    "merge_state": merge("merge_state"),
    "merge_states": merge("merge_states"),
    "merge_state_in_place": merge("merge_state_in_place"),
}
"""By the name of the function; one that is not here becomes the operator of its name."""
