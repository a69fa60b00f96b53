"""`attn demo`: write Python with the model shipped here, with and without speculation, and compare."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch
import typer
from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from attn_core import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
from attn_tiny_lm.data import stdlib_root
from attn_tiny_lm.generate import Engine, Generation
from attn_tiny_lm.generate import Progress as OnStep
from attn_tiny_lm.model import load_model

# A held-out file, so the model has not seen it in training.
DEFAULT_PROMPT = "wsgiref/util.py"
DEFAULT_PROMPT_CHARS = 1200
# Four rows per request, times four query heads per key/value head, is 16: one tile of a matrix kernel.
DEFAULT_DRAFTS = 3
CUTS = (1.0, 0.75, 0.5, 0.25)
READ_AT_MOST = 1 << 20

Wrapper: TypeAlias = BatchPrefillWithPagedKVCacheWrapper | BatchDecodeWithPagedKVCacheWrapper


def demo(
    prompt: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="UTF-8 file to continue; default: the start of a library file held out from training.",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(metavar="N", help="Bytes to write for each request.")] = 96,
    drafts: Annotated[
        int, typer.Option(metavar="N", help="Guessed tokens per request and verify step.")
    ] = DEFAULT_DRAFTS,
    backend: Annotated[
        str, typer.Option(metavar="NAME", help="auto, or the backend to use for every step.")
    ] = "auto",
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compile the steps, and check that the text is that of eager.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Write text with plain decode and with speculative verify over a paged cache, and check that both agree.

    Four requests of different lengths, cut from one prompt, run as one batch. Exit code 1 if the two texts
    differ, 2 if an argument cannot be used.
    """
    with _one_thread():
        try:
            # The first use of a machine compiles kernels; a minute without a word would look like a fault.
            with Console(stderr=True).status("preparing (the first use builds kernels, about a minute)"):
                engine, prompts = _prepare(prompt, tokens, drafts, backend, compiled)
        except (OSError, ValueError, NotImplementedError) as error:
            typer.echo(f"attn demo: {' '.join(_said(error).split())}", err=True)
            raise typer.Exit(2) from None
        with _progress((tokens - 1) * len(prompts)) as track:  # the first of each comes with its prompt
            plain = engine.plain(prompts, tokens, track("plain decode"))
            speculative = engine.speculative(prompts, tokens, drafts, track("speculative verify"))
        eager = Engine(engine.model, backend=backend).plain(prompts, tokens) if compiled else plain
    summary = summarize(engine, plain, speculative)
    summary["compiled"] = compiled
    summary["identical"] = summary["identical"] and eager.texts == plain.texts
    if as_json:
        print(json.dumps(summary))
    else:
        _show(Console(), prompts, plain, summary)
    if not summary["identical"]:
        raise typer.Exit(1)


def _said(error: Exception) -> str:
    if isinstance(error, OSError):
        got = f"{error.filename}: {error.strerror}"
        return f"--prompt: needs a file that can be read, got {got} [tiny-lm.prompt]"
    argument, colon, rest = str(error).partition(":")
    return ("--" if argument in ("prompt", "tokens", "backend") else "") + argument + colon + rest


def _prepare(
    prompt: Path | None, tokens: int, drafts: int, backend: str, compiled: bool
) -> tuple[Engine, list[bytes]]:
    """Check every argument, then run two tokens so that whatever is built or loaded late is not timed."""
    for name, value in (("--tokens", tokens), ("--drafts", drafts)):
        if value < 1:
            raise ValueError(f"{name}: needs at least 1, got {value} [tiny-lm.arguments]")
    prompts = cut(read_prompt(prompt))
    engine = Engine(load_model(), backend=backend, compiled=compiled)
    engine.check_fits(prompts, tokens, drafts)
    shortest = [min(prompts, key=len)]
    engine.plain(shortest, 2)
    engine.speculative(shortest, 2, drafts)
    return engine, prompts


def read_prompt(path: Path | None) -> str:
    """Text of the prompt file, or of the default one.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is empty, longer than 1 MiB, or not UTF-8.
    """
    source = path if path is not None else stdlib_root() / DEFAULT_PROMPT
    with source.open("rb") as file:
        raw = file.read(READ_AT_MOST + 1)
    if not raw:
        raise ValueError(f"prompt: needs at least one byte, got an empty file {source} [tiny-lm.prompt]")
    if len(raw) > READ_AT_MOST:
        raise ValueError(f"prompt: needs at most {READ_AT_MOST} bytes, got more in {source} [tiny-lm.prompt]")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        got = f"byte 0x{raw[error.start]:02x} at {error.start} in {source}"
        raise ValueError(f"prompt: needs UTF-8 text, got {got} [tiny-lm.prompt]") from None
    return text if path is not None else text[:DEFAULT_PROMPT_CHARS]


