"""run() is right, complete, and touches only what it may."""

from __future__ import annotations

import math

import torch

from ...backend import RunIO
from .. import oracle, rounding
from ..cases import Case
from ..drive import (
    GARBAGE,
    Planned,
    io_of,
    plan_direct,
    run_direct,
    run_public,
)
from ..memory import as_bytes, guards_hold, same_bits, workspace_of
from ..tolerance import compare, tolerance_of
from ..watch import HostReads, Watch, device_bytes, no_device_sync, young_garbage
from ..world import World, world_of
from .expect import expect

FOREIGN = (math.inf, 6e4)
"""What may lie in memory that belongs to no request, besides NaN."""
_EXTREME = 2e-2


def matches_the_oracle(case: Case) -> None:
    """Every element of out and lse agrees with float64 attention, called directly and as users call it.

    Outputs start as NaN and the workspace as garbage. Through the public entry point the arrays given to
    plan() are overwritten before run(); called directly, scales come as numbers and as tensors.
    """
    world = world_of(case)
    planned = plan_direct(case, world)
    size = planned.result.workspace_bytes
    want = oracle.attention(case.problem, world.requests, world.scales)
    io = run_direct(case, planned, io_of(case, world, size))
    check(case, world, want, io.out, io.lse, "Backend.run")
    if case.scales != "none":
        io = io_of(case, world, size)
        io.q_scale, io.k_scale, io.v_scale = (
            torch.tensor(float(s), device=case.device) for s in (io.q_scale, io.k_scale, io.v_scale)
        )
        run_direct(case, planned, io)
        check(case, world, want, io.out, io.lse, "Backend.run with scales as tensors")
    before = world.bytes()
    answer = run_public(case, world, size)
    if answer.chosen is not None:
        expect(answer.chosen == case.candidate, f"{answer.chosen} answered instead of {case.candidate}")
    check(case, world, want, answer.out, answer.lse, "the public entry point")
    expect(answer.out.dtype is case.problem.o_dtype, f"out is {answer.out.dtype}")
    if case.out == "own":
        expect(answer.out.is_contiguous(), f"the default out has strides {answer.out.stride()}")
    _unchanged("q, k or v", world.bytes(), before)
    if answer.guard is not None:
        expect(guards_hold(answer.guard, GARBAGE), "run() wrote outside its workspace")


def writes_only_outputs(case: Case) -> None:
    """Q, k, v, the index arrays, and the gaps of strided outputs are bit-identical after a run."""
    world = world_of(case)
    planned = plan_direct(case, world)
    io = io_of(case, world, 0, out="strided")
    io.workspace, guard = workspace_of(planned.result.workspace_bytes, GARBAGE, case.device)
    before = world.bytes()
    image = {name: as_bytes(t) for name, t in planned.image.items()}
    run_direct(case, planned, io)
    _unchanged("q, k or v", world.bytes(), before)
    for name, was in image.items():
        expect(torch.equal(as_bytes(planned.image[name]), was), f"run() wrote to the index array {name}")
    expect(guards_hold(guard, GARBAGE), "run() wrote outside its workspace")
    for name, t in (("out", io.out), ("lse", io.lse)):
        if t is not None:
            whole = t if t._base is None else t._base
            t.fill_(torch.nan)
            gaps = int((~whole.float().isnan()).sum())
            expect(gaps == 0, f"run() wrote {gaps} elements between the elements of a strided {name}")


def never_reads_foreign_tokens(case: Case) -> None:
    """NaN, inf and 6e4 in unowned pages, past a last page's length and in gaps never reach a result."""
    world = world_of(case)
    planned = plan_direct(case, world)
    clean = run_direct(case, planned, io_of(case, world, planned.result.workspace_bytes))
    for value in (math.nan, FOREIGN[case.seed % 2]):  # NaN for every case, one of the others for each
        world.lay(value)
        found = run_direct(case, planned, io_of(case, world, planned.result.workspace_bytes))
        for name, got, want in _outputs(found, clean):
            expect(same_bits(got, want), f"{value} in memory that belongs to no request changed {name}")


def is_a_function_that_keeps_nothing(case: Case) -> None:
    """Equal calls give equal bits, whatever the workspace held; no tensor outlives the call."""
    world = world_of(case)
    planned = plan_direct(case, world)
    size = planned.result.workspace_bytes
    first = run_direct(case, planned, io_of(case, world, size))
    expect(case.backend.prepare(case.target, case.problem, case.path.name) is None, "prepare() twice")
    again = io_of(case, world, size)
    assert again.workspace is not None
    again.workspace.zero_()
    held = _watched(case, planned, again)
    for name, got, want in _outputs(again, first):
        expect(same_bits(got, want), f"two equal runs differ in {name} (workspace contents differed)")
    shapes = [tuple(t.shape) for t in held]
    expect(not held, f"run() keeps {len(held)} tensors, of shapes {shapes[:3]}")


