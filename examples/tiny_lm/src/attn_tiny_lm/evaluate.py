"""Bits per byte of whole files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from attn_tiny_lm.data import Document, to_tokens
from attn_tiny_lm.model import TinyLM


class Window(NamedTuple):
    """`tokens` to feed, and the index of the first target that counts (the rest is context seen before)."""

    tokens: list[int]
    first: int


def windows(text: bytes, context: int) -> Iterator[Window]:
    """Cut one file into windows in which every byte is a counted target exactly once.

    A window starts half a context after the one before, so that a byte (after the first window) is predicted
    from at least half a context.
    """
    tokens = to_tokens(text)
    half = context // 2
    start, done = 0, 0  # `done` targets of the file are counted; target i is token i + 1
    while done < len(text):
        end = min(start + context, len(text))
        yield Window(tokens[start : end + 1], done - start)
        done = end
        start += half


def _batches(documents: Iterable[Document], context: int, size: int) -> Iterator[list[Window]]:
    stream = (window for document in documents for window in windows(document.text, context))
    while batch := list(islice(stream, size)):
        yield batch


@torch.no_grad()
def total_bits(model: TinyLM, batch: list[Window], context: int) -> Tensor:
    """Bits the model needs for the counted targets of `batch`: a float64 scalar on the model's device."""
    device = model.rope.device
    rows = min(context, max(len(window.tokens) for window in batch) - 1)
    tokens = torch.zeros(len(batch), rows + 1, dtype=torch.long)
    counted = torch.zeros(len(batch), rows, dtype=torch.bool)
    for i, window in enumerate(batch):
        tokens[i, : len(window.tokens)] = torch.tensor(window.tokens)
        counted[i, window.first : len(window.tokens) - 1] = True
    tokens, counted = tokens.to(device), counted.to(device)
    logits = model(tokens[:, :-1]).float()
    nll = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return nll[counted.flatten()].double().sum() / math.log(2)


def bits_per_byte(model: TinyLM, documents: Iterable[Document], *, batch: int = 16) -> float:
    """Mean bits per byte over `documents`, each predicted from its own start.

    Args:
        model: the model; it runs in its own dtype on its own device.
        documents: the files to score.
        batch: windows per forward pass.

    Raises:
        ValueError: there is nothing to score.
    """
    documents = list(documents)
    size = sum(len(document.text) for document in documents)
    if size == 0:
        raise ValueError("documents: needs at least one byte, got none [tiny-lm.empty]")
    context = model.config.context
    bits = sum(float(total_bits(model, group, context)) for group in _batches(documents, context, batch))
    return bits / size
