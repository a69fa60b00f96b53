"""A decode plan() inside a compiled region: one operator, and a number that run() depends on."""

from __future__ import annotations

import torch

from . import tracing
from .arguments import as_dtype, refuse
from .options import DECODE_DEFAULTS, DecodeOptions, decode_dtypes
from .planner import Planner


def trace_plan(
    wrapper: Planner,
    table: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    sizes: tuple[int, int, int, int],
    options: DecodeOptions,
) -> None:
    """Emit the operator; called while Dynamo traces.

    Args:
        wrapper: The decode wrapper. Its next traced run() runs what is planned here.
        table: ``indptr``, ``indices`` and ``last_page_len`` as for plan().
        sizes: Query heads, key/value heads, head dimension, page size.
        options: As for plan().

    Raises:
        ValueError: The wrapper is in CUDA-graph mode: its plans overwrite each other.
        TypeError: An option has no such name.
    """
    if wrapper._graph is not None:
        tracing.refuse_plan("a CUDA-graph wrapper")
    for name in options:
        if name not in DECODE_DEFAULTS:
            raise TypeError(f"plan: got an unexpected keyword argument {name!r} [core.arguments]")
    given: DecodeOptions = {**DECODE_DEFAULTS, **options}
    refuse(window_right=given["window_right"], block_tables=given["block_tables"])
    q, kv = decode_dtypes(options)
    q_dtype, kv_dtype = as_dtype("q_data_type", q), as_dtype("kv_data_type", kv)
    o_data_type = given["o_data_type"]
    o_dtype = q_dtype if o_data_type is None else as_dtype("o_data_type", o_data_type)
    wrapper._traced_plan = tracing.call(
        "plan_decode", wrapper._handle, wrapper._traced_plan, *table, given["seq_lens"], *sizes,
        given["pos_encoding_mode"], given["window_left"], given["logits_soft_cap"], q_dtype, kv_dtype,
        o_dtype, given["sm_scale"], given["rope_scale"], given["rope_theta"], given["fixed_split_size"],
        given["disable_split_kv"], given["q_len_per_req"], given["needs_lse"],
    )  # fmt: skip
    wrapper._traced_o_dtype = o_dtype