def _watched(case: Case, planned: Planned, io: RunIO) -> list[torch.Tensor]:
    """Run; return tensors made on the way that are still held afterwards.

    A path that also claims GPUs is held to their rule on the CPU already: no value crosses over.
    """
    known = tuple(t for t in (io.q, io.k, io.v, io.out, io.lse, io.workspace) if t is not None)
    before = device_bytes(case.device)
    watch, reads = Watch(), HostReads()
    with young_garbage(), watch, reads, no_device_sync(case.device):
        run_direct(case, planned, io)
    after = device_bytes(case.device)
    if case.path.capability.archs != frozenset({"cpu"}):
        waits = sorted(watch.waits | reads.seen)
        expect(not waits, f"run() would wait for a GPU, and end a capture: {waits}")
    expect(after <= before, f"run() left {after - before} bytes allocated on the device")
    return watch.alive((*known, *planned.image.values()))


def survives_extreme_logits(case: Case) -> None:
    """Logits of -1e5: a hidden key must weigh nothing, so no finite number can stand for -inf.

    float32 holds such a logit to 0.008, so that is all the exactness asked of what it weighs.
    """
    world = world_of(case, extreme=True)
    planned = plan_direct(case, world)
    io = run_direct(case, planned, io_of(case, world, planned.result.workspace_bytes))
    check_world(case, world, io.out, io.lse, at_least=_EXTREME)


def does_not_depend_on_the_batch(case: Case) -> None:
    """With fixed_split_size or disable_split_kv a request alone gives the bits it gives in its batch."""
    world = world_of(case)
    planned = plan_direct(case, world)
    whole = run_direct(case, planned, io_of(case, world, planned.result.workspace_bytes))
    row = 0
    for n, rows in enumerate(world.lengths.q_len):
        if rows:
            one = world.alone(n)
            mine = plan_direct(case, one)
            alone = run_direct(case, mine, io_of(case, one, mine.result.workspace_bytes))
            for name, got, want in _outputs(alone, whole):
                part = want[row : row + rows]
                expect(same_bits(got, part), f"{name} of request {n} differs from the same request alone")
        row += rows


def _outputs(got: RunIO, want: RunIO) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    found = [("out", got.out, want.out)]
    if got.lse is not None and want.lse is not None:
        found.append(("lse", got.lse, want.lse))
    return found


def _unchanged(what: str, now: list[torch.Tensor], before: list[torch.Tensor]) -> None:
    changed = sum(int((a != b).sum()) for a, b in zip(now, before, strict=True))
    expect(changed == 0, f"a run changed {changed} bytes of {what}")


def check(
    case: Case, world: World, want: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor,
    lse: torch.Tensor | None, who: str, at_least: float = 0.0,
) -> None:  # fmt: skip
    """Compare a result with the oracle's."""
    allowed = max(tolerance_of(case, world.lengths), at_least)
    more: tuple[torch.Tensor | float, torch.Tensor | float] = (0.0, 0.0)
    if rounding.rounds_twice(case.problem):
        more = rounding.slack(case.problem, world.requests, world.scales)
    found = [compare(out, want[0], allowed, world.scales.v, "out", more[0]), _unseen(out, want[1])]
    expect((lse is not None) is case.wants_lse, f"{who}: lse was asked for and not returned")
    if lse is not None:
        expect(lse.dtype is torch.float32, f"{who}: lse: needs float32, got {lse.dtype}")
        found.append(compare(lse, want[1], allowed, 1.0, "lse", more[1]))
    wrong = [text for text in found if text]
    expect(not wrong, f"{who}: {'; '.join(wrong)}")


def _unseen(out: torch.Tensor, want_lse: torch.Tensor) -> str | None:
    """Return what is wrong with rows that see no key, or None: they are zeros, whatever the tolerance."""
    if out.shape[:2] != want_lse.shape:
        return None  # the comparison says so
    rows = out.detach().cpu().double()[want_lse.isneginf()]
    other = rows[rows != 0]
    if not other.numel():
        return None
    return f"out: {other.numel()} elements of rows without a visible key are not 0, as {float(other[0]):g}"


def check_world(
    case: Case, world: World, out: torch.Tensor, lse: torch.Tensor | None, *, at_least: float = 0.0
) -> None:
    """Ask the oracle, and compare; ``at_least`` is a floor of the tolerance."""
    want = oracle.attention(case.problem, world.requests, world.scales)
    check(case, world, want, out, lse, "Backend.run", at_least)
