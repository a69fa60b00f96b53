"""Which backends a test module is about, on which device, and the parameters of its tests."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from .. import plugins
from ..attempts import unavailable
from ..backend import Backend
from ..target import DeviceTarget, target_of
from .cases import KINDS, Case, Cases, cases_of
from .report import about_backend, about_case, facts_of

PROPERTY, FACTS = "attn", "attn-facts"
SELECTION = "attn_backends"
"""Optional variable of a test module: a name or names; the module is then about those alone."""
Subject = tuple[Backend, DeviceTarget]
_CLAIMS = {
    "case": "attention",
    "device_pages_case": "paged path that leaves page ids on the device",
    "plain_logits_case": "run without soft cap and position encoding",
    "invariant_case": "batch invariance",
    "graph_case": "graph capture",
    "append_case": "append",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise the suite's fixtures; reaches a test module with its star import.

    A backend that is not installed, cannot work here or has no case for the device is an error of
    collection: a green run must not mean that nothing was tested.
    """
    kinds = [name for name in (*KINDS, "subject") if name in metafunc.fixturenames]
    if not kinds:
        return
    kind = kinds[0]
    module = metafunc.module.__name__
    try:
        subjects = select(metafunc.config, getattr(metafunc.module, SELECTION, None))
    except LookupError as err:
        raise pytest.Collector.CollectError(f"{module}: {err.args[0]}") from None
    if not subjects:
        metafunc.parametrize(kind, [_skipped("--attn-backend names others")])
        return
    if kind == "subject":
        metafunc.parametrize(kind, [pytest.param(s, id=s[0].name) for s in subjects])
        return
    found = [case for subject in subjects for case in cases_of(*subject).of(kind)]
    names = ", ".join(backend.name for backend, _ in subjects)
    nothing = [_skipped(f"{names} claims no {_CLAIMS[kind]}")]
    metafunc.parametrize(kind, [pytest.param(case, id=str(case)) for case in found] or nothing)


def _skipped(reason: str) -> object:
    return pytest.param(None, marks=pytest.mark.skip(reason=reason), id="none")


def select(config: pytest.Config, of_module: str | Iterable[str] | None) -> list[Subject]:
    """Return the backends to test, each with its device.

    Args:
        config: Of the session.
        of_module: Names the test module sets, or None.

    Raises:
        LookupError: A backend is not usable, or has no case for the device.
    """
    registry = plugins.registry()
    known = {backend.name: backend for backend in registry.backends}
    asked = list(config.getoption("--attn-backend", default=None) or [])
    mine = [of_module] if isinstance(of_module, str) else None if of_module is None else list(of_module)
    if mine is not None:
        names = [name for name in mine if not asked or name in asked]
    else:
        names = asked or [name for name in known if name != "reference"]
    broken = "".join(f"; {b.name}: {b.error}" for b in registry.broken)
    if mine is None and not names:
        raise LookupError(f"no backend other than 'reference' is installed{broken}")
    missing = [name for name in names if name not in known]
    if missing:
        raise LookupError(f"backend {missing[0]!r} is not installed; installed: {', '.join(known)}{broken}")
    arch = config.getoption("--attn-arch", default=None)
    return [_subject(known[name], None if arch is None else str(arch)) for name in names]


def _subject(backend: Backend, arch: str | None) -> Subject:
    here = _devices()
    claims = [t for t in here if any(_claimed(cases_of(backend, t)))]
    if arch is None:
        target = claims[0] if claims else here[0]
    else:
        named = [t for t in here if t.arch == arch]
        if not named:
            names = ", ".join(t.arch for t in here)
            raise LookupError(f"--attn-arch: needs a device of this machine ({names}), got {arch!r}")
        target = named[0]
    if target not in claims:
        archs = {a for path in backend.paths for a in path.capability.archs or ()}
        raise LookupError(
            f"backend {backend.name!r} has no case for {target.arch}: its paths claim "
            f"{', '.join(sorted(archs)) or 'nothing'}; choose with --attn-arch"
        )
    for path in backend.paths:
        claims_it = path.capability.archs is None or target.arch in path.capability.archs
        if claims_it and not any(case.path is path for case in cases_of(backend, target)):
            refused = ", ".join(cases_of(backend, target).declined) or "its row contradicts itself"
            raise LookupError(f"{backend.name}/{path.name} claims {target.arch}, but has no case: {refused}")
    missing = unavailable(backend, target)
    if missing is not None:
        raise LookupError(f"backend {backend.name!r} cannot be tested on {target.arch}: {missing}")
    return backend, target


def _claimed(found: Cases) -> Iterable[Case]:
    return found


def _devices() -> list[DeviceTarget]:
    gpu = [target_of(torch.device("cuda", torch.cuda.current_device()))] if torch.cuda.is_available() else []
    return [*gpu, target_of(torch.device("cpu"))]


def record(request: pytest.FixtureRequest, about: Case | Subject) -> None:
    """Attach what a test is about to its report."""
    said: tuple[object, object]
    said = (about_case(about), facts_of(about)) if isinstance(about, Case) else (about_backend(*about), {})
    request.node.user_properties += zip((PROPERTY, FACTS), said, strict=True)
