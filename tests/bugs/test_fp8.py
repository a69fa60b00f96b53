from __future__ import annotations

import pytest
import torch

import attn_core
from attn_core import NoRoute
from attn_core.batch import BatchShape
from attn_core.capability import FLOATS
from attn_core.problem import AttentionProblem, Op, PagedKV
from attn_core.query import Query
from attn_core.route import choose, screen
from attn_core.target import DeviceTarget

from .fakes import Fake, capability
from .support import (
    D_TC,
    DECODES,
    S1,
    Asked,
    Case,
    D,
    P,
    R,
    agrees,
    attend,
    base,
    base_r0,
    paged,
    plan,
    refused,
    rnd,
    run,
    served,
    wrapper,
)

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
E5M2, E5M2FNUZ = torch.float8_e5m2, torch.float8_e5m2fnuz


def quantised(way: str) -> Case:
    """Two rows over the same 33 keys: one request of two rows, or two requests of one."""
    q, k, v = rnd(19, (2, 4, 64), (33, 2, 64), (33, 2, 64), dtype=torch.bfloat16)
    case = paged(q, (k / 0.25).to(FN).view(torch.uint8), (v / 0.5).to(FN).view(torch.uint8), 16, (2, 0, 1))
    case = case.but(k=case.k.view(FN), v=case.v.view(FN))
    return case.but(tables=case.tables * 2, last=case.last * 2, q_lens=()) if way in DECODES else case


@pytest.mark.parametrize("way", [D, D_TC, P, R, S1])
@pytest.mark.parametrize("form", [float, lambda x: torch.tensor([x]), lambda x: torch.tensor(x)])
def test_b44_fp8_scales_take_effect(backend, way, form):
    """The output was the same whatever the scales. https://github.com/flashinfer-ai/flashinfer/issues/1023"""
    case = quantised(way)
    want = case.want(k_scale=0.25, v_scale=0.5)
    assert abs(float(want[0].sum()) + 13.97010) < 1e-4
    assert abs(float(want[1][0, 0]) - 5.51596) < 1e-4
    agrees(way, backend, case, Asked(run={"k_scale": form(0.25), "v_scale": form(0.5)}))
    ignored = case.want()
    assert abs(float(ignored[0].sum()) + 29.95709) < 1e-4
    agrees(way, backend, case)


@pytest.mark.parametrize("way", [D, D_TC, P, R])
def test_b44_scales_of_another_shape_are_refused(backend, way):
    """The output was the same whatever the scales. https://github.com/flashinfer-ai/flashinfer/issues/1023"""
    case = quantised(way)
    w = wrapper(way, backend)
    with served(backend):
        plan(w, case)
    for name in ("q_scale", "k_scale", "v_scale"):
        with refused(name, "one element", "(2,)"):
            run(w, case, **{name: torch.ones(2)})
        with refused(name, "number", "str", kind=TypeError):
            run(w, case, **{name: "0.5"})


@pytest.mark.parametrize("way", [D, D_TC, P])
@pytest.mark.parametrize(("dtype", "value"), [(FN, 2.0), (FNUZ, 1.0), (E5M2, 2.0), (E5M2FNUZ, 1.0)])
def test_b46_fp8_bytes_are_read_as_their_own_type(backend, way, dtype, value):
    """FNUZ bytes read as FN: a factor of 2 and NaN. https://github.com/vllm-project/vllm/issues/45562"""
    case = base_r0()
    ones = torch.full(case.k.shape, 0x40, dtype=torch.uint8).view(dtype)
    assert float(ones.float().max()) == value
    fp8 = case.but(k=ones, v=ones)
    agrees(way, backend, fp8)
    out, _ = attend(way, backend, fp8)
    assert torch.equal(out, torch.full_like(out, value))


@pytest.mark.parametrize("way", [D, D_TC, P])
def test_b46_cache_of_another_type_than_planned_is_refused(backend, way):
    """FNUZ bytes read as FN: a factor of 2 and NaN. https://github.com/vllm-project/vllm/issues/45562"""
    case = base_r0()
    raw = torch.full(case.k.shape, 0x40, dtype=torch.uint8)
    fp8 = case.but(k=raw.view(FN), v=raw.view(FN))
    w = wrapper(way, backend)
    with served(backend):
        plan(w, fp8)
    for other in (raw.view(FNUZ), raw, raw.view(torch.int8)):
        for name, cache in (("k:", (other, fp8.v)), ("v:", (fp8.k, other))):
            with refused(name, "kv_data_type", FN, other.dtype):
                run(w, fp8.but(cache=cache))
    # bytes without a type: there is nothing to read them as
    with refused("uint8", kind=NoRoute):
        plan(wrapper(way, backend), case.but(k=raw, v=raw))


def test_b46_type_of_another_architecture_is_declined_by_name():
    """FNUZ bytes read as FN: a factor of 2 and NaN. https://github.com/vllm-project/vllm/issues/45562"""
    old = Fake(capability(archs=frozenset({"gfx942"}), kv_dtypes=FLOATS | {FNUZ}), "old")
    new = Fake(capability(archs=frozenset({"gfx950"}), kv_dtypes=FLOATS | {FN}), "new")
    shape = BatchShape(batch_size=1, total_q=1, max_q_len=1, uniform_q_len=1, max_kv_len=37, total_kv=37)
    for arch, right, wrong, name in (("gfx942", FNUZ, FN, "old"), ("gfx950", FN, FNUZ, "new")):
        target = DeviceTarget("hip", arch, 304, 64)
        for dtype in (right, wrong):
            problem = AttentionProblem(
                op=Op.DECODE, num_qo_heads=4, num_kv_heads=2, head_dim_qk=64, head_dim_vo=64,
                q_dtype=torch.float16, kv_dtype=dtype, o_dtype=torch.float16, kv=PagedKV(16),
            )  # fmt: skip
            screened = screen(target, problem, (old, new))
            query = Query(target, problem, shape)
            if dtype is right:
                assert choose(screened, query).candidate == f"{name}/only"
            else:
                listed = str(right).removeprefix("torch.")
                with refused(f"{name}/only", listed, str(wrong).removeprefix("torch."), kind=NoRoute):
                    choose(screened, query)


def test_b46_append_does_not_convert(backend):
    """FNUZ bytes read as FN: a factor of 2 and NaN. https://github.com/vllm-project/vllm/issues/45562"""
    case = base()
    k, v = case.k.to(FN), case.v.to(FN)
    for rows in (case.k[0, :1], case.k[0, :1].to(FNUZ)):
        with refused("append_key", FN, rows.dtype):
            attn_core.append_paged_kv_cache(
                rows, rows, torch.tensor([0]), torch.tensor([0]), (k, v), case.indices, case.indptr,
                case.last_page_len, backend=backend,
            )  # fmt: skip
