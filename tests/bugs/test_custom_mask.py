from __future__ import annotations

import pytest
import torch

import attn_core

from .support import (
    D_TC,
    DECODES,
    S1,
    Asked,
    Case,
    D,
    P,
    R,
    Rule,
    agrees,
    attend,
    close,
    paged,
    plan,
    refused,
    rnd,
    run,
    same_bits,
    served,
    wrapper,
)

PACKED = torch.tensor([245, 101, 171, 171, 78, 46, 11], dtype=torch.uint8)


def two_masks() -> Case:
    """Requests of 3 rows over 5 keys and 4 over 9, with random masks."""
    q, k, v = rnd(14, (7, 2, 64), (14, 1, 64), (14, 1, 64))
    generator = torch.Generator().manual_seed(15)
    masks = [torch.rand(rows, keys, generator=generator) > 0.4 for rows, keys in ((3, 5), (4, 9))]
    for mask in masks:
        mask[:, 0] = True
    pools = [torch.zeros(2, 16, 1, 64, dtype=torch.float16) for _ in range(2)]
    for pool, tokens in zip(pools, (k, v), strict=True):
        pool[1, :5], pool[0, :9] = tokens[:5], tokens[5:]
    return Case(q, *pools, ((1,), (0,)), (5, 9), (3, 4), masks=tuple(masks))


SUMS = (9.44019, -38.88183)


@pytest.mark.parametrize("way", [P, R])
def test_b48_packed_mask_alone_has_byte_offsets(backend, way):
    """Given only packed bits, offsets stayed in bits: later requests had wrong masks. https://github.com/flashinfer-ai/flashinfer/pull/2201"""
    case = two_masks()
    flat = torch.cat([mask.flatten() for mask in case.masks])
    want = case.want()
    agrees(way, backend, case, sums=SUMS)
    packed, offsets = attn_core.segment_packbits(flat, torch.tensor([0, 15, 51]), "little")
    assert torch.equal(packed, PACKED)
    assert offsets.tolist() == [0, 2, 7]
    for given in (
        {"custom_mask": None, "packed_custom_mask": PACKED},
        {"custom_mask": flat, "packed_custom_mask": PACKED},
        {"custom_mask": flat.to(torch.uint8)},
        {"custom_mask": flat, "causal": True},  # a custom mask replaces causal
    ):
        close(attend(way, backend, case, Asked(plan=given)), want, torch.float16)


def test_b48_two_masks_that_differ_are_refused(backend):
    """Given only packed bits, offsets stayed in bits: later requests had wrong masks. https://github.com/flashinfer-ai/flashinfer/pull/2201"""
    case = two_masks()
    other = PACKED.clone()
    other[0] ^= 2
    w = wrapper(P, backend)
    with served(backend):
        plan(w, case)
    before = run(w, case)
    with refused("packed_custom_mask", "custom_mask"):
        plan(w, case, Asked(plan={"packed_custom_mask": other}))
    assert all(same_bits(a, b) for a, b in zip(run(w, case), before, strict=True))


def test_x4_packed_mask_of_one_request(backend):
    """Given only packed bits, offsets stayed in bits: later requests had wrong masks. https://github.com/flashinfer-ai/flashinfer/pull/2201"""
    case = two_masks()
    for n, bits in enumerate((PACKED[:2], PACKED[2:])):
        k, v = case.keys(n)
        want = case.but(
            q=case.queries(n), tables=case.tables[n : n + 1], last=case.last[n : n + 1],
            q_lens=case.q_lens[n : n + 1], masks=case.masks[n : n + 1],
        ).want()  # fmt: skip
        got = None
        with served(backend):
            got = attn_core.single_prefill_with_kv_cache(
                case.queries(n), k, v, packed_custom_mask=bits, return_lse=True, backend=backend
            )
        close(got, want, torch.float16)


