from __future__ import annotations

import pytest
import torch

from .support import D_TC, Asked, Case, D, P, Rule, attend, base, close, same_bits


def poisoned(value: float, which: str) -> Case:
    """BASE and a short third request; the slots past each length and two pages of nobody overwritten."""
    case = base()
    pair = []
    for name, t in (("k", case.k), ("v", case.v)):
        # page 0 belongs to nobody: where a kernel clamps an index, that is what it finds
        pool = torch.cat([t[:1], t, t[:2]])
        for unused in (pool[0], pool[4, 5:], pool[5, 3:], pool[6]):
            unused.fill_(value if name in which else 0)
        pair.append(pool)
    q = torch.cat([case.q, case.q[:1]])
    return Case(q, pair[0], pair[1], ((3, 1, 4), (2,), (5,)), (5, 16, 3))


@pytest.mark.parametrize("way", [D, D_TC, P])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_b26_unused_slots_are_not_seen(backend, way, layout):
    """NaN in the unwritten tail of a page made the output NaN. https://github.com/Dao-AILab/flash-attention/issues/2374"""
    for rule in (Rule(), Rule(causal=True)) if way == P else (Rule(),):
        clean = poisoned(0.0, "kv")
        want = clean.want(rule)
        if layout == "HND":
            clean = clean.but(k=clean.k.transpose(1, 2), v=clean.v.transpose(1, 2), layout=layout)
        before = attend(way, backend, clean, Asked(rule))
        close(before, want, torch.float16)
        for value in (float("nan"), float("inf"), 60000.0):
            for which in ("kv", "k", "v"):
                case = poisoned(value, which)
                if layout == "HND":
                    case = case.but(k=case.k.transpose(1, 2), v=case.v.transpose(1, 2), layout=layout)
                after = attend(way, backend, case, Asked(rule))
                assert all(same_bits(a, b) for a, b in zip(after, before, strict=True)), (value, which)


def test_b26_unused_slots_are_not_seen_by_verify(backend):
    """NaN in the unwritten tail of a page made the output NaN. https://github.com/Dao-AILab/flash-attention/issues/2374"""
    rows = base().q[[0, 1, 0, 1, 1, 0]]
    clean = poisoned(0.0, "kv").but(q=rows, q_lens=(2,) * 3)
    before = attend(D_TC, backend, clean)
    close(before, clean.want(Rule(causal=True)), torch.float16)
    for value in (float("nan"), float("inf"), 60000.0):
        after = attend(D_TC, backend, poisoned(value, "kv").but(q=rows, q_lens=(2,) * 3))
        assert all(same_bits(a, b) for a, b in zip(after, before, strict=True)), value
