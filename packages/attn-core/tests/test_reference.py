"""The oracle of all other tests, held to the definition and to torch's own attention."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_core import reference_math
from attn_core.decode import single_decode_with_kv_cache
from attn_core.prefill import single_prefill_with_kv_cache

from .kit import (
    E4M3FN,
    TOLERANCE,
    close,
    offsets,
    oracle,
    packed,
    pages,
    queries,
    ragged_wrapper,
    random_mask,
    run_prefill,
    slopes,
)

INF = math.inf
Q_LENS, KV_LENS = [3, 0, 1, 5], [9, 4, 0, 5]  # a request without rows, one without keys


def check(
    *,
    group=2,
    heads_kv=2,
    dim=8,
    dim_vo=None,
    page_size=4,
    order="NHD",
    dtype=torch.float32,
    kv_dtype=None,
    q_lens=Q_LENS,
    kv_lens=KV_LENS,
    mask="none",
    seed=0,
    **options,
):
    """Compare paged prefill with the oracle."""
    p = pages(
        kv_lens,
        page_size=page_size,
        heads=heads_kv,
        dim=dim,
        dim_vo=dim_vo,
        dtype=kv_dtype or dtype,
        order=order,
        seed=seed,
    )
    q = queries(sum(q_lens), group * heads_kv, dim, dtype, seed + 1)
    flat, shaped = random_mask(q_lens, kv_lens, seed)
    ask = {
        "none": {},
        "causal": {"causal": True},
        "flat": {"custom_mask": flat},
        "packed": {"packed_custom_mask": packed(shaped)},
    }[mask]
    names = {"window": "window_left", "cap": "logits_soft_cap", "encoding": "pos_encoding_mode"}
    out, lse = run_prefill(p, q, q_lens, heads_kv, **ask, **{names.get(n, n): o for n, o in options.items()})
    want = oracle(
        q,
        p.keys,
        p.values,
        q_lens,
        causal=mask == "causal",
        mask=shaped if mask in ("flat", "packed") else None,
        **options,
    )
    assert out.dtype is dtype
    assert lse.dtype is torch.float32
    close(out, want[0], TOLERANCE[dtype])
    close(lse, want[1], max(3e-6, TOLERANCE[torch.float32]))


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("group", [1, 4, 5, 7, 8])
def test_group_sizes(group, order):
    check(group=group, order=order, mask="causal", encoding="ALIBI")


@pytest.mark.parametrize("dims", [(16, 16), (64, 64), (96, 96), (100, 100), (192, 128), (1, 3)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_head_dims(dims, dtype):
    check(dim=dims[0], dim_vo=dims[1], dtype=dtype, mask="causal")


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 3, 16, 17, 64])
def test_page_sizes(page_size, order):
    check(page_size=page_size, order=order, kv_lens=[page_size, page_size + 1, 0, 2 * page_size - 1][:4])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 2},
        {"window": 0},
        {"cap": 3.0},
        {"encoding": "ALIBI"},
        {"encoding": "ROPE_LLAMA"},
        {"encoding": "ALIBI", "cap": 2.0, "window": 3, "sm_scale": 0.7},
        {"encoding": "ROPE_LLAMA", "rope_scale": 2.0, "rope_theta": 500.0, "window": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("mask", ["none", "causal", "flat", "packed"])
def test_masks_and_logits(mask, options):
    check(mask=mask, **options)


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, E4M3FN])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_pair_of_types(dtype, kv_dtype):
    check(dtype=dtype, kv_dtype=kv_dtype, mask="causal", q_lens=[2, 1], kv_lens=[3, 5])


@settings(max_examples=25, deadline=None, database=None)
@given(data=st.data())
def test_any_combination(data):
    draw = data.draw
    batch = draw(st.integers(0, 4))
    lengths = st.lists(st.integers(0, 9), min_size=batch, max_size=batch)
    if batch == 0:
        return
    check(
        group=draw(st.sampled_from([1, 2, 3, 6])),
        heads_kv=draw(st.integers(1, 3)),
        dim=draw(st.sampled_from([2, 4, 10])),
        dim_vo=draw(st.sampled_from([None, 1, 6])),
        page_size=draw(st.integers(1, 7)),
        order=draw(st.sampled_from(["NHD", "HND"])),
        q_lens=draw(lengths),
        kv_lens=draw(lengths),
        mask=draw(st.sampled_from(["none", "causal", "flat", "packed"])),
        window=draw(st.integers(-1, 6)),
        cap=draw(st.sampled_from([0.0, 4.0])),
        encoding=draw(st.sampled_from(["NONE", "ALIBI", "ROPE_LLAMA"])),
        seed=draw(st.integers(0, 9)),
    )


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("mask", ["none", "causal", "flat"])
def test_ragged(mask, order):
    q = queries(sum(Q_LENS), 6, 8)
    p = pages(KV_LENS, heads=3, dim=8, dim_vo=5)
    k, v = (torch.cat(rows) for rows in (p.keys, p.values))
    flat, shaped = random_mask(Q_LENS, KV_LENS)
    wrapper = ragged_wrapper(order)
    wrapper.plan(
        offsets(Q_LENS),
        offsets(KV_LENS),
        6,
        3,
        8,
        head_dim_vo=5,
        causal=mask == "causal",
        custom_mask=flat if mask == "flat" else None,
        q_data_type=torch.float32,
        window_left=4,
    )
    if order == "HND":
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    got = wrapper.run(q, k, v, return_lse=True)
    want = oracle(
        q,
        p.keys,
        p.values,
        Q_LENS,
        causal=mask == "causal",
        mask=shaped if mask == "flat" else None,
        window=4,
    )
    close(got[0], want[0], 2e-6)
    close(got[1], want[1], 3e-6)


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_single(order):
    q, p = queries(5, 4, 8), pages([7], heads=2, dim=8, dim_vo=6)
    k, v = p.keys[0], p.values[0]
    give = (k, v) if order == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))
    mask = random_mask([5], [7])[1][0]
    for ask, want in (
        ({"causal": True}, {"causal": True}),
        ({"custom_mask": mask, "window_left": 3}, {"mask": [mask], "window": 3}),
        ({"custom_mask": mask.reshape(-1), "causal": True}, {"mask": [mask]}),
        ({"k_scale": 0.5, "v_scale": torch.tensor([2.0])}, {"k_scale": 0.5, "v_scale": 2.0}),
    ):
        got = single_prefill_with_kv_cache(q, *give, kv_layout=order, return_lse=True, **ask)
        expected = oracle(q, p.keys, p.values, [5], **want)
        close(got[0], expected[0], 2e-6)
        close(got[1], expected[1], 3e-6)
    got = single_decode_with_kv_cache(q[0], *give, kv_layout=order, q_scale=3.0, return_lse=True)
    expected = oracle(q[:1], p.keys, p.values, [1], q_scale=3.0)
    close(got[0], expected[0][0], 2e-6)
    close(got[1], expected[1][0], 3e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mask", ["none", "causal", "custom"])
def test_torch_sdpa_agrees(mask, dtype):
    q_lens, kv_lens = [4, 6], [11, 6]
    p, q = pages(kv_lens, heads=2, dim=16, dtype=dtype), queries(10, 6, 16, dtype)
    flat, shaped = random_mask(q_lens, kv_lens, keep=0.8)
    shaped[0][:, 0] = shaped[1][:, 0] = True  # SDPA has no rule for a row without keys
    flat = torch.cat([m.reshape(-1) for m in shaped])
    ask = {"causal": mask == "causal", "custom_mask": flat if mask == "custom" else None}
    out, _ = run_prefill(p, q, q_lens, 2, **ask)
    row = 0
    for request, n in enumerate(q_lens):
        see = {
            "none": None,
            "causal": torch.ones(n, kv_lens[request]).tril(kv_lens[request] - n).bool(),
            "custom": shaped[request],
        }[mask]
        k, v = (t[request].transpose(0, 1).repeat_interleave(3, 0) for t in (p.keys, p.values))
        want = torch.nn.functional.scaled_dot_product_attention(
            q[row : row + n].transpose(0, 1), k, v, attn_mask=see
        )
        close(out[row : row + n].transpose(0, 1), want, TOLERANCE[dtype])
        row += n


def test_window_left_sees_one_key_more_than_it_says():
    p = pages([6], heads=1, dim=2)
    p.k.nan_to_num_(0).zero_()
    for window, keys in ((-1, 6), (0, 1), (2, 3), (5, 6), (99, 6)):
        lse = run_prefill(p, torch.ones(1, 1, 2), [1], 1, window_left=window)[1]
        assert lse.item() == pytest.approx(math.log2(keys))


def test_lse_is_base_two_float32_and_out_has_its_own_type():
    p = pages([8], heads=1, dim=4, dtype=torch.float16)
    p.k.zero_()
    out, lse = run_prefill(p, torch.ones(2, 1, 4, dtype=torch.float16), [2], 1, o_data_type=torch.float32)
    assert (out.dtype, lse.dtype, tuple(lse.shape)) == (torch.float32, torch.float32, (2, 1))
    assert lse.tolist() == [[3.0], [3.0]]


def test_slopes_of_a_power_of_two_and_between():
    for heads in (1, 2, 3, 6, 8, 12, 40):
        got = reference_math.alibi_slopes(heads, torch.device("cpu"))
        close(got, torch.tensor(slopes(heads), dtype=torch.float64), 1e-7)
