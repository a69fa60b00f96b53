"""The tokens that come out have the target's law, whatever the drafts were (statistics, fixed seeds)."""

import pytest
import torch

from attn_core.sampling import chain_speculative_sampling

torch.set_num_threads(1)

ROWS = 200_000  # bounds below are 5 standard errors or more


def frequencies(ids, vocab=4):
    return torch.bincount(ids.long(), minlength=vocab).double() / ids.numel()


def total_variation(a, b):
    return float((a - b).abs().sum() / 2)


@pytest.fixture(scope="module")
def two_drafts():
    draft, target = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.4, 0.1, 0.4, 0.1])
    bonus = torch.tensor([0.05, 0.15, 0.3, 0.5])
    ids = torch.multinomial(draft, 2 * ROWS, True, generator=torch.Generator().manual_seed(1)).view(ROWS, 2)
    targets = torch.stack((target, target, bonus))
    out = chain_speculative_sampling(
        draft.expand(ROWS, 2, 4), ids, targets.expand(ROWS, 3, 4), seed=2, offset=0
    )
    return target.double(), bonus.double(), ids, *out


def test_first_token_has_the_targets_law(two_drafts):
    target, _, _, tokens, _, _ = two_drafts
    assert total_variation(frequencies(tokens[:, 0]), target) < 0.005


def test_acceptance_rate(two_drafts):
    *_, accepted, emitted = two_drafts
    assert abs((emitted >= 1).double().mean() - 0.6) < 0.0055
    assert abs(accepted.double().mean() - 1.2) < 0.0078
    assert abs((emitted == 2).double().mean() - 0.36) < 0.0054


def test_law_after_a_rejection(two_drafts):
    _, _, ids, tokens, _, emitted = two_drafts
    rejected = emitted == 0
    law = frequencies(tokens[rejected, 0])
    assert total_variation(law, torch.tensor([0.75, 0, 0.25, 0]).double()) < 0.008
    assert law[1] == law[3] == 0
    # ... and it does not depend on which id was rejected.
    for rejected_id in (1, 3):
        some = frequencies(tokens[rejected & (ids[:, 0] == rejected_id), 0])
        assert abs(float(some[0]) - 0.75) < 0.016


def test_bonus_law(two_drafts):
    _, bonus, _, tokens, _, emitted = two_drafts
    assert total_variation(frequencies(tokens[emitted == 2, 2]), bonus) < 0.008


def test_joint_law_is_the_product(two_drafts):
    # Given that a second token came out, the pair is distributed as (accepted first, target second).
    target, _, _, tokens, _, emitted = two_drafts
    some = emitted >= 1
    first = torch.tensor([0.1, 0.1, 0.3, 0.1]).double() / 0.6  # min(draft, target), normalised
    joint = frequencies(tokens[some, 0].long() * 4 + tokens[some, 1].long(), 16)
    assert total_variation(joint, (first[:, None] * target).flatten()) < 0.012
