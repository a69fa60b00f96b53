"""Equal laws, zero residuals, padded drafts, rows that are no law."""

import math

import pytest
import torch

from attn_core import sampling_math
from attn_core.sampling import chain_speculative_sampling

from .sampling_kit import needs_gpu, one_hot, random_case, run


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_equal_laws_always_accept(dtype, monkeypatch):
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps  # denormal: u * q may round to q
    row = torch.tensor([0.1, 0.2, 0.3, 0.4, smallest], dtype=dtype)
    ids = torch.arange(5).repeat(200)[:, None]
    almost_one = torch.full((1000, 2), 1 - 2.0**-53, dtype=torch.float64)
    case = (row.expand(1000, 1, 5), ids, row.expand(1000, 2, 5))
    assert run(case, seed=1, offset=0)[2] == [1] * 1000
    monkeypatch.setattr(sampling_math, "uniforms", lambda *_: (almost_one, almost_one))
    tokens, _, emitted = run(case, seed=1, offset=0)
    assert emitted == [1] * 1000
    assert [row[0] for row in tokens] == ids[:, 0].tolist()


def test_acceptance_is_strict(monkeypatch):
    # Of the draws u in [0, 1), those below p / q accept: u == p / q is one too many.
    half = torch.full((1, 2), 0.5, dtype=torch.float64)
    monkeypatch.setattr(sampling_math, "uniforms", lambda *_: (half, half))
    case = (one_hot(0)[None], torch.tensor([[0]]), torch.tensor([[[0.5, 0.5, 0.0, 0.0]] * 2]))
    assert run(case, seed=0, offset=0) == ([[1, -1]], [0], [0])


@pytest.mark.parametrize("total", [2**41 - 1, 2**54 - 1, 2**54 + 1, 2**54 + 3, 2**60 - 1, 2**61 + 129])
def test_largest_uniform_stays_below_the_total(total):
    u = torch.tensor([[1 - 2.0**-53]], dtype=torch.float64)
    assert int((u * torch.tensor([[total]]).to(torch.float64)).to(torch.int64)) < total


def test_largest_uniform_draws_the_last_id_with_weight(monkeypatch):
    almost_one = torch.full((1, 1), 1 - 2.0**-53, dtype=torch.float64)
    monkeypatch.setattr(sampling_math, "uniforms", lambda *_: (almost_one, almost_one))
    target = torch.tensor([[[0.3, 0.7 - 1e-7, 1e-7, 0.0]]])
    assert run((torch.zeros(1, 0, 4), torch.zeros(1, 0).long(), target), seed=0, offset=0)[0] == [[2]]
    monkeypatch.setattr(sampling_math, "uniforms", lambda *_: (almost_one * 0, almost_one * 0))
    target = torch.tensor([[[0.0, 0.0, 1e-7, 1.0]]])
    assert run((torch.zeros(1, 0, 4), torch.zeros(1, 0).long(), target), seed=0, offset=0)[0] == [[2]]


def test_zero_residual_falls_back_to_the_target_row():
    # The drafted id has probability 0 in both laws, so it cannot stay, and the laws are equal elsewhere.
    law = torch.tensor([0.0, 0.25, 0.75])
    case = (law.expand(5000, 1, 3), torch.zeros(5000, 1).long(), law.expand(5000, 2, 3))
    tokens, accepted, emitted = chain_speculative_sampling(*case, seed=1, offset=0)
    assert accepted.sum() == emitted.sum() == 0
    assert not (tokens[:, 0] == 0).any()
    assert abs((tokens[:, 0] == 2).double().mean() - 0.75) < 0.031
    assert (tokens[:, 1] == -1).all()


@pytest.mark.parametrize(("mass", "tokens"), [(1e-30, {3}), (2.0**-119, {3}), (2.0**-120, {1, 2})])
def test_smallest_residual(mass, tokens):
    draft = torch.tensor([0.0, 0.5, 0.5, 0.0])
    target = torch.tensor([0.0, 0.5, 0.5, mass])
    case = (draft.expand(64, 1, 4), torch.zeros(64, 1).long(), target.expand(64, 2, 4))
    assert set(chain_speculative_sampling(*case, seed=0, offset=0)[0][:, 0].tolist()) == tokens


def test_pad_is_the_end_of_the_draft(device):
    case = (one_hot(1, 2, -1)[None], torch.tensor([[1, 2, -1]]), one_hot(1, 2, 3, 0)[None])
    case = tuple(t.to(device) for t in case)
    assert run(case) == ([[1, 2, 3, -1]], [2], [2])


def test_nothing_behind_a_pad_counts(device):
    # Ids that would pass, ids that do not exist, and a NaN draft row: none of them is looked at.
    draft, target = one_hot(1, 2, 3, 3)[None], one_hot(1, 0, 3, 3, 3)[None]
    draft[0, 1:] = math.nan
    case = tuple(t.to(device) for t in (draft, torch.tensor([[1, -1, 3, 77]]), target))
    assert run(case) == ([[1, 0, -1, -1, -1]], [1], [1])


