"""``python -m attn_compile``: the operators, as a Markdown table; it stands in ``docs/torch-compile.md``."""

from __future__ import annotations

import sys
from pathlib import Path

from attn_core.op_table import OpRow, Role

from .plans import PLANS
from .rows import ROWS
from .schema import outs

BEGIN, END = "<!-- operators -->", "<!-- end of operators -->"


def table() -> str:
    """Return the table, between its markers."""
    lines = [
        "| Operator | reads | writes in place | fills fresh memory | returns |",
        "| --- | --- | --- | --- | --- |",
    ]
    return "\n".join((BEGIN, *lines, *map(_line, (*ROWS, *PLANS)), END))


def _line(row: OpRow) -> str:
    reads = _names(row, Role.READ, Role.PLAN)
    updated = _names(row, Role.INOUT_SMALL)
    writes = _names(row, Role.CACHE) or (f"{updated} (by a copy)" if updated else "")
    filled = ", ".join(f"`{arg.name}`" for arg in outs(row))
    cells = (f"`{row.base}`", reads, writes, filled, f"{row.returns} new" if row.returns else "")
    return f"| {' | '.join(cell or '-' for cell in cells)} |"


def _names(row: OpRow, *roles: Role) -> str:
    return ", ".join(f"`{arg.name}`" for arg in row.args if arg.role in roles)


def main() -> None:
    """Print the table, or put it into the file named."""
    if len(sys.argv) < 2:
        print(table())
        return
    page = Path(sys.argv[1])
    text = page.read_text(encoding="utf-8")
    start, end = text.index(BEGIN), text.index(END) + len(END)
    page.write_text(text[:start] + table() + text[end:], encoding="utf-8")


if __name__ == "__main__":
    main()
