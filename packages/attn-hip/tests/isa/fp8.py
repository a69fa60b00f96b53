"""The two fp8 encodings: e4m3fnuz on gfx942, e4m3fn (OCP) on gfx950."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


def is_fnuz(arch: str) -> bool:
    return arch == "gfx942"


@lru_cache(maxsize=2)
def values(fnuz: bool) -> np.ndarray:
    """Return the float32 value of each of the 256 codes."""
    code = np.arange(256)
    exponent, fraction = code >> 3 & 15, code & 7
    bias = 8 if fnuz else 7
    normal = (1 + fraction / 8) * 2.0 ** (exponent - bias)
    small = fraction / 8 * 2.0 ** (1 - bias)
    magnitude = np.where(exponent > 0, normal, small)
    found = np.where(code & 128, -magnitude, magnitude).astype(np.float32)
    if fnuz:
        found[0x80] = np.nan
    else:
        found[[0x7F, 0xFF]] = np.nan
    return found


def decode(codes: np.ndarray, fnuz: bool) -> np.ndarray:
    return values(fnuz)[np.asarray(codes, np.int64) & 255]


def encode(x: np.ndarray, fnuz: bool) -> np.ndarray:
    """Round float32 to the nearest code, ties to even; what is too large, and a NaN, give NaN."""
    x = np.asarray(x, np.float32)
    table = values(fnuz)[:128].astype(np.float64)
    last = 127 if fnuz else 126
    table = table[: last + 1]
    size = np.abs(x).astype(np.float64)
    middle = (table[1:] + table[:-1]) / 2
    code = np.searchsorted(middle, size, side="left")
    tie = (code < last) & (size == middle[np.minimum(code, last - 1)]) & (code % 2 == 1)
    code = (code + tie).astype(np.uint32)
    # One step above the largest would be `table[-1] + step`; half of it still rounds down.
    most = table[-1] + (table[-1] - table[-2]) / 2
    lost = np.isnan(x) | (size > most) | ((size == most) & (last % 2 == 1))
    sign = np.signbit(x).astype(np.uint32) << np.uint32(7)
    if fnuz:
        return np.where(lost, np.uint32(0x80), np.where(code == 0, np.uint32(0), code | sign))
    return np.where(lost, np.uint32(0x7F) | sign, code | sign)
