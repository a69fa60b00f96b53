"""``attn reasons`` and ``attn docs``: what is listed, and pages that are the same everywhere."""

import json
import sys
import types
from importlib.metadata import EntryPoint

import pytest

from attn_core import capability, hookspecs, plugins, route, sampling_route
from attn_core.capability import Capability
from attn_core.problem import Op
from attn_core.reasons import Code, Reason, Stage
from attn_core.rules import Rule
from attn_core.thresholds import Thresholds

from .cli_kit import SHORT, attn, quick_backend
from .fakes import ABSENT, FakeBackend

OWN = Code("quick.own", Stage.PREPARE, "needs {limit}", quiet=True, meaning="Stated by the backend.")
ROWS = """
[[row]]
code = "quick.short"
arch = "gfx950"
limit = "never"
[row.provenance]
kind = "measured"
source = "bench | a"
statistic = "median"
grid = "8x8"
versions = "v1"
[[row]]
code = "quick.short"
arch = "gfx942"
limit = 128
[row.provenance]
kind = "reported"
source = "upstream"
statistic = "mean"
grid = "4x4"
versions = "v2"
"""


@pytest.fixture
def quick(use):
    backend = quick_backend()
    backend.codes = (OWN, SHORT)
    backend.thresholds = Thresholds.load(ROWS, "/home/someone/rows.toml")
    return use(backend)


def listed():
    result = attn("reasons", "--json")
    assert result.exit_code == 0
    return json.loads(result.stdout)


def test_every_code_is_listed_once_with_its_owner(quick):
    said = listed()
    assert set(said) == {"codes", "faults"}
    assert said["faults"] == []
    by_code = {row["code"]: row for row in said["codes"]}
    assert len(by_code) == len(said["codes"])
    core = {code.slug for code in (*capability.CODES, *route.CODES, *sampling_route.CODES)}
    assert {slug for slug, row in by_code.items() if row["owner"] == "core"} == core
    assert {slug for slug, row in by_code.items() if row["owner"] == "quick"} == {"quick.own", "quick.short"}
    assert by_code["quick.own"] == {
        "code": "quick.own",
        "stage": "prepare",
        "owner": "quick",
        "template": "needs {limit}",
        "quiet": True,
        "meaning": "Stated by the backend.",
    }


def test_a_shared_code_belongs_to_its_first_owner(quick, use):
    other = quick_backend()
    other.name, other.codes = "a_later", (capability.ARCH, SHORT)
    use(quick, other)
    owners = {row["code"]: row["owner"] for row in listed()["codes"]}
    assert owners["core.arch"] == "core"
    assert owners["quick.short"] == "a_later"  # first by name, whatever the rank


def test_reasons_text(quick):
    out = attn("reasons").stdout
    assert "quick.short" in out
    assert "Measured | once." in out
    assert "preference" in out


def test_codes_that_are_none_are_told_and_the_rest_is_listed(quick):
    quick.codes = ("quick.text",)
    said = listed()
    assert said["faults"] == ["quick: TypeError: quick: codes: needs Code values, got str [core.plugin]"]
    assert any(row["code"] == "core.arch" for row in said["codes"])
    assert "Not listed: quick: TypeError" in attn("reasons").stdout


def test_unreadable_configuration(monkeypatch, tmp_path):
    monkeypatch.setenv("ATTN_CONFIG", str(tmp_path / "none.toml"))
    plugins.use(None)
    assert attn("reasons").exit_code == 2


def written(place):
    result = attn("docs", "--write", str(place))
    assert result.exit_code == 0, result.output
    return {path.name: path.read_text(encoding="utf-8") for path in place.iterdir()}


def test_pages(quick, tmp_path):
    pages = written(tmp_path / "docs" / "reference")
    assert set(pages) == {"backends.md", "reasons.md", "thresholds.md"}
    assert all(page.endswith("\n") and not page.endswith("\n\n") for page in pages.values())
    reasons = pages["reasons.md"]
    for code in (*capability.CODES, *route.CODES, OWN, SHORT):
        assert reasons.count(f"| `{code.slug}` | {code.stage.name.lower()} |") == 1
    assert "| `quick.short` | preference | is slower up to {limit} rows |  | Measured \\| once. |" in reasons
    assert pages["thresholds.md"].splitlines()[-4:] == [
        "| code | arch | limit | kind | where it comes from |",
        "| --- | --- | --- | --- | --- |",
        "| `quick.short` | gfx942 | 128 | reported | "
        "source: upstream<br>statistic: mean<br>grid: 4x4<br>versions: v2 |",
        "| `quick.short` | gfx950 | never | measured | "
        "source: bench \\| a<br>statistic: median<br>grid: 8x8<br>versions: v1 |",
    ]
    backends = pages["backends.md"]
    assert "| `quick/native` | gfx942 | prefill_paged, verify |" in backends
    assert f"| `reference/torch` | any | {', '.join(sorted(op.value for op in Op))} |" in backends
    assert "| page_size | 1, 1024 | native |\n|  | any | gather, tile |" in backends
    assert "| k and v | bfloat16, float16, float32 (the type of q) |" in backends
    assert "| `quick.short` | preference | gather | prefill_paged | Measured \\| once. |" in backends


