"""Head dims beyond those of common models on the CPU: latent attention has 576 and 512."""

import pytest
import torch

import attn_core


def dense(q, k, v, scale):
    """Return out and base-2 lse of causal attention in float64, with query heads repeated over key heads."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    rows, keys = q.shape[0], k.shape[0]
    seen = torch.arange(keys)[None] <= torch.arange(rows)[:, None] + keys - rows
    logits = logits.masked_fill(~seen, -torch.inf)
    out = torch.einsum("hqk,khd->qhd", logits.softmax(-1), v)
    return out, logits.logsumexp(-1).T / torch.tensor(2.0).log()


@pytest.mark.parametrize(("head_dim_qk", "head_dim_vo"), [(576, 512), (513, 7), (1024, 1024)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "keys"), [(1, 33), (3, 1200), (40, 1300)])
def test_wide_heads_are_right_whole_and_split(head_dim_qk, head_dim_vo, dtype, rows, keys):
    torch.manual_seed(rows)
    q, k = torch.randn(rows, 4, head_dim_qk).to(dtype), torch.randn(keys, 2, head_dim_qk).to(dtype)
    v = torch.randn(keys, 2, head_dim_vo).to(dtype)
    indptr = torch.tensor([0, rows]), torch.tensor([0, keys])
    wrapper = attn_core.BatchPrefillWithRaggedKVCacheWrapper(
        torch.empty(1 << 27, dtype=torch.uint8), backend="fa2"
    )
    wrapper.plan(
        *(x.int() for x in indptr), 4, 2, head_dim_qk, head_dim_vo, causal=True, q_data_type=dtype,
        fixed_split_size=512,
    )  # fmt: skip
    out, lse = wrapper.run(q, k, v, return_lse=True)
    want, want_lse = dense(q, k, v, head_dim_qk**-0.5)
    rtol = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(out.double(), want, rtol=rtol, atol=rtol)
    torch.testing.assert_close(lse.double(), want_lse.double(), rtol=1e-4, atol=1e-3)


def test_latent_attention_is_served_by_name():
    torch.manual_seed(0)
    wrapper = attn_core.BatchMLAPagedAttentionWrapper(torch.empty(1 << 24, dtype=torch.uint8), backend="fa2")
    arrays = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2], [0, 2], [1, 0], [21]))
    wrapper.plan(*arrays, 16, 512, 64, 16, True, 576**-0.5, torch.float16, torch.float16)
    q, cache = torch.randn(2, 16, 576).half(), torch.randn(2, 16, 576).half()
    out, lse = wrapper.run(q[..., :512], q[..., 512:], cache[..., :512], cache[..., 512:], return_lse=True)
    keys = cache[[1, 0]].reshape(32, 1, 576)[:21]
    want, want_lse = dense(q, keys, keys[..., :512], 576**-0.5)
    torch.testing.assert_close(out.double(), want, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse.double(), want_lse.double(), rtol=1e-4, atol=1e-3)


def test_beyond_what_the_kernels_hold_the_limit_is_named():
    q = torch.randn(1, 1, 1025)
    with pytest.raises(attn_core.NoRoute, match="up to 1024, got 1025"):
        attn_core.single_prefill_with_kv_cache(q, q, q, backend="fa2")
