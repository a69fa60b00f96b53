"""Multi-head latent attention over a paged cache, with the projections absorbed into the queries.

Keys are ``[ckv | kpe]`` and values are ``ckv``: paged attention with one key/value head whose values are part
of its keys. It is routed as such, and ``AttentionProblem.latent`` tells it apart.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch.compiler import is_dynamo_compiling

from . import state, tracing
from .arguments import as_dtype, check_workspace, refuse
from .checking import dense, flag, whole
from .errors import needs
from .graph_buffers import latent_buffers
from .kv_lengths import batch_of_lengths
from .not_here import refusing
from .options import Dtype, number
from .prefill_common import mask_mode
from .problem import AttentionProblem, Op, PagedKV
from .run_options import Pair, Result
from .wrapper import AttentionWrapper


class BatchMLAPagedAttentionWrapper(AttentionWrapper):
    """Decode, verify and incremental prefill of DeepSeek-style models over a paged latent cache.

    ``plan()`` once per step, then ``run()`` once per layer. The query rows of a request are the last tokens
    of its sequence, already appended; with ``causal`` row i sees the keys up to its own position.

    Args:
        float_workspace_buffer: Scratch bytes on the device the wrapper works on, 16-byte aligned.
        use_cuda_graph: Keep fixed buffers and the shape of the first plan, so that ``run()`` can be captured
            and replayed after later plans of at most as many rows.
        qo_indptr: Graph mode: int32 ``[batch_size + 1]``; fixes the batch size.
        kv_indptr: Graph mode: int32 ``[batch_size + 1]``.
        kv_indices: Graph mode: int32, as many entries as pages ever planned.
        kv_len_arr: Graph mode: int32 ``[batch_size]``.
        backend: ``auto``, a backend, or a candidate ``backend/path``.
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        workspace = check_workspace("float_workspace_buffer", float_workspace_buffer)
        graph = latent_buffers(use_cuda_graph, workspace.device, qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        super().__init__(workspace, "NHD", backend, graph)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: Dtype,
        kv_data_type: Dtype,
        use_profiler: bool = False,
        *,
        needs_lse: bool = False,
    ) -> None:
        """Fix what the following runs compute, for one batch.

        Index tensors on the host cost no synchronisation; those on the device are fetched in one copy
        (``kv_indices`` stays there). All may be reused once plan() returns. If it raises, the previous plan
        stays in force. Must not be called during graph capture.

        Args:
            qo_indptr: int32 ``[batch_size + 1]``, first query row of each request.
            kv_indptr: int32 ``[batch_size + 1]``, first page of each request in ``kv_indices``; further
                entries have no meaning.
            kv_indices: int32 page ids, at least ``kv_indptr[batch_size]``.
            kv_len_arr: int32 ``[batch_size]``, tokens of each request, at most what its pages hold;
                pages behind them are not read.
            num_heads: Query heads.
            head_dim_ckv: Elements of the compressed key/value, 512 in DeepSeek's models.
            head_dim_kpe: Elements of the rotary part of a key, 64 there; 0 for keys without one.
            page_size: Tokens per page.
            causal: Row i sees keys up to its own position, bottom-right aligned.
            sm_scale: Multiplies ``q @ k``: ``1 / sqrt(head_dim)`` of before the absorption.
            q_data_type: Query and output type.
            kv_data_type: Cache type.
            use_profiler: Not supported.
            needs_lse: The log-sum-exp will be asked for, so that a kernel without it is not chosen.

        Raises:
            ValueError: An argument does not fit, or names what is frozen in graph mode.
            TypeError: An argument has the wrong type.
            NotImplementedError: No backend serves the combination.
        """
        tracing.refuse_traced_plan(self)
        refuse(use_profiler=use_profiler)
        if isinstance(sm_scale, bool) or not isinstance(sm_scale, int | float):
            raise TypeError(needs("sm_scale", "a number", type(sm_scale).__name__, "core.sm-scale"))
        sm_scale = number("sm_scale", sm_scale, 0.0)
        dtype = as_dtype("q_data_type", q_data_type)
        for name, dim, least in (("head_dim_ckv", head_dim_ckv, 1), ("head_dim_kpe", head_dim_kpe, 0)):
            whole(name, dim, "core.head-dim", least)
        problem = AttentionProblem(
            op=Op.PREFILL_PAGED, num_qo_heads=num_heads, num_kv_heads=1,
            head_dim_qk=head_dim_ckv + head_dim_kpe, head_dim_vo=head_dim_ckv, q_dtype=dtype,
            kv_dtype=as_dtype("kv_data_type", kv_data_type), o_dtype=dtype, kv=PagedKV(page_size),
            mask=mask_mode(causal, None, None), sm_scale=float(sm_scale),
            needs_lse=flag("needs_lse", needs_lse),
            use_tensor_cores=True, latent=True,
        )  # fmt: skip
        batch = batch_of_lengths(
            qo_indptr, kv_indptr, kv_indices, kv_len_arr, page_size, device=self.device
        )  # fmt: skip
        self._plan(problem, batch)

    @overload
    def run(
        self, q_nope: torch.Tensor, q_pe: torch.Tensor, ckv_cache: torch.Tensor, kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None, lse: torch.Tensor | None = None,
        return_lse: Literal[False] = False, profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None, page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False, o_scale: float | None = None, *,
        ckv_scale: float | None = None, ckv_scale_arr: torch.Tensor | None = None,
        kpe_scale: float | None = None
    ) -> torch.Tensor: ...  # fmt: skip
    @overload
    def run(
        self, q_nope: torch.Tensor, q_pe: torch.Tensor, ckv_cache: torch.Tensor, kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None, lse: torch.Tensor | None = None, *, return_lse: Literal[True],
        profiler_buffer: torch.Tensor | None = None, kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None, return_lse_base_on_e: bool = False,
        o_scale: float | None = None, ckv_scale: float | None = None,
        ckv_scale_arr: torch.Tensor | None = None, kpe_scale: float | None = None
    ) -> Pair: ...  # fmt: skip
    @overload
    def run(
        self, q_nope: torch.Tensor, q_pe: torch.Tensor, ckv_cache: torch.Tensor, kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None, lse: torch.Tensor | None = None, return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None, kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None, return_lse_base_on_e: bool = False,
        o_scale: float | None = None, *, ckv_scale: float | None = None,
        ckv_scale_arr: torch.Tensor | None = None, kpe_scale: float | None = None
    ) -> Result: ...  # fmt: skip

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        ckv_scale: float | None = None,
        ckv_scale_arr: torch.Tensor | None = None,
        kpe_scale: float | None = None,
    ) -> Result:
        """Attend with the plan in force. May be captured in graph mode.

        Writes ``out`` and ``lse`` and nothing else; never waits for the device. Beside those two it allocates
        for the call: the queries side by side, unless they lie so; and, where ``ckv_cache`` and ``kpe_cache``
        are not the two parts of one ``[pages, page_size, head_dim_ckv + head_dim_kpe]`` tensor, a copy of the
        pages in use, which costs as much as the sequences are long (in graph mode as the buffer of page ids),
        and at most as the cache is large.

        Args:
            q_nope: ``[qo_indptr[-1], num_heads, head_dim_ckv]``, with the key projection absorbed.
            q_pe: ``[qo_indptr[-1], num_heads, head_dim_kpe]``, the rotary part.
            ckv_cache: ``[pages, page_size, head_dim_ckv]``.
            kpe_cache: ``[pages, page_size, head_dim_kpe]``.
            out: ``[rows, num_heads, head_dim_ckv]`` of the query type.
            lse: float32 ``[rows, num_heads]``; written if it is given, whether ``return_lse`` is set or not.
            return_lse: Also return the log-sum-exp, base 2; -inf where there is no key.
            profiler_buffer: Not supported, as the next two.
            kv_len: Not supported.
            page_table: Not supported.
            return_lse_base_on_e: The log-sum-exp to base e instead.
            o_scale: Not supported, as the rest.
            ckv_scale: Not supported.
            ckv_scale_arr: Not supported.
            kpe_scale: Not supported.

        Returns:
            ``out``, or ``(out, lse)``; contiguous unless given.

        Raises:
            ValueError: No plan, or a tensor differs from what was planned.
            NotImplementedError: An argument no backend here has.
        """
        refuse(
            profiler_buffer=profiler_buffer, kv_len=kv_len, page_table=page_table, o_scale=o_scale,
            ckv_scale=ckv_scale, ckv_scale_arr=ckv_scale_arr, kpe_scale=kpe_scale,
        )  # fmt: skip
        to_base_e = flag("return_lse_base_on_e", return_lse_base_on_e)
        s = self._planned()
        if is_dynamo_compiling():
            return self._traced_parts(
                s, (q_nope, q_pe, ckv_cache, kpe_cache), out, lse, return_lse, to_base_e
            )
        self._check_parts(s, q_nope, q_pe, ckv_cache, kpe_cache)
        q = _joined(q_nope, q_pe)
        q = torch.cat((q_nope, q_pe), -1) if q is None else q
        keys = _joined(ckv_cache, kpe_cache)
        if keys is None:
            s, keys = _gathered(s, ckv_cache, kpe_cache)
        k = keys.unsqueeze(2)
        v = k[..., : s.query.problem.head_dim_vo]
        found = self._run(q, k, v, out, lse, return_lse, None, None, None, s)
        written = found[1] if isinstance(found, tuple) else lse
        if to_base_e and written is not None:
            written.detach().mul_(math.log(2.0))  # the caller's may have been made in inference mode
        return found

    def _traced_parts(
        self,
        s: state.PlanState,
        parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        base_e: bool,
    ) -> Result:
        """Trace a run: whether the parts lie side by side is seen when it runs."""
        wanted = return_lse or lse is not None
        found: Result = tracing.call("run_mla", out, lse, self._handle, *parts, s.o_dtype, wanted, base_e)
        return found if return_lse or not isinstance(found, tuple) else found[0]

    def _check_parts(
        self, s: state.PlanState, q_nope: object, q_pe: object, ckv_cache: object, kpe_cache: object
    ) -> None:
        """Hold the four tensors to the plan: what is checked later is what they are joined to."""
        p = s.query.problem
        rows, page, kpe = s.q_shape[0], p.page_size, p.head_dim_qk - p.head_dim_vo
        _check("q_nope", q_nope, (rows, p.num_qo_heads, p.head_dim_vo), p.q_dtype, s.device, "core.q-shape")
        _check("q_pe", q_pe, (rows, p.num_qo_heads, kpe), p.q_dtype, s.device, "core.q-shape")
        pages = _check(
            "ckv_cache", ckv_cache, (None, page, p.head_dim_vo), p.kv_dtype, s.device, "core.kv-shape"
        )
        _check("kpe_cache", kpe_cache, (pages, page, kpe), p.kv_dtype, s.device, "core.kv-shape")
        if s.min_rows is not None and pages < s.min_rows:
            want = f"more than {s.min_rows - 1} pages, the largest page id of the plan"
            raise ValueError(needs("ckv_cache", want, pages, "core.kv-rows"))


