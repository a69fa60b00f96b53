"""What the tests share: one thread, and the native module as the backend loads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attn_hip.host import Host


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def native() -> Any:
    host = Host()
    assert host.prepare() is None
    return host.module()
