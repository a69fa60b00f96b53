"""The kit's parts: combination, cases, oracle, comparison, memory."""

import itertools
import math
import subprocess
import sys

import pytest
import torch

from attn_core.problem import AttentionProblem, MaskMode, Op, PosEncoding, RaggedKV
from attn_core.quantization import segment_packbits
from attn_core.reference import ReferenceBackend
from attn_core.testing import cases_of
from attn_core.testing.cases import KINDS
from attn_core.testing.kit import CPU
from attn_core.testing.memory import lay_kv, lay_out, lay_q, odd, same_bits
from attn_core.testing.mini import Mini
from attn_core.testing.oracle import Request, Scales, attention, visible
from attn_core.testing.pairwise import cover
from attn_core.testing.tolerance import compare
from attn_core.testing.watch import Watch
from attn_core.testing.world import world_of

F64 = torch.float64


def never(a, left, b, right):
    return False


# --- combination --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(2,), (3, 2), (4, 4, 4), (7, 5, 3, 3, 2, 2, 2)])
def test_every_pair_meets(sizes):
    axes = {f"a{n}": list(range(size)) for n, size in enumerate(sizes)}
    rows = cover(axes, never)
    for (a, left), (b, right) in itertools.combinations(axes.items(), 2):
        assert {(row[a], row[b]) for row in rows} == set(itertools.product(left, right))
    for name, values in axes.items():
        assert {row[name] for row in rows} == set(values)
    if len(sizes) > 1:
        largest, second = sorted(sizes)[-1], sorted(sizes)[-2]
        assert largest * second <= len(rows) <= 1.7 * largest * second
    assert rows == cover(axes, never)


def test_values_that_exclude_each_other_never_meet():
    axes = {"a": [0, 1, 2], "b": [0, 1, 2], "c": [0, 1]}
    rows = cover(axes, lambda a, left, b, right: (a, b) == ("a", "b") and left == right)
    met = {(row["a"], row["b"]) for row in rows}
    assert met == {(a, b) for a in range(3) for b in range(3) if a != b}


def test_a_pair_that_no_third_axis_goes_with_is_left_out():
    axes = {"a": [0, 1], "b": [0, 1], "c": [0, 1]}
    # c goes with equal values only of neither: (a=0, b=0) leaves nothing for c.
    rows = cover(
        axes, lambda a, left, b, right: b == "c" and left == 0 and (right == 0 if a == "a" else right == 1)
    )
    assert {(row["a"], row["b"]) for row in rows} == {(0, 1), (1, 0), (1, 1)}


@pytest.mark.parametrize(
    ("axes", "clash", "text"),
    [
        ({"a": [1], "b": []}, never, "got none for b"),
        ({"a": [1], "b": [1]}, lambda *_: True, "go together, got none"),
    ],
)
def test_nothing_to_combine_is_an_error(axes, clash, text):
    with pytest.raises(ValueError, match=text):
        cover(axes, clash)


# --- cases --------------------------------------------------------------------------------------------


def test_cases_of_a_full_backend_are_few_distinct_and_complete():
    backend = ReferenceBackend()
    found, cap = cases_of(backend, CPU), backend.paths[0].capability
    assert 300 <= len(list(found)) <= 600
    assert len({str(case) for case in found}) == len(list(found))
    problems = [case.problem for case in found.attention]
    assert {p.op for p in problems} | {Op.APPEND} == set(Op)
    for op in set(Op) - {Op.APPEND}:
        mine = [p for p in problems if p.op is op]
        assert {(p.q_dtype, p.kv_dtype) for p in mine} == set(itertools.product(cap.q_dtypes, cap.kv_dtypes))
        assert {p.gqa_group_size for p in mine} == {1, 4, 5, 8, 16}
        assert {p.pos_encoding for p in mine} == set(PosEncoding)
        assert {p.needs_lse for p in mine} == {True, False}
    assert {case.problem.op for case in found.graph} == {
        Op.DECODE, Op.VERIFY, Op.PREFILL_PAGED, Op.PREFILL_RAGGED
    }  # fmt: skip
    assert all(KINDS[kind](found) for kind in KINDS)


def test_cases_are_the_same_in_every_process():
    code = (
        "import torch; from attn_core.testing import cases_of; from attn_core.testing.mini import Mini;"
        "from attn_core.testing.kit import CPU; found = list(cases_of(Mini(), CPU));"
        "print(len(found), sum(case.seed for case in found))"
    )
    found = list(cases_of(Mini(), CPU))
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == [str(len(found)), str(sum(case.seed for case in found))]


