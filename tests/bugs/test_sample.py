from __future__ import annotations

import pytest
import torch

from attn_core import chain_speculative_sampling

from .support import refused

NAN = float("nan")


def one_hot(vocab: int, *ids: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor([ids]), vocab).float()


def test_b58_padded_drafts_do_not_count():
    """Drafts padded with -1: four tokens came out where three are possible. https://github.com/flashinfer-ai/flashinfer/issues/879"""
    draft = torch.cat([one_hot(4, 1, 2), torch.zeros(1, 1, 4)], 1)
    target = one_hot(4, 1, 2, 3, 0)
    for dtype in (torch.int32, torch.int64):
        ids = torch.tensor([[1, 2, -1]], dtype=dtype)
        tokens, accepted, emitted = chain_speculative_sampling(draft, ids, target)
        assert tokens.tolist() == [[1, 2, 3, -1]]
        assert (accepted.tolist(), emitted.tolist()) == ([2], [2])
    # what stands behind the end is no draft either, whatever it is
    tokens, accepted, emitted = chain_speculative_sampling(draft, torch.tensor([[-1, 2, 7]]), target)
    assert tokens.tolist() == [[1, -1, -1, -1]]
    assert (accepted.tolist(), emitted.tolist()) == ([0], [0])


@pytest.mark.parametrize("bad", [4, 7, -2])
def test_b58_ids_outside_the_vocabulary_are_refused(bad):
    """Drafts padded with -1: four tokens came out where three are possible. https://github.com/flashinfer-ai/flashinfer/issues/879"""
    draft, target = one_hot(4, 1, 2, 0), one_hot(4, 1, 2, 3, 0)
    count = torch.zeros(1, dtype=torch.int32)
    for at in range(3):
        ids = torch.tensor([[1, 2, 0]])
        ids[0, at] = bad
        with refused("draft_token_ids", "[0, 4)", f"{bad} at [0, {at}]"):
            chain_speculative_sampling(draft, ids, target, count, count.clone())
    assert count.tolist() == [0]


@pytest.mark.parametrize("vocab", [1000, 997])
@pytest.mark.parametrize("fault", ["all nan", "zeros", "one nan", "negative", "inf"])
@pytest.mark.parametrize("where", ["target", "draft", "both"])
def test_b59_faulty_rows_give_no_foreign_id(vocab, fault, where):
    """NaN rows gave a token id outside the vocabulary, then used as an address. https://github.com/vllm-project/vllm/pull/45060"""
    generator = torch.Generator().manual_seed(59)
    draft = torch.rand(3, 2, vocab, generator=generator).softmax(-1)
    target = torch.rand(3, 3, vocab, generator=generator).softmax(-1)
    ids = torch.randint(0, vocab, (3, 2), generator=generator)
    bad_draft, bad_target = draft.clone(), target.clone()
    for name, rows in (("draft", bad_draft), ("target", bad_target)):
        if where not in (name, "both"):
            continue
        spoiled = rows[1]
        if fault == "all nan":
            spoiled.fill_(NAN)
        elif fault == "zeros":
            spoiled.fill_(0)
        else:
            spoiled[:, 5] = {"one nan": NAN, "negative": -0.1, "inf": float("inf")}[fault]
    for seed in range(8):
        good, *_ = chain_speculative_sampling(draft, ids, target, seed=seed, offset=0)
        tokens, accepted, emitted = chain_speculative_sampling(
            bad_draft, ids, bad_target, seed=seed, offset=0
        )
        assert torch.equal(tokens[[0, 2]], good[[0, 2]])
        assert bool(((tokens >= -1) & (tokens < vocab)).all())
        assert bool((good[:, 0] >= 0).all())
        # after the first -1 nothing but -1, and never more than was accepted plus one
        assert torch.equal(tokens, torch.where((tokens < 0).cumsum(1) > 0, -1, tokens))
        assert bool(((tokens >= 0).sum(1) <= emitted + 1).all())
        assert bool((emitted <= accepted).all())


def test_x3_equal_laws_always_accept_and_no_residual_falls_back():
    """A zero residual emitted whatever lay in shared memory. https://github.com/vllm-project/vllm/pull/45060"""
    generator = torch.Generator().manual_seed(3)
    law = torch.rand(1, 1, 50, generator=generator).softmax(-1)
    rows = 20_000
    draft = law.expand(rows, 3, 50)
    target = law.expand(rows, 4, 50)
    ids = torch.multinomial(law[0, 0], rows * 3, replacement=True, generator=generator).view(rows, 3)
    tokens, accepted, emitted = chain_speculative_sampling(draft, ids, target, seed=3, offset=0)
    assert bool((accepted == 3).all())
    assert bool((emitted == 3).all())
    assert torch.equal(tokens[:, :3], ids.int())
    assert bool((tokens[:, 3] >= 0).all())
    # a draft whose own probability is 0 is rejected though the rows are equal: the residual is zero
    hot = one_hot(4, 2)
    tokens, _, emitted = chain_speculative_sampling(hot, torch.tensor([[1]]), hot.expand(1, 2, 4))
    assert (tokens.tolist(), emitted.tolist()) == ([[2, -1]], [0])


