"""The forms in which a caller may hand over a paged cache, and one that never makes a view."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .checking import dense
from .errors import needs


@dataclass(frozen=True, slots=True)
class CacheView:
    """Keys and values named as an allocation and two paths into it, without slicing it.

    Under ``torch.compile`` a view made inside the graph is what goes wrong when an op writes to it;
    a CacheView hands the allocation itself to the op, which slices it inside.

    Attributes:
        storage: The whole allocation, for example ``[layers, pages, 2, page_size, heads, dim]``.
        k_path: ``(dim, index, dim, index, ...)``: successive ``select`` calls that lead to the keys.
        v_path: The same for the values.
    """

    storage: torch.Tensor
    k_path: tuple[int, ...]
    v_path: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.storage, torch.Tensor):
            got = type(self.storage).__name__
            raise TypeError(needs("CacheView.storage", "a tensor", got, "core.cache-view"))
        for name, path in (("k_path", self.k_path), ("v_path", self.v_path)):
            want = "pairs of ints (dim, index, ...)"
            if not isinstance(path, tuple | list):
                raise TypeError(needs(f"CacheView.{name}", want, type(path).__name__, "core.cache-view"))
            if len(path) % 2 or not all(isinstance(step, int) for step in path):
                raise ValueError(needs(f"CacheView.{name}", want, path, "core.cache-view"))
            self._check(name, path)

    def _check(self, name: str, path: tuple[int, ...]) -> None:
        shape = list(self.storage.shape)
        for dim, index in zip(path[::2], path[1::2], strict=True):
            if not 0 <= dim < len(shape):
                want = f"a dimension in 0..{len(shape) - 1}"
                raise ValueError(needs(f"CacheView.{name}", want, dim, "core.cache-view"))
            if not 0 <= index < shape[dim]:
                want = f"an index in 0..{shape[dim] - 1} of dimension {dim}"
                raise ValueError(needs(f"CacheView.{name}", want, index, "core.cache-view"))
            del shape[dim]

    @classmethod
    def split(cls, storage: torch.Tensor, dim: int, lead: tuple[int, ...] = ()) -> CacheView:
        """Name the halves of a dimension of size 2: keys at 0, values at 1.

        Args:
            storage: The allocation.
            dim: The dimension that separates keys from values, counted after ``lead`` was applied.
            lead: Path to take first, ``(0, layer)`` for a pool with layers in front; or index what is
                returned by the layer, and count ``dim`` behind the layers all the same.
        """
        try:
            return cls(storage, (*lead, dim, 0), (*lead, dim, 1))
        except ValueError as first:
            # A pool of one page per layer has no second half before it is given a layer.
            try:
                behind = cls(storage, (0, 0, *lead, dim, 0), (0, 0, *lead, dim, 1))
            except ValueError:
                raise first from None
        view = object.__new__(cls)
        for name, value in (
            ("storage", storage),
            ("k_path", behind.k_path[2:]),
            ("v_path", behind.v_path[2:]),
        ):
            object.__setattr__(view, name, value)
        return view

    def __getitem__(self, layer: int) -> CacheView:
        """Return the view of one layer of a pool whose first dimension is the layer."""
        layers = self.storage.shape[0]
        index = layer + layers if layer < 0 else layer
        return CacheView(self.storage, (0, index, *self.k_path), (0, index, *self.v_path))

    @property
    def k(self) -> torch.Tensor:
        """The keys, as a view."""
        return self._take("k_path", self.k_path)

    @property
    def v(self) -> torch.Tensor:
        """The values, as a view."""
        return self._take("v_path", self.v_path)

    def _take(self, name: str, path: tuple[int, ...]) -> torch.Tensor:
        tensor = self.storage
        try:
            for at in range(0, len(path), 2):
                tensor = tensor.select(path[at], path[at + 1])
        except IndexError:
            self._check(name, path)  # says which index of a pool that has yet to be given a layer
            raise
        return tensor


def unpack(cache: object, order: str, name: str = "paged_kv_cache") -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values as 4-D tensors in layout ``order``.

    Args:
        cache: A (k, v) pair of 4-D tensors, one 5-D tensor ``[pages, 2, ...]``, or a CacheView. One
            dimension less is taken as page size 1.
        order: NHD or HND.
        name: Argument to name in errors.

    Raises:
        TypeError: None of those forms.
        ValueError: The number of dimensions does not fit.
    """
    if isinstance(cache, tuple) and len(cache) == 2:
        k, v = cache
        if isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor):
            if k.ndim == 4 and v.ndim == 4:
                return k, v
            return _widen(k, order, name), _widen(v, order, name)
    elif isinstance(cache, CacheView):
        return _widen(cache.k, order, name), _widen(cache.v, order, name)
    elif isinstance(cache, torch.Tensor):
        try:
            if cache.ndim not in (4, 5) or cache.shape[1] != 2:
                want = "one tensor of shape [pages, 2, ...]"
                raise ValueError(needs(name, want, f"shape {tuple(cache.shape)}", "core.cache-shape"))
            k, v = cache.unbind(1)
        except RuntimeError:
            dense(name, cache, "core.cache-shape")  # says what torch has no view of
            raise
        return _widen(k, order, name), _widen(v, order, name)
    got = type(cache).__name__
    raise TypeError(needs(name, "a (k, v) tuple, one 5-D tensor or a CacheView", got, "core.cache-type"))


def _widen(tensor: torch.Tensor, order: str, name: str) -> torch.Tensor:
    if tensor.ndim == 4:
        return tensor
    if tensor.ndim == 3:
        return tensor.unsqueeze(-3 if order == "NHD" else -2)
    raise ValueError(needs(name, "4 dimensions (3 for page size 1)", tensor.ndim, "core.cache-shape"))
