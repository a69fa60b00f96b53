"""Repair of AOTAutograd's common base of written inputs; see :func:`attn_compile.fixups.install`."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch._functorch._aot_autograd import runtime_wrappers
from torch.utils._python_dispatch import TorchDispatchMode


def install() -> None:
    """Measure the common allocation of written inputs by the inputs, not by its bytes.

    Two inputs that may overlap, one of them written, and no autograd base to be found (always so in inference
    mode): AOTAutograd takes their whole allocation as one flat tensor, whose length no guard holds and no
    symbol describes. Another size under dynamic shapes then stops in one of torch's own assertions. What the
    inputs reach of it has a length made of theirs.

    Raises:
        RuntimeError: This torch calls what is repaired differently; nothing was replaced.
    """
    given = runtime_wrappers.merge_view_inputs
    at_runtime = _merges_at_runtime()
    names = list(inspect.signature(given).parameters)[:2]
    if names != ["aot_config", "fwd_inputs"]:
        raise RuntimeError(f"merge_view_inputs takes {names}")

    @wraps(given)
    def merge_view_inputs(config: Any, inputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        with _Measured(inputs):
            return given(config, inputs, *args, **kwargs)  # type: ignore[arg-type]

    _replace(runtime_wrappers, "merge_view_inputs", merge_view_inputs)
    if not at_runtime:
        _narrow_at_runtime()


def _merges_at_runtime() -> bool:
    """Whether compiled calls go through the same function (to torch 2.12), or through code of their own."""
    return "merge_view_inputs(" in inspect.getsource(runtime_wrappers.AOTSyntheticBaseWrapper.post_compile)


def _narrow_at_runtime() -> None:
    """Cut flat tensors over whole allocations to what tracing took of them."""
    given = runtime_wrappers.AOTSyntheticBaseWrapper.post_compile

    @wraps(given)
    def post_compile(self: Any, compiled: Any, *args: Any, **kwargs: Any) -> Any:
        waiting: list[dict[int, int]] = []

        @wraps(compiled)
        def narrowed(inputs: list[Any]) -> Any:
            ends = waiting.pop()
            for at, t in enumerate(inputs):
                if isinstance(t, torch.Tensor) and t.dim() == 1 and t._base is None:
                    end = ends.get(t.untyped_storage()._cdata, t.numel())
                    inputs[at] = t if t.numel() <= end else t[:end]
            return compiled(inputs)

        inner = given(self, narrowed, *args, **kwargs)
        if inner is narrowed:  # nothing was merged
            return compiled

        @wraps(inner)
        def outer(inputs: list[Any]) -> Any:
            waiting.append(_ends(inputs))
            return inner(inputs)

        return outer

    _replace(runtime_wrappers.AOTSyntheticBaseWrapper, "post_compile", post_compile)


_replace: Any = setattr  # what is replaced is private to torch, and typed by chance


def _ends(inputs: Sequence[Any]) -> dict[int, int]:
    """Return how far tensors reach into each allocation, for those that have no base among them."""
    ends: dict[int, int] = {}
    based: set[int] = set()
    for t in inputs:
        if isinstance(t, torch.Tensor):
            key = t.untyped_storage()._cdata
            ends[key] = max(ends.get(key, 0), _end(t))
            if t._base is not None:
                based.add(key)
    return {key: end for key, end in ends.items() if key not in based}


class _Measured(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives ``base.set_(storage)`` the length that a list of tensors reaches in that storage."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._inputs = [t for t in inputs if isinstance(t, torch.Tensor)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not torch.ops.aten.set_.source_Storage:
            return func(*args, **(kwargs or {}))
        base, storage = args
        ends = [_end(t) for t in self._inputs if _is_in(t, storage)]
        length = ends[0]
        for end in ends[1:]:
            length = torch.sym_max(length, end)  # type: ignore[no-untyped-call]
        with _unguarded(length):
            return torch.ops.aten.set_.source_Storage_storage_offset(base, storage, 0, (length,), (1,))


def _is_in(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    return bool(tensor.untyped_storage()._cdata == storage._cdata)


def _end(tensor: torch.Tensor) -> Any:
    """Return how many elements of its allocation a tensor reaches over."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.storage_offset() + last + 1


@contextmanager
def _unguarded(length: Any) -> Iterator[None]:
    """Keep the comparison with the allocation's bytes, true by construction, from becoming a guard."""
    if not isinstance(length, torch.SymInt):
        yield
        return
    with length.node.shape_env.suppress_guards():
        yield
