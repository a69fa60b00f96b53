"""Attention with a mask of equal blocks (BSR)."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, overload

import torch

from . import tracing
from .arguments import refuse
from .batch import to_host
from .checking import dense
from .errors import needs
from .options import Dtype, forward_changes
from .run_options import Pair, Result
from .sparse_common import SparseWrapper, check_keys, check_size


def convert_bsr_mask_layout(mask: torch.Tensor, indptr: torch.Tensor) -> torch.Tensor:
    """Return a mask of blocks as the flat one of ``custom_mask``: row after row of every row of blocks.

    Args:
        mask: ``[nnz, R, C]``, one mask per block.
        indptr: ``[rows of blocks + 1]``, first block of each row of blocks.

    Returns:
        ``[nnz * R * C]``.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: ``mask`` is not 3-D, or ``indptr`` does not lead from 0 to its length without decreasing.
    """
    if dense("mask", mask, "core.mask-size").ndim != 3:
        raise ValueError(needs("mask", "shape [nnz, R, C]", tuple(mask.shape), "core.mask-size"))
    indptr = to_host({"indptr": indptr}, mask.device)["indptr"]
    steps = indptr.tolist()
    if not steps or steps[0] != 0 or steps[-1] > len(mask) or steps != sorted(steps):
        raise ValueError(needs("indptr", f"0 to at most {len(mask)}, without decrease", steps, "core.indptr"))
    rows = [mask[a:b].transpose(0, 1).reshape(-1) for a, b in pairwise(steps)]
    return torch.cat(rows) if rows else mask.new_empty(0)


class BlockSparseAttentionWrapper(SparseWrapper):
    """Attention of ``[M]`` rows over ``[N]`` keys where the mask consists of ``[R, C]`` blocks.

    Args:
        float_workspace_buffer: Scratch bytes on the device the wrapper works on, 16-byte aligned.
        backend: ``auto``, a backend, or a candidate ``backend/path``.
    """

    def plan(
        self,
        indptr: torch.Tensor | None,
        indices: torch.Tensor | None,
        M: int,
        N: int,
        R: int,
        C: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: torch.Tensor | None = None,
        packed_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Dtype = "float16",
        kv_data_type: Dtype | None = None,
        o_data_type: Dtype = "float16",
        non_blocking: bool = True,
        block_mask: torch.Tensor | None = None,
    ) -> None:
        """Fix the mask and what the following runs compute.

        Positions, of ``causal`` and of ``pos_encoding_mode``, count the keys a row of blocks has, in the
        order of ``indices``, not those of the whole matrix. Must not be called during graph capture. If it
        raises, the previous plan stays in force.

        Args:
            indptr: int32 ``[ceil(M / R) + 1]``, first block of each row of blocks in ``indices``.
            indices: int32 ``[indptr[-1]]``, column of each block, in blocks.
            M: Query rows; the last row of blocks may be cut.
            N: Keys, a multiple of ``C``.
            R: Rows of a block.
            C: Columns of a block.
            num_qo_heads: Query heads, a multiple of ``num_kv_heads``.
            num_kv_heads: Key/value heads.
            head_dim: Elements per head.
            mask: bool ``[nnz, R, C]``, the elements of each block that are kept; all by default.
            packed_mask: The same as bits, as ``packed_custom_mask`` of the paged wrapper: the elements of
                each row of blocks row-major (see :func:`convert_bsr_mask_layout`), little-endian, on byte
                borders.
            causal: Bottom-right aligned within the keys of each row of blocks. A mask replaces it.
            pos_encoding_mode: 'NONE', 'ROPE_LLAMA' or 'ALIBI'.
            use_fp16_qk_reduction: Permits a less exact sum; no backend here makes use of it.
            logits_soft_cap: ``cap * tanh(x / cap)`` before the mask.
            sm_scale: Default ``1 / sqrt(head_dim)``.
            rope_scale: Position divisor of ROPE_LLAMA, default 1.
            rope_theta: Base of ROPE_LLAMA, default 1e4.
            q_data_type: Query type.
            kv_data_type: Key and value type; the query's by default.
            o_data_type: Output type. float16 by default, as upstream, whatever the query's.
            non_blocking: No effect: copies never block.
            block_mask: Not supported: a mask per head, of upstream's vsa backends. See
                :class:`VariableBlockSparseAttentionWrapper`.

        Raises:
            ValueError: An argument does not fit.
            TypeError: An argument has the wrong type.
            NotImplementedError: No backend serves the combination.
        """
        tracing.refuse_traced_plan(self)
        if block_mask is not None:
            want = "None (a mask per head: VariableBlockSparseAttentionWrapper)"
            raise ValueError(needs("block_mask", want, "a tensor", "core.sparse"))
        if indptr is None or indices is None:
            raise ValueError(needs("indptr and indices", "tensors", "None", "core.sparse"))
        for name, size in (("M", M), ("N", N)):
            check_size(name, size, 0)
        for name, size in (("R", R), ("C", C)):
            check_size(name, size)
        host = to_host({"indptr": indptr, "indices": indices}, self.device)
        _check_blocks(host["indptr"], host["indices"], (M, N), (R, C))
        rows = torch.arange(host["indptr"].numel(), dtype=torch.int32, device="cpu") * R
        rows[-1] = M
        flat = None if mask is None else _flat(mask, host["indptr"], host["indices"].numel(), (M, R, C))
        full = torch.full((rows.numel() - 1,), C, dtype=torch.int32, device="cpu")
        self._paged.plan(
            rows, host["indptr"], host["indices"], full, num_qo_heads, num_kv_heads, head_dim, C,
            custom_mask=flat, packed_custom_mask=packed_mask, causal=causal,
            pos_encoding_mode=pos_encoding_mode, sm_scale=sm_scale, logits_soft_cap=logits_soft_cap,
            rope_scale=rope_scale, rope_theta=rope_theta, q_data_type=q_data_type,
            kv_data_type=kv_data_type, o_data_type=o_data_type,
        )  # fmt: skip
        self._columns = (N // C, C)

    begin_forward = plan

    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None, scale_v: torch.Tensor | None = None,
        out: torch.Tensor | None = None, lse: torch.Tensor | None = None,
        return_lse: Literal[False] = False, enable_pdl: bool | None = None
    ) -> torch.Tensor: ...  # fmt: skip
    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None, scale_v: torch.Tensor | None = None,
        out: torch.Tensor | None = None, lse: torch.Tensor | None = None, *, return_lse: Literal[True],
        enable_pdl: bool | None = None
    ) -> Pair: ...  # fmt: skip
    @overload
    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None, scale_v: torch.Tensor | None = None,
        out: torch.Tensor | None = None, lse: torch.Tensor | None = None, return_lse: bool = False,
        enable_pdl: bool | None = None
    ) -> Result: ...  # fmt: skip

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Result:
        """Attend with the plan in force.

        Writes ``out`` and ``lse`` and nothing else; never waits for the device.

        Args:
            q: ``[M, num_qo_heads, head_dim]``, any strides.
            k: ``[N, num_kv_heads, head_dim]``, any strides.
            v: As ``k``; strides are its own.
            scale_q: Not supported (per-head fp8 scales), as the next two.
            scale_k: Not supported.
            scale_v: Not supported.
            out: ``[M, num_qo_heads, head_dim]`` of the planned output type.
            lse: float32 ``[M, num_qo_heads]``.
            return_lse: Also return the log-sum-exp, base 2; -inf where there is no key.
            enable_pdl: A launch hint of upstream without meaning here; has no effect on results.

        Returns:
            ``out``, or ``(out, lse)``.

        Raises:
            ValueError: No plan, or a tensor differs from what was planned.
            NotImplementedError: An argument no backend here has.
        """
        refuse(scale_q=scale_q, scale_k=scale_k, scale_v=scale_v)
        p = self._paged._planned().query.problem
        count, width = self._columns
        shape = (count * width, p.num_kv_heads, p.head_dim_qk)
        k = check_keys("k", k, shape).view(count, width, *shape[1:])
        v = check_keys("v", v, shape).view(count, width, *shape[1:])
        return self._paged.run(q, (k, v), out=out, lse=lse, return_lse=return_lse)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: torch.Tensor | None = None,
        scale_k: torch.Tensor | None = None,
        scale_v: torch.Tensor | None = None,
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
            return self.run(q, k, v, scale_q, scale_k, scale_v)


def _check_blocks(
    indptr: torch.Tensor, indices: torch.Tensor, size: tuple[int, int], block: tuple[int, int]
) -> None:
    (rows, keys), (height, width) = size, block
    if keys % width:
        raise ValueError(needs("N", f"a multiple of C = {width}", keys, "core.sparse"))
    want = -(-rows // height) + 1
    if indptr.numel() != want:
        text = f"ceil(M / R) + 1 = {want} entries"
        raise ValueError(needs("indptr", text, indptr.numel(), "core.sparse"))
    if indices.numel() < int(indptr[-1]):
        raise ValueError(needs("indices", f"{int(indptr[-1])} entries", indices.numel(), "core.sparse"))
    used = indices[: max(0, int(indptr[-1]))]
    if used.numel() and not 0 <= int(used.min()) <= int(used.max()) < keys // width:
        text = f"0 to {keys // width - 1}, the columns of blocks"
        got = f"{int(used.min())} to {int(used.max())} (out of bound)"
        raise ValueError(needs("indices", text, got, "core.sparse"))


def _flat(mask: object, indptr: torch.Tensor, count: int, sizes: tuple[int, int, int]) -> torch.Tensor:
    rows, height, width = sizes
    mask = dense("mask", mask, "core.mask-dtype")
    if tuple(mask.shape) != (count, height, width):
        want = f"shape ({count}, {height}, {width})"
        raise ValueError(needs("mask", want, tuple(mask.shape), "core.mask-size"))
    flat = convert_bsr_mask_layout(mask, indptr)
    cut = (indptr.numel() - 1) * height - rows  # rows that the last row of blocks lacks
    last = int(indptr[-1] - indptr[-2]) if cut else 0
    return flat[: flat.numel() - cut * last * width]
