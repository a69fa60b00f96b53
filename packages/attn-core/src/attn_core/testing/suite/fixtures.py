"""What every test of the suite shares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ..cases import KINDS
from ..select import record


@pytest.fixture(scope="module", autouse=True)
def attn_one_thread() -> Iterator[None]:
    """One torch thread: tiny tensors run many times faster so, and no slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def attn_facts(request: pytest.FixtureRequest) -> None:
    """Say in the test's report what it is about."""
    call = getattr(request.node, "callspec", None)
    for name, value in () if call is None else call.params.items():
        if value is not None and name in (*KINDS, "subject"):
            record(request, value)
