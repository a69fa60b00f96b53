"""Every CPU kernel, whatever the build: every row count with each type of keys, in place and staged."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch

from attn_core.prefill import BatchPrefillWithPagedKVCacheWrapper

PAGE = 16
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 70)
"""With a group of one these are packed rows: up to 4 or 8 lie in lanes of dims, more in lanes of rows, and 70
leaves a second tile of a few."""
KEYS = (16, 37, 64, 5, 100, 48, 61, 160, 33, 96)
"""The last request ends with the last slot of the cache, so that a read too far leaves its memory."""
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TYPES = [
    (FP32, FP32), (FP16, FP16), (BF16, BF16), (BF16, torch.float8_e4m3fn), (FP16, torch.float8_e4m3fnuz),
    (BF16, torch.float8_e5m2), (FP16, torch.float8_e5m2fnuz), (FP32, BF16),
]  # fmt: skip
WAYS = {
    "in place": (64, {}),
    "wide": (256, {}),
    "odd": (33, {}),
    "turned": (64, {"pos_encoding_mode": "ROPE_LLAMA"}),
    "bent": (64, {"pos_encoding_mode": "ALIBI", "logits_soft_cap": 5.0, "window_left": 20}),
}


def answer(
    backend: str, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], dim: int, order: str, options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    pages = [-(-n // PAGE) for n in KEYS]
    indptr = torch.tensor([0, *accumulate(pages)], dtype=torch.int32)
    last = torch.tensor([(n - 1) % PAGE + 1 for n in KEYS], dtype=torch.int32)
    # Backwards but for the last request, which keeps the end of the cache.
    ids = torch.cat([torch.arange(sum(pages) - 6).flip(0), torch.arange(sum(pages) - 6, sum(pages))]).int()
    workspace = torch.empty(4 << 20, dtype=torch.uint8)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, order, backend=backend)
    wrapper.plan(
        torch.tensor([0, *accumulate(ROWS)], dtype=torch.int32), indptr, ids, last, 2, 2, dim, PAGE,
        causal=True, q_data_type=q.dtype, kv_data_type=kv[0].dtype, o_data_type=FP32, **options,
    )  # fmt: skip
    out, lse = wrapper.run(q, kv, return_lse=True)
    return out, lse


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("q_type", "kv_type"), TYPES)
def test_agrees_with_the_reference(q_type: torch.dtype, kv_type: torch.dtype, way: str) -> None:
    dim, options = WAYS[way]
    order = "NHD" if dim == 64 else "HND"
    make = torch.Generator().manual_seed(3)
    shape = (sum(-(-n // PAGE) for n in KEYS), *((PAGE, 2) if order == "NHD" else (2, PAGE)), dim)
    kv = (torch.randn(shape, generator=make).to(kv_type), torch.randn(shape, generator=make).to(kv_type))
    q = torch.randn(sum(ROWS), 2, dim, generator=make).to(q_type)
    out, lse = answer("fa2", q, kv, dim, order, options)
    want, want_lse = answer("reference", q, kv, dim, order, options)
    # A core that multiplies pairs of bfloat16 takes the softmax weights in that type.
    bound = 2**-8 if q_type == kv_type == BF16 else 2e-5
    torch.testing.assert_close(out, want, atol=bound, rtol=bound)
    torch.testing.assert_close(lse, want_lse, atol=2e-5, rtol=2e-5)
