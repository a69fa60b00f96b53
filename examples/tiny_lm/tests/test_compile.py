"""Compiled decode and verify steps write the eager text; compile time does not explode with the blocks."""

import time

import pytest
import torch

from attn_tiny_lm.generate import Engine
from attn_tiny_lm.model import ModelConfig, TinyLM, load_model

pytest.importorskip("attn_compile")
PROMPTS = [b"import os\nimport re\n\n\nclass Reader:\n    def ", b"def main():\n    print("]


@pytest.fixture(autouse=True)
def _quiet_torch():
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_compiled_steps_write_the_eager_text_with_a_handful_of_graphs():
    from torch._dynamo.utils import counters

    model = load_model()
    eager, compiled = (Engine(model, backend="reference", compiled=c) for c in (False, True))
    want = eager.plain(PROMPTS, 12)
    counters.clear()
    assert compiled.plain(PROMPTS, 12).texts == want.texts
    assert compiled.speculative(PROMPTS, 12, 3).texts == want.texts
    # Per step: one for the first sizes, one for all later ones; a batch of one request is a shape of its own.
    assert counters["stats"]["unique_graphs"] <= 6


def test_many_blocks_over_one_pool_compile_in_time_that_grows_with_their_number():
    seconds = {}
    for blocks in (2, 8):
        config = ModelConfig(
            d_model=32, num_layers=blocks, num_qo_heads=2, num_kv_heads=1, hidden=32, context=64
        )
        model = TinyLM(config)
        model.init_weights(0)
        model.requires_grad_(False)
        eager, compiled = (Engine(model, backend="reference", compiled=c) for c in (False, True))
        torch._dynamo.reset()
        start = time.perf_counter()
        got = compiled.plain([b"one", b"other"], 3)
        seconds[blocks] = time.perf_counter() - start
        assert got.texts == eager.plain([b"one", b"other"], 3).texts
    # 28 pairs of views against 1: a quadratic cost would show as a factor of 16 and more.
    assert seconds[8] < 12 * seconds[2]
