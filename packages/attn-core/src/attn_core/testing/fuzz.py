"""Random sessions with one backend: right calls against the oracle, wrong calls against the error form.

A session is one wrapper (or one function) and a few steps. Whatever a wrong call was, it must raise
``ValueError``, ``TypeError`` or ``NotImplementedError`` with a code, and the plan before it must still give
the same bits. Sessions are numbered; a number and a seed make the same session again.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch

from ..backend import Backend
from ..decode import BatchDecodeWithPagedKVCacheWrapper
from ..prefill import BatchPrefillWithPagedKVCacheWrapper
from ..problem import Op
from ..target import DeviceTarget
from . import checks, fuzz_composed, fuzz_functions, fuzz_wrappers, misuse, oracle
from .axes import SINGLES
from .cases import Case
from .checks.expect import expect
from .checks.run import check
from .draw import draw, draw_lengths
from .drive import (
    GARBAGE,
    Wrapper,
    make_wrapper,
    only,
    only_one,
    options_of,
    plan_direct,
    run_public,
    scale_options,
)
from .fuzz_calls import Call, unchanged
from .kit import CPU, Failure
from .memory import lay_out, same_bits, workspace_of
from .world import World, world_of

REFUSALS = (ValueError, TypeError, NotImplementedError)
CODED = re.compile(r"\[[a-z0-9_]+\.[a-z0-9-]+\]")
_PYTHON = re.compile(r"unexpected keyword argument|required positional argument|multiple values for")
_STEPS = 3
_OTHERS = 0.3
"""Share of sessions that are about something else than one wrapper of attention."""
KINDS = ("append", "merge", "chain_sampling", "cascade", "latent", *fuzz_composed.SESSIONS)
_WRONG = 3


@dataclass(slots=True)
class Tally:
    """What was done.

    Attributes:
        sessions: Finished sessions.
        by_op: Sessions by entry point.
        right: Runs compared with the oracle.
        wrong: Wrong calls that were refused.
        mistakes: Wrong calls by name.
    """

    sessions: int = 0
    by_op: Counter[str] = field(default_factory=Counter)
    right: int = 0
    wrong: int = 0
    mistakes: Counter[str] = field(default_factory=Counter)


def sessions(
    backend: Backend, target: DeviceTarget = CPU, *, seed: int = 0, first: int = 0, count: int | None = None,
    seconds: float | None = None, tally: Tally | None = None,
) -> Iterator[Failure]:  # fmt: skip
    """Run sessions and yield what goes wrong, as it is found.

    Args:
        backend: Under test; need not be installed.
        target: A device of this machine.
        seed: Of all sessions.
        first: Number of the first session.
        count: How many; without end if neither this nor ``seconds`` is given.
        seconds: Start no session later than this.
        tally: Counted into.
    """
    tally = Tally() if tally is None else tally
    end = None if seconds is None else time.monotonic() + seconds
    number = first
    while (count is None or number < first + count) and (end is None or time.monotonic() < end):
        said = f"session {number} of seed {seed}"
        kind = session_kind(backend, target, seed, number)
        try:
            if kind is not None:
                said = f"{said}: {kind}"
                _other_session(backend, target, kind, Random(f"{seed}:{number}:other"), tally)
            else:
                case = session_case(backend, target, seed, number)
                kind, said = case.problem.op.value, f"{said}: {case}"
                _session(case, Random(f"{seed}:{number}:steps"), tally)
            tally.sessions += 1
            tally.by_op[kind] += 1
        except Exception as err:
            yield Failure("fuzz", said, err)
        number += 1


def session_kind(backend: Backend, target: DeviceTarget, seed: int, number: int) -> str | None:
    """Return what a session is about if it is no attention wrapper or function, else None."""
    rng = Random(f"{seed}:{number}:kind")
    if rng.random() >= _OTHERS:
        return None
    kind = rng.choice(KINDS)
    try:
        _other(backend, target, kind, Random(0))
    except LookupError:  # the backend does not have it
        return None
    return kind


def _other(
    backend: Backend, target: DeviceTarget, kind: str, rng: Random
) -> list[Call] | fuzz_wrappers.Planned:
    if kind == "cascade":
        return fuzz_wrappers.cascade(backend, target, rng)
    if kind == "latent":
        return fuzz_wrappers.latent(backend, target, rng)
    if kind in fuzz_composed.SESSIONS:
        return fuzz_composed.SESSIONS[kind](backend, target, rng)
    return fuzz_functions.calls(backend, target, rng, kind)


def _other_session(backend: Backend, target: DeviceTarget, kind: str, rng: Random, tally: Tally) -> None:
    with only_one(backend):
        made = _other(backend, target, kind, rng)
        if isinstance(made, list):
            for call in made:
                _right(call, tally)
                _mistakes(call, rng, tally)
            return
        _right(made.plan, tally)
        _right(made.run, tally)
        before = made.states()
        for _ in range(_STEPS):
            _mistakes(made.plan, rng, tally)
            expect(all(map(_is, made.states(), before)), "a refused plan replaced the one before")
            _right(made.run, tally)
            _mistakes(made.run, rng, tally)


def _is(a: object, b: object) -> bool:
    return a is b


def _right(call: Call, tally: Tally) -> None:
    call.check(call.function(**call.right))
    tally.right += 1


def _mistakes(call: Call, rng: Random, tally: Tally) -> None:
    before = [t.clone() for t in call.held()]
    for _ in range(_WRONG):
        name, change = call.mistake(rng)
        what = f"{call.name} with {name}"
        refused(what, lambda change=change: call.function(**{**call.right, **change}))
        expect(unchanged(call, before), f"{what}: a refused call wrote to what it was given")
        tally.wrong += 1
        tally.mistakes[f"{call.name}:{name.partition(':')[0]}"] += 1


def session_case(backend: Backend, target: DeviceTarget, seed: int, number: int) -> Case:
    """Return the case a session starts from."""
    return draw(backend, target, Random(f"{seed}:{number}"), f"fuzz{seed}.{number}")


def _session(case: Case, rng: Random, tally: Tally) -> None:
    if case.graph:
        checks.graph.launch_depends_on_the_capacities_only(case)
        checks.graph.replays_later_plans(case)
        checks.graph.a_refused_replan_leaves_the_replay_unchanged(case)
        _graph_mistakes(case, rng, tally)
        tally.right += len(case.graph)
        return
    if case.problem.op in SINGLES:
        world = world_of(case)
        answer = run_public(case, world, 0)
        _compare(case, world, answer.out, answer.lse)
        tally.right += 1
        return
    with only(case.backend, case.path):
        _wrapper_session(case, rng, tally)


def _graph_mistakes(case: Case, rng: Random, tally: Tally) -> None:
    worlds = checks.graph.worlds_of(case)
    stage = checks.graph.Stage(case, worlds)
    with only(case.backend, case.path):
        right = plan_arguments(case, worlds[0], stage.wrapper)
        stage.wrapper.plan(**right)
        stage.load(worlds[0])
        stage.capture()
        stage.replay()
        image, out = stage.image_bytes(), stage.io.out.clone()
        for kinds in (misuse.GRAPH, misuse.GRAPH, misuse.PLAN, misuse.PLAN):
            found = _mistake(kinds, case, right, rng)
            if found is None:
                continue
            name, change = found
            refused(f"plan with {name}", lambda change=change: stage.wrapper.plan(**{**right, **change}))
            expect(stage.image_bytes() == image, f"{name}: a refused plan changed what a graph reads")
            stage.replay()
            expect(same_bits(stage.io.out, out), f"{name}: a refused plan changed what a graph computes")
            tally.wrong += 1
            tally.mistakes[name] += 1


def _mistake(
    kinds: Mapping[str, misuse.Misuse], case: Case, right: dict[str, Any], rng: Random
) -> tuple[str, dict[str, Any]] | None:
    """Return one of the mistakes that can be made with a call."""
    names = list(kinds)
    rng.shuffle(names)
    made = ((name, kinds[name](case, right)) for name in names)
    return next(((name, change) for name, change in made if change is not None), None)


def _wrapper_session(case: Case, rng: Random, tally: Tally) -> None:
    worlds = [_world(case, rng, n) for n in range(_STEPS)]
    need = max(plan_direct(c, world).result.workspace_bytes for c, world in worlds)
    workspace, _ = workspace_of(need, GARBAGE, case.device)
    wrapper = make_wrapper(case, workspace)
    for mine, world in worlds:
        right = plan_arguments(mine, world, wrapper)
        before = {name: t.clone() for name, t in right.items() if isinstance(t, torch.Tensor)}
        wrapper.plan(**right)
        for name, t in before.items():
            expect(same_bits(t, right[name]), f"plan() wrote to its argument {name}")
        run = run_arguments(mine, world, wrapper)
        first = _outputs(mine, run, wrapper)
        _compare(mine, world, *first)
        tally.right += 1
        for _ in range(_WRONG):
            _one_mistake(mine, wrapper, right, run, rng, tally)
            again = _outputs(mine, run, wrapper)
            for got, want in zip(again, first, strict=True):
                same = got is want or (got is not None and want is not None and same_bits(got, want))
                expect(same, "a refused call changed what the earlier plan computes")


def _world(case: Case, rng: Random, step: int) -> tuple[Case, World]:
    lengths = case.lengths
    if step:
        name = f"{lengths.name}.{step}"
        lengths = draw_lengths(case.problem, rng, name, lengths.q_len_per_req)
    mine = replace(case, lengths=lengths)
    world = world_of(mine)
    if rng.random() < 0.2:
        world.lay(torch.nan)  # memory that belongs to no request
        world.q.nan_to_num_()
    return mine, world


def _one_mistake(
    case: Case, wrapper: Wrapper, right: dict[str, Any], run: dict[str, Any], rng: Random, tally: Tally
) -> None:
    plan = rng.random() < 0.6
    kinds, arguments = (misuse.PLAN, right) if plan else (misuse.RUN, run)
    found = _mistake(kinds, case, arguments, rng)
    if found is None:
        return
    name, change = found
    state = wrapper._state
    call = wrapper.plan if plan else wrapper.run
    refused(f"{'plan' if plan else 'run'} with {name}", lambda: call(**{**arguments, **change}))
    expect(wrapper._state is state, f"{name}: a refused call replaced the plan")
    tally.wrong += 1
    tally.mistakes[name] += 1


def refused(what: str, call: Any) -> BaseException:
    """Call, and return the refusal.

    Raises:
        Violation: Nothing was raised, or not as this project refuses.
    """
    try:
        call()
    except REFUSALS as err:
        formed = CODED.search(str(err)) or (isinstance(err, TypeError) and _PYTHON.search(str(err)))
        expect(bool(formed), f"{what}: raised {type(err).__name__} without a code: {err}")
        return err
    except Exception as err:
        expect(False, f"{what}: raised {type(err).__name__}: {err}")
    expect(False, f"{what}: was accepted")
    raise AssertionError


def _compare(case: Case, world: World, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    want = oracle.attention(case.problem, world.requests, world.scales)
    check(case, world, want, out, lse, "the public entry point")


def _outputs(case: Case, run: dict[str, Any], wrapper: Wrapper) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run, into new outputs full of NaN where the case gives any; returns copies.

    Half of the cases run three times: from the third on a backend may check and launch a call itself.
    """
    p, given = case.problem, dict(run)
    shape = (sum(case.lengths.q_len), p.num_qo_heads, p.head_dim_vo)
    if case.out != "own":
        given["out"] = lay_out(case.out, shape, p.o_dtype, case.device)
        if case.wants_lse:
            given["lse"] = lay_out(case.out, shape[:2], torch.float32, case.device)
    for _ in range(1 if case.seed % 2 else 3):
        found = wrapper.run(**given)
    out, lse = found if isinstance(found, tuple) else (found, None)
    expect(out is given.get("out", out), "run() returned another tensor than its out=")
    return out.clone(), None if lse is None else lse.clone()


