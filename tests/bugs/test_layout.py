from __future__ import annotations

import pytest
import torch

import attn_core

from .support import (
    D_TC,
    DECODES,
    WAYS,
    Case,
    D,
    P,
    R,
    agrees,
    attend,
    base,
    i32,
    plan,
    refused,
    rnd,
    run,
    same_bits,
    served,
    workspace,
    wrapper,
)

PAGED = (D, D_TC, P)


@pytest.mark.parametrize("way", WAYS)
def test_b28_q_out_of_a_fused_buffer(backend, way):
    """q sliced from a fused QKV buffer: all requests but the first were wrong. https://github.com/sgl-project/sglang/pull/31667"""
    (buffer,) = rnd(10, (4, 40 * 64))
    k, v = rnd(11, (4, 16, 4, 64), (4, 16, 4, 64))
    q = buffer[:, :2048].view(4, 32, 64)
    assert q.stride() == (2560, 64, 1)
    case = Case(q, k, v, ((0,), (1,), (2,), (3,)), (16,) * 4)
    assert abs(float(case.want()[0].sum()) + 20.35423) < 1e-4
    assert abs(float(case.want()[0][3].sum()) + 4.83557) < 1e-4
    agrees(way, backend, case)
    packed = attend(way, backend, case.but(q=q.contiguous()))
    assert all(same_bits(a, b) for a, b in zip(attend(way, backend, case), packed, strict=True))
    # heads spread out, and a head dimension that is not dense
    agrees(way, backend, case.but(q=buffer.view(4, 40, 64)[:, 4:36]))
    agrees(way, backend, case.but(q=q.transpose(1, 2).contiguous().transpose(1, 2)))


def pool_cases():
    (pool,) = rnd(12, (3, 4, 2, 16, 2, 64))
    (q,) = rnd(13, (1, 4, 64))
    for layer, figure in enumerate((5.39203, -2.48615, 3.55005)):
        k, v = pool[layer, :, 0], pool[layer, :, 1]
        yield Case(q, k, v, ((3, 1),), (7,)), pool, layer, figure


@pytest.mark.parametrize("way", PAGED)
def test_b29_cache_strides_are_those_of_the_tensor(backend, way):
    """Interleaved K/V: the page stride was rebuilt from the shape, error 6. https://github.com/ROCm/aiter/pull/3498"""
    for case, pool, layer, figure in pool_cases():
        agrees(way, backend, case, sums=[figure])
        halves = torch.stack([case.k, case.v])
        for cache in (
            pool[layer],  # one tensor [page, 2, ...]
            (halves[0], halves[1]),
            attn_core.CacheView.split(pool, 1, lead=(0, layer)),
            (case.k, halves[1]),  # k and v with unlike strides
        ):
            agrees(way, backend, case.but(cache=cache), sums=[figure])


def as_nhd(case: Case) -> Case:
    return case


def as_hnd(case: Case) -> Case:
    k, v = (t.transpose(1, 2).contiguous() for t in (case.k, case.v))
    return case.but(k=k, v=v, layout="HND")


def as_hnd_view(case: Case) -> Case:
    return case.but(k=case.k.transpose(1, 2), v=case.v.transpose(1, 2), layout="HND")


@pytest.mark.parametrize("way", WAYS)
def test_b30_layouts_are_not_exchanged(backend, way):
    """NHD and HND were exchanged in one code path. https://github.com/flashinfer-ai/flashinfer/pull/441"""
    # with page 2 and 2 heads the shapes of the two layouts are equal
    q, k, v = rnd(30, (2, 4, 64), (4, 2, 2, 64), (4, 2, 2, 64))
    for case in (base(), Case(q, k, v, ((2, 0, 3), (1,)), (1, 2))):
        want = case.want()
        for form in (as_nhd, as_hnd, as_hnd_view):
            shaped = form(case)
            torch.testing.assert_close(shaped.want(), want)
            agrees(way, backend, shaped)


