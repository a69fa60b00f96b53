"""The counter-based generator Philox4x32-10 in torch integer arithmetic.

A counter-based generator is a function: 128 bits of counter and 64 bits of key give 128 random bits. There is
no state to advance, so draws can be made in any order, by any number of threads, and are the same on every
device. (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011.)
"""

from __future__ import annotations

import torch

_WORD = 0xFFFFFFFF
_ROUNDS = 10
# The paper's multipliers 0xD2511F53 and 0xCD9E8D57, less 2**32: with |multiplier| < 2**30 the product with a
# 32-bit word stays inside int64. The 2**32 is added back to the high word.
_MULTIPLIERS = (0xD2511F53 - 2**32, 0xCD9E8D57 - 2**32)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox4x32(counter: tuple[torch.Tensor, ...], key: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return four random 32-bit words for every counter.

    Reads nothing back to the host and may be called during graph capture.

    Args:
        counter: Four int64 tensors of values in [0, 2**32), of shapes that broadcast, least significant
            first.
        key: int64 tensor, the 64 bits of the key (as a bit pattern: negative values are fine), of a shape
            that broadcasts to the counters'.

    Returns:
        Four int64 tensors of values in [0, 2**32).
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)  # type: ignore[no-untyped-call]
    dims = c0.dim()
    key = key[(None,) * (dims - key.dim())]
    # Words 0 and 2 are multiplied, words 1 and 3 are mixed in: the two go through each operation together.
    mul, mix = torch.stack((c0, c2)), torch.stack((c1, c3))
    keys = torch.stack((key, key >> 32)).bitwise_and_(_WORD)
    multiplier, step = (_pair(values, key.device) for values in (_MULTIPLIERS, _KEY_STEPS))
    multiplier, step = (pair.view(2, *[1] * dims) for pair in (multiplier, step))
    for round_ in range(_ROUNDS):
        product = mul * multiplier
        high = ((product >> 32) + mul).bitwise_and_(_WORD)
        low = product.bitwise_and_(_WORD)
        mul = high.flip(0).bitwise_xor_(mix).bitwise_xor_((keys + round_ * step).bitwise_and_(_WORD))
        mix = low.flip(0)
    return mul[0], mix[0], mul[1], mix[1]


def uniform53(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return float64 in [0, 1), a multiple of 2**-53, from two 32-bit words (as int64)."""
    return ((high >> 5) * 2**26 + (low >> 6)).to(torch.float64) * 2.0**-53


def _pair(values: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Return two constants as a tensor, by fills: a copy from the host is not allowed during capture."""
    pair = torch.full((2,), values[0], dtype=torch.int64, device=device)
    pair[1].fill_(values[1])
    return pair
