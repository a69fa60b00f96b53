"""Routing thresholds: numbers in a backend package's TOML, each with where it comes from.

One ``[[row]]`` holds ``code`` (the rule's), ``arch``, ``limit`` (a number, or ``"never"``) and a
``[row.provenance]`` table. ``"never"`` is a measured verdict; a missing row means nobody measured.
An overlay written on the user's own machine replaces rows of the same (code, arch).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .errors import needs

PROVENANCE = ("kind", "source", "statistic", "grid", "versions")
KINDS = ("reported", "measured", "derived")
OVERLAY_VARIABLE = "ATTN_THRESHOLDS"


@dataclass(frozen=True, slots=True)
class Limit:
    """The rule applies up to and including ``value``."""

    value: float


@dataclass(frozen=True, slots=True)
class Never:
    """Measured: the rule applies nowhere."""


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """There is no row."""


Verdict = Limit | Never | Unmeasured


@dataclass(frozen=True, slots=True)
class Row:
    """One verdict and where it comes from."""

    code: str
    arch: str
    verdict: Limit | Never
    kind: Literal["reported", "measured", "derived"]
    provenance: tuple[tuple[str, str], ...]
    origin: str


class Thresholds:
    """Read-only table of rows by (code, arch)."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows: dict[tuple[str, str], Row] = {}
        for row in rows:
            key = (row.code, row.arch)
            if key in self._rows:
                raise ValueError(
                    needs(f"threshold {row.code} {row.arch}", "one row", "two", "core.threshold")
                )
            self._rows[key] = row

    @classmethod
    def load(cls, text: str, origin: str) -> Thresholds:
        """Parse TOML.

        Args:
            text: The file's content.
            origin: What to call it in messages and listings.

        Raises:
            ValueError: Not TOML, a row is incomplete, or two rows share (code, arch).
        """
        import tomllib

        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as err:
            raise ValueError(needs(origin, "valid TOML", err, "core.threshold")) from err
        rows = data.get("row", [])
        if not isinstance(rows, list):
            raise ValueError(needs(origin, "[[row]] tables", type(rows).__name__, "core.threshold"))
        return cls(_row(row, origin) for row in rows)

    def overlaid(self, other: Thresholds) -> Thresholds:
        """Return a table in which the other's rows replace this one's."""
        merged = {**self._rows, **other._rows}
        return Thresholds(merged.values())

    def get(self, code: str, arch: str) -> Verdict:
        """Return the verdict; ``Unmeasured()`` when there is no row."""
        row = self._rows.get((code, arch))
        return Unmeasured() if row is None else row.verdict

    def find(self, code: str, arch: str) -> Row | None:
        """Return the row itself, with where it comes from."""
        return self._rows.get((code, arch))

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())

    def __len__(self) -> int:
        return len(self._rows)


def overlay() -> Thresholds:
    """Return the rows of this machine: those ``attn tune`` wrote, under those of ``ATTN_THRESHOLDS``.

    Raises:
        ValueError: The file that ``ATTN_THRESHOLDS`` names cannot be read or is not valid. A threshold
            file the user asked for is never skipped in silence.
    """
    from . import tuned

    return tuned.load().rows.overlaid(stated())


def stated() -> Thresholds:
    """Load the file that ``ATTN_THRESHOLDS`` names; an empty table when the variable is unset.

    Raises:
        ValueError: The file cannot be read or is not valid.
    """
    name = os.environ.get(OVERLAY_VARIABLE)
    if not name:
        return Thresholds(())
    try:
        text = Path(name).read_text(encoding="utf-8")
    except OSError as err:
        raise ValueError(
            needs(OVERLAY_VARIABLE, "a readable file", f"{name}: {err.strerror}", "core.threshold")
        ) from err
    return Thresholds.load(text, name)


def _row(row: object, origin: str) -> Row:
    if not isinstance(row, Mapping):
        raise ValueError(needs(origin, "[[row]] tables", type(row).__name__, "core.threshold"))
    code, arch, limit = (row.get(name) for name in ("code", "arch", "limit"))
    where = f"{origin}: row {code} {arch}"
    if not isinstance(code, str) or not isinstance(arch, str):
        raise ValueError(needs(where, "code and arch as strings", (code, arch), "core.threshold"))
    provenance = row.get("provenance")
    provenance = provenance if isinstance(provenance, Mapping) else {}
    missing = [name for name in PROVENANCE if not provenance.get(name)]
    if missing:
        raise ValueError(
            needs(where, f"provenance {', '.join(PROVENANCE)}", f"no {missing[0]}", "core.threshold")
        )
    kind = provenance["kind"]
    if kind not in KINDS:
        raise ValueError(needs(f"{where}: kind", f"one of {KINDS}", repr(kind), "core.threshold"))
    facts = tuple((name, str(provenance[name])) for name in PROVENANCE[1:])
    return Row(code, arch, _verdict(limit, where), kind, facts, origin)


def _verdict(limit: object, where: str) -> Limit | Never:
    if limit == "never":
        return Never()
    if isinstance(limit, bool) or not isinstance(limit, int | float) or limit != limit:
        raise ValueError(needs(f"{where}: limit", 'a number or "never"', repr(limit), "core.threshold"))
    return Limit(limit)
