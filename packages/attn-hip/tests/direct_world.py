"""What tests of runs that native code checks share: a planned wrapper, its right call, what came of one."""

from __future__ import annotations

from typing import Any

import torch

import attn_core

HEADS, KV_HEADS, DIM, PAGE, PAGES, ROWS = 4, 2, 64, 4, 5, 3


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def workspace() -> torch.Tensor:
    return torch.zeros(1 << 20, dtype=torch.uint8)


Call = dict[str, Any]
"""Arguments of a run by name: q, k, v (pair and ragged) or kv, out, lse, scales, return_lse."""


class World:
    """A planned wrapper of one kind and the right call of it."""

    def __init__(self, kind: str, order: str = "NHD", dtype: torch.dtype = torch.float32) -> None:
        self.kind, self.order = kind, order
        if kind == "ragged":
            made: Any = attn_core.BatchPrefillWithRaggedKVCacheWrapper
        elif kind == "prefill":
            made = attn_core.BatchPrefillWithPagedKVCacheWrapper
        else:
            made = attn_core.BatchDecodeWithPagedKVCacheWrapper
        self.wrapper: Any = made(workspace(), order, backend="fa2")
        self.dtype = dtype
        self.plan()

    def plan(self, last: int = 3) -> None:
        heads = (HEADS, KV_HEADS, DIM)
        if self.kind == "ragged":
            self.wrapper.plan(i32(0, 1, ROWS), i32(0, 5, 12), *heads, causal=True, q_data_type=self.dtype)
        elif self.kind == "prefill":
            self.wrapper.plan(
                i32(0, 1, ROWS), i32(0, 2, 4), i32(1, 0, 4, 2), i32(last, 1), *heads, PAGE, causal=True,
                q_data_type=self.dtype,
            )  # fmt: skip
        else:
            self.wrapper.plan(
                i32(0, 2, 2, 4), i32(1, 0, 4, 2), i32(last, 0, 1), *heads, PAGE, q_data_type=self.dtype
            )

    def right(self, form: str) -> Call:
        page = (PAGE, KV_HEADS) if self.order == "NHD" else (KV_HEADS, PAGE)
        call: Call = {"q": random(ROWS, HEADS, DIM).to(self.dtype)}
        if form == "whole":
            call["kv"] = random(PAGES, 2, *page, DIM).to(self.dtype)
        else:
            shape = (12, KV_HEADS, DIM) if self.kind == "ragged" else (PAGES, *page, DIM)
            call["k"], call["v"] = random(*shape).to(self.dtype), random(*shape[::-1]).to(self.dtype)
            call["v"] = call["v"].permute(*reversed(range(len(shape)))).contiguous()
        return {
            **call, "out": torch.zeros(ROWS, HEADS, DIM, dtype=self.dtype), "lse": torch.zeros(ROWS, HEADS),
            "return_lse": True,
        }  # fmt: skip

    def run(self, call: Call) -> Any:
        call = dict(call)
        if "kv" in call:
            cache: tuple[Any, ...] = (call.pop("kv"),)
        elif self.kind == "ragged":
            cache = (call.pop("k"), call.pop("v"))
        else:
            cache = ((call.pop("k"), call.pop("v")),)
        return self.wrapper.run(call.pop("q"), *cache, **call)


def outcome(world: World, call: Call) -> tuple[Any, ...]:
    """Return what a call gave or raised, and what it wrote."""
    written = [t for t in (call.get("out"), call.get("lse")) if isinstance(t, torch.Tensor)]
    try:
        found = world.run(call)
    except Exception as error:
        return type(error), str(error)
    found = found if isinstance(found, tuple) else (found,)
    return tuple(
        t.detach().clone().nan_to_num(nan=1e30) for t in (*found, *written) if t.layout is torch.strided
    )


def same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    if len(a) != len(b):
        return False
    return all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else x is y or x == y
        for x, y in zip(a, b, strict=True)
    )
