"""Speculative verify: several rows per request, the last tokens of its sequence."""

import math

import pytest
import torch

from attn_core.problem import MaskMode, Op

from .fakes import FakeBackend
from .kit import (
    SIZES,
    close,
    decode_graph,
    decode_wrapper,
    ints,
    oracle,
    paged_wrapper,
    pages,
    planned,
    ragged_wrapper,
    same_bits,
)


def test_default_is_one_row_per_request_and_no_mask():
    wrapper, p, q = planned()
    assert wrapper.q_len_per_req == 1
    problem = wrapper._state.query.problem
    assert (problem.op, problem.mask) == (Op.DECODE, MaskMode.NONE)
    close(wrapper.run(q, p.cache), oracle(q, p.keys, p.values, [1] * 3)[0], 2e-6)


@pytest.mark.parametrize("q_len", [2, 3])
def test_verify_is_causal_from_the_bottom_right(q_len):
    wrapper, p, q = planned(q_len=q_len)
    problem = wrapper._state.query.problem
    assert (problem.op, problem.mask) == (Op.VERIFY, MaskMode.CAUSAL)
    out, lse = wrapper.run(q, p.cache, return_lse=True)
    assert (tuple(out.shape), tuple(lse.shape)) == ((3 * q_len, 4, 8), (3 * q_len, 4))
    want = oracle(q, p.keys, p.values, [q_len] * 3, causal=True)
    close(out, want[0], 2e-6)
    close(lse, want[1], 3e-6)
    last = [q_len * (n + 1) - 1 for n in range(3)]  # these rows see everything: they are plain decode
    plain, _, _ = planned()
    close(out[last], plain.run(q[last], p.cache), 2e-6)


@pytest.mark.parametrize("q_len", [2, 8])
def test_drafts_need_the_matrix_path(q_len):
    wrapper = decode_wrapper(use_tensor_cores=False)
    with pytest.raises(ValueError, match="use_tensor_cores") as caught:
        wrapper.plan(*pages([9]).table, *SIZES, q_len_per_req=q_len)
    assert not isinstance(caught.value, NotImplementedError)


@pytest.mark.parametrize(
    ("bad", "kind"), [(0, ValueError), (-1, ValueError), (True, TypeError), (2.0, TypeError)]
)
def test_q_len_per_req_is_a_positive_int(bad, kind):
    with pytest.raises(kind, match="q_len_per_req: needs"):
        decode_wrapper().plan(*pages([9]).table, *SIZES, q_len_per_req=bad)


def test_scaled_offsets_are_an_array_of_their_own():
    one, _, _ = planned()
    two, _, _ = planned(q_len=3)
    three, _, _ = planned()
    assert one._qo_indptr_buf.tolist() == three._qo_indptr_buf.tolist() == [0, 1, 2, 3]
    assert two._qo_indptr_buf.tolist() == [0, 3, 6, 9]
    assert len({w._qo_indptr_buf.data_ptr() for w in (one, two, three)}) == 3


@pytest.mark.parametrize("kv_lens", [[9, 2, 4], [0, 9], [2]])
def test_drafts_must_have_been_appended(kv_lens):
    p = pages(kv_lens)
    with pytest.raises(ValueError, match=r"kv_len of at least 3.*empty KV range") as caught:
        decode_wrapper().plan(*p.table, *SIZES, q_len_per_req=3)
    at = next(n for n, length in enumerate(kv_lens) if length < 3)
    assert f"kv_len {kv_lens[at]} in request {at}" in str(caught.value)


def test_the_guard_reads_the_pages_and_not_what_the_caller_says():
    p = pages([16], page_size=16)
    with pytest.raises(ValueError, match="seq_lens"):  # 512 is more than the pages hold
        decode_wrapper().plan(*p.table, 4, 2, 8, 16, q_len_per_req=32, seq_lens=ints(512))
    with pytest.raises(ValueError, match="kv_len 16 in request 0"):
        decode_wrapper().plan(*p.table, 4, 2, 8, 16, q_len_per_req=17, seq_lens=ints(16))
    wrapper, p, q = planned([16], q_len=8, seq_lens=ints(3))  # understated: legal, and without effect
    close(wrapper.run(q, p.cache), oracle(q, p.keys, p.values, [8], causal=True)[0], 2e-6)


