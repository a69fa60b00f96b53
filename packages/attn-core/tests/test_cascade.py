import math

import pytest
import torch

from attn_core.cascade import merge_state, merge_state_in_place, merge_states

torch.set_num_threads(1)

INF = math.inf
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 1e-2, torch.float32: 1e-6, torch.float64: 1e-6}


def states(num_states, dtype=torch.float32, device="cpu", rows=5, heads=3, head_dim=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(rows, num_states, heads, head_dim, generator=generator).to(dtype)
    s = torch.randn(rows, num_states, heads, generator=generator) * 4
    return v.to(device), s.to(device)


def oracle(v, s):
    """Merge by the definition, in float64: a state is a value and a mass of 2**s."""
    v, s = v.cpu().double(), s.cpu().double()
    out = torch.zeros(v.shape[0], v.shape[2], v.shape[3], dtype=torch.float64)
    lse = torch.full((v.shape[0], v.shape[2]), -INF, dtype=torch.float64)
    for row in range(v.shape[0]):
        for head in range(v.shape[2]):
            full = [k for k in range(v.shape[1]) if s[row, k, head] not in (-INF, INF)]
            if full:
                mass = torch.tensor([2.0 ** float(s[row, k, head]) for k in full], dtype=torch.float64)
                out[row, head] = (
                    sum(m * v[row, k, head] for m, k in zip(mass, full, strict=True)) / mass.sum()
                )
                lse[row, head] = mass.sum().log2()
    return out, lse


def bits(t):
    """The tensor as integers: -0.0 is not 0.0, NaN is itself."""
    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.contiguous().view(views[t.element_size()])


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_state_matches_oracle(dtype, device):
    v, s = states(2, dtype, device)
    got_v, got_s = merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    want_v, want_s = oracle(v, s)
    assert (got_v.dtype, got_s.dtype) == (dtype, torch.float32)
    assert got_v.is_contiguous()
    assert got_s.is_contiguous()
    torch.testing.assert_close(got_v.cpu().double(), want_v, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(got_s.cpu().double(), want_s, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("num_states", [1, 2, 3, 17])
@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_states_matches_oracle(num_states, dtype, device):
    v, s = states(num_states, dtype, device)
    s[0] = -INF
    s[1, ::2, 0] = -INF
    s[2] = -60000.0  # far below any finite stand-in for -inf
    s[3, 0, 1] = INF
    got_v, got_s = merge_states(v, s)
    want_v, want_s = oracle(v, s.where(s != -60000.0, torch.tensor(-600.0, device=device)))
    want_s[2] -= 60000 - 600
    torch.testing.assert_close(got_v.cpu().double(), want_v, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(got_s.cpu().double(), want_s, atol=1e-5, rtol=1e-6)


def test_merge_is_in_base_2():
    one = torch.ones(1, 1, 1)
    v, s = merge_state(one, torch.tensor([[3.0]]), 5 * one, torch.tensor([[1.0]]))
    assert v.item() == pytest.approx((8 * 1 + 2 * 5) / 10)
    assert s.item() == pytest.approx(math.log2(10))


def test_merge_accumulates_in_float32():
    # 1/3 + 2/3 of fp16 values: rounding the products to fp16 first would be off by a unit in the last place.
    generator = torch.Generator().manual_seed(3)
    v = torch.randn(64, 3, 4, 16, generator=generator).half()
    s = torch.randn(64, 3, 4, generator=generator)
    want = oracle(v, s)[0].half()
    got = merge_states(v, s)[0]
    assert (bits(got) - bits(want)).abs().max() <= 1
    assert (got == want).double().mean() > 0.99


@pytest.mark.parametrize("empty", [-INF, INF])
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_empty(dtype, empty, device):
    v = torch.full((1, 1, 64), math.nan, dtype=dtype, device=device)  # unwritten rows are not looked at
    s = torch.full((1, 1), empty, device=device)
    merged = merge_state(v, s, v, s)
    in_place = (v.clone(), s.clone())
    merge_state_in_place(*in_place, v, s)
    for out, lse in (merged, in_place, merge_states(torch.stack((v, v, v), 1), torch.stack((s, s, s), 1))):
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.equal(lse, torch.full_like(lse, -INF))


@pytest.mark.parametrize("empty", [-INF, INF])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_empty_returns_the_other_bit_for_bit(dtype, empty, device):
    v, s = states(1, dtype, device)
    v, s = v[:, 0].contiguous(), s[:, 0].contiguous()
    v[0, 0, 0], v[0, 0, 1] = -0.0, INF
    s[0, 1] = -0.0
    nothing = torch.full_like(v, math.nan), torch.full_like(s, empty)
    for a, b in (((v, s), nothing), (nothing, (v, s))):
        got_v, got_s = merge_state(*a, *b)
        assert same_bits(got_v, v)
        assert same_bits(got_s, s)
        in_place = (a[0].clone(), a[1].clone())
        merge_state_in_place(*in_place, *b)
        assert same_bits(in_place[0], v)
        assert same_bits(in_place[1], s)
    for at in range(3):
        parts = [nothing, nothing, nothing]
        parts[at] = (v, s)
        got_v, got_s = merge_states(*(torch.stack(part, 1) for part in zip(*parts, strict=True)))
        assert same_bits(got_v, v)
        assert torch.equal(got_s, s)


def test_no_states(device):
    v, s = merge_states(
        torch.empty(3, 0, 2, 4, dtype=torch.float16, device=device), torch.empty(3, 0, 2, device=device)
    )
    assert torch.equal(v, torch.zeros(3, 2, 4, dtype=torch.float16, device=device))
    assert torch.equal(s, torch.full((3, 2), -INF, device=device))


@pytest.mark.parametrize("shape", [(0, 2, 4), (3, 0, 4), (3, 2, 0)])
def test_zero_sizes(shape):
    v, s = torch.empty(shape), torch.zeros(shape[:2])
    assert merge_state(v, s, v, s)[0].shape == shape
    assert merge_state_in_place(v, s, v, s) is None
    for n in (0, 1, 2):
        out, lse = merge_states(v[:, None].expand(-1, n, -1, -1), s[:, None].expand(-1, n, -1))
        assert (out.shape, lse.shape) == (shape, shape[:2])


def test_nan_lse_stays_nan_in_its_cell():
    v, s = states(2)
    s[1, 0, 2] = math.nan
    for out, lse in (merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1]), merge_states(v, s)):
        bad = lse.isnan()
        assert bad.nonzero().tolist() == [[1, 2]]
        assert out.isnan().all(-1).equal(bad)


def test_far_apart_states_do_not_overflow():
    v, _ = states(2)
    s = torch.tensor([3e38, -3e38]).view(1, 2, 1).expand(5, 2, 3)
    for out, lse in (merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1]), merge_states(v, s)):
        assert torch.equal(out, v[:, 0])
        assert torch.equal(lse, s[:, 0])


