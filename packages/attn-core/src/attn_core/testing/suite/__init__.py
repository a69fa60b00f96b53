"""``from attn_core.testing.suite import *`` in a test file runs the whole contract.

A second line, ``attn_backends = ("name",)``, keeps the file to those backends when others are installed
too. Options and the closing table: ``pytest -p attn_core.testing.plugin``.
"""

from ..select import pytest_generate_tests
from .contract import TestAppend, TestBackend, TestGraph, TestPlan, TestRun
from .fixtures import attn_facts, attn_one_thread

__all__ = [
    "TestAppend",
    "TestBackend",
    "TestGraph",
    "TestPlan",
    "TestRun",
    "attn_facts",
    "attn_one_thread",
    "pytest_generate_tests",
]
