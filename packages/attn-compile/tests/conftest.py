"""One thread, no disk caches of graphs, the reference backend, a fresh Dynamo."""

import pytest
import torch
import torch._dynamo.testing
import torch._functorch.config
import torch._inductor.config

from attn_core import plugins
from attn_core.reference import ReferenceBackend


@pytest.fixture(autouse=True)
def _quiet_torch():
    torch.set_num_threads(1)
    torch._dynamo.reset()
    found = plugins.discover(config={})
    old = plugins.use(plugins.Registry((ReferenceBackend(),), (), found.targets, {"reference": "attn-core"}))
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield
    plugins.use(old)
