"""The kit without pytest: every check on every case of a backend, as a plain call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from ..backend import Backend
from ..errors import needs
from ..target import DeviceTarget, target_of
from . import checks
from .blame import blame
from .cases import Cases, cases_of

CPU = target_of(torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class Failure:
    """One broken promise.

    Attributes:
        check: Name of the check.
        case: Id of the case, or the backend's name.
        error: What it raised.
    """

    check: str
    case: str
    error: BaseException

    def __str__(self) -> str:
        notes = "".join(f" ({note})" for note in getattr(self.error, "__notes__", ()))
        return f"{self.check}[{self.case}]: {type(self.error).__name__}: {self.error}{notes}"


def failures(
    backend: Backend, target: DeviceTarget = CPU, *, check: str | None = None, every: int = 1
) -> Iterator[Failure]:
    """Yield what a backend breaks of the contract, as it is found.

    Args:
        backend: An object that satisfies :class:`attn_core.backend.Backend`; it need not be installed.
        target: A device of this machine.
        check: Name of the one check to make; all by default.
        every: Look at one case in so many, for a quick answer.

    Raises:
        LookupError: No check has that name.
    """
    declared = [d for d in checks.BACKEND if check in (None, d.__name__)]
    promises = [(k, p) for k, group in checks.CASE.items() for p in group if check in (None, p.__name__)]
    if not declared and not promises:
        raise LookupError(needs("check", "the name of a check", repr(check), "core.check-name"))
    for about in declared:
        yield from _made(backend, about.__name__, backend.name, partial(about, backend, target))
    found = cases_of(backend, target) if promises else Cases()
    for kind, promise in promises:
        for case in found.of(kind)[::every]:
            yield from _made(backend, promise.__name__, str(case), partial(promise, case))


def _made(backend: Backend, check: str, case: str, call: Callable[[], object]) -> Iterator[Failure]:
    try:
        call()
    except Exception as err:
        blame(err, backend)
        yield Failure(check, case, err)
