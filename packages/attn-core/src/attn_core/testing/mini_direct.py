"""The direct runs of :mod:`mini`: checks of its own, in plain Python, and strict."""

from __future__ import annotations

from typing import Any

import torch

from ..backend import DeviceImage, DirectRun, RunIO, RunShapes
from ..checking import apart_from, readable

_LARGEST_SCALE = 3.4e38


class MiniDirect:
    """What makes a backend with ``run()`` a ``DirectBackend``."""

    run: Any

    def direct(self, launch: object, image: DeviceImage, io: RunIO, shapes: RunShapes) -> DirectRun:
        """Return a function that checks and runs."""
        like = {"q": io.q, "k": io.k, "v": io.v, "out": io.out}

        def call(q: Any, cache: Any, out: Any, lse: Any, workspace: Any, *scales: Any) -> bool:
            k, v = self.pair(cache)
            fits = (
                self.fits(q, like["q"], shapes.q)
                and self.fits(k, like["k"], (None, *shapes.k))
                and self.fits(v, like["v"], (None, *shapes.v))
                and self.enough(k, v, shapes)
                and self.fits(out, like["out"], shapes.out)
                and self.fits_lse(lse, out, shapes)
                and self.apart(q, k, v, out, lse)
                and all(map(self.is_scale, scales))
            )
            if fits:
                given = [1.0 if scale is None else scale for scale in scales]
                self.go(launch, image, RunIO(q, k, v, out, lse, workspace, *given))
            return bool(fits)

        return call

    def go(self, launch: object, image: DeviceImage, io: RunIO) -> None:
        """Run a call that was found right."""
        self.run(launch, image, io)

    def pair(self, cache: Any) -> tuple[Any, Any]:
        """Return k and v of a cache; two times None of what is none."""
        if type(cache) is tuple and len(cache) == 2:
            return cache
        if type(cache) is torch.Tensor and cache.ndim > 1 and cache.shape[1] == 2:
            k, v = cache.unbind(1)
            return k, v
        return None, None

    def fits(self, t: Any, like: torch.Tensor, shape: tuple[int | None, ...]) -> bool:
        """Return whether a tensor has the type, device, shape and memory that it should."""
        return (
            type(t) is torch.Tensor
            and t.dtype is like.dtype
            and t.device == like.device
            and t.ndim == len(shape)
            and all(want in (None, size) for want, size in zip(shape, t.shape, strict=True))
            and self.has_memory(t)
        )

    def has_memory(self, t: torch.Tensor) -> bool:
        """Return whether the memory of a tensor holds its values."""
        return readable(t)

    def enough(self, k: torch.Tensor, v: torch.Tensor, shapes: RunShapes) -> bool:
        """Return whether all rows of the plan are there."""
        return min(len(k), len(v)) >= shapes.least_rows

    def fits_lse(self, lse: Any, out: torch.Tensor, shapes: RunShapes) -> bool:
        """Return whether lse can be written, or is None."""
        return lse is None or (
            shapes.lse
            and self.fits(lse, torch.empty(0, device=out.device), shapes.out[:2])
            and lse.is_contiguous()
        )

    def apart(self, q: Any, k: Any, v: Any, out: torch.Tensor, lse: torch.Tensor | None) -> bool:
        """Return whether outputs lie over nothing."""
        read = (("q", q), ("k", k), ("v", v))
        try:
            apart_from("out", out, read, "mini")
            if lse is not None:
                apart_from("lse", lse, (*read, ("out", out)), "mini")
        except ValueError:
            return False
        return out.is_contiguous()

    def is_scale(self, scale: object) -> bool:
        """Return whether a scale is one."""
        return scale is None or (type(scale) is float and abs(scale) <= _LARGEST_SCALE)
