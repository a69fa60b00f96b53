"""Prompt lookup: guess what comes next from the latest earlier place where the text went the same way."""

from __future__ import annotations

from attn_tiny_lm.data import SEPARATOR

LONGEST_MATCH = 16
SHORTEST_MATCH = 3


def lookup(history: bytes | bytearray, count: int) -> list[int]:
    """Guess the `count` bytes after `history`.

    The longest suffix of 3 to 16 bytes that occurs earlier decides; of several places the latest. Where
    that place is closer than `count` to the end, the guess goes on by repeating itself.

    Returns:
        `count` bytes, or none when no suffix occurs earlier.
    """
    for size in range(min(LONGEST_MATCH, len(history) - 1), SHORTEST_MATCH - 1, -1):
        at = history.rfind(history[-size:], 0, len(history) - 1)
        if at >= 0:
            text = bytearray(history)
            for i in range(at + size, at + size + count):
                text.append(text[i])
            return list(text[len(history) :])
    return []


def draft_row(history: bytes | bytearray, count: int) -> list[int]:
    """Like `lookup`, but always `count` long: what is missing is the separator byte.

    A filled-up place is a guess like any other. The verify step accepts it exactly if the model would have
    written a separator there, so filling up changes how fast text comes, never which text.
    """
    guess = lookup(history, count)
    return guess + [SEPARATOR] * (count - len(guess))
