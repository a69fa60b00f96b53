"""Which backend takes the acceptance step: what :mod:`attn_core.route` is for attention, for one question.

There is neither a plan nor a batch to look at, and every candidate gives the same bits, so nothing is asked
but availability, capability and readiness.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import torch

from . import plugins
from .attempts import first_to_serve, unavailable, unready
from .backend import Backend, SamplingBackend, SamplingPath
from .capability import ARCH
from .reasons import Code, Reason, Stage
from .route import AUTO, NOT_REQUESTED, Verdict, check_requested, no_route
from .target import DeviceTarget

OP = "chain_sampling"
NO_SAMPLER = Code(
    "core.no-sampling",
    Stage.CAPABILITY,
    "has no chain sampling",
    quiet=True,
    meaning="The backend serves attention only.",
)
PROBS = Code(
    "core.probs-dtype",
    Stage.CAPABILITY,
    "takes probabilities of {limit}",
    meaning="The type of draft_probs or target_probs has no kernel.",
)
VOCAB = Code(
    "core.vocab-size",
    Stage.CAPABILITY,
    "takes a vocab_size up to {limit}",
    meaning="The rows of probabilities are too long for the kernel.",
)
CODES = (NO_SAMPLER, PROBS, VOCAB)


@dataclass(frozen=True, slots=True)
class SamplingProblem:
    """Everything about an acceptance step that routing looks at.

    Attributes:
        draft_dtype: Type of draft_probs.
        target_dtype: Type of target_probs.
        vocab_size: Tokens of the vocabulary.
    """

    draft_dtype: torch.dtype
    target_dtype: torch.dtype
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Sampler:
    """A candidate, and what speaks against it whatever the batch."""

    backend: SamplingBackend
    path: SamplingPath
    name: str
    refusals: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class Chosen:
    """Who takes the step, and the refusals met on the way."""

    candidate: str
    sampler: Sampler
    refused: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class Samplers:
    """Candidates for one (device, problem), in the order ``auto`` tries them.

    Attributes:
        requested: What the caller asked for.
        found: Candidates.
        without: Why backends that have none are none.
        prepared: Candidates that said they are ready.
    """

    requested: str
    found: tuple[Sampler, ...]
    without: tuple[Reason, ...]
    prepared: set[str] = field(default_factory=set)


def screen(
    target: DeviceTarget, problem: SamplingProblem, backends: Sequence[Backend], requested: str = AUTO
) -> Samplers:
    """Ask what does not depend on a call, for every candidate; builds nothing.

    Args:
        target: Device to decide for; it need not be here.
        problem: What is asked.
        backends: Owners of the candidates, most preferred first.
        requested: ``auto``, a backend, or a candidate ``backend/path``.

    Raises:
        NoRoute: ``requested`` names nothing that is installed.
    """
    check_requested(requested, backends, (f"{b.name}/{p.name}" for b in backends for p in paths_of(b)))
    found, without = [], []
    for backend in backends:
        asked_for = requested == AUTO or requested.split("/")[0] == backend.name
        if not isinstance(backend, SamplingBackend) or not backend.sampling:
            without.append(Reason(NO_SAMPLER, backend.name) if asked_for else _other(backend.name, requested))
            continue
        missing = unavailable(backend, target, ours=requested == AUTO) if asked_for else None
        for path in backend.sampling:
            name = f"{backend.name}/{path.name}"
            if requested in (AUTO, backend.name, name):
                refusals = _against(target, problem, path, name, missing)
            else:
                refusals = (_other(name, requested),)
            found.append(Sampler(backend, path, name, refusals))
    return Samplers(requested, tuple(found), tuple(without))


def paths_of(backend: Backend) -> tuple[SamplingPath, ...]:
    """Return the sampling paths of any backend."""
    return backend.sampling if isinstance(backend, SamplingBackend) else ()


def _other(name: str, requested: str) -> Reason:
    return Reason(NOT_REQUESTED, name, requested)


def _against(
    target: DeviceTarget, problem: SamplingProblem, path: SamplingPath, name: str, missing: Reason | None
) -> tuple[Reason, ...]:
    """AVAILABILITY, else CAPABILITY: the first stage that has anything to say."""
    if path.archs is not None and target.arch not in path.archs:
        return (Reason(ARCH, name, ", ".join(sorted(path.archs)), target.arch),)
    if missing is not None:
        return (replace(missing, candidate=name),)
    said = []
    for dtype in dict.fromkeys((problem.draft_dtype, problem.target_dtype)):
        if dtype not in path.dtypes:
            said.append(Reason(PROBS, name, ", ".join(sorted(map(_name, path.dtypes))), _name(dtype)))
    if path.max_vocab_size is not None and problem.vocab_size > path.max_vocab_size:
        said.append(Reason(VOCAB, name, path.max_vocab_size, problem.vocab_size))
    return tuple(said)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def explain(samplers: Samplers) -> tuple[Verdict, ...]:
    """Judge every candidate, those after the chosen one too, without building anything."""
    chosen = next((s for s in samplers.found if not s.refusals), None)
    return tuple(Verdict(s.name, s is chosen, s.refusals) for s in samplers.found)


@lru_cache(maxsize=256)
def screened(
    target: DeviceTarget, problem: SamplingProblem, requested: str, registry: plugins.Registry
) -> Samplers:
    """Return what :func:`screen` says, made once."""
    return screen(target, problem, registry.backends, requested)


def serve(samplers: Samplers, target: DeviceTarget, attempt: Callable[[Sampler], object]) -> Chosen:
    """Let the first candidate that can take the step.

    Args:
        samplers: Result of :func:`screen` for the device.
        target: The device.
        attempt: Takes the step; may raise Unsupported before it wrote anything.

    Returns:
        The choice that held.

    Raises:
        NoRoute: Every candidate was refused.
        Unsupported: A candidate the caller named cannot serve.
    """

    def take(chosen: Chosen) -> None:
        attempt(chosen.sampler)

    chosen, _ = first_to_serve(partial(_choose, samplers, target), take, ours=samplers.requested == AUTO)
    return chosen


def _choose(samplers: Samplers, target: DeviceTarget, passed: Sequence[Reason]) -> Chosen:
    """Return the first candidate that nothing speaks against; ``passed`` could not serve after all."""
    ours, refused = samplers.requested == AUTO, list[Reason]()
    for sampler in samplers.found:
        name = sampler.name
        reasons = sampler.refusals or tuple(r for r in passed if r.candidate == name)
        if not reasons and name not in samplers.prepared:
            ask = partial(sampler.backend.prepare_sampling, target, sampler.path.name)
            reasons = unready(ask, name, samplers.prepared, ours=ours)
        if not reasons:
            return Chosen(name, sampler, tuple(refused))
        refused.extend(reasons)
    raise no_route(samplers.requested, OP, [*refused, *samplers.without])
