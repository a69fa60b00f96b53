"""Graph-mode decode for several shapes in one object."""

from __future__ import annotations

from typing import Unpack

import torch

from .arguments import check_workspace
from .batch import INT32_MAX
from .checking import backend_name, size_of, whole
from .decode_paged import BatchDecodeWithPagedKVCacheWrapper
from .errors import needs
from .options import DecodeOptions
from .problem import check_kv_order

Key = tuple[int, int]


class DecodePlanPool:
    """Frozen decode plans keyed by ``(batch_size, q_len_per_req)``.

    A CUDA graph has one shape, and a serving loop has several: plain decode, verify of every draft
    length, every captured batch size. The pool makes one graph-mode wrapper per shape when it is first
    planned. Each is routed on its own and owns index buffers only (:attr:`owned_bytes`); all share the
    float workspace, so run them on one stream.

    Args:
        float_workspace_buffer: Shared scratch bytes, as for the wrapper.
        max_pages: Pages that any one batch will ever use.
        kv_layout: ``NHD`` or ``HND``.
        backend: ``auto``, a backend, or a candidate ``backend/path``.
        max_seq_len: Longest sequence that will be planned, in tokens.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument does not fit.

    Example:
        >>> pool = DecodePlanPool(workspace, max_pages=4096)
        >>> wrapper = pool.plan(indptr, indices, last_page_len, 32, 8, 128, 16, q_len_per_req=4)
        >>> out = wrapper.run(q, cache)  # capture this; plan() again before each replay
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        max_pages: int,
        kv_layout: str = "NHD",
        backend: str = "auto",
        max_seq_len: int | None = None,
    ) -> None:
        if whole("max_pages", max_pages, "core.pool", 1) > INT32_MAX:
            raise ValueError(needs("max_pages", f"at most {INT32_MAX}", max_pages, "core.pool"))
        if max_seq_len is not None:
            whole("max_seq_len", max_seq_len, "core.max-seq-len", 1)
        self._workspace = check_workspace("float_workspace_buffer", float_workspace_buffer)
        self._max_pages, self._layout = max_pages, check_kv_order(kv_layout)
        self._backend, self._max_seq_len = backend_name(backend), max_seq_len
        self._members: dict[Key, BatchDecodeWithPagedKVCacheWrapper] = {}

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **options: Unpack[DecodeOptions],
    ) -> BatchDecodeWithPagedKVCacheWrapper:
        """Plan the member of this batch size and ``q_len_per_req``; returns it.

        Takes the arguments of the wrapper's ``plan()``. A failing first plan leaves no member behind.

        Raises:
            ValueError: As the wrapper's ``plan()``.
        """
        q_len = whole("q_len_per_req", options.get("q_len_per_req", 1), "core.q-len")
        key = (size_of("last_page_len", last_page_len), q_len)
        member = self._members.get(key) or self._make(*key)
        member.plan(
            indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **options
        )
        self._members[key] = member
        return member

    def _make(self, batch_size: int, q_len: int) -> BatchDecodeWithPagedKVCacheWrapper:
        indptr, indices, last = (
            torch.zeros(size, dtype=torch.int32, device=self._workspace.device)
            for size in (batch_size + 1, self._max_pages, batch_size)
        )
        return BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            self._layout,
            use_cuda_graph=True,
            use_tensor_cores=q_len > 1,  # one row may also go to a kernel that takes no more
            paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=last,
            backend=self._backend,
            max_seq_len=self._max_seq_len,
        )

    def __getitem__(self, key: Key) -> BatchDecodeWithPagedKVCacheWrapper:
        """Return the member planned for ``(batch_size, q_len_per_req)``.

        Raises:
            KeyError: It was never planned; names the shapes that were.
        """
        try:
            return self._members[key]
        except KeyError:
            raise KeyError(f"no plan for {key}; planned: {sorted(self._members)}") from None

    def __contains__(self, key: object) -> bool:
        return key in self._members

    def __len__(self) -> int:
        return len(self._members)

    @property
    def keys(self) -> list[Key]:
        """Shapes planned so far, sorted."""
        return sorted(self._members)

    @property
    def owned_bytes(self) -> int:
        """Device memory of all members' index buffers; the float workspace is the caller's."""
        return sum(member.owned_bytes for member in self._members.values())
