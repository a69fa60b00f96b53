"""The kit's bounds for rotated queries and far keys, against what the roundings really do."""

import math

import pytest
import torch

from attn_core.problem import AttentionProblem, MaskMode, Op, PosEncoding, RaggedKV
from attn_core.testing import rounding
from attn_core.testing.oracle import Request, Scales, attention, rotate, slope
from attn_core.testing.tolerance import alibi_rounding, compare

SCALES = Scales(0.75, 1.25, 1.5)


def problem(dtype, encoding=PosEncoding.ROPE_LLAMA, **facts):
    return AttentionProblem(
        op=Op.PREFILL_SINGLE, num_qo_heads=4, num_kv_heads=2, head_dim_qk=64, head_dim_vo=48, q_dtype=dtype,
        kv_dtype=dtype, o_dtype=dtype, kv=RaggedKV(), mask=MaskMode.CAUSAL, pos_encoding=encoding,
        sm_scale=0.125, **facts,
    )  # fmt: skip


def request(dtype, rows=24, keys=70, seed=1):
    make = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, 4, 64, generator=make) * 3
    k, v = torch.randn(keys, 2, 64, generator=make), torch.randn(keys, 2, 48, generator=make)
    return Request(q.to(dtype), k.to(dtype), v.to(dtype))


def rounded_twice(p, r):
    """The oracle's answer to q and k that were turned, rounded to their type and are turned no more."""
    keys = r.k.shape[0]
    q = rotate(r.q.double(), range(keys - r.q.shape[0], keys), p).to(p.q_dtype)
    k = rotate(r.k.double(), range(keys), p).to(p.q_dtype)
    plain = problem(p.q_dtype, PosEncoding.NONE, logits_soft_cap=p.logits_soft_cap)
    return attention(plain, [Request(q, k, r.v, r.mask)], SCALES)


@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_spread_is_that_of_the_roundings(dtype, cap):
    """Errors over their predicted standard deviation have one of 1, and never come near six."""
    p = problem(dtype, logits_soft_cap=cap)
    found = []
    for seed in range(4):
        r = request(dtype, seed=seed)
        wants, slacks = attention(p, [r], SCALES), rounding.slack(p, [r], SCALES)
        for got, want, slack in zip(rounded_twice(p, r), wants, slacks, strict=True):
            found.append(((got - want) * rounding.SIGMAS / slack).flatten())
    for part in (torch.cat(found[::2]), torch.cat(found[1::2])):
        assert 0.85 < float(part.square().mean().sqrt()) < 1.15
        assert 2.0 < float(part.abs().max()) < rounding.SIGMAS


def test_one_rounding_more_than_the_slack_allows_is_found():
    """What an 8-bit rounding of the rotated rows does is outside the bound of a 16-bit one."""
    p, r = problem(torch.float16), request(torch.float16)
    coarse = rounded_twice(problem(torch.bfloat16), Request(r.q.bfloat16(), r.k.bfloat16(), r.v))[0]
    want, (slack, _) = attention(p, [r], SCALES)[0], rounding.slack(p, [r], SCALES)
    assert compare(rounded_twice(p, r)[0], want, 1e-4, SCALES.v, "out", slack) is None
    assert compare(coarse, want, 1e-4, SCALES.v, "out", slack) is not None


def test_where_nothing_is_summed_there_is_no_slack():
    p = problem(torch.bfloat16)
    out, _ = rounding.slack(p, [request(torch.bfloat16, rows=1, keys=1)], SCALES)
    assert float(out.abs().max()) < 1e-12  # a single key has all the weight, whatever its logit
    out, lse = rounding.slack(p, [request(torch.bfloat16, rows=3, keys=1)], SCALES)
    assert (out[:2].tolist(), lse[:2].tolist()) == (
        torch.zeros(2, 4, 48).tolist(),
        torch.zeros(2, 4).tolist(),
    )
    empty = rounding.slack(p, [request(torch.bfloat16, rows=2, keys=0)], SCALES)
    assert [float(t.abs().sum()) for t in empty] == [0.0, 0.0]
    assert rounding.slack(p, [], SCALES)[0].shape == (0, 4, 48)


@pytest.mark.parametrize(
    ("dtype", "encoding", "twice"),
    [
        (torch.bfloat16, PosEncoding.ROPE_LLAMA, True),
        (torch.float16, PosEncoding.ROPE_LLAMA, True),
        (torch.float32, PosEncoding.ROPE_LLAMA, False),
        (torch.bfloat16, PosEncoding.ALIBI, False),
        (torch.float16, PosEncoding.NONE, False),
    ],
)
def test_who_may_round_twice(dtype, encoding, twice):
    assert rounding.rounds_twice(problem(dtype, encoding)) is twice


@pytest.mark.parametrize("keys", [40, 517, 4000])
def test_far_keys_are_as_exact_as_float32_logits_are(keys):
    """A kernel that adds slope times distance in float32 keeps the bound, which is no idle one."""
    p, r = problem(torch.float32, PosEncoding.ALIBI), request(torch.float32, rows=8, keys=keys)
    want, bound = attention(p, [r], SCALES)[0], alibi_rounding(p, keys)
    worst = 0.0
    for head in range(4):
        x = (r.q[:, head].double() @ r.k[:, head // 2].double().T * 0.125 * 0.75 * 1.25).float()
        far = torch.arange(keys)[None] - torch.arange(8)[:, None]
        x = (x + torch.tensor(slope(head, 4), dtype=torch.float32) * far) * torch.tensor(1 / math.log(2))
        x = x.masked_fill(far > keys - 8, -math.inf).double()
        out = torch.softmax(x * math.log(2), 1) @ r.v[:, head // 2].double() * 1.5
        error = (out - want[:, head]).abs() / (want[:, head].abs() + 1.5)
        worst = max(worst, float(error.max()))
    assert bound / 50 < worst < bound
