"""Every test starts with the reference backend alone, and with nothing said yet."""

import os

import pytest
import torch

from attn_core import notices, plugins

from .fakes import registry

os.environ["ATTN_TUNED"] = ""  # what the developer measured on this machine is no concern of the tests


@pytest.fixture(autouse=True)
def _reference_only():
    notices.forget()
    before = plugins.use(registry())
    yield
    plugins.use(before)
    notices.forget()


@pytest.fixture
def use():
    """Install backends ahead of the reference: ``use(FakeBackend(...), reference=False)``."""

    def install(*backends, reference=True):
        plugins.use(registry(*backends, reference=reference))
        return backends[0] if len(backends) == 1 else backends

    return install


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request):
    """Every kind of device this machine has."""
    return request.param