def run_arguments(case: Case, world: World, wrapper: Wrapper) -> dict[str, Any]:
    """Return the keyword arguments of a public run, without outputs."""
    found: dict[str, Any] = {"q": world.q, "return_lse": case.wants_lse, **scale_options(case, world)}
    if case.problem.op is Op.PREFILL_RAGGED:
        return found | {"k": world.kv.k, "v": world.kv.v}
    return found | {"paged_kv_cache": world.kv.cache}


def plan_arguments(case: Case, world: World, wrapper: Wrapper) -> dict[str, Any]:
    """Return the keyword arguments of a public plan; index arrays come in every form that is taken."""
    p, t, rng = case.problem, world.table, Random(case.seed)
    found = {"num_qo_heads": p.num_qo_heads, "num_kv_heads": p.num_kv_heads, **options_of(case)}
    if isinstance(wrapper, BatchDecodeWithPagedKVCacheWrapper):
        found |= {
            "indptr": t.kv_indptr, "indices": _longer(t.kv_indices, rng), "last_page_len": t.kv_last_page_len,
            "head_dim": p.head_dim_qk, "page_size": p.page_size, "q_len_per_req": case.lengths.q_len_per_req,
        }  # fmt: skip
        return {name: _form(value, rng) for name, value in found.items()}
    if case.mask == "packed":
        found["packed_custom_mask"] = world.mask_bits()[0]
    elif case.mask == "custom":
        found["custom_mask"] = world.mask()
    found |= {
        "qo_indptr": t.qo_indptr, "causal": case.mask == "causal", "head_dim_qk": p.head_dim_qk,
        "head_dim_vo": p.head_dim_vo,
    }  # fmt: skip
    if isinstance(wrapper, BatchPrefillWithPagedKVCacheWrapper):
        found |= {
            "paged_kv_indptr": t.kv_indptr, "paged_kv_indices": _longer(t.kv_indices, rng),
            "paged_kv_last_page_len": t.kv_last_page_len, "page_size": p.page_size,
        }  # fmt: skip
    else:
        found["kv_indptr"] = t.kv_indptr
    return {name: _form(value, rng) for name, value in found.items()}


def _longer(t: torch.Tensor, rng: Random) -> torch.Tensor:
    """A page table may be the head of a longer buffer, whose rest is anything."""
    return torch.cat([t, torch.full((rng.randint(1, 9),), -7, dtype=t.dtype)]) if rng.random() < 0.3 else t


def _form(value: Any, rng: Random) -> Any:
    """An index array may be int64, and strided."""
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.int32:
        return value
    form = rng.choice(("plain", "plain", "int64", "strided"))
    if form == "int64":
        return value.long()
    return torch.stack([value, value - 1], 1)[:, 0] if form == "strided" else value
