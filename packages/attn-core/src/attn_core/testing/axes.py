"""What to vary, read off a capability row: every claimed value of every field."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..backend import Path
from ..capability import Capability, Dims
from ..problem import MaskMode, Op, PosEncoding
from .batches import batches_of
from .pairwise import Clash, Value

SINGLES = (Op.PREFILL_SINGLE, Op.DECODE_SINGLE)
ATTENTION = tuple(op for op in Op if op is not Op.APPEND)

_GROUPS = {1: (3, 3), 4: (8, 2), 5: (5, 1), 8: (8, 1), 16: (16, 1)}
_ANY_PAGE_SIZE = (1, 7, 16, 64)
_FULL_WIDTH = 256


def axes_of(path: Path, op: Op) -> dict[str, list[Value]]:
    """Return the values to combine for one entry point; an empty axis means it cannot be reached."""
    cap = path.capability
    axes: dict[str, list[Value]] = {
        "batch": list(batches_of(op, None)),
        "dims": dims_of(cap, split=op not in (Op.DECODE, Op.VERIFY)),
        "form": forms_of(path, op),
        "q": _q_dtypes(cap, op),
        "kv": _sorted(cap.kv_dtypes),
        "o": [None] if cap.o_dtypes is None or op is Op.DECODE_SINGLE else _sorted(cap.o_dtypes),
        "heads": heads_of(cap),
        "order": [*sorted(cap.kv_orders, reverse=True)],
        "mask": _masks(cap, op),
        "window": [-1, 0, 6, 100] if cap.window else [-1],
        "soft_cap": [0.0, 5.0] if cap.soft_cap else [0.0],
        "pos": _positions(cap),
        "lse": _lse(cap, op),
        "split": ["auto", "fixed", "never"] if cap.batch_invariant and op not in SINGLES else ["auto"],
        "scales": ["none", "number", "tensor"] if path.contract.scales else ["none"],
        "sm_scale": ["default", "given"],
        "out": ["own"] if op in SINGLES else ["own", "given", "strided"],
        "tensor_cores": _tensor_cores(cap, op),
    }
    if op.paged:
        axes["page"] = page_sizes_of(cap)
    return axes


def clash_of(path: Path) -> Clash:
    """Return which values cannot be asked for together."""
    cap, contract = path.capability, path.contract

    def clash(a: str, left: Value, b: str, right: Value) -> bool:
        both = {a: left, b: right}
        if both.keys() == {"q", "kv"}:
            return cap.same_dtype and left != right
        dims = both.get("dims")
        if not isinstance(dims, tuple):
            return False
        unlike = dims[0] != dims[1]
        if "pos" in both:
            return isinstance(both["pos"], tuple) and dims[0] % 2 == 1  # halves are rotated
        # K and V of unlike size fit neither one tensor nor one set of strides.
        return unlike and (both.get("form") in ("five", "pool") or contract.same_kv_strides)

    return clash


def dtype_name(dtype: object) -> str:
    """Return ``float16`` for ``torch.float16``."""
    return str(dtype).removeprefix("torch.")


def _sorted(dtypes: Iterable[torch.dtype]) -> list[Value]:
    found: list[Value] = sorted(dtypes, key=str)
    return found


def _q_dtypes(cap: Capability, op: Op) -> list[Value]:
    if op is Op.DECODE_SINGLE and cap.o_dtypes is not None:  # this entry point writes q's own type
        return _sorted(cap.q_dtypes & cap.o_dtypes)
    return _sorted(cap.q_dtypes)


def dims_of(cap: Capability, *, split: bool) -> list[Value]:
    """Return (head_dim_qk, head_dim_vo) pairs; unlike ones where ``split`` asks and the row claims them."""
    sizes = sizes_of(cap.head_dims)
    same: list[Value] = [(size, size) for size in sizes]
    if not split or not cap.head_dim_split:
        return same
    wide = [(a, b) for a, b in ((192, 128), (sizes[-1], sizes[0])) if a != b]
    known = [pair for pair in wide if pair[0] in cap.head_dims and pair[1] in cap.head_dims]
    return [*same, *known[:1], *((b, a) for a, b in known[-1:])]


def sizes_of(dims: Dims) -> list[int]:
    """Return head sizes to test: the listed ones, or usual and awkward ones of a range."""
    if dims.values is not None:
        return sorted(dims.values)
    step = dims.multiple_of
    top = _FULL_WIDTH if dims.at_most is None else min(dims.at_most, _FULL_WIDTH)
    found = {-(-size // step) * step for size in (1, 33, 64, 72, 128)} | {top // step * step}
    return sorted(size for size in found if 0 < size <= top) or [step]


def heads_of(cap: Capability) -> list[Value]:
    """Return (num_qo_heads, num_kv_heads) pairs up to the claimed group size."""
    most = cap.max_group
    found = [pair for group, pair in _GROUPS.items() if most is None or group <= most]
    if most is not None and most not in _GROUPS and most <= 64:
        found.append((most, 1))
    return list(found)


def page_sizes_of(cap: Capability) -> list[Value]:
    """Return the claimed page sizes, or usual and awkward ones where any is claimed."""
    return list(_ANY_PAGE_SIZE if cap.page_sizes is None else sorted(cap.page_sizes))


def forms_of(path: Path, op: Op) -> list[Value]:
    """Return how tensors may lie in memory; see ``world.py``."""
    forms = ["plain", "fused", "spread", "ones"]
    if op.paged:
        forms += ["five", "pool"]
    if not path.contract.same_kv_strides:
        forms.append("apart")
    if not path.contract.dense_head_dim:
        forms.append("thin")
    return list(forms)


def _masks(cap: Capability, op: Op) -> list[Value]:
    if op in (Op.DECODE, Op.DECODE_SINGLE):
        return ["none"] if MaskMode.NONE in cap.masks else []
    if op is Op.VERIFY:
        return ["causal"] if MaskMode.CAUSAL in cap.masks else []
    found: list[Value] = [mode.value for mode in MaskMode if mode in cap.masks]
    return [*found, "packed"] if MaskMode.CUSTOM in cap.masks else found


def _positions(cap: Capability) -> list[Value]:
    found: list[Value] = []
    for mode in sorted(cap.pos_encodings):
        if mode is PosEncoding.ROPE_LLAMA:
            found += [(1.0, 1e4), (2.0, 5e5)]
        else:
            found.append(mode.value)
    return found


def _lse(cap: Capability, op: Op) -> list[Value]:
    """``late``: asked for in run() though plan() was not told."""
    if not cap.lse:
        return ["no"]
    return ["no", "lse"] if op in SINGLES else ["no", "lse", "late"]


def _tensor_cores(cap: Capability, op: Op) -> list[Value]:
    if op in (Op.DECODE, Op.DECODE_SINGLE):
        return [False, True] if cap.tensor_cores else [False]
    return [True] if cap.tensor_cores else []
