"""Run AITER's own Triton attention through the path ``unified`` against attn-core's oracle.

    python triton_run.py TREE cpu|cuda [FIRST STEP]    (PYTHONPATH: this folder; for cpu TRITON_INTERPRET=1)

Prints one JSON object per case; of all, or of every STEP-th from FIRST on. In the interpreter small cases in
float16 only: it has no bfloat16.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton_layer
from triton_cases import LARGE, SMALL, Case, asked, tensors

from attn_aiter import rows, warm
from attn_core.backend import RunIO
from attn_core.plan_image import index_parts
from attn_core.query import Query
from attn_core.reference import ReferenceBackend
from attn_core.target import DeviceTarget

GFX942 = DeviceTarget("hip", "gfx942", 304, 64)


def worst(backend: Any, device: torch.device, dtype: torch.dtype, case: Case) -> float:
    """Largest difference between the real kernel and the oracle, relative where the answer is large."""
    problem, batch = asked(case, dtype)
    q, k, v = (t.to(device) for t in tensors(problem, batch))
    outs = []
    for target, use, path in (
        (GFX942, backend, rows.UNIFIED),
        (DeviceTarget("cpu", "cpu", 1, 1), ReferenceBackend(), "torch"),
    ):
        result = use.plan(Query(target, problem, batch.shape), path, batch)
        image = {name: part.to(device) for name, part in index_parts(batch, None, result).items()}
        out = torch.full_like(q, 7.0)
        use.run(result.launch, image, RunIO(q, k, v, out))
        outs.append(out.float())
    return float(((outs[0] - outs[1]).abs() / (1 + outs[1].abs())).max())


def main() -> None:
    """Print the cases."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tree, device = Path(sys.argv[1]), torch.device(sys.argv[2])
    cuda = device.type == "cuda"
    units = torch.cuda.get_device_properties(0).multi_processor_count if cuda else 304
    triton_layer.isolate(tree, compute_units=units)
    if cuda:
        if torch.version.cuda:
            triton_layer.without_amd_options()
        warm._device = lambda target: device  # type: ignore[assignment]
    backend = triton_layer.backend(tree)
    dtypes = (torch.float16, torch.bfloat16) if cuda else (torch.float16,)
    every = list(product(dtypes, (SMALL | LARGE if cuda else SMALL).items()))
    first, step = map(int, sys.argv[3:5] or (0, 1))
    for dtype, (name, case) in every[first::step]:
        error = worst(backend, device, dtype, case)
        said = {"case": name, "dtype": str(dtype).removeprefix("torch."), "error": error}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
