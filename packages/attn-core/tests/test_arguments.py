"""Arguments of plan(): lengths, types, positions, and what is refused."""

import functools

import pytest
import torch

from .kit import (
    E4M3FN,
    SIZES,
    Snapshot,
    close,
    decode_wrapper,
    ints,
    offsets,
    oracle,
    paged_wrapper,
    pages,
    planned,
    queries,
    ragged_wrapper,
    same_bits,
)


def test_seq_lens_buffers_are_cut_to_the_batch_and_their_tail_is_not_read():
    want, p, q = planned()
    for lens in (
        ints(9, 3, 12),
        ints(9, 3, 12, 10**6, -5),
        ints(0, 0, 0),
        ints(9, 3, 12).view(3, 1),
        torch.tensor([9, 3, 12, 77]),
        ints(9, 3, 12, 77).to(torch.uint32),
    ):
        wrapper, _, _ = planned(seq_lens=lens)
        assert same_bits(wrapper.run(q, p.cache), want.run(q, p.cache))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (ints(9, 3), "at least batch size 3 entries, got 2"),
        (ints(9, 4, 12), r"seq_lens\[1\]: needs at most 3, .* got 4"),
        (torch.tensor([2**40, 3, 12]), r"seq_lens\[0\]: needs a value that fits int32"),
        (ints(-1, 3, 12).to(torch.uint32), r"seq_lens\[0\]: needs a value that fits int32, got 4294967295"),
        (ints(9, 4, 12).to(torch.uint32), r"seq_lens\[1\]: needs at most 3, .* got 4"),
        (torch.tensor([9.0, 3.0, 12.0]), "seq_lens: needs dtype int32"),
        ([9, 3, 12], "seq_lens: needs an int32 tensor, got list"),
    ],
)
def test_seq_lens_that_contradict_the_pages_are_refused(given, message):
    with pytest.raises((ValueError, TypeError), match=message):
        planned(seq_lens=given)
    p = pages([9, 3, 12])
    with pytest.raises((ValueError, TypeError), match=message):
        ragged_wrapper().plan(offsets([1, 1, 1]), offsets(p.kv_lens), 4, 2, 8, seq_lens=given)


def test_stated_lengths_are_only_checked():
    """max_token_per_sequence left a variable unbound upstream; seq_lens_q must be what qo_indptr says."""
    p = pages([9, 3, 12])
    stated = {"max_token_per_sequence": 4, "max_sequence_kv": 12, "seq_lens_q": ints(4, 1, 2, 99)}
    for wrapper, first in ((paged_wrapper(), p.table), (ragged_wrapper(), (offsets(p.kv_lens),))):
        sizes = SIZES if len(first) == 3 else SIZES[:3]
        plan = functools.partial(wrapper.plan, offsets([4, 1, 2]), *first, *sizes, q_data_type="float32")
        plan()
        launch = wrapper._state.launch
        plan(**stated)
        assert wrapper._state.launch == launch
        plan(seq_lens_q=ints(4, 1, 2).to(torch.uint32))
        for name, bad, message in (
            ("max_token_per_sequence", 3, "at least 4.*got 3"),
            ("max_sequence_kv", 11, "at least 12.*got 11"),
            ("seq_lens_q", ints(4, 2, 1), r"seq_lens_q\[1\]: needs 1,.*got 2"),
            ("seq_lens_q", ints(4, 1), "batch size 3 entries, got 2"),
            ("seq_lens_q", [4, 1, 2], "an int32 tensor, got list"),
        ):
            with pytest.raises(
                (ValueError, TypeError), match=f"{name}.*{message}" if "[" not in message else message
            ):
                plan(**{name: bad})


def test_a_request_without_pages_has_no_keys_whatever_its_last_page_says():
    p = pages([9, 0, 12])
    q = queries(3, 4, 8)
    for last in (0, 1, 4, -3, 99):
        wrapper = decode_wrapper()
        wrapper.plan(p.indptr, p.indices, ints(1, last, 4), *SIZES, q_data_type="float32")
        out, lse = wrapper.run(q, p.cache, return_lse=True)
        assert torch.equal(out[1], torch.zeros(4, 8))
        assert lse[1].isneginf().all()
        assert wrapper._state.query.batch.total_kv == 21


