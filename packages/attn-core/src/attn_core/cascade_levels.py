"""Attention over keys that requests share in levels: a common prefix once, the rest per request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from . import tracing
from .arguments import as_pos_encoding
from .cache_view import CacheView
from .checking import flag, whole
from .errors import needs
from .merge import merge_states
from .options import Dtype
from .planner import plan_all
from .prefill_paged import BatchPrefillWithPagedKVCacheWrapper
from .problem import PosEncoding

Tensors = Sequence[torch.Tensor]


class MultiLevelCascadeAttentionWrapper:
    """Paged attention in levels over one cache; every level sees all query rows and some of the keys.

    Level 0 is the coarsest: one "request" holds all rows that share a prefix. The last level has the
    real requests and the keys that are theirs alone. The levels' results are merged by their
    log-sum-exp, so shared keys are read once per group of rows instead of once per request.

    Args:
        num_levels: Levels, at least 1.
        float_workspace_buffer: Scratch bytes that all levels share, as for
            :class:`BatchPrefillWithPagedKVCacheWrapper`.
        kv_layout: ``NHD`` or ``HND``.
        use_cuda_graph: Each level keeps fixed buffers and the shape of its first plan.
        qo_indptr_buf_arr: Graph mode: per level, int32 ``[groups + 1]``.
        paged_kv_indptr_buf_arr: Graph mode: per level, int32 ``[groups + 1]``.
        paged_kv_indices_buf_arr: Graph mode: per level, int32, as many entries as pages ever planned.
        paged_kv_last_page_len_buf_arr: Graph mode: per level, int32 ``[groups]``.
        backend: ``auto``, a backend, or a candidate ``backend/path``; levels are routed each on its own.

    Raises:
        TypeError: ``num_levels`` is not an int.
        ValueError: It is below 1, or a list has not one entry per level.
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Tensors | None = None,
        paged_kv_indptr_buf_arr: Tensors | None = None,
        paged_kv_indices_buf_arr: Tensors | None = None,
        paged_kv_last_page_len_buf_arr: Tensors | None = None,
        backend: str = "auto",
    ) -> None:
        if whole("num_levels", num_levels, "core.cascade", 1) > _MOST_LEVELS:
            raise ValueError(needs("num_levels", f"at most {_MOST_LEVELS}", num_levels, "core.cascade"))
        self._use_cuda_graph = flag("use_cuda_graph", use_cuda_graph)
        buffers: list[dict[str, Any]] = [{}] * num_levels
        if self._use_cuda_graph:
            given = {
                "qo_indptr_buf_arr": qo_indptr_buf_arr,
                "paged_kv_indptr_buf_arr": paged_kv_indptr_buf_arr,
                "paged_kv_indices_buf_arr": paged_kv_indices_buf_arr,
                "paged_kv_last_page_len_buf_arr": paged_kv_last_page_len_buf_arr,
            }
            each = [_per_level(name, value, num_levels) for name, value in given.items()]
            buffers = [dict(zip(_BUFFERS, mine, strict=True)) for mine in zip(*each, strict=True)]
        self._levels = [
            BatchPrefillWithPagedKVCacheWrapper(
                float_workspace_buffer, kv_layout, self._use_cuda_graph,
                backend=backend, **mine,
            )
            for mine in buffers
        ]  # fmt: skip

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the levels keep fixed buffers and a fixed shape, ready for graph capture."""
        return self._use_cuda_graph

    @property
    def levels(self) -> tuple[BatchPrefillWithPagedKVCacheWrapper, ...]:
        """The wrapper of each level, for its ``route``; not to be planned on its own."""
        return tuple(self._levels)

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: Tensors
    ) -> None:
        """Replace the float workspace of all levels; see the paged wrapper's method.

        Args:
            float_workspace_buffer: Scratch bytes.
            int_workspace_buffers: One per level; checked and not used.

        Raises:
            ValueError: A buffer does not fit; no level has changed.
        """
        integers = _per_level("int_workspace_buffers", int_workspace_buffers, len(self._levels))
        old = [level._float_workspace_buffer for level in self._levels]
        try:
            for level, buffer in zip(self._levels, integers, strict=True):
                level.reset_workspace_buffer(float_workspace_buffer, buffer)
        except (TypeError, ValueError):
            for level, was in zip(self._levels, old, strict=True):
                level._float_workspace_buffer = was
            raise

    def plan(
        self,
        qo_indptr_arr: Tensors,
        paged_kv_indptr_arr: Tensors,
        paged_kv_indices_arr: Tensors,
        paged_kv_last_page_len: Tensors,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Dtype = "float16",
        kv_data_type: Dtype | None = None,
    ) -> None:
        """Fix what the following runs compute. If it raises, the previous plan of every level stays.

        Args:
            qo_indptr_arr: Per level, int32 ``[groups + 1]``: which rows form a group.
            paged_kv_indptr_arr: Per level, int32 ``[groups + 1]``.
            paged_kv_indices_arr: Per level, int32 page ids.
            paged_kv_last_page_len: Per level, int32 ``[groups]``.
            num_qo_heads: As for the paged wrapper's plan(), like all that follow but:
            num_kv_heads: See there.
            head_dim: See there.
            page_size: See there.
            causal: Applies to the last level; every row sees all keys of the levels above.
            pos_encoding_mode: 'NONE' with more than one level: a level knows no position but its own.
            use_fp16_qk_reduction: See there.
            sm_scale: See there.
            window_left: -1 with more than one level, for the same reason.
            logits_soft_cap: See there.
            rope_scale: See there.
            rope_theta: See there.
            q_data_type: See there.
            kv_data_type: See there.

        Raises:
            ValueError: An argument does not fit, a list has not one entry per level, or levels differ in
                their number of rows.
            TypeError: An argument has the wrong type.
            NotImplementedError: No backend serves the combination.
        """
        tracing.refuse_traced_plan(self)
        count = len(self._levels)
        given = {
            "qo_indptr_arr": qo_indptr_arr,
            "paged_kv_indptr_arr": paged_kv_indptr_arr,
            "paged_kv_indices_arr": paged_kv_indices_arr,
            "paged_kv_last_page_len": paged_kv_last_page_len,
        }
        tables = zip(*(_per_level(name, value, count) for name, value in given.items()), strict=True)
        self._check_positions(pos_encoding_mode, window_left)
        causal = flag("causal", causal)
        asked = []
        for n, (level, table) in enumerate(zip(self._levels, tables, strict=True)):
            problem, batch, _ = level._asked(dict(
                zip(_TABLE, table, strict=True), num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads,
                head_dim_qk=head_dim, head_dim_vo=None, page_size=page_size,
                causal=causal and n == count - 1, pos_encoding_mode=pos_encoding_mode, sm_scale=sm_scale,
                window_left=window_left, logits_soft_cap=logits_soft_cap, rope_scale=rope_scale,
                rope_theta=rope_theta, q_data_type=q_data_type, kv_data_type=kv_data_type,
                needs_lse=count > 1, **_UNUSED,
            ))  # fmt: skip
            asked.append((level, problem, batch))
        rows = [batch.shape.total_q for _, _, batch in asked]
        if len(set(rows)) > 1:
            raise ValueError(
                needs("qo_indptr_arr", "the same number of rows in every level", rows, "core.cascade")
            )
        plan_all(asked)

    def _check_positions(self, pos_encoding_mode: str, window_left: int) -> None:
        if len(self._levels) == 1:
            return
        if as_pos_encoding(pos_encoding_mode) is not PosEncoding.NONE:
            want = "'NONE' with more than one level, whose keys do not know their positions"
            raise NotImplementedError(
                needs("pos_encoding_mode", want, repr(pos_encoding_mode), "core.cascade")
            )
        if whole("window_left", window_left, "core.window") != -1:
            want = "-1 with more than one level, whose keys do not know their positions"
            raise NotImplementedError(needs("window_left", want, window_left, "core.cascade"))

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor] | torch.Tensor | CacheView
    ) -> torch.Tensor:
        """Attend with the plan in force. May be captured in graph mode.

        Args:
            q: ``[rows, num_qo_heads, head_dim]``, any strides.
            paged_kv_cache: As for the paged wrapper; all levels' pages are in it. Not written.

        Returns:
            ``[rows, num_qo_heads, head_dim]`` in q's type.

        Raises:
            ValueError: No plan, or a tensor differs from what was planned.
        """
        if len(self._levels) == 1:
            out = self._levels[0].run(q, paged_kv_cache)
            assert isinstance(out, torch.Tensor)
            return out
        states = [level.run(q, paged_kv_cache, return_lse=True) for level in self._levels]
        return merge_states(*(torch.stack(part, 1) for part in zip(*states, strict=True)))[0]

    begin_forward = plan
    forward = run

    def end_forward(self) -> None:
        """Do nothing; upstream's deprecated counterpart of ``begin_forward``."""


_MOST_LEVELS = 1024
_BUFFERS = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
_TABLE = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
_UNUSED = {
    "custom_mask": None, "packed_custom_mask": None, "o_data_type": None, "seq_lens": None,
    "seq_lens_q": None, "max_token_per_sequence": None, "max_sequence_kv": None, "fixed_split_size": None,
    "disable_split_kv": False,
}  # fmt: skip


def _per_level(name: str, given: object, count: int) -> list[torch.Tensor]:
    if not isinstance(given, list | tuple):
        raise TypeError(needs(name, "a list with one tensor per level", type(given).__name__, "core.cascade"))
    if len(given) != count:
        raise ValueError(needs(name, f"one tensor for each of {count} levels", len(given), "core.cascade"))
    return list(given)
