"""Every kernel of a device against the oracle: what ``attn selftest`` runs and reports."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import cycle, islice
from typing import Any

import torch

from attn_core.page import append_paged_kv_cache
from attn_core.prefill import BatchPrefillWithPagedKVCacheWrapper
from attn_core.problem import AttentionProblem, MaskMode, Op, PagedKV
from attn_core.sampling import chain_speculative_sampling
from attn_core.target import DeviceTarget, target_of

from . import plan, toolchain, variants

NOTE = (
    "No AMD GPU was available to the authors: the code objects for gfx942 and gfx950 were compiled, measured "
    "for resources and interpreted instruction by instruction on a CPU. This report is what a real one says; "
    "please send it with an issue."
)
_PAGE, _KV_HEADS, _GROUP = 16, 2, 4
_WORKSPACE = 32 << 20
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
_LSE_TOLERANCE = 1e-2
_CPU_ROWS = (1, 4, 2)
_SPARE_KEYS = (0, 500, 37)


@dataclass(frozen=True, slots=True)
class Case:
    """One check.

    Attributes:
        kernel: Name of the code object, or of the path on the CPU.
        problem: What is asked.
        q_len: Query rows of each request.
    """

    kernel: str
    problem: AttentionProblem
    q_len: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """What a check found.

    Attributes:
        kernel: As of the case.
        about: What was computed.
        ok: Whether it agrees with the oracle.
        error: Largest difference of the output, or None where nothing was computed.
        lse_error: Largest difference of the log-sum-exp.
        seconds: Wall time, compilation included.
        said: What was raised.
    """

    kernel: str
    about: str
    ok: bool
    error: float | None
    lse_error: float | None
    seconds: float
    said: str | None = None


def problem_of(
    q: torch.dtype, kv: torch.dtype, dim: int, *, soft_cap: float = 0.0, mask: MaskMode = MaskMode.CAUSAL
) -> AttentionProblem:
    """Return a paged prefill of the self-test's heads and pages."""
    return AttentionProblem(
        op=Op.PREFILL_PAGED, num_qo_heads=_KV_HEADS * _GROUP, num_kv_heads=_KV_HEADS, head_dim_qk=dim,
        head_dim_vo=dim, q_dtype=q, kv_dtype=kv, o_dtype=q, kv=PagedKV(_PAGE), mask=mask,
        logits_soft_cap=soft_cap, sm_scale=dim**-0.5,
    )  # fmt: skip


def cases(target: DeviceTarget) -> list[Case]:
    """Return one case for every attention kernel of a device, two for the CPU's types."""
    halves = (torch.float16, torch.bfloat16)
    if target.kind == "cpu":
        types = (torch.float32, *halves)
        return [Case("cpu", problem_of(t, t, d), _CPU_ROWS) for t in types for d in (64, 128)]
    fp8 = torch.float8_e4m3fnuz if target.arch == "gfx942" else torch.float8_e4m3fn
    found: dict[str, Case] = {}
    for q in halves:
        for dim in variants.HEAD_DIMS:
            for kv, cap in ((q, 0.0), (fp8, 0.0), (q, 20.0), (fp8, 20.0)):
                problem = problem_of(q, kv, dim, soft_cap=cap)
                tallest = max(variants.tiles(target.arch, problem))
                for kernel in variants.attend_choices(target.arch, problem):
                    rows = rows_of(kernel, tallest, target)
                    found.setdefault(kernel.name, Case(kernel.name, problem, rows))
    return [found[v.name] for v in variants.attend_variants(target.arch) if v.name in found]


