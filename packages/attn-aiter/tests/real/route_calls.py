"""Drive every path through attn-core's wrappers and AITER's own Python layer, and say what it reached.

    python route_calls.py TREE ARCH            (PYTHONPATH: this folder and the one above)

Prints one JSON object per case: the compiled modules called, first by the warm-up and last by the run, those
AITER would have compiled in run(), what the last call was given, and the largest difference from the oracle.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import python_layer
import torch
from functions import Latent, Prefill, Varlen
from standins import PaV1, reshape_and_cache_flash

import attn_core
from attn_aiter.backend import AiterBackend
from attn_core import page, planner, plugins
from attn_core.reference import ReferenceBackend
from attn_core.target import DeviceTarget

HEADS, KV_HEADS, PAGE = 8, 2, 16


@dataclass
class Case:
    """One question.

    Attributes:
        path: Path that is named.
        kind: ``paged``, ``ragged``, ``single``, ``decode``, ``latent`` or ``append``.
        dim: Size of a head.
        dtype: Type of everything.
        q_len: Query rows per request.
        kv_len: Keys per request.
        page_size: Tokens per page.
        lse: Plan with, and ask for, the log-sum-exp.
        options: More arguments of plan().
    """

    path: str
    kind: str
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    q_len: int = 4
    kv_len: int = 40
    page_size: int = PAGE
    lse: bool = False
    options: dict[str, Any] = field(default_factory=dict)


_F16 = torch.float16
CASES = {
    "native": Case("native", "paged", page_size=1),
    "native fp16 cap": Case("native", "paged", page_size=1, dtype=_F16, options={"logits_soft_cap": 5.0}),
    "native lse": Case("native", "paged", page_size=1, lse=True),
    "native window": Case("native", "paged", page_size=1, options={"window_left": 7}),
    "native wide window": Case("native", "paged", page_size=1, options={"window_left": 40}),
    "native window, not causal": Case(
        "native", "paged", page_size=1, options={"window_left": 7, "causal": False}
    ),
    "native one row": Case("native", "paged", page_size=1, q_len=1),
    "native one row, window": Case("native", "paged", page_size=1, q_len=1, options={"window_left": 7}),
    "gather": Case("gather", "paged"),
    "gather head_dim 64, lse": Case("gather", "paged", dim=64, lse=True),
    "gather window": Case("gather", "paged", options={"window_left": 7}),
    "gather fp16 cap": Case("gather", "paged", dtype=_F16, options={"logits_soft_cap": 5.0}),
    "varlen": Case("varlen", "ragged"),
    "varlen lse": Case("varlen", "ragged", lse=True),
    "varlen fp16": Case("varlen", "ragged", dtype=_F16),
    "varlen window": Case("varlen", "ragged", options={"window_left": 7}),
    "varlen wide window": Case("varlen", "ragged", options={"window_left": 40}),
    "varlen window, not causal": Case(
        "varlen", "ragged", dim=64, options={"window_left": 7, "causal": False}
    ),
    "varlen fp16 cap, not causal": Case(
        "varlen", "ragged", dtype=_F16, options={"logits_soft_cap": 5.0, "causal": False}
    ),
    "varlen window 0": Case("varlen", "ragged", options={"window_left": 0}),
    "varlen window 0, head_dim 64": Case("varlen", "ragged", dim=64, options={"window_left": 0}),
    "varlen bf16 cap": Case("varlen", "ragged", options={"logits_soft_cap": 5.0}),
    "varlen long": Case("varlen", "ragged", q_len=130, kv_len=140),
    "single": Case("single", "single"),
    "single fp16 window": Case("single", "single", dtype=_F16, options={"window_left": 7}),
    "decode": Case("pa_v1", "decode", q_len=1),
    "decode fp16 cap": Case("pa_v1", "decode", q_len=1, dtype=_F16, options={"logits_soft_cap": 5.0}),
    "decode window": Case("pa_v1", "decode", dim=64, q_len=1, options={"window_left": 7}),
    "decode long": Case("pa_v1", "decode", q_len=1, kv_len=256 * 64 + 1),
    "latent": Case("mla", "latent", q_len=1, page_size=1),
    "latent, four rows": Case("mla", "latent", q_len=4, page_size=1),
    "append": Case("append", "append"),
}  # fmt: skip


def answers(recorder: python_layer.Recorder) -> None:
    """Give the compiled functions their meaning; the assembly kernel has no soft cap and no real window."""

    def varlen(**given: Any) -> Any:
        assert given.get("block_table") is None
        assert given["min_seqlen_q"] == 0
        return _quadruple(Varlen(), given)

    def assembly(**given: Any) -> Any:
        assert given["logits_soft_cap"] == 0.0, "the assembly kernel does not cap"
        assert given["window_size_left"] == -1, "the assembly kernel refuses a window"
        return varlen(**given)

    recorder.answers.update(
        mha_varlen_fwd=varlen,
        fmha_v3_varlen_fwd=assembly,
        mha_batch_prefill=lambda **given: _quadruple(Prefill(), given),
        reshape_and_cache_flash=reshape_and_cache_flash,
    )


class NoKernel:
    """A Triton kernel whose launch does nothing."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """Return what launches on a grid."""
        return lambda *arguments, **keywords: None


def latent(recorder: python_layer.Recorder) -> None:
    """The first stage gives the whole answer; the second, which merges its splits in Triton, is left out."""
    layer: Any = importlib.import_module("aiter.mla")
    ends = layer.get_meta_param.__wrapped__
    arange = torch.arange

    def meta(*given: Any) -> Any:
        torch.arange = lambda *a, device=None, **k: arange(*a, **k)  # it says "cuda"
        try:
            return ends(*given)
        finally:
            torch.arange = arange

    def first_stage(**given: Any) -> None:
        assert given["num_kv_splits_indptr"].numel() == given["qo_indptr"].numel()
        Latent()(
            q=given["Q"], kv_buffer=given["KV"], o=given["output"], sm_scale=given["softmax_scale"],
            logit_cap=0.0, **{n: given[n] for n in ("qo_indptr", "kv_indptr")},
            kv_indices=given["kv_page_indices"], kv_last_page_lens=given["kv_last_page_lens"],
        )  # fmt: skip

    layer.get_meta_param = meta
    layer._fwd_kernel_stage2_asm = NoKernel()
    recorder.answers["mla_decode_stage1_asm_fwd"] = first_stage


def _quadruple(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    lse = given["return_softmax_lse"]
    found = function(
        **given, causal=given["is_causal"], return_lse=lse,
        window_size=(given["window_size_left"], given["window_size_right"]),
    )  # fmt: skip
    none = torch.empty(0)
    return (*found, none, none) if lse else (found, none, none, none)


class DecodeKernel:
    """The pointer-level stand-in, in the place where AITER renders and compiles the decode kernel's source.

    Attributes:
        arguments: What the last call was given.
        variant: What its kernel was compiled for.
    """

    def __init__(self, recorder: python_layer.Recorder) -> None:
        import csrc.cpp_itfs.pa.pa_v1 as module

        self.recorder, self.kernels, self.module = recorder, PaV1(), module
        self.arguments: tuple[Any, ...] = ()
        self.variant: dict[str, Any] = {}
        module.compile_template_op = self.compile

    def compile(self, template: Any, name: str, includes: Any, **variant: Any) -> Any:
        """Render the shipped source with the variant, and return the stand-in."""
        assert "void decode" in template.render(func_name="decode", **variant)
        module = f"{name} {variant['npar_loops']}"
        self.recorder.asked.append(module)
        variant.pop("folder")
        kernel = self.kernels(**variant)

        def run(*arguments: Any) -> None:
            self.arguments, self.variant = arguments, variant
            self.recorder.calls.append(python_layer.Call(module, "decode", {}))
            kernel(*map(_plain, arguments))

        return run

    def same_as_aiters_own(self) -> dict[str, Any]:
        """Call the kernel through our path and through AITER's function; return what each passed."""
        case = Case("pa_v1", "decode", dim=64, q_len=1, kv_len=300, dtype=_F16)
        metadata = table(case)
        data = tensors(case, metadata[1].numel())
        cache = torch.stack((data["k"], data["v"]), 1)  # halves of one pool: page strides tell
        data["k"], data["v"] = cache[:, 0], cache[:, 1]
        q = data["q"] = torch.randn(2, HEADS + 4, case.dim).to(case.dtype)[:, :HEADS]
        case.options = {"window_left": 31}
        out = torch.empty(2, HEADS, case.dim, dtype=case.dtype)
        ask(case, "aiter/pa_v1", metadata, data)(out=out)
        ours, variant = self.arguments, self.variant
        torch.cuda.get_device_properties = lambda d=None: types.SimpleNamespace(warp_size=64)  # type: ignore
        torch.cuda.current_stream = lambda d=None: 0  # type: ignore[assignment,return-value]
        one, pages = torch.ones(1), metadata[1].view(2, -1)
        lengths = torch.full((2,), case.kv_len, dtype=torch.int32)
        self.module.paged_attention_v1(
            out, torch.empty(1 << 20, dtype=torch.uint8), q, data["k"], data["v"], case.dim**-0.5, pages,
            None, lengths, case.kv_len, None, "auto", "NHD", 0.0, one, one, sliding_window=32,
        )  # fmt: skip
        return {
            "ours": list(map(_number, ours)), "theirs": list(map(_number, self.arguments)),
            "variants": [variant, self.variant],
        }  # fmt: skip


