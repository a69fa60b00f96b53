"""Attention sinks: one more logit per query head that takes weight and brings no value.

They come with :class:`~attn_core.BatchAttentionWithAttentionSinkWrapper`, or as upstream's kernel variant
``AttentionSink`` that a wrapper is constructed with (``jit_args``). No source is compiled here: a variant is
known by its name and by what it adds to ``run()``, and any other is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.compiler import is_dynamo_compiling

from . import tracing
from .arguments import refuse
from .checking import dense, finite
from .errors import needs
from .options import number

_CODE = "core.variant"
_NAMES, _SCALARS, _VARIANT = 7, 9, 11
"""Places in upstream's ``jit_args``: names of additional tensors and scalars, name of the variant."""
_JIT_KWARGS = frozenset(
    ("pos_encoding_mode", "use_sliding_window", "use_logits_soft_cap", "use_fp16_qk_reduction", "fp8_enabled")
)


def sink_asked(jit_args: object, jit_kwargs: object = None) -> bool:
    """Return whether a wrapper's constructor is given the variant with a sink; False for no variant.

    Types, head sizes and flags of a variant say what upstream compiles; plan() alone decides here.

    Args:
        jit_args: None, or upstream's 13 values or more: uri, four types, two head sizes, names and types
            of additional tensors, the same of scalars, the variant's name and source.
        jit_kwargs: None, or a dict of upstream's flags.

    Raises:
        TypeError: Not a sequence, or an unknown flag.
        ValueError: Not those values.
        NotImplementedError: Another variant.
    """
    if jit_args is None:
        refuse(jit_kwargs=jit_kwargs)
        return False
    if isinstance(jit_args, str) or not isinstance(jit_args, Sequence):
        raise TypeError(needs("jit_args", "a list or a tuple", type(jit_args).__name__, _CODE))
    if len(jit_args) < _VARIANT + 2:
        raise ValueError(needs("jit_args", "13 values, the last a variant's source", len(jit_args), _CODE))
    _check_flags(jit_kwargs)
    name, tensors, scalars = (jit_args[at] for at in (_VARIANT, _NAMES, _SCALARS))
    if not isinstance(name, str):
        raise ValueError(needs("jit_args[11]", "the name of a variant", type(name).__name__, _CODE))
    adds = [list(names) if isinstance(names, list | tuple) else names for names in (tensors, scalars)]
    if name != "AttentionSink" or adds != [["sink"], ["sm_scale"]]:
        want = "the variant AttentionSink, which adds ['sink'] and ['sm_scale'] to run()"
        got = f"{name}, which adds {adds[0]} and {adds[1]}"
        text = needs("jit_args", want, got, _CODE)
        raise NotImplementedError(f"{text}; no source is compiled here: a kernel of your own is a backend")
    return True


def _check_flags(jit_kwargs: object) -> None:
    if jit_kwargs is None:
        return
    if not isinstance(jit_kwargs, dict):
        raise TypeError(needs("jit_kwargs", "a dict", type(jit_kwargs).__name__, _CODE))
    unknown = [str(name) for name in jit_kwargs if name not in _JIT_KWARGS]
    if unknown:
        raise TypeError(needs("jit_kwargs", f"names of {sorted(_JIT_KWARGS)}", unknown[0], _CODE))


def sink_and_scale(
    args: tuple[object, ...], heads: int, device: torch.device, planned_scale: float
) -> tuple[torch.Tensor, float]:
    """Return the sink and what multiplies q, from what a run was given behind the cache.

    Raises:
        TypeError: No sink, more than the two, or of another type.
        ValueError: The sink has another shape or device, or the scale is not to be had from the planned one.
    """
    if not 1 <= len(args) <= 2:
        want = "q, the keys and values, sink and at most sm_scale"
        raise TypeError(needs("run", want, f"{len(args)} after the cache", "core.arguments"))
    sink, sm_scale = args[0], args[1] if len(args) == 2 else None
    sink = dense("sink", sink, "core.sink")
    if not sink.is_floating_point() or tuple(sink.shape) != (heads,):
        got = f"{sink.dtype} {tuple(sink.shape)}"
        raise ValueError(needs("sink", f"floating point [{heads}], one per query head", got, "core.sink"))
    if sink.device != device:
        raise ValueError(needs("sink", f"a tensor on {device}", sink.device, "core.device"))
    return sink, 1.0 if sm_scale is None else _over(number("sm_scale", sm_scale, 1.0), planned_scale)


def _over(scale: float, planned: float) -> float:
    """Return what turns the planned scale into the one of a run."""
    if scale == planned:
        return 1.0
    if planned == 0.0:
        raise ValueError(needs("sm_scale", "0.0 as planned, or a plan with another", scale, "core.number"))
    return finite("sm_scale / the planned sm_scale", scale / planned, "core.number")


def add_sink(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor) -> None:
    """Give a sink its part of attention without one, in place.

    Args:
        out: ``[rows, num_qo_heads, head_dim_vo]``, updated.
        lse: float32 ``[rows, num_qo_heads]``, base 2, updated.
        sink: Floating point ``[num_qo_heads]``, natural exponent.
    """
    sink = sink.detach()  # a model's parameter: attention has no gradient here
    if is_dynamo_compiling():
        tracing.call("add_sink", out, lse, sink)
        return
    out, lse = out.detach(), lse.detach()  # leaves, and tensors made in inference mode, are written too
    log2_sink = sink.float() * math.log2(math.e)
    # What is left of the weights once the sink has taken its own; nan where neither has any.
    kept = torch.sigmoid((lse - log2_sink) * math.log(2.0)).nan_to_num(0.0)
    out.mul_(kept.unsqueeze(-1))
    torch.logaddexp2(lse, log2_sink, out=lse)
