"""pytest plugin of the conformance kit: ``pytest -p attn_core.testing.plugin``.

Adds the options ``--attn-backend``, ``--attn-arch`` and ``--attn-report``, and closes the session with a
table. Not an entry point: whoever merely has attn-core installed does not get it.
"""

from __future__ import annotations

from pathlib import Path as FilePath

import pytest

from .report import Tally
from .select import FACTS, PROPERTY

TALLY = pytest.StashKey[Tally]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("attn", "attention backend conformance")
    group.addoption(
        "--attn-backend",
        action="append",
        default=[],
        metavar="NAME",
        help="test this backend (repeatable); default: all that are installed except 'reference'",
    )
    group.addoption(
        "--attn-arch",
        default=None,
        metavar="ARCH",
        help="device of this machine to test on; default: its GPU where the backend claims it, else cpu",
    )
    group.addoption("--attn-report", default=None, metavar="FILE.json", help="also write the table there")


def pytest_configure(config: pytest.Config) -> None:
    """Start counting."""
    config.stash[TALLY] = Tally()
    config.pluginmanager.register(_Counter(config.stash[TALLY]), "attn-counter")


class _Counter:
    """Counts finished checks. Facts travel with the report, so it works under pytest-xdist too."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        about = dict(report.user_properties)
        if PROPERTY in about and (report.when == "call" or report.failed) and not report.skipped:
            self._tally.add(report.nodeid, report.passed, about[PROPERTY], about[FACTS])  # type: ignore[arg-type]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the table, if any test of the kit ran."""
    tally = config.stash[TALLY]
    if tally.tested():
        terminalreporter.section("attn conformance")
        for line in tally.lines():
            terminalreporter.line(line)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the JSON report where one was asked for."""
    name = session.config.getoption("--attn-report")
    if name and not hasattr(session.config, "workerinput"):
        FilePath(str(name)).write_text(session.config.stash[TALLY].json(), encoding="utf-8")
