import pytest
import torch

from attn_tiny_lm.data import stdlib_root
from attn_tiny_lm.model import TinyLM, load_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model() -> TinyLM:
    return load_model()


@pytest.fixture(scope="session")
def source() -> bytes:
    """A library file that is held out from training."""
    return (stdlib_root() / "wsgiref" / "util.py").read_bytes()