def rows_of(kernel: variants.Variant, tallest: int, target: DeviceTarget) -> tuple[int, ...]:
    """Return query rows of requests from which a plan takes a kernel.

    Unlike ones of three requests fill its tile on average; the tallest is taken for whatever is longer by
    far, and one that is taller yet for what is not short. Like ones of many requests are taken by paired
    blocks, one for each compute unit.
    """
    tile = kernel.tile_q
    if kernel.blocks == 1:
        return (tile // _GROUP - 1,) * (target.num_cus // _KV_HEADS)
    mean = (4 * tile if tile == tallest else tile) // _GROUP
    if tile > variants.PAIRED_ROWS:
        mean = max(mean, plan.SHORT_KV // 2 + 1)
    return 2 * mean - 1, 1, mean


def kv_len_of(case: Case) -> tuple[int, ...]:
    """Return the keys of each request."""
    spare = islice(cycle(_SPARE_KEYS), len(case.q_len))
    return tuple(q + more for q, more in zip(case.q_len, spare, strict=True))


def run(device: torch.device, done: Callable[[Result], None] | None = None) -> list[Result]:
    """Run every check; a check that raises is a result and stops no other.

    Args:
        device: Where.
        done: Told of every result.
    """
    results = []
    for result in _results(device):
        results.append(result)
        if done is not None:
            done(result)
    return results


def total(target: DeviceTarget) -> int:
    """Return how many checks :func:`run` makes."""
    return len(cases(target)) + 2


def _results(device: torch.device) -> Iterator[Result]:
    for case in cases(target_of(device)):
        p = case.problem
        about = f"q {_name(p.q_dtype)}, k/v {_name(p.kv_dtype)}, head_dim {p.head_dim_qk}, {_lengths(case)}"
        if p.logits_soft_cap:
            about += ", soft cap"
        yield _timed(case.kernel, about, lambda case=case: _attend(case, device))  # type: ignore[misc]
    yield _timed("append", "bfloat16 rows into pages", lambda: _append(device))
    yield _timed("chain_sample", "tokens that differ, of chains of 3 drafts", lambda: _sample(device))


Errors = tuple[float, float | None, bool]


def _timed(kernel: str, about: str, check: Callable[[], Errors]) -> Result:
    start = time.monotonic()
    try:
        error, lse_error, ok = check()
    except Exception as err:
        said = f"{type(err).__name__}: {' '.join(str(err).split())}"
        return Result(kernel, about, False, None, None, round(time.monotonic() - start, 2), said)
    return Result(kernel, about, ok, error, lse_error, round(time.monotonic() - start, 2))


def _attend(case: Case, device: torch.device) -> Errors:
    p, q_len = case.problem, case.q_len
    kv_len = kv_len_of(case)
    pages = [-(-n // _PAGE) for n in kv_len]
    make = torch.Generator().manual_seed(1)
    shape = (sum(pages), _PAGE, _KV_HEADS, p.head_dim_qk)
    k, v = (torch.randn(shape, generator=make).to(p.kv_dtype) for _ in range(2))
    q = (torch.randn(sum(q_len), p.num_qo_heads, p.head_dim_qk, generator=make) * 2).to(p.q_dtype)
    index = (
        torch.tensor([0, *q_len]).cumsum(0).int(),
        torch.tensor([0, *pages]).cumsum(0).int(),
        torch.randperm(sum(pages), generator=make).int(),
        torch.tensor([n - (m - 1) * _PAGE for n, m in zip(kv_len, pages, strict=True)]).int(),
    )
    cpu = torch.device("cpu")
    wide = q.float(), k.float(), v.float()
    want, want_lse = _paged(cpu, "reference", p, torch.float32, torch.float32, index, wide)
    found, lse = _paged(device, "fa2", p, p.q_dtype, p.kv_dtype, index, (q, k, v))
    error = float((found.cpu().float() - want).abs().max())
    lse_error = float((lse.cpu() - want_lse).abs().max())
    return error, lse_error, error <= _TOLERANCE[p.q_dtype] and lse_error <= _LSE_TOLERANCE


def _paged(
    device: torch.device,
    backend: str,
    p: AttentionProblem,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    index: tuple[torch.Tensor, ...],
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> Any:
    space = torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(space, backend=backend)
    qo_indptr, kv_indptr, kv_indices, last_page_len = index
    wrapper.plan(
        qo_indptr, kv_indptr, kv_indices, last_page_len, p.num_qo_heads, p.num_kv_heads, p.head_dim_qk,
        _PAGE, causal=p.mask is MaskMode.CAUSAL,
        logits_soft_cap=p.logits_soft_cap, q_data_type=q_dtype, kv_data_type=kv_dtype,
    )  # fmt: skip
    q, k, v = (t.to(device) for t in tensors)
    return wrapper.run(q, (k, v), return_lse=True)


def _append(device: torch.device) -> Errors:
    rows = torch.randn(2, 5, _KV_HEADS, 64, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    index = [
        torch.tensor(values, dtype=torch.int32)
        for values in ([0, 1, 1, 0, 1], [31, 0, 16, 2, 3], [3, 0, 2, 1], [0, 2, 4], [16, 16])
    ]
    caches = []
    for where, backend in ((torch.device("cpu"), "reference"), (device, "fa2")):
        cache = torch.zeros(4, 2, _PAGE, _KV_HEADS, 64, dtype=torch.bfloat16, device=where)
        batch, positions, ids, indptr, last = (t.to(where) for t in index)
        append_paged_kv_cache(
            rows[0].to(where), rows[1].to(where), batch, positions, cache, ids, indptr, last, backend=backend
        )
        caches.append(cache.cpu().float())
    error = float((caches[0] - caches[1]).abs().max())
    return error, None, error == 0.0


def _sample(device: torch.device) -> Errors:
    make = torch.Generator().manual_seed(3)
    draft = torch.randn(32, 3, 5000, generator=make).softmax(-1)
    target = torch.randn(32, 4, 5000, generator=make).softmax(-1)
    target[:, :3] = 0.6 * draft + 0.4 * target[:, :3]
    ids = torch.randint(0, 5000, (32, 3), generator=make)
    seed, offset = torch.arange(32), torch.tensor([1 << 40])
    found = []
    for where, backend in ((torch.device("cpu"), "reference"), (device, "fa2")):
        d, i, t, s, o = (x.to(where) for x in (draft, ids, target, seed, offset))
        tokens = chain_speculative_sampling(d, i, t, seed=s, offset=o, backend=backend)
        found.append(torch.cat([x.reshape(-1).cpu() for x in tokens]))
    wrong = float((found[0] != found[1]).sum())
    return wrong, None, wrong == 0


def report(device: torch.device, results: list[Result]) -> dict[str, object]:
    """Return everything somebody who has no such device wants to know."""
    target = target_of(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
    compilers = (
        [c.name + ", " + c.version for c in toolchain.compilers(target.arch)] if target.kind != "cpu" else []
    )
    return {
        "note": NOTE if target.kind == "hip" else None,
        "device": {"name": name, **asdict(target)},
        "versions": {
            "attn-core": version("attn-core"), "attn-hip": version("attn-hip"), "torch": torch.__version__,
            "hip": torch.version.hip, "cuda": torch.version.cuda, "python": platform.python_version(),
            "system": platform.platform(),
        },
        "compilers": compilers,
        "passed": sum(result.ok for result in results),
        "failed": sum(not result.ok for result in results),
        "results": [asdict(result) for result in results],
    }  # fmt: skip


def _lengths(case: Case) -> str:
    same = len(set(case.q_len)) == 1
    return f"{len(case.q_len)} x q_len {case.q_len[0]}" if same else f"q_len {case.q_len}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
