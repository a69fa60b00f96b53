"""Block-sparse attention, under upstream's module name."""

from .sparse_blocks import BlockSparseAttentionWrapper, convert_bsr_mask_layout
from .sparse_variable import VariableBlockSparseAttentionWrapper

__all__ = [
    "BlockSparseAttentionWrapper",
    "VariableBlockSparseAttentionWrapper",
    "convert_bsr_mask_layout",
]
