"""Arguments of kinds that torch has beside plain tensors, and numbers beyond what kernels hold: named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import attn_core

from .kit import ints

HEADS, DIM, PAGE = 2, 16, 4
Tensors = dict[str, torch.Tensor]
Change = Callable[[torch.Tensor], torch.Tensor]
F32 = {"q_data_type": torch.float32}
REFUSED = r"needs .*got .*\[core\.[a-z-]+\]"


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def workspace() -> torch.Tensor:
    return torch.zeros(1 << 20, dtype=torch.uint8)


def decode(t: Tensors) -> object:
    wrapper = attn_core.BatchDecodeWithPagedKVCacheWrapper(workspace(), backend="reference")
    wrapper.plan(t["indptr"], t["indices"], t["last"], HEADS, HEADS, DIM, PAGE, **F32)
    return wrapper.run(t["q"], (t["k"], t["v"]), out=t["out"], lse=t["lse"])


def ragged(t: Tensors) -> object:
    wrapper = attn_core.BatchPrefillWithRaggedKVCacheWrapper(workspace(), backend="reference")
    wrapper.plan(t["rows"], t["kv"], HEADS, HEADS, DIM, **F32)
    return wrapper.run(t["q"], t["k"], t["v"])


def latent(t: Tensors) -> object:
    wrapper = attn_core.BatchMLAPagedAttentionWrapper(workspace(), backend="reference")
    wrapper.plan(
        t["rows"],
        t["rows"],
        t["pages"],
        t["lens"],
        HEADS,
        16,
        8,
        PAGE,
        True,
        0.2,
        torch.float32,
        torch.float32,
    )
    return wrapper.run(t["q"], t["pe"], t["ckv"], t["kpe"])


def sampled(t: Tensors) -> object:
    return attn_core.chain_speculative_sampling(
        t["draft"], t["ids"], t["target"], t["accepted"], t["emitted"], seed=t["seed"], offset=t["offset"],
        backend="reference",
    )  # fmt: skip


def blocks(t: Tensors) -> object:
    wrapper = attn_core.BlockSparseAttentionWrapper(workspace(), backend="reference")
    wrapper.plan(t["indptr"], t["indices"], 5, 9, 5, 3, HEADS, HEADS, DIM, mask=t["mask"], **F32)
    return wrapper.run(t["q"], t["k"], t["v"])


def variable(t: Tensors) -> object:
    wrapper = attn_core.VariableBlockSparseAttentionWrapper(workspace(), backend="reference")
    wrapper.plan(t["map"], t["tall"], t["wide"], HEADS, HEADS, DIM, **F32)
    return wrapper.run(t["q"], t["k"], t["v"])


def merge(t: Tensors) -> object:
    return attn_core.merge_state_in_place(t["v"], t["s"], t["v_other"], t["s_other"], t["mask"])


TENSORS: dict[Callable[[Tensors], object], Tensors] = {
    decode: {
        "indptr": ints(0, 2, 3), "indices": ints(2, 0, 1), "last": ints(2, 3), "q": random(2, HEADS, DIM),
        "k": random(3, PAGE, HEADS, DIM), "v": random(3, PAGE, HEADS, DIM), "out": random(2, HEADS, DIM),
        "lse": random(2, HEADS),
    },
    ragged: {
        "rows": ints(0, 2), "kv": ints(0, 5), "q": random(2, HEADS, DIM), "k": random(5, HEADS, DIM),
        "v": random(5, HEADS, DIM),
    },
    latent: {
        "rows": ints(0, 1, 2), "pages": ints(1, 0), "lens": ints(3, 4), "q": random(2, HEADS, 16),
        "pe": random(2, HEADS, 8), "ckv": random(2, PAGE, 16), "kpe": random(2, PAGE, 8),
    },
    sampled: {
        "draft": random(2, 3, 6).softmax(-1), "ids": ints(0, 1, 2, 3, 4, 5).view(2, 3),
        "target": random(2, 4, 6).softmax(-1), "accepted": ints(3, 3), "emitted": ints(3, 3),
        "seed": torch.tensor([5]), "offset": torch.tensor([7]),
    },
    blocks: {
        "indptr": ints(0, 2), "indices": ints(0, 2), "mask": torch.ones(2, 5, 3, dtype=torch.bool),
        "q": random(5, HEADS, DIM), "k": random(9, HEADS, DIM), "v": random(9, HEADS, DIM),
    },
    variable: {
        "map": torch.ones(HEADS, 1, 2, dtype=torch.bool), "tall": torch.full((HEADS, 1), 5),
        "wide": torch.tensor([[4, 5]] * HEADS), "q": random(HEADS, 5, DIM), "k": random(HEADS, 9, DIM),
        "v": random(HEADS, 9, DIM),
    },
    merge: {
        "v": random(3, HEADS, DIM), "s": random(3, HEADS), "v_other": random(3, HEADS, DIM),
        "s_other": random(3, HEADS), "mask": torch.tensor([True, False, True]),
    },
}  # fmt: skip
EACH = [pytest.param(call, name, id=f"{call.__name__}-{name}") for call in TENSORS for name in TENSORS[call]]


def named(t: torch.Tensor) -> torch.Tensor:
    return t.rename(*(f"n{axis}" for axis in range(t.ndim)))


def nothing(t: torch.Tensor) -> torch.Tensor:
    return torch._efficientzerotensor(t.shape, dtype=t.dtype)


def nested(t: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([t, t])


def jagged(t: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([t, t], layout=torch.jagged)


def fake(t: torch.Tensor) -> torch.Tensor:
    return FakeTensorMode().from_tensor(t)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Named tensors and all")
@pytest.mark.parametrize("change", [named, nothing, nested, jagged, fake, torch.Tensor.to_sparse])
@pytest.mark.parametrize(("call", "name"), EACH)
def test_tensors_that_are_not_plain_are_named(
    call: Callable[[Tensors], object], name: str, change: Change
) -> None:
    """torch's own errors speak of what failed inside, and some come after a part was written."""
    given = {key: t.clone() for key, t in TENSORS[call].items()}
    try:
        changed = change(given[name])
    except RuntimeError:
        pytest.skip("torch cannot make it")
    with pytest.raises((TypeError, ValueError), match=REFUSED):
        call({**given, name: changed})
    assert all(torch.equal(t, given[key]) for key, t in TENSORS[call].items())
    call(given)


