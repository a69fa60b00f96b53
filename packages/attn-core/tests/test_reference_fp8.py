"""8-bit caches in the reference: every code, every scale."""

import math

import pytest
import torch

from .kit import (
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    close,
    decode_wrapper,
    ints,
    offsets,
    oracle,
    pages,
    queries,
    run_prefill,
)

INF = math.inf
Q_LENS, KV_LENS = [3, 0, 1, 5], [9, 4, 0, 5]  # a request without rows, one without keys


def decoded(dtype):
    """Value of each of the 256 codes, from the formats' definitions."""
    exponent_bits, bias = {E4M3FN: (4, 7), E4M3FNUZ: (4, 8), E5M2: (5, 15), E5M2FNUZ: (5, 16)}[dtype]
    mantissa_bits = 7 - exponent_bits
    values = []
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        fraction = mantissa / (1 << mantissa_bits)
        value = sign * (
            (1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias)
        )
        no_number = code == 0x80 if dtype in (E4M3FNUZ, E5M2FNUZ) else code & 0x7F == 0x7F
        if dtype is E5M2:
            no_number = exponent == 0x1F and mantissa != 0
            value = sign * INF if exponent == 0x1F else value
        value = math.nan if no_number else value
        values.append(value)
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ])
def test_every_code_of_an_8_bit_cache_is_read_exactly(dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    v = codes.view(1, 1, 1, 256).clone().view(dtype)
    k = torch.zeros_like(v)
    wrapper = decode_wrapper()
    wrapper.plan(ints(0, 1), ints(0), ints(1), 1, 1, 256, 1, q_data_type=torch.float32, kv_data_type=dtype)
    out = wrapper.run(torch.zeros(1, 1, 256), (k, v)).view(-1).double()
    torch.testing.assert_close(out, decoded(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ])
def test_every_code_of_a_key_is_read_exactly(dtype):
    k = torch.arange(256, dtype=torch.uint8).view(256, 1, 1, 1).clone().view(dtype)
    wrapper = decode_wrapper()
    wrapper.plan(
        offsets([1] * 256),
        torch.arange(256),
        torch.ones(256, dtype=torch.int32),
        1,
        1,
        1,
        1,
        q_data_type=torch.float64,
        kv_data_type=dtype,
        sm_scale=1.0,
    )
    lse = wrapper.run(torch.ones(256, 1, 1, dtype=torch.float64), (k, torch.zeros_like(k)), return_lse=True)[
        1
    ]
    want = decoded(dtype)
    finite = want.isfinite()
    assert int(finite.sum()) == {E4M3FN: 254, E4M3FNUZ: 255, E5M2: 248, E5M2FNUZ: 255}[dtype]
    close(lse.view(-1)[finite] * math.log(2), want[finite], 1e-6)


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ])
def test_scales_of_an_8_bit_cache(dtype, order):
    q_lens, kv_lens = [2, 3], [7, 5]
    p = pages(kv_lens, heads=2, dim=16, dtype=dtype, order=order, scale=3)
    q = queries(5, 4, 16, torch.bfloat16)
    want = oracle(q, p.keys, p.values, q_lens, causal=True, q_scale=1.5, k_scale=0.25, v_scale=2.0)
    for wrap in (float, lambda x: torch.tensor([x])):
        out, lse = run_prefill(
            p, q, q_lens, 2, causal=True, q_scale=wrap(1.5), k_scale=wrap(0.25), v_scale=wrap(2.0)
        )
        close(out, want[0], 8e-3)
        close(lse, want[1], 3e-6)
