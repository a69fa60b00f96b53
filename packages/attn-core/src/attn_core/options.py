"""From the arguments of a public plan() to an AttentionProblem."""

from __future__ import annotations

import inspect
import math
from collections.abc import Hashable
from functools import lru_cache
from typing import Any, TypedDict

import torch

from .arguments import as_dtype, as_pos_encoding
from .checking import finite, flag, whole
from .errors import needs
from .problem import AttentionProblem, MaskMode, Op, PagedKV, PosEncoding, RaggedKV

Dtype = torch.dtype | str


class DecodeOptions(TypedDict, total=False):
    """Keyword arguments of a decode plan(), with upstream's names."""

    pos_encoding_mode: str
    window_left: int
    window_right: int
    logits_soft_cap: float | None
    q_data_type: Dtype | None
    kv_data_type: Dtype | None
    o_data_type: Dtype | None
    data_type: Dtype | None
    sm_scale: float | None
    rope_scale: float | None
    rope_theta: float | None
    non_blocking: bool
    block_tables: torch.Tensor | None
    seq_lens: torch.Tensor | None
    fixed_split_size: int | None
    disable_split_kv: bool
    q_len_per_req: int
    needs_lse: bool


DECODE_DEFAULTS: DecodeOptions = {
    "pos_encoding_mode": "NONE",
    "window_left": -1,
    "window_right": 0,
    "logits_soft_cap": None,
    "q_data_type": "float16",
    "kv_data_type": None,
    "o_data_type": None,
    "data_type": None,
    "sm_scale": None,
    "rope_scale": None,
    "rope_theta": None,
    "non_blocking": True,
    "block_tables": None,
    "seq_lens": None,
    "fixed_split_size": None,
    "disable_split_kv": False,
    "q_len_per_req": 1,
    "needs_lse": False,
}

LEGACY_ORDER = tuple(name for name in DECODE_DEFAULTS if name not in ("window_right", "needs_lse"))
"""Order in which upstream once took the options by position."""


def merge_legacy(legacy: tuple[object, ...], options: DecodeOptions) -> DecodeOptions:
    """Add options given by position to those given by keyword.

    Raises:
        TypeError: Too many, or one given twice.
    """
    if len(legacy) > len(LEGACY_ORDER):
        want = f"at most {7 + len(LEGACY_ORDER)} positional arguments"
        raise TypeError(needs("plan", want, 7 + len(legacy), "core.arguments"))
    named = dict(zip(LEGACY_ORDER, legacy, strict=False))
    twice = sorted(named.keys() & options.keys())
    if twice:
        raise TypeError(f"plan: got multiple values for argument {twice[0]!r} [core.arguments]")
    return {**options, **named}  # type: ignore[typeddict-item]


def decode_dtypes(options: DecodeOptions) -> tuple[Dtype, Dtype]:
    """Return q and kv types.

    ``data_type`` alone speaks for both, unless it is an 8-bit type: then only the cache is meant,
    and q keeps its own.
    """
    q, kv, both = options.get("q_data_type"), options.get("kv_data_type"), options.get("data_type")
    if both is not None:
        kv = both if kv is None else kv
        if q is None and as_dtype("data_type", both).itemsize > 1:
            q = both
    if q is None:
        q = "float16"
    return q, q if kv is None else kv


def number(name: str, value: object, default: float) -> float:
    """Return a finite float, or the default for None.

    Raises:
        TypeError: Not a number.
        ValueError: Not finite, as a float32 either.
    """
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(needs(name, "a number", type(value).__name__, "core.number"))
    return finite(name, value, "core.number")


def make_problem(
    op: Op, heads: tuple[int, int], head_dims: tuple[int, int], *rest: Hashable
) -> AttentionProblem:
    """Build the problem of a plan; kept, since a serving loop asks for the same one every step.

    Takes the arguments of ``_make_problem``.
    """
    for name, value in zip(_INTEGERS, heads + head_dims, strict=True):
        # Not left to the problem: a kept one is found by ==, and 8.0 equals 8.
        whole(name, value, "core.heads")
    try:
        return _make_problem(op, heads, head_dims, *rest)
    except TypeError as err:
        raise _told(err, rest) from None


_INTEGERS = ("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo")


def _told(err: TypeError, rest: tuple[object, ...]) -> TypeError:
    """Return the error, or where a value cannot be looked up (a list) one that names the argument."""
    names = list(inspect.signature(_make_problem).parameters)[3:]
    for name, value in zip(names, rest, strict=True):
        try:
            hash(value)
        except TypeError:
            want = "a number, a string or a dtype"
            return TypeError(needs(name, want, type(value).__name__, "core.arguments"))
    return err


@lru_cache(maxsize=1024, typed=True)
def _make_problem(
    op: Op,
    heads: tuple[int, int],
    head_dims: tuple[int, int],
    q_data_type: Dtype,
    kv_data_type: Dtype,
    o_data_type: Dtype | None,
    kv: PagedKV | RaggedKV,
    mask: MaskMode,
    pos_encoding_mode: str,
    window_left: int,
    logits_soft_cap: float | None,
    sm_scale: float | None,
    rope_scale: float | None,
    rope_theta: float | None,
    needs_lse: bool,
    use_tensor_cores: bool,
    fixed_split_size: int | None,
    disable_split_kv: bool,
) -> AttentionProblem:
    q = as_dtype("q_data_type", q_data_type)
    scale = number("rope_scale", rope_scale, 1.0)
    theta = number("rope_theta", rope_theta, 1e4)
    if min(scale, theta) < 2.0**-126:  # of float32
        raise ValueError(needs("rope_scale and rope_theta", "positive numbers", (scale, theta), "core.rope"))
    return AttentionProblem(
        op=op,
        num_qo_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim_qk=head_dims[0],
        head_dim_vo=head_dims[1],
        q_dtype=q,
        kv_dtype=as_dtype("kv_data_type", kv_data_type),
        o_dtype=q if o_data_type is None else as_dtype("o_data_type", o_data_type),
        kv=kv,
        mask=mask,
        pos_encoding=as_pos_encoding(pos_encoding_mode),
        window_left=window_left,
        logits_soft_cap=number("logits_soft_cap", logits_soft_cap, 0.0),
        sm_scale=number("sm_scale", sm_scale, 1.0 / math.sqrt(head_dims[0]) if head_dims[0] > 0 else 1.0),
        rope_scale=scale,
        rope_theta=theta,
        needs_lse=flag("needs_lse", needs_lse),
        use_tensor_cores=use_tensor_cores,
        fixed_split_size=fixed_split_size,
        disable_split_kv=flag("disable_split_kv", disable_split_kv),
    )


def forward_changes(
    pos_encoding_mode: str,
    window_left: int,
    logits_soft_cap: float | None,
    sm_scale: float | None,
    rope_scale: float | None,
    rope_theta: float | None,
) -> dict[str, Any]:
    """Return the arguments of a deprecated ``forward`` that are not at their default, as problem fields."""
    changes: dict[str, Any] = {}
    if (pos := as_pos_encoding(pos_encoding_mode)) is not PosEncoding.NONE:
        changes["pos_encoding"] = pos
    if whole("window_left", window_left, "core.window") != -1:
        changes["window_left"] = window_left
    given = {
        "logits_soft_cap": logits_soft_cap,
        "sm_scale": sm_scale,
        "rope_scale": rope_scale,
        "rope_theta": rope_theta,
    }
    changes.update({name: number(name, value, 0.0) for name, value in given.items() if value is not None})
    return changes
