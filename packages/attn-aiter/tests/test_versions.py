"""Order and parsing of release numbers."""

from __future__ import annotations

import pytest

from attn_aiter.versions import parse_version, version

ORDER = [
    "0.1.7.dev1",
    "0.1.7rc1",
    "0.1.7",
    "0.1.7.post2.dev18",
    "0.1.7.post2",
    "0.1.7.post3",
    "0.1.10",
    "0.1.20.dev12",
    "0.1.20",
    "0.1.20.post1",
    "0.1.21",
    "0.2",
]


def test_order_is_that_of_pep_440() -> None:
    found = [version(text) for text in ORDER]
    assert found == sorted(found)
    assert len(set(found)) == len(ORDER)


def test_a_local_label_does_not_count() -> None:
    assert version("0.1.20+rocm10.1.0a20260819.3135022") == version("0.1.20")


def test_trailing_zeros_do_not_count() -> None:
    assert version("0.1.20.0") == version("v0.1.20")


@pytest.mark.parametrize("text", ["", "unknown", "0.1.x", "main", "0.1.20 beta", "1..2"])
def test_what_names_no_version(text: str) -> None:
    assert parse_version(text) is None
    with pytest.raises(ValueError, match=r"\[aiter.version\]"):
        version(text)
