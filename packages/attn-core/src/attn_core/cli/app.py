"""The commands and their options. Nothing here imports torch, so that help is there at once."""

from __future__ import annotations

from importlib.metadata import version as version_of
from pathlib import Path
from typing import Annotated, Any

import typer

from .mount import MountingGroup
from .output import give_up, one_line, refusing, say_json, show

app = typer.Typer(
    name="attn",
    cls=MountingGroup,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Attention for AMD Instinct: which kernel serves a call and why, and what this machine has.",
)

_LAYER, _BATCH, _WHERE = "Layer", "Batch", "Device and backends"
_MEASURE = "What to measure and write"
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def _option(flag: str, metavar: str, text: str, panel: str) -> Any:
    # Values arrive as text and are checked in one place, so that every refusal reads the same.
    return typer.Option(flag, metavar=metavar, help=text, rich_help_panel=panel)


def _switch(flag: str, text: str, panel: str) -> Any:
    return typer.Option(flag, help=text, rich_help_panel=panel)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"attn {version_of('attn-core')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def attn(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Print help when no command is given."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), nl=False)


@app.command()
def explain(
    op: Annotated[
        str | None,
        _option(
            "--op",
            "OP",
            "decode, verify, prefill_paged, prefill_ragged, prefill_single, decode_single, append or "
            "chain_sampling.",
            _LAYER,
        ),
    ] = None,
    heads: Annotated[
        str | None, _option("--heads", "QO/KV", "Query and key/value heads. (32/8)", _LAYER)
    ] = None,
    head_dim: Annotated[str | None, _option("--head-dim", "N or QK/VO", "Head sizes. (128)", _LAYER)] = None,
    dtype: Annotated[
        str | None, _option("--dtype", "DTYPE", "Type of q; of probabilities. (bfloat16; float32)", _LAYER)
    ] = None,
    kv_dtype: Annotated[str | None, _option("--kv-dtype", "DTYPE", "Type of k and v. (q's)", _LAYER)] = None,
    vocab_size: Annotated[
        str | None, _option("--vocab-size", "N", "Of chain_sampling. (128256)", _LAYER)
    ] = None,
    o_dtype: Annotated[str | None, _option("--o-dtype", "DTYPE", "Type of out. (q's)", _LAYER)] = None,
    layout: Annotated[str | None, _option("--layout", "LAYOUT", "NHD or HND. (NHD)", _LAYER)] = None,
    page_size: Annotated[str | None, _option("--page-size", "N", "Tokens per page. (16)", _LAYER)] = None,
    mask: Annotated[
        str | None,
        _option("--mask", "MASK", "none, causal or custom. (causal; none for one row)", _LAYER),
    ] = None,
    pos_encoding: Annotated[
        str | None, _option("--pos-encoding", "MODE", "NONE, ROPE_LLAMA or ALIBI. (NONE)", _LAYER)
    ] = None,
    soft_cap: Annotated[
        str | None, _option("--soft-cap", "X", "Logits soft cap; 0 for none. (0)", _LAYER)
    ] = None,
    window: Annotated[
        str | None, _option("--window", "W", "window_left; -1 for all keys. (-1)", _LAYER)
    ] = None,
    fixed_split_size: Annotated[
        str | None, _option("--fixed-split-size", "N", "Split-KV chunk, in pages (tokens if ragged).", _LAYER)
    ] = None,
    disable_split_kv: Annotated[bool, _switch("--disable-split-kv", "Never split keys.", _LAYER)] = False,
    needs_lse: Annotated[bool, _switch("--needs-lse", "The log-sum-exp will be asked for.", _LAYER)] = False,
    tensor_cores: Annotated[
        bool, _switch("--tensor-cores", "Decode on the matrix path; verify and prefill are.", _LAYER)
    ] = False,
    latent: Annotated[
        bool,
        _switch("--latent", "Values inside the keys: paged prefill, heads 16/1, head_dim 576/512.", _LAYER),
    ] = False,
    batch: Annotated[str | None, _option("--batch", "N", "Requests. (8; 1 for single)", _BATCH)] = None,
    q_len: Annotated[
        str | None,
        _option("--q-len", "N", "Query rows per request. (1; verify 4; prefill 512)", _BATCH),
    ] = None,
    kv_len: Annotated[str | None, _option("--kv-len", "N", "Keys per request. (4096)", _BATCH)] = None,
    graph: Annotated[bool, _switch("--graph", "In a graph captured for exactly this batch.", _BATCH)] = False,
    arch: Annotated[
        str | None,
        _option(
            "--arch", "ARCH", "gfx942, gfx950, sm_90, cpu; gfx942:304 sets the CUs. (this machine)", _WHERE
        ),
    ] = None,
    backend: Annotated[
        str | None,
        _option("--backend", "NAME", "A backend or backend/path, as backend= would. (auto)", _WHERE),
    ] = None,
    assume: Annotated[
        list[str] | None,
        _option(
            "--assume", "NAME=VERSION", "Assume this version of NAME's library, or none. Repeatable.", _WHERE
        ),
    ] = None,
    aiter_version: Annotated[
        str | None, _option("--aiter", "VERSION", "Short for --assume aiter=VERSION.", _WHERE)
    ] = None,
    json: _Json = False,
) -> None:
    """Show which kernel serves a call, and why every other does not.

    Works for any device on any machine; nothing is built, and whether kernels build or load is not judged.
    Exits 0 when a route exists, 1 when none does, 2 when an option does not fit.
    """
    given = dict(locals())
    from .explain_command import explain_command

    assumed = given.pop("assume"), given.pop("aiter_version")
    del given["json"]
    explain_command(given, *assumed, json)


