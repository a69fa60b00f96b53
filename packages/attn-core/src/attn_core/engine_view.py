"""Private names of upstream's wrappers that serving engines read.

vLLM compares ``_window_left``, ``_logits_soft_cap``, ``_sm_scale`` and ``_causal`` with its own before every
run; SGLang writes page ids straight into ``_paged_kv_indices_buf`` of a graph wrapper. All are read-only
views of the plan in force or of the caller's graph buffers.
"""

from __future__ import annotations

from typing import NoReturn

import torch

from .errors import needs
from .planner import Planner
from .problem import AttentionProblem, MaskMode


class EngineView(Planner):
    """The names; each is None before the first plan() where it belongs to a plan."""

    def _of_problem(self, name: str) -> object:
        return None if self._state is None else getattr(self._state.query.problem, name)

    def _index(self, name: str) -> torch.Tensor | None:
        if self._graph is not None:
            return self._graph.bound.get(name)
        return None if self._state is None else self._state.image.get(name)

    @property
    def _causal(self) -> bool | None:
        return None if self._state is None else self._state.query.problem.mask is MaskMode.CAUSAL

    @property
    def _pos_encoding_mode(self) -> str | None:
        found: AttentionProblem | None = None if self._state is None else self._state.query.problem
        return None if found is None else found.pos_encoding.value

    @property
    def _window_left(self) -> object:
        return self._of_problem("window_left")

    @property
    def _logits_soft_cap(self) -> object:
        return self._of_problem("logits_soft_cap")

    @property
    def _sm_scale(self) -> object:
        return self._of_problem("sm_scale")

    @property
    def _rope_scale(self) -> object:
        return self._of_problem("rope_scale")

    @property
    def _rope_theta(self) -> object:
        return self._of_problem("rope_theta")

    @property
    def _fixed_batch_size(self) -> int:
        return 0 if self._graph is None else self._graph.batch_size

    @property
    def _qo_indptr_buf(self) -> torch.Tensor | None:
        return self._index("qo_indptr")

    @property
    def _paged_kv_indptr_buf(self) -> torch.Tensor | None:
        return self._index("kv_indptr")

    @property
    def _kv_indptr_buf(self) -> torch.Tensor | None:
        return self._index("kv_indptr")

    @property
    def _paged_kv_indices_buf(self) -> torch.Tensor | None:
        return self._index("kv_indices")

    @property
    def _kv_indices_buf(self) -> torch.Tensor | None:
        return self._index("kv_indices")

    @property
    def _paged_kv_last_page_len_buf(self) -> torch.Tensor | None:
        return self._index("kv_last_page_len")

    @property
    def _custom_mask_buf(self) -> torch.Tensor | None:
        return self._index("custom_mask")

    @property
    def _mask_indptr_buf(self) -> torch.Tensor | None:
        return self._index("mask_indptr")

    @property
    def _int_workspace_buffer(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=self.device)

    @property
    def _cached_module(self) -> _NoModule:
        return _NoModule()


class _NoModule:
    """Stands for upstream's compiled module, which engines once planned and ran behind the wrapper's back."""

    def __getattr__(self, name: str) -> NoReturn:
        want = "fast_decode_plan() or the wrapper's own methods (there is no compiled module to call)"
        raise NotImplementedError(needs(f"_cached_module.{name}", want, "an access", "core.not-here"))
