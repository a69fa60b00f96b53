"""The page's table of operators is the one in force."""

from pathlib import Path

import pytest

from attn_compile.__main__ import table

PAGE = Path(__file__).parents[3] / "docs" / "torch-compile.md"


@pytest.mark.skipif(not PAGE.exists(), reason="needs the documents beside the package")
def test_the_page_has_the_table_in_force():
    assert table() in PAGE.read_text(encoding="utf-8")
