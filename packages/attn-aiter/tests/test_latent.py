"""Latent attention through attn-core's wrapper: what reaches mla_decode_fwd, and what is kept from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import attn_core
from attn_aiter import codes, rows
from attn_aiter.backend import AiterBackend
from attn_aiter.routes import mla
from attn_core import planner, plugins
from attn_core.backend import RunIO
from attn_core.errors import NoRoute, Unsupported
from attn_core.reference import ReferenceBackend

from .conftest import GFX942
from .functions import Latent


@pytest.fixture
def latent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Latent]:
    found = Latent()
    backend = AiterBackend({"assume_version": "0.1.20"}, loader=lambda module, name: found)
    monkeypatch.setattr(planner, "target_of", lambda device: GFX942)
    before = plugins.use(plugins.Registry((backend, ReferenceBackend()), (), (), {}))
    yield found
    plugins.use(before)


class Batch:
    """Requests over a joint cache of 576 columns."""

    def __init__(self, lengths: list[int], q_lens: list[int], heads: int = 16, page: int = 1) -> None:
        torch.manual_seed(0)
        self.lengths, self.heads, self.page = torch.tensor(lengths, dtype=torch.int32), heads, page
        self.qo = torch.tensor([0, *q_lens], dtype=torch.int32).cumsum(0).int()
        pages = torch.tensor([0, *(-(-n // page) for n in lengths)]).cumsum(0)
        self.indptr, self.indices = pages.int(), torch.randperm(int(pages[-1])).int()
        self.cache = torch.randn(int(pages[-1]), page, 576).bfloat16()
        self.q = torch.randn(int(self.qo[-1]), heads, 576).bfloat16()

    def plan(
        self, backend: str = "auto", causal: bool = True, dtype: torch.dtype = torch.bfloat16, **more: Any
    ):
        space = torch.empty(1 << 20, dtype=torch.uint8)
        self.wrapper = attn_core.BatchMLAPagedAttentionWrapper(
            space, backend=backend, **more.pop("graph", {})
        )
        self.wrapper.plan(
            self.qo, self.indptr, self.indices, self.lengths, self.heads, 512, 64, self.page, causal, 0.1,
            dtype, dtype, **more,
        )  # fmt: skip
        return self.wrapper

    def run(self, joined: bool = True) -> torch.Tensor:
        parts = (self.q[..., :512], self.q[..., 512:], self.cache[..., :512], self.cache[..., 512:])
        return self.wrapper.run(*(parts if joined else (t.clone() for t in parts)))


def causes(wrapper: Any) -> list[str]:
    return [r.code.slug for r in wrapper.route.refused if r.candidate == "aiter/mla"]


@pytest.mark.parametrize(
    ("q_lens", "heads", "causal"),
    [([1, 1], 16, True), ([1, 1], 16, False), ([1, 1], 128, True), ([4, 4], 16, True), ([2, 2], 16, True)],
)
def test_equals_the_reference(latent: Latent, q_lens: list[int], heads: int, causal: bool) -> None:
    batch = Batch([9, 30], q_lens, heads)
    wrapper = batch.plan(causal=causal)
    assert wrapper.route.candidate == "aiter/mla"
    assert wrapper.backend_fallback_reason is None
    found = batch.run()
    apart = batch.run(joined=False)
    batch.plan("reference", causal)
    for one in (found, apart):
        torch.testing.assert_close(one.float(), batch.run().float(), atol=3e-2, rtol=2e-2)


def test_the_callers_cache_reaches_the_kernel(latent: Latent) -> None:
    batch = Batch([9, 30], [1, 1])
    batch.plan()
    batch.run()
    warm, given = latent.calls
    assert given["kv_buffer"].data_ptr() == batch.cache.data_ptr()
    assert given["max_seqlen_q"] == warm["max_seqlen_q"] == 1
    assert given["sm_scale"] == 0.1
    assert (given["page_size"], given["nhead_kv"], given["causal"]) == (1, 1, True)  # this release has them
    old = AiterBackend({"assume_version": "0.1.7.post2.dev18", "min_version": "0.1.0"})
    route = old._routes[rows.MLA]
    assert route.missing(old.api) == ()
    assert "page_size" not in old.api.functions["mla_decode"]


@pytest.mark.parametrize(
    ("batch", "more", "slug"),
    [
        (Batch([9], [1], heads=32), {}, "aiter.latent-heads"),
        (Batch([9, 9], [5, 5]), {}, "aiter.latent-rows"),
        (Batch([9, 9], [2, 1]), {}, "aiter.latent-rows"),
        (Batch([9, 9], [2, 2], heads=128), {}, "aiter.latent-rows"),
        (Batch([9, 9], [2, 2]), {"causal": False}, "aiter.latent-mask"),
        (Batch([9, 9], [1, 1], page=16), {}, "core.page-size"),
        (Batch([9, 9], [1, 1]), {"needs_lse": True}, "core.lse"),
        (Batch([9, 0], [1, 1]), {}, "aiter.empty-request"),
        (Batch([9, 1], [2, 2]), {}, "aiter.kv-shorter-than-q"),
        (Batch([9, 9], [1, 1]), {"dtype": torch.float16}, "core.q-dtype"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_has_no_kernel_goes_elsewhere_or_raises(latent: Latent, batch: Batch, more, slug: str) -> None:
    wrapper = batch.plan(**more)
    assert wrapper.backend == "reference"
    assert slug in causes(wrapper)
    with pytest.raises((NoRoute, Unsupported), match=slug):
        batch.plan("aiter", **more)
    assert len(latent.calls) == 0


def test_a_graph_is_captured_with_another_kernel(latent: Latent) -> None:
    names = {"qo_indptr": 3, "kv_indptr": 3, "kv_indices": 64, "kv_len_arr": 2}
    graph = {name: torch.zeros(n, dtype=torch.int32) for name, n in names.items()}
    wrapper = Batch([9, 9], [1, 1]).plan(graph={"use_cuda_graph": True, **graph})
    assert wrapper.backend == "reference"
    assert causes(wrapper) == ["core.graph"]


def test_other_paths_leave_latent_attention_alone_and_this_one_the_rest(latent: Latent) -> None:
    wrapper = Batch([9, 9], [1, 1]).plan()
    said = {reason.candidate: reason.code for reason in wrapper.route.refused}
    assert said["aiter/gather"].slug == said["aiter/native"].slug == "core.latent"
    plain = attn_core.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    page = torch.tensor([0, 1], dtype=torch.int32)
    plain.plan(page * 20, page, page[:1], torch.tensor([20], dtype=torch.int32), 16, 1, 576, 32,
               head_dim_vo=512, q_data_type=torch.bfloat16)  # fmt: skip
    assert plain.backend == "reference"
    said = {reason.candidate: reason.code.slug for reason in plain.route.refused}
    assert said["aiter/mla"] == "core.latent"


# One entry per guard: without it the kernel would read something else.


@pytest.mark.parametrize(
    "spoil", [lambda k, v: (k, v.clone()), lambda k, v: (k, k[..., 64:576]), lambda k, v: (k[::2], v[::2])]
)
def test_mutation_values_that_are_not_the_first_columns_of_dense_keys(latent: Latent, spoil) -> None:
    k = torch.randn(6, 1, 1, 576).bfloat16()
    q = torch.empty(1, 16, 576).bfloat16()
    with pytest.raises(ValueError, match=r"aiter/mla.*\[aiter.kv-stride\]"):
        mla.check_latent(RunIO(q, *spoil(k, k[..., :512]), torch.empty(1, 16, 512)))
    mla.check_latent(RunIO(q, k, k[..., :512], torch.empty(1, 16, 512)))


def test_mutation_what_is_not_latent_never_reaches_the_kernel(latent: Latent) -> None:
    batch = Batch([9, 9], [1, 1])
    wrapper = batch.plan()
    calls = len(latent.calls)
    k = batch.cache.unsqueeze(2)
    io = RunIO(batch.q, k, k[..., :512].clone(), torch.empty(2, 16, 512).bfloat16())
    with pytest.raises(ValueError, match=r"v: needs the first columns of k.*\[aiter.kv-stride\]"):
        plugins.registry().backends[0].run(wrapper._plan_info.launch, wrapper._plan_info.image, io)
    assert len(latent.calls) == calls


def test_mutation_a_second_device(latent: Latent) -> None:
    batch = Batch([9, 9], [1, 1])
    batch.plan()
    batch.run()
    backend = plugins.registry().backends[0]
    backend._routes[rows.MLA]._device = torch.device("meta")  # as if the first call had been elsewhere
    with pytest.raises(NotImplementedError, match=r"one device per process.*\[aiter.latent-device\]"):
        batch.run()


def test_the_codes_are_different() -> None:
    assert len({codes.LATENT_HEADS.slug, codes.LATENT_ROWS.slug, codes.LATENT_MASK.slug}) == 3
