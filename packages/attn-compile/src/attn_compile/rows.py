"""The operators of attn-core's own functions, one row each."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from attn_core import cascade, page, quantization, sampling, single, sinks, tracing
from attn_core.cache_view import CacheView
from attn_core.mla import BatchMLAPagedAttentionWrapper
from attn_core.op_table import Arg, OpRow, Role
from attn_core.state import PlanState
from attn_core.wrapper import AttentionWrapper

Tensor = torch.Tensor


def const(name: str, kind: str) -> Arg:
    """Return an argument that stays the same from plan to plan."""
    return Arg(name, kind, Role.CONST)


def run_operator(
    plan: PlanState | None, handle: int, q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor | None,
    k_scale: Tensor | None, v_scale: Tensor | None, q_factor: float, k_factor: float, v_factor: float,
    o_dtype: torch.dtype, return_lse: bool, out: Tensor, lse: Tensor | None,
) -> None:  # fmt: skip
    """Run a plan of a wrapper, None for the one in force."""
    wrapper = tracing.wrapper(handle)
    assert isinstance(wrapper, AttentionWrapper)
    scales = (
        q_factor if q_scale is None else q_scale,
        k_factor if k_scale is None else k_scale,
        v_factor if v_scale is None else v_scale,
    )
    tracing.run_plan(wrapper, plan, q, k, v, out, lse, return_lse, scales)


def _run_fresh(
    handle: int, q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor | None, k_scale: Tensor | None,
    v_scale: Tensor | None, q_factor: float, k_factor: float, v_factor: float, o_dtype: torch.dtype,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    return _attended(q, v, o_dtype, return_lse)


def _attended(
    q: Tensor, v: Tensor, o_dtype: torch.dtype | None, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Return an output and, if wanted, a log-sum-exp for every head of q, batched or not."""
    out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=o_dtype or q.dtype, device=q.device)
    return out, torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device) if return_lse else None


_SCALES = (
    Arg("q_scale", "Tensor?"), Arg("k_scale", "Tensor?"), Arg("v_scale", "Tensor?"),
    const("q_factor", "float"), const("k_factor", "float"), const("v_factor", "float"),
)  # fmt: skip
_RESULT = (Arg("out", "Tensor", Role.OUT), Arg("lse", "Tensor?", Role.OUT))

RUN = OpRow(
    "run",
    (
        const("handle", "SymInt"), Arg("q"), Arg("k"), Arg("v"), *_SCALES,
        const("o_dtype", "ScalarType"), const("return_lse", "bool"), *_RESULT,
    ),
    partial(run_operator, None), _run_fresh, into=True,
)  # fmt: skip
"""One run of a planned wrapper. The cache is read: declaring it written is what makes torch copy it, and, for
views, lose it."""


def _run_mla(
    handle: int, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, o_dtype: torch.dtype,
    return_lse: bool, base_e: bool, out: Tensor, lse: Tensor | None,
) -> None:  # fmt: skip
    wrapper = tracing.wrapper(handle)
    assert isinstance(wrapper, BatchMLAPagedAttentionWrapper)
    wrapper.run(q_nope, q_pe, ckv_cache, kpe_cache, out, lse, return_lse, return_lse_base_on_e=base_e)


RUN_MLA = OpRow(
    "run_mla",
    (
        const("handle", "SymInt"), Arg("q_nope"), Arg("q_pe"), Arg("ckv_cache"), Arg("kpe_cache"),
        const("o_dtype", "ScalarType"), const("return_lse", "bool"), const("base_e", "bool"), *_RESULT,
    ),
    _run_mla,
    lambda handle, q, _, ckv, __, o_dtype, return_lse, *___: _attended(q, ckv, o_dtype, return_lse),
    into=True,
)  # fmt: skip
"""One run of a planned latent-attention wrapper."""

ADD_SINK = OpRow(
    "add_sink",
    (Arg("out", "Tensor", Role.INOUT_SMALL), Arg("lse", "Tensor", Role.INOUT_SMALL), Arg("sink")),
    sinks.add_sink,
)
"""The part of a softmax that an attention sink takes; plain torch rounds it differently when compiled."""