def distance(counts: torch.Tensor, law: torch.Tensor) -> float:
    return float((counts.double() / counts.sum() - law.double()).abs().sum() / 2)


def test_b62_output_law_is_the_targets():
    """Acceptance looked normal while the output law drifted. https://github.com/huggingface/transformers/issues/47932"""
    rows = 200_000
    p, t = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.4, 0.1, 0.4, 0.1])
    last = torch.tensor([0.05, 0.15, 0.35, 0.45])
    generator = torch.Generator().manual_seed(62)
    ids = torch.multinomial(p, rows * 2, replacement=True, generator=generator).view(rows, 2)
    target = torch.stack([t, t, last]).expand(rows, 3, 4)
    tokens, _, emitted = chain_speculative_sampling(p.expand(rows, 2, 4), ids, target, seed=62, offset=0)
    first = tokens[:, 0].long()
    assert distance(first.bincount(minlength=4), t) < 0.005
    assert abs(float((emitted >= 1).float().mean()) - 0.6) < 0.005
    residual = first[emitted == 0].bincount(minlength=4)
    assert distance(residual, torch.tensor([0.75, 0, 0.25, 0])) < 0.005
    assert residual[[1, 3]].tolist() == [0, 0]
    bonus = tokens[emitted == 2, 2].long().bincount(minlength=4)
    assert distance(bonus, last) < 0.005
    # two tokens: of the rows whose first draft was accepted, the second follows t on its own
    more = emitted >= 1
    joint = (4 * first[more] + tokens[more, 1].long()).bincount(minlength=16).view(4, 4)
    accepted = torch.minimum(p, t) / torch.minimum(p, t).sum()
    assert distance(joint, accepted[:, None] * t) < 0.01
    assert "rows that the ids were drawn from" in " ".join(chain_speculative_sampling.__doc__.split())


HALF = torch.tensor([0.5, 0.5]).expand(64, 1, 2)


def half(**options: object) -> torch.Tensor:
    ids = torch.zeros(64, 0, dtype=torch.int64)
    return chain_speculative_sampling(HALF[:, :0], ids, HALF, **options)[0]


def test_b63_calls_differ_and_seeds_repeat():
    """Repeated calls gave the same prediction for ever. https://github.com/flashinfer-ai/flashinfer/issues/2284"""
    torch.manual_seed(0)
    first = [half() for _ in range(10)]
    assert len({tuple(tokens.flatten().tolist()) for tokens in first}) == 10
    torch.manual_seed(0)
    assert all(torch.equal(a, half()) for a in first)
    generator = torch.Generator().manual_seed(0)
    default = torch.get_rng_state()
    assert all(torch.equal(a, half(generator=generator)) for a in first)
    assert torch.equal(torch.get_rng_state(), default)
    # the documented amount: one 64-bit draw a call
    other = torch.Generator().manual_seed(0)
    for _ in first:
        torch.empty(1, dtype=torch.int64).random_(generator=other)
    assert torch.equal(other.get_state(), generator.get_state())
    # device seed and offset: what a captured call has to be given
    seed, offset = torch.tensor([63]), torch.tensor([0])
    replay = [half(seed=seed, offset=offset) for _ in range(2)]
    assert torch.equal(*replay)
    offset += 1
    assert not torch.equal(half(seed=seed, offset=offset), replay[0])
    assert torch.equal(half(seed=63, offset=1), half(seed=seed, offset=offset))


def test_x1_int64_counters_are_refused():
    """int64 counters were copied and never incremented. https://github.com/flashinfer-ai/flashinfer/issues/2284"""
    draft, ids, target = one_hot(4, 1, 2), torch.tensor([[1, 2]]), one_hot(4, 1, 2, 3)
    wide = torch.zeros(1, dtype=torch.int64)
    for counters in ((wide, None), (None, wide)):
        with refused("maybe_output_", "int32", torch.int64, kind=TypeError):
            chain_speculative_sampling(draft, ids, target, *counters)
    assert wide.tolist() == [0]
    accepted, emitted = torch.tensor([5], dtype=torch.int32), torch.tensor([7], dtype=torch.int32)
    _, got_accepted, got_emitted = chain_speculative_sampling(draft, ids, target, accepted, emitted)
    assert got_accepted is accepted
    assert got_emitted is emitted
    assert (accepted.tolist(), emitted.tolist()) == ([7], [9])
