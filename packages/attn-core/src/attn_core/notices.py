"""Say each cause once per process, on the ``attn_core`` logger."""

from __future__ import annotations

import logging
import threading

from .reasons import Reason, worth_telling
from .target import DeviceTarget

LOGGER = logging.getLogger("attn_core")
_seen: set[object] = set()
_lock = threading.Lock()


def first_time(key: object) -> bool:
    """Return True the first time a key is seen in this process."""
    if key in _seen:
        return False
    with _lock:
        if key in _seen:
            return False
        _seen.add(key)
    return True


def warn_once(key: object, message: str) -> None:
    """Log a warning the first time ``key`` is seen."""
    if first_time(key):
        LOGGER.warning("%s", message)


def announce(target: DeviceTarget, refused: tuple[Reason, ...], chosen: str) -> None:
    """Log the refusals behind a fallback, once per (device, cause), whatever the batch looked like."""
    for reason in worth_telling(refused, chosen):
        if first_time((target, *reason.key)):
            # The limit is part of the key and of the text; what was asked for changes every step.
            text = " ".join(reason.code.template.format(limit=reason.limit).split())
            LOGGER.warning("%s: %s [%s]; using %s", reason.candidate, text, reason.code.slug, chosen)


def forget() -> None:
    """Forget everything said so far (for tests)."""
    with _lock:
        _seen.clear()
