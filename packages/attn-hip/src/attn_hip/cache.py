"""Where built kernels are kept. An entry is published at once, checked when read, and never half there.

``<root>/attn-hip/<key>/`` holds ``manifest.json`` and the built file it names by size and SHA-256. The
root is ``ATTN_CACHE_DIR``, else ``attn`` in the user's cache directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

VARIABLE = "ATTN_CACHE_DIR"
_MANIFEST = "manifest.json"
_WORK = "work-"
_STALE_S = 86400.0
"""Age in seconds at which the leftovers of a killed build are removed."""


class CacheError(Exception):
    """The cache directory cannot be used.

    Attributes:
        wanted: What is needed, naming the variable to set.
        got: What there is.
    """

    def __init__(self, wanted: str, got: str) -> None:
        self.wanted, self.got = wanted, got
        super().__init__(f"needs {wanted}, got {got}")


def root() -> Path:
    """Return the directory of all entries, which need not exist.

    Raises:
        CacheError: No variable names one and the user has no home.
    """
    stated = os.environ.get(VARIABLE)
    if stated:
        return Path(stated).expanduser() / "attn-hip"
    shared = os.environ.get("XDG_CACHE_HOME")
    if shared:
        return Path(shared) / "attn" / "attn-hip"
    try:
        return Path.home() / ".cache" / "attn" / "attn-hip"
    except RuntimeError:
        raise CacheError(f"{VARIABLE} or HOME", "neither set and no home directory of the user") from None


def find(key: str) -> Path | None:
    """Return the shared object of an intact entry, else None.

    Args:
        key: Name of the entry, or a pattern that matches it.

    Raises:
        CacheError: The directory belongs to somebody else: what it holds must not be loaded.
    """
    try:
        top = root()
        entries = sorted(top.glob(key))
    except OSError:
        return None
    if entries:
        _require_own(top)
    return next((found for entry in entries if (found := _intact(entry)) is not None), None)


def manifest(entry: Path) -> Mapping[str, object]:
    """Return what was written with an entry; empty when it cannot be read."""
    try:
        read = json.loads((entry / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def _intact(entry: Path) -> Path | None:
    said = manifest(entry)
    name = said.get("file")
    if not isinstance(name, str) or Path(name).name != name:
        return None
    built = entry / name
    try:
        data = built.read_bytes()
    except OSError:
        return None
    same = len(data) == said.get("size") and hashlib.sha256(data).hexdigest() == said.get("sha256")
    return built if same else None


def _require_own(top: Path) -> None:
    """Raise unless only this user, or root, can have written there."""
    facts = top.stat()
    if facts.st_uid not in (0, os.geteuid()):
        raise CacheError(f"{VARIABLE}: a directory of this user", f"{top} of user id {facts.st_uid}")
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise CacheError(
            f"{VARIABLE}: a directory that others cannot write to", f"{top} of mode {facts.st_mode & 0o777:o}"
        )


@contextmanager
def workspace() -> Iterator[Path]:
    """Give a new directory beside the entries for the length of a build.

    Raises:
        CacheError: It cannot be made.
    """
    top = root()
    try:
        _make(top)
        _require_own(top)
        work = Path(tempfile.mkdtemp(prefix=_WORK, dir=top))
    except OSError as err:
        raise CacheError(f"{VARIABLE}: a writable directory", f"{top}: {err.strerror or err}") from err
    _reap(top)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _make(top: Path) -> None:
    missing = [place for place in (top, *top.parents) if not place.exists()]
    for place in reversed(missing):
        with suppress(FileExistsError):  # another process was faster
            place.mkdir(mode=0o700)


def _reap(top: Path) -> None:
    oldest = time.time() - _STALE_S
    for left in top.glob(f"{_WORK}*"):
        with suppress(OSError):
            if left.stat().st_mtime < oldest:
                shutil.rmtree(left, ignore_errors=True)


def publish(key: str, built: Path, facts: Mapping[str, object]) -> Path:
    """Move a shared object from a workspace into the cache; returns its place.

    The object's name holds its hash and the manifest comes last, so that of two processes that publish
    one key at once either wins whole. What an earlier manifest named is left for those who load it.

    Raises:
        CacheError: The entry cannot be written.
    """
    data = built.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    entry = root() / key
    place = entry / f"{built.stem}-{digest[:16]}{built.suffix}"
    said = {"file": place.name, "size": len(data), "sha256": digest, **facts}
    listed = built.with_name(_MANIFEST)
    try:
        entry.mkdir(mode=0o755, exist_ok=True)
        listed.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
        for source, target in ((built, place), (listed, entry / _MANIFEST)):
            source.chmod(0o644)
            os.replace(source, target)
    except OSError as err:
        raise CacheError(f"{VARIABLE}: a writable directory", f"{entry}: {err.strerror or err}") from err
    return place


def keep_log(key: str, log: Path) -> Path:
    """Keep the log of a failed build beside the entries; the next failure of the key replaces it."""
    kept = root() / f"failed-{key}.log"
    os.replace(log, kept)
    return kept
