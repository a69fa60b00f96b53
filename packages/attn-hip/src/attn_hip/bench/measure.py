"""Turns of fa2 and its peers on one cell, after every answer was checked against the float64 oracle."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from attn_core.problem import AttentionProblem, MaskMode, Op, PagedKV
from attn_core.testing.oracle import Request, Scales, attention

from . import flex
from .cells import DIM, KV_HEADS, PAGE, Cell
from .world import Call, World, fa2, read

FA2, READ = "fa2", "read"
GATHER, CONTIGUOUS, FLEX = "gather + SDPA", "contiguous SDPA", "Flex paged"
PEERS = (GATHER, CONTIGUOUS, FLEX)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Largest error over largest value, by the type of the query."""
_MOST_REPEATS = 4


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure a cell.

    Attributes:
        seconds: Rounds go on for so long ...
        least: ... but there are at least so many,
        most: and at most so many.
    """

    seconds: float
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Result:
    """Medians of one cell.

    Attributes:
        cell: The batch.
        ms: Milliseconds by call.
        samples: Timings behind each median.
        error: Largest error of fa2 over the largest value, against the oracle.
        threads: Threads of every call.
    """

    cell: Cell
    ms: Mapping[str, float]
    samples: Mapping[str, int]
    error: float
    threads: int

    @property
    def gb_s(self) -> float:
        """fa2's rate over keys and values."""
        return self.cell.kv_bytes / self.ms[FA2] / 1e6

    @property
    def gflop_s(self) -> float:
        """fa2's arithmetic rate."""
        return self.cell.flops / self.ms[FA2] / 1e6

    @property
    def read_share(self) -> float:
        """fa2's rate over the keys and values, as a share of the rate at which they can be read."""
        return self.ms[READ] / self.ms[FA2]

    def ratio(self, peer: str) -> float | None:
        """Time of a peer over time of fa2, or None where it was not asked."""
        return self.ms[peer] / self.ms[FA2] if peer in self.ms else None


class Wrong(Exception):
    """An answer is not the oracle's."""


def measure(cell: Cell, effort: Effort, *, with_flex: bool = True) -> Result:
    """Check and time one cell on torch's number of threads.

    Raises:
        Wrong: fa2 or a peer gave a wrong answer; nothing was timed.
    """
    world = World(cell)
    calls = {FA2: fa2(world)}
    calls[GATHER] = lambda copy: world.sdpa(world.gather(world.caches[copy]))
    calls[CONTIGUOUS] = lambda copy: world.sdpa(world.dense[copy])
    if with_flex and flex.serves(world):
        calls[FLEX] = flex.paged(world)
    error = _checked(world, calls)
    calls[READ] = read(world)
    found = _turns(calls, cell.copies, effort)
    ms = {name: statistics.median(times) for name, times in found.items()}
    samples = {name: len(times) for name, times in found.items()}
    return Result(cell, ms, samples, error, torch.get_num_threads())


def _turns(calls: Mapping[str, Call], copies: int, effort: Effort) -> dict[str, list[float]]:
    """Time every call in turn, forwards and backwards; quick ones a few times per round."""
    once = {name: _timed(call, at % copies) for at, (name, call) in enumerate(calls.items())}
    slowest = max(once.values())
    repeats = {name: max(1, min(_MOST_REPEATS, int(slowest / ms / 4))) for name, ms in once.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    copy, end = len(calls), time.perf_counter() + effort.seconds
    for number in range(effort.most):
        if number >= effort.least and time.perf_counter() > end:
            break
        for name in list(calls) if number % 2 else list(reversed(list(calls))):
            for _ in range(repeats[name]):
                times[name].append(_timed(calls[name], copy % copies))
                copy += 1
    return times


def _timed(call: Call, copy: int) -> float:
    start = time.perf_counter()
    call(copy)
    return (time.perf_counter() - start) * 1e3


def _checked(world: World, calls: Mapping[str, Call]) -> float:
    """Compare samples of each answer with the oracle, and all of it with fa2's; returns fa2's error."""
    allowed = TOLERANCE[world.cell.dtype]
    errors: dict[str, float] = {}
    mine = calls[FA2](0).clone()
    for name, call in calls.items():
        got = mine if name == FA2 else call(0)
        errors[name] = max(oracle_error(world, got), _distance(got, mine) - allowed)
    for name, error in errors.items():
        if not error <= allowed:  # also a NaN
            raise Wrong(f"{world.cell.label}: {name} is off by {error:.2g} of the largest value")
    return errors[FA2]


def _distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


def oracle_error(world: World, got: torch.Tensor) -> float:
    """Return the largest error over the largest value, for the first and last request and KV head."""
    c, group = world.cell, world.cell.num_qo_heads // KV_HEADS
    rows = got.view(c.batch, c.q_len, KV_HEADS, group, DIM)
    q = world.q.view(c.batch, c.q_len, KV_HEADS, group, DIM)
    worst = 0.0
    for request in sorted({0, c.batch - 1}):
        k, v = _keys(world, request)
        for head in (0, KV_HEADS - 1):
            asked = Request(q[request, :, head], k[head][:, None], v[head][:, None])
            want, _ = attention(_problem(c), [asked], Scales())
            error = (rows[request, :, head].double() - want).abs().max() / want.abs().max()
            worst = max(worst, float(error)) if error == error else float("nan")
            if worst != worst:
                return worst
    return worst


def _keys(world: World, request: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V ``[num_kv_heads, kv_len, head_dim]`` of a request, from its pages."""
    c = world.cell
    ids = torch.split(world.ids, list(c.pages))[request]
    k, v = (
        cache[ids].view(-1, KV_HEADS, DIM)[: c.kv_lens[request]].transpose(0, 1) for cache in world.caches[0]
    )
    return k, v


def _problem(cell: Cell) -> AttentionProblem:
    """Return the question of one KV head."""
    group = cell.num_qo_heads // KV_HEADS
    made = AttentionProblem(
        op=Op.DECODE, num_qo_heads=group, num_kv_heads=1, head_dim_qk=DIM, head_dim_vo=DIM,
        q_dtype=cell.dtype, kv_dtype=cell.kv_dtype, o_dtype=cell.dtype, kv=PagedKV(PAGE), sm_scale=DIM**-0.5,
    )  # fmt: skip
    return replace(made, op=Op.PREFILL_PAGED, mask=MaskMode.CAUSAL) if cell.causal else made