def _single(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None,
    q_factor: float, k_factor: float, v_factor: float, o_dtype: torch.dtype | None, return_lse: bool,
    custom_mask: Tensor | None, packed_custom_mask: Tensor | None, kind: str, causal: bool, kv_layout: str,
    pos_encoding_mode: str, use_tensor_cores: bool, window_left: int, logits_soft_cap: float | None,
    sm_scale: float | None, rope_scale: float | None, rope_theta: float | None, backend: str,
) -> Any:  # fmt: skip
    tensors, factors = (q_scale, k_scale, v_scale), (q_factor, k_factor, v_factor)
    qs, ks, vs = (f if s is None else s for s, f in zip(tensors, factors, strict=True))
    if kind == "decode":
        return single.single_decode_with_kv_cache(
            q, k, v, kv_layout, pos_encoding_mode, use_tensor_cores, qs, ks, vs, window_left, logits_soft_cap,
            sm_scale, rope_scale, rope_theta, return_lse,
        )  # fmt: skip
    return single.single_prefill_with_kv_cache(
        q, k, v, None, None, None, o_dtype, custom_mask, packed_custom_mask, causal, kv_layout,
        pos_encoding_mode, False, sm_scale, window_left, logits_soft_cap, rope_scale, rope_theta, backend,
        return_lse, None, ks, vs,
    )  # fmt: skip


