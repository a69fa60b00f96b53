"""A right call of anything public, and what is wrong about its neighbours.

A session makes the call, compares it with arithmetic of its own, and makes wrong ones, each of which must be
refused by name and leave every tensor that it was given as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch

from .memory import same_bits

Arguments = dict[str, Any]
Change = Callable[[torch.Tensor], object]
Check = Callable[[Any], None]
_CHANGES: dict[str, Change] = {
    "complex": lambda t: t.to(torch.complex64),
    "one more dimension": lambda t: t[None],
    "flat": lambda t: t.flatten() if t.ndim > 1 else None,
    "one row more": lambda t: torch.cat([t, t[:1]]) if t.shape[0] else None,
    "one row less": lambda t: t[:-1] if t.shape[0] else None,
    "a list": lambda t: t.tolist(),
    "nothing": lambda t: None,
    "another device": lambda t: t.to("meta"),
}
Mistake = tuple[str, Arguments]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A right call, and what is wrong about its neighbours.

    Attributes:
        name: Of the function or method.
        function: What is called.
        right: Keyword arguments that fit.
        check: Raises where the result is not right; called with it, once.
        fits: Changes that do not make an argument unfit, as ``argument:change``.
        values: Values that do not fit, by argument.
    """

    name: str
    function: Callable[..., Any]
    right: Arguments
    check: Check
    fits: frozenset[str] = frozenset()
    values: dict[str, tuple[object, ...]] = field(default_factory=dict)

    def mistake(self, rng: Random) -> Mistake:
        """Return a wrong argument and how it is wrong."""
        found = list(self._tensors()) + [
            (f"{name}:{_said(value)}", {name: value})
            for name, values in self.values.items()
            for value in values
        ]
        return rng.choice(found)

    def _tensors(self) -> Iterator[Mistake]:
        for name, given in self.right.items():
            if not isinstance(given, torch.Tensor):
                continue
            for kind, change in _CHANGES.items():
                if f"{name}:{kind}" in self.fits:
                    continue
                made = change(given)
                if made is not None or kind == "nothing":
                    yield f"{name}:{kind}", {name: made}

    def held(self) -> list[torch.Tensor]:
        """Return every tensor that is handed over."""
        return list(_flat(self.right.values()))


def _said(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_said, value))})"
    return repr(value)


def _flat(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _flat(value)


def unchanged(call: Call, before: list[torch.Tensor]) -> bool:
    """Say whether the tensors of a call have the bits they had."""
    return all(same_bits(was, now) for was, now in zip(before, call.held(), strict=True))
