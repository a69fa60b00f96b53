"""What the routes share: how a call is declared and bound, scalars, scales and the log-sum-exp."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from attn_core.backend import DeviceImage, PlanResult, RunIO
from attn_core.batch import HostBatch
from attn_core.errors import needs
from attn_core.problem import AttentionProblem, MaskMode
from attn_core.query import Query

from ..probe import AiterApi, Function

LOG2E = math.log2(math.e)
ONE = torch.tensor([1.0], dtype=torch.float32, device="cpu").view(torch.int32)
"""The bits of float32 1.0: a unit scale that travels with the plan's index arrays."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a route passes to one AITER function; everything by keyword.

    Attributes:
        key: The function, by its key in :class:`~attn_aiter.probe.AiterApi`.
        passes: Parameters it always passes.
        if_there: Parameters it passes where the release has them.
    """

    key: str
    passes: tuple[str, ...]
    if_there: tuple[str, ...] = ()

    def missing(self, api: AiterApi) -> tuple[str, ...]:
        """Return what keeps the call from binding: absent parameters, and required ones it does not pass."""
        function = api.functions.get(self.key)
        if function is None:
            return (self.key,)
        absent = [f"{function.name}({name})" for name in self.passes if name not in function]
        passed = {*self.passes, *self.if_there}
        wanted = [
            f"{function.name} without {name}"
            for name, default in function.parameters
            if default is None and name not in passed
        ]
        return (*absent, *wanted)

    def bind(self, function: Function, values: Mapping[str, object]) -> dict[str, object]:
        """Return the keyword arguments the release takes.

        Raises:
            KeyError: A value is missing, which is a bug of the route.
        """
        bound = {name: values[name] for name in self.passes}
        bound.update({name: values[name] for name in self.if_there if name in function})
        return bound


class Planned(Protocol):
    """A launch; None stands for nothing to do."""

    @property
    def path(self) -> str:
        """Path of this backend."""


class Route(Protocol):
    """One path of the backend."""

    call: Call

    def missing(self, api: AiterApi) -> tuple[str, ...]:
        """Say what the installed release lacks for this path."""

    def plan(self, api: AiterApi, query: Query, batch: HostBatch) -> PlanResult:
        """Compute the launch; see :meth:`attn_core.backend.Backend.plan`."""

    def run(self, function: Callable[..., Any], launch: Any, image: DeviceImage, io: RunIO) -> None:
        """Enqueue the call; see :meth:`attn_core.backend.Backend.run`."""


def window_size(problem: AttentionProblem, function: Function) -> tuple[int, ...]:
    """Return AITER's (left, right) window, as long as the release's own default (a sink count follows).

    The left end is inclusive there as here: ``window_left`` W sees W keys and the row's own.
    """
    left = problem.window_left
    right = 0 if left >= 0 and problem.mask is MaskMode.CAUSAL else -1
    default = function.default("window_size") or "(-1, -1)"
    return (left, right, *(0,) * (default.count(",") - 1))


def fold_scales(io: RunIO) -> tuple[float, float]:
    """Return what multiplies the logits and what multiplies the output.

    Raises:
        NotImplementedError: A scale lives on the device; AITER takes these as numbers.
    """
    for name in ("q_scale", "k_scale", "v_scale"):
        value = getattr(io, name)
        if isinstance(value, torch.Tensor):
            raise NotImplementedError(
                needs(f"aiter: {name}", "a number", "a tensor on the device", "aiter.scale")
            )
    assert isinstance(io.q_scale, float | int)
    assert isinstance(io.k_scale, float | int)
    assert isinstance(io.v_scale, float | int)
    return float(io.q_scale) * float(io.k_scale), float(io.v_scale)


def check_dense(name: str, t: torch.Tensor) -> None:
    """Refuse an output that is not dense: the kernels write rows one after another.

    Raises:
        ValueError: It is not contiguous.
    """
    if not t.is_contiguous():
        raise ValueError(needs(f"aiter: {name}", "a contiguous tensor", f"strides {t.stride()}", "aiter.out"))


def clear(io: RunIO) -> None:
    """Write the answer for rows without any key: out 0, lse -inf."""
    io.out.zero_()
    if io.lse is not None:
        io.lse.fill_(-math.inf)


def finish(io: RunIO, returned: object, v_scale: float) -> None:
    """Bring what AITER returned into ``io``: output, and the log-sum-exp turned to base 2.

    AITER's log-sum-exp is natural and ``[num_qo_heads, rows]``; a row without a key has +inf there, which
    no row with a key can have, and -inf here.
    """
    parts = returned if isinstance(returned, tuple | list) else (returned,)
    out = parts[0]
    if isinstance(out, torch.Tensor) and out.data_ptr() != io.out.data_ptr():
        io.out.copy_(out)
    if v_scale != 1.0:
        io.out.mul_(v_scale)
    if io.lse is not None:
        natural = parts[1]
        torch.mul(natural.t(), LOG2E, out=io.lse)
        io.lse.nan_to_num_(nan=math.nan, posinf=-math.inf, neginf=-math.inf)


def scalar(image: DeviceImage, name: str) -> torch.Tensor:
    """Return a float32 ``[1]`` that a plan stored as its bits."""
    return image[name].view(torch.float32)