@pytest.mark.parametrize("which", ["indptr", "indices", "last", "all"])
def test_int64_arrays_mean_the_same(which):
    want, p, q = planned()
    table = [
        t.long() if which in (name, "all") else t
        for name, t in zip(("indptr", "indices", "last"), p.table, strict=True)
    ]
    wrapper = decode_wrapper()
    wrapper.plan(*table, *SIZES, q_data_type="float32")
    assert same_bits(wrapper.run(q, p.cache), want.run(q, p.cache))


def test_arrays_too_large_for_int32_are_refused():
    big = torch.tensor([0, 2**31 + 1])
    with pytest.raises(ValueError, match=r"kv_indptr\[1\]: needs a value that fits int32, got 2147483649"):
        decode_wrapper().plan(big, ints(0), ints(1), *SIZES)
    with pytest.raises(ValueError, match="tokens per request"):
        decode_wrapper().plan(ints(0, 2**20), torch.zeros(2**20, dtype=torch.int32), ints(1), 4, 2, 8, 4096)


def test_one_type_for_all_reaches_q_too_but_an_8_bit_one_means_the_cache():
    p = pages([9, 3, 12], dtype=torch.bfloat16)
    for options, want in (
        ({}, (torch.float16, torch.float16, torch.float16)),
        ({"data_type": torch.bfloat16}, (torch.bfloat16,) * 3),
        ({"data_type": "float8_e4m3fn"}, (torch.float16, E4M3FN, torch.float16)),
        (
            {"data_type": torch.float32, "q_data_type": torch.bfloat16},
            (torch.bfloat16, torch.float32, torch.bfloat16),
        ),
        (
            {"data_type": torch.float32, "kv_data_type": "bfloat16"},
            (torch.float32, torch.bfloat16, torch.float32),
        ),
        ({"q_data_type": torch.float32}, (torch.float32,) * 3),
        ({"kv_data_type": E4M3FN}, (torch.float16, E4M3FN, torch.float16)),
        ({"o_data_type": "float32"}, (torch.float16, torch.float16, torch.float32)),
    ):
        wrapper = decode_wrapper()
        wrapper.plan(*p.table, *SIZES, **options)
        problem = wrapper._state.query.problem
        assert (problem.q_dtype, problem.kv_dtype, problem.o_dtype) == want
    wrapper = decode_wrapper()
    wrapper.plan(*p.table, *SIZES, data_type=torch.bfloat16)
    q = queries(3, 4, 8, torch.bfloat16)
    close(wrapper.run(q, p.cache), oracle(q, p.keys, p.values, [1] * 3)[0], 8e-3)


def test_options_by_position_are_deprecated_and_in_upstream_order():
    p = pages([9, 3, 12])
    wrapper = decode_wrapper()
    with pytest.warns(DeprecationWarning, match="positionally") as caught:
        wrapper.plan(
            *p.table,
            *SIZES,
            "ALIBI",
            7,
            2.0,
            "float32",
            "bfloat16",
            "float16",
            None,
            0.5,
            3.0,
            500.0,
            True,
            None,
            ints(9, 3, 12),
            2,
            True,
            3,
        )
    assert caught[0].filename == __file__
    problem = wrapper._state.query.problem
    assert (problem.pos_encoding, problem.window_left, problem.logits_soft_cap) == ("ALIBI", 7, 2.0)
    assert (problem.q_dtype, problem.kv_dtype, problem.o_dtype) == (
        torch.float32,
        torch.bfloat16,
        torch.float16,
    )
    assert (problem.sm_scale, problem.rope_scale, problem.rope_theta) == (0.5, 3.0, 500.0)
    assert (problem.fixed_split_size, problem.disable_split_kv, wrapper.q_len_per_req) == (2, True, 3)
    kept = Snapshot.of(wrapper)
    with (
        pytest.warns(DeprecationWarning, match="deprecated"),
        pytest.raises(TypeError, match=r"multiple values.*window_left"),
    ):
        wrapper.plan(*p.table, *SIZES, "NONE", 3, window_left=3)
    with (
        pytest.warns(DeprecationWarning, match="deprecated"),
        pytest.raises(TypeError, match="at most 23 positional"),
    ):
        wrapper.plan(*p.table, *SIZES, *(None for _ in range(17)))
    kept.require(wrapper)


