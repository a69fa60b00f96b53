"""From the options of ``attn tune`` to layers, batches and pairs of candidates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from .. import route
from ..batch import BatchShape
from ..errors import needs
from ..plugins import Registry
from ..problem import AttentionProblem, Op
from ..query import Query
from ..reasons import Stage
from ..target import DeviceTarget, target_of
from ..tune.workload import Shape, check_problem
from .ask import Options, ask


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Options as typed; None where one was not given."""

    pair: Sequence[str] = ()
    op: str | None = None
    heads: str | None = None
    head_dim: str | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    layout: str | None = None
    page_size: str | None = None
    mask: str | None = None
    window: str | None = None
    soft_cap: str | None = None
    batch: str | None = None
    q_len: str | None = None
    kv_len: str | None = None
    device: str | None = None
    quick: bool = False


_LAYER = ("op", "head_dim", "dtype", "kv_dtype", "layout", "page_size", "mask", "window", "soft_cap")
_Axes = Mapping[str, tuple[int, ...]]
_DOUBLING = tuple(2**n for n in range(10))
_GPU: _Axes = {"batch": (16,), "kv_len": (512, 2048, 8192, 32768), "q_len": _DOUBLING}
_CPU: _Axes = {"batch": (2,), "kv_len": (256, 1024, 4096), "q_len": (1, 4, 16, 64, 256)}
_QUICK_GPU: _Axes = {"batch": (16,), "kv_len": (1024, 8192), "q_len": (1, 8, 64, 512)}
_QUICK_CPU: _Axes = {"batch": (2,), "kv_len": (256, 1024), "q_len": (1, 16, 64)}


@dataclass(frozen=True, slots=True)
class Grid:
    """What will be measured.

    Attributes:
        device: Where.
        target: Its description.
        problems: Layers, one per head count.
        shapes: Batches of each.
        pairs: Candidates, two by two, in the order ``auto`` tries them.
        refine: Add cells between two with different winners.
    """

    device: torch.device
    target: DeviceTarget
    problems: tuple[AttentionProblem, ...]
    shapes: tuple[Shape, ...]
    pairs: tuple[tuple[str, str], ...]
    refine: bool

    @property
    def cells(self) -> int:
        """Cells of the grid, those that refining adds left out."""
        return len(self.problems) * len(self.shapes) * len(self.pairs)


def grid(wanted: Wanted, registry: Registry, *, pairs_needed: bool = True) -> Grid:
    """Return the grid.

    Args:
        wanted: As typed.
        registry: Installed backends.
        pairs_needed: Refuse when no pair is named and no rule has a gate.

    Raises:
        ValueError: An option does not fit, or there is nothing to compare.
    """
    device = device_of(wanted.device)
    target = target_of(device)
    axes = _axes(wanted, device)
    problems, shapes = [], []
    layer = {name: getattr(wanted, name) for name in _LAYER}
    most = str(axes["batch"][-1])
    layer["op"] = layer["op"] or Op.PREFILL_PAGED.value
    # Said once more than asked: every refusal of a layer or a size reads as that of attn explain.
    for heads in (wanted.heads or "32/8").split(","):
        for kv_len in axes["kv_len"]:
            q_lens = [q for q in axes["q_len"] if q <= kv_len and (layer["op"] != "verify" or q > 1)]
            for q_len in q_lens:
                query = ask(
                    Options(heads=heads.strip(), q_len=str(q_len), kv_len=str(kv_len), batch=most, **layer),
                    (),
                )
            problems += [query.problem] if q_lens else []
            shapes += [Shape(b, kv_len, q_len) for b in axes["batch"] for q_len in q_lens]
    if not shapes:
        raise ValueError(needs("--q-len", "one of at most --kv-len", wanted.q_len, "cli.q-len"))
    layers, batches = tuple(dict.fromkeys(problems)), tuple(sorted(set(shapes)))
    check_problem(layers[0])
    pairs = _pairs(wanted.pair, target, layers[0], batches[0], registry, needed=pairs_needed)
    return Grid(device, target, layers, batches, pairs, refine=not wanted.quick)


