"""Batch prefill over contiguous keys and values."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import torch

from . import tracing
from .arguments import check_workspace, refuse, split_size
from .batch import ragged_batch
from .checking import dense
from .errors import needs
from .graph_buffers import ragged_buffers
from .options import Dtype, forward_changes, make_problem
from .prefill_common import check_lengths, masked_keys, planned_mask
from .problem import Op, RaggedKV
from .run_options import Pair, RaggedRun, Result
from .sinks import sink_asked
from .wrapper import AttentionWrapper, returning_lse


class BatchPrefillWithRaggedKVCacheWrapper(AttentionWrapper):
    """Attention of packed query rows over packed keys and values, request by request.

    Args:
        float_workspace_buffer: Scratch bytes on the device the wrapper works on, 16-byte aligned.
        kv_layout: ``NHD`` (``[total_kv, heads, dim]``) or ``HND`` (``[heads, total_kv, dim]``).
        use_cuda_graph: Keep fixed buffers and the shape of the first plan; its rows and keys are the
            capacity.
        qo_indptr_buf: Graph mode: int32 ``[batch_size + 1]``; fixes the batch size.
        kv_indptr_buf: Graph mode: int32 ``[batch_size + 1]``.
        custom_mask_buf: Graph mode with a custom mask: uint8, as many bytes as masks ever planned.
        mask_indptr_buf: Graph mode with a custom mask: int32 ``[batch_size + 1]``.
        backend: ``auto``, a backend, or a candidate ``backend/path``.
        jit_args: As for the paged wrapper.
        jit_kwargs: As for the paged wrapper.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self._with_sink = sink_asked(jit_args, jit_kwargs)
        workspace = check_workspace("float_workspace_buffer", float_workspace_buffer)
        graph = ragged_buffers(
            use_cuda_graph, workspace.device, qo_indptr_buf, kv_indptr_buf, custom_mask_buf, mask_indptr_buf
        )
        super().__init__(workspace, kv_layout, backend, graph)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Dtype = "float16",
        kv_data_type: Dtype | None = None,
        o_data_type: Dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: torch.Tensor | None = None,
        o_indptr: torch.Tensor | None = None,
        needs_lse: bool = False,
    ) -> None:
        """Plan for one batch. Note the order: ``window_left`` comes before ``sm_scale`` here.

        Index tensors on the host cost no synchronisation; those on the device are fetched in one copy.
        All may be reused once plan() returns. If it raises, the previous plan stays in force.

        Args:
            qo_indptr: int32 ``[batch_size + 1]``, first query row of each request.
            kv_indptr: int32 ``[batch_size + 1]``, first key of each request, in tokens.
            num_qo_heads: As for the paged wrapper's plan(), like all that follow but:
            num_kv_heads: See there.
            head_dim_qk: See there.
            head_dim_vo: See there.
            custom_mask: See there.
            packed_custom_mask: See there.
            causal: See there.
            pos_encoding_mode: See there.
            use_fp16_qk_reduction: See there.
            window_left: See there.
            logits_soft_cap: See there.
            sm_scale: See there.
            rope_scale: See there.
            rope_theta: See there.
            q_data_type: See there.
            kv_data_type: See there.
            o_data_type: See there.
            non_blocking: See there.
            prefix_len_ptr: See there.
            token_pos_in_items_ptr: See there.
            token_pos_in_items_len: See there.
            max_item_len_ptr: See there.
            fixed_split_size: In tokens here.
            disable_split_kv: See there.
            seq_lens: Must not exceed the lengths in ``kv_indptr``.
            seq_lens_q: See there.
            max_token_per_sequence: See there.
            max_sequence_kv: See there.
            v_indptr: Not supported.
            o_indptr: Not supported.
            needs_lse: See there.

        Raises:
            ValueError: An argument does not fit, or names what is frozen in graph mode.
            TypeError: An argument has the wrong type.
            NotImplementedError: No backend serves the combination.
        """
        tracing.refuse_traced_plan(self)
        refuse(v_indptr=v_indptr, o_indptr=o_indptr)
        asked = locals()
        mode = planned_mask(asked, self.device)
        problem = make_problem(
            Op.PREFILL_RAGGED, (num_qo_heads, num_kv_heads),
            (head_dim_qk, head_dim_qk if head_dim_vo is None else head_dim_vo),
            q_data_type, q_data_type if kv_data_type is None else kv_data_type, o_data_type,
            RaggedKV(self._kv_layout), mode, pos_encoding_mode, window_left, logits_soft_cap,
            sm_scale, rope_scale, rope_theta, self._with_sink or needs_lse, True,
            split_size(fixed_split_size), disable_split_kv,
        )  # fmt: skip
        batch = ragged_batch(qo_indptr, kv_indptr, device=self.device, seq_lens=seq_lens)
        check_lengths(batch, seq_lens_q, max_token_per_sequence, max_sequence_kv, self.device)
        self._plan(problem, batch, mask=masked_keys(asked, batch, self.device))

    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: object,
        return_lse: Literal[False] = False, **more: Unpack[RaggedRun]
    ) -> torch.Tensor: ...  # fmt: skip
    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: object, return_lse: Literal[True],
        **more: Unpack[RaggedRun]
    ) -> Pair: ...  # fmt: skip
    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: object, return_lse: bool,
        **more: Unpack[RaggedRun]
    ) -> Result: ...  # fmt: skip

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: object,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        o_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: object | None = None,
    ) -> Result:
        """Attend with the plan in force. May be captured in graph mode.

        Args:
            q: ``[qo_indptr[-1], num_qo_heads, head_dim_qk]``, any strides.
            k: ``[>= kv_indptr[-1], num_kv_heads, head_dim_qk]`` (NHD; heads first in HND), any strides.
            v: As ``k``, with ``head_dim_vo``; its strides are its own.
            *args: ``sink`` and ``sm_scale`` of the variant ``AttentionSink``, as for the paged wrapper.
            q_scale: Multiplies q; a number or a one-element tensor, as the next two.
            k_scale: Multiplies k.
            v_scale: Multiplies the output.
            o_scale: Not supported.
            out: ``[rows, num_qo_heads, head_dim_vo]`` of the planned output type.
            lse: float32 ``[rows, num_qo_heads]``.
            return_lse: Also return the log-sum-exp, base 2; -inf where there is no key.
            enable_pdl: A launch hint of upstream without meaning here; has no effect on results.
            kv_cache_sf: Not supported.

        Returns:
            ``out``, or ``(out, lse)``; contiguous unless given.

        Raises:
            ValueError: No plan, or a tensor differs from what was planned.
            NotImplementedError: An argument no backend here has.
        """
        refuse(o_scale=o_scale, kv_cache_sf=kv_cache_sf)
        extra = args or self._with_sink
        if not extra and self._kv_layout == "NHD":
            found = self._run_direct(q, (k, v), out, lse, return_lse, q_scale, k_scale, v_scale)
            if found is not None:
                return found
        for name, t in (("k", k), ("v", v)):
            if not isinstance(t, torch.Tensor) or t.ndim != 3 or t.is_nested:
                got = tuple(dense(name, t, "core.kv-shape", "a 3-D tensor").shape)
                raise ValueError(needs(name, "a 3-D tensor", got, "core.kv-shape"))
        if self._kv_layout == "HND":
            k, v = k.transpose(0, 1), v.transpose(0, 1)
        if extra:
            scales = (q_scale, k_scale, v_scale)
            return self._run_extra("q, k and v", args, None, (q, k, v), out, lse, return_lse, scales)
        return self._run(q, k, v, out, lse, return_lse, q_scale, k_scale, v_scale)

    run_return_lse = returning_lse(run)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """Upstream's deprecated run(); replaces planned values as the paged wrapper's ``forward`` does."""
        changes = forward_changes(
            pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta
        )
        with self._forwarded(changes, causal=causal) as q_scale:
            out = self.run(q, k, v, q_scale=q_scale)
        assert isinstance(out, torch.Tensor)
        return out

    def forward_return_lse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As :meth:`forward`, returning ``(out, lse)``."""
        changes = forward_changes(
            pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta
        )
        with self._forwarded(changes, causal=causal) as q_scale:
            both = self.run(q, k, v, q_scale=q_scale, return_lse=True)
        assert isinstance(both, tuple)
        return both

    begin_forward = plan
