"""Host time of run(out=) on a GPU: fa2 beside FlashInfer, in one process and in turns.

Problems are small, so that kernels take less time than the host does to enqueue them; of many calls
between two synchronisations none waits for the device. Both libraries plan the same batch, write into memory
that is given, and their results are compared. Beside them: the native call that checks and launches alone,
run() with the checks in Python, one torch operator, and the route decision of a plan.

    python benchmarks/host_gpu.py [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu import Ours  # type: ignore[import-not-found]

from attn_core.route import choose

HEADS, KV_HEADS, DIM, PAGE, KV_LEN, TYPE = 32, 8, 128, 16, 64, torch.bfloat16
CALLS, ROUNDS, TOLERANCE = 100, 25, 2e-2
Call = Callable[[], object]


def in_turns(calls: dict[str, Call]) -> dict[str, float]:
    """Return each call's median of the mean microseconds of many calls, the calls taking turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS):
        for name in list(calls)[:: 1 if turn % 2 else -1]:
            call = calls[name]
            call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            found[name].append((time.perf_counter() - start) / CALLS * 1e6)
            torch.cuda.synchronize()
    return {name: statistics.median(taken) for name, taken in found.items()}


def stages(wrapper: Any, q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor) -> dict[str, Call]:
    """Return parts of run(): the native call that checks and launches, and the whole run without it."""
    for _ in range(2):
        wrapper.run(q, cache, out=out)
    slot, buffer = wrapper._state.direct, wrapper._float_workspace_buffer
    call = slot.call
    if call is None:
        return {}

    def checked_in_python() -> None:
        slot.call = None
        wrapper.run(q, cache, out=out)
        slot.call = call

    return {
        "native call": lambda: call(q, cache, out, None, buffer, None, None, None),
        "checked in Python": checked_in_python,
    }


def row(op: str, batch_size: int, q_len: int, peer: Any) -> dict[str, object]:
    """Measure one batch."""
    pages = KV_LEN // PAGE
    device = torch.device("cuda")
    indptr = torch.arange(batch_size + 1, dtype=torch.int32) * pages
    indices = torch.randperm(batch_size * pages).to(torch.int32)
    last = torch.full((batch_size,), PAGE, dtype=torch.int32)
    qo = torch.arange(batch_size + 1, dtype=torch.int32) * q_len
    cache = torch.randn(batch_size * pages, 2, PAGE, KV_HEADS, DIM, device=device, dtype=TYPE)
    q = torch.randn(batch_size * q_len, HEADS, DIM, device=device, dtype=TYPE)
    types = {"q_data_type": TYPE, "kv_data_type": TYPE}
    heads = (HEADS, KV_HEADS, DIM, PAGE)

    def planned(library: Any) -> Any:
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
        if op == "decode":
            made = library.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=True, backend="fa2"
            )
            made.plan(indptr, indices.to(device), last, *heads, **types)
        else:
            made = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
            made.plan(qo, indptr, indices.to(device), last, *heads, causal=True, **types)
        return made

    ours, out = planned(Ours()), torch.empty_like(q)
    calls: dict[str, Call] = {"fa2": lambda: ours.run(q, cache, out=out)}
    calls |= stages(ours, q, cache, out)
    x, y, z = (torch.ones(8, device=device) for _ in range(3))
    calls["torch.add(out=)"] = lambda: torch.add(x, y, out=z)
    state = ours._state
    screened = ours._screened(state.query, None)
    calls["choose()"] = lambda: choose(screened, state.query)
    error = None
    if peer is not None:
        theirs, other = planned(peer), torch.empty_like(q)
        calls["FlashInfer"] = lambda: theirs.run(q, cache, out=other)
        ours.run(q, cache, out=out)
        theirs.run(q, cache, out=other)
        error = float((out.float() - other.float()).norm() / other.float().norm())
        if not error <= TOLERANCE:
            raise SystemExit(f"{op}: results differ by {error}")
    us = {name: round(value, 2) for name, value in in_turns(calls).items()}
    facts: dict[str, object] = {"op": op, "batch_size": batch_size, "q_len": q_len, "us": us, "error": error}
    facts["python"] = round(us["fa2"] - us["native call"], 2) if "native call" in us else None
    facts["ratio"] = round(us["fa2"] / us["FlashInfer"], 3) if peer is not None else None
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", help="also write the rows to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("host_gpu.py: needs a GPU, got none")
    try:
        peer: Any = importlib.import_module("flashinfer")
    except ImportError:
        peer = None
    rows = []
    for op, batch_size, q_len in (("decode", 1, 1), ("decode", 16, 1), ("prefill_paged", 4, 16)):
        rows.append(row(op, batch_size, q_len, peer))
        print(json.dumps(rows[-1]), flush=True)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