def test_merge_is_associative_and_commutative(device):
    v, s = states(3, torch.float64, device)
    a, b, c = ((v[:, k], s[:, k]) for k in range(3))
    left = merge_state(*merge_state(*a, *b), *c)
    right = merge_state(*a, *merge_state(*b, *c))
    swapped = merge_state(*c, *merge_state(*b, *a))
    for other in (right, swapped, merge_states(v, s)):
        torch.testing.assert_close(left[0], other[0], atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(left[1], other[1], atol=1e-5, rtol=1e-6)


def test_merged_halves_equal_whole_attention():
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(n, 2, 16, generator=generator, dtype=torch.float64) for n in (4, 11, 11))

    def attend(keys):
        logits = torch.einsum("qhd,khd->qhk", q, k[keys])
        lse = (logits.logsumexp(-1) / math.log(2)).float()
        return torch.einsum("qhk,khd->qhd", logits.softmax(-1), v[keys]), lse

    whole, lse = attend(slice(None))
    got_v, got_s = merge_state(*attend(slice(0, 3)), *attend(slice(3, 11)))
    torch.testing.assert_close(got_v, whole, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(got_s, lse, atol=1e-5, rtol=1e-6)


def test_inputs_are_not_written():
    v, s = states(2)
    before = v.clone(), s.clone()
    merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    merge_states(v, s)
    target = v[:, 0].clone(), s[:, 0].clone()
    merge_state_in_place(*target, v[:, 1], s[:, 1])
    assert torch.equal(v, before[0])
    assert torch.equal(s, before[1])


def test_any_strides():
    v, s = states(2, rows=4, heads=3, head_dim=6)
    want = merge_state(v[:, 0].contiguous(), s[:, 0].contiguous(), v[:, 1].contiguous(), s[:, 1].contiguous())
    wide = torch.empty(3, 4, 12).transpose(0, 1)[..., ::2]  # heads first, every other element
    lse = torch.empty(3, 4).t()
    wide.copy_(v[:, 0])
    lse.copy_(s[:, 0])
    got = merge_state(wide, lse, v[:, 1], s[:, 1])
    assert torch.equal(got[0], want[0])
    assert got[0].is_contiguous()
    assert got[1].is_contiguous()
    merge_state_in_place(wide, lse, v[:, 1], s[:, 1])
    assert torch.equal(wide, want[0])
    assert torch.equal(lse, want[1])


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.uint8])
def test_in_place_mask(mask_dtype, device):
    v, s = states(2, torch.float16, device)
    v[1, 0, 0, 0], s[1, 0, 0] = math.nan, math.nan  # must keep its bits
    v[1, 1], s[1, 1] = INF, 9.0
    mask = torch.tensor([1, 0, 1, 0, 1], device=device).to(mask_dtype)
    target_v, target_s = v[:, 0].clone(), s[:, 0].clone()
    want_v, want_s = merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    assert merge_state_in_place(target_v, target_s, v[:, 1], s[:, 1], mask) is None
    on = mask.bool()
    assert same_bits(target_v[on], want_v[on])
    assert same_bits(target_s[on], want_s[on])
    assert same_bits(target_v[~on], v[:, 0][~on])
    assert same_bits(target_s[~on], s[:, 0][~on])


