"""``attn explain`` from typed options to exit code; apart from the command: ``--help`` stays quick."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import typer

from ..sampling_route import OP as CHAIN_SAMPLING
from . import explain, explain_sampling
from .ask import Options
from .installed import assumptions
from .output import give_up, refusing, say_json, show


def explain_command(given: Mapping[str, Any], assume: list[str] | None, also: str | None, json: bool) -> None:
    """Answer and print.

    Args:
        given: Options of the question, by name.
        assume: Versions to assume.
        also: The one version that has an option of its own.
        json: Print one JSON object.

    Raises:
        typer.Exit: 0 when a route exists, 1 when none does, 2 when an option does not fit.
    """
    options = Options(**given)
    say = _sampling if options.op == CHAIN_SAMPLING else _attention
    with refusing("explain"):
        try:
            chosen = say(options, assumptions(assume, also), json)
        except explain.BackendRaised as err:
            give_up("explain", err, 1)
    raise typer.Exit(0 if chosen else 1)


def _attention(options: Options, assumed: Mapping[str, str], json: bool) -> str | None:
    found = explain.explain(options, assumed)
    if json:
        say_json(explain.as_json(found))
    else:
        show(explain.render(found))
    return explain.chosen(found.verdicts)


def _sampling(options: Options, assumed: Mapping[str, str], json: bool) -> str | None:
    found = explain_sampling.explain(options, assumed)
    if json:
        say_json(explain_sampling.as_json(found))
    else:
        show(explain_sampling.render(found))
    return explain.chosen(found.verdicts)
