"""Backends with a clock of their own: right results, made-up times."""

import torch

from attn_core import plugins
from attn_core.backend import Path, PlanResult
from attn_core.measured import Bucket, Cell, Measured, Pair, Scope
from attn_core.reference import CAPABILITY, ReferenceBackend
from attn_core.tune import timing

from .cli_kit import attn

torch.set_num_threads(1)
LAYER = ("--heads", "2/1", "--head-dim", "8", "--dtype", "fp32", "--page-size", "4")
GRID = ("--q-len", "1,4,16,64", "--kv-len", "64,256", "--batch", "2")
FACTS = (
    ("kind", "measured"),
    ("source", "a test"),
    ("statistic", "median"),
    ("grid", "small"),
    ("versions", "attn-core 0"),
    ("device", "a desk"),
    ("date", "today"),
)


class Clock:
    """Seconds that pass only when a backend says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Timed(ReferenceBackend):
    """The reference under another name, which takes ``cost(q_len, kv_len)`` seconds by a given clock.

    Args:
        name: Backend name.
        clock: What passes.
        cost: Seconds of a run.
        rank: Place under ``auto``.
        rules: Its rules.
        fault: Called with the tensors after every run.
    """

    def __init__(self, name, clock, cost, *, rank=10, rules=(), fault=None, able=CAPABILITY):
        self.name, self.rank, self.rules = name, rank, tuple(rules)
        self.paths = (Path("p", able),)
        self.clock, self.cost, self.fault = clock, cost, fault
        self.planned = []

    def plan(self, query, path, batch):
        shape = query.batch
        self.planned.append((shape.batch_size, shape.max_q_len, shape.max_kv_len))
        inner = super().plan(query, path, batch)
        return PlanResult((inner.launch, shape.max_q_len, shape.max_kv_len))

    def run(self, launch, image, io):
        inner, q_len, kv_len = launch
        super().run(inner, image, io)
        self.clock.now += self.cost(q_len, kv_len)
        if self.fault is not None:
            self.fault(io)


def install(monkeypatch, clock, *backends, measured=None, thresholds=None):
    """Make these the process's backends, timed by the clock."""
    monkeypatch.setattr(timing, "timer_for", lambda device: timing.HostTimer(clock))
    monkeypatch.setattr("attn_core.cli.tune.timer_for", lambda device: timing.HostTimer(clock))
    known = plugins.Registry(
        (*backends, ReferenceBackend()), (), (), {b.name: f"{b.name} 1.0" for b in backends},
        measured or Measured(),
    )  # fmt: skip
    plugins.use(known)
    return known


def cells(*ratios):
    """Cells whose first candidate takes 1 ms and the second so many times that, by q_len."""
    return [Cell(q_len, (1e-3, 1e-3 * ratio)) for q_len, ratio in ratios]


def bucket(*steps, batch_size=2, kv_len=64, q_lens=(1, 64)):
    """A bucket with these steps; its cells only say how far it reaches."""
    return Bucket(batch_size, kv_len, steps, tuple(cells(*((q_len, 1.0) for q_len in q_lens))))


def pair(problem, target, *buckets, candidates=("a/p", "b/p"), origin="t.toml"):
    """A measured pair for a layer and a device."""
    return Pair(candidates, target.arch, target.num_cus, Scope.of(problem), buckets, FACTS, origin)


def crossing(q, kv):
    """b overtakes a from q = 8 on at 64 keys and from 32 on at 256."""
    return 8e-3 * (2.0 if q < kv // 8 else 0.5)


def tune(*args, columns=80):
    """Run the command on the small layer."""
    return attn("tune", *LAYER, *args, columns=columns)


def install_two(monkeypatch):
    """Install a, which costs 8 ms, and b, which crosses it; returns both."""
    clock = Clock()
    found = Timed("a", clock, lambda q, kv: 8e-3), Timed("b", clock, crossing, rank=20)
    install(monkeypatch, clock, *found)
    return found
