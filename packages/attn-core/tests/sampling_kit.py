"""Devices, laws and a plain call, for the tests of chain_speculative_sampling."""

import pytest
import torch

from attn_core.sampling import chain_speculative_sampling

torch.set_num_threads(1)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def one_hot(*ids, vocab=4):
    """Rows with all their mass at one id; -1 gives a row of zeros."""
    rows = torch.zeros(len(ids), vocab)
    for row, i in zip(rows, ids, strict=True):
        if i >= 0:
            row[i] = 1.0
    return rows


def random_case(batch, n, vocab, seed=0, device="cpu", dtype=torch.float32):
    """Random laws and ids really drawn from the draft's."""
    generator = torch.Generator().manual_seed(seed)
    draft = torch.randn(batch, n, vocab, generator=generator).softmax(-1)
    target = torch.randn(batch, n + 1, vocab, generator=generator).softmax(-1)
    ids = torch.zeros(batch, n, dtype=torch.int64)
    if draft.numel() > 0:
        ids = torch.multinomial(draft.view(-1, vocab), 1, generator=generator).view(batch, n)
    return draft.to(dtype).to(device), ids.to(device), target.to(dtype).to(device)


def run(case, **kwargs):
    tokens, accepted, emitted = chain_speculative_sampling(*case, **kwargs)
    return tokens.tolist(), accepted.tolist(), emitted.tolist()
