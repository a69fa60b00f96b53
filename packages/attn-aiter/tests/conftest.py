"""Fixtures of attn-aiter's own tests: everything runs on a CPU, without amd-aiter."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from attn_aiter import load
from attn_aiter.backend import AiterBackend
from attn_core import notices, page, planner, plugins
from attn_core.batch import HostBatch
from attn_core.plan_image import index_parts
from attn_core.problem import AttentionProblem, MaskMode, Op, PagedKV, RaggedKV
from attn_core.query import GraphLimits, Query
from attn_core.reference import ReferenceBackend
from attn_core.target import DeviceTarget

os.environ["ATTN_TUNED"] = ""  # what the developer measured on this machine is no concern of the tests

from .wrapping import Kernels

torch.set_num_threads(1)

GFX942 = DeviceTarget("hip", "gfx942", 304, 64)
GFX950 = DeviceTarget("hip", "gfx950", 256, 64)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test leaves a verdict, a notice or an import behind."""
    monkeypatch.delenv("ATTN_THRESHOLDS", raising=False)
    monkeypatch.delenv(load.STRICT_VARIABLE, raising=False)
    path, modules = list(sys.path), set(sys.modules)
    load.forget()
    notices.forget()
    yield
    load.forget()
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.split(".")[0] in ("aiter", "csrc"):
            del sys.modules[name]


@pytest.fixture
def gfx942() -> DeviceTarget:
    return GFX942


@pytest.fixture
def gfx950() -> DeviceTarget:
    return GFX950


@pytest.fixture
def problem() -> Callable[..., AttentionProblem]:
    """Make a problem: bf16, 8 query heads over 2, head_dim 128 unless said otherwise."""

    def make(op: Op, **changes: Any) -> AttentionProblem:
        paged = op.paged
        page = changes.pop("page_size", 16)
        order = changes.pop("order", "NHD")
        dim, dtype = changes.pop("head_dim", 128), changes.pop("dtype", torch.bfloat16)
        facts: dict[str, Any] = {
            "num_qo_heads": 8, "num_kv_heads": 2, "head_dim_qk": dim, "head_dim_vo": dim, "q_dtype": dtype,
            "kv_dtype": dtype, "o_dtype": dtype, "kv": PagedKV(page, order) if paged else RaggedKV(order),
            "mask": MaskMode.NONE if op in (Op.DECODE, Op.APPEND) else MaskMode.CAUSAL,
            "sm_scale": dim**-0.5, "use_tensor_cores": op not in (Op.DECODE, Op.APPEND),
        }  # fmt: skip
        return AttentionProblem(op=op, **{**facts, **changes})

    return make


@pytest.fixture
def query() -> Callable[..., Query]:
    """Make the query of a batch."""

    def make(
        problem: AttentionProblem,
        batch: HostBatch,
        target: DeviceTarget = GFX942,
        graph: GraphLimits | None = None,
        workspace_bytes: int | None = None,
    ) -> Query:
        return Query(target, problem, batch.shape, graph, workspace_bytes)

    return make


@pytest.fixture
def device_image() -> Callable[..., dict[str, torch.Tensor]]:
    """Lay a plan's arrays out as the wrapper would."""

    def make(batch: HostBatch, result: Any) -> dict[str, torch.Tensor]:
        return index_parts(batch, None, result)

    return make


@pytest.fixture
def reference() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Compute the answer with attn-core's oracle: ``(out, lse)``."""

    def attend(
        problem: AttentionProblem, batch: HostBatch, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from attn_core.backend import RunIO

        oracle = ReferenceBackend()
        target = DeviceTarget("cpu", "cpu", 1, 1)
        result = oracle.plan(Query(target, problem, batch.shape), "torch", batch)
        out = torch.empty(q.shape[0], q.shape[1], v.shape[-1], dtype=problem.o_dtype)
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        oracle.run(result.launch, index_parts(batch, None, result), RunIO(q, k, v, out, lse))
        return out, lse

    return attend


@pytest.fixture
def install(tmp_path: Path) -> Callable[..., Path]:
    """Write a package ``aiter`` with metadata into a folder; the caller puts it on ``sys.path``."""

    def make(
        version: str | None = "0.1.20", distribution: str = "amd-aiter", body: str = "", **modules: str
    ) -> Path:
        root = tmp_path / f"site-{distribution}-{version}"
        (root / "aiter").mkdir(parents=True)
        (root / "aiter" / "__init__.py").write_text(body)
        for name, text in modules.items():
            file = root / (name.replace("__", "/") + ".py")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        if version is not None:
            info = root / f"{distribution.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
            )
        return root

    return make


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """Stand-in kernels behind attn-core's wrappers, on CPU tensors of a device said to be a gfx942."""
    found = Kernels()
    using = (AiterBackend({"assume_version": "0.1.20"}, loader=found), ReferenceBackend())
    monkeypatch.setattr(planner, "target_of", lambda device: GFX942)
    monkeypatch.setattr(page, "target_of", lambda device: GFX942)
    before = plugins.use(plugins.Registry(using, (), (), {}))
    yield found
    plugins.use(before)