def test_counters_have_memory_each() -> None:
    given = {key: t.clone() for key, t in TENSORS[sampled].items()}
    given["emitted"] = given["accepted"]
    with pytest.raises(ValueError, match=r"accepted_token_num: needs memory apart from .*emitted_draft"):
        sampled(given)
    assert given["accepted"].tolist() == [3, 3]


def test_lengths_beyond_32_bits_are_refused() -> None:
    """Positions and lengths are int32; they would wrap."""
    with pytest.raises(ValueError, match=r"seq_lens: needs at most 2147483647 tokens per request, got 10995"):
        attn_core.get_batch_indices_positions(ints(0, 2), torch.tensor([2**40 + 2]), 2)
    _, to = attn_core.get_batch_indices_positions(ints(0, 2), torch.tensor([2**31 - 1]), 2)
    assert to.tolist() == [2**31 - 3, 2**31 - 2]
    for ends in ([0, 2**61], [-(2**63), 2**63 - 1], [0, 2**29]):
        with pytest.raises(ValueError, match=r"kv_indptr: needs at most 2147483647 tokens per request"):
            attn_core.get_seq_lens(torch.tensor(ends), torch.tensor([1]), 8)


def test_an_int_of_more_than_64_bits_is_refused() -> None:
    t = TENSORS[blocks]
    wrapper = attn_core.BlockSparseAttentionWrapper(workspace(), backend="reference")
    with pytest.raises(ValueError, match=r"^R: needs an int of 64 bits"):
        wrapper.plan(t["indptr"], t["indices"], 5, 9, 2**70, 3, HEADS, HEADS, DIM)


@pytest.mark.parametrize("name", ["sm_scale", "logits_soft_cap", "rope_scale", "rope_theta"])
@pytest.mark.parametrize("value", [1e300, 10**400, float("nan"), 1e-320])
def test_numbers_beyond_float32_are_refused(name: str, value: float) -> None:
    """They became infinity or 0 in a kernel, and its output NaN or that of another cap."""
    q, k = random(2, HEADS, DIM), random(5, HEADS, DIM)
    options = {"pos_encoding_mode": "ROPE_LLAMA", name: value}
    if name == "sm_scale" and value == 1e-320:
        return  # as good as 0
    with pytest.raises(ValueError, match=rf"{name}.*needs "):
        attn_core.single_prefill_with_kv_cache(q, k, k, backend="reference", **options)
