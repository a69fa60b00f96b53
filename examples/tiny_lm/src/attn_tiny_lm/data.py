"""The corpus: the source text of the Python standard library that runs this code.

A document is one `*.py` file. A separator byte (0, which no source file contains) goes before each document,
so a model always sees where a file starts. Which files are held out depends on their names alone: the
same on every machine and for every Python version.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SEPARATOR = 0
HELD_OUT_PERCENT = 5
# Third-party code is not the standard library. `encodings` and `pydoc_data` are generated tables: they say
# little about how well a model knows Python and would flatter the held-out figure.
EXCLUDED = frozenset({"site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"})


@dataclass(frozen=True)
class Document:
    """One source file: its path below the corpus root, with forward slashes, and its bytes."""

    name: str
    text: bytes


@dataclass(frozen=True)
class Corpus:
    """The two halves of the split, each sorted by name, and a digest of all names and bytes."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    sha256: str


def stdlib_root() -> Path:
    """Folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def is_held_out(name: str) -> bool:
    """Whether the file called `name` (path below the root, forward slashes) is never trained on."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def _is_source_text(text: bytes) -> bool:
    """Whether a file is usable: not empty, no separator byte, UTF-8. The test suite has others."""
    if not text or SEPARATOR in text:
        return False
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def load_corpus(root: Path | None = None) -> Corpus:
    """Read every usable `*.py` file below `root` and split the files by name.

    Args:
        root: corpus folder; None takes the running interpreter's standard library.

    Raises:
        ValueError: a half of the split would be empty.
    """
    root = stdlib_root() if root is None else root
    halves: dict[bool, list[Document]] = {False: [], True: []}
    digest = hashlib.sha256()
    names = (path.relative_to(root) for path in root.rglob("*.py") if path.is_file())
    for name in sorted(path.as_posix() for path in names if EXCLUDED.isdisjoint(path.parts)):
        text = (root / name).read_bytes()
        if _is_source_text(text):
            halves[is_held_out(name)].append(Document(name, text))
            digest.update(f"{name}\0{len(text)}\0".encode() + text)
    if not halves[False] or not halves[True]:
        raise ValueError(f"root: needs Python files on both sides of the split, got {root} [tiny-lm.corpus]")
    return Corpus(tuple(halves[False]), tuple(halves[True]), digest.hexdigest())


def to_stream(documents: tuple[Document, ...]) -> Tensor:
    """All documents in one `[bytes]` uint8 tensor, a separator before each."""
    joined = b"".join(bytes([SEPARATOR]) + document.text for document in documents)
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8)


def to_tokens(text: bytes) -> list[int]:
    """Tokens of one document: the separator, then its bytes."""
    return [SEPARATOR, *text]
