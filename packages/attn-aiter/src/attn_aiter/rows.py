"""What each path can compute and what it asks of its tensors: one row per path."""

from __future__ import annotations

from dataclasses import replace

import torch

from attn_core.backend import Path, TensorContract
from attn_core.capability import FP8, Capability, Dims, GraphSupport
from attn_core.problem import MaskMode, Op

from .tables import native_pages
from .versions import Version

ARCHS = frozenset({"gfx942", "gfx950"})
HALF = frozenset({torch.float16, torch.bfloat16})

NATIVE, GATHER, VARLEN, SINGLE = "native", "gather", "varlen", "single"
PA_V1, UNIFIED, APPEND, MLA = "pa_v1", "unified", "append", "mla"

PA_PAGES = frozenset({1, 16, 32})
"""Sizes AITER's own tests cover. The kernel would compile 12 or 24 too, and read V wrongly."""


UNIFIED_PAGES = frozenset({16, 32, 64})
"""Decode works in tiles of one page: a power of two, at least what a matrix product takes, and no larger than
local memory holds in the deepest pipeline the kernel is configured for."""

# K and V have strides of their own here. Head sizes up to 256 are padded inside the kernel, but one that is
# no multiple of 8 would be padded by copying the cache.
_DENSE = Capability(
    archs=ARCHS,
    ops=frozenset({Op.PREFILL_RAGGED}),
    q_dtypes=HALF,
    kv_dtypes=HALF,
    same_dtype=True,
    head_dims=Dims(multiple_of=8, at_most=256),
    head_dim_split=False,
    kv_orders=frozenset({"NHD"}),
    window=True,
    soft_cap=True,
    graph=GraphSupport.ALWAYS,
    latent=False,
)

CAPABILITIES = {
    NATIVE: replace(
        _DENSE,
        ops=frozenset({Op.PREFILL_PAGED}),
        q_dtypes=HALF | FP8,
        kv_dtypes=HALF | FP8,
        o_dtypes=HALF | FP8,  # aiter.fp8-out narrows this to q's own type, or bfloat16 for fp8
    ),
    GATHER: replace(_DENSE, ops=frozenset({Op.PREFILL_PAGED})),
    VARLEN: _DENSE,
    SINGLE: replace(_DENSE, ops=frozenset({Op.PREFILL_SINGLE}), graph=GraphSupport.NEVER),
    PA_V1: replace(
        _DENSE,
        ops=frozenset({Op.DECODE}),
        # The loop over V's columns drops what is left of a multiple of 64; AITER tests these two.
        head_dims=Dims(values=frozenset({64, 128})),
        max_group=16,
        page_sizes=PA_PAGES,
        masks=frozenset({MaskMode.NONE}),
        lse=False,
        tensor_cores=False,
        graph=GraphSupport.UNIFORM_BATCH,
    ),
    MLA: replace(
        _DENSE,
        ops=frozenset({Op.PREFILL_PAGED}),
        q_dtypes=frozenset({torch.bfloat16}),
        kv_dtypes=frozenset({torch.bfloat16}),
        head_dims=Dims(values=frozenset({512, 576})),  # aiter.latent-heads narrows this to 576 with 512
        head_dim_split=True,
        # Larger pages are taken by the function and ignored by its kernel.
        page_sizes=frozenset({1}),
        window=False,
        soft_cap=False,
        lse=False,
        # The split is laid out in memory that a cache of AITER owns and drops at the next other call.
        graph=GraphSupport.NEVER,
        latent=True,
    ),
    UNIFIED: replace(
        _DENSE,
        ops=frozenset({Op.PREFILL_PAGED, Op.DECODE, Op.VERIFY}),
        max_group=16,
        page_sizes=UNIFIED_PAGES,
        kv_orders=frozenset({"NHD", "HND"}),
        lse=False,
        graph=GraphSupport.NEVER,
    ),
    APPEND: Capability(
        archs=ARCHS,
        ops=frozenset({Op.APPEND}),
        q_dtypes=HALF,
        kv_dtypes=HALF,
        same_dtype=True,
        head_dim_split=False,
        kv_orders=frozenset({"NHD"}),
    ),
}

CONTRACTS = {
    NATIVE: TensorContract(q="dense"),
    GATHER: TensorContract(q="dense"),
    VARLEN: TensorContract(q="dense"),
    SINGLE: TensorContract(q="dense"),
    # The kernel is given K's strides only and reads V with them; of q it is given the row stride only.
    PA_V1: TensorContract(same_kv_strides=True, q="packed"),
    UNIFIED: TensorContract(q="dense"),
    MLA: TensorContract(q="packed", scales=False),
    APPEND: TensorContract(),
}

BY_NAME = frozenset({UNIFIED, APPEND})
"""Paths that ``auto`` leaves out until a threshold row says otherwise."""

LATENT_ROWS = {16: 4, 128: 1}
"""Query heads AITER has a kernel for, and the query rows per request each is known to be right for."""

_HOST_INDICES = frozenset({PA_V1, UNIFIED})


def paths(release: Version | None) -> tuple[Path, ...]:
    """Return the candidates in this backend's order of preference.

    Args:
        release: The installed version; decides the native page sizes. None leaves them open.
    """
    rows = dict(CAPABILITIES)
    if release is not None:
        rows[NATIVE] = replace(rows[NATIVE], page_sizes=native_pages(release))
    return tuple(
        Path(name, row, CONTRACTS[name], name in _HOST_INDICES, name in BY_NAME) for name, row in rows.items()
    )