def _single_fresh(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None,
    q_factor: float, k_factor: float, v_factor: float, o_dtype: torch.dtype | None, return_lse: bool,
    *rest: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    return _attended(q, v, o_dtype, return_lse)


SINGLE = OpRow(
    "single",
    (
        Arg("q"), Arg("k"), Arg("v"), *_SCALES,
        const("o_dtype", "ScalarType?"), const("return_lse", "bool"),
        Arg("custom_mask", "Tensor?"), Arg("packed_custom_mask", "Tensor?"), const("kind", "str"),
        const("causal", "bool"), const("kv_layout", "str"), const("pos_encoding_mode", "str"),
        const("use_tensor_cores", "bool"), const("window_left", "int"), const("logits_soft_cap", "float?"),
        const("sm_scale", "float?"), const("rope_scale", "float?"), const("rope_theta", "float?"),
        const("backend", "str"), *_RESULT,
    ),
    _single, _single_fresh,
)  # fmt: skip
"""``single_decode_with_kv_cache`` and ``single_prefill_with_kv_cache``: plan and run at once."""


_INDICES = (
    Arg("batch_indices"), Arg("positions"), Arg("kv_indices"), Arg("kv_indptr"), Arg("kv_last_page_len"),
    const("kv_layout", "str"), const("backend", "str"),
)  # fmt: skip


def _append(
    key: Tensor, value: Tensor, storage: Tensor, k_path: list[int], v_path: list[int],
    batch_indices: Tensor, positions: Tensor, kv_indices: Tensor, kv_indptr: Tensor,
    kv_last_page_len: Tensor, kv_layout: str, backend: str,
) -> None:  # fmt: skip
    cache = CacheView(storage, tuple(k_path), tuple(v_path))
    page.append_paged_kv_cache(
        key,
        value,
        batch_indices,
        positions,
        cache,
        kv_indices,
        kv_indptr,
        kv_last_page_len,
        kv_layout,
        backend,
    )


def _append_one(
    rows: Tensor, cache: Tensor, other_pages: int, batch_indices: Tensor, positions: Tensor,
    kv_indices: Tensor, kv_indptr: Tensor, kv_last_page_len: Tensor, kv_layout: str, backend: str,
) -> None:  # fmt: skip
    # Backends write keys and values at once: here both are the same rows and the same slots. The second
    # tensor stands for the other half's number of pages, so that an index neither half has is found first.
    if cache.ndim == 3:  # a part of a latent cache: one head, not written out
        rows, cache = rows.unsqueeze(1), cache.unsqueeze(2)
    pair = (cache, cache[:other_pages])
    page.append_paged_kv_cache(
        rows,
        rows,
        batch_indices,
        positions,
        pair,
        kv_indices,
        kv_indptr,
        kv_last_page_len,
        kv_layout,
        backend,
    )


APPEND = OpRow(
    "append_paged_kv_cache",
    (
        Arg("key"), Arg("value"), Arg("storage", "Tensor", Role.CACHE),
        const("k_path", "int[]"), const("v_path", "int[]"), *_INDICES,
    ),
    _append,
)  # fmt: skip
"""Append to a cache that is one allocation."""

APPEND_ONE = OpRow(
    "append_to_one",
    (Arg("rows"), Arg("cache", "Tensor", Role.CACHE), const("other_pages", "SymInt"), *_INDICES),
    _append_one,
)
"""Append to the keys, or to the values, of a (k, v) pair; to one part of a latent cache."""


def _like(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors)


_STATES = (Arg("v_a"), Arg("s_a"), Arg("v_b"), Arg("s_b"))
MERGE = (
    OpRow("merge_state", _STATES, cascade.merge_state, lambda v, s, *_: _like(v, s), returns=2),
    OpRow(
        "merge_states", (Arg("v"), Arg("s")), cascade.merge_states,
        lambda v, s: (v.new_empty((v.shape[0], *v.shape[2:])), s.new_empty((s.shape[0], s.shape[2]))),
        returns=2,
    ),
    OpRow(
        "merge_state_in_place",
        (
            Arg("v", "Tensor", Role.INOUT_SMALL), Arg("s", "Tensor", Role.INOUT_SMALL),
            Arg("v_other"), Arg("s_other"), Arg("mask", "Tensor?"),
        ),
        cascade.merge_state_in_place,
    ),
)  # fmt: skip


def _segments(x: Tensor, indptr: Tensor, bitorder: str) -> tuple[Tensor, Tensor]:
    size = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty((size,), dtype=torch.uint8), x.new_empty(indptr.shape, dtype=torch.int32)


PACK = (
    OpRow(
        "packbits", (Arg("x"), const("bitorder", "str")), quantization.packbits,
        lambda x, bitorder: (x.new_empty(((x.shape[0] + 7) // 8,), dtype=torch.uint8),), returns=1,
    ),
    OpRow(
        "segment_packbits", (Arg("x"), Arg("indptr"), const("bitorder", "str")),
        quantization.segment_packbits, _segments, returns=2, host=True,
    ),
)  # fmt: skip


def _sample(
    draft_probs: Tensor, draft_token_ids: Tensor, target_probs: Tensor, accepted: Tensor | None,
    emitted: Tensor | None, deterministic: bool, backend: str, seed: Tensor, offset: Tensor,
) -> Any:  # fmt: skip
    a, e = (None if c is None else c.clone() for c in (accepted, emitted))
    return sampling.chain_speculative_sampling(
        draft_probs, draft_token_ids, target_probs, a, e, deterministic, None, seed, offset, backend=backend
    )


def _sample_fresh(draft_probs: Tensor, ids: Tensor, *_: Any) -> tuple[Tensor, ...]:
    i32 = {"dtype": torch.int32, "device": draft_probs.device}
    count = torch.empty(ids.shape[:1], **i32)  # type: ignore[call-overload]
    return torch.empty((ids.shape[0], ids.shape[1] + 1), **i32), count, torch.empty_like(count)  # type: ignore[call-overload]


SAMPLE = OpRow(
    "chain_speculative_sampling",
    (
        Arg("draft_probs"), Arg("draft_token_ids"), Arg("target_probs"), Arg("accepted", "Tensor?"),
        Arg("emitted", "Tensor?"), const("deterministic", "bool"), const("backend", "str"), Arg("seed"),
        Arg("offset"),
    ),
    _sample, _sample_fresh, returns=3,
)  # fmt: skip

INDEX = (
    OpRow(
        "get_batch_indices_positions", (Arg("append_indptr"), Arg("seq_lens"), const("nnz", "SymInt")),
        page.get_batch_indices_positions,
        lambda indptr, lens, nnz: tuple(indptr.new_empty((nnz,), dtype=torch.int32) for _ in range(2)),
        returns=2,
    ),
    OpRow(
        "get_seq_lens", (Arg("kv_indptr"), Arg("kv_last_page_len"), const("page_size", "SymInt")),
        page.get_seq_lens,
        lambda indptr, last, size: (
            indptr.new_empty(last.shape, dtype=torch.promote_types(indptr.dtype, last.dtype)),
        ),
        returns=1,
    ),
)  # fmt: skip

ROWS = (RUN, RUN_MLA, ADD_SINK, SINGLE, APPEND, APPEND_ONE, *MERGE, *PACK, SAMPLE, *INDEX)