def test_in_place_writes_only_its_rows_of_a_larger_buffer():
    v, s = states(2, rows=6)
    buffer_v, buffer_s = v[:, 0].clone(), s[:, 0].clone()
    merge_state_in_place(buffer_v[2:4], buffer_s[2:4], v[2:4, 1], s[2:4, 1])
    keep = torch.tensor([0, 1, 4, 5])
    assert same_bits(buffer_v[keep], v[keep, 0])
    assert same_bits(buffer_s[keep], s[keep, 0])
    want_v, want_s = merge_state(v[2:4, 0], s[2:4, 0], v[2:4, 1], s[2:4, 1])
    assert same_bits(buffer_v[2:4], want_v)
    assert same_bits(buffer_s[2:4], want_s)


def test_in_place_with_itself():
    v, s = states(1)
    v, s = v[:, 0].clone(), s[:, 0].clone()
    before = v.clone(), s.clone()
    merge_state_in_place(v, s, v, s)
    torch.testing.assert_close(v, before[0])
    torch.testing.assert_close(s, before[1] + 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32])
@pytest.mark.parametrize("argument", ["s", "s_other"])
def test_lse_must_be_float32(argument, dtype):
    v, s = states(2)
    args = {"v": v[:, 0].clone(), "s": s[:, 0].clone(), "v_other": v[:, 1], "s_other": s[:, 1]}
    args[argument] = args[argument].to(dtype)
    before = args["v"].clone(), args["s"].clone()
    with pytest.raises(TypeError, match=rf"^{argument}: needs float32, got {dtype}"):
        merge_state_in_place(**args)
    assert torch.equal(args["v"], before[0])
    assert torch.equal(args["s"], before[1])


def test_lse_must_be_float32_out_of_place():
    v, s = states(2)
    with pytest.raises(TypeError, match=r"^s_a: needs float32"):
        merge_state(v[:, 0], s[:, 0].half(), v[:, 1], s[:, 1])
    with pytest.raises(TypeError, match=r"^s_b: needs float32"):
        merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1].double())
    with pytest.raises(TypeError, match=r"^s: needs float32"):
        merge_states(v, s.half())


V, S = torch.zeros(4, 2, 8), torch.zeros(4, 2)


