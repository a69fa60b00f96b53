"""What a backend says of itself is well formed, reachable, and said without side effects."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator
from dataclasses import replace

import torch

from ...backend import Backend, Path
from ...batch import BatchShape
from ...plugins import _fault
from ...problem import Op
from ...query import Query
from ...reasons import Code, Reason, Stage
from ...rules import Rule, Verdict
from ...target import DeviceTarget, parse_target
from ..axes import axes_of
from ..cases import cases_of
from ..tolerance import declared
from .expect import Violation, expect

_ELSEWHERE = ("cpu", "sm_90", "gfx942:304", "gfx950:256", "gfx1201")
_Q_LENS = (1, 2, 4, 8, 16, 17, 32, 33, 64, 128, 1024)
_KV_LENS = (1, 128, 2048, 65536)
_BATCHES = (1, 8, 64)


def is_well_formed(backend: Backend, target: DeviceTarget) -> None:
    """Names, ranks and rows are what the contract asks for, and every claim can be reached."""
    fault = _fault(backend)
    expect(fault is None, f"the core would not accept this backend: {fault}")
    rank_ok = isinstance(backend.rank, int) and not isinstance(backend.rank, bool)
    expect(rank_ok, f"rank: needs an int, got {backend.rank!r}")
    names = [path.name for path in backend.paths]
    expect(bool(names), "paths: needs at least one, got none")
    expect(len(set(names)) == len(names), f"paths: needs distinct names, got {names}")
    for path in backend.paths:
        expect("/" not in path.name and bool(path.name), f"path name: needs no '/', got {path.name!r}")
        _check_row(path)
    for rule in backend.rules:
        _check_rule(backend, rule)


def _check_row(path: Path) -> None:
    cap = path.capability
    expect(bool(cap.ops), f"{path.name}: ops: needs at least one entry point, got none")
    for op in cap.ops:
        axes = axes_of(path, op) if op is not Op.APPEND else {"kv": list(cap.kv_dtypes)}
        for name, values in axes.items():
            text = f"{path.name}: claims {op.value}, which nobody can ask it for: no value of {name} is left"
            expect(bool(values), text)
    for dtype, value in declared(path).items():
        fits = isinstance(dtype, torch.dtype) and 0 < value < 1
        expect(fits, f"{path.name}: tolerance: needs dtype -> number below 1, got {dtype}: {value}")


def _check_rule(backend: Backend, rule: Rule) -> None:
    slug = rule.code.slug
    expect("." in slug, f"rule {slug}: needs a slug 'owner.cause'")
    unknown = set(rule.paths) - {path.name for path in backend.paths}
    expect(not unknown, f"rule {slug}: names paths of nobody: {sorted(unknown)}")
    expect(bool(rule.ops) and bool(rule.paths), f"rule {slug}: looks at no entry point or no path")
    stages = (Stage.CAPABILITY, Stage.PREFERENCE)
    expect(rule.code.stage in stages, f"rule {slug}: needs stage CAPABILITY or PREFERENCE")


def answers_unavailable_without_side_effects(backend: Backend, target: DeviceTarget) -> None:
    """unavailable() may be asked about devices that are not here; it imports, starts and sets nothing."""
    for device in (target, *map(parse_target, _ELSEWHERE)):
        before = _process()
        first, second = _asked(backend, device), _asked(backend, device)
        text = f"unavailable({device}) changed the process: modules, environment, folder or GPU"
        expect(_process() == before, text)
        expect(first == second, f"unavailable({device}) gives {first}, then {second}")
        if first is not None:
            _check_reason(first, f"unavailable({device})")
            expect(first.code.stage is Stage.AVAILABILITY, f"unavailable({device}): stage {first.code.stage}")


def _asked(backend: Backend, device: DeviceTarget) -> Reason | None:
    try:
        return backend.unavailable(device)
    except (Exception, SystemExit) as err:
        text = f"unavailable({device}) raised {type(err).__name__}: {err}; needs None or a Reason"
        raise Violation(text) from err


def _process() -> tuple[object, ...]:
    return frozenset(sys.modules), dict(os.environ), os.getcwd(), _gpu_started()


def _gpu_started() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _check_reason(reason: object, where: str) -> None:
    expect(isinstance(reason, Reason), f"{where} returned {type(reason).__name__}, not a Reason")
    assert isinstance(reason, Reason)
    expect(isinstance(reason.code, Code), f"{where}: reason without a Code")
    hash(reason.key)
    expect("\n" not in str(reason), f"{where}: a reason is one line")


def rules_are_pure(backend: Backend, target: DeviceTarget) -> None:
    """A rule gives one answer to one query, whatever was asked before; its limit is not the batch's."""
    queries = list(_queries(backend, target))
    for rule in backend.rules:
        mine = [query for query in queries if query.problem.op in rule.ops]
        forth = [rule.test(query) for query in mine]
        back = [rule.test(query) for query in reversed(mine)][::-1]
        slug = rule.code.slug
        expect(forth == back, f"rule {slug} gives other answers when asked again in another order")
        limits: dict[object, object] = {}
        for query, verdict in zip(mine, forth, strict=True):
            if verdict is None:
                continue
            limit = _limit(verdict, slug)
            _check_reason(Reason(rule.code, "a/b", *verdict), f"rule {slug}")
            known = limits.setdefault((query.target, query.problem), limit)
            expect(known == limit, f"rule {slug}: the limit depends on the batch: {known}, then {limit}")


def _limit(verdict: Verdict, slug: str) -> object:
    pair = isinstance(verdict, tuple) and len(verdict) == 2
    expect(pair, f"rule {slug}: needs None or (limit, got), got {verdict!r}")
    assert verdict is not None
    return verdict[0]


def _queries(backend: Backend, target: DeviceTarget) -> Iterator[Query]:
    """The backend's own problems, on every device it knows, over a grid of batches."""
    archs = {arch for path in backend.paths for arch in path.capability.archs or ()}
    targets = [target, *(parse_target(arch) for arch in sorted(archs))]
    problems = {case.problem: None for case in cases_of(backend, target)}
    for problem in list(problems)[::8]:
        fixed = 1 if problem.op in (Op.DECODE, Op.DECODE_SINGLE) else None
        for q, kv, batch in itertools.product((fixed,) if fixed else _Q_LENS, _KV_LENS, _BATCHES):
            shape = BatchShape(
                batch_size=batch, total_q=batch * q, max_q_len=q, uniform_q_len=q, max_kv_len=kv,
                total_kv=batch * kv, total_pages=batch * -(-kv // (problem.page_size or 1)),
            )  # fmt: skip
            for where in targets:
                yield Query(where, problem, shape)
                yield Query(replace(where, num_cus=0), problem, shape)
