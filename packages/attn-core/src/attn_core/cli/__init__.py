"""The command line tool ``attn``. Needs the extra ``cli`` (typer and rich)."""

from __future__ import annotations

import sys
import warnings

MISSING_EXTRA = "attn: needs typer and rich, got no {name}; install them with: pip install 'attn-core[cli]'"


def main() -> None:
    """Run ``attn`` on the arguments of this process, and exit.

    Exits 2 with one line on stderr when the extra ``cli`` is not installed.
    """
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as err:
        print(f"{MISSING_EXTRA.format(name=err.name)} [cli.extra]", file=sys.stderr)
        raise SystemExit(2) from None
    from .app import app

    # torch says so at its first use of a tensor; no package here needs NumPy.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    app(prog_name="attn")
