"""From the options of ``attn explain`` to a Query, held to what the public entry points accept."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch

from ..arguments import as_dtype
from ..batch import INT32_MAX, BatchShape
from ..errors import needs
from ..options import make_problem
from ..problem import AttentionProblem, MaskMode, Op, PagedKV, RaggedKV
from ..query import GraphLimits, Query
from ..route import AUTO
from ..sampling_route import OP as CHAIN_SAMPLING
from ..sampling_route import SamplingProblem
from ..target import DeviceTarget, parse_target, target_of

_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options as typed; None (False for a switch) where one was not given."""

    op: str | None = None
    arch: str | None = None
    batch: str | None = None
    q_len: str | None = None
    kv_len: str | None = None
    page_size: str | None = None
    heads: str | None = None
    head_dim: str | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    o_dtype: str | None = None
    layout: str | None = None
    mask: str | None = None
    pos_encoding: str | None = None
    soft_cap: str | None = None
    window: str | None = None
    fixed_split_size: str | None = None
    disable_split_kv: bool = False
    needs_lse: bool = False
    tensor_cores: bool = False
    latent: bool = False
    graph: bool = False
    backend: str | None = None
    vocab_size: str | None = None


@dataclass(frozen=True, slots=True)
class _Profile:
    """What an op's entry point accepts and what is usual: the first mask is the default."""

    q_len: int
    least_q: int
    most_q: int
    masks: tuple[MaskMode, ...]
    tensor_cores: bool


_ANY_MASK = (MaskMode.CAUSAL, MaskMode.NONE, MaskMode.CUSTOM)
_PREFILL = _Profile(512, 1, INT32_MAX, _ANY_MASK, True)
_ONE_ROW = _Profile(1, 1, 1, (MaskMode.NONE,), False)
_PROFILES = {
    Op.DECODE: _ONE_ROW,
    Op.VERIFY: _Profile(4, 2, INT32_MAX, (MaskMode.CAUSAL,), True),
    Op.PREFILL_PAGED: _PREFILL,
    Op.PREFILL_RAGGED: _PREFILL,
    Op.PREFILL_SINGLE: _PREFILL,
    Op.DECODE_SINGLE: _ONE_ROW,
    Op.APPEND: _Profile(1, 1, INT32_MAX, (MaskMode.NONE,), False),
}

_PAGED = frozenset(op for op in Op if op.paged)
_BATCHED = frozenset(Op) - {Op.PREFILL_SINGLE, Op.DECODE_SINGLE}
_ATTENDING = frozenset(Op) - {Op.APPEND}
_PLANNED = _BATCHED & _ATTENDING
_APPLIES = {
    "page_size": ("an op with a paged cache", _PAGED),
    "batch": ("an op over a batch", _BATCHED),
    "latent": ("prefill_paged", frozenset({Op.PREFILL_PAGED})),
    "vocab_size": (CHAIN_SAMPLING, frozenset[Op]()),
    "graph": ("an op whose wrapper can be captured", _PLANNED),
    "fixed_split_size": ("an op with a batch wrapper", _PLANNED),
    "disable_split_kv": ("an op with a batch wrapper", _PLANNED),
    **dict.fromkeys(
        ("kv_len", "kv_dtype", "o_dtype", "mask", "pos_encoding", "soft_cap", "window", "needs_lse",
         "tensor_cores"),
        ("an op that attends", _ATTENDING),
    ),
}  # fmt: skip


def this_machine() -> DeviceTarget:
    """Return the first GPU if there is one, else the CPU. Starts no GPU runtime where there is none."""
    return target_of(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))


def ask(options: Options, known: tuple[DeviceTarget, ...]) -> Query:
    """Build the complete question.

    Args:
        options: As typed.
        known: Devices that installed packages describe.

    Raises:
        ValueError: An option is missing, malformed, unknown, or one that the op's entry point does not
            have; the text names the option.
    """
    op = Op(_choice("op", options.op, None, [*(op.value for op in Op), CHAIN_SAMPLING]))
    _refuse_foreign(options, op)
    target = target_asked(options, known)
    problem = _problem(options, op)
    shape = _shape(options, problem)
    return Query(target, problem, shape, _limits(shape, problem) if options.graph else None)


_OF_SAMPLING = frozenset({"op", "arch", "dtype", "vocab_size", "backend"})


def ask_sampling(options: Options) -> SamplingProblem:
    """Build the question about an acceptance step.

    Raises:
        ValueError: As for :func:`ask`.
    """
    for field in fields(options):
        if field.name not in _OF_SAMPLING and getattr(options, field.name) not in (None, False):
            raise ValueError(needs(_flag(field.name), "an op over a cache", CHAIN_SAMPLING, "cli.option"))
    dtype = as_dtype("--dtype", _dtype(options.dtype) or "float32")
    return SamplingProblem(dtype, dtype, _whole("vocab-size", options.vocab_size, 128_256))


def target_asked(options: Options, known: tuple[DeviceTarget, ...]) -> DeviceTarget:
    """Return the device that was asked about, by default one of this machine.

    Raises:
        ValueError: ``--arch`` names none.
    """
    return this_machine() if options.arch is None else parse_target(options.arch, known)


