"""The sampling kernel of the AMD targets against the core, token for token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attn_core.sampling import chain_speculative_sampling
from attn_hip.launch import DTYPES
from attn_hip.variants import misc_variants

from .device import LLVM19, TARGETS, Device
from .params import structs

BATCH, DRAFTS, VOCAB = 3, 2, 300
FLOAT64 = 5


def _params(tensors: dict[str, torch.Tensor], seeds: int) -> bytes:
    p = structs()["SampleParams"]()
    for name, tensor in tensors.items():
        setattr(p, name, tensor.data_ptr())
    draft, target = tensors["draft_probs"], tensors["target_probs"]
    p.draft_stride_row, p.draft_stride_position = draft.stride()[:2]
    p.target_stride_row, p.target_stride_position = target.stride()[:2]
    p.accepted_stride = p.emitted_stride = 1
    p.vocab_size, p.num_drafts, p.num_seeds, p.num_offsets = VOCAB, DRAFTS, seeds, seeds
    p.draft_dtype, p.target_dtype = (
        {**DTYPES, torch.float64: FLOAT64}[tensor.dtype] for tensor in (draft, target)
    )
    return bytes(p)


@pytest.mark.parametrize(
    ("arch", "compiler"),
    [pytest.param(*t, marks=[] if t == ("gfx942", LLVM19) else [pytest.mark.amd]) for t in TARGETS],
)
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(d, marks=pytest.mark.amd) for d in (torch.bfloat16, torch.float64))],
)
def test_chains_are_sampled_as_the_core_does(
    dtype: torch.dtype, arch: str, compiler: str, device: Callable[[str, str], Device]
) -> None:
    here = device(arch, compiler)
    make = torch.Generator().manual_seed(3)
    draft = torch.rand(BATCH, DRAFTS, VOCAB, generator=make).softmax(-1)
    target = draft.repeat(1, 2, 1)[:, : DRAFTS + 1] + 0.02 * torch.rand(
        BATCH, DRAFTS + 1, VOCAB, generator=make
    )
    target[1, 0, :150] = 0  # a rejection that leaves half of the row
    draft, target = draft.to(dtype), target.to(dtype)
    ids = torch.randint(0, VOCAB, (BATCH, DRAFTS), generator=make)
    ids[1, 0], ids[2, 1] = 7, -1
    for seeds in (1, BATCH):
        seed, offset = torch.arange(1, seeds + 1), torch.arange(10, 10 + seeds)
        wanted = chain_speculative_sampling(
            draft, ids, target, seed=seed if seeds > 1 else 1, offset=offset if seeds > 1 else 10
        )
        tokens = torch.full((BATCH, DRAFTS + 1), 77, dtype=torch.int32)
        counters = torch.zeros(2, BATCH, dtype=torch.int32)
        inputs = {
            "draft_probs": draft,
            "target_probs": target,
            "draft_ids": ids,
            "seed": seed,
            "offset": offset,
        }
        outputs = {"tokens": tokens, "accepted": counters[0], "emitted": counters[1]}
        here.register(inputs, outputs)
        here.run(misc_variants(arch)["chain_sample"], BATCH, _params({**inputs, **outputs}, seeds))
        assert tokens.tolist() == wanted[0].tolist()
        assert counters[0].tolist() == wanted[1].tolist()
        assert counters[1].tolist() == wanted[2].tolist()
