"""``attn explain``: every candidate's verdict on one question, on any machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from .. import route
from ..backend import Backend
from ..errors import NoRoute, Unsupported, needs
from ..measured import NOTHING, Measured
from ..plugins import Broken, Registry
from ..problem import AttentionProblem, PagedKV
from ..query import Query
from ..reasons import Reason
from ..route import AUTO, Verdict
from ..target import DeviceTarget
from .ask import Options, ask, requested
from .grounds import Ground, grounds, render_grounds
from .installed import Assumed, installed
from .output import grid, plain, styled, told


class BackendRaised(RuntimeError):
    """A backend raised instead of answering; plan() would meet the same exception."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """One question and what every candidate says to it.

    Attributes:
        query: The question.
        requested: ``auto``, a backend or a candidate.
        assumed: Versions the backends were told to assume.
        verdicts: One per candidate, in the order ``auto`` tries them.
        broken: Plugins whose candidates are therefore not among them.
        grounds: Thresholds and measurements of this device that the verdicts rest on.
    """

    query: Query
    requested: str
    assumed: Mapping[str, str]
    verdicts: tuple[Verdict, ...]
    broken: tuple[Broken, ...]
    grounds: tuple[Ground, ...] = ()


def chosen(verdicts: Sequence[Verdict]) -> str | None:
    """Return ``backend/path``, or None when every candidate refuses."""
    return next((v.candidate for v in verdicts if v.chosen), None)


def explain(options: Options, assumed: Mapping[str, str]) -> Explanation:
    """Answer; builds nothing and asks no device that was not asked for.

    Args:
        options: As typed.
        assumed: Library versions to assume, by backend.

    Raises:
        ValueError: An option does not fit.
        BackendRaised: A backend raised while it was asked.
    """
    pretended = Assumed(assumed) if assumed else None
    registry = installed() if pretended is None else pretended.registry
    query = ask(options, registry.targets)
    verdicts = _judge(query, requested(options), registry)
    if pretended is not None:
        pretended.require_asked()
    found = grounds(query, requested(options), verdicts, registry)
    return Explanation(query, requested(options), assumed, verdicts, registry.broken, found)


def _judge(query: Query, wanted: str, registry: Registry) -> tuple[Verdict, ...]:
    try:
        return _ask_backends(query, wanted, registry.backends, registry.measured)
    except NoRoute:
        raise
    except Unsupported as late:
        raise BackendRaised(str(late)) from late
    except Exception as err:
        for backend in registry.backends:
            try:
                _ask_backends(query, AUTO, (backend,))
            except Exception as again:
                raise BackendRaised(
                    needs(f"backend {backend.name}", "an answer", told(again), "cli.backend-raised")
                ) from err
        raise


def _ask_backends(
    query: Query, wanted: str, backends: tuple[Backend, ...], measured: Measured = NOTHING
) -> tuple[Verdict, ...]:
    screened = route.screen(
        query.target, query.problem, backends, graph=query.graph, requested=wanted, measured=measured
    )
    return route.explain(screened, query)


def as_json(e: Explanation) -> dict[str, object]:
    """Return the explanation as one object."""
    return {
        "chosen": chosen(e.verdicts),
        "candidates": said(e.verdicts),
        "query": _echo(e),
        "grounds": [asdict(g) for g in e.grounds],
        "broken": [asdict(b) for b in e.broken],
    }


def said(verdicts: Sequence[Verdict]) -> list[dict[str, object]]:
    """Return what each candidate says, ready for JSON."""
    return [
        {"candidate": v.candidate, "chosen": v.chosen, "refusals": [_refusal(r) for r in v.refusals]}
        for v in verdicts
    ]


def _refusal(reason: Reason) -> dict[str, object]:
    return {
        "code": reason.code.slug,
        "stage": reason.code.stage.name.lower(),
        "limit": plain(reason.limit),
        "got": plain(reason.got),
        "text": reason.text,
    }


def _echo(e: Explanation) -> dict[str, object]:
    problem = asdict(e.query.problem)
    del problem["_hash"], problem["kv"]
    kv = e.query.problem.kv
    return {
        **problem,
        "kv_layout": kv.order,
        "page_size": e.query.problem.page_size,
        "target": asdict(e.query.target),
        "batch": asdict(e.query.batch),
        "graph": None if e.query.graph is None else asdict(e.query.graph),
        "backend": e.requested,
        "assumed": dict(e.assumed),
    }


def render(e: Explanation) -> RenderableType:
    """Return the explanation as text for a terminal."""
    return page(
        e.query.problem.op.value, device_name(e.query.target), _facts(e), e.verdicts,
        render_grounds(e.grounds), e.broken, sentence(e),
    )  # fmt: skip


def page(
    op: str,
    device: str,
    facts: str,
    verdicts: Sequence[Verdict],
    grounds: Iterable[RenderableType],
    broken: Sequence[Broken],
    closing: str,
) -> RenderableType:
    """Return a page: what was asked, what each candidate says, and the answer in a sentence."""
    title = Text.assemble((op, "bold"), " on ", (device, "bold"))
    parts: list[RenderableType] = [title, styled(facts, "dim"), Text()]
    taken = False
    name_width = max((len(v.candidate) for v in verdicts), default=1)
    code_width = max((len(r.code.slug) for v in verdicts for r in v.refusals), default=1)
    for verdict, after in zip(verdicts, (*verdicts[1:], None), strict=True):
        parts.append(_headline(verdict, name_width, after=taken))
        if verdict.refusals and not _alike(verdict, after):  # neighbours share what they share
            parts.append(_because(verdict.refusals, code_width))
        taken = taken or verdict.chosen
    parts += [Text(), *grounds]
    for each in broken:
        line = f"Not asked: plugin {each.name} is broken ({each.error})"
        parts.append(styled(line, "yellow"))
    parts.append(Text(closing))
    return Group(*parts)


def _alike(verdict: Verdict, other: Verdict | None) -> bool:
    def said(v: Verdict) -> list[tuple[str, str]]:
        return [(reason.code.slug, reason.text) for reason in v.refusals]

    return other is not None and said(verdict) == said(other)


def _headline(verdict: Verdict, width: int, *, after: bool) -> RenderableType:
    if verdict.chosen:
        word, style = "chosen", "bold green"
    elif verdict.refusals:
        word, style = "refused", "red"
    else:
        word, style = "also able" if after else "able", "cyan"
    row = grid(width, None)
    row.add_row(styled(verdict.candidate, "bold green" if verdict.chosen else ""), styled(word, style))
    return Padding(row, (0, 0, 0, 2), expand=True)


def _because(refusals: tuple[Reason, ...], code_width: int) -> RenderableType:
    """Rows of stage, what it needs and got, and code."""
    table = grid(12, None, code_width)
    for reason in refusals:
        stage = reason.code.stage.name.lower()
        table.add_row(styled(stage, "dim"), Text(reason.text), styled(reason.code.slug, "dim"))
    return Padding(table, (0, 0, 0, 4), expand=True)


def device_name(target: DeviceTarget) -> str:
    """Return a device in words."""
    units = f", {target.num_cus} compute units" if target.num_cus else ""
    return target.arch + (f" ({target.kind}{units})" if target.kind != target.arch else "")


def _facts(e: Explanation) -> str:
    p, batch = e.query.problem, e.query.batch
    facts = [f"batch {batch.batch_size}"]
    if batch.uniform_q_len is None:
        facts.append(f"{batch.total_q} rows")
    else:
        facts += [f"q_len {batch.uniform_q_len}", f"kv_len {batch.max_kv_len}", f"mask {p.mask.value}"]
    facts += [f"heads {p.num_qo_heads}/{p.num_kv_heads}", f"head_dim {_both(p.head_dim_qk, p.head_dim_vo)}"]
    facts.append(_both(str(plain(p.q_dtype)), str(plain(p.kv_dtype))))
    if isinstance(p.kv, PagedKV):
        facts.append(f"page_size {p.kv.page_size}")
    facts += [p.kv.order, *_extras(p)]
    facts += ["graph"] if e.query.graph is not None else []
    facts += [f"backend {e.requested}"] if e.requested != AUTO else []
    facts += [f"assuming {name} {version}" for name, version in e.assumed.items()]
    return ", ".join(facts)


def _extras(p: AttentionProblem) -> list[str]:
    """Facts worth a word only when they are not the usual ones."""
    unusual = {
        f"out {plain(p.o_dtype)}": p.o_dtype != p.q_dtype,
        f"pos_encoding {p.pos_encoding.value}": p.pos_encoding.value != "NONE",
        f"window_left {p.window_left}": p.window_left >= 0,
        f"soft cap {p.logits_soft_cap:g}": p.logits_soft_cap > 0,
        "lse": p.needs_lse,
        "tensor cores": p.use_tensor_cores and p.op.value.startswith("decode"),
        f"fixed_split_size {p.fixed_split_size}": p.fixed_split_size is not None,
        "no split-KV": p.disable_split_kv,
        "latent": p.latent,
    }
    return [text for text, told in unusual.items() if told]


def _both(first: object, second: object) -> str:
    return str(first) if first == second else f"{first}/{second}"


def sentence(e: Explanation) -> str:
    """Return the answer in one plain sentence."""
    return conclusion(f"{e.query.problem.op.value} on {e.query.target.arch}", e.requested, e.verdicts)


def conclusion(what: str, wanted: str, verdicts: Sequence[Verdict], caller: str = "plan()") -> str:
    """Return who would serve ``what``, and who was passed over, in one plain sentence."""
    taken = chosen(verdicts)
    if taken is None:
        whom = "installed" if wanted == AUTO else f"of {wanted!r}"
        return f"Nothing {whom} can serve {what} as asked; {caller} would raise NoRoute with these reasons."
    passed: list[str] = []
    for verdict in verdicts:
        if verdict.chosen:
            break
        if any(not reason.code.quiet for reason in verdict.refusals):
            passed.append(verdict.candidate)
    if not passed:
        return f"{taken} would serve {what}."
    verb = "is" if len(passed) == 1 else "are"
    return f"{taken} would serve {what}, since {_list(passed)} {verb} refused."


def _list(names: list[str]) -> str:
    """``a, b and c``; a long one is cut."""
    if len(names) > 5:
        names = [*names[:4], f"{len(names) - 4} more"]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
