"""The fp8 encodings: fnuz on gfx942, OCP on gfx950, each with four or five bits of exponent (``e5m2``)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np


def is_fnuz(arch: str) -> bool:
    return arch == "gfx942"


@lru_cache(maxsize=4)
def values(fnuz: bool, e5m2: bool = False) -> np.ndarray:
    """Return the float32 value of each of the 256 codes."""
    code = np.arange(256)
    bits = 2 if e5m2 else 3  # of the fraction
    exponent, fraction = (code & 127) >> bits, (code & (1 << bits) - 1) / (1 << bits)
    bias = (16 if e5m2 else 8) - (not fnuz)
    normal, small = (1 + fraction) * 2.0 ** (exponent - bias), fraction * 2.0 ** (1 - bias)
    magnitude = np.where(exponent > 0, normal, small)
    found = np.where(code & 128, -magnitude, magnitude).astype(np.float32)
    if fnuz:
        found[0x80] = np.nan
    elif e5m2:
        infinite = exponent == 31
        found[infinite] = np.where(fraction[infinite] > 0, np.nan, np.copysign(np.inf, found[infinite]))
    else:
        found[[0x7F, 0xFF]] = np.nan
    return found


def decode(codes: np.ndarray, fnuz: bool, e5m2: bool = False) -> np.ndarray:
    return values(fnuz, e5m2)[np.asarray(codes, np.int64) & 255]


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
