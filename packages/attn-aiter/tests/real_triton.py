"""Run AITER's own Triton attention through the path ``unified``, on the CPU, against attn-core's oracle.

Started by ``test_real_triton.py`` in a process of its own, with TRITON_INTERPRET=1 and ATTN_AITER_TREE naming
a folder with an unpacked amd-aiter. Only the leaf module is imported: parents are bare packages without their
``__init__``, and what asks for a GPU is answered from here. float16: the interpreter has no bfloat16.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch

from attn_aiter import probe, rows
from attn_aiter.backend import AiterBackend
from attn_core.backend import RunIO
from attn_core.batch import paged_batch
from attn_core.plan_image import index_parts
from attn_core.problem import AttentionProblem, MaskMode, Op, PagedKV
from attn_core.query import Query
from attn_core.reference import ReferenceBackend
from attn_core.target import DeviceTarget

GFX942 = DeviceTarget("hip", "gfx942", 304, 64)


def isolate(tree: Path) -> None:
    """Make AITER's Triton modules importable without importing AITER."""
    for name in ("aiter", "aiter.ops", "aiter.ops.triton"):
        package = types.ModuleType(name)
        package.__path__ = [str(tree / name.replace(".", "/"))]
        sys.modules[name] = package
    answers: dict[str, dict[str, Any]] = {
        "aiter.ops.triton.utils._triton.arch_info": {
            "get_arch": lambda: "gfx942", "get_device": lambda: "MI300X", "is_fp4_avail": lambda: False,
            "is_fp8_avail": lambda: True, "is_gluon_avail": lambda: False,
            "_LDS_CAP_BYTES": {"gfx942": 65536},
        },
        "aiter.ops.triton.utils.device_info": {"get_num_sms": lambda: 304, "get_num_xcds": lambda: 8},
    }  # fmt: skip
    for name, values in answers.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        sys.modules[name] = module


def worst(backend: AiterBackend, op: Op, qo: Any, lengths: list[int], page: int, **changes: Any) -> float:
    """Largest difference between the real kernel and the oracle."""
    counts = torch.tensor([-(-n // page) for n in lengths])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    last = torch.tensor([(n - 1) % page + 1 for n in lengths])
    ids = torch.randperm(int(indptr[-1]))
    batch = paged_batch(qo, indptr, ids, last, page)
    order = changes.pop("order", "NHD")
    problem = AttentionProblem(
        op=op, num_qo_heads=4, num_kv_heads=2, head_dim_qk=64, head_dim_vo=64, q_dtype=torch.float16,
        kv_dtype=torch.float16, o_dtype=torch.float16, kv=PagedKV(page, order), sm_scale=0.125,
        mask=MaskMode.NONE if op is Op.DECODE else MaskMode.CAUSAL, **changes,
    )  # fmt: skip
    inner = (page, 2) if order == "NHD" else (2, page)
    k, v = (torch.randn(int(indptr[-1]), *inner, 64).half() for _ in range(2))
    q = torch.randn(batch.shape.total_q, 4, 64).half()
    outs = []
    for target, use, path in (
        (GFX942, backend, rows.UNIFIED),
        (DeviceTarget("cpu", "cpu", 1, 1), ReferenceBackend(), "torch"),
    ):
        result = use.plan(Query(target, problem, batch.shape), path, batch)
        out = torch.full_like(q, 7.0)
        use.run(result.launch, index_parts(batch, None, result), RunIO(q, k, v, out))
        outs.append(out.float())
    return float((outs[0] - outs[1]).abs().max())


def main() -> None:
    """Print one line per case; exit 1 if one is off."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    tree = Path(os.environ["ATTN_AITER_TREE"])
    (info,) = tree.glob("amd_aiter-*.dist-info")
    release = info.name.removesuffix(".dist-info").removeprefix("amd_aiter-")
    isolate(tree)
    options = {"assume_version": release, "min_version": "0.1.0"}
    backend = AiterBackend(
        options, loader=lambda module, name: getattr(importlib.import_module(module), name)
    )
    declared = probe.read(backend.install).functions["unified"]
    backend._functions[rows.UNIFIED] = getattr(importlib.import_module(declared.module), declared.name)
    ends = torch.tensor([0, 3, 10])
    cases = {
        "decode": (Op.DECODE, 1, [19, 33], 16, {}),
        "decode split over keys": (Op.DECODE, 1, [600], 16, {}),
        "decode HND, page 32": (Op.DECODE, 1, [19, 40], 32, {"order": "HND"}),
        "verify": (Op.VERIFY, 4, [19, 4], 16, {}),
        "verify with window": (Op.VERIFY, 4, [40, 9], 16, {"window_left": 5}),
        "prefill with soft cap": (Op.PREFILL_PAGED, ends, [19, 40], 64, {"logits_soft_cap": 2.0}),
    }  # fmt: skip
    bad = False
    for name, (op, qo, lengths, page, changes) in cases.items():
        error = worst(backend, op, qo, lengths, page, **changes)
        bad |= not error < 4e-3
        print(f"{name}: {error:.1e}", flush=True)
    sys.exit(bad)


if __name__ == "__main__":
    main()
