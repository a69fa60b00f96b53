"""Checks of one argument that need to know nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch

from .errors import needs

_FLOAT32_MAX = (2 - 2**-23) * 2.0**127
_HAS_NAMES = hasattr(torch.Tensor, "has_names")  # torch 2.13 has no named tensors


def flag(name: str, value: object) -> bool:
    """Return a switch given as a bool (numpy's too), as 0 or 1, or as None for off.

    Raises:
        TypeError: Anything else: a tensor's truth would be read from its device, or is not defined.
    """
    if value is None or isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    raise TypeError(needs(name, "True or False", type(value).__name__, "core.flag"))


def dense(name: str, value: object, code: str, wanted: str = "a tensor") -> torch.Tensor:
    """Return a tensor whose memory holds its values, at strides.

    Raises:
        TypeError: Not a tensor; a sparse, nested, named or fake one; one without memory; a view that negates
            or conjugates when it is read.
        ValueError: Its storage was freed, or shrunk below what its elements take.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(needs(name, wanted, type(value).__name__, code))
    if value.layout is not torch.strided:
        raise TypeError(needs(name, "a dense tensor", value.layout, code))
    if torch.compiler.is_compiling():
        return value  # a graph has no views that are read in another way
    if value.is_nested:
        raise TypeError(needs(name, "a dense tensor", "a nested one", code))
    if value.__class__ is not torch.Tensor and getattr(value, "fake_mode", None) is not None:
        raise TypeError(needs(name, "a tensor with values", "a fake one, which stands for its shape", code))
    if _HAS_NAMES and value.has_names():
        raise TypeError(needs(name, "a tensor without names (rename(None) drops them)", value.names, code))
    if value._is_zerotensor():
        raise TypeError(
            needs(name, "a tensor with memory (clone() makes one)", "a tensor of zeros without", code)
        )
    if value.is_neg() or value.is_conj():
        view = "negated" if value.is_neg() else "conjugated"
        want = "a tensor that holds its values (resolve_neg() or resolve_conj() makes one)"
        raise TypeError(needs(name, want, f"a {view} view", code))
    if not in_storage(value) and value.device.type != "meta":
        size = value.untyped_storage().nbytes()
        got = f"{size} bytes: its storage was shrunk" if size else "none: its storage was freed"
        raise ValueError(needs(name, "memory behind its elements", got, code))
    return value


def readable(tensor: torch.Tensor) -> bool:
    """Return whether :func:`dense` has nothing to say about a plain tensor; several times as fast."""
    return tensor.layout is torch.strided and not tensor.is_neg() and in_storage(tensor)


def in_storage(tensor: torch.Tensor) -> bool:
    """Return whether all elements lie in the tensor's storage, which may have been shrunk behind its back."""
    if tensor.is_contiguous():  # half the time of the other question
        taken = tensor.nbytes
    else:
        taken = _span(tensor.shape, tensor.stride()) * tensor.itemsize
    offset = tensor.storage_offset()
    end = taken + offset * tensor.itemsize if offset else taken
    return end <= tensor.untyped_storage().nbytes() or not taken


@lru_cache(maxsize=1024)
def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Return the number of elements from the first to the last, those between them included."""
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


def apart(name: str, tensor: torch.Tensor, code: str) -> torch.Tensor:
    """Return a tensor that is to be written, if every element has memory of its own.

    Raises:
        ValueError: Strides by which elements share memory, or may: what is written last would stay.
    """
    if torch.compiler.is_compiling() or tensor.is_contiguous():
        return tensor  # a traced operator looks when it runs
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            got = f"strides {tensor.stride()} over {tuple(tensor.shape)}"
            raise ValueError(needs(name, "distinct memory for every element", got, code))
        reach += stride * (size - 1)
    return tensor


def apart_from(
    name: str, tensor: torch.Tensor, others: Sequence[tuple[str, torch.Tensor]], code: str
) -> torch.Tensor:
    """Return a tensor that is to be written, if it lies outside of tensors that are read meanwhile.

    Raises:
        ValueError: It lies between the first and the last element of one of them, unless strides they share
            show that no element is common, as of heads of one fused tensor.
    """
    if torch.compiler.is_compiling() or not tensor.numel():
        return tensor
    for other_name, other in others:
        if not torch._C._is_alias_of(tensor, other):  # type: ignore[attr-defined]
            continue
        (begin, end), (first, last) = extent(tensor), extent(other)
        if begin < last and first < end and not _interleaved(tensor, other):
            raise ValueError(needs(name, f"memory apart from {other_name}", "memory inside it", code))
    return tensor


def _interleaved(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors keep to different places within a period: a stride of either.

    What is not a multiple of the period moves an element within it; if neither tensor leaves its part of
    the period and the parts lie apart, so do the tensors, whatever multiples there are.
    """
    starts = b.data_ptr() - a.data_ptr()
    for period in {abs(stride) * t.itemsize for t in (a, b) for stride in t.stride()} - {0}:
        taken, also_taken = _within(a, period), _within(b, period)
        offset = starts % period
        if taken <= offset and offset + also_taken <= period:
            return True
    return False


def _within(t: torch.Tensor, period: int) -> int:
    """Return the bytes that a tensor takes of each period."""
    moves = ((n - 1) * s * t.itemsize for n, s in zip(t.shape, t.stride(), strict=True))
    inside = sum(move for move, s in zip(moves, t.stride(), strict=True) if s * t.itemsize % period)
    return inside + t.itemsize


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and of the one behind its last."""
    begin = tensor.data_ptr()
    return begin, begin + _span(tensor.shape, tensor.stride()) * tensor.itemsize


def whole(name: str, value: object, code: str, least: int | None = None) -> int:
    """Return a size or a position given as an int.

    Raises:
        TypeError: Not an int; a bool is none.
        ValueError: Below ``least``, or of more than 64 bits, which torch has no type for.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(needs(name, "an int", type(value).__name__, code))
    if not torch.compiler.is_compiling() and not -(2**63) <= value < 2**63:
        raise ValueError(needs(name, "an int of 64 bits", value, code))
    if least is not None and value < least:
        raise ValueError(needs(name, f"at least {least}", value, code))
    return value


def finite(name: str, value: float, code: str) -> float:
    """Return a number that kernels can multiply by.

    Raises:
        ValueError: NaN, infinite, or beyond what a float32 holds.
    """
    if not -_FLOAT32_MAX <= value <= _FLOAT32_MAX:  # torch.compile traces no math.isfinite
        got = value if isinstance(value, float) else "a longer integer"
        raise ValueError(needs(name, "a finite number, as a float32 too", got, code))
    return float(value)


def flat(given: torch.Tensor) -> torch.Tensor:
    """Return lengths that a caller states as 1-D, of uint32 (what upstream's documents say) as int64.

    Anything else is returned as it is, for the check that follows to refuse.
    """
    if not isinstance(given, torch.Tensor) or given.layout is not torch.strided:
        return given
    if given.is_nested or (_HAS_NAMES and given.has_names()):
        return given
    return (given.to(torch.int64) if given.dtype is torch.uint32 else given).reshape(-1)


def size_of(name: str, tensor: torch.Tensor) -> int:
    """Return the number of entries of an index tensor.

    Raises:
        TypeError: It is not a dense tensor.
        ValueError: It has no memory for its elements.
    """
    return dense(name, tensor, "core.index-type", "an int32 tensor").numel()


def check_reach(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raise ValueError for a tensor that is neither on the CPU nor on a device of this kind."""
    if tensor.device.type not in ("cpu", device.type):
        raise ValueError(needs(name, f"a tensor on cpu or {device}", tensor.device, "core.device"))


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return what a backend is called under: torch's operators would round float32 to autocast's type."""
    if not torch._C._is_any_autocast_enabled():
        return _NOTHING
    return torch.autocast(device.type, enabled=False)


_NOTHING = nullcontext()

OTHER_NAMES: dict[str, str] = {}
"""What a program's own names of backends stand for; see :func:`attn_core.compat.install`."""


def backend_name(value: object) -> str:
    """Return what names a backend or a candidate, under the name it has here.

    Raises:
        TypeError: Not a string.
    """
    if not isinstance(value, str):
        raise TypeError(needs("backend", "a string", type(value).__name__, "core.backend-name"))
    return OTHER_NAMES.get(value, value)


def device_of(value: object) -> torch.device:
    """Return a device given as one or by its name.

    Raises:
        TypeError: Neither.
        ValueError: The name of none.
    """
    if not isinstance(value, str | torch.device | int) or isinstance(value, bool):
        raise TypeError(needs("device", "a torch.device or its name", type(value).__name__, "core.device"))
    try:
        return torch.device(value)
    except RuntimeError:
        raise ValueError(needs("device", "the name of a device", repr(value), "core.device")) from None
