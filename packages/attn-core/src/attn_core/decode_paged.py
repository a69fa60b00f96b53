"""Batch decode and speculative verify over a paged cache."""

from __future__ import annotations

import warnings
from typing import Any, Literal, Unpack, overload

import torch
from torch.compiler import is_dynamo_compiling

from .arguments import refuse, split_size
from .batch import INT32_MAX, HostBatch, check_drafts_appended, paged_batch
from .checking import flag, whole
from .errors import needs
from .graph_buffers import decode_buffers
from .options import (
    DECODE_DEFAULTS,
    DecodeOptions,
    Dtype,
    decode_dtypes,
    forward_changes,
    make_problem,
    merge_legacy,
)
from .problem import AttentionProblem, MaskMode, Op, PagedKV
from .run_options import DecodeRun, KVCache, Pair, Result
from .sinks import sink_asked
from .traced_plan import trace_plan
from .wrapper import AttentionWrapper, returning_lse


class BatchDecodeWithPagedKVCacheWrapper(AttentionWrapper):
    """Decode, and multi-token verify of draft chains, for a batch of requests over a paged cache.

    ``plan()`` once per step, then ``run()`` once per layer. With ``q_len_per_req = n`` > 1 every
    request brings n query rows, the last n tokens of its sequence, already appended to the cache;
    row i sees everything up to its own position (causal, bottom-right aligned). That is a *chain* of
    drafts: a tree needs ``BatchPrefillWithPagedKVCacheWrapper`` and a custom mask.

    Args:
        float_workspace_buffer: Scratch bytes on the device the wrapper works on, 16-byte aligned;
            never read before written. May be shared by wrappers that run on one stream.
        kv_layout: ``NHD`` or ``HND``.
        use_cuda_graph: Keep fixed buffers and the shape of the first plan, so that ``run()`` can be
            captured and replayed after later plans. Holds on CPU tensors too.
        use_tensor_cores: Decode on the matrix path. Needed for ``q_len_per_req`` > 1.
        paged_kv_indptr_buffer: Graph mode: int32 ``[batch_size + 1]``.
        paged_kv_indices_buffer: Graph mode: int32, as many entries as pages ever planned.
        paged_kv_last_page_len_buffer: Graph mode: int32 ``[batch_size]``; fixes the batch size.
        backend: ``auto``, a backend, or a candidate ``backend/path``.
        jit_args: None, or the variant ``AttentionSink``, as for paged prefill.
        max_seq_len: Graph mode: longest sequence that will be planned, in tokens.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        max_seq_len: int | None = None,
    ) -> None:
        self._with_sink = sink_asked(jit_args)
        graph = decode_buffers(
            use_cuda_graph,
            getattr(float_workspace_buffer, "device", None),
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
            max_seq_len,
        )
        super().__init__(float_workspace_buffer, kv_layout, backend, graph)
        self._use_tensor_cores = flag("use_tensor_cores", use_tensor_cores)

    @property
    def use_tensor_cores(self) -> bool:
        """Whether decode was asked for on the matrix path."""
        return self._use_tensor_cores

    @property
    def q_len_per_req(self) -> int | None:
        """Query rows per request of the plan in force; None before the first."""
        return None if self._state is None else self._state.q_len_per_req

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *legacy: object,
        **options: Unpack[DecodeOptions],
    ) -> None:
        """Fix what the following runs compute, for one batch.

        Index tensors on the host cost no synchronisation; those on the device are fetched in one
        copy (``indices`` stays there). All may be reused once plan() returns. If it raises, the
        previous plan stays in force. Must not be called during graph capture; in graph mode it must
        be called before every replay whose metadata differs.

        Args:
            indptr: int32 ``[batch_size + 1]``, first page of each request in ``indices``.
            indices: int32 page ids, at least ``indptr[-1]``.
            last_page_len: int32 ``[batch_size]``, tokens in each request's last page, 1..page_size;
                ignored for a request without pages, whose output is 0 and lse -inf.
            num_qo_heads: Query heads, a multiple of ``num_kv_heads``.
            num_kv_heads: Key/value heads.
            head_dim: Elements per head.
            page_size: Tokens per page.
            *legacy: The options below by position, in upstream's order (deprecated).
            **options: ``pos_encoding_mode`` ('NONE', 'ROPE_LLAMA', 'ALIBI'); ``window_left`` (-1: all);
                ``logits_soft_cap``; ``q_data_type`` (default float16), ``kv_data_type``,
                ``o_data_type`` and ``data_type`` (both); ``sm_scale`` (default 1/sqrt(head_dim));
                ``rope_scale``, ``rope_theta``; ``seq_lens`` (checked against the pages, never believed
                over them); ``fixed_split_size`` (pages per chunk) and ``disable_split_kv``: a request's
                bits then do not depend on its batch; ``q_len_per_req``: query rows per request;
                ``needs_lse``: the log-sum-exp will be asked for, so that a kernel without it is not
                chosen; ``non_blocking`` (no effect: copies never block); ``window_right`` and
                ``block_tables``: refused unless neutral.

        Raises:
            ValueError: An argument does not fit, or names what is frozen in graph mode.
            TypeError: An argument has the wrong type.
            NotImplementedError: No backend serves the combination.
        """
        if legacy:
            text = "plan: passing options positionally is deprecated, pass them by keyword"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            options = merge_legacy(legacy, options)
        self._plan_options(
            indptr, indices, last_page_len, (num_qo_heads, num_kv_heads), head_dim, page_size, options
        )

    def _plan_options(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        heads: tuple[int, int],
        head_dim: int,
        page_size: int,
        options: DecodeOptions,
    ) -> None:
        if is_dynamo_compiling():
            trace_plan(self, (indptr, indices, last_page_len), (*heads, head_dim, page_size), options)
            return
        problem, batch = self._asked(indptr, indices, last_page_len, heads, head_dim, page_size, options)
        self._plan(problem, batch, q_len_per_req=batch.shape.uniform_q_len)

    def _asked(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        heads: tuple[int, int],
        head_dim: int,
        page_size: int,
        options: DecodeOptions,
    ) -> tuple[AttentionProblem, HostBatch]:
        unknown = options.keys() - DECODE_DEFAULTS.keys()
        if unknown:
            raise TypeError(f"plan: got an unexpected keyword argument {min(unknown)!r} [core.arguments]")
        given: DecodeOptions = {**DECODE_DEFAULTS, **options}
        q_len = self._check_q_len(given["q_len_per_req"])
        refuse(window_right=given["window_right"], block_tables=given["block_tables"])
        q_dtype, kv_dtype = decode_dtypes(options)
        problem = make_problem(
            Op.DECODE if q_len == 1 else Op.VERIFY,
            heads,
            (head_dim, head_dim),
            q_dtype,
            kv_dtype,
            given["o_data_type"],
            PagedKV(page_size, self._kv_layout),
            MaskMode.NONE if q_len == 1 else MaskMode.CAUSAL,
            given["pos_encoding_mode"],
            given["window_left"],
            given["logits_soft_cap"],
            given["sm_scale"],
            given["rope_scale"],
            given["rope_theta"],
            self._with_sink or given["needs_lse"],
            self._use_tensor_cores,
            split_size(given["fixed_split_size"]),
            given["disable_split_kv"],
        )
        batch = paged_batch(
            q_len, indptr, indices, last_page_len, page_size, device=self.device, seq_lens=given["seq_lens"]
        )
        if q_len > 1:
            check_drafts_appended(batch, q_len)
        return problem, batch

    def _check_q_len(self, q_len: object) -> int:
        q_len = whole("q_len_per_req", q_len, "core.q-len")
        if q_len < 1:
            raise ValueError(
                needs("q_len_per_req", "at least 1 (q_len_per_req must be >= 1)", q_len, "core.q-len")
            )
        if q_len > INT32_MAX:
            raise ValueError(needs("q_len_per_req", f"at most {INT32_MAX}", q_len, "core.q-len"))
        if q_len > 1 and not self._use_tensor_cores:
            want = "use_tensor_cores=True on the wrapper for more than 1"
            raise ValueError(needs("q_len_per_req", want, q_len, "core.q-len"))
        frozen = self._state.q_len_per_req if self._state is not None and self._graph is not None else None
        if frozen is not None and frozen != q_len:
            want = f"{frozen}, of the frozen cudagraph shape of this wrapper's first plan"
            raise ValueError(
                f"{needs('q_len_per_req', want, q_len, 'core.graph-frozen')}; see DecodePlanPool"
            )
        return q_len

    @overload
    def run(
        self, q: torch.Tensor, paged_kv_cache: KVCache, *args: object, return_lse: Literal[False] = False,
        **more: Unpack[DecodeRun]
    ) -> torch.Tensor: ...  # fmt: skip
    @overload
    def run(
        self, q: torch.Tensor, paged_kv_cache: KVCache, *args: object, return_lse: Literal[True],
        **more: Unpack[DecodeRun]
    ) -> Pair: ...  # fmt: skip
    @overload
    def run(
        self, q: torch.Tensor, paged_kv_cache: KVCache, *args: object, return_lse: bool,
        **more: Unpack[DecodeRun]
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
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: object | None = None,
    ) -> Result:
        """Attend with the plan in force. May be captured in graph mode, with ``out`` given or not.

        Writes ``out`` and ``lse`` and nothing else; allocates only those two, and only when they are
        not given; never waits for the device.

        Args:
            q: ``[batch_size * q_len_per_req, num_qo_heads, head_dim]``, any strides.
            paged_kv_cache: A ``(k, v)`` pair, each ``[pages, page_size, num_kv_heads, head_dim]`` (NHD)
                or ``[pages, num_kv_heads, page_size, head_dim]`` (HND), strides free and independent;
                one tensor ``[pages, 2, ...]``; or a :class:`~attn_core.CacheView`. Not written.
            *args: ``sink`` and ``sm_scale`` of the variant ``AttentionSink``, as for paged prefill.
            q_scale: Multiplies q; a number or a one-element tensor, as the next two.
            k_scale: Multiplies k.
            v_scale: Multiplies the output.
            out: ``[rows, num_qo_heads, head_dim]`` of the planned output type.
            lse: float32 ``[rows, num_qo_heads]``.
            return_lse: Also return the log-sum-exp, base 2; -inf where there is no key.
            enable_pdl: A launch hint of upstream without meaning here; has no effect on results.
            window_left: If given, must be the planned one.
            sinks: The sink by keyword, where there is one.
            q_len_per_req: If given (deprecated), must be the planned one.
            skip_softmax_threshold_scale_factor: Not supported.
            kv_cache_sf: Not supported.

        Returns:
            ``out``, or ``(out, lse)``; contiguous unless given.

        Raises:
            ValueError: No plan, or a tensor differs from what was planned.
            NotImplementedError: An argument no backend here has.
        """
        if skip_softmax_threshold_scale_factor is not None or kv_cache_sf is not None:
            threshold = skip_softmax_threshold_scale_factor
            refuse(skip_softmax_threshold_scale_factor=threshold, kv_cache_sf=kv_cache_sf)
        if window_left is not None or q_len_per_req is not None:
            self._check_repeated(window_left, q_len_per_req)
        scales = (q_scale, k_scale, v_scale)
        return self._run_paged(q, paged_kv_cache, args, sinks, out, lse, return_lse, scales)

    def _check_repeated(self, window_left: int | None, q_len_per_req: int | None) -> None:
        plan = self._planned()
        if window_left is not None:
            self._check_window(window_left)
        if q_len_per_req is None:
            return
        stated = whole("q_len_per_req", q_len_per_req, "core.q-len")
        warnings.warn("run: q_len_per_req is deprecated, plan() fixes it", DeprecationWarning, stacklevel=3)
        if stated != plan.q_len_per_req:
            text = needs("q_len_per_req", f"the planned {plan.q_len_per_req}", q_len_per_req, "core.q-len")
            raise ValueError(f"{text}; call plan() again with it")

    run_return_lse = returning_lse(run)

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: KVCache,
        pos_encoding_mode: str = "NONE",
        q_scale: float | torch.Tensor | None = None,
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
        with self._forwarded(changes, q_scale) as q_scale:
            return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)

    def forward_return_lse(
        self,
        q: torch.Tensor,
        paged_kv_cache: KVCache,
        pos_encoding_mode: str = "NONE",
        q_scale: float | torch.Tensor | None = None,
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
        with self._forwarded(changes, q_scale) as q_scale:
            return self.run(
                q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=True
            )

    begin_forward = plan

    def workspace_size(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Dtype = "float16",
        kv_data_type: Dtype | None = None,
        o_data_type: Dtype | None = None,
        data_type: Dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> tuple[int, int]:
        """Return how much memory an equal plan() needs, in bytes. Changes nothing.

        Returns:
            Bytes of ``float_workspace_buffer``, and bytes of the index arrays that the plan allocates
            itself (upstream's int workspace).

        Raises:
            ValueError: As for :meth:`plan`.
        """
        given = {name: value for name, value in locals().items() if name in DECODE_DEFAULTS}
        if isinstance(q_data_type, str) and q_data_type == "float16":
            del given["q_data_type"]
        heads = (num_qo_heads, num_kv_heads)
        problem, batch = self._asked(indptr, indices, last_page_len, heads, head_dim, page_size, given)  # type: ignore[arg-type]
        return self._workspace_size(problem, batch, None)
