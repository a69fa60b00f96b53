"""``attn reasons``: every code a refusal can carry."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from ..reasons import Code
from .output import grid, heading, styled

Rows = Sequence[tuple[str, Code]]


def as_json(rows: Rows, faults: Sequence[str]) -> dict[str, object]:
    """Return the codes, and the backends whose codes could not be listed, as one object."""
    codes = [
        {
            "code": code.slug,
            "stage": code.stage.name.lower(),
            "owner": owner,
            "template": code.template,
            "quiet": code.quiet,
            "meaning": code.meaning,
        }
        for owner, code in rows
    ]
    return {"codes": codes, "faults": list(faults)}


def render(rows: Rows, faults: Sequence[str]) -> RenderableType:
    """Return the codes as text for a terminal, owner by owner."""
    parts: list[RenderableType] = []
    widest = max((len(code.slug) for _, code in rows), default=1)
    for owner in dict.fromkeys(owner for owner, _ in rows):
        table = grid(widest, 12, None)
        for who, code in rows:
            if who == owner:
                stage = styled(code.stage.name.lower(), "dim")
                table.add_row(Text(code.slug), stage, Text(code.meaning or code.template))
        parts += [heading(owner), table, Text()]
    parts += [styled(f"Not listed: {fault}", "yellow") for fault in faults]
    return Group(*parts)