def _plain(argument: Any) -> Any:
    """Return a C argument as our path spells it: AITER also passes numbers, and pointers with a type."""
    if isinstance(argument, int):
        return ctypes.c_int(argument)
    return ctypes.cast(argument, ctypes.c_void_p) if isinstance(argument, ctypes._Pointer) else argument


def _number(argument: Any) -> Any:
    return _plain(argument).value or 0


def table(case: Case, requests: int = 2) -> tuple[torch.Tensor, ...]:
    """indptr, shuffled indices, last_page_len."""
    pages = -(-case.kv_len // case.page_size)
    indptr = torch.arange(requests + 1, dtype=torch.int32) * pages
    indices = torch.randperm(requests * pages).int()
    return indptr, indices, torch.full((requests,), (case.kv_len - 1) % case.page_size + 1, dtype=torch.int32)


def ask(case: Case, backend: str, metadata: tuple[torch.Tensor, ...], data: dict[str, torch.Tensor]) -> Any:
    """Return a closure that runs what was planned."""
    space = torch.empty(64 << 20, dtype=torch.uint8)
    qo = torch.arange(3, dtype=torch.int32) * case.q_len
    more = dict(case.options)
    types = {"q_data_type": case.dtype, "kv_data_type": case.dtype}
    wrapper: Any
    if case.kind == "paged":
        wrapper = attn_core.BatchPrefillWithPagedKVCacheWrapper(space, backend=backend)
        more = {"causal": True, **more, "needs_lse": case.lse}
        wrapper.plan(qo, *metadata, HEADS, KV_HEADS, case.dim, case.page_size, **types, **more)
        return lambda: wrapper.run(data["q"], (data["k"], data["v"]), return_lse=case.lse)
    if case.kind == "ragged":
        wrapper = attn_core.BatchPrefillWithRaggedKVCacheWrapper(space, backend=backend)
        kv = torch.arange(3, dtype=torch.int32) * case.kv_len
        more = {"causal": True, **more, "needs_lse": case.lse}
        wrapper.plan(qo, kv, HEADS, KV_HEADS, case.dim, **types, **more)
        return lambda: wrapper.run(data["q"], data["k"], data["v"], return_lse=case.lse)
    if case.kind == "latent":
        wrapper = attn_core.BatchMLAPagedAttentionWrapper(space, backend=backend)
        lengths = torch.full((2,), case.kv_len, dtype=torch.int32)
        wrapper.plan(qo, *metadata[:2], lengths, 16, 512, 64, 1, True, 0.1, case.dtype, case.dtype)
        q, cache = data["q"], data["k"]
        return lambda: wrapper.run(q[..., :512], q[..., 512:], cache[..., :512], cache[..., 512:])
    if case.kind == "single":
        half, tokens = data["q"][: case.q_len], case.kv_len
        return lambda: attn_core.single_prefill_with_kv_cache(
            half, data["k"][:tokens], data["v"][:tokens], causal=True, backend=backend, **more
        )
    wrapper = attn_core.BatchDecodeWithPagedKVCacheWrapper(space, backend=backend)
    wrapper.plan(*metadata, HEADS, KV_HEADS, case.dim, case.page_size, **types, **more)
    return lambda **to: wrapper.run(data["q"], (data["k"], data["v"]), **to)


def tensors(case: Case, pages: int) -> dict[str, torch.Tensor]:
    """Random q, and a cache or keys of two requests."""
    if case.kind == "latent":
        return {
            "q": torch.randn(2 * case.q_len, 16, 576).to(case.dtype),
            "k": torch.randn(pages, 1, 576).to(case.dtype),
        }
    paged = case.kind in ("paged", "decode", "append")
    front = (pages, case.page_size) if paged else (2 * case.kv_len,)
    shapes = {"q": (2 * case.q_len, HEADS), "k": (*front, KV_HEADS), "v": (*front, KV_HEADS)}
    return {name: torch.randn(*shape, case.dim).to(case.dtype) for name, shape in shapes.items()}


def append(
    case: Case, backend: str, metadata: tuple[torch.Tensor, ...], data: dict[str, torch.Tensor]
) -> Any:
    """Append the two last tokens of each request; return both caches."""
    k, v = data["k"].clone(), data["v"].clone()
    requests = torch.tensor([0, 0, 1, 1], dtype=torch.int32)
    positions = torch.tensor([case.kv_len - 2, case.kv_len - 1] * 2, dtype=torch.int32)
    rows = torch.arange(4 * KV_HEADS * case.dim).view(4, KV_HEADS, case.dim).to(case.dtype)
    indptr, indices, last = metadata
    attn_core.append_paged_kv_cache(
        rows, -rows, requests, positions, (k, v), indices, indptr, last, backend=backend
    )
    return k, v


def answer(case: Case, recorder: python_layer.Recorder) -> dict[str, Any]:
    """Plan and run one case with AITER, afresh, and with the oracle."""
    plugins.use(plugins.Registry((AiterBackend({"min_version": "0.1.0"}), ReferenceBackend()), (), (), {}))
    torch.manual_seed(0)
    metadata = table(case)
    data = tensors(case, metadata[1].numel())
    recorder.asked.clear()
    recorder.calls.clear()
    use = append if case.kind == "append" else ask
    found, want = (use(case, backend, metadata, data) for backend in (f"aiter/{case.path}", "reference"))
    planned = list(recorder.asked)
    found, want = (value() if callable(value) else value for value in (found, want))
    pairs = zip(found, want, strict=True) if isinstance(found, tuple) else [(found, want)]
    given = recorder.calls[-1].given.items()
    return {
        "modules": [call.module for call in recorder.calls],
        "late": recorder.asked[len(planned) :] if case.kind != "single" else [],
        "op": recorder.calls[-1].op,
        "given": {name: x for name, x in given if isinstance(x, bool | int | float | str)},
        "error": max(float((a.float() - b.float()).abs().max()) for a, b in pairs),
    }


def main() -> None:
    """Print the cases."""
    torch.set_num_threads(1)
    tree, arch = Path(sys.argv[1]), sys.argv[2]
    recorder = python_layer.install(tree, arch)
    answers(recorder)
    latent(recorder)
    decode = DecodeKernel(recorder)
    target = DeviceTarget("hip", arch, 304, 64)
    for module in (planner, page):
        module.target_of = lambda device: target  # type: ignore[attr-defined]
    for name, case in CASES.items():
        try:
            print(json.dumps({"case": name, **answer(case, recorder)}), flush=True)
        except (Exception, SystemExit) as err:
            print(json.dumps({"case": name, "raised": f"{type(err).__name__}: {err}"}), flush=True)
    print(json.dumps({"case": "arguments", **decode.same_as_aiters_own()}))


if __name__ == "__main__":
    main()
