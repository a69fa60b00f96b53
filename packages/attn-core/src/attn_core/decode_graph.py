"""The graph-mode decode wrapper with upstream's shorter constructor."""

from __future__ import annotations

import torch

from .decode_paged import BatchDecodeWithPagedKVCacheWrapper


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """A decode wrapper in graph mode, with upstream's shorter constructor.

    Args:
        workspace_buffer: As ``float_workspace_buffer`` of the parent.
        indptr_buffer: int32 ``[batch_size + 1]``.
        indices_buffer: int32, as many entries as pages ever planned.
        last_page_len_buffer: int32 ``[batch_size]``.
        kv_layout: As of the parent, like the rest.
        use_tensor_cores: As of the parent.
        backend: As of the parent.
        max_seq_len: As of the parent.
    """

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
        backend: str = "auto",
        max_seq_len: int | None = None,
    ) -> None:
        super().__init__(
            workspace_buffer, kv_layout, True, use_tensor_cores,
            indptr_buffer, indices_buffer, last_page_len_buffer, backend, max_seq_len=max_seq_len,
        )  # fmt: skip
