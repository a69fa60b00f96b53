"""Whether a declaration is true: run the operator on poisoned memory and compare bytes.

``torch.library.opcheck`` finds an undeclared write into an argument. It does not find a declared write that
never happens (the defect that makes torch copy caches), nor a write beside the argument's own elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

POISON = 0xA5
GUARD = 64
"""Bytes before and after every argument."""


def faults(op: Any, samples: Iterable[Sequence[Any]]) -> list[str]:
    """Return what is untrue about an operator's alias annotations, as lines; an empty list is good.

    Args:
        op: A torch operator overload.
        samples: Argument lists. An argument declared written must change in one of them at least. Not
            changed themselves: the operator works on copies in poisoned memory.
    """
    arguments = op._schema.arguments
    written = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    changed: set[str] = set()
    found: list[str] = []
    for number, sample in enumerate(samples):
        placed = [_place(value) if isinstance(value, torch.Tensor) else None for value in sample]
        args = [value if p is None else p[0] for value, p in zip(sample, placed, strict=True)]
        before = [None if p is None else p[1].clone() for p in placed]
        results = op(*args)
        for argument, p, was in zip(arguments, placed, before, strict=True):
            if p is None or was is None:
                continue
            inside, outside = _changes(p[1], was, p[0])
            if inside:
                changed.add(argument.name)
            if inside and argument.name not in written:
                found.append(f"{argument.name}: written, not declared (sample {number})")
            if outside:
                found.append(f"{argument.name}: memory beside it written (sample {number})")
        found += _aliases(results, arguments, placed, number)
    found += [f"{name}: declared written, never changed" for name in sorted(written - changed)]
    return found


def _place(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a copy with the same strides inside poisoned bytes, and those bytes."""
    reach = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) + 1
    size = (reach if value.numel() else 0) * value.element_size()
    guard = GUARD - GUARD % value.element_size()
    raw = torch.full((size + 2 * guard,), POISON, dtype=torch.uint8, device=value.device)
    flat = raw[guard : guard + size].view(value.dtype)
    copy = torch.as_strided(flat, value.shape, value.stride(), flat.storage_offset())
    copy.copy_(value)
    return copy, raw


def _changes(raw: torch.Tensor, was: torch.Tensor, inside: torch.Tensor) -> tuple[bool, bool]:
    """Whether bytes of the tensor's own elements changed, and whether others did."""
    own = torch.zeros_like(raw)
    flat = own[GUARD - GUARD % inside.element_size() :]
    flat = flat[: flat.numel() - flat.numel() % inside.element_size()].view(-1, inside.element_size())
    if inside.numel():
        at = torch.zeros(inside.shape, dtype=torch.int64, device=raw.device)
        for dim, (n, step) in enumerate(zip(inside.shape, inside.stride(), strict=True)):
            shape = [1] * inside.ndim
            shape[dim] = n
            at += torch.arange(n, device=raw.device).view(shape) * step
        flat[torch.unique(at)] = 1
    differs = raw != was
    mine = own.bool()
    return bool((differs & mine).any()), bool((differs & ~mine).any())


def _aliases(results: Any, arguments: Any, placed: Sequence[Any], number: int) -> list[str]:
    given = results if isinstance(results, tuple | list) else (results,)
    taken = {r.untyped_storage().data_ptr() for r in given if isinstance(r, torch.Tensor) and r.numel()}
    return [
        f"{argument.name}: returned as a result (sample {number})"
        for argument, p in zip(arguments, placed, strict=True)
        if p is not None and p[1].untyped_storage().data_ptr() in taken
    ]