def device_of(stated: str | None) -> torch.device:
    """Return the device of ``--device``: the first GPU, else the CPU, if none is stated.

    Raises:
        ValueError: It is none of this machine's.
    """
    if stated is None:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(stated)
    except RuntimeError:
        raise ValueError(needs("--device", "a torch device", repr(stated), "cli.device")) from None
    have = torch.cuda.device_count() if device.type == "cuda" else int(device.type == "cpu")
    if (device.index or 0) >= have:
        raise ValueError(needs("--device", "a device of this machine", repr(stated), "cli.device"))
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _axes(wanted: Wanted, device: torch.device) -> _Axes:
    kinds = (_QUICK_GPU, _QUICK_CPU) if wanted.quick else (_GPU, _CPU)
    axes = dict(kinds[device.type == "cpu"])
    if wanted.op == Op.DECODE.value:
        axes["q_len"] = (1,)
    for name in axes:
        given = getattr(wanted, name)
        if given is not None:
            axes[name] = _sizes("--" + name.replace("_", "-"), given)
    return axes


def _sizes(flag: str, given: str) -> tuple[int, ...]:
    """``1,2,4`` as ascending numbers, each once."""
    words = [word.strip() for word in given.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
        raise ValueError(
            needs(flag, "whole numbers of 1 or more with commas", repr(given), f"cli.{flag[2:]}")
        )
    return tuple(sorted({int(word) for word in words}))


def _pairs(
    stated: Sequence[str],
    target: DeviceTarget,
    problem: AttentionProblem,
    shape: Shape,
    registry: Registry,
    *,
    needed: bool,
) -> tuple[tuple[str, str], ...]:
    able = _able(target, problem, shape, registry)
    names = [candidate.name for candidate in able]
    found = [_stated(text, names) for text in stated] or _gated(able)
    if not found and needed:
        want = f"A,B out of {', '.join(names)}, since no routing gate applies here"
        raise ValueError(needs("--pair", want, "none", "cli.pair"))
    ordered = [tuple(sorted(pair, key=names.index)) for pair in found]
    return tuple(dict.fromkeys((a, b) for a, b in ordered))


def _able(
    target: DeviceTarget, problem: AttentionProblem, shape: Shape, registry: Registry
) -> list[route.Candidate]:
    """Candidates that can serve the layer here, whatever their preferences, in the order of ``auto``."""
    screened = route.screen(target, problem, registry.backends)
    asked = Query(target, problem, batch_of(problem, shape))
    refused = {
        verdict.candidate
        for verdict in route.explain(screened, asked)
        if any(reason.code.stage is not Stage.PREFERENCE for reason in verdict.refusals)
    }
    return [candidate for candidate in screened.candidates if candidate.name not in refused]


def batch_of(problem: AttentionProblem, shape: Shape) -> BatchShape:
    """Return the integers of a batch of equal requests."""
    pages = 0 if problem.page_size is None else -(-shape.kv_len // problem.page_size)
    return BatchShape(
        batch_size=shape.batch_size,
        total_q=shape.batch_size * shape.q_len,
        max_q_len=shape.q_len,
        uniform_q_len=shape.q_len,
        max_kv_len=shape.kv_len,
        total_kv=shape.batch_size * shape.kv_len,
        total_pages=shape.batch_size * pages,
    )


def _stated(text: str, names: list[str]) -> tuple[str, str]:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or parts[0] == parts[1]:
        raise ValueError(needs("--pair", "two candidates A,B that differ", repr(text), "cli.pair"))
    for part in parts:
        if part not in names:
            raise ValueError(
                needs("--pair", f"candidates that can serve here ({', '.join(names)})", part, "cli.pair")
            )
    return parts[0], parts[1]


def _gated(able: list[route.Candidate]) -> list[tuple[str, str]]:
    """Every candidate with a gate of its own, against the first of another backend without one."""
    found = []
    for candidate in able:
        if not any(rule.gate for rule in candidate.rules):
            continue
        others = [
            other.name
            for other in able
            if other.backend is not candidate.backend and not any(rule.gate for rule in other.rules)
        ]
        found += [(candidate.name, others[0])] if others else []
    return found