@pytest.mark.parametrize("q_len", [1, 4])
def test_an_empty_batch_takes_exactly_no_rows(q_len):
    wrapper, p, _ = planned([], q_len=q_len)
    out, lse = wrapper.run(torch.empty(0, 4, 8), p.cache, return_lse=True)
    assert (tuple(out.shape), tuple(lse.shape)) == ((0, 4, 8), (0, 4))
    for rows in (1, q_len, 7):
        with pytest.raises(ValueError, match=f"0 rows.*got {rows}"):
            wrapper.run(torch.empty(rows, 4, 8), p.cache)


@pytest.mark.parametrize("rows", [0, 2, 3, 5, 7, 12])
def test_rows_must_be_batch_times_the_planned_length(rows, use):
    """5 rows for 3 requests once floored to 1 each, and left two rows of out unwritten."""
    fake = use(FakeBackend())
    wrapper, p, _ = planned(q_len=2)
    out = torch.full((rows, 4, 8), math.nan)
    with pytest.raises(
        ValueError, match=rf"6 rows \(batch 3 x planned q_len_per_req 2\), got {rows}.*plan\(\) again"
    ):
        wrapper.run(torch.zeros(rows, 4, 8), p.cache, out=out)
    assert fake.count("run") == 0
    assert out.isnan().all()


def test_a_wrapper_without_matrix_path_is_not_told_to_plan_what_it_cannot():
    p, wrapper = pages([9, 3]), decode_wrapper(use_tensor_cores=False)
    wrapper.plan(*p.table, *SIZES, q_data_type="float32")
    with pytest.raises(ValueError, match="use_tensor_cores=True") as caught:
        wrapper.run(torch.zeros(4, 4, 8), p.cache)
    assert "plan() again" not in str(caught.value)


def test_q_len_per_req_at_run_is_deprecated_and_checked():
    wrapper, p, q = planned(q_len=2)
    with pytest.warns(DeprecationWarning, match="q_len_per_req") as caught:
        out = wrapper.run(q, p.cache, q_len_per_req=2)
    assert caught[0].filename == __file__
    assert same_bits(out, wrapper.run(q, p.cache))
    with (
        pytest.warns(DeprecationWarning, match="deprecated"),
        pytest.raises(ValueError, match="planned 2, got 1"),
    ):
        wrapper.run(q, p.cache, q_len_per_req=1)
    with pytest.warns(DeprecationWarning, match="deprecated"), pytest.raises(ValueError, match="6 rows"):
        wrapper.run(q[:3], p.cache, q_len_per_req=2)


@pytest.mark.parametrize("graph", [False, True])
def test_run_needs_a_plan(graph):
    wrapper, p = (decode_graph(2, 8) if graph else decode_wrapper()), pages([9, 3])
    for call in (
        lambda: wrapper.run(torch.zeros(2, 4, 8), p.cache),
        lambda: wrapper.run(torch.zeros(2, 4, 8), p.cache, q_len_per_req=1),
        lambda: wrapper.run(torch.zeros(2, 4, 8), p.cache, window_left=3),
        lambda: wrapper.forward(torch.zeros(2, 4, 8), p.cache),
    ):
        with pytest.raises(ValueError, match=r"call plan\(\) first"):
            call()
    with pytest.raises(ValueError, match="page_size"):
        wrapper.plan(*p.table, 4, 2, 8, 0)
    with pytest.raises(ValueError, match=r"call plan\(\) first"):
        wrapper.run(torch.zeros(2, 4, 8), p.cache)


def test_everything_outsiders_read_exists_from_the_start():
    for wrapper in (decode_wrapper(use_tensor_cores=False), paged_wrapper(), ragged_wrapper()):
        assert wrapper._plan_info is None
        assert wrapper._qo_indptr_buf is None
        assert (wrapper._backend, wrapper.backend, wrapper.route) == ("auto", "auto", None)
        assert wrapper.backend_fallback_reason is None
        assert wrapper.owned_bytes == 0
    assert decode_wrapper().q_len_per_req is None
    assert decode_graph(3, 4, use_tensor_cores=False)._qo_indptr_buf.tolist() == [0, 1, 2, 3]
    wrapper, _, _ = planned()
    assert wrapper._plan_info is wrapper._state
    assert (wrapper._backend, wrapper.route.candidate) == ("reference", "reference/torch")
