"""The algorithm against an oracle, counters, sizes, bad input."""

import math

import pytest
import torch

from attn_core import sampling_math
from attn_core.sampling import chain_speculative_sampling

from .sampling_kit import one_hot, random_case, run


def draw_oracle(weights, u):
    """Inverse CDF in exact rational order: the first index whose running sum exceeds u * total."""
    total, running = math.fsum(weights), 0.0
    for index, weight in enumerate(weights):
        running += weight
        if running > u * total:
            return index
    raise AssertionError("nothing to draw")


def chain_oracle(draft, ids, target, seed, offset):
    batch, n, vocab = draft.shape
    u_accept, u_token = sampling_math.uniforms(torch.tensor([seed]), torch.tensor([offset]), batch, n + 1)
    tokens, accepted, emitted = [], [], []
    for r in range(batch):
        length = next((i for i in range(n) if not 0 <= ids[r, i] < vocab), n)
        passes = [
            float(u_accept[r, i]) * float(draft[r, i, ids[r, i]]) < float(target[r, i, ids[r, i]])
            for i in range(length)
        ]
        prefix = passes.index(False) if False in passes else length
        row = target[r, prefix].double().tolist()
        if prefix < length:
            residual = [max(p - q, 0.0) for p, q in zip(row, draft[r, prefix].double().tolist(), strict=True)]
            row = residual if any(residual) else row
        token = draw_oracle(row, float(u_token[r, prefix]))
        tokens.append(ids[r, :prefix].tolist() + [token] + [-1] * (n - prefix))
        accepted.append(sum(passes))
        emitted.append(prefix)
    return tokens, accepted, emitted


@pytest.mark.parametrize(
    ("batch", "n", "vocab"), [(200, 3, 5), (40, 1, 997), (40, 7, 111), (5, 0, 9), (7, 4, 1)]
)
def test_matches_oracle(batch, n, vocab, device):
    draft, ids, target = random_case(batch, n, vocab, seed=vocab)
    if n > 2:
        ids[::5, 2] = -1
        ids[1::5, 0] = -1
    want = chain_oracle(draft, ids, target, seed=11, offset=3)
    case = (draft.to(device), ids.to(device), target.to(device))
    assert run(case, seed=11, offset=3) == want


@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype, id_dtype):
    draft, ids, target = random_case(50, 3, 33, dtype=dtype)
    tokens, accepted, emitted = chain_speculative_sampling(draft, ids.to(id_dtype), target, seed=5, offset=0)
    assert (tokens.tolist(), accepted.tolist(), emitted.tolist()) == chain_oracle(draft, ids, target, 5, 0)
    assert {t.dtype for t in (tokens, accepted, emitted)} == {torch.int32}


def test_any_strides_and_inputs_are_kept():
    draft, ids, target = random_case(6, 3, 10)
    want = run((draft, ids, target), seed=1, offset=0)
    wide_draft = torch.zeros(3, 6, 20).transpose(0, 1)[..., ::2]
    wide_draft.copy_(draft)
    wide_target = torch.zeros(10, 6, 4).permute(1, 2, 0)
    wide_target.copy_(target)
    case = (wide_draft, ids.t().contiguous().t(), wide_target)
    before = [t.clone() for t in case]
    assert run(case, seed=1, offset=0) == want
    assert all(torch.equal(a, b) for a, b in zip(case, before, strict=True))


@pytest.mark.parametrize("vocab", [1, 33, 111, 997, 1024, 32001])
@pytest.mark.parametrize("n", [1, 3])
def test_one_hot_target_that_agrees_is_returned(n, vocab):
    generator = torch.Generator().manual_seed(0)
    draft = torch.rand(3, n, vocab, generator=generator)
    draft /= draft.sum(-1, keepdim=True)
    want = torch.randint(vocab, (3, n + 1), generator=generator)
    target = torch.zeros(3, n + 1, vocab).scatter_(2, want[..., None], 1.0)
    tokens, accepted, emitted = chain_speculative_sampling(draft, want[:, :n], target)
    assert torch.equal(tokens, want.int())
    assert accepted.tolist() == emitted.tolist() == [n] * 3


