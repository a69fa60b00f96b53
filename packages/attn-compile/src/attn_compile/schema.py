"""From a declaration to a schema and a name; and why some declarations cannot be exact."""

from __future__ import annotations

import hashlib
import string
from collections.abc import Sequence

import torch

from attn_core.errors import needs
from attn_core.op_table import Arg, OpRow, Role

NAMESPACE = "attn"
REVISION = 2
"""Raised when the placement guard or a fix changes, so that graphs compiled before are not found on disk."""

_WRITTEN = (Role.CACHE, Role.OUT)
_TENSORS = ("Tensor", "Tensor?")
_CONSTS = ("int", "SymInt", "float", "bool", "str", "ScalarType")
_SKIPS_GRAPHS = getattr(torch.Tag, "cudagraph_unsafe", None)


def inputs(row: OpRow) -> tuple[Arg, ...]:
    """Return the arguments that the caller of the function brings."""
    return tuple(arg for arg in row.args if arg.role is not Role.OUT)


def outs(row: OpRow) -> tuple[Arg, ...]:
    """Return the arguments that the graph allocates."""
    return tuple(arg for arg in row.args if arg.role is Role.OUT)


def updated(row: OpRow) -> tuple[int, ...]:
    """Return the positions of the arguments that are updated by a copy in the graph."""
    return tuple(at for at, arg in enumerate(row.args) if arg.role is Role.INOUT_SMALL)


def written(row: OpRow) -> tuple[int, ...]:
    """Return the positions of the arguments that are declared written."""
    return tuple(at for at, arg in enumerate(row.args) if arg.role in _WRITTEN)


def schema(row: OpRow) -> str:
    """Return the torch schema: ``Tensor(a!)`` marks what is written, everything else is only read."""
    letters, parts = iter(string.ascii_lowercase), []
    for arg in row.args:
        mark = f"Tensor({next(letters)}!)" if arg.role in _WRITTEN else "Tensor"
        parts.append(f"{arg.type.replace('Tensor', mark, 1)} {arg.name}")
    count = row.returns + len(updated(row))
    result = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
    return f"({', '.join(parts)}) -> {result}"


def tags(row: OpRow) -> tuple[torch.Tag, ...]:
    """Return the torch tags: an operator that reads host memory (a plan) is kept out of CUDA graphs."""
    host = row.host or any(arg.role is Role.PLAN for arg in row.args)
    unsafe = (_SKIPS_GRAPHS,) if host and _SKIPS_GRAPHS is not None else ()
    return (torch.Tag.pt2_compliant_tag, *unsafe)


def name(row: OpRow) -> str:
    """Return ``base__fingerprint``.

    Inductor and AOTAutograd look compiled graphs up on disk by operator name alone. With the declaration in
    the name a graph made for another declaration is never found.
    """
    facts = (row.base, schema(row), *map(str, tags(row)), str(row.revision), str(REVISION))
    return f"{row.base}__{hashlib.sha256('|'.join(facts).encode()).hexdigest()[:8]}"


def validate(row: OpRow) -> OpRow:
    """Return a row that can be exact.

    Raises:
        ValueError: It cannot; names operator, argument and fix.
    """
    if not row.base.isidentifier():
        _fault(row, "base", "an identifier", repr(row.base), "name", "rename it")
    names = [arg.name for arg in row.args]
    for arg in row.args:
        if names.count(arg.name) > 1 or not arg.name.isidentifier():
            _fault(row, arg.name, "a name of its own", f"{names.count(arg.name)} of it", "name", "rename it")
        _validate_type(row, arg)
    caches = [arg.name for arg in row.args if arg.role is Role.CACHE]
    if len(caches) > 1:
        _fault(
            row, caches[1], "at most one argument of role cache", f"{' and '.join(caches)}", "two-caches",
            "torch copies or misplaces the second where both are views of one allocation: take the allocation"
            " once and int[] paths into it, or split the operator",
        )  # fmt: skip
    _validate_results(row)
    return row


def _validate_type(row: OpRow, arg: Arg) -> None:
    tensor = arg.type in _TENSORS
    if arg.role is Role.PLAN and arg.type != "Tensor":
        _fault(
            row, arg.name, "a Tensor for role plan", arg.type, "per-plan",
            "torch compiles again for every new value of an int, float or str: put what changes per plan into"
            " an int64 CPU tensor of fixed length",
        )  # fmt: skip
    if arg.role is Role.CONST:
        plain = arg.type.removesuffix("?").removesuffix("[]")
        if plain not in _CONSTS:
            _fault(row, arg.name, f"one of {', '.join(_CONSTS)}", arg.type, "type", "use role read")
    elif not tensor:
        _fault(row, arg.name, f"a Tensor for role {arg.role}", arg.type, "type", "use role const")
    if arg.role in (Role.CACHE, Role.INOUT_SMALL) and arg.type != "Tensor":
        fix = "an operator cannot return an update of nothing: declare two operators"
        _fault(row, arg.name, f"Tensor for role {arg.role}", arg.type, "type", fix)


def _validate_results(row: OpRow) -> None:
    made = outs(row)
    if made and row.args[-len(made) :] != made:
        _fault(row, made[0].name, "arguments of role out last", "one before others", "order", "move it")
    if made and (row.returns or updated(row)):
        _fault(
            row, made[0].name, "out arguments or returned tensors", "both", "results",
            "return them all where no cache is read; else make all of them out",
        )  # fmt: skip
    if (made or row.returns) and row.fresh is None:
        _fault(row, "fresh", "a function that allocates the results", None, "fresh", "give one")
    if row.into and not made:
        _fault(row, "into", "an argument of role out", "none", "results", "leave it out")


def _fault(row: OpRow, at: str, want: str, got: object, code: str, fix: str) -> None:
    raise ValueError(f"{needs(f'{row.base}.{at}', want, got, f'compile.{code}')}; {fix}")


def clash(row: OpRow, source: str, taken_by: str) -> ValueError:
    """Return the error for two packages that declare one name."""
    text = needs(f"{row.base}", "a name not in use", f"one of {taken_by}", "compile.clash")
    return ValueError(f"{text}; {source} has to name it differently, its own name in front say")


def fits(rows: Sequence[OpRow]) -> None:
    """Raise ValueError for the first row that cannot be exact."""
    for row in rows:
        validate(row)
