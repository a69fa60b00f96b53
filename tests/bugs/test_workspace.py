from __future__ import annotations

import threading

import pytest
import torch

import attn_core

from .fakes import Fake
from .support import (
    D_TC,
    DECODES,
    Asked,
    Case,
    D,
    P,
    R,
    Rule,
    base,
    close,
    i32,
    indptr_of,
    plan,
    refused,
    rnd,
    run,
    same_bits,
    served,
    workspace,
    wrapper,
)


def large(way: str) -> tuple[object, ...]:
    """Batch 64, 64 heads of 128, 32768 keys each; no cache is needed to plan."""
    pages = 32768 // 16
    indptr = indptr_of([pages] * 64)
    indices = torch.arange(64 * pages, dtype=torch.int32)
    last = torch.full((64,), 16, dtype=torch.int32)
    index = (indptr, indices, last) if way in DECODES else (indptr_of([1] * 64), indptr, indices, last)
    return (*index, 64, 8, 128, 16)


def make(way: str, buffer: torch.Tensor, backend: str):
    if way in DECODES:
        return attn_core.BatchDecodeWithPagedKVCacheWrapper(
            buffer, use_tensor_cores=way == D_TC, backend=backend
        )
    return attn_core.BatchPrefillWithPagedKVCacheWrapper(buffer, backend=backend)


@pytest.mark.parametrize("way", [D, D_TC, P])
def test_b70_exact_workspace_is_enough(backend, way):
    """Guessed workspace sizes failed at load time or under capture. https://github.com/flashinfer-ai/flashinfer/issues/362"""
    asking = make(way, workspace(1), backend)
    with served(backend):
        size, index_bytes = asking.workspace_size(*large(way))
    assert asking._plan_info is None
    make(way, torch.empty(size, dtype=torch.uint8), backend).plan(*large(way))
    w = make(way, workspace(1024), backend)
    w.plan(*large(way))
    assert w._plan_info.workspace_bytes <= max(size, 1 << 30)
    assert 0 < w.owned_bytes <= index_bytes


@pytest.mark.parametrize("way", [D, D_TC, P])
def test_b70_too_small_a_workspace_names_the_query(install, way):
    """Guessed workspace sizes failed at load time or under capture. https://github.com/flashinfer-ai/flashinfer/issues/362"""
    need = 192 << 20
    install(Fake(workspace_bytes=need))
    assert make(way, workspace(1), "fake").workspace_size(*large(way))[0] == need
    make(way, torch.empty(need, dtype=torch.uint8), "fake").plan(*large(way))
    w = make(way, torch.empty(need - 1, dtype=torch.uint8), "fake")
    with refused("float_workspace_buffer", f"{need} bytes", f"got {need - 1}", "workspace_size()"):
        w.plan(*large(way))
    assert w._plan_info is None
    # the unit is bytes, whatever the buffer's type
    make(way, torch.empty(need // 4, dtype=torch.float32), "fake").plan(*large(way))
    with refused("float_workspace_buffer", f"{need} bytes", f"got {need - 4}"):
        make(way, torch.empty(need // 4 - 1, dtype=torch.float32), "fake").plan(*large(way))
    w = make(way, torch.empty(need, dtype=torch.uint8), "fake")
    w.plan(*large(way))
    with refused("float_workspace_buffer", f"{need} bytes", f"got {need - 16}"):
        w.reset_workspace_buffer(torch.empty(need - 16, dtype=torch.uint8), workspace(1))


def other() -> Case:
    case = base()
    q, _, _ = rnd(72, (2, 4, 64), (1,), (1,))
    return case.but(q=q, tables=((1,), (3, 2, 0)), last=(3, 16))


@pytest.mark.parametrize("way", [D, D_TC, P, R])
def test_b72_a_plan_survives_the_next(backend, way):
    """A second plan() overwrote the first one's staging memory in flight. https://github.com/sgl-project/mini-sglang/pull/103"""
    a, b = base(), other()
    w = wrapper(way, backend)
    with served(backend):
        plan(w, a)
    before, held = run(w, a), w._plan_info
    plan(w, b)
    close(run(w, b), b.want(), torch.float16)
    assert held is not w._plan_info
    w._state = held
    assert all(same_bits(x, y) for x, y in zip(run(w, a), before, strict=True))


@pytest.mark.parametrize("way", [D, D_TC, P])
def test_b72_index_tensors_may_be_reused_after_plan(backend, way):
    """A second plan() overwrote the first one's staging memory in flight. https://github.com/sgl-project/mini-sglang/pull/103"""
    case = base()
    arrays = {
        "indptr": case.indptr, "indices": case.indices, "last": case.last_page_len,
        "qo_indptr": case.qo_indptr,
    }  # fmt: skip
    w = wrapper(way, backend)
    with served(backend):
        plan(w, case, Asked(indices=arrays))
    for array in arrays.values():
        array.fill_(77)
    close(run(w, case), case.want(), torch.float16)
    # the host's copy too: forward() plans the same batch again
    with served(backend):
        again = w.forward_return_lse(case.q, (case.k, case.v), sm_scale=0.5)
    close(again, case.want(Rule(sm_scale=0.5)), torch.float16)


def test_b72_one_workspace_shared_by_wrappers_and_threads(backend):
    """A second plan() overwrote the first one's staging memory in flight. https://github.com/sgl-project/mini-sglang/pull/103"""
    shared = workspace()
    cases = (base(), other())
    wrappers = [make(D, shared, backend) for _ in cases]
    with served(backend):
        for w, case in zip(wrappers, cases, strict=True):
            plan(w, case)
    for w, case in zip(wrappers, cases, strict=True):
        close(run(w, case), case.want(), torch.float16)
    # one wrapper, planned by two threads at once: each plan is one of the two
    w, faults = wrappers[0], []

    def work(case: Case) -> None:
        try:
            for _ in range(20):
                plan(w, case)
        except Exception as err:
            faults.append(err)

    threads = [threading.Thread(target=work, args=(case,)) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    last = next(c for c in cases if torch.equal(w._plan_info.batch.kv_len, i32(*c.kv_lens)))
    close(run(w, last), last.want(), torch.float16)
