"""The versioned data files as values: page sizes, known defects, thresholds."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import torch

from attn_core.problem import AttentionProblem
from attn_core.thresholds import Thresholds, overlay

from .versions import Version, version


def _read(*parts: str) -> str:
    place = files(__package__)
    for part in parts:
        place = place / part
    return place.read_text(encoding="utf-8")


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class PageSizes:
    """Page sizes from one release on.

    Attributes:
        since: First release the row holds for.
        dtypes: Query types it is about; empty for all.
        pages: The sizes.
        source: Where the row comes from.
    """

    since: Version
    dtypes: frozenset[str]
    pages: frozenset[int]
    source: str


@cache
def _page_rows(kind: str) -> tuple[PageSizes, ...]:
    rows = tomllib.loads(_read("data", "page_sizes.toml"))[kind]
    found = [
        PageSizes(
            version(row["since"]), frozenset(row.get("dtypes", ())), frozenset(row["pages"]), row["source"]
        )
        for row in rows
    ]
    return tuple(sorted(found, key=lambda row: row.since))


def native_pages(release: Version) -> frozenset[int]:
    """Page sizes that have a native paged-prefill kernel: what can be computed."""
    rows = [row for row in _page_rows("native") if row.since <= release]
    return rows[-1].pages if rows else frozenset()


def routed_pages(release: Version, dtype: torch.dtype) -> frozenset[int] | None:
    """Page sizes to serve natively under ``auto``: what was found faster. None where nobody measured."""
    name = dtype_name(dtype)
    rows = [row for row in _page_rows("route") if row.since <= release and name in row.dtypes]
    return rows[-1].pages if rows else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """A known wrong answer. Conditions that are empty or None hold always.

    Attributes:
        code: Slug of the cause it is reported under.
        limit: What is computed wrongly, for the reader.
        paths: Paths of this backend.
        source: Where it is reported.
        archs: Devices.
        dtypes: Query types, by name.
        head_dims: Values of ``head_dim_qk``.
        masks: Mask modes.
        soft_cap: Needs a soft cap.
        one_row: Needs a request of one query row.
        window_left: Needs this window.
        min_kv_len: Needs a request of at least this many keys.
        since: First release, inclusive.
        before: First release without it.
    """

    code: str
    limit: str
    paths: frozenset[str]
    source: str
    archs: frozenset[str] = frozenset()
    dtypes: frozenset[str] = frozenset()
    head_dims: frozenset[int] = frozenset()
    masks: frozenset[str] = frozenset()
    soft_cap: bool = False
    one_row: bool = False
    window_left: int | None = None
    min_kv_len: int = 0
    since: Version | None = None
    before: Version | None = None

    def in_release(self, release: Version) -> bool:
        """Whether a release has it."""
        return (self.since is None or self.since <= release) and (
            self.before is None or release < self.before
        )

    def concerns(self, arch: str, problem: AttentionProblem, kv_len: int) -> bool:
        """Whether a question can meet it, apart from the number of query rows."""
        return (
            (not self.archs or arch in self.archs)
            and (not self.dtypes or dtype_name(problem.q_dtype) in self.dtypes)
            and (not self.head_dims or problem.head_dim_qk in self.head_dims)
            and (not self.masks or problem.mask.value in self.masks)
            and (not self.soft_cap or problem.logits_soft_cap > 0)
            and (self.window_left is None or problem.window_left == self.window_left)
            and kv_len >= self.min_kv_len
        )


_SETS = ("paths", "archs", "dtypes", "head_dims", "masks")


@cache
def _defects() -> tuple[Defect, ...]:
    return tuple(_defect(row) for row in tomllib.loads(_read("data", "defects.toml"))["row"])


def _defect(row: dict[str, Any]) -> Defect:
    values = dict(row)
    values.update({name: frozenset(row[name]) for name in _SETS if name in row})
    values.update({name: version(row[name]) for name in ("since", "before") if name in row})
    return Defect(**values)


def defects(release: Version) -> tuple[Defect, ...]:
    """Known wrong answers of a release."""
    return tuple(defect for defect in _defects() if defect.in_release(release))


def thresholds() -> Thresholds:
    """Return this package's rows with those of the user's own overlay file on top.

    Raises:
        ValueError: The overlay cannot be read.
    """
    own = Thresholds.load(_read("thresholds.toml"), "attn_aiter/thresholds.toml")
    return own.overlaid(overlay())
