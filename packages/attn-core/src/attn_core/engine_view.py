"""Private names of upstream's wrappers that serving engines read.

vLLM compares ``_window_left``, ``_logits_soft_cap``, ``_sm_scale`` and ``_causal`` with its own before every
run; SGLang writes page ids straight into ``_paged_kv_indices_buf`` of a graph wrapper, and its copies of
plan() assign what they hand to ``_cached_module.plan`` to the wrapper too. All are views of the plan in force
or of the caller's graph buffers: assigning what is planned is no change, and anything else is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .engine_plan import PlanModule
from .errors import needs
from .planner import Planner
from .problem import MaskMode


def _index(name: str) -> Any:
    """Make a view of an index array: the caller's buffer in graph mode, else the plan's."""

    def read(self: EngineView) -> torch.Tensor | None:
        state = self._state
        where = self._graph.bound if self._graph is not None else {} if state is None else state.image
        return where.get(name)

    return property(read)


def _fact(name: str, read: Callable[[Any], object]) -> Any:
    """Make a view of the plan in force, None before the first, that takes no other value."""

    def found(self: EngineView) -> object:
        return None if self._state is None else read(self._state)

    def check(self: EngineView, value: object) -> None:
        now = found(self)
        if value is not now and (self._state is None or value != now):
            want = "what plan() returned" if now is self._state is not None else f"{now!r}, as planned"
            raise ValueError(needs(name, f"{want} (see plan())", repr(value), "core.engine"))

    return property(found, check)


def _of_problem(own: str, name: str) -> Any:
    return _fact(own, lambda state: getattr(state.query.problem, name))


class EngineView(Planner):
    """The names; each is None before the first plan() where it belongs to a plan."""

    _max_total_num_rows: int | None = None
    """An engine's own note: nothing here reads it."""

    _causal = _fact("_causal", lambda state: state.query.problem.mask is MaskMode.CAUSAL)
    _pos_encoding_mode = _fact("_pos_encoding_mode", lambda state: state.query.problem.pos_encoding.value)
    _window_left = _of_problem("_window_left", "window_left")
    _logits_soft_cap = _of_problem("_logits_soft_cap", "logits_soft_cap")
    _sm_scale = _of_problem("_sm_scale", "sm_scale")
    _rope_scale = _of_problem("_rope_scale", "rope_scale")
    _rope_theta = _of_problem("_rope_theta", "rope_theta")
    _page_size = _of_problem("_page_size", "page_size")
    _plan_info = _fact("_plan_info", lambda state: state)
    _max_kv_len = _fact("_max_kv_len", lambda state: state.query.batch.max_kv_len)

    _qo_indptr_buf = _index("qo_indptr")
    _paged_kv_indptr_buf = _index("kv_indptr")
    _kv_indptr_buf = _index("kv_indptr")
    _paged_kv_indices_buf = _index("kv_indices")
    _kv_indices_buf = _index("kv_indices")
    _paged_kv_last_page_len_buf = _index("kv_last_page_len")
    _kv_len_arr_buf = _index("kv_len")
    _custom_mask_buf = _index("custom_mask")
    _mask_indptr_buf = _index("mask_indptr")

    @property
    def _fixed_batch_size(self) -> int:
        return 0 if self._graph is None else self._graph.batch_size

    @property
    def _use_cuda_graph(self) -> bool:
        return self._graph is not None

    @property
    def _int_workspace_buffer(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.device)

    @property
    def _pin_memory_int_workspace_buffer(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device="cpu")

    @property
    def _cached_module(self) -> PlanModule:
        return PlanModule(self)
