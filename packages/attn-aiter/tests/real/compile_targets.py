"""Compile what the path ``unified`` would launch with Triton's own AMD backend, with no GPU and no ROCm.

    python compile_targets.py TREE ARCH        (PYTHONPATH: this folder)

The route runs as it would on the device; where Triton would launch, the kernel is compiled for ``ARCH`` with
the arguments and options of that launch. Prints one JSON object per kernel.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import torch
import triton_layer
from triton_cases import Case, asked, tensors

from attn_aiter import rows, warm
from attn_core.backend import RunIO
from attn_core.plan_image import index_parts
from attn_core.problem import Op
from attn_core.query import Query
from attn_core.target import DeviceTarget

_TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32"}
_OPTIONS = ("num_warps", "num_stages", "waves_per_eu")
_HEADS = {"heads": (32, 8)}
CASES: dict[str, Case] = {
    **{
        f"decode, page {page}, head_dim {dim}": (Op.DECODE, 1, [400] * 8, page, {"dim": dim, **_HEADS})
        for page, dim in ((16, 128), (32, 128), (64, 64), (64, 128), (64, 256))
    },
    "decode split over keys": (Op.DECODE, 1, [5000], 16, {"dim": 128, **_HEADS}),
    "verify with window and soft cap": (
        Op.VERIFY, 4, [90], 64, {"dim": 128, "window_left": 31, "logits_soft_cap": 30.0, **_HEADS}
    ),
    "prefill": (Op.PREFILL_PAGED, torch.tensor([0, 300]), [400], 64, {"dim": 128, **_HEADS}),
}  # fmt: skip


def compiled(kernel: Any, keywords: dict[str, Any], arch: str) -> Any:
    """Compile a kernel for the arguments of a launch."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants = {}, {}
    for parameter in kernel.params:
        value = keywords.get(parameter.name, parameter.default)
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _TYPES[value.dtype]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i64" if "stride" in parameter.name else "i32"
    options = {name: keywords[name] for name in _OPTIONS if name in keywords}
    target = GPUTarget("hip", arch, 64)
    return triton.compile(ASTSource(kernel, signature, constants), target=target, options=options)


def elf(binary: bytes) -> dict[str, int]:
    """Machine and flags of an ELF file."""
    assert binary[:4] == b"\x7fELF"
    (machine,) = struct.unpack_from("<H", binary, 18)
    (flags,) = struct.unpack_from("<I", binary, 48)
    return {"machine": machine, "flags": flags}


def main() -> None:
    """Print the kernels."""
    torch.set_num_threads(1)
    tree, arch = Path(sys.argv[1]), sys.argv[2]
    target = DeviceTarget("hip", arch, 304, 64)
    triton_layer.isolate(tree, arch)
    triton_layer.fake_driver(arch)
    warm.call = lambda *a: None  # type: ignore[assignment]
    backend = triton_layer.backend(tree)
    launches: list[tuple[Any, dict[str, Any]]] = []

    def launch(run: Any, kernel: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        names = [parameter.name for parameter in kernel.params]
        launches.append((kernel, {**dict(zip(names, arguments, strict=False)), **keywords}))

    triton_layer.at_launch(launch)
    for name, case in CASES.items():
        problem, batch = asked(case, torch.bfloat16)
        q, k, v = tensors(problem, batch)
        result = backend.plan(Query(target, problem, batch.shape), rows.UNIFIED, batch)
        backend.run(result.launch, index_parts(batch, None, result), RunIO(q, k, v, torch.empty_like(q)))
        for kernel, keywords in launches:
            said = {"case": name, "kernel": kernel.fn.__name__}
            try:
                made = compiled(kernel, keywords, arch)
            except Exception as err:
                print(json.dumps({**said, "raised": f"{type(err).__name__}: {err}"}), flush=True)
                continue
            text = made.asm["amdgcn"]
            spills = sum(int(line.split()[-1]) for line in text.splitlines() if "spill_count:" in line)
            facts = {"shared": made.metadata.shared, "spills": spills, "mfma": text.count("v_mfma")}
            print(json.dumps({**said, **facts, **elf(made.asm["hsaco"])}), flush=True)
        launches.clear()


if __name__ == "__main__":
    main()
