"""The pytest side of the kit: selection, errors of collection, the closing table, the report."""

import json
from dataclasses import replace
from types import MappingProxyType

import pytest
import torch

from attn_core import plugins
from attn_core.backend import Path
from attn_core.capability import Dims
from attn_core.problem import MaskMode, Op, PosEncoding
from attn_core.reasons import Code, Reason, Stage
from attn_core.rules import Rule
from attn_core.testing.mini import CAPABILITY, Mini
from attn_core.testing.select import _CLAIMS, KINDS

pytest_plugins = ["pytester"]
LINE = "from attn_core.testing.suite import *\n"
SMALL = replace(
    CAPABILITY,
    ops=frozenset({Op.DECODE}),
    kv_dtypes=frozenset({torch.float32}),
    head_dims=Dims(frozenset({8})),
    masks=frozenset({MaskMode.NONE}),
    pos_encodings=frozenset({PosEncoding.NONE}),
    kv_orders=frozenset({"NHD"}),
    window=False,
    soft_cap=False,
    batch_invariant=False,
)


def small(name="small", **changes):
    """A backend with few cases."""
    backend = Mini()
    backend.name, backend.paths = name, (Path("torch", replace(SMALL, **changes)),)
    return backend


@pytest.fixture
def run(pytester):
    """Run the one-line test file with these backends installed."""

    def call(*arguments, backends=(), text=LINE, plugin=True, broken=()):
        pytester.makepyfile(test_conformance=text)
        installed = plugins.Registry(tuple(backends), tuple(broken), (), {})
        before = plugins.use(installed)
        try:
            loaded = ["-p", "attn_core.testing.plugin"] if plugin else []
            result = pytester.runpytest_inprocess(*loaded, "-p", "no:cacheprovider", *arguments)
            assert plugins.registry() is installed  # what the checks replaced has come back
        finally:
            plugins.use(before)
        return result

    return call


def test_a_green_run_ends_with_a_table_and_a_report(run, pytester):
    result = run("--attn-report", "found.json", backends=[small(), small("other")])
    assert result.ret == 0
    assert set(result.parseoutcomes()) == {"passed", "skipped"}
    result.stdout.fnmatch_lines([
        "*= attn conformance =*",
        "candidate * on * cases * passed * failed * checks * declined * tolerance",
        "other/torch * cpu * 0 * default",
        "small/torch * cpu * 0 * default",
        "other/torch covered:",
        "  head_dim: 8x8",
        "small/torch covered:",
    ])  # fmt: skip
    found = json.loads((pytester.path / "found.json").read_text())
    row = found["small/torch"]
    assert row["cases"] == row["passed"] > 10
    assert row["failed_tests"] == []
    assert row["covered"]["op"] == ["decode"]
    assert row["checks"] > 6 * row["cases"]


def test_a_fault_is_counted_by_case_and_named(run, pytester):
    class Wrong(Mini):
        def lse(self, natural, kv_len):
            return natural

    backend = Wrong()
    backend.paths = small().paths
    result = run("--attn-report", "found.json", "--tb=line", backends=[backend])
    assert result.ret == 1
    row = json.loads((pytester.path / "found.json").read_text())["mini/torch"]
    named = {test.partition("[")[2] for test in row["failed_tests"]}
    assert 0 < len(named) == row["failed"] < row["cases"] == row["failed"] + row["passed"]
    assert {test.partition("[")[0].rpartition("::")[2] for test in row["failed_tests"]} == {
        "test_matches_the_oracle", "test_survives_extreme_logits", "test_replays_later_plans"
    }  # fmt: skip
    result.stdout.fnmatch_lines(
        ["*lse: * elements differ from the oracle, worst * times the tolerance 1e-05*"]
    )


def test_works_without_the_plugin(run):
    result = run("-k", "test_is_well_formed", backends=[small()], plugin=False)
    assert result.parseoutcomes()["passed"] == 1
    result.stdout.no_fnmatch_line("*attn conformance*")


def test_the_reference_is_not_a_default(run):
    from attn_core.reference import ReferenceBackend

    result = run(backends=[ReferenceBackend()])
    assert result.ret == 2
    result.stdout.fnmatch_lines(["*no backend other than 'reference' is installed*"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--attn-backend", "fast"), "*backend 'fast' is not installed; installed: small; late: no*"),
        (("--attn-arch", "gfx942"), "*--attn-arch: needs a device of this machine (cpu), got 'gfx942'*"),
    ],
)
def test_what_is_not_there_is_an_error_of_collection(run, arguments, text, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run(*arguments, backends=[small()], broken=[plugins.Broken("late", "no")])
    assert result.ret == 2
    result.stdout.fnmatch_lines([text])


def test_a_backend_without_a_case_for_the_device_is_an_error(run):
    result = run(backends=[small(archs=frozenset({"gfx942"}))])
    assert result.ret == 2
    result.stdout.fnmatch_lines(["*backend 'small' has no case for *: its paths claim gfx942*"])


def test_a_path_whose_own_rules_decline_every_case_is_an_error(run):
    backend = small()
    backend.paths = (*backend.paths, Path("never", SMALL))
    wrong = Code("small.never", Stage.CAPABILITY, "is never right")
    backend.rules = (Rule(wrong, frozenset(Op), frozenset({"never"}), lambda query: (None, None)),)
    result = run(backends=[backend])
    assert result.ret == 2
    result.stdout.fnmatch_lines(["*small/never claims cpu, but has no case: small.never*"])


def test_an_unavailable_backend_is_an_error(run):
    backend = small()
    why = Reason(Code("small.lib", Stage.AVAILABILITY, "needs libsmall"), "small", got="none")
    backend.unavailable = lambda target: why
    result = run(backends=[backend])
    assert result.ret == 2
    result.stdout.fnmatch_lines(
        ["*'small' cannot be tested on cpu: small: needs libsmall, got none [[]small.lib]*"]
    )


def test_a_module_may_name_its_backends(run):
    text = LINE + 'attn_backends = ("small",)\n'
    backends = [small(), small("other", archs=frozenset({"gfx942"}))]
    quick = ("-k", "test_is_well_formed")
    assert run(*quick, backends=backends, text=text).parseoutcomes()["passed"] == 1
    named = run(*quick, "--attn-backend", "other", backends=backends, text=text)
    assert named.ret == 0
    assert named.parseoutcomes().keys() == {"skipped", "deselected"}


def test_what_a_backend_declines_and_its_tolerance_are_printed(run):
    class Loose(Path):
        tolerance = MappingProxyType({torch.float32: 0.25})

    backend = small()
    wrong = Code("small.long", Stage.CAPABILITY, "is right up to {limit} keys")
    test = lambda query: (64, query.batch.max_kv_len) if query.batch.max_kv_len > 64 else None  # noqa: E731
    backend.paths = (Loose("torch", SMALL),)
    backend.rules = (Rule(wrong, frozenset(Op), frozenset({"torch"}), test),)
    result = run("-k", "matches_the_oracle", backends=[backend])
    assert result.ret == 0
    result.stdout.fnmatch_lines(["small/torch * small.long * float32 0.25"])
    result.stdout.no_fnmatch_line("*-long*")


def test_every_kind_of_case_says_what_is_not_claimed(run):
    assert _CLAIMS.keys() == KINDS.keys()
    result = run("-rs", "-k", "append or invariant or batch", backends=[small()])
    result.stdout.fnmatch_lines_random(["*small claims no append*", "*small claims no batch invariance*"])