def test_unknown_arguments_are_refused():
    p = pages([9])
    for wrapper in (decode_wrapper(), paged_wrapper(), ragged_wrapper()):
        with pytest.raises(TypeError, match="soft_cap"):
            wrapper.plan(*p.table, *SIZES, soft_cap=3.0)
    wrapper, p, q = planned([9])
    for options in ({"logits_soft_cap": 5.0}, {"sm_scale": 1.0}, {"causal": True}):
        with pytest.raises(TypeError, match=next(iter(options))):
            wrapper.run(q, p.cache, **options)
    with pytest.raises(TypeError, match="by position"):
        wrapper.run(q, p.cache, 1.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("window_right", 1),
        ("block_tables", torch.zeros(1, 1)),
    ],
)
def test_what_no_backend_has_is_refused_at_plan(name, value):
    with pytest.raises(NotImplementedError, match=name):
        planned(**{name: value})


@pytest.mark.parametrize("name", ["sinks", "skip_softmax_threshold_scale_factor", "kv_cache_sf"])
def test_what_no_backend_has_is_refused_at_run(name):
    wrapper, p, q = planned()
    with pytest.raises(NotImplementedError, match=name):
        wrapper.run(q, p.cache, **{name: torch.ones(4)})


@pytest.mark.parametrize("name", ["num_qo_heads", "num_kv_heads", "head_dim", "page_size"])
@pytest.mark.parametrize("kept", [False, True])
def test_sizes_are_ints_whatever_was_planned_before(name, kept):
    """8.0 equals 8, and plans are kept by equality: the second call must not be more lenient."""
    p, wrapper = pages([9, 3, 12]), decode_wrapper()
    sizes = {"num_qo_heads": 2, "num_kv_heads": 1, "head_dim": 8, "page_size": 4}
    if kept:
        wrapper.plan(*p.table, **sizes)
    for wrong in (float(sizes[name]), str(sizes[name]), None, True):
        with pytest.raises(TypeError, match=f"{name}.*: needs an int, got {type(wrong).__name__}"):
            wrapper.plan(*p.table, **{**sizes, name: wrong})


@pytest.mark.parametrize("vo", [0, -1])
def test_a_head_of_values_without_elements_is_refused(vo):
    p = pages([9])
    with pytest.raises(ValueError, match="head_dim_vo: needs at least 1"):
        paged_wrapper().plan(offsets([1]), *p.table, 4, 2, 8, 4, head_dim_vo=vo)
    with pytest.raises(ValueError, match="head_dim_vo: needs at least 1"):
        ragged_wrapper().plan(offsets([1]), offsets([9]), 4, 2, 8, head_dim_vo=vo)


def test_rope_needs_an_even_head():
    wrapper = decode_wrapper()
    with pytest.raises(ValueError, match="head_dim_qk"):
        wrapper.plan(ints(0, 1), ints(0), ints(1), 2, 1, 7, 4, pos_encoding_mode="ROPE_LLAMA")


@pytest.mark.parametrize("name", ["window_left", "sm_scale", "pos_encoding_mode", "logits_soft_cap"])
def test_an_option_that_is_a_list_is_refused_by_name(name):
    wrapper, p = decode_wrapper(), pages([3])
    with pytest.raises(
        TypeError, match=r": needs a number, a string or a dtype, got list \[core.arguments\]$"
    ) as told:
        wrapper.plan(*p.table, *SIZES, q_data_type=torch.float32, **{name: [1]})
    assert str(told.value).startswith(f"{name}: ")
    assert wrapper.route is None
