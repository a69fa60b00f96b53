"""The matrix: layouts x programs x modes, each cell compared with eager bit for bit.

A backend package tests itself with two lines::

    @pytest.mark.parametrize("cell", matrix.cells(), ids=str)
    def test_compiled(cell): matrix.check(cell, backend="mine")

and ``python -m attn_compile.testing --backend mine --all`` runs the full grid.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._dynamo import reset
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config

from attn_core import BatchDecodeWithPagedKVCacheWrapper

from .. import defects
from .copies import Allocations
from .layouts import LAYOUTS, Allocation, Layout, allocate
from .programs import PROGRAMS, Region

MODES: dict[str, tuple[bool | None, tuple[tuple[int, int], ...]]] = {
    "static": (False, ((8, 3),)),
    "default": (None, ((8, 3),)),
    "dynamic": (True, ((8, 3),)),
    "automatic": (None, ((8, 3), (12, 5), (16, 7), (20, 4))),
}
"""``torch.compile(dynamic=)``, and the (pages, requests) that one compiled function meets in turn."""
GRADS = {"no_grad": torch.no_grad, "grad": torch.enable_grad, "inference": torch.inference_mode}
HEADS, KV_HEADS, DIM, PAGE_SIZE = 4, 2, 16, 4
Verdict = Literal["exact", "refused", "wrong", "copied", "error"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One program on one layout in one mode."""

    program: str
    layout: str
    mode: str
    grad: str = "no_grad"

    def __str__(self) -> str:
        return f"{self.program}-{self.layout}-{self.mode}-{self.grad}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a cell.

    Attributes:
        verdict: ``exact``; ``refused`` by a named error; ``wrong`` numbers or bytes; ``copied`` a cache;
            ``error``, any other exception.
        detail: What differed, or the message.
        known: The known defect of this torch that explains a refusal, or None.
    """

    verdict: Verdict
    detail: str = ""
    known: str | None = None

    @property
    def good(self) -> bool:
        """Whether it is exact, or refused where this torch is known to leave no right answer."""
        return self.verdict == "exact" or (self.verdict == "refused" and self.known is not None)


def every() -> list[Cell]:
    """Return the full grid. Grad modes alternate along it, so that each meets every other choice."""
    names = list(GRADS)
    grid = [(p, x, m) for p in PROGRAMS for x in LAYOUTS for m in MODES]
    return [Cell(*cell, names[at % len(names)]) for at, cell in enumerate(grid)]


def cells() -> list[Cell]:
    """Return about 60 cells for a package's own tests: every layout, program, mode and grad mode.

    The mixed program under automatic dynamic shapes, on which most declarations fail, meets every layout.
    """
    chosen = [Cell("mixed", layout, "automatic") for layout in LAYOUTS]
    names, modes, grads = list(LAYOUTS), ("dynamic", "static"), list(GRADS)
    others = [program for program in PROGRAMS if program != "mixed"]
    for at in range(5 * len(others)):
        layout = names[(at * 7 + at // len(names)) % len(names)]
        chosen.append(Cell(others[at % len(others)], layout, modes[at // len(others) % 2], grads[at % 3]))
    return list(dict.fromkeys(chosen))


def probe() -> list[Cell]:
    """Return ten cells for ``attn doctor``: what users do most, and what torch gets wrong most."""
    given = ("separate", "kv[i]", "one", "view pool", "pool[1,i]")
    inside = ("kv[i] inside", "pool pair inside")
    return [
        *(Cell("mixed", layout, "automatic") for layout in given),
        *(Cell("append_read", layout, "dynamic") for layout in inside),
        Cell("read", "kv[i] inside", "static"),
        Cell("out", "view halves", "automatic"),
        Cell("plain", "kv[:,i]", "dynamic"),
    ]


def check(cell: Cell, backend: str = "auto", device: str = "cpu") -> Outcome:
    """Run a cell; for tests.

    Raises:
        AssertionError: It is neither exact nor refused for a defect this torch is known to have.
    """
    found = run(cell, backend, device)
    assert found.good, f"{cell}: {found.verdict} {found.detail}"
    return found


def run(cell: Cell, backend: str = "auto", device: str = "cpu") -> Outcome:
    """Run a cell and say what became of it. Turns torch's disk caches of graphs off meanwhile."""
    reset()
    patches: list[AbstractContextManager[Any]] = [
        inductor_config.patch(fx_graph_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
        GRADS[cell.grad](),
    ]
    with patches[0], patches[1], patches[2]:
        try:
            return _compare(cell, backend, torch.device(device)) or Outcome("exact")
        except Exception as err:
            return _failed(cell, err)


def _failed(cell: Cell, err: Exception) -> Outcome:
    text = " ".join(str(err).split())
    if not re.search(r"\b(MisplacedArgument|CacheCopy)\b", text):
        return Outcome("error", f"{type(err).__name__}: {text[:300]}")
    made, program = LAYOUTS[cell.layout].made, cell.program
    return Outcome("refused", text[:300], defects.explains(made, program, cell.mode))


def _compare(cell: Cell, backend: str, device: torch.device) -> Outcome | None:
    layout, (dynamic, sizes) = LAYOUTS[cell.layout], MODES[cell.mode]
    workspace = torch.empty(1 << 16, dtype=torch.uint8, device=device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, layout.order, backend=backend)
    region = Region(wrapper, layout.order, backend)
    program = PROGRAMS[cell.program]

    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: Any, *given: torch.Tensor) -> Any:
        return program(region, q, k, v, layout.inside(*given), at)

    compiled = torch.compile(f, fullgraph=True, dynamic=dynamic)
    for seed, (pages, requests) in enumerate(sizes):
        torch.manual_seed(seed)
        at = _plan(wrapper, pages, requests, device)
        q = torch.randn(requests, HEADS, DIM, device=device)
        k, v = (torch.randn(requests, KV_HEADS, DIM, device=device) for _ in "kv")
        mine, theirs = allocate(layout, pages, device), allocate(layout, pages, device)
        for (a, _), (b, _) in zip(mine, theirs, strict=True):
            b.copy_(a)
        for step in range(2):
            args = (q, k + step, v + step, at)
            want = f(*args, *layout.outside([t for _, t in mine]))
            with Allocations() as seen:
                got = compiled(*args, *layout.outside([t for _, t in theirs]))
            fault = _difference(got, want, mine, theirs)
            if fault is not None:
                return Outcome("wrong", f"{fault} at {pages} pages, call {step}")
            if copied := seen.at_least(_cache_bytes(layout, pages)):
                return Outcome("copied", f"{copied} allocations as large as the cache per call")
    return None


