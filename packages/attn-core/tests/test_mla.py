"""Latent attention: against plain arithmetic, in both layouts of the cache, eager and captured."""

import math
from dataclasses import replace

import pytest
import torch

from attn_core import BatchMLAPagedAttentionWrapper, NoRoute, mla, plugins
from attn_core.capability import LATENT, Capability, Dims
from attn_core.problem import AttentionProblem, Op, PagedKV

from .fakes import EVERYTHING, FakeBackend, registry

HEADS, CKV, KPE, SCALE = 5, 32, 8, 0.21
LENGTHS, ROWS = [5, 0, 9, 16], [2, 1, 3, 1]


def ends(counts):
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int()


class Batch:
    """Requests over shuffled pages of a joint cache, and what attention over them is."""

    def __init__(self, page=4, lengths=LENGTHS, rows=ROWS, dims=(CKV, KPE), dtype=torch.float32, seed=0):
        made = torch.Generator().manual_seed(seed)
        self.page, self.lengths, self.rows, self.dims, self.dtype = page, lengths, rows, dims, dtype
        pages = [-(-n // page) for n in lengths]
        self.indptr, self.qo = ends(pages), ends(rows)
        self.indices = torch.randperm(sum(pages) + 2, generator=made)[: sum(pages)].int()
        self.cache = torch.randn(sum(pages) + 2, page, sum(dims), generator=made).to(dtype)
        self.q = torch.randn(sum(rows), HEADS, sum(dims), generator=made).to(dtype)

    @property
    def lens(self):
        return torch.tensor(self.lengths, dtype=torch.int32)

    def plan(self, wrapper, causal=True, **more):
        wrapper.plan(
            self.qo, self.indptr, self.indices, self.lens, HEADS, *self.dims, self.page, causal, SCALE,
            self.dtype, self.dtype, **more,
        )  # fmt: skip

    def parts(self, joined=True):
        at = self.dims[0]
        found = self.q[..., :at], self.q[..., at:], self.cache[..., :at], self.cache[..., at:]
        return found if joined else tuple(t.clone() for t in found)

    def want(self, causal=True):
        outs, lses = [], []
        for n, (length, rows) in enumerate(zip(self.lengths, self.rows, strict=True)):
            pages = self.indices[self.indptr[n] : self.indptr[n + 1]].long()
            keys = self.cache[pages].flatten(0, 1)[:length].double()
            q = self.q[self.qo[n] : self.qo[n + 1]].double()
            x = torch.einsum("rhd,kd->hrk", q, keys) * SCALE
            if causal:
                seen = torch.arange(length)[None] <= torch.arange(rows)[:, None] + length - rows
                x = x.masked_fill(~seen, -math.inf)
            weights = x.softmax(-1).nan_to_num(0)
            outs.append(torch.einsum("hrk,kd->rhd", weights, keys[:, : self.dims[0]]))
            lses.append(x.logsumexp(-1).T / math.log(2))
        return torch.cat(outs).to(self.dtype), torch.cat(lses).float()


def wrapper(backend="reference", **graph):
    return BatchMLAPagedAttentionWrapper(torch.empty(1 << 22, dtype=torch.uint8), backend=backend, **graph)


def close(a, b, tolerance=1e-4):
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("page", [1, 4, 16])
def test_equals_plain_arithmetic(page, causal, joined, backend):
    batch, one = Batch(page), wrapper(backend)
    batch.plan(one, causal)
    out, lse = one.run(*batch.parts(joined), return_lse=True)
    want, want_lse = batch.want(causal)
    close(out, want)
    close(lse, want_lse)
    assert out.shape == (sum(ROWS), HEADS, CKV)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_sizes_of_deepseek(dtype):
    batch, one = Batch(1, [70, 3], [1, 1], (512, 64), dtype), wrapper("auto")
    batch.plan(one)
    close(one.run(*batch.parts()).float(), batch.want()[0].float(), 3e-2)


@pytest.mark.parametrize("joined", [True, False])
def test_keys_without_a_rotary_part(joined, monkeypatch):
    monkeypatch.setattr(mla, "_gathered", None)  # nothing to copy
    batch, one = Batch(dims=(CKV, 0)), wrapper("auto")
    batch.plan(one)
    out, lse = one.run(*batch.parts(joined), return_lse=True)
    want, want_lse = batch.want()
    close(out, want)
    close(lse, want_lse)


@pytest.mark.parametrize("graph", [True, False])
def test_a_cache_without_a_page(graph):
    batch = Batch(lengths=[0, 0], rows=[2, 1])
    sizes = {"qo_indptr": 3, "kv_indptr": 3, "kv_indices": 9, "kv_len_arr": 2}
    buffers = {name: torch.zeros(n, dtype=torch.int32) for name, n in sizes.items()}
    one = wrapper("auto", use_cuda_graph=True, **buffers) if graph else wrapper("auto")
    batch.cache = batch.cache[:0]
    batch.plan(one)
    out, lse = one.run(*batch.parts(False), return_lse=True)
    assert not out.any()
    assert torch.isneginf(lse).all()


def test_parts_that_lie_apart_in_one_tensor():
    """Same memory, same strides, but not side by side: they are copied, not read through."""
    batch, one = Batch(), wrapper()
    batch.plan(one)
    q, cache = (torch.full((*t.shape[:-1], t.shape[-1] + 8), 9.0) for t in (batch.q, batch.cache))
    parts = []
    for wide, t in ((q, batch.q), (cache, batch.cache)):
        wide[..., :CKV], wide[..., CKV + 8 :] = t[..., :CKV], t[..., CKV:]
        parts += [wide[..., :CKV], wide[..., CKV + 8 :]]
    close(one.run(*parts), batch.want()[0])
    swapped = [torch.cat((t[..., CKV:], t[..., :CKV]), -1) for t in (batch.q, batch.cache)]
    parts = [part for t in swapped for part in (t[..., KPE:], t[..., :KPE])]
    close(one.run(*parts), batch.want()[0])


def test_outputs_that_are_given_and_base_e():
    batch, one = Batch(), wrapper()
    batch.plan(one)
    out, lse = torch.empty(7, HEADS, CKV), torch.empty(7, HEADS)
    found = one.run(*batch.parts(), out, lse, True, return_lse_base_on_e=True)
    assert [a.data_ptr() for a in found] == [out.data_ptr(), lse.data_ptr()]
    close(lse, batch.want()[1] * math.log(2))


@pytest.mark.parametrize(("base_e", "factor"), [(False, 1.0), (True, math.log(2))])
def test_an_lse_that_is_handed_over_is_written(base_e, factor):
    batch, one = Batch(), wrapper()
    batch.plan(one)
    lse = torch.full((7, HEADS), 5.0)
    out = one.run(*batch.parts(), lse=lse, return_lse_base_on_e=base_e)
    assert isinstance(out, torch.Tensor)
    close(lse, batch.want()[1] * factor)
    with torch.inference_mode():  # outside of which torch's operators refuse to write what it made
        made = torch.full((7, HEADS), 5.0)
    one.run(*batch.parts(), lse=made, return_lse_base_on_e=base_e)
    assert torch.equal(made, lse)
    with pytest.raises(ValueError, match="lse"):
        one.run(*batch.parts(), lse=lse[:3])


def test_nothing_but_the_outputs_is_written():
    batch, one = Batch(), wrapper()
    batch.plan(one)
    for joined in (True, False):
        parts = batch.parts(joined)
        before = [t.clone() for t in (*parts, batch.indptr, batch.indices)]
        one.run(*parts)
        assert all(map(torch.equal, before, (*parts, batch.indptr, batch.indices)))


def test_a_joint_cache_is_not_copied():
    """The backend gets the caller's memory: keys over both parts, values over the first."""
    seen = {}

    def run(launch, image, io):
        seen.update(k=io.k, v=io.v, q=io.q, ids=image["kv_indices"])

    fake = FakeBackend("fake", paths=(("p", EVERYTHING),), run=run)
    before = plugins.use(registry(fake))
    try:
        batch, one = Batch(), wrapper("fake")
        batch.plan(one)
        one.run(*batch.parts())
        assert seen["k"].data_ptr() == seen["v"].data_ptr() == batch.cache.data_ptr()
        assert seen["q"].data_ptr() == batch.q.data_ptr()
        assert (seen["k"].shape[2:], seen["v"].shape[2:]) == ((1, CKV + KPE), (1, CKV))
        one.run(*batch.parts(False))
        assert seen["k"].data_ptr() != batch.cache.data_ptr()
        assert seen["k"].shape[0] == batch.indices.numel()  # the pages in use, in order
        assert seen["ids"].tolist() == list(range(batch.indices.numel()))
        problem = one._plan_info.query.problem
        assert (problem.latent, problem.num_kv_heads, problem.op) == (True, 1, Op.PREFILL_PAGED)
    finally:
        plugins.use(before)


# Captured: on CPU tensors a graph wrapper keeps the same promises, without the graph.


def captured(batch_size=2, pages=12):
    def i32(n):
        return torch.full((n,), 10**6, dtype=torch.int32)

    return wrapper(
        use_cuda_graph=True, qo_indptr=i32(batch_size + 1), kv_indptr=i32(batch_size + 1),
        kv_indices=i32(pages), kv_len_arr=i32(batch_size),
    )  # fmt: skip


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("behind", [[17], [17, 3, 2**30]])
def test_entries_of_kv_indptr_behind_the_batch_have_no_meaning(behind, graph):
    batch = Batch()
    want, want_lse = batch.want()
    one = captured(4) if graph else wrapper()
    batch.indptr = torch.cat([batch.indptr, torch.tensor(behind, dtype=torch.int32)])
    batch.plan(one)
    out, lse = one.run(*batch.parts(), return_lse=True)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("joined", [True, False])
def test_a_captured_wrapper_is_replayed_for_other_lengths(joined):
    one, launches = captured(), set()
    for lengths in ([30, 4], [1, 17], [5, 5]):
        batch = Batch(4, lengths, [1, 1], seed=sum(lengths))
        batch.plan(one)
        launches.add(one._plan_info.launch)
        out, lse = one.run(*batch.parts(joined), return_lse=True)
        want, want_lse = batch.want()
        close(out, want)
        close(lse, want_lse)
    assert len(launches) == 1


@pytest.mark.parametrize(("room", "copied"), [(12, 12), (13, 13), (14, 13), (2**40, 13)])
def test_parts_that_lie_apart_are_copied_at_most_as_the_cache_is_large(room, copied):
    batch = Batch(4, [30, 10], [1, 1])
    one = captured(pages=min(room, 4096))
    batch.plan(one)
    parts = batch.parts(joined=False)
    assert parts[2].shape[0] == 13
    state = one._planned()
    if room > 4096:  # only the size is asked before it is known not to be needed
        state = replace(state, image={**state.image, "kv_indices": torch.zeros(1).expand(room)})
    assert mla._gathered(state, *parts[2:])[1].shape[0] == copied
    close(one.run(*parts), batch.want()[0])


def test_what_a_graph_holds_is_kept():
    one = captured()
    Batch(4, [30, 4], [1, 1]).plan(one)
    held = one._plan_info
    with pytest.raises(ValueError, match=r"\[core.graph-batch\]"):
        Batch(4, [4], [1]).plan(one)
    with pytest.raises(ValueError, match=r"at most 12 entries.*\[core.graph-pages\]"):
        Batch(4, [30, 20], [1, 1]).plan(one)
    with pytest.raises(ValueError, match=r"mask is frozen at causal"):
        Batch(4, [30, 4], [1, 1]).plan(one, causal=False)
    assert one._plan_info is held


def reserved(batch, pages):
    """Give each request further pages, with ids that no cache has."""
    parts = batch.indices.split(batch.indptr.diff().tolist())
    behind = [torch.full((n,), 10**6, dtype=torch.int32) for n in pages]
    batch.indices = torch.cat([x for pair in zip(parts, behind, strict=True) for x in pair])
    batch.indptr = batch.indptr + ends(pages)
    return batch


@pytest.mark.parametrize("pages", [[1, 0, 0, 0], [0, 2, 0, 0], [0, 0, 0, 3], [2, 1, 4, 1]])
@pytest.mark.parametrize("graph", [False, True])
def test_pages_reserved_behind_the_tokens_are_not_read(pages, graph):
    batch = Batch()
    out, lse = batch.want()
    one = captured(4) if graph else wrapper()
    reserved(batch, pages).plan(one)
    found, sums = one.run(*batch.parts(), return_lse=True)
    torch.testing.assert_close(found, out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums, lse, rtol=1e-5, atol=1e-5)


def test_reserved_pages_are_counted_in_the_indices():
    batch, one = reserved(Batch(), [0, 0, 0, 2]), wrapper()
    batch.indices = batch.indices[:-1]
    with pytest.raises(ValueError, match=r"kv_indices: needs kv_indptr\[-1\] = 11 entries, got 10"):
        batch.plan(one)
    batch.indptr = batch.indptr.flip(0)
    with pytest.raises(ValueError, match=r"kv_indptr\[0\]: needs 0"):
        batch.plan(one)


@pytest.mark.parametrize("missing", ["qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"])
def test_every_graph_buffer_is_needed(missing):
    buffers = {"qo_indptr": 3, "kv_indptr": 3, "kv_indices": 8, "kv_len_arr": 2}
    given = {name: torch.zeros(n, dtype=torch.int32) for name, n in buffers.items() if name != missing}
    with pytest.raises(ValueError, match=rf"{missing}: needs a tensor in CUDA-graph mode"):
        wrapper(use_cuda_graph=True, **given)


# Bad input.


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"lengths": [5, 0, 13, 16]}, r"kv_len_arr\[2\]: needs 0 to 12, what its 3 pages hold, got 13"),
        ({"lengths": [9, 0, 9, 16]}, r"kv_len_arr\[0\]: needs 0 to 8, what its 2 pages hold, got 9"),
        ({"lengths": [5, 1, 9, 16]}, r"kv_len_arr\[1\]: needs 0 to 0, what its 0 pages hold, got 1"),
        ({"lengths": [5, 0, 9, -1]}, r"kv_len_arr\[3\].*got -1 \[core.kv-len\]"),
        ({"lengths": [5, -1, 9, 16]}, r"kv_len_arr\[1\]: needs 0 to 0, what its 0 pages hold, got -1"),
        ({"lengths": [5, 0, 9]}, r"kv_len_arr: needs batch size = 4 entries, got 3"),
        ({"lengths": [5, 0, 9, 16, 1]}, r"kv_len_arr: needs batch size = 4 entries, got 5"),
        ({"indptr": ends([2, 0, 3])}, r"kv_indptr: needs.*got 4 \[core.indptr\]"),
        ({"qo": ends([2, 1, 3])}, r"kv_len_arr: needs batch size = 3 entries, got 4"),
        ({"dims": (0, 8)}, r"head_dim_ckv: needs at least 1, got 0 \[core.head-dim\]"),
        ({"dims": (8, -1)}, r"head_dim_kpe: needs at least 0, got -1 \[core.head-dim\]"),
        ({"page": 0}, r"page_size: needs at least 1, got 0"),
    ],
)
def test_a_plan_that_does_not_fit(changes, text):
    batch, one = Batch(), wrapper()
    batch.plan(one)
    held = one._plan_info
    for name, value in changes.items():
        setattr(batch, name, value)
    with pytest.raises(ValueError, match=text):
        batch.plan(one)
    assert one._plan_info is held


