"""Every wrapper in a compiled region: exact, or refused by name before anything happens."""

import pytest
import torch
import torch._dynamo.testing

from attn_compile.testing.copies import Allocations
from attn_core import (
    BatchAttention,
    BatchAttentionWithAttentionSinkWrapper,
    BatchDecodeWithPagedKVCacheWrapper,
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchMLAPagedAttentionWrapper,
    BatchPODWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    BlockSparseAttentionWrapper,
    MultiLevelCascadeAttentionWrapper,
    PODWithPagedKVCacheWrapper,
    VariableBlockSparseAttentionWrapper,
    append_paged_mla_kv_cache,
)

PAGES, PAGE, HKV, HQ, DIM = 8, 4, 2, 4, 16
CKV, KPE = 32, 16
F32 = torch.float32


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


QO, INDPTR, INDICES, LAST, LENGTHS = i32(0, 3, 5), i32(0, 3, 5), i32(4, 2, 0, 7, 1), i32(2, 3), i32(10, 7)
TABLE = INDPTR, INDICES, LAST
SIZES = HQ, HKV, DIM, PAGE


def workspace():
    return torch.empty(1 << 14, dtype=torch.uint8)


def rows(n=5):
    return torch.randn(n, HQ, DIM)


def keys(n):
    return torch.randn(n, HKV, DIM)


def cache():
    """A layer of a pool: not at the start of its allocation."""
    return torch.randn(2, PAGES, 2, PAGE, HKV, DIM)[1]


def paged():
    w = BatchPrefillWithPagedKVCacheWrapper(workspace())
    w.plan(QO, *TABLE, *SIZES, causal=True, q_data_type=F32)
    return w


def ragged():
    w = BatchPrefillWithRaggedKVCacheWrapper(workspace())
    w.plan(QO, i32(0, 4, 9), HQ, HKV, DIM, causal=True, q_data_type=F32)
    return w.run_return_lse, (rows(), keys(9), keys(9))


def decode():
    w = BatchDecodeWithPagedKVCacheWrapper(workspace())
    w.plan(*TABLE, *SIZES, q_data_type=F32, needs_lse=True)
    # The method is looked up inside the region.
    return lambda q, c: w.run_return_lse(q, c), (rows(2), cache())


def forward():
    """The deprecated name: what it changes is in the scale of q, or is what was planned."""
    w = paged()
    return lambda q, c: w.forward_return_lse(q, c, True, sm_scale=0.3, k_scale=0.5), (rows(), cache())


def cascade(levels=2):
    w = MultiLevelCascadeAttentionWrapper(levels, workspace())
    per_level = (
        ([i32(0, 5), QO], [i32(0, 2), i32(0, 2, 4)], [i32(3, 5), i32(4, 2, 0, 7)], [i32(4), LAST])
        if levels == 2
        else tuple([t] for t in (QO, *TABLE))
    )
    w.plan(*per_level, *SIZES, causal=True, q_data_type=F32)
    return w.run, (rows(), cache())


def cascade_of_one():
    return cascade(1)


def shared_prefix_decode():
    w = BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace())
    w.begin_forward(*TABLE, *SIZES, F32)
    return w.forward, (rows(2), keys(6), keys(6), cache())


def shared_prefix_prefill():
    w = BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace())
    w.begin_forward(QO, *TABLE, *SIZES, F32)
    return w.forward, (rows(), keys(6), keys(6), cache())


def pod():
    w = PODWithPagedKVCacheWrapper(workspace())
    w.plan(*TABLE, *SIZES, q_data_type=F32)
    return lambda *x: w.run(*x, causal_p=True), (rows(), keys(7), keys(7), rows(2), cache())


def batch_pod(**options):
    w = BatchPODWithPagedKVCacheWrapper(workspace())
    w.plan(QO, *TABLE, i32(0, 1, 2), *TABLE, *SIZES, q_data_type=F32)
    return lambda *x: w.run(*x, return_lse=True, **options), (rows(), cache(), rows(2), cache())


def batch_attention(cap=0.0):
    w = BatchAttention(device="cpu")
    w.plan(
        QO, INDPTR, INDICES, LENGTHS, HQ, HKV, DIM, DIM, PAGE, True,
        q_data_type=F32, kv_data_type=F32, logits_soft_cap=5.0,
    )  # fmt: skip
    return lambda q, c: w.run(q, c, v_scale=0.5, logits_soft_cap=cap), (rows(), cache())


def attention_sink():
    w = BatchAttentionWithAttentionSinkWrapper(workspace())
    w.plan(QO, *TABLE, *SIZES, causal=True, q_data_type=F32)

    def run(q, c, sink, out, lse):
        got = w.run(q, c, sink, 0.3, return_lse=True)
        w.run(q * 2, c, sinks=sink, out=out[1], lse=lse[1])
        return got

    buffers = torch.zeros(2, 5, HQ, DIM), torch.zeros(2, 5, HQ)
    return run, (rows(), cache(), torch.randn(HQ), *buffers)


