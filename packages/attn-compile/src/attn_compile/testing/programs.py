"""What a compiled region does with a cache: read it, write it, both in any order, plain torch around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from attn_core import append_paged_kv_cache, merge_state_in_place

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Region:
    """What every program gets besides tensors: the planned wrapper, the cache's order, the backend."""

    wrapper: Any
    order: str
    backend: str

    def attend(self, q: Tensor, cache: Any, **kwargs: Any) -> Any:
        """Run the planned wrapper."""
        return self.wrapper.run(q, cache, **kwargs)

    def append(self, k: Tensor, v: Tensor, cache: Any, at: tuple[Tensor, ...], back: bool = False) -> None:
        """Write one row per request, to its last place or the one before."""
        batch, latest, earlier, indices, indptr, last = at
        append_paged_kv_cache(
            k, v, batch, earlier if back else latest, cache, indices, indptr, last, self.order, self.backend
        )


Program = Callable[[Region, Tensor, Tensor, Tensor, Any, tuple[Tensor, ...]], Any]


def read(r: Region, q: Tensor, k: Tensor, v: Tensor, cache: Any, at: tuple[Tensor, ...]) -> Any:
    """Attend, with the log-sum-exp."""
    return r.attend(q * 2, cache, return_lse=True)


def append(r: Region, q: Tensor, k: Tensor, v: Tensor, cache: Any, at: tuple[Tensor, ...]) -> Any:
    """Append and nothing else."""
    r.append(k, v, cache, at)
    return k + 1


def append_read(r: Region, q: Tensor, k: Tensor, v: Tensor, cache: Any, at: tuple[Tensor, ...]) -> Any:
    """Append, then attend to what was appended."""
    r.append(k, v, cache, at)
    return r.attend(q, cache)


def read_append(r: Region, q: Tensor, k: Tensor, v: Tensor, cache: Any, at: tuple[Tensor, ...]) -> Any:
    """Attend, then overwrite what was attended to."""
    out = r.attend(q, cache)
    r.append(k, v, cache, at)
    return out * 2


def mixed(r: Region, q: Tensor, k: Tensor, v: Tensor, cache: Any, at: tuple[Tensor, ...]) -> Any:
    """Three reads around two writes."""
    first = r.attend(q, cache)
    r.append(k, v, cache, at)
    second = r.attend(q + 1, cache)
    r.append(v, k, cache, at, back=True)
    return r.attend(q, cache), second, first


def out(r: Region, q: Tensor, k: Tensor, v: Tensor, cache: Any, at: tuple[Tensor, ...]) -> Any:
    """``out=`` and ``lse=`` are slices of larger buffers."""
    made, sums = torch.zeros(3, *q.shape), torch.zeros(3, *q.shape[:2])
    r.append(k, v, cache, at)
    r.attend(q, cache, out=made[1], lse=sums[2], return_lse=True)
    return made, sums


def in_place(r: Region, q: Tensor, k: Tensor, v: Tensor, cache: Any, at: tuple[Tensor, ...]) -> Any:
    """An in-place function over slices, fed by attention before and after an append."""
    made, sums = torch.zeros(2, *q.shape), torch.zeros(2, *q.shape[:2])
    r.attend(q, cache, out=made[1], lse=sums[1], return_lse=True)
    r.append(k, v, cache, at)
    merge_state_in_place(made[1], sums[1], *r.attend(q, cache, return_lse=True))
    return made, sums


def plain(r: Region, q: Tensor, k: Tensor, v: Tensor, cache: Any, at: tuple[Tensor, ...]) -> Any:
    """Plain torch writes to the cache and reads of it around append and attention."""
    if not isinstance(cache, tuple):
        return mixed(r, q, k, v, cache, at)
    keys, values = cache
    keys[1].mul_(0.5)
    r.append(k, v, cache, at)
    first = r.attend(q, cache)
    seen = keys[at[3][:1].long()].amax()
    values[3].add_(1.0)
    return first, seen, r.attend(q, cache)


PROGRAMS: dict[str, Program] = {
    f.__name__: f for f in (read, append, append_read, read_append, mixed, out, in_place, plain)
}
