"""Stand-ins for two AITER kernels that read and write raw memory the way the kernels' sources do.

They get what the kernels get, pointers and a few strides, and nothing else; a layout the kernel cannot
address is therefore misread here too, silently. They encode a reading of the sources, not hardware.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch

PARTITION, V_TILE = 256, 32
DTYPES = {"_Float16": torch.float16, "__hip_bfloat16": torch.bfloat16}


def memory(
    pointer: Any, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    """Return a tensor over raw memory; its last element bounds what may be touched."""
    address = pointer.value if hasattr(pointer, "value") else int(pointer)
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    raw = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype).as_strided(shape, strides)


class PaV1:
    """``csrc.cpp_itfs.pa.pa_v1.compile``: hands out a C function for each variant."""

    def __init__(self) -> None:
        self.built: list[dict[str, Any]] = []
        self.calls = 0

    def __call__(self, **variant: Any) -> Any:
        if variant["block_size"] > 32:
            raise RuntimeError("static_assert(BLOCK_SIZE <= 32)")
        self.built.append(variant)

        def kernel(*c: Any) -> None:
            assert len(c) == 26
            self.calls += 1
            self.run(variant, *c)

        return kernel

    @staticmethod
    def run(variant: dict[str, Any], *c: Any) -> None:
        out, work, q, k, v, table, cu, lens, alibi, _, k_scale, v_scale, _ = c[:13]
        (scale, width, parts, cap, n, kv_heads, heads, q_row, page, head, token, window, _) = (
            number.value for number in c[13:]
        )
        assert not cu.value
        assert not alibi.value
        for unit in (k_scale, v_scale):
            assert memory(unit, torch.float32, (1,), (1,)).item() == 1.0
        dim, dtype, size = variant["head_size"], DTYPES[variant["dtype"]], variant["block_size"]
        group = variant["gqa_ratio"]
        lengths = memory(lens, torch.int32, (n,), (1,)).tolist()
        tables = memory(table, torch.int32, (n, width), (width, 1))
        queries = memory(q, dtype, (n, heads, dim), (q_row, dim, 1))  # q's head stride is never asked for
        outs = memory(out, dtype, (n, heads, dim), (heads * dim, dim, 1))  # nor are out's strides
        blocks = int(tables.max()) + 1
        keys = memory(k, dtype, (blocks, size, kv_heads, dim), (page, token, head, 1))
        values = memory(v, dtype, (blocks, size, kv_heads, dim), (page, token, head, 1))  # with K's strides
        scratch = n * heads * parts * (2 * 4 + dim * dtype.itemsize)
        memory(work, torch.uint8, (scratch,), (1,)).fill_(0xAB)
        for s, length in enumerate(lengths):
            if length < 1:
                outs[s] = math.nan  # the reduction reads what lies before its first partition
                continue
            length = min(length, parts * PARTITION)  # partitions beyond the grid are not computed
            at = torch.arange(length)
            ids = tables[s].long()[at // size]
            kk = keys[ids, at % size].float()
            vv = values[ids, at % PARTITION % V_TILE % size].float()  # right where pages divide the tile
            for h, kv in _heads(group, kv_heads):
                x = kk[:, kv] @ queries[s, h].float() * scale
                if variant["sliding_window_enabled"]:
                    x[: max(0, length - window)] = -3.4e38  # before the cap, as the kernel does
                if variant["logits_soft_cap_enabled"]:
                    x = cap * torch.tanh(x / cap)
                whole = dim // 64 * 64  # the loop over V's columns drops the rest
                outs[s, h, :whole] = (x.softmax(0) @ vv[:, kv])[:whole].to(dtype)


def _heads(group: int, kv_heads: int) -> list[tuple[int, int]]:
    """Query head and kv head of each product; above 16 per group, groups overlap and heads are dropped."""
    loops = -(-group // 16)
    per_loop = group // loops
    return [
        ((kv + loop) * per_loop + row, kv)
        for kv in range(kv_heads) for loop in range(loops) for row in range(per_loop)
    ]  # fmt: skip


def reshape_and_cache_flash(
    *, key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor,
    slot_mapping: torch.Tensor, kv_cache_dtype: str, k_scale: torch.Tensor, v_scale: torch.Tensor,
) -> None:  # fmt: skip
    """Write rows by raw address: one page stride, dense tokens, packed heads."""
    assert kv_cache_dtype == "auto"
    assert slot_mapping.dtype is torch.int64
    assert k_scale.item() == v_scale.item() == 1.0
    assert key_cache.stride(0) == value_cache.stride(0)  # the kernel's only check
    heads, dim, page = key.shape[1], key.shape[2], key_cache.shape[1]
    rows = key.shape[0]
    for source, cache in ((key, key_cache), (value, value_cache)):
        step = key_cache.stride(0)
        read = memory(source.data_ptr(), source.dtype, (rows, heads * dim), (source.stride(0), 1))
        for n, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                at = (
                    cache.data_ptr()
                    + (slot // page * step + slot % page * heads * dim) * cache.element_size()
                )
                memory(at, cache.dtype, (heads * dim,), (1,)).copy_(read[n])