def block_sparse():
    w = BlockSparseAttentionWrapper(workspace())
    w.plan(i32(0, 2, 3), i32(0, 2, 1), 5, 12, 3, 4, HQ, HKV, DIM, q_data_type=F32, o_data_type=F32)
    return w.run, (rows(), keys(12), keys(12))


def variable_block_sparse():
    w = VariableBlockSparseAttentionWrapper(workspace())
    kept = torch.tensor([[[1, 0, 1], [0, 1, 1]], [[1, 1, 0], [1, 0, 0]]])
    sizes = i32(3, 2, 1, 4).view(2, 2), i32(4, 3, 5, 2, 2, 8).view(2, 3)
    w.plan(kept, *sizes, HQ, HKV, DIM, q_data_type=F32)
    heads = torch.randn(HQ, 5, DIM), torch.randn(HKV, 12, DIM), torch.randn(HKV, 12, DIM)

    def run(q, k, v, out, lse):
        w.run(q * 2, k, v, out, lse)
        return w.run(q, k, v, return_lse=True)

    return run, (*heads, torch.zeros(HQ, 5, DIM), torch.zeros(HQ, 5))


def latent():
    w = BatchMLAPagedAttentionWrapper(workspace())
    w.plan(QO, INDPTR, INDICES, LENGTHS, HQ, CKV, KPE, PAGE, True, 0.2, F32, F32)
    return w


def queries():
    return torch.randn(5, HQ, CKV), torch.randn(5, HQ, KPE)


def mla():
    w = latent()

    def run(q, pe, ckv, kpe, out, lse):
        w.run(q * 2, pe, ckv, kpe, out=out[1], lse=lse[1])
        return (*w.run(q, pe, ckv, kpe, return_lse=True, return_lse_base_on_e=True), w.run(q, pe, ckv, kpe))

    parts = torch.randn(2, PAGES, PAGE, CKV)[1], torch.randn(2, PAGES, PAGE, KPE)[1]
    return run, (*queries(), *parts, torch.zeros(2, 5, HQ, CKV), torch.zeros(2, 5, HQ))


EXACT = (
    ragged, decode, forward, cascade, cascade_of_one, shared_prefix_decode, shared_prefix_prefill, pod,
    batch_pod, batch_attention, attention_sink, block_sparse, variable_block_sparse, mla,
)  # fmt: skip


def same(got, want):
    if not isinstance(want, torch.Tensor):
        return len(got) == len(want) and all(map(same, got, want))
    return got.dtype is want.dtype and got.stride() == want.stride() and torch.equal(got, want)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("case", EXACT, ids=lambda case: case.__name__)
def test_a_compiled_run_equals_the_eager_one(case, dynamic):
    torch.manual_seed(0)
    run, args = case()
    # Clones would lie at the start of their allocation; the caller's tensors do not.
    mine, theirs = [t.clone() for t in args], list(args)
    want = run(*mine)
    got = torch.compile(lambda *a: run(*a), fullgraph=True, dynamic=dynamic)(*theirs)
    assert same(got, want)
    assert same(theirs, mine)


