"""Rules that look at a batch or a version: wrong answers first, then preferences.

A rule is a pure function of the query and of the installation it was made for; nothing planned before can
change what it says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from attn_core.capability import FP8
from attn_core.problem import MaskMode, Op
from attn_core.query import Query
from attn_core.reasons import Code
from attn_core.rules import Rule, Verdict
from attn_core.thresholds import Limit, Never, Thresholds

from . import codes, rows
from .tables import Defect, dtype_name, routed_pages
from .versions import Version

_PAGED = frozenset({Op.PREFILL_PAGED})
_FP8_OF_ARCH = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}


def _ops(*paths: str) -> frozenset[Op]:
    """Entry points that any of these paths serves."""
    return frozenset().union(*(rows.CAPABILITIES[path].ops for path in paths))


def max_kv_len(query: Query) -> int:
    """Longest sequence of the query: of the batch, or the capacity when it will be captured."""
    graph = query.graph
    if graph is None:
        return query.batch.max_kv_len
    most = graph.max_pages * (query.problem.page_size or 1)
    return most if graph.max_kv_len is None else min(most, graph.max_kv_len)


def max_q_len(query: Query) -> int:
    """Most query rows of one request: of the batch, or the capacity when it will be captured."""
    return query.batch.max_q_len if query.graph is None else query.graph.total_q


def wrong_answers(known: tuple[Defect, ...]) -> tuple[Rule, ...]:
    """CAPABILITY rules: hold for an explicit backend too.

    Args:
        known: Defects of the installed release.
    """
    fp8, latent = frozenset({rows.NATIVE}), frozenset({rows.MLA})
    return (
        *(_defect_rule(defect) for defect in known),
        Rule(codes.CAP_AND_WINDOW, frozenset({Op.DECODE}), frozenset({rows.PA_V1}), _cap_and_window),
        Rule(codes.FP8_ENCODING, _PAGED, fp8, _fp8_encoding),
        Rule(codes.FP8_OUT, _PAGED, fp8, _fp8_out),
        Rule(codes.FP8_LSE, _PAGED, fp8, _fp8_lse),
        Rule(codes.CAUSAL_ONLY, _PAGED, frozenset({rows.UNIFIED}), _causal_only),
        Rule(codes.KV_SHORTER, _ops(rows.UNIFIED), frozenset({rows.UNIFIED}), _kv_shorter),
        Rule(codes.LATENT_HEADS, _PAGED, latent, _latent_heads),
        Rule(codes.LATENT_ROWS, _PAGED, latent, _latent_rows),
        Rule(codes.LATENT_MASK, _PAGED, latent, _latent_mask),
    )


def preferences(release: Version, thresholds: Thresholds) -> tuple[Rule, ...]:
    """PREFERENCE rules: skipped when the caller names the backend, or a captured graph pins it.

    Args:
        release: The installed version; decides the routed page sizes.
        thresholds: Rows of this package, with the user's overlay.
    """
    return (
        Rule(codes.PAGE_ROUTE, _PAGED, frozenset({rows.NATIVE}), _page_route(release)),
        _threshold(codes.GATHER_SHORT, _PAGED, rows.GATHER, thresholds, "q_len"),
        _threshold(codes.RAGGED_SHORT, frozenset({Op.PREFILL_RAGGED}), rows.VARLEN, thresholds, "q_len"),
        _threshold(codes.DECODE_SHORT, frozenset({Op.DECODE}), rows.PA_V1, thresholds, "kv_len"),
        Rule(codes.GRAPH_CAPACITY, frozenset({Op.DECODE}), frozenset({rows.PA_V1}), _graph_capacity),
        _by_name(codes.UNIFIED_BY_NAME, rows.UNIFIED, thresholds),
        _by_name(codes.APPEND_BY_NAME, rows.APPEND, thresholds),
    )


def signature(path: str, lacks: Callable[[str], Verdict]) -> Rule:
    """Return the rule that declines a path whose function is not what it was written for.

    Args:
        path: The path.
        lacks: Says what a path lacks; asked only where the package could be used at all.
    """
    return Rule(codes.SIGNATURE, _ops(path), frozenset({path}), lambda query: lacks(path))


_BY_SLUG = {code.slug: code for code in codes.CODES}


def _defect_rule(defect: Defect) -> Rule:
    def test(query: Query) -> Verdict:
        kv_len = max_kv_len(query)
        if not defect.concerns(query.target.arch, query.problem, kv_len):
            return None
        if defect.one_row and query.batch.max_q_len > 1:
            return None  # a short request among long ones is found in plan(), which sees each length
        return defect.limit, _observed(defect, query)

    return Rule(_BY_SLUG[defect.code], _ops(*defect.paths), defect.paths, test)


def _observed(defect: Defect, query: Query) -> str:
    if defect.one_row:
        return f"q_len {query.batch.max_q_len}"
    if defect.window_left is not None:
        return f"window_left {query.problem.window_left}"
    return f"cap {query.problem.logits_soft_cap} at kv_len {max_kv_len(query)}"


def _cap_and_window(query: Query) -> Verdict:
    p = query.problem
    if not p.logits_soft_cap or p.window_left < 0:
        return None
    return None, f"cap {p.logits_soft_cap} and window_left {p.window_left}"


def _fp8_encoding(query: Query) -> Verdict:
    p = query.problem
    own = _FP8_OF_ARCH.get(query.target.arch)
    if p.q_dtype not in FP8 or p.q_dtype is own:
        return None
    return "no fp8" if own is None else dtype_name(own), dtype_name(p.q_dtype)


def _fp8_out(query: Query) -> Verdict:
    p = query.problem
    want = torch.bfloat16 if p.q_dtype in FP8 else p.q_dtype
    return None if p.o_dtype is want else (dtype_name(want), dtype_name(p.o_dtype))


def _fp8_lse(query: Query) -> Verdict:
    p = query.problem
    return (None, dtype_name(p.q_dtype)) if p.needs_lse and p.q_dtype in FP8 else None


def _causal_only(query: Query) -> Verdict:
    # One row at the end of its sequence sees every key with either mask.
    if query.problem.mask is MaskMode.CAUSAL or max_q_len(query) <= 1:
        return None
    return None, query.problem.mask.value


def _kv_shorter(query: Query) -> Verdict:
    # The cheap half: plan() compares request by request.
    b = query.batch
    return (None, f"{b.max_kv_len} keys for {b.max_q_len} rows") if b.max_kv_len < b.max_q_len else None


def _latent_heads(query: Query) -> Verdict:
    p = query.problem
    if p.num_qo_heads in rows.LATENT_ROWS and (p.head_dim_qk, p.head_dim_vo) == (576, 512):
        return None
    heads = " or ".join(map(str, rows.LATENT_ROWS))
    return (
        f"{heads} heads of 512 and 64",
        f"{p.num_qo_heads} of {p.head_dim_vo} and {p.head_dim_qk - p.head_dim_vo}",
    )


def _latent_rows(query: Query) -> Verdict:
    most = rows.LATENT_ROWS.get(query.problem.num_qo_heads)
    q_len = query.batch.uniform_q_len
    if most is None or (q_len is not None and q_len <= most):
        return None
    return most, query.batch.max_q_len if q_len is not None else "requests of unlike lengths"


def _latent_mask(query: Query) -> Verdict:
    if query.problem.mask is MaskMode.CAUSAL or query.batch.max_q_len <= 1:
        return None
    return None, query.problem.mask.value


def _page_route(release: Version) -> Callable[[Query], Verdict]:
    def test(query: Query) -> Verdict:
        routed = routed_pages(release, query.problem.q_dtype)
        page = query.problem.page_size
        if routed is None or page in routed:
            return None
        return ", ".join(map(str, sorted(routed))), page

    return test


def _longest_q(query: Query) -> int:
    return query.batch.max_q_len


def _threshold(
    code: Code, ops: frozenset[Op], path: str, thresholds: Thresholds, gate: Literal["q_len", "kv_len"]
) -> Rule:
    """Decline up to and including the row's limit; a verdict of never, or no row, declines nothing."""
    measure = _longest_q if gate == "q_len" else max_kv_len

    def test(query: Query) -> Verdict:
        found = thresholds.get(code.slug, query.target.arch)
        if not isinstance(found, Limit):
            return None
        got = measure(query)
        return (_plain(found.value), got) if got <= found.value else None

    return Rule(code, ops, frozenset({path}), test, gate)


def _plain(value: float) -> float:
    return int(value) if value == int(value) else value


def _graph_capacity(query: Query) -> Verdict:
    graph = query.graph
    return None if graph is None or graph.max_kv_len is not None else (None, None)


def _by_name(code: Code, path: str, thresholds: Thresholds) -> Rule:
    """Keep a path out of ``auto`` until somebody has measured that it should be in."""

    def test(query: Query) -> Verdict:
        verdict = thresholds.get(code.slug, query.target.arch)
        return None if isinstance(verdict, Never) else (None, None)

    return Rule(code, _ops(path), frozenset({path}), test, "verdict")
