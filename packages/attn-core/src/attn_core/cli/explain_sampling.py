"""``attn explain --op chain_sampling``: who would take the acceptance step of speculative decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from rich.console import RenderableType

from .. import sampling_route
from ..errors import NoRoute
from ..plugins import Broken
from ..route import AUTO, Verdict
from ..sampling_route import OP, SamplingProblem
from ..target import DeviceTarget
from .ask import Options, ask_sampling, requested, target_asked
from .explain import BackendRaised, chosen, conclusion, device_name, page, said
from .installed import Assumed, installed
from .output import plain, told


@dataclass(frozen=True, slots=True)
class SamplingExplanation:
    """One question and what every candidate says to it; as :class:`attn_core.cli.explain.Explanation`."""

    target: DeviceTarget
    problem: SamplingProblem
    requested: str
    verdicts: tuple[Verdict, ...]
    broken: tuple[Broken, ...]


def explain(options: Options, assumed: Mapping[str, str]) -> SamplingExplanation:
    """Answer; builds nothing and asks no device that was not asked for.

    Raises:
        ValueError: An option does not fit.
        BackendRaised: A backend raised while it was asked.
    """
    pretended = Assumed(assumed) if assumed else None
    registry = installed() if pretended is None else pretended.registry
    problem, wanted = ask_sampling(options), requested(options)
    target = target_asked(options, registry.targets)
    try:
        verdicts = sampling_route.explain(sampling_route.screen(target, problem, registry.backends, wanted))
    except NoRoute:
        raise
    except Exception as err:
        raise BackendRaised(told(err)) from err
    if pretended is not None:
        pretended.require_asked()
    return SamplingExplanation(target, problem, wanted, verdicts, registry.broken)


def as_json(e: SamplingExplanation) -> dict[str, object]:
    """Return the explanation as one object, like that of the other entry points."""
    problem = {name: plain(value) for name, value in asdict(e.problem).items()}
    return {
        "chosen": chosen(e.verdicts),
        "candidates": said(e.verdicts),
        "query": {"op": OP, **problem, "target": asdict(e.target), "backend": e.requested},
        "grounds": [],
        "broken": [asdict(b) for b in e.broken],
    }


def render(e: SamplingExplanation) -> RenderableType:
    """Return the explanation as text for a terminal."""
    facts = f"vocab_size {e.problem.vocab_size}, {plain(e.problem.draft_dtype)}"
    facts += "" if e.requested == AUTO else f", backend {e.requested}"
    closing = conclusion(f"{OP} on {e.target.arch}", e.requested, e.verdicts, "the call")
    return page(OP, device_name(e.target), facts, e.verdicts, (), e.broken, closing)
