"""Numbers of routing rules: what a table says, where it comes from, and what is refused."""

import textwrap

import pytest

from attn_core.thresholds import Limit, Never, Thresholds, Unmeasured, overlay

ROW = """
[[row]]
code = "{code}"
arch = "{arch}"
limit = {limit}
[row.provenance]
kind = "{kind}"
source = "a table"
statistic = "median of 5"
grid = "batch 1-64"
versions = "rocm 7.0"
"""


def row(code="x.short-q", arch="gfx942", limit="16", kind="reported"):
    return ROW.format(code=code, arch=arch, limit=limit, kind=kind)


def load(*rows, origin="table.toml"):
    return Thresholds.load("".join(rows), origin)


def test_a_limit_a_measured_never_and_a_missing_row_are_three_things():
    table = load(row(), row(arch="gfx950", limit='"never"'), row(code="x.long-kv", limit="0.5"))
    assert table.get("x.short-q", "gfx942") == Limit(16)
    assert table.get("x.short-q", "gfx950") == Never()
    assert table.get("x.long-kv", "gfx942") == Limit(0.5)
    assert table.get("x.long-kv", "gfx950") == table.get("y", "gfx942") == Unmeasured()
    assert len({Never(), Unmeasured(), Limit(0)}) == 3
    assert len(table) == len(list(table)) == 3


def test_an_empty_table_knows_nothing():
    for table in (load(""), Thresholds(())):
        assert len(table) == 0
        assert table.get("x", "gfx942") == Unmeasured()


def test_a_row_keeps_where_it_comes_from():
    (found,) = load(row(kind="measured"), origin="mine.toml")
    assert (found.code, found.arch, found.kind, found.origin) == (
        "x.short-q",
        "gfx942",
        "measured",
        "mine.toml",
    )
    assert found.provenance == (
        ("source", "a table"),
        ("statistic", "median of 5"),
        ("grid", "batch 1-64"),
        ("versions", "rocm 7.0"),
    )


def test_an_overlay_replaces_rows_and_adds_others():
    base = load(row(), row(arch="gfx950", limit="8"))
    mine = load(row(limit="32", kind="measured"), row(code="x.new", limit='"never"'), origin="mine")
    both = base.overlaid(mine)
    assert both.get("x.short-q", "gfx942") == Limit(32)
    assert both.get("x.short-q", "gfx950") == Limit(8)
    assert both.get("x.new", "gfx942") == Never()
    assert {r.origin for r in both} == {"table.toml", "mine"}
    assert base.get("x.short-q", "gfx942") == Limit(16)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[row", "table.toml: needs valid TOML"),
        ("row = 3", r"needs \[\[row\]\] tables, got int"),
        ("row = [3]", r"needs \[\[row\]\] tables, got int"),
        (row() + row(), "threshold x.short-q gfx942: needs one row, got two"),
        (row(limit="true"), 'limit: needs a number or "never", got True'),
        (row(limit='"always"'), "got 'always'"),
        (row(limit="[1]"), "limit: needs"),
        (row(limit="nan"), "limit: needs a number .*got nan"),
        (row(kind="guessed"), "kind: needs one of .*got 'guessed'"),
        (row().replace("limit = 16\n", ""), "limit: needs .*got None"),
        (row().replace('code = "x.short-q"\n', ""), "needs code and arch as strings"),
        (row().replace('arch = "gfx942"', "arch = 942"), "needs code and arch as strings"),
        (row().replace('source = "a table"', 'source = ""'), "provenance .*got no source"),
        (row().replace('versions = "rocm 7.0"\n', ""), "provenance .*got no versions"),
        (row().split("[row.provenance]")[0], "provenance .*got no kind"),
        ('[[row]]\ncode="x"\narch="y"\nlimit=1\nprovenance="me"', "provenance .*got no kind"),
    ],
)
def test_a_table_that_is_not_complete_is_refused(text, message):
    with pytest.raises(ValueError, match=message) as caught:
        load(text)
    assert "[core.threshold]" in str(caught.value)


def test_the_users_file_is_never_skipped_in_silence(monkeypatch, tmp_path):
    monkeypatch.delenv("ATTN_THRESHOLDS", raising=False)
    assert len(overlay()) == 0
    monkeypatch.setenv("ATTN_THRESHOLDS", "")
    assert len(overlay()) == 0
    file = tmp_path / "mine.toml"
    monkeypatch.setenv("ATTN_THRESHOLDS", str(file))
    with pytest.raises(ValueError, match="ATTN_THRESHOLDS: needs a readable file"):
        overlay()
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="utf-8"):
        overlay()
    file.write_text(textwrap.dedent(row(limit="5")), encoding="utf-8")
    (found,) = overlay()
    assert (found.verdict, found.origin) == (Limit(5), str(file))