def test_b30_unknown_layout_is_refused(backend):
    """NHD and HND were exchanged in one code path. https://github.com/flashinfer-ai/flashinfer/pull/441"""
    case = base()
    for bad in ("NDH", "nhd", "", None):
        for way in (*PAGED, R):
            with refused("kv_layout", "NHD", "HND", repr(bad)):
                wrapper(way, backend, bad)
        with refused("kv_layout", "NHD", "HND", repr(bad)):
            attn_core.single_prefill_with_kv_cache(case.q, *case.keys(0), kv_layout=bad, backend=backend)
        with refused("kv_layout", "NHD", "HND", repr(bad)):
            attn_core.append_paged_kv_cache(
                case.k[0, :1], case.v[0, :1], i32(0), i32(0), (case.k, case.v), case.indices, case.indptr,
                case.last_page_len, kv_layout=bad, backend=backend,
            )  # fmt: skip


def spread(t: torch.Tensor, dim: int, stride: int) -> torch.Tensor:
    """The same values, with an odd stride for a dimension of size 1."""
    assert t.shape[dim] == 1
    strides = list(t.contiguous().stride())
    strides[dim] = stride
    return t.contiguous().as_strided(t.shape, strides)


@pytest.mark.parametrize("way", PAGED)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_b33_strides_of_size_one_do_not_matter(backend, way, layout):
    """Strict checks refused slices whose size-1 dimensions had odd strides. https://github.com/vllm-project/vllm/issues/32452"""
    q, k, v = rnd(33, (1, 4, 64), (1, 16, 2, 64), (1, 16, 2, 64))
    whole = Case(spread(q, 0, 7), k, v, ((0,),), (11,))
    one_page = whole.but(k=spread(k, 0, 3), v=spread(v, 0, 3))
    k, v = rnd(34, (4, 16, 1, 64), (4, 16, 1, 64))
    one_head = Case(q, spread(k, 2, 5), spread(v, 2, 5), ((2, 0),), (11,))
    k, v = rnd(35, (4, 1, 2, 64), (4, 1, 2, 64))
    one_slot = Case(q, spread(k, 1, 9), spread(v, 1, 9), ((2, 0, 3),), (1,))
    for case in (whole, one_page, one_head, one_slot, one_slot.but(k=one_slot.k.clone())):
        agrees(way, backend, case if layout == "NHD" else as_hnd_view(case))


def test_b33_strides_of_size_one_in_contiguous_keys(backend):
    """Strict checks refused slices whose size-1 dimensions had odd strides. https://github.com/vllm-project/vllm/issues/32452"""
    q, k, v = rnd(33, (1, 4, 64), (19, 1, 64), (19, 1, 64))
    want = Case(q, k[None], v[None], ((0,),), (19,)).want()
    got = None
    with served(backend):
        got = attn_core.single_prefill_with_kv_cache(
            spread(q, 0, 7), spread(k, 1, 5), spread(v, 1, 5), return_lse=True, backend=backend
        )
    torch.testing.assert_close(got[0].double(), want[0], atol=2e-3, rtol=0)
    torch.testing.assert_close(got[1].double(), want[1], atol=1e-3, rtol=0)


