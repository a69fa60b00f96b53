import json

import pytest
import torch

from attn_tiny_lm.model import load_model
from attn_tiny_lm.train import FINAL_LR, Batches, learning_rate, train

FILES = {"heapq.py": b"def push(heap, item):\n    heap.append(item)\n" * 8, "ast.py": b"import re\n" * 4}


@pytest.fixture
def corpus(tmp_path):
    root = tmp_path / "corpus"
    root.mkdir()
    for name, text in FILES.items():
        (root / name).write_bytes(text)
    return root


def run(corpus, out):
    train(
        out,
        steps=3,
        batch=2,
        context=16,
        device="cpu",
        lr=1e-3,
        seed=1,
        corpus=corpus,
        log_every=1,
        check_every=2,
    )
    return json.loads((out / "config.json").read_text())


def test_training_writes_weights_log_and_figures_and_repeats_itself(corpus, tmp_path, capsys):
    facts = run(corpus, tmp_path / "one")
    log = (tmp_path / "one" / "train.log").read_text()
    assert "step 3 loss" in log
    assert "step 2 held-out-sample bpb" in log
    assert log in capsys.readouterr().err
    assert 0 < facts["held_out_bits_per_byte"]["all"] < 8
    assert facts["command"]["steps"] == 3
    model = load_model(tmp_path / "one")
    assert model.config.context == 16
    run(corpus, tmp_path / "two")
    again = load_model(tmp_path / "two")
    assert all(torch.equal(w, again.get_parameter(name)) for name, w in model.named_parameters())


def test_the_learning_rate_warms_up_and_ends_low():
    rates = [learning_rate(step, 1000, 2.0) for step in range(1000)]
    assert rates[0] < rates[50] < rates[99] == pytest.approx(2.0)
    assert rates[100:] == sorted(rates[100:], reverse=True)
    assert rates[-1] == pytest.approx(2.0 * FINAL_LR)


def test_batches_are_windows_of_the_stream_and_follow_the_seed():
    stream = torch.arange(100, dtype=torch.uint8)
    first = Batches(stream, 4, 10, seed=3).draw()
    assert torch.equal(first.diff(dim=1), torch.ones(4, 10, dtype=torch.long))
    assert torch.equal(first, Batches(stream, 4, 10, seed=3).draw())
    assert not torch.equal(first, Batches(stream, 4, 10, seed=4).draw())