def test_disjoint_supports_reject_and_draw_from_the_residual():
    vocab = 1025
    draft, target = torch.zeros(4, 3, vocab), torch.zeros(4, 4, vocab)
    draft[..., :512], target[..., 512:] = 1 / 512, 1 / 513
    tokens, accepted, emitted = chain_speculative_sampling(draft, torch.zeros(4, 3).int(), target)
    assert (tokens[:, 0] >= 512).all()
    assert (tokens[:, 1:] == -1).all()
    assert accepted.tolist() == emitted.tolist() == [0] * 4


def test_accepted_counts_behind_the_first_rejection():
    draft = one_hot(0, 1, 2)[None]
    target = one_hot(3, 1, 2, 0)[None]
    assert run((draft, torch.tensor([[0, 1, 2]]), target)) == ([[3, -1, -1, -1]], [2], [0])


def test_weights_of_very_different_size():
    # The residual's mass is in the last id; a float32 running sum over the others would end above it.
    vocab = 70_000
    target = torch.full((1, 1, vocab), 1e-9)
    target[0, 0, -1] = 1.0
    draws = target.expand(400, 1, vocab)
    tokens, _, _ = chain_speculative_sampling(
        torch.zeros(400, 0, vocab), torch.zeros(400, 0).long(), draws, seed=1, offset=0
    )
    assert (tokens == vocab - 1).double().mean() > 0.99
    tiny = torch.zeros(1, 1, 8)
    tiny[0, 0, 5] = 2.0**-119  # the smallest row that still counts
    empty = torch.zeros(1, 0, 8), torch.zeros(1, 0).long()
    assert run((*empty, tiny))[0] == [[5]]
    assert run((*empty, tiny / 2))[0] == [[-1]]
    assert run((*empty, torch.full((1, 1, 8), 3e38)), seed=0, offset=0)[0][0][0] in range(8)


def test_unnormalised_target_rows_are_normalised_for_the_draw():
    target = torch.tensor([[[2.0, 0.0, 6.0]]]).expand(20_000, 1, 3)
    tokens, _, _ = chain_speculative_sampling(
        torch.zeros(20_000, 0, 3), torch.zeros(20_000, 0).long(), target, seed=1, offset=0
    )
    assert abs((tokens == 2).double().mean() - 0.75) < 0.016  # 5 standard errors
    assert not (tokens == 1).any()


def test_counters_are_added_to_in_place(device):
    case = tuple(t.to(device) for t in random_case(8, 3, 20))
    _, once_accepted, once_emitted = run(case, seed=1, offset=0)
    storage = torch.full((16,), 100, dtype=torch.int32, device=device)
    accepted, emitted = storage[::2], torch.zeros(8, dtype=torch.int32, device=device)
    for calls in (1, 2, 3):
        out = chain_speculative_sampling(*case, accepted, emitted, seed=1, offset=0)
        assert out[1] is accepted
        assert out[2] is emitted
        assert accepted.tolist() == [100 + calls * a for a in once_accepted]
        assert emitted.tolist() == [calls * e for e in once_emitted]
    assert storage[1::2].tolist() == [100] * 8
    assert sum(once_accepted) >= sum(once_emitted) > 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.float32])
@pytest.mark.parametrize("position", [0, 1])
def test_counters_must_be_int32(position, dtype):
    counters = [torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)]
    counters[position] = counters[position].to(dtype)
    name = ["maybe_output_accepted_token_num", "maybe_output_emitted_draft_token_num"][position]
    with pytest.raises(TypeError, match=rf"^{name}: needs int32 .*, got {dtype}"):
        chain_speculative_sampling(*random_case(2, 3, 4), *counters)
    assert sum(float(c.sum()) for c in counters) == 0


