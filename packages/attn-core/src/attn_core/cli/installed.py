"""The registry as the commands see it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

from .. import capability, notices, plugins, route, sampling_route
from ..backend import Backend
from ..errors import needs
from ..plugins import Registry
from ..reasons import Code
from .output import told

ASSUME_KEY = "assume_version"
"""Option by which a backend is told to answer as if that version of its library were installed.

The value is a version, or ``none`` for a machine without the library.
"""


def installed() -> Registry:
    """Return the process's backends without logging the broken ones: every command shows those itself.

    Raises:
        ValueError: The ``ATTN_CONFIG`` file cannot be used.
    """

    def drop(record: logging.LogRecord) -> bool:
        return False

    notices.LOGGER.addFilter(drop)
    try:
        return plugins.registry()
    finally:
        notices.LOGGER.removeFilter(drop)


class Noted(Mapping[str, object]):
    """Options of one backend that remember whether the assumed version was asked for."""

    def __init__(self, options: Mapping[str, object]) -> None:
        self._options = dict(options)
        self.asked = False

    def __getitem__(self, key: str) -> object:
        self.asked = self.asked or key == ASSUME_KEY
        return self._options[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)


class Assumed:
    """Backends created anew under assumed versions; the process's own are left alone.

    Args:
        versions: Version, or ``none``, by backend name.

    Raises:
        ValueError: A name is no backend's, or its backend does not load under that version.
    """

    def __init__(self, versions: Mapping[str, str]) -> None:
        config = dict(plugins.load_config())
        self._noted = {
            name: Noted({**config.get(name, {}), ASSUME_KEY: version}) for name, version in versions.items()
        }
        self.registry = plugins.discover(config={**config, **self._noted})
        for name in versions:
            self._require(name)

    def _require(self, name: str) -> None:
        names = [backend.name for backend in self.registry.backends]
        if name in names:
            return
        broken = self.registry.broken
        # A plugin need not be called as its backend is; one that is gets the blame first.
        for fault in [b for b in broken if b.name == name] or broken:
            want = f"a backend {name!r} that loads (plugin {fault.name})"
            raise ValueError(needs("--assume", want, fault.error, "cli.assume"))
        raise ValueError(needs("--assume", f"one of {', '.join(names)}", repr(name), "cli.assume"))

    def require_asked(self) -> None:
        """Refuse an assumption that its backend never looked at: the answer would not be about it.

        Raises:
            ValueError: Names the backend.
        """
        for name, noted in self._noted.items():
            if not noted.asked:
                got = f"{name}, which takes no assumed version"
                raise ValueError(needs("--assume", f"a backend that reads {ASSUME_KEY}", got, "cli.assume"))


def core_codes() -> tuple[Code, ...]:
    """Return the codes that attn-core itself gives."""
    return (*capability.CODES, *route.CODES, *sampling_route.CODES)


def backend_codes(backend: Backend) -> tuple[Code, ...]:
    """Return a backend's codes: its optional ``codes`` and those of its rules, each once.

    Raises:
        TypeError: ``codes`` holds something else.
    """
    stated: Iterable[object] = getattr(backend, "codes", ())
    found: dict[Code, None] = {}
    for code in (*stated, *(rule.code for rule in backend.rules)):
        if not isinstance(code, Code):
            raise TypeError(
                needs(f"{backend.name}: codes", "Code values", type(code).__name__, "core.plugin")
            )
        found[code] = None
    return tuple(found)


def all_codes(registry: Registry) -> tuple[list[tuple[str, Code]], list[str]]:
    """Return ``(owner, code)`` of everything installed, and what could not be listed.

    A code that several owners give is listed with the first: core, then the backends by name.
    """
    rows: list[tuple[str, Code]] = [("core", code) for code in core_codes()]
    faults: list[str] = []
    for backend in sorted(registry.backends, key=lambda b: b.name):
        try:
            rows += [(backend.name, code) for code in backend_codes(backend)]
        except Exception as err:
            faults.append(f"{backend.name}: {told(err)}")
    seen: dict[Code, str] = {}
    for owner, code in rows:
        seen.setdefault(code, owner)
    order = sorted(seen.items(), key=lambda row: (row[1] != "core", row[1], row[0].stage, row[0].slug))
    return [(owner, code) for code, owner in order], faults


def assumptions(stated: Sequence[str] | None, aiter_version: str | None) -> dict[str, str]:
    """Return library versions to assume, by backend.

    Args:
        stated: ``NAME=VERSION`` texts.
        aiter_version: What the shorthand ``--aiter`` was given.

    Raises:
        ValueError: Not of that form, or a name comes twice.
    """
    found: dict[str, str] = {}
    for text in [*(stated or ()), *([] if aiter_version is None else [f"aiter={aiter_version}"])]:
        name, _, value = text.partition("=")
        if not name or not value:
            raise ValueError(needs("--assume", "NAME=VERSION or NAME=none", repr(text), "cli.assume"))
        if name in found:
            raise ValueError(needs("--assume", f"one version of {name}", "two", "cli.assume"))
        found[name] = value
    return found
