"""A plan that is told how much float workspace there is lives with it, or asks for more; never less."""

from __future__ import annotations

from dataclasses import replace

from ...backend import Backend
from ...target import DeviceTarget
from ..cases import Case, cases_of
from ..drive import Planned, io_of, plan_direct, run_direct
from ..world import world_of
from .expect import expect
from .run import check_world

_EVERY = 4


def fits_a_smaller_workspace(backend: Backend, target: DeviceTarget) -> int:
    """Plan with half the workspace and with none; whatever then claims to fit must be right.

    Returns:
        Plans that fitted a smaller workspace, of every fourth case.
    """
    return sum(_fits(case) for case in cases_of(backend, target).attention[::_EVERY])


def _fits(case: Case) -> int:
    world = world_of(case)
    planned = plan_direct(case, world)
    wanted, fitted = planned.result.workspace_bytes, 0
    for have in sorted({wanted // 2, 0} - {wanted}):
        query = replace(planned.query, workspace_bytes=have)
        result = case.backend.plan(query, case.path.name, planned.batch)
        expect(result.workspace_bytes <= wanted, f"{case}: told of {have} bytes, the plan asks for more")
        if result.workspace_bytes > have:
            continue
        image = {name: t for name, t in planned.image.items() if name not in planned.result.image}
        image |= {name: t.clone().to(case.device) for name, t in result.image.items()}
        less = Planned(query, planned.batch, result, image)
        io = run_direct(case, less, io_of(case, world, result.workspace_bytes))
        try:
            check_world(case, world, io.out, io.lse)
        except AssertionError as err:
            raise AssertionError(f"{case} with {have} bytes of workspace: {err}") from err
        fitted += 1
    return fitted