def _check(
    name: str, t: object, shape: tuple[int | None, ...], dtype: torch.dtype, device: torch.device, code: str
) -> int:
    """Return the size of the first dimension of a tensor that is as planned; None there takes any."""
    t = dense(name, t, code)
    if t.device != device:
        raise ValueError(needs(name, f"a tensor on {device}, as the workspace is", t.device, "core.device"))
    if t.dtype is not dtype:
        raise ValueError(needs(name, f"the planned {dtype}", t.dtype, code))
    if t.ndim != len(shape) or any(n is not None and n != m for n, m in zip(shape, t.shape, strict=True)):
        want = f"shape [{', '.join('pages' if n is None else str(n) for n in shape)}]"
        raise ValueError(needs(name, want, tuple(t.shape), code))
    return t.shape[0]


def _joined(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor two parts of the last dimension are views of, or None where they are not."""
    width = first.shape[-1]
    if second.shape[-1] == 0:
        return first
    beside = (
        first.dtype is second.dtype
        and first.device == second.device
        and first.stride() == second.stride()
        and first.stride(-1) == 1
        and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and second.storage_offset() == first.storage_offset() + width
    )
    if not beside:
        return None
    return first.as_strided((*first.shape[:-1], width + second.shape[-1]), first.stride())


def _gathered(
    s: state.PlanState, ckv: torch.Tensor, kpe: torch.Tensor
) -> tuple[state.PlanState, torch.Tensor]:
    """Copy the pages in use side by side; the state returned counts them as they lie in the copy.

    A captured run copies as many pages as the index buffer holds; all, if the cache is smaller.
    """
    pages = s.image["kv_indices"]
    if pages.numel() >= ckv.shape[0]:
        return s, torch.cat((ckv, kpe), -1)
    if s.frozen is not None:  # beyond the batch, a captured buffer holds whatever was there
        pages = pages.clamp(0, ckv.shape[0] - 1) if ckv.shape[0] else pages[:0]
    keys = torch.cat((ckv[pages.long()], kpe[pages.long()]), -1)
    places = torch.arange(pages.numel(), dtype=torch.int32, device=pages.device)
    return replace(s, image={**s.image, "kv_indices": places}, min_rows=None), keys


if not TYPE_CHECKING:
    __getattr__ = partial(refusing, "mla")
