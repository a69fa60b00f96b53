"""A disk cache filled under another declaration must not be found: the test, and what it runs in a process.

``python -m attn_compile.testing.stale DIR`` compiles one decode step with on-disk graph caches in DIR and
prints a JSON object. ``--declare-written`` declares keys and values written, as a careless registration does;
``--plain-names`` leaves the hash out of the operator's name, which is what the test must catch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from attn_core.op_table import OpRow, Role


def replay(folder: Path, *, plain_names: bool = False, backend: str = "auto") -> dict[str, Any]:
    """Fill a cache under a wrong declaration, then compile with the right one; return what the second did.

    Args:
        folder: Empty; used as the cache of both processes.
        plain_names: Leave the declaration's hash out of the names.
        backend: Backend of the step.

    Returns:
        ``exact`` (output and cache equal eager's bit for bit) and ``hits`` (graphs found on disk).
    """
    names = ["--plain-names"] if plain_names else []
    _process(folder, ["--declare-written", *names], backend)
    return _process(folder, names, backend)


def _process(folder: Path, options: Sequence[str], backend: str) -> dict[str, Any]:
    command = [sys.executable, "-m", __name__, str(folder), "--backend", backend, *options]
    # Neither guard nor fix: the first process is to store a graph that is wrong.
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), "ATTN_COMPILE_NO_FIXUPS": "1"}
    env["ATTN_COMPILE_NO_GUARD"] = "1"
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} exited {done.returncode}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def flipped(row: OpRow, *names: str) -> OpRow:
    """Return a row in which arguments that are only read are declared written."""
    args = (replace(arg, role=Role.CACHE) if arg.name in names else arg for arg in row.args)
    return replace(row, args=tuple(args))


def main(argv: Sequence[str] | None = None) -> None:
    """Run one process of the test."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--declare-written", action="store_true")
    parser.add_argument("--plain-names", action="store_true")
    given = parser.parse_args(argv)

    import torch
    from torch._dynamo.utils import counters

    from .. import ops, registry, rows, schema

    torch.set_num_threads(1)
    spoil: Any = setattr  # what is patched here is private to those modules
    run = rows.RUN
    if given.plain_names:
        spoil(registry, "name", lambda row: row.base)
    if given.declare_written:
        run = flipped(run, "k", "v")
        spoil(registry, "validate", lambda row: row)  # what the table refuses is what is to be stored
        spoil(ops, "fits", lambda rows: None)
    spoil(ops, "ROWS", (run, *(row for row in rows.ROWS if row is not rows.RUN)))
    found = {"exact": _step_is_exact(given.backend), "hits": _hits(counters), "name": schema.name(run)}
    print(json.dumps(found))


def _hits(counters: Any) -> int:
    found = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
    return int(found)


def _step_is_exact(backend: str) -> bool:
    import torch

    import attn_core

    from .layouts import LAYOUTS, allocate
    from .matrix import DIM, HEADS, _difference, _plan

    torch.manual_seed(0)
    device, layout = torch.device("cpu"), LAYOUTS["kv[i]"]
    wrapper = attn_core.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(1 << 16, dtype=torch.uint8), backend=backend
    )
    _plan(wrapper, 8, 3, device)
    q, storage = torch.randn(3, HEADS, DIM), allocate(layout, 8, device)
    kept = [(whole.clone(), inside) for whole, inside in storage]
    k, v = layout.outside([inside for _, inside in storage])
    pair = (k, v)
    want = wrapper.run(q * 2, pair)
    step = torch.compile(lambda q, k, v: wrapper.run(q * 2, (k, v)), fullgraph=True, dynamic=False)
    return _difference(step(q, *pair), want, storage, kept) is None


if __name__ == "__main__":
    main()
