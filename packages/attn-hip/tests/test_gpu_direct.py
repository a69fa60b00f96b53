"""Runs that native code checks and launches, on a GPU of this machine."""

from __future__ import annotations

import pytest
import torch

from attn_core.decode import BatchDecodeWithPagedKVCacheWrapper

from .gpu_world import DIM, HEADS, KV_HEADS, PAGE, TYPE, World, capture, fa2, same, workspace

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures(fa2.__name__),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),  # of torch, where a capture was refused
]


def test_native_code_takes_runs_on_every_stream_and_none_of_an_eager_wrapper_in_a_capture() -> None:
    world = World()
    table, q = world.table((300, 40)), world.q(2)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), "NHD", backend="fa2")
    wrapper.plan(*table, HEADS, KV_HEADS, DIM, PAGE, q_data_type=TYPE)
    want = wrapper.run(q, world.kv)
    wrapper.run(q, world.kv)
    slot, took = wrapper._state.direct, []
    call = slot.call
    assert call is not None

    def counted(*given: object) -> bool:
        took.append(call(*given))
        return bool(took[-1])

    slot.call = counted
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        for cache in (world.kv, (world.kv[:, 0], world.kv[:, 1])):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1_000_000)
                late = torch.zeros_like(q)
                late.copy_(q)  # in the stream's order: a run on another stream would read zeros
                found = wrapper.run(late, cache)
            stream.synchronize()
            same(found, want)
    assert took == [True] * 4
    with pytest.raises(ValueError, match=r"core\.device"):
        wrapper.run(q.cpu(), world.kv)
    with pytest.raises(RuntimeError, match="eager-in-capture"):
        capture(lambda: wrapper.run(q, world.kv))
    torch.cuda.synchronize()
    same(wrapper.run(q, world.kv), want)