def test_b49_mask_of_another_shape_is_refused(backend):
    """A mask too small was read past its end. https://github.com/flashinfer-ai/flashinfer/issues/3176"""
    q, k, v = rnd(49, (10, 4, 64), (20, 2, 64), (20, 2, 64))
    mask = torch.rand(10, 20, generator=torch.Generator().manual_seed(49)) > 0.4
    mask[:, 0] = True

    def ask(given, **more):
        return attn_core.single_prefill_with_kv_cache(
            q, k, v, custom_mask=given, return_lse=True, backend=backend, **more
        )

    for shape in ((10, 15), (9, 20), (20, 10), (2, 100), (199,), (201,)):
        with refused("custom_mask", "200 elements", "(10, 20)", shape):
            ask(torch.ones(shape, dtype=torch.bool))
    for dtype in (torch.float32, torch.float16, torch.int32, torch.int64):
        with refused("custom_mask", "bool", dtype, kind=TypeError):
            ask(mask.to(dtype))
    for size in (24, 26):
        with refused("packed_custom_mask", "25 bytes", size):
            ask(None, packed_custom_mask=torch.zeros(size, dtype=torch.uint8))
    with refused("packed_custom_mask", "uint8", torch.bool, kind=TypeError):
        ask(None, packed_custom_mask=mask.flatten()[:25])
    case = paged(q, k, v, 16).but(masks=(mask,))
    for given in (mask, mask.flatten(), mask.to(torch.uint8), mask.T.contiguous().T):
        with served(backend):
            close(ask(given), case.want(), torch.float16)


@pytest.mark.parametrize("way", [P, R])
def test_b49_mask_off_by_one_is_refused(backend, way):
    """A mask too small was read past its end. https://github.com/flashinfer-ai/flashinfer/issues/1005"""
    case = two_masks()
    flat = torch.cat([mask.flatten() for mask in case.masks])
    w = wrapper(way, backend)
    with served(backend):
        plan(w, case)
    before = run(w, case)
    for given in (flat[:-1], torch.cat([flat, flat[:1]])):
        with refused("custom_mask", 51, given.numel()):
            plan(w, case, Asked(plan={"custom_mask": given}))
    for bits in (PACKED[:-1], torch.cat([PACKED, PACKED[:1]])):
        with refused("packed_custom_mask", "7 bytes", bits.numel()):
            plan(w, case, Asked(plan={"custom_mask": None, "packed_custom_mask": bits}))
    with refused("custom_mask", "bool", torch.float32, kind=TypeError):
        plan(w, case, Asked(plan={"custom_mask": flat.float()}))
    assert all(same_bits(a, b) for a, b in zip(run(w, case), before, strict=True))


def tree() -> Case:
    """Five prefix keys and four drafts with parents [-1, 0, 0, 1]: each sees its ancestors."""
    q, k, v = rnd(16, (4, 4, 64), (9, 2, 64), (9, 2, 64))
    parents = (-1, 0, 0, 1)
    mask = torch.zeros(4, 9, dtype=torch.bool)
    mask[:, :5] = True
    for row in range(4):
        node = row
        while node >= 0:
            mask[row, 5 + node] = True
            node = parents[node]
    return paged(q, k, v, 4, (2, 0, 1)).but(masks=(mask,))


@pytest.mark.parametrize("way", [P, R, S1])
def test_b52_tree_of_drafts(backend, way):
    """A causal verify of a tree looked plausible and was wrong. https://github.com/flashinfer-ai/flashinfer/issues/152"""
    case = tree()
    agrees(way, backend, case, sums=[34.34314])
    chain = case.but(masks=())
    error = (attend(way, backend, chain, Asked(Rule(causal=True)))[0].double() - case.want()[0]).abs()
    for got, figure in zip(error.amax((1, 2)).tolist(), (0, 0, 0.706, 1.637), strict=True):
        assert abs(got - figure) < 3e-3


@pytest.mark.parametrize("way", [D, *DECODES[1:]])
def test_b52_decode_takes_no_tree(backend, way):
    """A causal verify of a tree looked plausible and was wrong. https://github.com/flashinfer-ai/flashinfer/issues/152"""
    case = tree().but(masks=())
    one = case.but(q=case.q[:1], q_lens=(1,))
    for name in ("custom_mask", "packed_custom_mask"):
        with refused(name, kind=TypeError):
            plan(wrapper(way, backend), one, Asked(plan={name: torch.ones(9, dtype=torch.bool)}))
    doc = attn_core.BatchDecodeWithPagedKVCacheWrapper.__doc__
    assert "chain" in doc
    assert "tree needs ``BatchPrefillWithPagedKVCacheWrapper`` and a custom mask" in " ".join(doc.split())
    # what verify does compute is the chain
    if way == D_TC:
        close(attend(way, backend, case), case.want(Rule(causal=True)), torch.float16)
