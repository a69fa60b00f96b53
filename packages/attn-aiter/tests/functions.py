"""Stand-ins for AITER's Python functions: what they are documented to compute, in float32.

They take what the routes pass, by keyword, and keep every call. Their log-sum-exp is natural,
``[num_qo_heads, rows]``, and +inf for a row without a key, as AITER's is.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch


class Varlen:
    """flash_attn_varlen_func."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **given: Any) -> Any:
        self.calls.append(given)
        q, k, v, out = (given[n].float() for n in ("q", "k", "v", "out"))
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out, lse = torch.zeros_like(out), torch.full((q.shape[1], q.shape[0]), math.inf)
        cu_q, cu_k = given["cu_seqlens_q"].tolist(), given["cu_seqlens_k"].tolist()
        assert given["max_seqlen_q"] >= max(b - a for a, b in pairwise(cu_q))
        assert given["max_seqlen_k"] >= max(b - a for a, b in pairwise(cu_k))
        for (a, b), (c, d) in zip(pairwise(cu_q), pairwise(cu_k), strict=True):
            logits = torch.einsum("qhd,khd->hqk", q[a:b], k[c:d]) * given["softmax_scale"]
            if given["logits_soft_cap"]:
                logits = given["logits_soft_cap"] * torch.tanh(logits / given["logits_soft_cap"])
            logits = logits.masked_fill(~self.seen(given, b - a, d - c), -math.inf)
            best = logits.logsumexp(-1)
            weights = (logits - best[..., None]).exp().nan_to_num(0)
            out[a:b] = torch.einsum("hqk,khd->qhd", weights, v[c:d])
            lse[:, a:b] = torch.where(best == -math.inf, math.inf, best)
        given["out"].copy_(out)
        return (given["out"], lse) if given["return_lse"] else given["out"]

    @staticmethod
    def seen(given: dict[str, Any], q_len: int, kv_len: int) -> torch.Tensor:
        row = torch.arange(q_len)[:, None] + kv_len - q_len
        key = torch.arange(kv_len)[None]
        left, right = given["window_size"][:2]
        right = 0 if given["causal"] and right < 0 else right
        mask = torch.ones(q_len, kv_len, dtype=torch.bool)
        if left >= 0:
            mask &= key >= row - left
        return mask & (key <= row + right) if right >= 0 else mask


class Prefill:
    """mha_batch_prefill_func: NHD pages, or tokens in old releases."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **given: Any) -> Any:
        self.calls.append(given)
        q, out = given["q"].float(), given["out"]
        k, v = given["k"].float(), given["v"].float()
        if k.ndim == 3:
            k, v = k[:, None], v[:, None]
        page = k.shape[1]
        group = q.shape[1] // k.shape[2]
        lse = torch.full((q.shape[1], q.shape[0]), math.inf)
        cu_q, indptr = given["cu_seqlens_q"].tolist(), given["kv_indptr"].tolist()
        ids = given["kv_page_indices"].long()
        last = given["kv_last_page_lens"].tolist() if "kv_last_page_lens" in given else [1] * len(indptr)
        scale = given["softmax_scale"]
        for name in ("q_descale", "k_descale"):
            if given.get(name) is not None:
                scale *= float(given[name])
        for n, (a, b) in enumerate(pairwise(cu_q)):
            mine = ids[indptr[n] : indptr[n + 1]]
            length = max(0, mine.numel() - 1) * page + (last[n] if mine.numel() else 0)
            kk = k[mine].flatten(0, 1)[:length].repeat_interleave(group, 1)
            vv = v[mine].flatten(0, 1)[:length].repeat_interleave(group, 1)
            logits = torch.einsum("qhd,khd->hqk", q[a:b], kk) * scale
            if given["logits_soft_cap"]:
                logits = given["logits_soft_cap"] * torch.tanh(logits / given["logits_soft_cap"])
            row = torch.arange(b - a)[:, None] + length - (b - a)
            key = torch.arange(length)[None]
            if given["causal"]:
                logits = logits.masked_fill(key > row, -math.inf)
            if given["window_size"][0] >= 0:
                logits = logits.masked_fill(key < row - given["window_size"][0], -math.inf)
            best = logits.logsumexp(-1)
            weights = (logits - best[..., None]).exp().nan_to_num(0)
            found = torch.einsum("hqk,khd->qhd", weights, vv)
            if given.get("v_descale") is not None:
                found = found * float(given["v_descale"])
            out[a:b] = found.to(out.dtype)
            lse[:, a:b] = torch.where(best == -math.inf, math.inf, best)
        return (out, lse) if given["return_lse"] else out


class Unified:
    """unified_attention: causal, no log-sum-exp; a row without a key is NaN."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **given: Any) -> None:
        self.calls.append(given)
        assert given["causal"]
        q, k, v = (given[name].float() for name in ("q", "k", "v"))
        group = q.shape[1] // k.shape[2]
        cu_q, window = given["cu_seqlens_q"].tolist(), 1 + given["window_size"][0]
        for n, length in enumerate(given["seqused_k"].tolist()):
            a, b = cu_q[n], cu_q[n + 1]
            ids = given["block_table"][n, : -(-length // k.shape[1])].long()
            kk = k[ids].flatten(0, 1)[:length].repeat_interleave(group, 1)
            vv = v[ids].flatten(0, 1)[:length].repeat_interleave(group, 1)
            x = torch.einsum("qhd,khd->hqk", q[a:b], kk) * given["softmax_scale"]
            if given["softcap"]:
                x = given["softcap"] * torch.tanh(x / given["softcap"])
            row = torch.arange(b - a)[:, None] + length - (b - a)
            key = torch.arange(length)[None]
            hidden = (key > row) | ((key <= row - window) if window else torch.tensor(False))
            weights = x.masked_fill(hidden, -math.inf).softmax(-1)
            given["out"][a:b] = torch.einsum("hqk,khd->qhd", weights, vv).to(given["out"].dtype)


class Latent:
    """mla_decode_fwd: pages of one token; values are the first columns of the keys; causal."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **given: Any) -> Any:
        self.calls.append(given)
        q, kv, out = given["q"], given["kv_buffer"], given["o"]
        assert q.is_contiguous()
        assert q.shape[1] in (16, 128)
        assert kv.shape[1:] == (1, 1, 576)
        assert (given["kv_last_page_lens"] == 1).all()
        assert given["logit_cap"] == 0.0
        cu_q, indptr = given["qo_indptr"].tolist(), given["kv_indptr"].tolist()
        for (a, b), (c, d) in zip(pairwise(cu_q), pairwise(indptr), strict=True):
            keys = kv[given["kv_indices"][c:d].long(), 0, 0].float()
            x = torch.einsum("rhd,kd->hrk", q[a:b].float(), keys) * given["sm_scale"]
            row = torch.arange(b - a)[:, None] + (d - c) - (b - a)
            x = x.masked_fill(torch.arange(d - c)[None] > row, -math.inf)
            out[a:b] = torch.einsum("hrk,kd->rhd", x.softmax(-1), keys[:, :512]).to(out.dtype)
        return out, None