@app.command()
def tune(
    pair: Annotated[
        list[str] | None,
        _option("--pair", "A,B", "Candidates to compare; repeatable. (those with a gate)", _MEASURE),
    ] = None,
    op: Annotated[
        str | None,
        _option("--op", "OP", "prefill_paged (default), prefill_ragged, decode, verify.", _LAYER),
    ] = None,
    heads: Annotated[
        str | None, _option("--heads", "QO/KV,..", "Query and key/value heads. (32/8)", _LAYER)
    ] = None,
    head_dim: Annotated[str | None, _option("--head-dim", "N or QK/VO", "Head sizes. (128)", _LAYER)] = None,
    dtype: Annotated[str | None, _option("--dtype", "DTYPE", "Type of q. (bfloat16)", _LAYER)] = None,
    kv_dtype: Annotated[str | None, _option("--kv-dtype", "DTYPE", "Type of k and v. (q's)", _LAYER)] = None,
    layout: Annotated[str | None, _option("--layout", "LAYOUT", "NHD or HND. (NHD)", _LAYER)] = None,
    page_size: Annotated[str | None, _option("--page-size", "N", "Tokens per page. (16)", _LAYER)] = None,
    mask: Annotated[str | None, _option("--mask", "MASK", "none or causal. (causal)", _LAYER)] = None,
    soft_cap: Annotated[str | None, _option("--soft-cap", "X", "Logits soft cap. (0: none)", _LAYER)] = None,
    window: Annotated[str | None, _option("--window", "W", "window_left. (-1: all keys)", _LAYER)] = None,
    batch: Annotated[str | None, _option("--batch", "N,..", "Requests. (16; CPU 2)", _BATCH)] = None,
    q_len: Annotated[
        str | None, _option("--q-len", "N,..", "Query rows per request. (1 to 512; CPU 256)", _BATCH)
    ] = None,
    kv_len: Annotated[
        str | None, _option("--kv-len", "N,..", "Keys per request. (512 to 32768; CPU 256 to 4096)", _BATCH)
    ] = None,
    device: Annotated[
        str | None, _option("--device", "DEVICE", "cpu, cuda:0 ... (the first GPU, else cpu)", _WHERE)
    ] = None,
    quick: Annotated[bool, _switch("--quick", "A coarse grid; crossovers are not sited.", _MEASURE)] = False,
    check: Annotated[
        bool, _switch("--check", "Write nothing: compare auto with the fastest candidate.", _MEASURE)
    ] = False,
    dry_run: Annotated[bool, _switch("--dry-run", "Say what would be measured, and end.", _MEASURE)] = False,
    out: Annotated[
        Path | None,
        _option("--out", "FILE", "Overlay to add to; with --check to read. (ATTN_TUNED)", _MEASURE),
    ] = None,
    plot: Annotated[
        Path | None, _option("--plot", "FILE", "Picture of the crossovers. (beside --out)", _MEASURE)
    ] = None,
    json: _Json = False,
) -> None:
    """Measure candidates side by side on this machine and route by the result.

    Every cell is checked against the reference. Writes a file that routing reads from then on, and a plot.
    Exits 0, 1 when nothing could be measured, a result is wrong or --check finds auto too slow, 2 when an
    option does not fit, 130 when interrupted; then nothing is written.
    """
    given = dict(locals())
    from . import tune_command as run

    for name in ("check", "dry_run", "out", "plot", "json"):
        del given[name]
    given["pair"] = tuple(pair or ())
    raise typer.Exit(run.tune(given, check=check, dry_run=dry_run, out=out, plot=plot, json=json))


