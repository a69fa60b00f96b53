"""Routing is decided for devices that are not here, with a stand-in where the in-tree kernels would be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from attn_core import notices

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("ATTN_THRESHOLDS", "ATTN_CONFIG", "ATTN_AITER_STRICT"):
        monkeypatch.delenv(name, raising=False)
    notices.forget()
    yield
    notices.forget()