# --- oracle -------------------------------------------------------------------------------------------


def problem(**changes):
    base = {
        "op": Op.PREFILL_RAGGED, "num_qo_heads": 2, "num_kv_heads": 1, "head_dim_qk": 4, "head_dim_vo": 4,
        "q_dtype": F64, "kv_dtype": F64, "o_dtype": F64, "kv": RaggedKV(), "sm_scale": 0.5,
    }  # fmt: skip
    return AttentionProblem(**(base | changes))


def request(q_len, kv_len, mask=None):
    make = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(n, h, 4, generator=make, dtype=F64) for n, h in ((q_len, 2), (kv_len, 1), (kv_len, 1))
    )
    return Request(q, k, v, mask)


def test_oracle_is_softmax_attention():
    r = request(3, 5)
    out, lse = attention(problem(mask=MaskMode.CAUSAL), [r], Scales())
    seen = torch.ones(3, 5, dtype=torch.bool).tril(2)
    q, k, v = (t.transpose(0, 1) for t in (r.q, r.k.expand(-1, 2, -1), r.v.expand(-1, 2, -1)))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=0.5)
    torch.testing.assert_close(out, want.transpose(0, 1))
    logits = (q @ k.transpose(1, 2) * 0.5).masked_fill(~seen, -torch.inf)
    torch.testing.assert_close(2**lse, logits.exp().sum(-1).T)


def test_oracle_scales_and_caps():
    r = request(1, 2)
    out, lse = attention(problem(logits_soft_cap=2.0), [r], Scales(q=3.0, k=0.5, v=7.0))
    for head in range(2):
        x = [2 * math.tanh(0.5 * 1.5 * float(r.q[0, head] @ r.k[j, 0]) / 2) for j in range(2)]
        weight = [math.exp(a) / sum(map(math.exp, x)) for a in x]
        want = 7 * (weight[0] * r.v[0, 0] + weight[1] * r.v[1, 0])
        torch.testing.assert_close(out[0, head], want)
        assert float(lse[0, head]) == pytest.approx(math.log2(sum(map(math.exp, x))))


def test_oracle_rows_without_a_key_are_zero_and_minus_infinity():
    out, lse = attention(problem(mask=MaskMode.CAUSAL), [request(3, 1), request(2, 0)], Scales())
    assert out[[0, 1, 3, 4]].eq(0).all()
    assert lse[[0, 1, 3, 4]].eq(-math.inf).all()
    assert lse[2].isfinite().all()


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({}, ["11111", "11111"]),
        ({"mask": MaskMode.CAUSAL}, ["11110", "11111"]),
        ({"mask": MaskMode.CAUSAL, "window_left": 0}, ["00010", "00001"]),
        ({"mask": MaskMode.CAUSAL, "window_left": 2}, ["01110", "00111"]),
        ({"window_left": 1}, ["00111", "00011"]),
    ],
)
def test_visible_keys(changes, want):
    seen = visible(problem(**changes), 2, 5, None)
    assert ["".join(str(int(cell)) for cell in row) for row in seen] == want


def test_rope_turns_pairs_and_keeps_relative_positions():
    p = problem(pos_encoding=PosEncoding.ROPE_LLAMA, num_qo_heads=1, rope_theta=100.0, rope_scale=2.0)
    q, k = torch.tensor([[[1.0, 0, 0, 0]]], dtype=F64), torch.zeros(4, 1, 4, dtype=F64)
    k[..., 0] = 1.0  # the first pair turns by position / rope_scale
    _, lse = attention(p, [Request(q, k, k)], Scales())
    want = sum(math.exp(0.5 * math.cos((3 - j) / 2)) for j in range(4))
    assert float(lse) == pytest.approx(math.log2(want))


@pytest.mark.parametrize(
    ("heads", "slopes"), [(4, [2**-2, 2**-4, 2**-6, 2**-8]), (3, [2**-4, 2**-8, 2**-2]), (1, [2**-8])]
)
def test_alibi_slopes(heads, slopes):
    p = problem(pos_encoding=PosEncoding.ALIBI, num_qo_heads=heads, num_kv_heads=1)
    zero = torch.zeros(1, heads, 4, dtype=F64)
    _, lse = attention(p, [Request(zero, torch.zeros(3, 1, 4), torch.zeros(3, 1, 4))], Scales())
    want = [math.log2(sum(math.exp(slope * j) for j in range(3))) for slope in slopes]
    torch.testing.assert_close(lse[0], torch.tensor(want, dtype=F64))


