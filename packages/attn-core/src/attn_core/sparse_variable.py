"""Attention with a mask of blocks of any sizes, one mask per key/value head."""

from __future__ import annotations

from typing import Literal, overload

import torch

from . import tracing
from .batch import INDEX_DTYPES, INT32_MAX
from .capture import fetch
from .checking import dense, flag
from .errors import needs
from .options import Dtype, forward_changes
from .run_options import Pair, Result
from .sparse_common import SparseWrapper, check_keys, check_size
from .state import check_output


class VariableBlockSparseAttentionWrapper(SparseWrapper):
    """Attention where every key/value head has a mask of blocks, whose rows and columns have any sizes.

    Args:
        float_workspace_buffer: Scratch bytes on the device the wrapper works on, 16-byte aligned.
        backend: ``auto``, a backend, or a candidate ``backend/path``.
    """

    def plan(
        self,
        block_mask_map: torch.Tensor,
        block_row_sz: torch.Tensor,
        block_col_sz: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        q_data_type: Dtype = "float16",
        kv_data_type: Dtype | None = None,
    ) -> None:
        """Fix the mask and what the following runs compute.

        Positions, of ``causal`` and of ``pos_encoding_mode``, count the keys a row of blocks has, not
        those of the whole matrix. Must not be called during graph capture. If it raises, the previous plan
        stays in force.

        Args:
            block_mask_map: bool or integer ``[num_kv_heads, rows of blocks, columns of blocks]``; not 0
                keeps.
            block_row_sz: int32 or int64 ``[num_kv_heads, rows of blocks]``, rows of each; every head has as
                many in all.
            block_col_sz: int32 or int64 ``[num_kv_heads, columns of blocks]``, keys of each; likewise.
            num_qo_heads: Query heads, a multiple of ``num_kv_heads``.
            num_kv_heads: Key/value heads.
            head_dim: Elements per head.
            causal: Bottom-right aligned within the keys of each row of blocks.
            pos_encoding_mode: 'NONE', 'ROPE_LLAMA' or 'ALIBI' (whose slopes are then those of
                ``num_qo_heads / num_kv_heads`` heads, the same for every key/value head).
            use_fp16_qk_reduction: Permits a less exact sum; no backend here makes use of it.
            logits_soft_cap: ``cap * tanh(x / cap)`` before the mask.
            sm_scale: Default ``1 / sqrt(head_dim)``.
            rope_scale: Position divisor of ROPE_LLAMA, default 1.
            rope_theta: Base of ROPE_LLAMA, default 1e4.
            non_blocking: No effect: copies never block.
            q_data_type: Query and output type.
            kv_data_type: Key and value type; the query's by default.

        Raises:
            ValueError: An argument does not fit.
            TypeError: An argument has the wrong type.
            NotImplementedError: No backend serves the combination.
        """
        tracing.refuse_traced_plan(self)
        heads = check_size("num_kv_heads", num_kv_heads)
        if check_size("num_qo_heads", num_qo_heads) % heads:
            raise ValueError(needs("num_qo_heads", f"a multiple of {heads}", num_qo_heads, "core.heads"))
        group = num_qo_heads // heads
        rows = _sizes("block_row_sz", block_row_sz, heads, self.device)
        columns = _sizes("block_col_sz", block_col_sz, heads, self.device)
        want = (heads, rows.shape[1], columns.shape[1])
        got = tuple(dense("block_mask_map", block_mask_map, "core.sparse").shape)
        if got != want:
            raise ValueError(needs("block_mask_map", f"shape {want}", got, "core.sparse"))
        indptr, indices = _keys(fetch("block_mask_map", block_mask_map, self.device) != 0, columns)
        self._paged.plan(
            _indptr(rows.reshape(-1)), indptr, indices, torch.ones_like(indptr[1:], dtype=torch.int32),
            group, 1, head_dim, 1, causal=causal, pos_encoding_mode=pos_encoding_mode,
            sm_scale=sm_scale, logits_soft_cap=logits_soft_cap, rope_scale=rope_scale,
            rope_theta=rope_theta, q_data_type=q_data_type, kv_data_type=kv_data_type,
        )  # fmt: skip
        self._heads = (heads, group)
        self._lengths = (int(rows[0].sum()), int(columns[0].sum()))

    begin_forward = plan

    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None, return_lse: Literal[False] = False,
        enable_pdl: bool | None = None
    ) -> torch.Tensor: ...  # fmt: skip
    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None, *, return_lse: Literal[True], enable_pdl: bool | None = None
    ) -> Pair: ...  # fmt: skip
    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None, return_lse: bool = False, enable_pdl: bool | None = None
    ) -> Result: ...  # fmt: skip

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Result:
        """Attend with the plan in force.

        Writes ``out`` and ``lse``; allocates q and the output once more, and copies of k and v unless they
        are contiguous. Never waits for the device.

        Args:
            q: ``[num_qo_heads, qo_len, head_dim]``.
            k: ``[num_kv_heads, kv_len, head_dim]``.
            v: As ``k``.
            out: ``[num_qo_heads, qo_len, head_dim]`` of the query type.
            lse: float32 ``[num_qo_heads, qo_len]``.
            return_lse: Also return the log-sum-exp, base 2; -inf where there is no key.
            enable_pdl: A launch hint of upstream without meaning here; has no effect on results.

        Returns:
            ``out``, or ``(out, lse)``.

        Raises:
            ValueError: No plan, or a tensor differs from what was planned.
        """
        p = self._paged._planned().query.problem
        (heads, group), (qo_len, kv_len), dim = self._heads, self._lengths, p.head_dim_qk
        shape = (heads * group, qo_len)
        q = check_keys("q", q, (*shape, dim))
        rows = q.reshape(heads, group, qo_len, dim).transpose(1, 2).reshape(heads * qo_len, group, dim)
        keys = check_keys("k", k, (heads, kv_len, dim)).reshape(heads * kv_len, 1, 1, dim)
        values = check_keys("v", v, (heads, kv_len, dim)).reshape(heads * kv_len, 1, 1, dim)
        if out is not None:
            out = check_output("out", out, (*shape, dim), p.o_dtype, self.device)
        if lse is not None:
            lse = check_output("lse", lse, shape, torch.float32, self.device)
        return_lse = flag("return_lse", return_lse)
        wanted = return_lse or lse is not None
        found = self._paged.run(rows, (keys, values), return_lse=wanted)
        both = found if isinstance(found, tuple) else (found, None)
        out, lse = (
            None if t is None else _by_head(t, heads, qo_len, into)
            for t, into in zip(both, (out, lse), strict=True)
        )
        assert out is not None
        return (out, lse) if return_lse and lse is not None else out

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Result:
        """Upstream's deprecated run(): an argument that is not at its default replaces the planned one.

        Such a replacement plans the same blocks again and holds for this call.
        """
        with self._paged._for_one_call(**forward_changes(
            pos_encoding_mode, -1, logits_soft_cap, sm_scale, rope_scale, rope_theta
        )):  # fmt: skip
            return self.run(q, k, v)


