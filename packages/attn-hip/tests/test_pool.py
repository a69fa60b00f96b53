"""The thread pool: races, forks, and callers at the same time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_core.decode import BatchDecodeWithPagedKVCacheWrapper
from attn_hip import build

GXX = shutil.which("g++")
PAGE = 16


@pytest.mark.skipif(GXX is None, reason="needs g++")
@pytest.mark.parametrize("check", ["thread", "address,undefined"])
def test_under_a_sanitizer(tmp_path: Path, check: str) -> None:
    program, here = tmp_path / "stress", Path(__file__).parent
    sources = [str(here / "pool_stress.cpp"), str(build._SOURCES / "pool.cpp")]
    flags = ["-std=c++17", "-O1", "-g", f"-fsanitize={check}", f"-I{build._SOURCES}", "-pthread"]
    subprocess.run([str(GXX), *flags, *sources, "-o", str(program)], check=True, capture_output=True)
    # Without address randomisation: gcc's thread sanitizer does not know the maps of newer kernels.
    fixed = ["setarch", "-R"] if shutil.which("setarch") else []
    ran = subprocess.run([*fixed, str(program)], capture_output=True, text=True, timeout=300)
    assert (ran.returncode, ran.stdout) == (0, "ok\n"), ran.stderr[:2000]


def planned(batch: int, kv_len: int, heads: int = 8) -> tuple[Any, torch.Tensor, torch.Tensor]:
    pages = -(-kv_len // PAGE)
    make = torch.Generator().manual_seed(batch)
    kv = torch.randn(batch * pages, 2, PAGE, heads, 64, generator=make)
    q = torch.randn(batch, heads * 4, 64, generator=make)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(8 << 20, dtype=torch.uint8), backend="fa2")
    indptr = torch.arange(0, (batch + 1) * pages, pages, dtype=torch.int32)
    last = torch.full((batch,), kv_len - (pages - 1) * PAGE, dtype=torch.int32)
    ids = torch.arange(batch * pages, dtype=torch.int32)
    wrapper.plan(indptr, ids, last, heads * 4, heads, 64, PAGE, q_data_type=torch.float32)
    return wrapper, q, kv


def test_the_number_of_threads_changes_no_bit() -> None:
    wrapper, q, kv = planned(3, 1700)
    want = wrapper.run(q, kv)
    for threads in (2, 3, 5):
        torch.set_num_threads(threads)
        try:
            for _ in range(5):
                assert torch.equal(wrapper.run(q, kv), want)
        finally:
            torch.set_num_threads(1)


def test_callers_at_the_same_time() -> None:
    """One has the pool, the others compute for themselves; nobody waits for a lock of Python's."""
    made = [planned(2, 900 + 100 * n) for n in range(4)]
    want = [wrapper.run(q, kv) for wrapper, q, kv in made]
    wrong: list[int] = []

    def work(n: int) -> None:
        torch.set_num_threads(2)
        wrapper, q, kv = made[n]
        for _ in range(20):
            if not torch.equal(wrapper.run(q, kv), want[n]):
                wrong.append(n)

    callers = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=120)
    assert not any(caller.is_alive() for caller in callers)
    assert wrong == []


FORK = """
import os, signal, sys, torch
sys.path.insert(0, sys.argv[1])
from test_pool import planned
torch.set_num_threads(3)
wrapper, q, kv = planned(3, 1700)
native = wrapper.route.backend._host.module()


def forked(want):
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a team that waits for threads of the parent never ends
        same = [torch.equal(wrapper.run(q, kv), want) for _ in range(3)]
        os._exit(0 if all(same) and native.pool_size() == 2 else 1)
    return os.waitpid(child, 0)[1]


torch.set_num_threads(1)
want = wrapper.run(q, kv)
torch.set_num_threads(3)
early = forked(want)  # before any thread of OpenMP is there
assert torch.equal(wrapper.run(q, kv), want)
assert native.pool_size() == 0, native.pool_size()  # they are torch's
late = forked(want)
assert torch.equal(wrapper.run(q, kv), want)
print(early, late)
"""


def test_threads_are_torchs_and_a_forked_child_has_its_own() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FORK, os.path.dirname(__file__)], capture_output=True, text=True, timeout=120
    )
    assert ran.stdout == "0 0\n", ran.stderr