# --- comparison, memory, watching ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("got", "want", "text"),
    [
        ([1.0, 2.0], [1.0, 2.01], None),
        ([1.0, 2.0], [1.0, 2.1], "1 of 2 elements differ"),
        ([math.nan, 2.0], [1.0, 2.0], "1 of 2 elements are NaN"),
        ([math.nan], [math.nan], "NaN"),
        ([-math.inf, 0.0], [-math.inf, 0.0], None),
        ([-5e4, 0.0], [-math.inf, 0.0], "infinities differ in 1"),
        ([math.inf], [1.0], "infinities differ"),
        ([1.0], [1.0, 1.0], "shape"),
        ([], [], None),
    ],
)
def test_compare(got, want, text):
    found = compare(torch.tensor(got), torch.tensor(want), 0.01, 1.0, "out")
    assert found is None if text is None else text in found


@pytest.mark.parametrize("form", ["plain", "five", "pool", "fused", "apart", "ones", "thin"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_cache_forms_differ_in_memory_only(form, dtype):
    pair = lay_kv(form, (3, 1, 2, 8), (3, 1, 2, 8), 2, dtype, torch.device("cpu"))
    assert pair.k.shape == pair.v.shape == (3, 1, 2, 8)
    strides = {
        "plain": (16, 16, 8, 1),
        "five": (32, 16, 8, 1),
        "pool": (64, 16, 8, 1),
        "fused": (40, 40, 8, 1),
    }
    strides |= {"apart": (32, 32, 16, 1), "ones": (16, 7, 8, 1), "thin": (32, 32, 16, 2)}
    assert pair.k.stride() == strides[form]
    assert (pair.k.stride() == pair.v.stride()) is (form != "apart")
    assert pair.k.data_ptr() != pair.v.data_ptr()


def test_q_and_out_forms():
    for form in ("plain", "fused", "spread", "ones"):
        q, block = lay_q(form, 1, 3, 8, torch.float32, torch.device("cpu"))
        assert q.shape == (1, 3, 8)
        assert q.is_contiguous() is (form in ("plain", "fused", "ones"))
        assert block.is_contiguous()
    out = lay_out("strided", (4, 3, 8), torch.bfloat16, torch.device("cpu"))
    assert out.shape == (4, 3, 8)
    assert not out.is_contiguous()
    assert out.isnan().all()
    assert odd(torch.zeros(1, 1, 4)).stride() == (7, 7, 1)


def test_the_cache_holds_the_requests_and_the_spare_value_the_rest():
    looked_at = [case for case in cases_of(Mini(), CPU).attention if case.problem.op.paged][::7]
    assert len({case.form for case in looked_at}) > 4
    for case in looked_at:
        world, p = world_of(case), case.problem
        world.lay(96.0)
        owned = set()
        for n, r in enumerate(world.requests):
            at = world._places(n, r.k.shape[0])
            assert same_bits(world._slots(world.kv.k).float()[at], r.k.float())
            assert same_bits(world._slots(world.kv.v).float()[at], r.v.float())
            assert same_bits(world.alone(n).q, r.q)
            owned |= set(zip(*(part.tolist() for part in at), strict=True))
        memory = sum(block.numel() for block in world.blocks)
        filled = world.q.numel() + len(owned) * p.num_kv_heads * (p.head_dim_qk + p.head_dim_vo)
        assert sum(int((block.float() == 96).sum()) for block in world.blocks) == memory - filled


def test_mask_bits_are_little_endian_by_request():
    case = next(c for c in cases_of(Mini(), CPU).attention if c.mask == "packed" and len(c.lengths.q_len) > 2)
    world = world_of(case)
    ends = [
        0,
        *itertools.accumulate(q * kv for q, kv in zip(case.lengths.q_len, case.lengths.kv_len, strict=True)),
    ]
    want, want_ends = segment_packbits(world.mask(), torch.tensor(ends, dtype=torch.int32), "little")
    bits, indptr = world.mask_bits()
    assert torch.equal(bits, want)
    assert indptr.tolist() == want_ends.tolist()


def test_watch_sees_what_is_kept_and_only_that():
    kept = []
    with Watch() as watch:
        gone = torch.ones(2) + 1
        kept.append(gone * 2)
        del gone
    assert [t.tolist() for t in watch.alive()] == [[4.0, 4.0]]
    assert watch.alive((kept[0],)) == []
    assert watch.devices == {"cpu"}