def test_pad_at_the_start_is_plain_sampling():
    law = torch.tensor([0.1, 0.0, 0.9])
    draft = torch.zeros(4000, 2, 3)
    case = (draft, torch.full((4000, 2), -1), law.expand(4000, 3, 3))
    tokens, accepted, emitted = chain_speculative_sampling(*case, seed=3, offset=0)
    assert accepted.sum() == emitted.sum() == 0
    assert abs((tokens[:, 0] == 2).double().mean() - 0.9) < 0.024
    assert (tokens[:, 1:] == -1).all()


@pytest.mark.parametrize("bad", [4, 7, -2, 2**31, 2**40])
def test_id_outside_the_vocabulary(bad):
    ids = torch.tensor([[1, 2, 0], [1, bad, 0]])
    case = (one_hot(1, 2, 0).expand(2, 3, 4), ids, one_hot(1, 2, 3, 0).expand(2, 4, 4))
    counter, generator = torch.zeros(2, dtype=torch.int32), torch.Generator()
    state = generator.get_state()
    with pytest.raises(ValueError, match=rf"^draft_token_ids: needs -1 .*\[0, 4\), got {bad} at \[1, 1\] \["):
        chain_speculative_sampling(*case, counter, generator=generator)
    assert counter.sum() == 0
    assert torch.equal(generator.get_state(), state)


@needs_gpu
def test_id_outside_the_vocabulary_ends_the_draft_on_a_gpu():
    case = (one_hot(1, 2, 0)[None], torch.tensor([[1, 2, 7]]), one_hot(1, 2, 3, 0)[None])
    assert run(tuple(t.cuda() for t in case)) == ([[1, 2, 3, -1]], [2], [2])


def damage(kind, rows):
    rows = rows.clone()
    if kind == "nan":
        rows[:] = math.nan
    elif kind == "one nan":
        rows[..., 3] = math.nan
    elif kind == "zero":
        rows[:] = 0.0
    elif kind == "negative":
        rows[..., 3] = -0.1
    else:
        rows[..., 3] = math.inf
    return rows


@pytest.mark.parametrize("where", ["draft", "target", "both"])
@pytest.mark.parametrize("kind", ["nan", "one nan", "zero", "negative", "infinite"])
@pytest.mark.parametrize("vocab", [1000, 997])
def test_broken_rows_stay_alone(kind, where, vocab, device):
    draft, ids, target = random_case(3, 2, vocab, seed=7)
    if where != "target":
        draft[1] = damage(kind, draft[1])
    if where != "draft":
        target[1] = damage(kind, target[1])
    for offset in range(4):
        want = run(random_case(3, 2, vocab, seed=7), seed=2, offset=offset)
        tokens, accepted, emitted = run(
            (draft.to(device), ids.to(device), target.to(device)), seed=2, offset=offset
        )
        for row in (0, 2):
            assert (tokens[row], accepted[row], emitted[row]) == tuple(part[row] for part in want)
        assert all(-1 <= token < vocab for token in tokens[1])
        assert tokens[1][emitted[1] + 1 :] == [-1] * (2 - emitted[1])


@pytest.mark.parametrize("kind", ["nan", "one nan", "zero", "negative", "infinite"])
def test_broken_target_row_gives_no_token(kind):
    draft, target = one_hot(1, 2)[None], one_hot(1, 2, 0)[None]
    ids = torch.tensor([[1, 2]])
    target[0, 2] = damage(kind, target[0, 2])  # the bonus row
    assert run((draft, ids, target)) == ([[1, 2, -1]], [2], [2])
    target = one_hot(1, 0, 0)[None]
    target[0, 1] = damage(kind, target[0, 1])  # the row of a rejection
    assert run((draft, ids, target)) == ([[1, -1, -1]], [1], [1])


@pytest.mark.parametrize("kind", ["nan", "one nan", "negative", "infinite"])
def test_broken_draft_row_gives_no_token_after_a_rejection(kind):
    draft = one_hot(1, 2)[None]
    draft[0, 1] = damage(kind, draft[0, 1])
    assert run((draft, torch.tensor([[1, 2]]), one_hot(1, 0, 0)[None])) == ([[1, -1, -1]], [1], [1])


@pytest.mark.parametrize(
    ("q", "p"), [(-0.1, 0.5), (0.5, math.inf), (math.nan, 0.5), (0.5, math.nan), (0.5, -0.1)]
)
def test_draft_with_a_broken_number_of_its_own_does_not_pass(q, p):
    draft, target = torch.tensor([[[q, 0.5, 0.5]]]), torch.tensor([[[p, 0.5, 0.5], [0.0, 1.0, 0.0]]])
    assert run((draft, torch.tensor([[0]]), target)) == ([[-1, -1]], [0], [0])


def test_zero_draft_row_is_an_improper_law_but_usable():
    # A probability of 0 for the drafted id: it stays where the target allows it, else the target decides.
    draft = one_hot(-1, -1)[None]
    assert run((draft, torch.tensor([[1, 2]]), one_hot(1, 0, 0)[None])) == ([[1, 0, -1]], [1], [1])