def requested(options: Options) -> str:
    """Return the backend that was asked for."""
    return AUTO if options.backend is None else options.backend


def _refuse_foreign(options: Options, op: Op) -> None:
    """An option the entry point does not have is refused rather than left without effect."""
    for field in fields(options):
        given = getattr(options, field.name) not in (None, False)
        if given and field.name in _APPLIES and op not in _APPLIES[field.name][1]:
            raise ValueError(needs(_flag(field.name), _APPLIES[field.name][0], op.value, "cli.option"))


def _problem(options: Options, op: Op) -> AttentionProblem:
    profile = _PROFILES[op]
    mask = _choice("mask", options.mask, profile.masks[0].value, [m.value for m in profile.masks], op)
    heads = _pair("heads", options.heads, "16/1" if options.latent else "32/8")
    dims = _pair("head-dim", options.head_dim, "576/512" if options.latent else "128")
    dtype = _dtype(options.dtype) or "bfloat16"
    layout = _choice("layout", options.layout, "NHD", ["NHD", "HND"])
    page_size = _whole("page-size", options.page_size, 16)
    split = options.fixed_split_size
    asked = make_problem(
        op,
        (heads[1], heads[1]) if op is Op.APPEND else heads,
        dims,
        dtype,
        _dtype(options.kv_dtype) or dtype,
        _dtype(options.o_dtype),
        PagedKV(page_size, layout) if op.paged else RaggedKV(layout),
        MaskMode(mask),
        options.pos_encoding or "NONE",
        _whole("window", options.window, -1, least=-1),
        _real("soft-cap", options.soft_cap),
        1.0 if op is Op.APPEND else None,
        None,
        None,
        options.needs_lse,
        options.tensor_cores or profile.tensor_cores,
        None if split is None else _whole("fixed-split-size", split, 1),
        options.disable_split_kv,
    )
    return replace(asked, latent=True) if options.latent else asked


def _shape(options: Options, problem: AttentionProblem) -> BatchShape:
    """The integers of a batch of equal requests."""
    op, profile = problem.op, _PROFILES[problem.op]
    batch = _whole("batch", options.batch, 8 if op in _BATCHED else 1)
    q_len = _whole("q-len", options.q_len, profile.q_len)
    if not profile.least_q <= q_len <= profile.most_q:
        least, most = profile.least_q, profile.most_q
        want = f"{least}" if least == most else f"at least {least}" if q_len < least else f"at most {most}"
        raise ValueError(needs("--q-len", f"{want} for {op.value}", q_len, "cli.q-len"))
    rows = batch * q_len
    if op is Op.APPEND:
        # An append brings rows with positions of their own; its entry point knows no lengths.
        return BatchShape(
            batch_size=batch, total_q=rows, max_q_len=rows, uniform_q_len=None, max_kv_len=0, total_kv=0
        )
    kv_len = _whole("kv-len", options.kv_len, 4096, least=0)
    if op is Op.VERIFY and q_len > kv_len:
        want = f"at most --kv-len {kv_len} for verify (append the drafts first)"
        raise ValueError(needs("--q-len", want, q_len, "core.kv-shorter-than-q"))
    pages = 0 if problem.page_size is None else -(-kv_len // problem.page_size)
    return BatchShape(
        batch_size=batch,
        total_q=rows,
        max_q_len=q_len,
        uniform_q_len=q_len,
        max_kv_len=kv_len,
        total_kv=batch * kv_len,
        total_pages=batch * pages,
    )


def _limits(shape: BatchShape, problem: AttentionProblem) -> GraphLimits:
    """A graph captured for exactly this batch, as longest sequence the one asked about."""
    slots = shape.total_kv if problem.page_size is None else shape.total_pages
    return GraphLimits(shape.batch_size, shape.total_q, slots, shape.max_kv_len)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _choice(
    name: str, given: str | None, default: str | None, values: list[str], op: Op | None = None
) -> str:
    value = default if given is None else given
    if value is None or value not in values:
        want = f"one of {', '.join(values)}" if len(values) > 1 else values[0]
        scope = "" if op is None else f" for {op.value}"
        got = "nothing" if value is None else repr(value)
        raise ValueError(needs(_flag(name), want + scope, got, f"cli.{name}"))
    return value


def _whole(name: str, given: str | None, default: int, least: int = 1) -> int:
    if given is None:
        return default
    try:
        value = int(given)
    except ValueError:
        raise ValueError(needs(_flag(name), "a whole number", repr(given), f"cli.{name}")) from None
    if not least <= value <= INT32_MAX:
        bound = f"at least {least}" if value < least else f"at most {INT32_MAX}"
        raise ValueError(needs(_flag(name), bound, value, f"cli.{name}"))
    return value


def _real(name: str, given: str | None) -> float | None:
    if given is None:
        return None
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(needs(_flag(name), "a finite number", repr(given), f"cli.{name}"))
    return value


def _pair(name: str, given: str | None, default: str) -> tuple[int, int]:
    """``A/B``, or ``A`` for both."""
    first, slash, second = (default if given is None else given).partition("/")
    return _whole(name, first, 1), _whole(name, second if slash else first, 1)


def _dtype(given: str | None) -> str | None:
    return None if given is None else _SHORT_DTYPES.get(given, given)