def test_pages_have_equal_columns(quick, tmp_path):
    for page in written(tmp_path).values():
        for block in page.split("\n\n"):
            cells = {
                line.replace("\\|", "").count("|") for line in block.splitlines() if line.startswith("|")
            }
            assert len(cells) <= 1


def test_pages_do_not_depend_on_the_machine(quick, tmp_path, monkeypatch):
    first = written(tmp_path / "a")
    monkeypatch.setenv("ATTN_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("COLUMNS", "40")
    reference = plugins.registry().backends[1]
    plugins.use(plugins.Registry((reference, quick), (), (), {"quick": "quick 9.9"}))  # another order
    assert written(tmp_path / "b") == first
    assert "/home/someone" not in "".join(first.values())


def test_check(quick, tmp_path):
    written(tmp_path)
    fresh = attn("docs", "--check", str(tmp_path))
    assert fresh.exit_code == 0
    assert fresh.stdout == f"{tmp_path} is up to date\n"
    page = tmp_path / "reasons.md"
    page.write_text(page.read_text().replace("Stated by the backend.", "Stated."))
    (tmp_path / "backends.md").unlink()
    stale = attn("docs", "--check", str(tmp_path))
    assert stale.exit_code == 1
    missing, changed = stale.stdout.splitlines()
    assert missing == f"{tmp_path}/backends.md: missing"
    assert changed.startswith(f"{tmp_path}/reasons.md: lines to add: 1, to remove: 1; first: -| `quick.own`")
    assert stale.stderr == f"attn docs: {tmp_path} is out of date; run: attn docs --write {tmp_path}\n"
    assert not (tmp_path / "backends.md").exists()


def test_check_compares_every_byte(quick, tmp_path):
    written(tmp_path)
    page = tmp_path / "thresholds.md"
    text = page.read_bytes()
    for other in (text.rstrip(b"\n"), text.replace(b"\n", b"\r\n"), text + b"\xff\n"):
        page.write_bytes(other)
        assert attn("docs", "--check", str(tmp_path)).exit_code == 1


def test_only_named_backends(quick, use, tmp_path):
    use(quick, FakeBackend("other"))
    broken = plugins.Broken("third", "ImportError: nothing")
    plugins.use(plugins.Registry(plugins.registry().backends, (broken,), (), {}))
    args = ["docs", "--write", str(tmp_path), "--backend", "quick", "--backend", "reference"]
    assert attn(*args).exit_code == 0
    page = (tmp_path / "backends.md").read_text()
    assert "quick/tile" in page
    assert "reference/torch" in page
    assert "other" not in page


def test_pages_say_how_to_make_them_again(quick, tmp_path):
    args = ["--backend", "reference", "--backend", "quick"]
    attn("docs", "--write", str(tmp_path), *args)
    for page in tmp_path.iterdir():
        first = page.read_text().splitlines()[0]
        assert first == "<!-- Generated by: attn docs --write DIR --backend reference --backend quick -->"


def test_pages_are_made_again_as_they_were(quick, use, tmp_path):
    use(quick, FakeBackend("other"))
    place = str(tmp_path)
    first = attn("docs", "--write", place, "--backend", "quick", "--backend", "reference")
    assert first.exit_code == 0
    made = (tmp_path / "backends.md").read_text()
    assert attn("docs", "--check", place).exit_code == 0
    assert attn("docs", "--write", place).exit_code == 0
    assert (tmp_path / "backends.md").read_text() == made
    assert attn("docs", "--check", place, "--backend", "quick").exit_code == 1


def test_rules_of_one_cause_share_a_row(use, tmp_path):
    rules = [
        Rule(SHORT, frozenset({op}), frozenset({path}), lambda q: None)
        for op, path in ((Op.VERIFY, "b"), (Op.DECODE, "a"))
    ]
    use(FakeBackend("twice", paths=["a", "b"], rules=rules))
    page = written(tmp_path)["backends.md"]
    assert page.count("| `quick.short` |") == 1
    assert "| `quick.short` | preference | a, b | decode, verify | Measured" in page


def test_devices_without_kernels_are_left_out(use, tmp_path):
    wide = Capability(archs=frozenset({"cpu", "gfx942", "gfx950"}), ops=frozenset({Op.DECODE}))

    def unavailable(target):
        assert target.arch != "cpu"  # whether it serves this CPU is this machine's affair
        return Reason(ABSENT, "part", "device code") if target.arch == "gfx950" else None

    use(FakeBackend("part", paths=[("p", wide)], unavailable=unavailable))
    page = written(tmp_path)["backends.md"]
    assert "| `part/p` | cpu, gfx942 | decode |" in page


@pytest.mark.parametrize("first", [b"", b"--backend by-hand\n", b"\xff\xfe\n"])
def test_pages_of_another_origin_record_nothing(quick, tmp_path, first):
    (tmp_path / "backends.md").write_bytes(first)
    assert attn("docs", "--write", str(tmp_path)).exit_code == 0
    page = (tmp_path / "backends.md").read_text()
    assert page.startswith("<!-- Generated by: attn docs --write DIR -->\n")


@pytest.fixture
def library(monkeypatch):
    """Install a plugin whose backend claims what the installed version of its library can do."""
    module = types.ModuleType("plugin_of_lib")

    @hookspecs.hookimpl
    def attn_backends(api_version, config):
        version = config.get("lib", {}).get("assume_version", "none")
        ops = {Op.DECODE, Op.VERIFY} if version == "2" else {Op.DECODE}
        return [FakeBackend("lib", paths=[("p", Capability(archs=None, ops=frozenset(ops)))])]

    module.attn_backends = attn_backends
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(plugins, "_installed", lambda: [EntryPoint("lib", module.__name__, plugins.GROUP)])


def test_a_version_can_be_assumed(library, tmp_path):
    plugins.use(None)
    assert attn("docs", "--write", str(tmp_path), "--assume", "lib=2").exit_code == 0
    page = (tmp_path / "backends.md").read_text()
    assert page.startswith("<!-- Generated by: attn docs --write DIR --assume lib=2 -->")
    assert "## lib\n\nWith version 2 of its library.\n\n" in page
    assert "| `lib/p` | any | decode, verify |" in page
    assert attn("docs", "--check", str(tmp_path), "--assume", "lib=2").exit_code == 0
    assert attn("docs", "--check", str(tmp_path), "--assume", "lib=1").exit_code == 1
    told = docs_refuse("--write", str(tmp_path), "--assume", "reference=2")
    assert told.startswith("attn docs: --assume: needs a backend that reads assume_version, got reference")


def docs_refuse(*args):
    result = attn("docs", *args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return result.stderr.rstrip("\n")


def test_bad_input(quick, tmp_path, monkeypatch):
    place = str(tmp_path / "none")
    one = "attn docs: docs: needs one of --check DIR and --write DIR, got"
    assert docs_refuse() == f"{one} neither [cli.docs]"
    assert docs_refuse("--check", place, "--write", place) == f"{one} both [cli.docs]"
    assert docs_refuse("--write", place, "--backend", "fa9") == (
        "attn docs: --backend: needs one of quick, reference, got 'fa9' [cli.docs]"
    )
    (tmp_path / "file").write_text("")
    told = docs_refuse("--write", str(tmp_path / "file"))
    assert told.startswith("attn docs: --write: needs a writable directory, got ")
    for variable in ("ATTN_CONFIG", "ATTN_THRESHOLDS"):
        monkeypatch.setenv(variable, "/mine.toml")
        assert docs_refuse("--write", place) == (
            f"attn docs: {variable}: needs to be unset, got /mine.toml [cli.docs]"
        )
        monkeypatch.delenv(variable)
    assert not (tmp_path / "none").exists()


def test_a_broken_plugin_would_leave_rows_out(quick, tmp_path):
    broken = plugins.Broken("third", "ImportError: nothing")
    plugins.use(plugins.Registry((quick,), (broken,), (), {}))
    told = docs_refuse("--write", str(tmp_path))
    assert told == "attn docs: plugins: needs all to load, got third: ImportError: nothing [cli.docs]"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("attribute", "told"),
    [
        ("codes", "quick: TypeError: quick: codes: needs Code values, got int"),
        ("thresholds", "quick: thresholds: needs attn_core.thresholds.Thresholds, got tuple"),
    ],
)
def test_attributes_of_another_kind(quick, tmp_path, attribute, told):
    setattr(quick, attribute, (3,))
    assert told in docs_refuse("--write", str(tmp_path))


def test_without_thresholds(tmp_path):
    assert "No installed backend has thresholds." in written(tmp_path)["thresholds.md"]