@pytest.mark.parametrize(
    ("changed", "error", "match"),
    [
        ({"v": V.int()}, TypeError, "^v: needs float16"),
        ({"v": V.to(torch.float8_e4m3fn)}, TypeError, "^v: needs float16"),
        ({"v": V[0]}, ValueError, r"^v: needs 3 dimensions, got shape \(2, 8\)"),
        ({"s": S[:3]}, ValueError, r"^s: needs shape \(4, 2\).*got \(3, 2\)"),
        ({"s": S.t()}, ValueError, r"^s: needs shape \(4, 2\).*got \(2, 4\)"),
        ({"v_other": V.half()}, TypeError, "^v_other: needs torch.float32.*got torch.float16"),
        ({"v_other": V[:1], "s_other": S[:1]}, ValueError, r"^v_other: needs shape \(4, 2, 8\)"),
        ({"v_other": V[..., :1]}, ValueError, r"^v_other: needs shape \(4, 2, 8\)"),
        ({"s_other": S[:1]}, ValueError, r"^s_other: needs shape \(4, 2\)"),
        ({"mask": torch.ones(4)}, TypeError, "^mask: needs bool or uint8"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, ValueError, r"^mask: needs shape \(4,\)"),
        ({"mask": torch.ones(4, 1, dtype=torch.bool)}, ValueError, r"^mask: needs shape \(4,\)"),
        ({"v": V[:1].expand(4, -1, -1)}, ValueError, "^v: needs distinct memory"),
        ({"s": S[:, :1].expand(-1, 2)}, ValueError, "^s: needs distinct memory"),
        ({"v_other": V.to("meta")}, ValueError, "^s_other: needs the device of v_other, meta"),
        ({"v_other": V.to("meta"), "s_other": S.to("meta")}, ValueError, "^v_other: needs cpu"),
        ({"mask": torch.ones(4, dtype=torch.bool, device="meta")}, ValueError, "^mask: needs the device"),
    ],
)
def test_bad_input_is_named_and_changes_nothing(changed, error, match):
    args = {"v": V.clone(), "s": S.clone(), "v_other": V + 1, "s_other": S + 1} | changed
    before = args["v"].clone(), args["s"].clone()
    with pytest.raises(error, match=match):
        merge_state_in_place(**args)
    assert torch.equal(args["v"], before[0])
    assert torch.equal(args["s"], before[1])


@pytest.mark.parametrize("wrong", [None, [[1.0]], 3])
def test_what_is_no_tensor_is_named(wrong):
    for call, names in (
        (
            lambda **o: merge_state(**{"v_a": V, "s_a": S, "v_b": V, "s_b": S, **o}),
            ("v_a", "s_a", "v_b", "s_b"),
        ),
        (lambda **o: merge_states(**{"v": V[:, None], "s": S[:, None], **o}), ("v", "s")),
    ):
        for name in names:
            with pytest.raises(TypeError, match=rf"^{name}: needs a tensor, got .*core\.merge-type"):
                call(**{name: wrong})


def test_merge_states_bad_shapes():
    with pytest.raises(ValueError, match=r"^v: needs 4 dimensions"):
        merge_states(V, S)
    with pytest.raises(ValueError, match=r"^s: needs shape \(4, 2, 3\)"):
        merge_states(torch.zeros(4, 2, 3, 8), torch.zeros(2, 4, 3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_graph_replay_follows_states_and_mask():
    v, s = states(2, torch.float16, "cuda")
    v_a, s_a = v[:, 0].clone(), s[:, 0].clone()
    mask = torch.ones(5, dtype=torch.bool, device="cuda")
    merge_state_in_place(v_a.clone(), s_a.clone(), v[:, 1], s[:, 1], mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = merge_states(v, s)
        merge_state_in_place(v_a, s_a, v[:, 1], s[:, 1], mask)
    for seed in (1, 2):
        new_v, new_s = states(2, torch.float16, "cuda", seed=seed)
        new_s[0] = -INF
        v.copy_(new_v)
        s.copy_(new_s)
        v_a.copy_(v[:, 0])
        s_a.copy_(s[:, 0])
        mask.copy_(torch.arange(5, device="cuda") % 2 == seed % 2)
        graph.replay()
        want_v, want_s = merge_states(v, s)
        assert same_bits(out, want_v)
        assert same_bits(lse, want_s)
        in_place = v[:, 0].clone(), s[:, 0].clone()
        merge_state_in_place(*in_place, v[:, 1], s[:, 1], mask)
        assert same_bits(v_a, in_place[0])
        assert same_bits(s_a, in_place[1])


@pytest.mark.parametrize("which", [merge_state, merge_states, merge_state_in_place])
def test_results_require_no_gradient_whatever_the_states_do(which):
    v, s = states(2)
    want = merge_states(v, s)
    v.requires_grad_(), s.requires_grad_()
    if which is merge_states:
        got = merge_states(v, s)
    elif which is merge_state:
        got = merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
    else:
        got = [t[:, 0].detach().clone().requires_grad_() for t in (v, s)]
        merge_state_in_place(*got, v[:, 1], s[:, 1])
        assert all(t.grad_fn is None for t in got)
        got = [t.detach() for t in got]
    for a, b in zip(got, want, strict=True):
        assert not a.requires_grad
        torch.testing.assert_close(a, b)