def cut(text: str) -> list[bytes]:
    """Prompts of several lengths: the whole text and its first three, two and one quarters."""
    return [text[: max(1, int(len(text) * part))].encode() for part in CUTS]


def summarize(engine: Engine, plain: Generation, speculative: Generation) -> dict[str, Any]:
    """The figures of a run, as JSON can hold them.

    `accepted_per_step` is the number of tokens a request gets from one verify step, on average over all
    requests and steps; plain decode gives 1. `ms_per_token_*` is wall time of the steps over the tokens of
    all requests.
    """
    return {
        "identical": plain.texts == speculative.texts,
        "accepted_per_step": round(speculative.accepted_per_step, 4),
        "ms_per_token_plain": round(plain.ms_per_token, 4),
        "ms_per_token_spec": round(speculative.ms_per_token, 4),
        "steps_plain": plain.steps,
        "steps_spec": speculative.steps,
        "requests": len(plain.texts),
        "tokens": len(plain.texts[0]),
        "backend": engine.verify.backend,
        "backend_fallback_reason": engine.verify.backend_fallback_reason,
        "routes": {
            "prefill": _route(engine.prefill),
            "decode": _route(engine.decode),
            "verify": _route(engine.verify),
        },
        "texts": [_printable(text) for text in plain.texts],
    }


def _route(wrapper: Wrapper) -> dict[str, Any]:
    route = wrapper.route
    if route is None:
        return {"candidate": None, "refused": []}
    return {"candidate": route.candidate, "refused": [str(reason) for reason in route.refused]}


def _printable(text: bytes) -> str:
    """Generated bytes as text that is safe to print; a cut or invalid character becomes U+FFFD."""
    decoded = text.decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in decoded)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep torch to one thread, and put back what was set.

    A step has a few rows: a second thread saves a fifth of the time on an idle machine, and where the cores
    are busy, threads that wait for each other make it many times slower.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A bar on stderr per way of generating; gives a function from a label to a progress callback."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:

        def track(label: str) -> OnStep:
            task = bars.add_task(label, total=total)
            return lambda gained: bars.advance(task, gained)

        yield track


def _show(console: Console, prompts: Sequence[bytes], plain: Generation, summary: dict[str, Any]) -> None:
    for prompt, text in zip(prompts, plain.texts, strict=True):
        shown = Text("..." + _printable(prompt)[-160:], style="dim")
        shown.append(_printable(text), style="bold not dim")
        console.print(
            Panel(shown, title=f"prompt {len(prompt)} bytes, written {len(text)}", title_align="left")
        )
    console.print(_figures(summary))
    for steps, candidate, passed_over in _alike(summary["routes"]):
        console.print(f"{', '.join(steps)}: {candidate}", highlight=False)
        if passed_over:
            console.print(Padding(Text(passed_over, style="dim"), (0, 0, 0, 2)))
    if summary["backend_fallback_reason"]:
        console.print(f"fallback reason: {summary['backend_fallback_reason']}", markup=False)
    verdict = "identical" if summary["identical"] else "DIFFERENT"
    console.print(f"plain and speculative text: {verdict}", style="green" if summary["identical"] else "red")


def _alike(routes: dict[str, Any]) -> list[tuple[list[str], str, str]]:
    """Steps with one candidate and one set of reasons together."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, route in routes.items():
        found.setdefault((route["candidate"], _grouped(route["refused"])), []).append(name)
    return [(steps, *answer) for answer, steps in found.items()]


def _grouped(refused: Sequence[str]) -> str:
    """Reasons as lines, candidates with the same reason on one."""
    by_cause: dict[str, list[str]] = {}
    for reason in refused:
        candidate, _, cause = reason.partition(": ")
        by_cause.setdefault(cause, []).append(candidate)
    return "\n".join(f"{', '.join(candidates)}: {cause}" for cause, candidates in by_cause.items())


def _figures(summary: dict[str, Any]) -> Table:
    table = Table("", "tokens per request and step", "steps", "ms per token")
    table.add_row("plain decode", "1.00", str(summary["steps_plain"]), f"{summary['ms_per_token_plain']:.2f}")
    table.add_row(
        "speculative verify",
        f"{summary['accepted_per_step']:.2f}",
        str(summary["steps_spec"]),
        f"{summary['ms_per_token_spec']:.2f}",
    )
    return table
