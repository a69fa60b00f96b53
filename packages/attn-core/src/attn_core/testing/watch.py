"""See what a call creates: every tensor an op returns, and where it is."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::lift_fresh")
"""What item() and int(), a boolean index, and torch.tensor(list) become."""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the tensors that torch ops return while it is active.

    Attributes:
        made: Weak references to them.
        devices: Their device types.
        waits: Ops met that bring a value from a device to the host, or host data to a device.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch imports its whole compiler for the sake of this class

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.devices: set[str] = set()
        self.waits: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one op and note its results."""
        found = func(*args, **(kwargs or {}))
        if func.name() in _WAITS:
            self.waits.add(func.name())
        for t in found if isinstance(found, tuple | list) else (found,):
            if isinstance(t, torch.Tensor):
                self.made.append(weakref.ref(t))
                self.devices.add(t.device.type)
        return found

    def alive(self, known: tuple[torch.Tensor, ...] = ()) -> list[torch.Tensor]:
        """Return recorded tensors that somebody still holds, apart from ``known``."""
        ours = {id(t) for t in known}
        held = [t for ref in self.made if (t := ref()) is not None and id(t) not in ours]
        return list({id(t): t for t in held}.values())


_READS = frozenset(
    {"tolist", "numpy", "cpu", "item", "__array__", "__index__", "__int__", "__float__", "__bool__"}
)
"""Methods of a tensor that bring values to the host; of one on the CPU some of them make no op."""


class HostReads(TorchFunctionMode):
    """Records calls that would copy a tensor of a GPU to the host, while it is active.

    Attributes:
        seen: Names of the methods.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note the call, and make it."""
        name = getattr(func, "__name__", "")
        if name in _READS or (name == "to" and _to_the_host(*args[1:], **(kwargs or {}))):
            self.seen.add(f"Tensor.{name}")
        return func(*args, **(kwargs or {}))


def _to_the_host(*args: Any, device: Any = None, **_: Any) -> bool:
    given = [device, *args[:1]]
    return any(isinstance(where, str | torch.device) and torch.device(where).type == "cpu" for where in given)


@contextmanager
def young_garbage() -> Iterator[None]:
    """Collect, at the end, the cycles made inside; without walking the whole heap."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect(0)
        if enabled:
            gc.enable()


def device_bytes(device: torch.device) -> int:
    """Return bytes torch has allocated on a GPU; 0 for the CPU, which keeps no count."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


@contextmanager
def no_device_sync(device: torch.device) -> Iterator[None]:
    """Make a wait for the GPU an error inside."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    with (
        warnings.catch_warnings()
    ):  # torch's, that this is a prototype: where warnings are errors it would stay on
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
