"""What the tests of the command line share."""

import json

from typer.testing import CliRunner

from attn_core.capability import Capability
from attn_core.cli.app import app
from attn_core.problem import Op
from attn_core.reasons import Code, Stage
from attn_core.rules import Rule

from .fakes import EVERYTHING, FakeBackend

SHORT = Code("quick.short", Stage.PREFERENCE, "is slower up to {limit} rows", meaning="Measured | once.")
NARROW = Capability(
    archs=frozenset({"gfx942"}),
    ops=frozenset({Op.PREFILL_PAGED, Op.VERIFY}),
    page_sizes=frozenset({1, 1024}),
    same_dtype=True,
)


def attn(*args, columns=80):
    """Run the command in this process."""
    return CliRunner().invoke(app, list(args), prog_name="attn", env={"COLUMNS": str(columns)})


def explain(*args, columns=80):
    return attn("explain", *args, columns=columns)


def answer(*args):
    """The JSON of a question that has a route."""
    result = explain(*args, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def refused(*args):
    """The one line of a question that does not fit."""
    result = explain(*args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("attn explain: ")
    return result.stderr.removeprefix("attn explain: ").rstrip("\n")


def quick_backend():
    """Three paths: one too narrow, one slow for short queries, one for anything."""
    slow = Rule(
        SHORT, frozenset({Op.PREFILL_PAGED}), frozenset({"gather"}),
        lambda q: (128, f"q_len {q.batch.max_q_len}") if q.batch.max_q_len <= 128 else None,
    )  # fmt: skip
    paths = [("native", NARROW), ("gather", EVERYTHING), ("tile", EVERYTHING)]
    return FakeBackend("quick", paths=paths, rules=[slow])
