import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from attn_tiny_lm.data import Document, to_tokens
from attn_tiny_lm.evaluate import bits_per_byte, windows
from attn_tiny_lm.model import DATA_DIR, WEIGHTS_NAME, ModelConfig, TinyLM, apply_rope, load_model, rope_table

SMALL = ModelConfig(d_model=32, num_layers=2, head_dim=16, hidden=48, context=32)


def test_the_shipped_weights_are_small_and_bf16():
    assert (DATA_DIR / WEIGHTS_NAME).stat().st_size < 6_000_000
    exact = load_model(dtype=torch.float32)
    stored = load_model(dtype=torch.bfloat16)
    for name, weight in exact.named_parameters():
        assert torch.equal(weight, stored.get_parameter(name).float()), name
    assert stored.rope.dtype is torch.float32


def test_the_model_knows_python_it_has_not_seen(model, source):
    bits = bits_per_byte(model, [Document("wsgiref/util.py", source[:2500])])
    assert bits < 1.35  # 8 without training, 2.3 after 300 steps


def test_bits_per_byte_is_the_mean_negative_log_probability(model, source):
    text = source[:300]
    tokens = torch.tensor([to_tokens(text)])
    logits = model(tokens[:, :-1])[0]
    expected = F.cross_entropy(logits.double(), tokens[0, 1:]) / torch.log(torch.tensor(2.0))
    assert bits_per_byte(model, [Document("a.py", text)]) == pytest.approx(float(expected), rel=1e-5)


def test_bits_per_byte_does_not_depend_on_the_batch():
    model = TinyLM(SMALL)
    model.init_weights(0)
    documents = [
        Document("a.py", bytes(range(1, 120))),
        Document("b.py", b"short"),
        Document("c.py", b"x" * 70),
    ]
    alone = bits_per_byte(model, documents, batch=1)
    assert bits_per_byte(model, documents, batch=4) == pytest.approx(alone, rel=1e-6)


def test_nothing_to_score_is_refused(model):
    with pytest.raises(ValueError, match=r"\[tiny-lm.empty\]"):
        bits_per_byte(model, [])


@given(st.integers(1, 400), st.integers(2, 64))
def test_windows_count_every_byte_once_and_give_it_context(size, context):
    text = bytes(i % 251 + 1 for i in range(size))
    tokens = to_tokens(text)
    counted = []
    for window in windows(text, context):
        assert 0 <= window.first < len(window.tokens) - 1 <= context
        start = len(counted) - window.first
        assert window.tokens == tokens[start : start + len(window.tokens)]
        assert start == 0 or window.first >= context // 2
        counted += window.tokens[window.first + 1 :]
    assert bytes(counted) == text


def test_a_longer_sequence_than_the_context_is_refused():
    model = TinyLM(SMALL)
    model(torch.zeros(1, 32, dtype=torch.long))
    with pytest.raises(ValueError, match=r"tokens: needs at most 32 rows, got 33 \[tiny-lm.context\]"):
        model(torch.zeros(1, 33, dtype=torch.long))


def test_the_model_is_causal(model, source):
    tokens = torch.tensor([to_tokens(source[:60])])
    changed = tokens.clone()
    changed[0, 40:] = 65
    first, second = model(tokens)[0], model(changed)[0]
    assert torch.allclose(first[:40], second[:40], atol=1e-5)
    assert not torch.allclose(first[40], second[40], atol=1e-2)


def test_rope_scores_depend_on_the_distance_alone():
    table = rope_table(SMALL)
    q, k = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(0))

    def score(i, j):
        return float((apply_rope(q, table[i : i + 1]) * apply_rope(k, table[j : j + 1])).sum())

    assert score(9, 4) == pytest.approx(score(25, 20), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)
    assert torch.equal(apply_rope(q, table[:1]), q)  # position 0 turns nothing
