"""Known defects of torch, as data: which versions, which cells of the matrix, where it is reported."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

import torch

Version = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Defect:
    """One defect.

    Attributes:
        name: Short name.
        since: First version known to have it.
        until: First version known not to have it; None while there is none.
        effect: What happens, in one sentence.
        here: What this package does about it.
        reference: Where it is reported, or where it was measured.
        made: How the layouts are made that it hits.
        programs: Programs it hits; empty for all that write.
        modes: Modes it hits; empty for all.
    """

    name: str
    since: Version
    until: Version | None
    effect: str
    here: str
    reference: str
    made: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()

    def applies(self, version: Version) -> bool:
        """Whether a torch version has it."""
        return self.since <= version and (self.until is None or version < self.until)


@lru_cache(maxsize=1)
def known() -> tuple[Defect, ...]:
    """Return all rows of ``defects.toml``."""
    rows = tomllib.loads((files(__package__) / "defects.toml").read_text(encoding="utf-8"))["defect"]
    return tuple(_defect(row) for row in rows)


def _defect(row: Mapping[str, object]) -> Defect:
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    for bound in ("since", "until"):
        value = given.get(bound)
        given[bound] = None if value is None else parse(str(value))
    return Defect(**given)  # type: ignore[arg-type]


def parse(version: str) -> Version:
    """Return major and minor of a version text."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def present() -> tuple[Defect, ...]:
    """Return the defects of the torch that is running."""
    version = parse(torch.__version__)
    return tuple(defect for defect in known() if defect.applies(version))


def explains(made: str, program: str, mode: str) -> str | None:
    """Name the defect of this torch that explains a refused cell, or None."""
    for defect in present():
        hit = made in defect.made and (not defect.modes or mode in defect.modes)
        if hit and (not defect.programs or program in defect.programs):
            return defect.name
    return None