def test_types_and_what_nobody_has():
    batch, one = Batch(), wrapper()
    with pytest.raises(ValueError, match="call plan\\(\\) first"):
        one.run(*batch.parts())
    with pytest.raises(NotImplementedError, match="use_profiler"):
        batch.plan(one, use_profiler=True)
    with pytest.raises(TypeError, match=r"sm_scale: needs a number, got NoneType"):
        one.plan(batch.qo, batch.indptr, batch.indices, batch.lens, HEADS, CKV, KPE, 4, True, None,
                 torch.float32, torch.float32)  # fmt: skip
    batch.plan(one)
    for name in ("profiler_buffer", "kv_len", "page_table", "ckv_scale_arr"):
        with pytest.raises(NotImplementedError, match=name):
            one.run(*batch.parts(), **{name: torch.zeros(1)})
    for name in ("o_scale", "ckv_scale", "kpe_scale"):
        with pytest.raises(NotImplementedError, match=name):
            one.run(*batch.parts(), **{name: 0.5})


@pytest.mark.parametrize(
    ("at", "spoil", "text"),
    [
        (0, lambda t: t[:-1], r"q_nope: needs shape \[7, 5, 32\], got \(6, 5, 32\) \[core.q-shape\]"),
        (1, lambda t: t[..., :4], r"q_pe: needs shape \[7, 5, 8\]"),
        (1, lambda t: t.half(), r"q_pe: needs the planned torch.float32, got torch.float16"),
        (2, lambda t: t[:, :2], r"ckv_cache: needs shape \[pages, 4, 32\]"),
        (2, lambda t: t.double(), r"ckv_cache: needs the planned torch.float32"),
        (3, lambda t: t[:-1], r"kpe_cache: needs shape \[11, 4, 8\], got \(10, 4, 8\) \[core.kv-shape\]"),
        (3, lambda t: t.to("meta"), r"kpe_cache: needs a tensor on cpu"),
    ],
)
def test_a_run_that_does_not_fit(at, spoil, text):
    batch, one = Batch(), wrapper()
    batch.plan(one)
    parts = list(batch.parts(False))
    parts[at] = spoil(parts[at])
    with pytest.raises(ValueError, match=text):
        one.run(*parts)