def refused():
    """By name: the wrapper or the text that names the refusal, and a call that plans."""
    index = (QO, INDPTR, INDICES, LENGTHS)
    w, mla_, mixed, many, two, equal, free = (
        BatchPrefillWithPagedKVCacheWrapper(workspace()), BatchMLAPagedAttentionWrapper(workspace()),
        BatchAttention(device="cpu"), MultiLevelCascadeAttentionWrapper(1, workspace()),
        BatchPODWithPagedKVCacheWrapper(workspace()), BlockSparseAttentionWrapper(workspace()),
        VariableBlockSparseAttentionWrapper(workspace()),
    )  # fmt: skip
    kept = torch.ones(HKV, 2, 2)
    run, args = batch_pod(causal_p=True)
    capped, asked = batch_attention(cap=3.0)
    planned, given = paged(), (rows(), cache())
    return {
        "paged": (w, lambda: w.plan(QO, *TABLE, *SIZES)),
        "mla": (mla_, lambda: mla_.plan(*index, HQ, CKV, KPE, PAGE, True, 0.2, F32, F32)),
        "batch attention": (mixed, lambda: mixed.plan(*index, HQ, HKV, DIM, DIM, PAGE)),
        "cascade": (many, lambda: many.plan(*([t] for t in (QO, *TABLE)), *SIZES)),
        "batch pod": (two, lambda: two.plan(QO, *TABLE, i32(0, 1, 2), *TABLE, *SIZES)),
        "block sparse": (equal, lambda: equal.plan(i32(0, 1), i32(0), 3, 4, 3, 4, HQ, HKV, DIM)),
        "variable": (free, lambda: free.plan(
            kept, i32(3, 2, 1, 4).view(2, 2), i32(4, 3, 5, 2).view(2, 2), HQ, HKV, DIM)),
        "batch pod, another mask": (two, lambda: run(*args)),
        "another cap": ("another logits_soft_cap than planned", lambda: capped(*asked)),
        "another window": (
            "another window_left than planned",
            lambda: planned.forward(*given, causal=True, window_left=2),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", refused())
def test_what_would_plan_is_refused_by_name(name):
    what, call = refused()[name]
    what = what if isinstance(what, str) else type(what).__name__
    with pytest.raises(Exception, match=rf"{what}: plan\(\) under torch\.compile.*core\.traced-plan"):
        torch.compile(call, fullgraph=True, backend="eager")()
    call()


def test_a_run_after_a_refused_call_is_what_was_planned():
    w, (q, c) = paged(), (rows(), cache())
    want = w.run(q, c)
    step = torch.compile(lambda q, c: w.forward(q, c, causal=False), fullgraph=True, backend="eager")
    assert torch.equal(step(q, c), want)  # causal=False is what upstream's default cannot mean
    with pytest.raises(Exception, match="traced-plan"):
        torch.compile(lambda q, c: w.forward(q, c, window_left=1), fullgraph=True, backend="eager")(q, c)
    assert torch.equal(w.run(q, c), want)


LATENT_CACHES = {
    "separate": lambda n: (torch.randn(2, n, PAGE, CKV)[1], torch.randn(2, n, PAGE, KPE)[1]),
    "parts of one": lambda n: torch.randn(2, n, PAGE, CKV + KPE)[1].split((CKV, KPE), -1),
}


@pytest.mark.parametrize("dynamic", [False, None, True], ids=["static", "automatic", "dynamic"])
@pytest.mark.parametrize("layout", LATENT_CACHES)
def test_a_latent_cache_is_appended_to_and_attended_to_in_one_region(layout, dynamic):
    w = latent()

    def step(q, pe, ckv, kpe, new, rotary):
        before = w.run(q, pe, ckv, kpe)
        place = i32(0, 1), i32(9, 6), ckv, kpe, INDICES, INDPTR, LAST
        append_paged_mla_kv_cache(new, rotary, *place)
        return before, w.run(q, pe, ckv, kpe)

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    for pages in (40, 44) if dynamic is not False else (40,):
        ckv, kpe = LATENT_CACHES[layout](pages)
        args = (*queries(), ckv, kpe, torch.randn(2, CKV), torch.randn(2, KPE))
        mine = [t.clone() for t in args]
        want = step(*mine)
        with Allocations() as seen:
            got = compiled(*args)
        assert same(got, want)
        assert all(map(torch.equal, args, mine))
        assert not torch.equal(want[0], want[1])
        assert not seen.at_least(kpe.numel() * 4)


def test_an_append_to_a_latent_cache_whose_parts_do_not_fit_writes_neither():
    ckv, kpe = torch.zeros(PAGES, PAGE, CKV), torch.zeros(PAGES, PAGE, KPE)

    def step(new, rotary):
        append_paged_mla_kv_cache(new, rotary, i32(0, 1), i32(9, 6), ckv, kpe, INDICES, INDPTR, LAST)

    with pytest.raises(Exception, match=r"append_value: needs.*core\.append-shape"):
        torch.compile(step, fullgraph=True)(torch.ones(2, CKV), torch.ones(2, KPE + 1))
    assert not ckv.any()


REPLANNED = {
    "decode": (BatchDecodeWithPagedKVCacheWrapper, lambda w, n: w.plan(
        i32(0, n, 2 * n), torch.arange(2 * n).int(), i32(2, 3), *SIZES, q_data_type=F32), 2),
    "prefill": (BatchPrefillWithPagedKVCacheWrapper, lambda w, n: w.plan(
        QO, i32(0, n, 2 * n), torch.arange(2 * n).int(), i32(2, 3), *SIZES, causal=True, q_data_type=F32), 5),
}  # fmt: skip


@pytest.mark.parametrize("kind", REPLANNED)
@pytest.mark.parametrize("dynamic", [False, None], ids=["static", "default"])
def test_twenty_plans_of_growing_length_compile_once_and_never_meet_the_limit(kind, dynamic):
    make, plan, count = REPLANNED[kind]
    wrapper, counter = make(workspace()), torch._dynamo.testing.CompileCounter()
    big = torch.randn(64, 2, PAGE, HKV, DIM)

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.wrapper = wrapper

        def forward(self, q, c):
            return self.wrapper.run(q, c) * 1.0

    layer = Layer()
    step = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=counter)
    with torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True):
        for n in range(2, 22):
            plan(wrapper, n)
            q = rows(count)
            assert torch.equal(step(q, big), layer(q, big))
    assert counter.frame_count == 1
