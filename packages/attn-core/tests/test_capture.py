"""What may be called while a graph is captured, shown with a flag in place of a stream."""

import copy
import pickle

import pytest
import torch

from attn_core import arguments, capture, single
from attn_core.attention import BatchAttention
from attn_core.capability import Capability, GraphSupport
from attn_core.cascade import MultiLevelCascadeAttentionWrapper
from attn_core.decode import BatchDecodeWithPagedKVCacheWrapper, single_decode_with_kv_cache
from attn_core.fast_plan import fast_decode_plan
from attn_core.mla import BatchMLAPagedAttentionWrapper
from attn_core.pod import BatchPODWithPagedKVCacheWrapper
from attn_core.prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache,
)
from attn_core.problem import Op
from attn_core.sparse import BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper

from .fakes import FakeBackend
from .kit import SIZES, ints, paged_wrapper, pages, workspace


@pytest.fixture
def stream(monkeypatch):
    """Call it to say whether the current stream is being captured."""
    now = [False]
    monkeypatch.setattr(capture, "capturing", lambda device: now[0])

    def say(on):
        now[0] = on

    yield say
    single._mine.__dict__.clear()


QO = ints(0, 2, 3)
TABLE = pages([7, 5]).table
BLOCKS = ints(0, 1, 2), ints(0, 1)
SIZES_OF_BLOCKS = torch.tensor([[2, 2]])
MAP = torch.eye(2, dtype=torch.bool)[None]


def _away(*arrays):
    """The same arrays on a device that nothing can be fetched from, as during a capture."""
    return [array.to("meta") for array in arrays]


def _decode(space=None):
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace() if space is None else space)
    wrapper.plan(*TABLE, *SIZES)
    return wrapper


def _planner(wrapper):
    """Return what holds the plan of a wrapper."""
    return getattr(wrapper, "_paged", getattr(wrapper, "_prefill", wrapper))


# Constructor, arrays, and a plan of a wrapper with such arrays.
PLANS = {
    "decode": (BatchDecodeWithPagedKVCacheWrapper, TABLE, lambda w, *a: w.plan(*a, *SIZES)),
    "fast": (_decode, TABLE, lambda w, *a: fast_decode_plan(w, *a, *SIZES)),
    "paged": (BatchPrefillWithPagedKVCacheWrapper, (QO, *TABLE), lambda w, *a: w.plan(*a, *SIZES)),
    "ragged": (BatchPrefillWithRaggedKVCacheWrapper, (QO, QO), lambda w, *a: w.plan(*a, 4, 2, 8)),
    "latent": (
        BatchMLAPagedAttentionWrapper,
        (QO, *TABLE[:2], ints(7, 5)),
        lambda w, *a: w.plan(*a, 4, 8, 4, 4, True, 1.0, torch.float32, torch.float32),
    ),
    "attention": (
        BatchAttention,
        (QO, *TABLE[:2], ints(7, 5)),
        lambda w, *a: w.plan(*a, 4, 2, 8, 8, 4),
    ),
    "cascade": (
        lambda space: MultiLevelCascadeAttentionWrapper(2, space),
        (QO, *TABLE),
        lambda w, *a: w.plan(*([array] * 2 for array in a), *SIZES),
    ),
    "two batches": (
        BatchPODWithPagedKVCacheWrapper,
        (QO, *TABLE),
        lambda w, *a: w.plan(*a, *a, *SIZES),
    ),
    "blocks": (BlockSparseAttentionWrapper, BLOCKS, lambda w, *a: w.plan(*a, 4, 4, 2, 2, 4, 2, 8)),
    "block sizes": (
        VariableBlockSparseAttentionWrapper,
        (MAP, SIZES_OF_BLOCKS, SIZES_OF_BLOCKS),
        lambda w, *a: w.plan(*a, 2, 1, 8),
    ),
    "block map": (
        VariableBlockSparseAttentionWrapper,
        (MAP,),
        lambda w, *a: w.plan(*a, SIZES_OF_BLOCKS, SIZES_OF_BLOCKS, 2, 1, 8),
    ),
}
REFUSED = r"plan: needs a call outside.*core\.plan-in-capture"


def _make(kind, device):
    make = PLANS[kind][0]
    if make is BatchAttention:
        return make(device=device)
    return make(torch.empty(1 << 20, dtype=torch.uint8, device=device))


@pytest.mark.parametrize("kind", PLANS)
def test_a_plan_during_capture_is_refused_before_an_index_is_fetched(kind, stream):
    """Fetching what lies on the device would end the capture with an error of the runtime's."""
    _, arrays, plan = PLANS[kind]
    wrapper = _make(kind, "meta")
    with pytest.raises(NotImplementedError, match="meta"):  # so a fetch cannot be missed
        plan(wrapper, *_away(*arrays))
    stream(True)
    with pytest.raises(RuntimeError, match=REFUSED):
        plan(wrapper, *_away(*arrays))


@pytest.mark.parametrize("kind", PLANS)
def test_a_plan_of_host_arrays_during_capture_leaves_the_one_in_force(kind, stream):
    _, arrays, plan = PLANS[kind]
    wrapper = _make(kind, "cpu")
    plan(wrapper, *arrays)
    before = getattr(_planner(wrapper), "_state", None)
    stream(True)
    with pytest.raises(RuntimeError, match=REFUSED):
        plan(wrapper, *arrays)
    assert getattr(_planner(wrapper), "_state", None) is before