def _halves(pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return pool[0], pool[1]


def _layer(pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return pool[1, :, 0], pool[1, :, 1]


FORMS = {
    "separate": ((4, 16, 2, 64), None),
    "halves": ((2, 4, 16, 2, 64), _halves),
    "interleaved": ((4, 2, 16, 2, 64), lambda pool: pool),
    "layer": ((3, 4, 2, 16, 2, 64), _layer),
    "view": ((3, 4, 2, 16, 2, 64), lambda pool: attn_core.CacheView.split(pool, 1, lead=(0, 1))),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", ["NHD", "HND", "HND view"])
@pytest.mark.parametrize("fused", [False, True])
def test_b34_append_changes_its_slots_only(backend, form, layout, fused):
    """Append ignored the strides of the cache after a refactor. https://github.com/flashinfer-ai/flashinfer/pull/527"""
    shape, cut = FORMS[form]
    if layout == "HND":
        shape = (*shape[:-3], shape[-2], shape[-3], shape[-1])
    case = base()
    pools = rnd(36, shape, shape) if cut is None else rnd(36, shape)
    before = [pool.clone() for pool in pools]
    cache = tuple(pools) if cut is None else cut(pools[0])
    if layout == "HND view":
        if not isinstance(cache, tuple):
            # the whole allocation seen as HND
            cache = pools[0].transpose(-3, -2)
            cache = cut(cache)
        else:
            cache = tuple(t.transpose(1, 2) for t in cache)
    if fused:
        (qkv,) = rnd(37, (5, 8, 64))
        key, value = qkv[:, 4:6], qkv[:, 6:8]
    else:
        key, value = rnd(37, (5, 2, 64), (5, 2, 64))
    batch, positions = i32(0, 0, 0, 1, 1), i32(34, 35, 36, 14, 15)
    with served(backend):
        attn_core.append_paged_kv_cache(
            key, value, batch, positions, cache, case.indices, case.indptr, case.last_page_len,
            kv_layout=layout[:3], backend=backend,
        )  # fmt: skip
    want = [pool.clone() for pool in before]
    wanted = tuple(want) if cut is None else cut(want[0])
    if isinstance(wanted, attn_core.CacheView):
        wanted = wanted.k, wanted.v
    elif isinstance(wanted, torch.Tensor):
        wanted = wanted.unbind(1)
    for target, rows in zip(wanted, (key, value), strict=True):
        place = target.transpose(1, 2) if layout == "HND" else target
        place[torch.tensor([3, 3, 3, 1, 1]), torch.tensor([2, 3, 4, 14, 15])] = rows
    assert all(same_bits(a, b) for a, b in zip(pools, want, strict=True))
    assert not all(same_bits(a, b) for a, b in zip(pools, before, strict=True))


@pytest.mark.parametrize("way", [D, D_TC, P, R])
def test_b35_tensors_on_two_devices_are_refused(backend, way):
    """Tensors on one device, the current device another: illegal access. https://github.com/flashinfer-ai/flashinfer/issues/924"""
    case = base()
    w = wrapper(way, backend)
    with served(backend):
        plan(w, case)
    before = run(w, case)
    with refused("q", "cpu", "meta"):
        run(w, case.but(q=case.q.to("meta")))
    if way != R:
        for name, cache in (("k", (case.k.to("meta"), case.v)), ("v", (case.k, case.v.to("meta")))):
            with refused(f"{name}:", "cpu", "meta"):
                run(w, case.but(cache=cache))
    else:
        k, v = torch.cat([case.keys(0)[0], case.keys(1)[0]]), torch.cat([case.keys(0)[1], case.keys(1)[1]])
        with refused("v:", "cpu", "meta"):
            w.run(case.q, k, v.to("meta"))
    with refused("out", "cpu", "meta"):
        run(w, case, out=torch.empty_like(case.q, device="meta"))
    with refused("lse", "cpu", "meta"):
        run(w, case, lse=torch.empty(2, 4, device="meta"))
    with refused("float_workspace_buffer", "cpu", "meta"):
        w.reset_workspace_buffer(workspace(1).to("meta"), workspace(1))
    assert all(same_bits(a, b) for a, b in zip(run(w, case), before, strict=True))


@pytest.mark.parametrize("way", [D, P])
def test_b35_workspace_on_another_device_than_q(way):
    """Tensors on one device, the current device another: illegal access. https://github.com/flashinfer-ai/flashinfer/issues/924"""
    case = base()
    kind = (
        attn_core.BatchDecodeWithPagedKVCacheWrapper
        if way in DECODES
        else attn_core.BatchPrefillWithPagedKVCacheWrapper
    )
    w = kind(workspace(1).to("meta"))
    plan(w, case)
    with refused("q", "meta", "cpu", "workspace"):
        run(w, case)


def test_b35_free_functions_refuse_two_devices(backend):
    """Tensors on one device, the current device another: illegal access. https://github.com/flashinfer-ai/flashinfer/issues/924"""
    case = base()
    with refused("append_key", "cpu", "meta"):
        attn_core.append_paged_kv_cache(
            case.k[0, :1].to("meta"), case.v[0, :1], i32(0), i32(0), (case.k, case.v), case.indices,
            case.indptr, case.last_page_len, backend=backend,
        )  # fmt: skip
    with refused("positions", "cpu", "meta"):
        attn_core.append_paged_kv_cache(
            case.k[0, :1], case.v[0, :1], i32(0), i32(0).to("meta"), (case.k, case.v), case.indices,
            case.indptr, case.last_page_len, backend=backend,
        )  # fmt: skip
    with served(backend), refused("cpu", "meta"):
        attn_core.single_prefill_with_kv_cache(case.q, *(t.to("meta") for t in case.keys(0)), backend=backend)
    v, s = torch.zeros(1, 1, 8), torch.zeros(1, 1)
    with refused("v_b", "cpu", "meta"):
        attn_core.merge_state(v, s, v.to("meta"), s.to("meta"))