def _sizes(name: str, sizes: object, heads: int, device: torch.device) -> torch.Tensor:
    """Return block sizes on the host as int64."""
    sizes = dense(name, sizes, "core.index-type", "an int32 or int64 tensor")
    if sizes.dtype not in INDEX_DTYPES:
        raise TypeError(needs(name, "an int32 or int64 tensor", sizes.dtype, "core.index-type"))
    if sizes.ndim != 2 or sizes.shape[0] != heads:
        raise ValueError(needs(name, f"shape [{heads}, blocks]", tuple(sizes.shape), "core.sparse"))
    host = fetch(name, sizes, device).to(torch.int64)
    if host.numel() and int(host.min()) < 0:
        raise ValueError(needs(name, "0 or more", int(host.min()), "core.sparse"))
    if (total := float(host.double().sum())) > INT32_MAX:
        raise ValueError(needs(name, f"a sum over all heads of at most {INT32_MAX}", total, "core.sparse"))
    sums = host.sum(1)
    if bool((sums != sums[0]).any()):
        raise ValueError(needs(name, "the same sum for every head", sums.tolist(), "core.sparse"))
    return host


def _indptr(lengths: torch.Tensor) -> torch.Tensor:
    zero = lengths.new_zeros(1)
    return torch.cat([zero, lengths.cumsum(0)])


def _keys(kept: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys of every row of blocks of every head, keys of all heads counted in one go."""
    indptr = _indptr((kept * columns[:, None, :]).sum(-1).reshape(-1))
    first = _indptr(columns.reshape(-1))[:-1].view(columns.shape)
    head, _, column = kept.nonzero(as_tuple=True)
    lengths, starts = columns[head, column], first[head, column]
    before = lengths.cumsum(0) - lengths
    total = int(lengths.sum())
    return indptr, torch.arange(total, device="cpu") + torch.repeat_interleave(starts - before, lengths)


def _by_head(t: torch.Tensor, heads: int, rows: int, into: torch.Tensor | None) -> torch.Tensor:
    """Turn ``[heads * rows, group, ...]`` into ``[heads * group, rows, ...]``."""
    turned = t.view(heads, rows, *t.shape[1:]).transpose(1, 2).flatten(0, 1)
    if into is None:
        return turned.contiguous()
    into.detach().copy_(turned)
    return into
