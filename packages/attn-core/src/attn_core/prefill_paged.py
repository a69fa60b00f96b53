"""Batch prefill and append attention over a paged cache."""

from __future__ import annotations

from typing import Any, Literal, Unpack, overload

import torch

from . import tracing
from .arguments import MaskBits, check_workspace, refuse, split_size
from .batch import HostBatch, paged_batch
from .checking import size_of
from .graph_buffers import paged_buffers
from .options import Dtype, forward_changes, make_problem
from .prefill_common import check_lengths, masked_keys, planned_mask
from .problem import AttentionProblem, Op, PagedKV
from .run_options import KVCache, Pair, PrefillRun, Result
from .sinks import sink_asked
from .wrapper import AttentionWrapper, returning_lse


class BatchPrefillWithPagedKVCacheWrapper(AttentionWrapper):
    """Attention of any number of query rows per request over a paged cache.

    ``plan()`` once per step, then ``run()`` once per layer. The query rows of a request are the last
    tokens of its sequence. With ``causal`` row i sees the keys up to its own position; a row without
    a key gives out 0 and lse -inf. ``custom_mask`` replaces ``causal`` and can describe a *tree* of
    draft tokens.

    Args:
        float_workspace_buffer: Scratch bytes on the device the wrapper works on, 16-byte aligned;
            never read before written.
        kv_layout: ``NHD`` or ``HND``.
        use_cuda_graph: Keep fixed buffers and the shape of the first plan, so that ``run()`` can be
            captured and replayed after later plans of at most as many rows.
        qo_indptr_buf: Graph mode: int32 ``[batch_size + 1]``; fixes the batch size.
        paged_kv_indptr_buf: Graph mode: int32 ``[batch_size + 1]``.
        paged_kv_indices_buf: Graph mode: int32, as many entries as pages ever planned.
        paged_kv_last_page_len_buf: Graph mode: int32 ``[batch_size]``.
        custom_mask_buf: Graph mode with a custom mask: uint8, as many bytes as masks ever planned.
        mask_indptr_buf: Graph mode with a custom mask: int32 ``[batch_size + 1]``.
        backend: ``auto``, a backend, or a candidate ``backend/path``.
        jit_args: None, or upstream's description of the variant ``AttentionSink``: ``run()`` then takes
            ``sink`` and ``sm_scale`` by position. No other variant is served.
        jit_kwargs: Upstream's flags of the variant; plan() alone decides here.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        self._with_sink = sink_asked(jit_args, jit_kwargs)
        workspace = check_workspace("float_workspace_buffer", float_workspace_buffer)
        graph = paged_buffers(
            use_cuda_graph, workspace.device, qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf,
            paged_kv_last_page_len_buf, custom_mask_buf, mask_indptr_buf,
        )  # fmt: skip
        super().__init__(workspace, kv_layout, backend, graph)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
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
        o_data_type: Dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        needs_lse: bool = False,
    ) -> None:
        """Fix what the following runs compute, for one batch.

        Index tensors on the host cost no synchronisation; those on the device are fetched in one copy
        (``paged_kv_indices`` stays there). All may be reused once plan() returns. If it raises, the
        previous plan stays in force. Must not be called during graph capture.

        Args:
            qo_indptr: int32 ``[batch_size + 1]``, first query row of each request.
            paged_kv_indptr: int32 ``[batch_size + 1]``, first page of each request.
            paged_kv_indices: int32 page ids, at least ``paged_kv_indptr[-1]``.
            paged_kv_last_page_len: int32 ``[batch_size]``, tokens in the last page, 1..page_size.
            num_qo_heads: Query heads, a multiple of ``num_kv_heads``.
            num_kv_heads: Key/value heads.
            head_dim_qk: Elements of a query or key head.
            page_size: Tokens per page.
            head_dim_vo: Elements of a value or output head; ``head_dim_qk`` by default.
            custom_mask: bool, ``q_len * kv_len`` elements per request, row-major, one request after
                another; True keeps. Replaces ``causal``.
            packed_custom_mask: The same as uint8 bits, little-endian, each request on a byte border.
            causal: Row i sees keys up to its own position, bottom-right aligned.
            pos_encoding_mode: 'NONE', 'ROPE_LLAMA' or 'ALIBI'.
            use_fp16_qk_reduction: Permits a less exact sum; no backend here makes use of it.
            sm_scale: Default ``1 / sqrt(head_dim_qk)``.
            window_left: Keys left of a row's own position that it sees; -1 for all.
            logits_soft_cap: ``cap * tanh(x / cap)`` before the mask.
            rope_scale: Position divisor of ROPE_LLAMA, default 1.
            rope_theta: Base of ROPE_LLAMA, default 1e4.
            q_data_type: Query type.
            kv_data_type: Cache type; the query's by default.
            o_data_type: Output type; the query's by default.
            non_blocking: No effect: copies never block.
            prefix_len_ptr: Multi-item scoring, with the next three: ``[batch_size]`` uint32 (or int32, int64,
                like the others), tokens in front of each request's first delimiter. Rows behind it see the
                prefix and their own item up to themselves; it replaces ``causal``, and the window holds.
            token_pos_in_items_ptr: uint16, for every token from the first delimiter on its distance to the
                last delimiter, which itself has 0; one request after another.
            token_pos_in_items_len: Entries from one request to the next, an int or one element; 0 will do for
                one request.
            max_item_len_ptr: ``[batch_size]`` uint16, at least each request's greatest position.
            seq_lens: Checked against the pages, never believed over them.
            seq_lens_q: Must equal the lengths in ``qo_indptr``.
            block_tables: Not supported.
            max_token_per_sequence: If given, at least the longest request's query rows.
            max_sequence_kv: If given, at least the longest request's keys.
            fixed_split_size: Cut every request's keys into chunks of this many pages; a request's bits
                then do not depend on its batch.
            disable_split_kv: Never cut; same independence.
            needs_lse: The log-sum-exp will be asked for.

        Raises:
            ValueError: An argument does not fit, or names what is frozen in graph mode.
            TypeError: An argument has the wrong type.
            NotImplementedError: No backend serves the combination.
        """
        tracing.refuse_traced_plan(self)
        refuse(block_tables=block_tables)
        problem, batch, mask = self._asked(locals())
        self._plan(problem, batch, mask=mask)

    def _asked(self, a: dict[str, Any]) -> tuple[AttentionProblem, HostBatch, MaskBits | None]:
        """Turn the arguments of plan() or workspace_size(), by name, into what is asked."""
        kv_dtype = a["q_data_type"] if a["kv_data_type"] is None else a["kv_data_type"]
        dims = a["head_dim_qk"], a["head_dim_qk"] if a["head_dim_vo"] is None else a["head_dim_vo"]
        problem = make_problem(
            Op.PREFILL_PAGED, (a["num_qo_heads"], a["num_kv_heads"]), dims, a["q_data_type"], kv_dtype,
            a["o_data_type"], PagedKV(a["page_size"], self._kv_layout), planned_mask(a, self.device),
            a["pos_encoding_mode"], a["window_left"], a["logits_soft_cap"], a["sm_scale"], a["rope_scale"],
            a["rope_theta"], self._with_sink or a["needs_lse"], True, split_size(a["fixed_split_size"]),
            a["disable_split_kv"],
        )  # fmt: skip
        size_of("qo_indptr", a["qo_indptr"])  # not a number of rows, which paged_batch() takes too
        batch = paged_batch(
            a["qo_indptr"], a["paged_kv_indptr"], a["paged_kv_indices"], a["paged_kv_last_page_len"],
            a["page_size"], device=self.device, seq_lens=a["seq_lens"],
        )  # fmt: skip
        check_lengths(batch, a["seq_lens_q"], a["max_token_per_sequence"], a["max_sequence_kv"], self.device)
        return problem, batch, masked_keys(a, batch, self.device)

    def workspace_size(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
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
        o_data_type: Dtype | None = None,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> tuple[int, int]:
        """Return how much memory an equal plan() needs, in bytes. Changes nothing.

        Takes the arguments of :meth:`plan`.

        Returns:
            Bytes of ``float_workspace_buffer``, and bytes of the index arrays that the plan allocates
            itself (upstream's int workspace).

        Raises:
            ValueError: As for :meth:`plan`.
        """
        refuse(block_tables=block_tables)
        return self._workspace_size(*self._asked({**locals(), "needs_lse": False}))

    @overload
    def run(
        self, q: torch.Tensor, paged_kv_cache: KVCache, *args: object, return_lse: Literal[False] = False,
        **more: Unpack[PrefillRun]
    ) -> torch.Tensor: ...  # fmt: skip
    @overload
    def run(
        self, q: torch.Tensor, paged_kv_cache: KVCache, *args: object, return_lse: Literal[True],
        **more: Unpack[PrefillRun]
    ) -> Pair: ...  # fmt: skip
    @overload
    def run(
        self, q: torch.Tensor, paged_kv_cache: KVCache, *args: object, return_lse: bool,
        **more: Unpack[PrefillRun]
    ) -> Result: ...  # fmt: skip

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: KVCache,
        *args: object,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: object | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Result:
        """Attend with the plan in force. May be captured in graph mode.

        Writes ``out`` and ``lse`` and nothing else; allocates only those two, and only when they are
        not given; never waits for the device.

        Args:
            q: ``[qo_indptr[-1], num_qo_heads, head_dim_qk]``, any strides.
            paged_kv_cache: As for the decode wrapper. Not written.
            *args: With the variant ``AttentionSink``: ``sink``, float ``[num_qo_heads]``, in units of the
                scaled logits, and ``sm_scale``, by default the planned one. None otherwise.
            q_scale: Multiplies q; a number or a one-element tensor, as the next two.
            k_scale: Multiplies k.
            v_scale: Multiplies the output.
            out: ``[rows, num_qo_heads, head_dim_vo]`` of the planned output type.
            lse: float32 ``[rows, num_qo_heads]``.
            return_lse: Also return the log-sum-exp, base 2; -inf where there is no key.
            enable_pdl: A launch hint of upstream without meaning here; has no effect on results.
            window_left: If given, must be the planned one.
            sinks: The sink by keyword, where there is one.
            kv_cache_sf: Not supported.
            skip_softmax_threshold_scale_factor: Not supported.
            use_fp16_softmax: Not supported.
            uses_spcompress: Not supported.

        Returns:
            ``out``, or ``(out, lse)``; contiguous unless given.

        Raises:
            ValueError: No plan, or a tensor differs from what was planned.
            TypeError: Arguments that are not taken, or a missing sink.
            NotImplementedError: An argument no backend here has.
        """
        refuse(
            kv_cache_sf=kv_cache_sf,
            use_fp16_softmax=use_fp16_softmax,
            uses_spcompress=uses_spcompress,
            skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        )
        if window_left is not None:
            self._check_window(window_left)
        scales = (q_scale, k_scale, v_scale)
        return self._run_paged(q, paged_kv_cache, args, sinks, out, lse, return_lse, scales)

    run_return_lse = returning_lse(run)

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: KVCache,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """Upstream's deprecated run(): an argument that is not at its default replaces the planned one.

        Such a replacement plans the same batch again and holds for this call; an argument left at its
        default is what plan() was given. See :meth:`run`.
        """
        changes = forward_changes(
            pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta
        )
        with self._forwarded(changes, causal=causal) as q_scale:
            out = self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        assert isinstance(out, torch.Tensor)
        return out

    def forward_return_lse(
        self,
        q: torch.Tensor,
        paged_kv_cache: KVCache,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
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
            both = self.run(
                q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=True
            )
        assert isinstance(both, tuple)
        return both

    begin_forward = plan