@pytest.mark.parametrize("kwargs", [{}, {"seed": 1, "offset": 2}])
@pytest.mark.parametrize("n", [0, 1, 3])
def test_empty_batch(n, kwargs, device):
    case = tuple(t.to(device) for t in random_case(0, n, 5))
    tokens, accepted, emitted = chain_speculative_sampling(*case, **kwargs)
    assert (tokens.shape, accepted.shape, emitted.shape) == ((0, n + 1), (0,), (0,))
    assert {t.dtype for t in (tokens, accepted, emitted)} == {torch.int32}
    assert tokens.device.type == device


def test_laws_that_require_a_gradient():
    draft, ids, target = random_case(20, 3, 9)
    want = run((draft, ids, target), seed=1, offset=0)
    assert run((draft.requires_grad_(), ids, target.requires_grad_()), seed=1, offset=0) == want


def test_deterministic_changes_nothing():
    case = random_case(20, 3, 9)
    assert run(case, deterministic=False, seed=1, offset=0) == run(case, seed=1, offset=0)


D, IDS, T = torch.full((2, 3, 4), 0.25), torch.zeros(2, 3, dtype=torch.int32), torch.full((2, 4, 4), 0.25)


@pytest.mark.parametrize(
    ("case", "error", "match"),
    [
        ((D.int(), IDS, T), TypeError, "^draft_probs: needs float16, bfloat16"),
        ((D, IDS, T.to(torch.float8_e4m3fn)), TypeError, "^target_probs: needs float16"),
        ((D, IDS.float(), T), TypeError, "^draft_token_ids: needs a signed integer dtype, got torch.float32"),
        ((D, IDS.bool(), T), TypeError, "^draft_token_ids: needs a signed integer dtype, got torch.bool"),
        ((D[0], IDS, T), ValueError, "^draft_probs: needs 3 dimensions"),
        ((D, IDS[:, :2], T), ValueError, r"^draft_token_ids: needs shape \(2, 3\).*got \(2, 2\)"),
        ((D, IDS, T[:, :3]), ValueError, r"^target_probs: needs shape \(2, 4, 4\).*got \(2, 3, 4\)"),
        ((D, IDS, T[:1]), ValueError, r"^target_probs: needs shape \(2, 4, 4\)"),
        ((D, IDS, T[..., :3]), ValueError, r"^target_probs: needs shape \(2, 4, 4\)"),
        (
            (D[..., :0], IDS, T[..., :0]),
            ValueError,
            "^draft_probs: needs a vocab_size of 1 to 4194304, got 0",
        ),
        ((None, IDS, T), TypeError, "^draft_probs: needs a tensor, got NoneType"),
        ((D, IDS.tolist(), T), TypeError, "^draft_token_ids: needs a tensor, got list"),
        ((D, IDS, 3), TypeError, "^target_probs: needs a tensor, got int"),
        ((D, IDS, T, [0, 0]), TypeError, "^maybe_output_accepted.*: needs int32 .*, got list"),
        ((D, IDS.to("meta"), T), ValueError, "^draft_token_ids: needs the device of draft_probs"),
        ((D, IDS, T.to("meta")), ValueError, "^target_probs: needs the device of draft_probs"),
        (
            (D, IDS, T, torch.zeros(3).int()),
            ValueError,
            r"^maybe_output_accepted.*: needs shape \(2,\), got \(3,\)",
        ),
        ((D, IDS, T, None, torch.zeros(1).int()), ValueError, r"^maybe_output_emitted.*: needs shape \(2,\)"),
        ((D, IDS, T, torch.zeros(1).int().expand(2)), ValueError, "needs one memory location per request"),
        (
            (D, IDS, T, torch.zeros(2, device="meta").int()),
            ValueError,
            "^maybe_output_accepted.*: needs the device",
        ),
    ],
)
def test_bad_input(case, error, match):
    with pytest.raises(error, match=match):
        chain_speculative_sampling(*case)
