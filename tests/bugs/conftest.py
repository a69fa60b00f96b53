"""Replays of reports by people who integrate paged attention: one test per case of the public bug log."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from attn_core import notices, plugins
from attn_core.backend import Backend
from attn_core.reference import ReferenceBackend

from .support import BACKENDS

_kept: list[plugins.Registry] = []


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """``auto``, and every backend of this machine by name."""
    return request.param


@pytest.fixture
def install() -> Iterator[Callable[..., plugins.Registry]]:
    """Put fake backends in front of the reference for one test."""
    old: list[plugins.Registry | None] = []

    def use(*fakes: Backend) -> plugins.Registry:
        backends = sorted((*fakes, ReferenceBackend()), key=lambda b: (b.rank, b.name))
        registry = plugins.Registry(tuple(backends), (), (), {b.name: "test" for b in backends})
        _kept.append(registry)  # wrappers recognise a registry by its id
        old.append(plugins.use(registry))
        notices.forget()
        return registry

    yield use
    if old:
        plugins.use(old[0])
    notices.forget()
