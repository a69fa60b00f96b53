"""How undefined bits pass through an instruction.

Most instructions spread one undefined bit over their whole result. Those that treat bits apart, or whose low
bits depend on low bits only, have a rule here: compilers rely on it, for example when only the lower half of
a wide product is used.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .numbers import TABLE
from .waves import ALL_BITS

Array = np.ndarray
Rule = Callable[[list[Array], list[Array]], Array]


def spread(u: Array) -> Array:
    """All bits, where there is one."""
    return np.where(np.asarray(u) != 0, ALL_BITS, np.uint32(0))


def upward(u: Array) -> Array:
    """The lowest undefined bit and all above it: what a carry may reach."""
    u = np.asarray(u)
    return u | (~u + u.dtype.type(1))


def _and(a: Array, b: Array, ua: Array, ub: Array) -> Array:
    return (ua & ub) | (ua & b) | (ub & a)


def _permuted(v: list[Array], u: list[Array]) -> Array:
    """A selector below 12 picks bytes or signs, which are as undefined as what they come from."""
    selector = np.asarray(v[2], np.uint32)
    constant = np.uint32(0)
    for i in range(4):
        byte = (selector >> np.uint32(8 * i)) & np.uint32(255)
        constant = constant | (np.minimum(byte, np.uint32(12)) << np.uint32(8 * i))
    return spread(u[2]) | TABLE["perm_b32"][1](u[0], u[1], constant)


def _wide(u: Array) -> Array:
    return np.where(np.asarray(u) != 0, np.uint64(0xFFFFFFFFFFFFFFFF), np.uint64(0))


def _sum(v: list[Array], u: list[Array]) -> Array:
    total = np.asarray(u[0])
    for part in u[1:]:
        total = total | part
    return upward(total)


# Values, then undefined bits, of the operands.
RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("mov_b32", "mov_b64", "accvgpr_write_b32", "accvgpr_read_b32", "accvgpr_mov_b32", "not_b32"),
        lambda v, u: u[0],
    ),
    "and_b32": lambda v, u: _and(*v, *u),
    "or_b32": lambda v, u: _and(~v[0], ~v[1], *u),
    "xor_b32": lambda v, u: u[0] | u[1],
    "or3_b32": lambda v, u: u[0] | u[1] | u[2],
    "and_or_b32": lambda v, u: _and(v[0], v[1], u[0], u[1]) | u[2],
    "bfi_b32": lambda v, u: u[0] | (v[0] & u[1]) | (~v[0] & u[2]),
    "perm_b32": _permuted,
    "lshlrev_b32": lambda v, u: spread(u[0]) | (u[1] << (v[0] & np.uint32(31))),
    "lshrrev_b32": lambda v, u: spread(u[0]) | (u[1] >> (v[0] & np.uint32(31))),
    "lshlrev_b64": lambda v, u: _wide(u[0]) | (u[1] << (v[0] & np.uint32(63)).astype(np.uint64)),
    "lshrrev_b64": lambda v, u: _wide(u[0]) | (u[1] >> (v[0] & np.uint32(63)).astype(np.uint64)),
    "lshl_or_b32": lambda v, u: spread(u[1]) | (u[0] << (v[1] & np.uint32(31))) | u[2],
    "bfe_u32": lambda v, u: spread(u[1]) | spread(u[2]) | TABLE["bfe_u32"][1](u[0], v[1], v[2]),
    **dict.fromkeys(("add_u32", "sub_u32", "subrev_u32", "mul_lo_u32", "add3_u32"), _sum),
    "lshl_add_u32": lambda v, u: spread(u[1]) | upward((u[0] << (v[1] & np.uint32(31))) | u[2]),
    "lshl_add_u64": lambda v, u: _wide(u[1]) | upward((u[0] << np.asarray(v[1]).astype(np.uint64)) | u[2]),
    "mad_64": lambda v, u: upward(
        np.asarray(u[0]).astype(np.uint64) | np.asarray(u[1]).astype(np.uint64) | u[2]
    ),
}