@pytest.mark.parametrize("which", ["custom_mask", "packed_custom_mask"])
def test_a_mask_during_capture_is_refused_before_it_is_copied(which, stream, monkeypatch):
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace())
    mask = torch.ones(2 * 7 + 5, dtype=torch.bool)
    mask = mask if which == "custom_mask" else torch.ones(3, dtype=torch.uint8)

    def copied(*_, **__):
        raise AssertionError("a mask was copied")

    for name in ("_pack", "_packed"):
        monkeypatch.setattr(arguments, name, copied)
    stream(True)
    with pytest.raises(RuntimeError, match=REFUSED):
        wrapper.plan(QO, *TABLE, *SIZES, **{which: mask})


def tensors(rows=1, kv_len=9, seed=1):
    make = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, 4, 8, generator=make)
    k, v = (torch.randn(kv_len, 2, 8, generator=make) for _ in range(2))
    return q, k, v


CALLS = {
    "decode": lambda q, k, v, **o: single_decode_with_kv_cache(q[0], k, v, **o),
    "prefill": lambda q, k, v, **o: single_prefill_with_kv_cache(q, k, v, causal=True, **o),
}


@pytest.mark.parametrize("kind", CALLS)
def test_a_single_call_is_captured_after_one_with_its_shapes(kind, stream):
    call = CALLS[kind]
    want = call(*tensors(), return_lse=True)
    planned = dict(single._captured)
    stream(True)
    found = call(*tensors(), return_lse=True)
    assert all(map(torch.equal, found, want))
    (state,) = [s for key, s in single._captured.items() if key not in planned]
    # Sixteen other shapes later the graph's index arrays are still where they were.
    image = {name: t.data_ptr() for name, t in state.image.items()}
    stream(False)
    for kv_len in range(20, 40):
        call(*tensors(kv_len=kv_len))
    assert {name: t.data_ptr() for name, t in single._captured[id(state)].image.items()} == image


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize(
    "other", [{"kv_len": 10}, {"window_left": 3}, {"logits_soft_cap": 2.0}, {"sm_scale": 0.5}], ids=str
)
def test_a_single_call_with_other_facts_is_refused(kind, other, stream):
    call, other = CALLS[kind], dict(other)
    call(*tensors(kv_len=9))
    stream(True)
    with pytest.raises(RuntimeError, match=r"needs one call with these shapes.*core\.eager-in-capture"):
        call(*tensors(kv_len=other.pop("kv_len", 9)), **other)


def test_a_captured_call_has_a_workspace_of_its_own(stream, use):
    backend, used = use(FakeBackend("fake")), []
    real_run = backend.run
    backend.run = lambda launch, image, io: (used.append(io.workspace), real_run(launch, image, io))
    CALLS["prefill"](*tensors())
    stream(True)
    CALLS["prefill"](*tensors())
    CALLS["prefill"](*tensors())
    assert len({id(workspace) for workspace in used}) == 3


def test_a_mask_and_a_kernel_that_cannot_be_captured_are_refused(stream, use):
    q, k, v = tensors(rows=3)
    mask = torch.ones(3, 9, dtype=torch.bool)
    single_prefill_with_kv_cache(q, k, v, custom_mask=mask)
    stream(True)
    with pytest.raises(RuntimeError, match=r"custom_mask: needs a call outside graph capture"):
        single_prefill_with_kv_cache(q, k, v, custom_mask=mask)
    stream(False)
    never = Capability(archs=None, ops=frozenset({Op.PREFILL_SINGLE}), graph=GraphSupport.NEVER)
    use(FakeBackend("fake", paths=(("p", never),)))
    single_prefill_with_kv_cache(q, k, v)
    stream(True)
    with pytest.raises(RuntimeError, match=r"needs a kernel that can be captured.*got fake/p"):
        single_prefill_with_kv_cache(q, k, v)


def test_layers_of_a_model_share_a_plan(use, monkeypatch):
    backend, batches = use(FakeBackend("fake")), []
    made = single.single_batch
    monkeypatch.setattr(single, "single_batch", lambda *n: batches.append(n) or made(*n))
    for step in range(3):
        for layer in range(4):
            CALLS["prefill"](*tensors(kv_len=9 + step, seed=layer))
    assert sum(call[0] == "plan" for call in backend.calls) == 3
    assert sum(call[0] == "run" for call in backend.calls) == 12
    assert batches == [(1, 9), (1, 10), (1, 11)]  # not one for every call: it costs more than the call


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda f: f.__name__)
def test_a_wrapper_is_not_copied(how):
    with pytest.raises(TypeError, match=r"BatchDecodeWithPagedKVCacheWrapper: needs to be .*\[core\.copy\]"):
        how(_decode())
    with pytest.raises(TypeError, match=r"BatchPrefillWithPagedKVCacheWrapper: needs to be .*\[core\.copy\]"):
        copy.deepcopy({"model": MultiLevelCascadeAttentionWrapper(2, workspace())})


def test_an_eager_wrapper_that_is_captured_is_named_with_what_it_lacks(stream):
    wrapper = paged_wrapper()
    stream(True)
    with pytest.raises(RuntimeError) as told:
        wrapper._refuse_eager_capture()
    for word in ("use_cuda_graph=True, got", "BatchPrefillWithPagedKVCacheWrapper", "use_cuda_graph=False"):
        assert word in str(told.value)
