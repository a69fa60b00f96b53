"""plan() inside a compiled region, for wrappers whose plans stand beside each other.

The operator plans as ever and returns the plan's number, one int64 on the CPU. A traced run() takes it and
runs exactly that plan, whatever order torch gives the operators. In CUDA-graph mode a plan overwrites the
one before it, so there the order would matter and plan() is refused.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import MutableMapping
from typing import Any

import torch

from attn_core import tracing
from attn_core.decode_paged import BatchDecodeWithPagedKVCacheWrapper
from attn_core.errors import needs
from attn_core.op_table import Arg, OpRow, Role
from attn_core.planner import Planner
from attn_core.state import PlanState

from .rows import RUN, const, run_operator

Tensor = torch.Tensor
KEPT = 16
"""Plans of one wrapper that a region may still run."""
_numbers = itertools.count(1)
_plans: MutableMapping[Planner, OrderedDict[int, PlanState]] = weakref.WeakKeyDictionary()


def _plan_decode(
    handle: int, before: Tensor | None, indptr: Tensor, indices: Tensor, last_page_len: Tensor,
    seq_lens: Tensor | None, num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int,
    pos_encoding_mode: str, window_left: int, logits_soft_cap: float | None, q_data_type: torch.dtype,
    kv_data_type: torch.dtype, o_data_type: torch.dtype, sm_scale: float | None, rope_scale: float | None,
    rope_theta: float | None, fixed_split_size: int | None, disable_split_kv: bool, q_len_per_req: int,
    needs_lse: bool,
) -> Tensor:  # fmt: skip
    wrapper = tracing.wrapper(handle)
    assert isinstance(wrapper, BatchDecodeWithPagedKVCacheWrapper)
    # The class's plan(): the instance's may be replaced.
    BatchDecodeWithPagedKVCacheWrapper.plan(
        wrapper, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        pos_encoding_mode=pos_encoding_mode, window_left=window_left, logits_soft_cap=logits_soft_cap,
        q_data_type=q_data_type, kv_data_type=kv_data_type, o_data_type=o_data_type, sm_scale=sm_scale,
        rope_scale=rope_scale, rope_theta=rope_theta, seq_lens=seq_lens, fixed_split_size=fixed_split_size,
        disable_split_kv=disable_split_kv, q_len_per_req=q_len_per_req, needs_lse=needs_lse,
    )  # fmt: skip
    kept, number = _plans.setdefault(wrapper, OrderedDict()), next(_numbers)
    kept[number] = tracing.plan_in_force(wrapper)
    while len(kept) > KEPT:
        kept.popitem(last=False)
    return torch.tensor([number], device="cpu")


PLAN_DECODE = OpRow(
    "plan_decode",
    (
        # `before`, the number of the plan before, keeps several plans of one region apart and in order.
        const("handle", "SymInt"), Arg("before", "Tensor?"), Arg("indptr"), Arg("indices"),
        Arg("last_page_len"), Arg("seq_lens", "Tensor?"), const("num_qo_heads", "int"),
        const("num_kv_heads", "int"), const("head_dim", "int"), const("page_size", "int"),
        const("pos_encoding_mode", "str"), const("window_left", "int"), const("logits_soft_cap", "float?"),
        const("q_data_type", "ScalarType"), const("kv_data_type", "ScalarType"),
        const("o_data_type", "ScalarType"), const("sm_scale", "float?"), const("rope_scale", "float?"),
        const("rope_theta", "float?"), const("fixed_split_size", "int?"),
        const("disable_split_kv", "bool"), const("q_len_per_req", "int"), const("needs_lse", "bool"),
    ),
    _plan_decode, lambda *_: (torch.empty(1, dtype=torch.int64, device="cpu"),), returns=1, host=True,
)  # fmt: skip


def _run_planned(plan: Tensor, handle: int, *args: Any) -> None:
    wrapper, number = tracing.wrapper(handle), int(plan)
    found = _plans.get(wrapper, OrderedDict()).get(number)
    if found is None:
        want = f"at most {KEPT} plans of one wrapper between plan() and run()"
        raise RuntimeError(needs("compiled run()", want, f"plan {number}, forgotten", "compile.plan-gone"))
    run_operator(found, handle, *args)


RUN_PLANNED = OpRow(
    "run_planned", (Arg("plan", "Tensor", Role.PLAN), *RUN.args), _run_planned,
    lambda plan, *args: RUN.fresh(*args) if RUN.fresh is not None else (), into=True,
)  # fmt: skip

PLANS = (PLAN_DECODE, RUN_PLANNED)
