"""The file of `attn tune`: kept exactly, told of once when it is bad, and never in the way."""

import os

import pytest

from attn_core import plugins, thresholds, tuned
from attn_core.measured import Cell
from attn_core.thresholds import Limit, Never, Row, Unmeasured

from .test_measured import B_FROM_9, HERE, LAYER
from .test_thresholds import row
from .tune_kit import bucket, cells, pair

FACTS = (("source", 'a "test" of \\ 1 %'), ("statistic", "s"), ("grid", "g"), ("versions", "v"))


def content():
    rows = [
        Row("x.short-q", "gfx942", Limit(4), "measured", FACTS, "mine"),
        Row("x.short-q", "gfx950", Never(), "measured", FACTS, "mine"),
    ]
    return rows, [pair(LAYER, HERE, B_FROM_9, bucket((1, "b/p"), (3, "a/p"), (5, "b/p"), kv_len=128))]


@pytest.fixture
def text():
    return tuned.text_of(*content())


@pytest.fixture
def file(tmp_path, monkeypatch, text):
    """The overlay in force."""
    path = tmp_path / "tuned.toml"
    path.write_text(text, encoding="utf-8")
    monkeypatch.setenv(tuned.VARIABLE, str(path))
    return path


def test_what_is_written_is_read_back(tmp_path, text):
    path = tmp_path / "t.toml"
    found = tuned.parse(text, path)
    rows, (first,) = content()
    assert [(r.code, r.arch, r.verdict, r.kind, r.provenance) for r in found.rows] == [
        (r.code, r.arch, r.verdict, r.kind, r.provenance) for r in rows
    ]
    (again,) = found.pairs
    assert (again.key, again.candidates, again.provenance) == (first.key, first.candidates, first.provenance)
    assert again.buckets == first.buckets
    assert again.origin == str(path)
    assert tuned.text_of(found.rows, found.pairs) == text


def test_a_new_measurement_replaces_the_old_one_of_the_same_thing_only(text, tmp_path):
    old = tuned.parse(text, tmp_path / "t.toml")
    other = pair(LAYER, HERE, bucket((1, "c/p")), candidates=("a/p", "c/p"))
    newer = pair(LAYER, HERE, bucket((1, "b/p")), candidates=("b/p", "a/p"))
    rows, pairs = tuned.merged(
        old, [Row("x.short-q", "gfx942", Limit(9), "measured", FACTS, "m")], [newer, other]
    )
    assert [(r.arch, r.verdict) for r in rows] == [("gfx942", Limit(9)), ("gfx950", Never())]
    assert pairs == [newer, other]


def test_its_rows_lie_between_those_shipped_and_those_stated(file, tmp_path, monkeypatch):
    shipped = thresholds.Thresholds.load(row(limit="16") + row(arch="gfx90a", limit="1"), "shipped")
    table = shipped.overlaid(thresholds.overlay())
    assert [table.get("x.short-q", arch) for arch in ("gfx942", "gfx950", "gfx90a", "cpu")] == [
        Limit(4), Never(), Limit(1), Unmeasured(),
    ]  # fmt: skip
    assert table.find("x.short-q", "gfx942").origin == str(file)
    mine = tmp_path / "mine.toml"
    mine.write_text(row(limit="2", kind="derived"), encoding="utf-8")
    monkeypatch.setenv(thresholds.OVERLAY_VARIABLE, str(mine))
    assert thresholds.overlay().get("x.short-q", "gfx942") == Limit(2)
    assert thresholds.overlay().get("x.short-q", "gfx950") == Never()


def test_discovery_reads_it(file):
    assert [p.candidates for p in plugins.discover(()).measured] == [("a/p", "b/p")]
    with tuned.using(None):
        assert len(plugins.discover(()).measured) == 0
        assert len(thresholds.overlay()) == 0


def test_where_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv(tuned.VARIABLE, "")
    assert tuned.location() is None
    assert tuned.load() == tuned.EMPTY
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "x.toml"))
    assert tuned.location() == tmp_path / "x.toml"
    monkeypatch.delenv(tuned.VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert tuned.location() == tmp_path / "attn" / "tuned.toml"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert str(tuned.location()) == "/home/somebody/.config/attn/tuned.toml"


def test_none_at_the_usual_place_is_no_fault_but_a_named_one_that_is_missing_is(
    monkeypatch, tmp_path, caplog
):
    monkeypatch.delenv(tuned.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert tuned.load() == tuned.EMPTY
    assert caplog.records == []
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path / "gone.toml"))
    assert "gone.toml: not found" in tuned.load().fault