def _plan(wrapper: Any, pages: int, requests: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Plan a random page table; return it as ``Region.append`` takes it."""
    cuts = torch.randperm(pages - 1)[: requests - 1].sort().values + 1
    indptr = torch.cat([torch.zeros(1), cuts, torch.full((1,), pages)]).int()
    indices = torch.randperm(pages).int()
    last = torch.randint(2, PAGE_SIZE + 1, (requests,)).int()
    wrapper.plan(
        indptr, indices, last, HEADS, KV_HEADS, DIM, PAGE_SIZE, q_data_type=torch.float32, needs_lse=True
    )
    positions = (indptr.diff() - 1) * PAGE_SIZE + last - 1
    table = (torch.arange(requests).int(), positions, positions - 1, indices, indptr, last)
    return tuple(t.to(device) for t in table)


def _cache_bytes(layout: Layout, pages: int) -> int:
    """Bytes of the keys alone: the least that a copy of the cache takes."""
    return pages * PAGE_SIZE * KV_HEADS * DIM * 4


def _difference(got: Any, want: Any, mine: Sequence[Allocation], theirs: Sequence[Allocation]) -> str | None:
    pairs = zip(*((x,) if isinstance(x, torch.Tensor) else tuple(x) for x in (got, want)), strict=True)
    for at, (g, w) in enumerate(pairs):
        if not torch.equal(g, w):
            return f"output {at} differs by {(g - w).abs().max().item():.3g}"
    for at, ((a, _), (b, _)) in enumerate(zip(mine, theirs, strict=True)):
        if not torch.equal(a.view(torch.int32), b.view(torch.int32)):
            return f"cache allocation {at} differs by {(a - b).abs().max().item():.3g}"
    return None
