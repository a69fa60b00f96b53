"""Conformance kit for attention backends: what a backend's capability rows claim is what gets tested.

The whole test file of a backend package is one line (``from attn_core.testing.suite import *``). Options
and the closing table come with ``pytest -p attn_core.testing.plugin``. Without pytest, :func:`failures`
does the same. See ``docs/write-a-backend.md``.
"""

from .cases import Case, Cases, cases_of
from .kit import Failure, failures
from .oracle import Request, Scales, attention

__all__ = ["Case", "Cases", "Failure", "Request", "Scales", "attention", "cases_of", "failures"]
