"""Declarations of operators: what attn-compile needs to know of a function to register it with torch.

A row says of every argument what the function does with it. The schema, the fake kernel and the name of the
operator are all made from that row, so they cannot disagree. A package adds rows through the
``attn_op_table`` hook and calls its operators as ``tracing.call(base, ...)``, without attn-compile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What an operator does with an argument."""

    READ = "read"
    """Reads a tensor."""
    CACHE = "cache"
    """Writes into a tensor of the caller. At most one per operator, and as allocated: no view of it."""
    SCRATCH = "scratch"
    """Uses a tensor's memory; what is in it before and after has no meaning, so it is not declared."""
    OUT = "out"
    """Fills a tensor that ``fresh`` allocates inside the graph."""
    INOUT_SMALL = "inout_small"
    """Updates a small tensor of the caller. The operator returns the new value, the graph copies it back."""
    PLAN = "plan"
    """An int64 tensor on the CPU, of fixed length, with the numbers that change from plan to plan."""
    CONST = "const"
    """A number, a string or a list of them, which stays the same from plan to plan."""


@dataclass(frozen=True, slots=True)
class Arg:
    """One argument of an operator.

    Attributes:
        name: Its name.
        type: torch schema type without alias annotation: ``Tensor``, ``Tensor?``, ``SymInt``, ``float?``, ...
        role: What the operator does with it.
    """

    name: str
    type: str = "Tensor"
    role: Role = Role.READ


@dataclass(frozen=True, slots=True)
class OpRow:
    """One operator.

    Attributes:
        base: Name without the fingerprint; unique in the process.
        args: Its arguments in order; those of role ``out`` last.
        kernel: The function. Takes the arguments without the ``out`` ones and returns their contents, or what
            the operator returns. With ``into`` it takes all of them and fills the ``out`` ones itself.
        fresh: Allocates the results from the same arguments without the ``out`` ones: a tensor (or None for
            an optional one) per ``out`` argument or per result, as a tuple. Must neither read values nor
            raise for shapes the kernel takes. None for an operator without results.
        returns: Number of tensors the operator returns, apart from ``inout_small`` arguments.
        into: See ``kernel``.
        host: It reads host memory or waits for the device, so it is kept out of CUDA graphs.
        revision: Raise it when the meaning changes and the declaration does not.
    """

    base: str
    args: tuple[Arg, ...]
    kernel: Callable[..., object]
    fresh: Callable[..., tuple[object, ...]] | None = None
    returns: int = 0
    into: bool = False
    host: bool = False
    revision: int = 0
