"""What a program sets for all of torch changes no result: default device and type, autocast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch

import attn_core

from .fakes import FakeBackend

HEADS, DIM, PAGE = 2, 16, 4
Tensors = dict[str, torch.Tensor]
Use = Callable[..., object]


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


GIVEN = {
    "workspace": torch.zeros(1 << 20, dtype=torch.uint8), "rows": i32(0, 2, 5), "indptr": i32(0, 2, 3),
    "indices": i32(2, 0, 1), "last": i32(2, 3), "kv": i32(0, 6, 9), "lens": i32(6, 3),
    "q": random(5, HEADS, DIM), "cache": random(3, 2, PAGE, HEADS, DIM), "k": random(9, HEADS, DIM),
    "v": random(9, HEADS, DIM) + 1, "mask": random(2 * 6 + 3 * 3) > 0,
    "prefix": i32(2, 1), "items": i32(0, 1, 2, 0, 0, 1), "longest": i32(3, 3), "block": i32(0, 1, 1),
    "blocks": i32(0, 2), "one": i32(0), "map": torch.ones(HEADS, 1, 2, dtype=torch.bool),
    "tall": torch.full((HEADS, 1), 5), "wide": torch.tensor([[4, 5]] * HEADS), "ids": i32(1, 0, 2).view(1, 3),
    "probs": random(1, 4, 6).softmax(-1), "seed": torch.tensor([5]), "at": i32(0, 0, 1, 1, 1),
    "to": i32(4, 5, 0, 1, 2), "alone": torch.ones(2, dtype=torch.int32), "single": i32(0, 1, 2),
    "ckv_at": i32(0, 1, 2), "ckv_len": i32(3, 4), "latent": random(2, 1, 4, 24).squeeze(1),
}  # fmt: skip
SIZES = {"num_qo_heads": HEADS, "num_kv_heads": HEADS}
F32 = {"q_data_type": torch.float32}


def decode(t: Tensors) -> object:
    wrapper = attn_core.BatchDecodeWithPagedKVCacheWrapper(t["workspace"], backend="reference")
    wrapper.plan(t["indptr"], t["indices"], t["last"], HEADS, HEADS, DIM, PAGE, **F32)
    return wrapper.run(t["q"][:2], t["cache"], return_lse=True)


def paged(t: Tensors) -> object:
    wrapper = attn_core.BatchPrefillWithPagedKVCacheWrapper(t["workspace"], backend="reference")
    wrapper.plan(
        t["rows"], t["indptr"], t["indices"], t["last"], HEADS, HEADS, DIM, PAGE, custom_mask=t["mask"], **F32
    )
    return wrapper.run(t["q"], t["cache"], return_lse=True)


def items(t: Tensors) -> object:
    wrapper = attn_core.BatchPrefillWithRaggedKVCacheWrapper(t["workspace"], backend="reference")
    wrapper.plan(
        t["rows"], t["kv"], HEADS, HEADS, DIM, prefix_len_ptr=t["prefix"], token_pos_in_items_len=4,
        token_pos_in_items_ptr=t["items"], max_item_len_ptr=t["longest"], **F32,
    )  # fmt: skip
    return wrapper.run(t["q"], t["k"], t["v"])


def prefill(t: Tensors) -> object:
    return attn_core.single_prefill_with_kv_cache(
        t["q"], t["k"], t["v"], causal=True, pos_encoding_mode="ALIBI", backend="reference"
    )


def captured(t: Tensors) -> object:
    pool = attn_core.DecodePlanPool(t["workspace"], 3, backend="reference")
    wrapper = pool.plan(t["indptr"], t["indices"], t["last"], HEADS, HEADS, DIM, PAGE, **F32)
    return wrapper.run(t["q"][:2], t["cache"])


def latent(t: Tensors) -> object:
    wrapper = attn_core.BatchMLAPagedAttentionWrapper(t["workspace"], backend="reference")
    wrapper.plan(
        t["single"], t["single"], t["one"].expand(2), t["ckv_len"], HEADS, 16, 8, PAGE, True, 0.2,
        torch.float32, torch.float32,
    )  # fmt: skip
    q, kv = t["latent"][..., None, :].expand(-1, -1, HEADS, -1)[:, 0], t["latent"]
    return wrapper.run(q[..., :16], q[..., 16:], kv[..., :16], kv[..., 16:])


def blocks(t: Tensors) -> object:
    wrapper = attn_core.BlockSparseAttentionWrapper(t["workspace"], backend="reference")
    wrapper.plan(t["blocks"], t["block"][:2], 5, 9, 5, 3, HEADS, HEADS, DIM, **F32)
    return wrapper.run(t["q"], t["k"], t["v"])


def variable(t: Tensors) -> object:
    wrapper = attn_core.VariableBlockSparseAttentionWrapper(t["workspace"], backend="reference")
    wrapper.plan(t["map"], t["tall"], t["wide"], HEADS, HEADS, DIM, **F32)
    return wrapper.run(*(t[name].transpose(0, 1) for name in "qkv"))


def append(t: Tensors) -> object:
    cache = torch.zeros_like(t["cache"])
    attn_core.append_paged_kv_cache(
        t["q"], t["q"] + 1, t["at"], t["to"], cache, t["indices"], t["indptr"], t["last"], backend="reference"
    )
    return cache, attn_core.get_batch_indices_positions(t["rows"], t["lens"], 5)


def sampled(t: Tensors) -> object:
    return attn_core.chain_speculative_sampling(
        t["probs"][:, 1:], t["ids"], t["probs"], seed=7, offset=0, backend="reference"
    )


def merged(t: Tensors) -> object:
    v = torch.stack([t["q"], t["q"] + 1], 1)
    return attn_core.merge_states(v, v[..., 0]), attn_core.packbits(t["mask"])


CALLS = (
    decode, paged, items, prefill, captured, latent, blocks, variable, append, sampled, merged
)  # fmt: skip


@contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SET: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "device": lambda: torch.device("meta"),  # nothing that runs may be made there
    "float16": lambda: default_type(torch.float16),
    "float64": lambda: default_type(torch.float64),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),  # products would be made of bfloat16
}


@pytest.mark.parametrize("name", SET)
@pytest.mark.parametrize("call", CALLS)
def test_settings_of_torch_change_nothing(call: Callable[[Tensors], object], name: str) -> None:
    """Engines set defaults while they load a model and warm up, and autocast where they like."""
    want = call(GIVEN)
    with SET[name]():
        found = call(GIVEN)
    torch.testing.assert_close(found, want, rtol=0, atol=0)


def test_backends_of_others_run_without_autocast(use: Use) -> None:
    seen: list[bool] = []
    use(FakeBackend(run=lambda launch, image, io: seen.append(torch.is_autocast_enabled("cpu"))))
    with torch.autocast("cpu", torch.bfloat16):
        wrapper = attn_core.BatchDecodeWithPagedKVCacheWrapper(GIVEN["workspace"], backend="fake")
        wrapper.plan(GIVEN["indptr"], GIVEN["indices"], GIVEN["last"], HEADS, HEADS, DIM, PAGE, **F32)
        wrapper.run(GIVEN["q"][:2], GIVEN["cache"])
        assert torch.is_autocast_enabled("cpu")
    assert seen == [False]