@app.command()
def doctor(
    probe: Annotated[
        bool, typer.Option("--probe", help="Also compile ten steps and compare them with eager.")
    ] = False,
    json: _Json = False,
) -> None:
    """Show versions, devices, build tools, backends and settings of this machine.

    Exits 0 when at least one backend can run here.
    """
    from . import doctor as run
    from .doctor_view import render

    facts = run.facts(probe)
    if json:
        say_json(facts)
    else:
        show(render(facts))
    raise typer.Exit(0 if facts["ok"] else 1)


@app.command()
def reasons(json: _Json = False) -> None:
    """List every reason code a refusal can carry, with its stage and meaning."""
    from . import reasons as run
    from .installed import all_codes, installed

    with refusing("reasons"):
        rows, faults = all_codes(installed())
    if json:
        say_json(run.as_json(rows, faults))
    else:
        show(run.render(rows, faults))


@app.command()
def fuzz(
    backend: Annotated[
        list[str] | None,
        typer.Option("--backend", metavar="NAME", help="A backend to test; repeatable. (all that can run)"),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", min=0, help="How long, per backend.")
    ] = 60.0,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of all sessions.")] = 0,
    session: Annotated[
        int | None, typer.Option("--session", metavar="N", help="Run this one again, with a traceback.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="DEVICE", help="cpu, cuda:0 ... (a GPU of each, else cpu)"),
    ] = None,
    json: _Json = False,
) -> None:
    """Make random right and wrong calls to backends here, and check every answer.

    Right calls are compared with float64 attention. Wrong ones must be refused with a code, and the plan
    before them must still give the same bits. Exits 1 when anything is wrong.
    """
    from . import fuzz as run

    with refusing("fuzz"):
        found = run.fuzz(tuple(backend or ()), seconds, seed, session, None if json else typer.echo, device)
    if json:
        say_json(found)
    raise typer.Exit(1 if any(one["failures"] for one in found["backends"]) else 0)


@app.command()
def docs(
    check: Annotated[
        Path | None,
        typer.Option("--check", metavar="DIR", help="Exit 1 if the pages in DIR are out of date."),
    ] = None,
    write: Annotated[
        Path | None, typer.Option("--write", metavar="DIR", help="Write the pages into DIR.")
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option("--backend", metavar="NAME", help="A backend to describe; repeatable. (all)"),
    ] = None,
    assume: Annotated[
        list[str] | None,
        typer.Option(
            "--assume",
            metavar="NAME=VERSION",
            help="Describe NAME as with this version of its library, whatever is installed; repeatable.",
        ),
    ] = None,
) -> None:
    """Write or check the generated reference pages: reasons, thresholds and backends.

    Without --backend and --assume, those that the pages in DIR were made with hold.
    """
    from . import docs as run
    from .installed import assumptions

    with refusing("docs"):
        place = run.one_place(check, write)
        if not backend and not assume:
            backend, assume = run.recorded(place)
        pages = run.pages(run.described(backend or (), assumptions(assume, None)))
    if write is not None:
        try:
            for path in run.write(pages, place):
                typer.echo(f"wrote {path}")
        except OSError as err:
            give_up("docs", f"--write: needs a writable directory, got {one_line(err)} [cli.docs]")
        return
    stale = run.differences(pages, place)
    for line in stale:
        typer.echo(line)
    if stale:
        give_up("docs", f"{place} is out of date; run: attn docs --write {place}", 1)
    typer.echo(f"{place} is up to date")
