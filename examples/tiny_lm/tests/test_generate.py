import pytest
import torch
from torch.nn import functional as F

from attn_tiny_lm import steps
from attn_tiny_lm.data import to_tokens
from attn_tiny_lm.generate import Engine, accept
from attn_tiny_lm.model import ModelConfig, TinyLM
from attn_tiny_lm.paged import PagedCache, StepCache
from attn_tiny_lm.steps import decode_step, prefill_step, verify_step


@pytest.fixture(scope="module")
def engine(model):
    return Engine(model)


@pytest.fixture(scope="module")
def prompts(source):
    return [source[:400], source[500:633], source[:1], b""]


@pytest.fixture(scope="module")
def plain(engine, prompts):
    return engine.plain(prompts, 40)


def test_paged_generation_is_the_dense_model_token_by_token(model, prompts, plain):
    for prompt, text in zip(prompts, plain.texts, strict=True):
        # One dense pass over prompt and text checks every token: each is chosen from the same tokens before
        # it.
        tokens = to_tokens(prompt + text)
        choices = model(torch.tensor([tokens]))[0].argmax(-1).tolist()
        assert bytes(choices[len(prompt) : -1]) == text


def test_plain_decode_gives_one_token_per_request_and_step(plain):
    assert [len(text) for text in plain.texts] == [40] * 4
    # The prefill gives each request its first token.
    assert (plain.steps, plain.request_steps, plain.emitted) == (39, 4 * 39, 4 * 39)
    assert plain.accepted_per_step == 1
    assert plain.ms_per_token > 0


@pytest.mark.parametrize("drafts", [1, 3, 8])
def test_speculation_writes_the_same_text_in_fewer_steps(engine, prompts, plain, drafts):
    fast = engine.speculative(prompts, 40, drafts)
    assert fast.texts == plain.texts
    assert fast.emitted == plain.emitted
    assert 1.1 < fast.accepted_per_step <= drafts + 1
    assert fast.steps < plain.steps


@pytest.mark.parametrize("page_size", [1, 7, 64])
def test_the_page_size_and_the_place_of_pages_do_not_matter(model, prompts, plain, page_size):
    other = Engine(model, page_size=page_size, seed=page_size)
    assert other.speculative(prompts, 12, 3).texts == tuple(text[:12] for text in plain.texts)


def test_a_request_does_not_depend_on_its_batch(engine, prompts, plain):
    alone = engine.speculative(prompts[1:2], 40, 3)
    assert alone.texts == plain.texts[1:2]


def test_a_text_may_end_within_an_accepted_chain(engine):
    repeated = b"x = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0"
    whole = engine.plain([repeated], 12).texts[0]
    for tokens in range(1, 12):
        cut = engine.speculative([repeated], tokens, 7)
        assert cut.texts == (whole[:tokens],)
        assert cut.emitted == tokens - 1


def test_verify_logits_are_the_dense_ones_also_behind_a_wrong_draft(model, engine, source):
    tokens = to_tokens(source[:70])
    tokens[67] = 1  # the model sees a wrong draft as text like any other
    cache = PagedCache(model.config, 16, 16)
    engine._start(cache, [source[:65]])  # another request in the same pools
    request = cache.add()
    step = cache.begin([request], [66])
    engine.prefill.plan(
        step.qo_indptr, step.kv_indptr, step.kv_indices, step.kv_last_page_len, 8, 2, 64, 16,
        causal=True, q_data_type=torch.float32, kv_data_type=torch.float32,
    )  # fmt: skip
    prefill_step(
        model, torch.tensor(tokens[:66]), step.positions, torch.tensor([65]), engine.prefill, step.cache
    )
    cache.keep(request, 66)
    step = cache.begin([request], [5])
    engine._plan_decode(engine.verify, step, 5)
    rows = torch.tensor([tokens[66:71]])
    logits = verify_step(model, rows, step.positions, engine.verify, step.cache)
    dense = model(torch.tensor([tokens]))[0, 66:71]
    assert logits.shape == (1, 5, 256)
    torch.testing.assert_close(logits[0], dense, rtol=1e-4, atol=1e-4)


def test_progress_adds_up_to_the_tokens_of_the_steps(engine, prompts):
    seen = []
    out = engine.speculative(prompts, 10, 3, seen.append)
    assert sum(seen) == out.emitted == 4 * 9
    assert len(seen) == out.steps


def test_greedy_acceptance_takes_the_agreeing_prefix_and_one_token_more():
    choices = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8], [0, 0, 9, 9]])
    guesses = torch.tensor([[5, 6, 7], [5, 9, 7], [9, 6, 7], [0, 0, 0]])
    logits = F.one_hot(choices, 256).float() * 3 - torch.rand(4, 4, 256)
    expected = [[5, 6, 7, 8], [5, 6, -1, -1], [5, -1, -1, -1], [0, 0, 9, -1]]
    for _ in range(5):  # whatever the sampler draws
        assert accept(logits, guesses).tolist() == expected


@pytest.mark.parametrize(
    ("prompts", "tokens", "drafts", "code"),
    [
        ([], 1, 1, "tiny-lm.nothing"),
        ([b"a"], 0, 1, "tiny-lm.nothing"),
        ([b"a"], 4, 0, "tiny-lm.drafts"),
        ([b"a" * 2045], 1, 3, "tiny-lm.context"),
        ([b"a"], 2048, 1, "tiny-lm.context"),
    ],
)
def test_bad_arguments_are_refused(engine, prompts, tokens, drafts, code):
    with pytest.raises(ValueError, match=rf"\[{code}\]"):
        engine.speculative(prompts, tokens, drafts)


def test_the_longest_prompt_that_fits_is_served():
    small = TinyLM(ModelConfig(d_model=32, num_layers=1, hidden=32, context=64))
    small.init_weights(0)
    engine = Engine(small.requires_grad_(False), page_size=16)
    prompt = bytes(97 + i % 26 for i in range(64 - 2 - 3))
    assert engine.speculative([prompt], 2, 3).texts == engine.plain([prompt], 2).texts
    with pytest.raises(ValueError, match="needs at most 59 bytes"):
        engine.speculative([prompt + b"a"], 2, 3)


class NoAttention:
    """Gives a step something to call that is neither planned nor paged."""

    def run(self, q, paged_kv_cache):
        return q * paged_kv_cache.storage[0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("step", [decode_step, verify_step])
def test_a_step_reads_nothing_back_to_the_host(monkeypatch, step):
    monkeypatch.setattr(steps, "append_paged_kv_cache", lambda *args: None)
    with torch.device("meta"):  # tensors without data: whoever asks for a value fails
        model = TinyLM(ModelConfig())
        tokens = torch.empty(6 if step is decode_step else (2, 3), dtype=torch.int64)
        positions, pool = torch.empty(6, dtype=torch.int32), torch.empty(4, 8, 2, 16, 2, 64)
        cache = StepCache(pool, *torch.empty(4, 6, dtype=torch.int32))
    logits = step(model, tokens, positions, NoAttention(), cache)
    assert logits.shape == (*tokens.shape, 256)
