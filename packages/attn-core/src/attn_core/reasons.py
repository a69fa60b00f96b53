"""Why a candidate was not chosen, as values rather than text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum


class Stage(IntEnum):
    """When a reason is decided. A later stage never runs for a candidate an earlier one refused."""

    AVAILABILITY = 0
    """The package, its kernels or the device are not there."""
    CAPABILITY = 1
    """The candidate cannot compute this, or would compute it wrongly."""
    PREFERENCE = 2
    """The candidate is right but slower here; skipped when the caller names a backend."""
    PREPARE = 3
    """Loading or building what the candidate needs failed."""


@dataclass(frozen=True, slots=True)
class Code:
    """Identity of one cause. Equality, warn-once keys and tests use this, never the message.

    Attributes:
        slug: Stable name, ``owner.cause``.
        stage: When it is decided.
        template: What the candidate needs, with ``{limit}``; completed by ``, got {got}``.
        quiet: True for causes nobody can act on (a backend for another device): they are listed in
            the decision but are neither logged nor reported as a fallback.
        meaning: One sentence for the reference page.
    """

    slug: str
    stage: Stage
    template: str
    quiet: bool = False
    meaning: str = ""


def _key(limit: object) -> object:
    return tuple(limit) if isinstance(limit, list) else limit


@dataclass(frozen=True, slots=True)
class Reason:
    """One cause applied to one candidate.

    ``got`` is for the reader. It is not part of ``key``, so that a value that changes every step
    (a draft length, a sequence length) does not make a new cause of an old one.
    """

    code: Code
    candidate: str
    limit: object = None
    got: object = None

    @property
    def key(self) -> tuple[str, str, object]:
        """What warn-once compares: candidate, code and limit."""
        return (self.candidate, self.code.slug, _key(self.limit))

    @property
    def text(self) -> str:
        """The cause on one line, without candidate and code."""
        need = " ".join(self.code.template.format(limit=self.limit).split())
        return need if self.got is None else f"{need}, got {' '.join(str(self.got).split())}"

    def __str__(self) -> str:
        return f"{self.candidate}: {self.text} [{self.code.slug}]"


def worth_telling(refused: Iterable[Reason], chosen: str) -> list[Reason]:
    """Return the refusals that explain a fallback, each cause once.

    Left out are quiet causes; what one path of the chosen backend says next to another, which is no
    fallback, unless its kernel could not be prepared; and what is said of a whole backend path by path.
    """
    owner = chosen.partition("/")[0]
    told: dict[object, Reason] = {}
    for reason in refused:
        if reason.code.quiet:
            continue
        of = reason.candidate.partition("/")[0]
        if of == owner and reason.code.stage is not Stage.PREPARE:
            continue
        whole = reason.code.stage is Stage.AVAILABILITY
        told.setdefault((of, *reason.key[1:]) if whole else reason.key, reason)
    return list(told.values())
