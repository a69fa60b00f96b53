"""How a check fails."""

from __future__ import annotations


class Violation(AssertionError):
    """A path does not do what the contract or its own capability row says."""


def expect(holds: bool, otherwise: str) -> None:
    """Raise Violation with ``otherwise`` unless ``holds``."""
    if not holds:
        raise Violation(otherwise)
