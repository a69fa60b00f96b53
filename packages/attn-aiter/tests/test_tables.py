"""The data files: what they say, and that thresholds follow from the figures they cite."""

from __future__ import annotations

import csv
from collections import defaultdict
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from attn_aiter import codes, tables
from attn_aiter.versions import version
from attn_core.thresholds import Limit, Never, Unmeasured

GATED = (codes.GATHER_SHORT.slug, codes.RAGGED_SHORT.slug, codes.DECODE_SHORT.slug)


def figures(name: str) -> list[dict[str, str]]:
    text = (files("attn_aiter") / "data" / "reported" / name).read_text()
    return list(csv.DictReader(text.splitlines()))


def test_the_rows() -> None:
    found = {(row.code, row.arch): row.verdict for row in tables.thresholds()}
    assert found == {
        ("aiter.gather-short-query", "gfx942"): Limit(16),
        ("aiter.gather-short-query", "gfx950"): Limit(8),
        ("aiter.ragged-short-query", "gfx942"): Limit(16),
        ("aiter.ragged-short-query", "gfx950"): Never(),
        ("aiter.decode-short-kv", "gfx942"): Never(),
        ("aiter.decode-short-kv", "gfx950"): Never(),
    }


def test_never_is_a_row_and_not_a_gap() -> None:
    table = tables.thresholds()
    assert table.get(codes.RAGGED_SHORT.slug, "gfx950") == Never()
    assert table.get(codes.RAGGED_SHORT.slug, "gfx90a") == Unmeasured()


def test_every_figure_is_reported_and_has_a_source() -> None:
    for row in tables.thresholds():
        facts = dict(row.provenance)
        assert row.kind == "reported"
        assert "#" in facts["source"]
        assert row.code in {code.slug for code in codes.CODES}


def test_the_gather_limits_follow_from_the_figures() -> None:
    slower: dict[str, set[int]] = defaultdict(set)
    faster: dict[str, set[int]] = defaultdict(set)
    for row in figures("paged_gather.csv"):
        side = slower if float(row["worst_ratio"]) > 1 else faster
        side[row["arch"]].add(int(row["q_len"]))
    for arch in ("gfx942", "gfx950"):
        verdict = tables.thresholds().get(codes.GATHER_SHORT.slug, arch)
        assert verdict == Limit(max(slower[arch]))
        assert min(faster[arch]) > max(slower[arch])


def test_the_ragged_verdicts_follow_from_the_figures() -> None:
    by_arch: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in figures("ragged.csv"):
        by_arch[row["arch"]].append(row)
    assert all(float(row["16"]) > 1 for row in by_arch["gfx942"])
    assert any(float(row["24"]) < 1 for row in by_arch["gfx942"])
    assert tables.thresholds().get(codes.RAGGED_SHORT.slug, "gfx942") == Limit(16)
    # No threshold serves gfx950: one shape favours AITER from the shortest query on.
    lengths = [name for name in by_arch["gfx950"][0] if name.isdigit()]
    assert any(all(float(row[n]) < 1 for n in lengths) for row in by_arch["gfx950"])


def test_the_decode_verdict_follows_from_the_figures() -> None:
    for row in figures("decode.csv"):
        if row["num_qo_heads"] == "64":
            assert int(row["aiter_loses"]) == 0
            assert tables.thresholds().get(codes.DECODE_SHORT.slug, row["arch"]) == Never()


def test_native_paging_is_not_gated_because_it_wins_at_one_row() -> None:
    assert all(float(row["ratio"]) < 1 for row in figures("native.csv"))


@pytest.mark.parametrize(
    ("release", "native"),
    [
        ("0.1.7.post2.dev18", {1}),
        ("0.1.10", {128, 256, 1024}),
        ("0.1.11", {128, 256, 1024}),
        ("0.1.12", {16, 1024}),
        ("0.1.20", {1, 16, 1024}),
        ("0.1.21", {1, 16, 1024}),
    ],
)
def test_page_sizes_by_release(release: str, native: set[int]) -> None:
    assert tables.native_pages(version(release)) == native


def test_capability_and_route_are_two_sets() -> None:
    release = version("0.1.20")
    for dtype in (torch.float16, torch.bfloat16):
        routed = tables.routed_pages(release, dtype)
        assert routed == {1024}
        assert routed < tables.native_pages(release)
    assert tables.routed_pages(release, torch.float8_e4m3fnuz) is None
    assert tables.routed_pages(version("0.1.12"), torch.bfloat16) is None


@pytest.mark.parametrize(
    ("release", "slugs"),
    [
        ("0.1.7.post2.dev18", ["aiter.one-row", "aiter.one-row", "aiter.soft-cap", "aiter.window-zero"]),
        ("0.1.10", ["aiter.one-row", "aiter.one-row", "aiter.window-zero"]),
        ("0.1.16", ["aiter.one-row", "aiter.one-row", "aiter.soft-cap", "aiter.window-zero"]),
        ("0.1.20", ["aiter.one-row", "aiter.one-row", "aiter.soft-cap", "aiter.window-zero"]),
    ],
)
def test_defects_by_release(release: str, slugs: list[str]) -> None:
    assert sorted(d.code for d in tables.defects(version(release))) == slugs


def test_an_overlay_replaces_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        '[[row]]\ncode = "aiter.gather-short-query"\narch = "gfx942"\nlimit = 4\n[row.provenance]\n'
        'kind = "measured"\nsource = "this machine"\nstatistic = "s"\ngrid = "g"\nversions = "v"\n'
    )
    monkeypatch.setenv("ATTN_THRESHOLDS", str(file))
    table = tables.thresholds()
    assert table.get("aiter.gather-short-query", "gfx942") == Limit(4)
    assert table.get("aiter.gather-short-query", "gfx950") == Limit(8)


def test_slugs_are_unique() -> None:
    slugs = [code.slug for code in codes.CODES]
    assert len(slugs) == len(set(slugs))
    assert all(slug.startswith("aiter.") for slug in slugs)
    assert all(code.meaning for code in codes.CODES)


REPORTED = files("attn_aiter") / "data" / "reported"


def test_every_reported_file_states_its_source() -> None:
    rows = [line.split("|") for line in (REPORTED / "README.md").read_text().splitlines() if "`" in line]
    stated = {row[1].strip().strip("`"): row[2].strip() for row in rows if len(row) > 3}
    assert stated.keys() == {file.name for file in REPORTED.iterdir() if file.name.endswith(".csv")}
    assert all("#" in source for source in stated.values())


def test_operands_declared_as_written_are_safe_where_they_are_separate() -> None:
    """The trigger moves from column to column; the rule holds (and one layout of views that was lucky)."""
    for row in figures("compile_layouts.csv"):
        cells = [row[name] for name in ("dynamic_false", "default", "dynamic_true")]
        exact = all(cell == "0" for cell in cells)
        assert exact is (row["operand"] in ("separately allocated", "(kv[:, 0], kv[:, 1])")
                         or "separate" in row["operand"]), row  # fmt: skip


def test_per_call_figures_have_both_devices() -> None:
    rows = figures("per_call.csv")
    assert len({(row["mode"], row["call"]) for row in rows}) == len(rows) == 12
    assert all(float(row[arch]) > 0 for row in rows for arch in ("gfx942_us", "gfx950_us"))
