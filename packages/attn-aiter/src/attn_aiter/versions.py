"""Order of version numbers, as far as amd-aiter's releases, pre-releases and source builds need it."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PATTERN = re.compile(
    r"""v?(?P<release>\d+(?:\.\d+)*)
    (?:[._-]?(?P<kind>a|b|rc)[._-]?(?P<pre>\d*))?
    (?:[._-]?post[._-]?(?P<post>\d*))?
    (?:[._-]?dev[._-]?(?P<dev>\d*))?
    (?:\+[a-z0-9._-]+)?""",
    re.VERBOSE | re.IGNORECASE,
)
_PARTS = 5
_LAST = 1 << 62
_KINDS = {"a": 0, "b": 1, "rc": 2}


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """A version by its place in the order of PEP 440; a local label (``+rocm10``) does not count.

    Attributes:
        release: The numbers, padded with zeros.
        pre: Place of an alpha, beta or candidate; a plain ``dev`` comes before all, a release after.
        post: Number of the post-release, -1 for none.
        dev: Number of the development build; a finished one comes after all.
    """

    release: tuple[int, ...]
    pre: tuple[int, int]
    post: int
    dev: int


def parse_version(text: str) -> Version | None:
    """Return the version a string names, or None when it names none."""
    found = _PATTERN.fullmatch(text.strip())
    if found is None:
        return None
    release = tuple(int(part) for part in found["release"].split("."))
    dev, post = found["dev"], found["post"]
    if found["kind"] is not None:
        pre = (_KINDS[found["kind"].lower()], int(found["pre"] or 0))
    elif dev is not None and post is None:
        pre = (-1, 0)
    else:
        pre = (len(_KINDS), 0)
    padded = release + (0,) * (_PARTS - len(release))
    return Version(
        padded, pre, -1 if post is None else int(post or 0), _LAST if dev is None else int(dev or 0)
    )


def version(text: str) -> Version:
    """Return the version a string of this package's own data names.

    Raises:
        ValueError: It names none.
    """
    found = parse_version(text)
    if found is None:
        raise ValueError(f"version: needs digits and dots, got {text!r} [aiter.version]")
    return found