@pytest.mark.parametrize(("at", "name"), list(enumerate(["q_nope", "q_pe", "ckv_cache", "kpe_cache"])))
def test_a_sparse_part_is_refused(at, name):
    batch = Batch()
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(1 << 20, dtype=torch.uint8))
    batch.plan(wrapper)
    parts = list(batch.parts(joined=False))
    parts[at] = parts[at].to_sparse()
    with pytest.raises(TypeError, match=rf"^{name}: needs a dense tensor, got torch.sparse_coo"):
        wrapper.run(*parts)


def test_a_cache_smaller_than_its_page_ids():
    batch, one = Batch(), wrapper()
    batch.plan(one)
    few = int(batch.indices.max())
    for joined in (True, False):
        q_nope, q_pe, ckv, kpe = batch.parts(joined)
        with pytest.raises(ValueError, match=rf"more than {few} pages.*\[core.kv-rows\]"):
            one.run(q_nope, q_pe, ckv[:few], kpe[:few])


# Routing.


def test_a_path_serves_one_kind_or_both():
    problem = AttentionProblem(
        op=Op.PREFILL_PAGED, num_qo_heads=16, num_kv_heads=1, head_dim_qk=576, head_dim_vo=512,
        q_dtype=torch.bfloat16, kv_dtype=torch.bfloat16, o_dtype=torch.bfloat16, kv=PagedKV(1), latent=True,
    )  # fmt: skip
    narrow = Capability(archs=None, ops=frozenset({Op.PREFILL_PAGED}), head_dims=Dims(values=frozenset({64})))
    for asked, kind, codes in (
        (problem, None, ["core.head-dim"]),
        (problem, False, [LATENT.slug]),
        (replace(problem, latent=False), True, [LATENT.slug]),
        (problem, True, ["core.head-dim"]),
    ):
        found = replace(narrow, latent=kind).refusals(None, asked, None, "x/p")
        assert [reason.code.slug for reason in found] == codes
    assert LATENT.quiet
    with pytest.raises(ValueError, match=r"latent: needs one key/value head"):
        replace(problem, num_kv_heads=2)


def test_a_backend_that_is_named_and_cannot():
    fake = FakeBackend("fake", paths=(("p", replace(EVERYTHING, latent=False)),))
    before = plugins.use(registry(fake))
    try:
        with pytest.raises(NoRoute, match=r"serves keys beside values, got latent attention \[core.latent\]"):
            Batch().plan(wrapper("fake"))
        one = wrapper("auto")
        Batch().plan(one)
        assert (one.backend, one.backend_fallback_reason) == ("reference", None)
    finally:
        plugins.use(before)