BAD = {
    "no TOML": ("format = 1", "format = = 1", "line 5"),
    "another format": ("format = 1", "format = 2", "line 5: needs format = 1, got 2"),
    "no format": ("format = 1\n", "", "needs format = 1, got none"),
    "pair is no table": ("[[pair]]", "pair = 3\n[[other]]", "needs [[pair]] tables"),
    "unknown step": ('[9, "b/p"]', '[9, "c/p"]', "a step for 'c/p'"),
    "step is a word": ('[9, "b/p"]', '["9", "b/p"]', "step = '9'"),
    "steps fall": ('[9, "b/p"]', '[1, "b/p"]', "steps at q_len [1, 1]"),
    "no steps": ('steps = [[1, "a/p"], [9, "b/p"]]', "steps = []", "steps at q_len []"),
    "no time": ("[1, 1000.0, 1000.0]", "[1, 1000.0, 0.0]", "times of [1000.0, 0.0] us"),
    "not a time": ("[1, 1000.0, 1000.0]", "[1, 1000.0, nan]", "times of [1000.0, nan] us"),
    "one time": ("[1, 1000.0, 1000.0]", "[1, 1000.0]", "not enough values"),
    "one candidate": ('["a/p", "b/p"]', '["a/p"]', "not two"),
    "twice one": ('["a/p", "b/p"]', '["a/p", "a/p"]', "not two"),
    "no scope": ("num_kv_heads = 2\n", "", "no 'num_kv_heads'"),
    "heads in words": ("num_kv_heads = 2\n", 'num_kv_heads = "2"\n', "num_kv_heads = '2', not int"),
    "no provenance": ('kind = "measured"\nsource = "a test"', 'source = "a test"', "no 'kind'"),
    "no bucket": ("[[pair.bucket]]", "[[pair.other]]", "no 'bucket'"),
    "size 0": ("batch_size = 2", "batch_size = 0", "not 1 or more"),
    "a bad row": ("limit = 4", 'limit = "often"', "line 8: row x.short-q gfx942: limit"),
}


@pytest.mark.parametrize(("old", "new", "told"), BAD.values(), ids=BAD)
def test_a_bad_file_is_told_of_once_with_file_and_line_and_left_out(file, text, caplog, old, new, told):
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")
    with caplog.at_level("WARNING", logger="attn_core"):
        found = [tuned.load(), tuned.load()]
    (record,) = caplog.records
    assert str(file) in record.message
    assert "line " in record.message
    assert told in record.message
    assert record.message.startswith("left out, routing goes on without it: ")
    assert "\n" not in record.message
    assert [(len(f.rows), len(f.pairs)) for f in found] == [(0, 0), (0, 0)]
    assert len(plugins.discover(()).measured) == 0


def test_the_line_named_is_that_of_the_pair(text, tmp_path):
    broken = text + text[text.index("[[pair]]") :].replace("num_cus = 304", 'num_cus = "many"')
    with pytest.raises(ValueError, match="num_cus = 'many'") as told:
        tuned.parse(broken, tmp_path / "t.toml")
    lines = broken.splitlines()
    second = [at for at, line in enumerate(lines, 1) if line == "[[pair]]"][1]
    assert f"t.toml, line {second}: " in str(told.value)


def test_bytes_that_are_no_text_and_a_directory_are_left_out_too(file, caplog, tmp_path, monkeypatch):
    file.write_bytes(b"\xff\xfe format")
    assert "UTF-8" in tuned.load().fault
    monkeypatch.setenv(tuned.VARIABLE, str(tmp_path))
    assert "readable" in tuned.load().fault


def test_saving_is_all_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "deep" / "tuned.toml"
    tuned.save(path, "one")
    assert path.read_text() == "one"

    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.replace", stop)
    with pytest.raises(KeyboardInterrupt):
        tuned.save(path, "two")
    assert path.read_text() == "one"
    assert os.listdir(path.parent) == ["tuned.toml"]


def test_the_reader_takes_what_a_bucket_may_hold():
    assert bucket((1, "a/p")).fastest(1) == "a/p"
    assert cells((1, 2.0)) == [Cell(1, (1e-3, 2e-3))]
