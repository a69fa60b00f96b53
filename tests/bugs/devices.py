"""A device that is not there: CPU tensors that say they are elsewhere, and who reads them is counted."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

ELSEWHERE = torch.device("meta")
_READS = {"item", "tolist", "numpy", "nonzero", "equal", "is_nonzero", "masked_select", "unique"}
_READS |= {"__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__"}
_DEVICE = torch.Tensor.device.__get__  # type: ignore[attr-defined]
_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


class FakeDevice(TorchFunctionMode):
    """Inside it, what is made on the device, and what comes of that, stays on the device.

    Two devices in one call are an error, as they would be.

    Attributes:
        reads: Names of the calls that brought values to the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def put(self, value: torch.Tensor) -> torch.Tensor:
        """Bring a copy of a tensor to the device."""
        return _mark(value.clone())

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors((args, tuple(kwargs.values())))
        away = [hasattr(t, "away") for t in tensors]
        if func == _DEVICE:
            return ELSEWHERE if away[0] else func(*args)
        if func == _META:
            return away[0]
        name = func.__name__
        target = _target(name, args, kwargs)
        if any(away) and (name in _READS or target == "cpu" or (name == "copy_" and not away[0])):
            self.reads.append(name)
            return _plain(func(*_at_home(args), **_at_home(kwargs)))
        if (
            name != "copy_"
            and any(away)
            and any(t.ndim and not a for t, a in zip(tensors, away, strict=True))
        ):
            raise AssertionError(f"{name}: tensors on two devices")
        found = func(*_at_home(args), **_at_home(kwargs))
        return _mark(found) if any(away) or target == ELSEWHERE.type else found


def _target(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The device type that a call names, if it names one."""
    if name == "cpu":
        return "cpu"
    named = [x for x in (*args, kwargs.get("device")) if isinstance(x, torch.device)]
    named += [torch.device(x) for x in (*args, kwargs.get("device")) if x in ("cpu", ELSEWHERE.type)]
    return named[0].type if named else None


def _tensors(x: Any) -> list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return [x]
    return [t for item in x for t in _tensors(item)] if isinstance(x, tuple | list) else []


def _at_home(x: Any) -> Any:
    """The same arguments with the device replaced by the one that is there."""
    if isinstance(x, torch.device) or (isinstance(x, str) and x == ELSEWHERE.type):
        return torch.device("cpu")
    if isinstance(x, dict):
        return {name: _at_home(value) for name, value in x.items()}
    return type(x)(_at_home(item) for item in x) if type(x) in (tuple, list) else x


def _mark(x: Any) -> Any:
    for t in _tensors(x):
        t.away = True  # type: ignore[attr-defined]
    return x


def _plain(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) else x
