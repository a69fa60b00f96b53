"""What changes the rules themselves: the user's own thresholds, and older releases."""

from __future__ import annotations

from pathlib import Path

import pytest

from attn_aiter.backend import AiterBackend
from attn_core.problem import MaskMode, Op

from .golden_table import make
from .standin import route

PAGED, RAGGED = make(Op.PREFILL_PAGED, 64), make(Op.PREFILL_RAGGED, None)

# Overlay.

ROW = """
[[row]]
code = "{code}"
arch = "gfx942"
limit = {limit}
[row.provenance]
kind = "measured"
source = "this machine"
statistic = "median of 3"
grid = "one cell"
versions = "amd-aiter 0.1.20"
"""


@pytest.mark.parametrize(
    ("code", "limit", "problem", "q_len", "candidate"),
    [
        ("aiter.gather-short-query", "2", PAGED, 3, "aiter/gather"),
        ("aiter.gather-short-query", "2", PAGED, 2, "fa2/tile"),
        ("aiter.gather-short-query", '"never"', PAGED, 1, "aiter/gather"),
        ("aiter.ragged-short-query", "64", RAGGED, 64, "fa2/tile"),
        ("aiter.decode-short-kv", "4096", make(Op.DECODE, 16), 1, "fa2/tile"),
        ("aiter.decode-short-kv", "4095", make(Op.DECODE, 16), 1, "aiter/pa_v1"),
        ("aiter.unified-by-name", '"never"', make(Op.VERIFY, 64), 4, "aiter/unified"),
        ("aiter.append-by-name", '"never"', make(Op.APPEND, 64), 1, "aiter/append"),
    ],
)
def test_an_overlay_changes_the_decision_on_its_arch_only(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    limit: str,
    problem,
    q_len: int,
    candidate: str,
) -> None:
    before = route(problem, q_len, arch="gfx950").candidate
    file = tmp_path / "thresholds.toml"
    file.write_text(ROW.format(code=code, limit=limit))
    monkeypatch.setenv("ATTN_THRESHOLDS", str(file))
    assert route(problem, q_len).candidate == candidate
    assert route(problem, q_len, arch="gfx950").candidate == before


# Older releases, with the floor lowered.


@pytest.mark.parametrize(
    ("release", "page", "candidate"),
    [
        ("0.1.7.post2.dev18", 1, "aiter/native"),
        ("0.1.7.post2.dev18", 16, "aiter/gather"),
        ("0.1.10", 128, "aiter/native"),
        ("0.1.10", 16, "aiter/gather"),
        ("0.1.12", 16, "aiter/native"),
        ("0.1.20", 16, "aiter/gather"),
    ],
)
def test_page_sizes_of_older_releases(release: str, page: int, candidate: str) -> None:
    backend = AiterBackend({"assume_version": release, "min_version": "0.1.0"})
    assert route(make(Op.PREFILL_PAGED, page), 256, release=backend).candidate == candidate


def test_a_cap_that_an_old_release_drops_is_refused() -> None:
    backend = AiterBackend({"assume_version": "0.1.7.post2.dev18", "min_version": "0.1.0"})
    p = make(Op.PREFILL_RAGGED, None, mask=MaskMode.NONE, logits_soft_cap=30.0)
    refused = route(p, 256, release=backend).refused
    assert [r.code.slug for r in refused if r.candidate == "aiter/varlen"] == ["aiter.soft-cap"]
