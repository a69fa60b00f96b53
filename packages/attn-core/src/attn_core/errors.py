"""Exceptions, and the one way their text is put together."""

from __future__ import annotations

from collections.abc import Iterable

from .reasons import Reason


def needs(subject: str, wanted: object, got: object, code: str) -> str:
    """Return ``subject: needs X, got Y [code]``, the text of every refusal in the project."""
    return f"{subject}: needs {wanted}, got {got} [{code}]"


class Unsupported(RuntimeError):
    """Raised by a backend's ``plan`` when it finds, late, that it cannot serve a query.

    Under ``auto`` the next candidate is tried and the reason is kept; a backend named by the caller
    lets it through. Every other exception of a backend is a bug or a caller's mistake and propagates.
    """

    def __init__(self, reason: Reason) -> None:
        self.reason = reason
        super().__init__(str(reason))


class NoPlan(ValueError, RuntimeError):
    """A call that needs a plan came before one; either handler of upstream's and its AMD fork's works."""


class NoRoute(ValueError, NotImplementedError):
    """No candidate can serve the query; ``reasons`` holds every refusal, in the order met.

    It is a ValueError (the request does not fit what is installed) and a NotImplementedError (what
    upstream raises for the same situation), so either handler works.
    """

    def __init__(self, what: str, reasons: Iterable[Reason]) -> None:
        self.reasons = tuple(reasons)
        lines = [what, *(f"  {reason}" for reason in self.reasons)]
        super().__init__("\n".join(lines))
