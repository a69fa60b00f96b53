"""What plan() makes of arguments in unusual forms."""

import pytest
import torch

from attn_core.batch import paged_batch, ragged_batch
from attn_core.prefill import BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper

from .kit import SIZES, decode_wrapper, ints, offsets, paged_wrapper, pages, workspace


def every_other(t):
    """The same numbers with a stride of 2, and others between them."""
    return torch.stack([t, t - 1], 1)[:, 0]


def test_index_arrays_reach_backends_contiguous():
    """Native code gets their addresses: a stride would be read as other numbers."""
    given = [every_other(ints(*values)) for values in ([0, 2, 5], [0, 1, 3], [4, 0, 2], [3, 1])]
    assert not any(t.is_contiguous() for t in given)
    batch = paged_batch(*given, 4)
    for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len", "kv_len"):
        assert getattr(batch, name).is_contiguous(), name
    assert batch.qo_indptr.tolist() == [0, 2, 5]
    assert batch.kv_indices.tolist() == [4, 0, 2]
    ragged = ragged_batch(given[0], given[0])
    assert ragged.qo_indptr.is_contiguous()
    assert ragged.kv_indptr.is_contiguous()


@pytest.mark.parametrize("qo_indptr", [2, True, None, [0, 1, 2], (0, 1, 2)])
def test_a_prefill_takes_no_number_of_rows_for_its_qo_indptr(qo_indptr):
    cache = pages([5, 3])
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace())
    with pytest.raises(TypeError, match=r"qo_indptr: needs an int32 tensor.*\[core\.index-type\]"):
        wrapper.plan(qo_indptr, *cache.table, 4, 2, 8, 4)


@pytest.mark.parametrize(
    "option", ["logits_soft_cap", "sm_scale", "q_data_type", "window_left", "o_data_type"]
)
def test_an_option_that_cannot_be_looked_up_is_named(option):
    cache = pages([5, 3])
    want = rf"{option}: needs a number, a string or a dtype, got list \[core\.arguments\]"
    with pytest.raises(TypeError, match=want):
        decode_wrapper().plan(*cache.table, 4, 2, 8, 4, **{option: [1.0]})


@pytest.mark.parametrize("name", ["max_sequence_kv", "max_token_per_sequence"])
@pytest.mark.parametrize("value", ["9", 9.0, True, torch.tensor(9)])
def test_a_stated_maximum_is_an_int(name, value):
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace())
    with pytest.raises(TypeError, match=rf"{name}: needs an int.*\[core\.max-length\]"):
        wrapper.plan(ints(0, 2), ints(0, 5), 4, 2, 8, **{name: value})


@pytest.mark.parametrize("entries", [0, 1, 3, 5])
def test_last_page_lengths_of_another_batch_are_named(entries):
    p = pages([9, 3])
    last = torch.ones(entries, dtype=torch.int32)
    named = (
        rf"kv_last_page_len: needs 2 entries, as kv_indptr has .* 3, got {entries}, .* \[core\.last-page\]"
    )
    with pytest.raises(ValueError, match=named):
        decode_wrapper().plan(p.indptr, p.indices, last, *SIZES)
    with pytest.raises(ValueError, match=named):
        paged_wrapper().plan(offsets([1, 2]), p.indptr, p.indices, last, *SIZES)
    three = offsets([1, 2, 1]), p.indptr, p.indices, ints(1, 1, 1)
    with pytest.raises(ValueError, match=r"kv_indptr: needs batch size \+ 1 = 4 entries, got 3"):
        paged_wrapper().plan(*three, *SIZES)
