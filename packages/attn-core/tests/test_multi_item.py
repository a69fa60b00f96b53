"""Multi-item scoring, against masks that are written down token by token."""

import random

import pytest
import torch

from attn_core import BatchAttentionWithAttentionSinkWrapper
from attn_core.item_mask import _runs

from .kit import (
    SIZES,
    Snapshot,
    close,
    offsets,
    oracle,
    packed,
    paged_wrapper,
    pages,
    prefill_graph,
    queries,
    ragged_wrapper,
    replay,
    same_bits,
    workspace,
)

# prefix, items (each behind a delimiter), delimiter at the end, rows of the query
REQUESTS = [
    (5, [3, 2, 4], True, 9),
    (0, [1, 1, 6], True, 11),
    (7, [2, 9], False, 20),
    (4, [0, 3], True, 2),
    (6, [], True, 3),
]


def tokens(request):
    """One (item, is delimiter) per token; item -1 is the prefix."""
    prefix, items, last, _ = request
    out = [(-1, False)] * prefix
    for n, length in enumerate(items):
        out += [(n, True)] + [(n, False)] * length
    return out + ([(len(items), True)] if last else [])


def dense(request):
    """Row by row and key by key, who sees whom."""
    told, rows = tokens(request), request[3]
    mask = torch.zeros(rows, len(told), dtype=torch.bool)
    for row in range(rows):
        own = len(told) - rows + row
        for key in range(len(told)):
            if key > own or own < 0:
                continue
            (item, delimiter), (of, stop) = told[own], told[key]
            mask[row, key] = of == -1 or (item == of and not delimiter and not stop)
    return mask


def given(requests, pad=None, **changed):
    """The four arguments for some requests."""
    positions = []
    for request in requests:
        mine = []
        for item, delimiter in tokens(request):
            if item >= 0:
                mine.append(0 if delimiter else mine[-1] + 1)
        positions.append(mine)
    pad = max(map(len, positions)) if pad is None else pad
    flat = [n for mine in positions for n in mine + [0] * (pad - len(mine))]
    arguments = {
        "prefix_len_ptr": torch.tensor([r[0] for r in requests], dtype=torch.uint32),
        "token_pos_in_items_ptr": torch.tensor(flat, dtype=torch.uint16),
        "token_pos_in_items_len": pad,
        "max_item_len_ptr": torch.tensor([max(p, default=0) for p in positions], dtype=torch.uint16),
    }
    return {**arguments, **changed}


def batch(requests, **options):
    p = pages([len(tokens(r)) for r in requests], **options)
    q_lens = [r[3] for r in requests]
    return p, queries(sum(q_lens), 4, 8), q_lens


def plan(wrapper, p, q_lens, **options):
    wrapper.plan(offsets(q_lens), *p.table, *SIZES, q_data_type="float32", **options)


def made(wrapper):
    return wrapper._state.image["custom_mask"]


@pytest.mark.parametrize("pad", [None, 40])
@pytest.mark.parametrize("causal", [False, True])
def test_every_bit_is_what_the_tokens_say(pad, causal):
    p, _, q_lens = batch(REQUESTS)
    wrapper = paged_wrapper()
    plan(wrapper, p, q_lens, causal=causal, **given(REQUESTS, pad))
    assert torch.equal(made(wrapper), packed([dense(r) for r in REQUESTS]))


def test_random_sequences_to_the_bit():
    rng = random.Random(6)
    for _ in range(150):
        requests = []
        for _ in range(rng.randint(1, 5)):
            items = [rng.choice([0, 1, 2, 7, 8, 9, 17]) for _ in range(rng.randint(0, 4))]
            prefix, last = rng.choice([0, 1, 7, 8, 30]), rng.random() < 0.5
            length = len(tokens((prefix, items, last, 0)))
            requests.append((prefix, items, last, rng.choice([0, 1, length, rng.randint(0, length + 2)])))
        p, _, q_lens = batch(requests)
        wrapper = ragged_wrapper()
        wrapper.plan(offsets(q_lens), offsets(p.kv_lens), 4, 2, 8, q_data_type="float32", **given(requests))
        assert torch.equal(made(wrapper), packed([dense(r) for r in requests])), requests


def test_runs_of_bits():
    """Runs within a byte, over borders, side by side, empty, and up to the last bit."""
    for runs in ([(0, 1)], [(3, 5), (5, 8)], [(7, 9)], [(0, 40)], [(1, 1), (2, 39)], [(8, 16), (0, 8)], []):
        want = torch.zeros(40, dtype=torch.bool)
        for start, end in runs:
            want[start:end] = True
        start, end = torch.tensor(runs, dtype=torch.int64).reshape(-1, 2).unbind(1)
        assert torch.equal(_runs(start, end, 5), packed([want])), runs


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window_left": 4},
        {"logits_soft_cap": 2.0},
        {"pos_encoding_mode": "ROPE_LLAMA", "window_left": 6},
        {"pos_encoding_mode": "ALIBI"},
        {"fixed_split_size": 1},
        {"disable_split_kv": True, "sm_scale": 0.7},
    ],
    ids=lambda o: "-".join(o) or "plain",
)
def test_values_against_the_definition(options):
    p, q, q_lens = batch(REQUESTS)
    wrapper = paged_wrapper()
    plan(wrapper, p, q_lens, causal=True, **given(REQUESTS), **options)
    out, lse = wrapper.run(q, p.cache, return_lse=True)
    names = {"window_left": "window", "logits_soft_cap": "cap", "pos_encoding_mode": "encoding"}
    same = {names.get(k, k): v for k, v in options.items() if "split" not in k}
    want = oracle(q, p.keys, p.values, q_lens, mask=[dense(r) for r in REQUESTS], **same)
    close(out, want[0], 2e-6)
    close(lse, want[1], 3e-6)


def test_the_ragged_wrapper_and_workspace_size_take_it():
    p, q, q_lens = batch(REQUESTS)
    wrapper, other = ragged_wrapper(), paged_wrapper()
    wrapper.plan(offsets(q_lens), offsets(p.kv_lens), 4, 2, 8, q_data_type="float32", **given(REQUESTS))
    out = wrapper.run(q, torch.cat(p.keys), torch.cat(p.values))
    close(out, oracle(q, p.keys, p.values, q_lens, mask=[dense(r) for r in REQUESTS])[0], 2e-6)
    sizes = other.workspace_size(offsets(q_lens), *p.table, *SIZES, q_data_type="float32", **given(REQUESTS))
    masks = other.workspace_size(
        offsets(q_lens), *p.table, *SIZES, q_data_type="float32", custom_mask=torch.cat(
            [dense(r).reshape(-1) for r in REQUESTS]
        )
    )  # fmt: skip
    assert sizes == masks
    with pytest.raises(ValueError, match="max_item_len_ptr: needs a tensor"):
        other.workspace_size(offsets(q_lens), *p.table, *SIZES, **given(REQUESTS, max_item_len_ptr=None))


def test_a_chunk_of_a_longer_prompt():
    """A prefix beyond the keys so far: plain causal rows, and no position is read."""
    p, q, _ = batch([(9, [], False, 4)])
    wrapper, causal = paged_wrapper(), paged_wrapper()
    long = given([(9, [], False, 4)], prefix_len_ptr=torch.tensor([50], dtype=torch.uint32))
    plan(wrapper, p, [4], **long)
    plan(causal, p, [4], causal=True)
    close(wrapper.run(q, p.cache), causal.run(q, p.cache), 1e-6)


def test_types_and_forms_of_upstreams_callers():
    """Signed types are converted; the length comes as a tensor; one request needs none."""
    want = given(REQUESTS)
    p, _, q_lens = batch(REQUESTS)
    one, other = paged_wrapper(), paged_wrapper()
    plan(one, p, q_lens, **want)
    changed = {name: t.to(torch.int64) for name, t in want.items() if isinstance(t, torch.Tensor)}
    stride = torch.tensor(want["token_pos_in_items_len"]).to(torch.uint32)
    plan(other, p, q_lens, **changed, token_pos_in_items_len=stride)
    assert same_bits(made(one), made(other))
    p, _, q_lens = batch(REQUESTS[:1])
    alone = given(REQUESTS[:1], token_pos_in_items_len=0)
    scalars = {name: alone[name].reshape(()) for name in ("prefix_len_ptr", "max_item_len_ptr")}
    for form in (alone, {**alone, **scalars}):
        plan(one, p, q_lens, **form)
        assert torch.equal(made(one), packed([dense(REQUESTS[0])]))


def test_a_prefix_that_ends_within_an_item():
    """Positions are taken as they are: the first one need not be a delimiter's."""
    p, _, q_lens = batch([(4, [3], False, 8)])
    wrapper = paged_wrapper()
    told = {"token_pos_in_items_ptr": torch.tensor([1, 2, 0]), "prefix_len_ptr": torch.tensor([5])}
    plan(wrapper, p, q_lens, **given([(4, [3], False, 8)], 3, **told))
    causal = torch.ones(8, 8).tril().bool()
    causal[7, 5:] = False
    assert torch.equal(made(wrapper), packed([causal]))


def test_with_a_sink():
    p, q, q_lens = batch(REQUESTS)
    wrapper = BatchAttentionWithAttentionSinkWrapper(workspace())
    plan(wrapper, p, q_lens, **given(REQUESTS))
    sink = torch.tensor([-1.0, 0.5, 2.0, 0.0])
    out = wrapper.run(q, p.cache, sink)
    plain, log2 = oracle(q, p.keys, p.values, q_lens, mask=[dense(r) for r in REQUESTS])
    kept = 1 / (1 + torch.exp2(sink.double() * 1.4426950408889634 - log2))
    close(out, plain * kept[..., None], 3e-6)


def test_captured_graphs_follow_new_items():
    wrapper = prefill_graph(2, 24, mask_bytes=64)
    captured = None
    for seed, requests in enumerate(
        (
            [(5, [3, 2, 4], True, 9), (7, [2, 6], False, 8)],
            [(2, [1, 1], True, 5), (9, [8], True, 12)],
            [(16, [], True, 0), (0, [4, 4], True, 11)],
        )
    ):
        p, _, q_lens = batch(requests, seed=seed)
        q = queries(17, 4, 8, seed=seed)
        plan(wrapper, p, q_lens, **given(requests))
        captured = captured or wrapper._state
        out, _ = replay(captured, q, p.cache)
        rows = sum(q_lens)
        want = oracle(q[:rows], p.keys, p.values, q_lens, mask=[dense(r) for r in requests])
        close(out[:rows], want[0], 2e-6)


def test_captured_graphs_without_room_for_the_mask():
    p, _, q_lens = batch(REQUESTS)
    for size, message in ((0, "custom_mask_buf and mask_indptr_buf given"), (3, "custom_mask_buf: needs")):
        wrapper = prefill_graph(len(REQUESTS), 40, mask_bytes=size)
        kept = Snapshot.of(wrapper)
        with pytest.raises(ValueError, match=message):
            plan(wrapper, p, q_lens, **given(REQUESTS))
        kept.require(wrapper)


U16, U32 = torch.uint16, torch.uint32
WRONG = [
    ({"max_item_len_ptr": None}, ValueError, "max_item_len_ptr: needs a tensor, as prefix_len_ptr"),
    ({"prefix_len_ptr": None}, ValueError, "prefix_len_ptr: needs a tensor"),
    ({"token_pos_in_items_ptr": None}, ValueError, "token_pos_in_items_ptr: needs a tensor"),
    ({"prefix_len_ptr": [5, 0, 7, 4, 6]}, TypeError, "prefix_len_ptr: needs a tensor, got list"),
    ({"prefix_len_ptr": torch.zeros(5)}, TypeError, "prefix_len_ptr: needs dtype torch.uint32 .*float32"),
    (
        {"max_item_len_ptr": torch.zeros(5, dtype=torch.int8)},
        TypeError,
        "max_item_len_ptr: needs dtype torch.uint16",
    ),
    ({"prefix_len_ptr": torch.zeros(4, dtype=U32)}, ValueError, "batch size 5 entries, got 4"),
    ({"max_item_len_ptr": torch.full((6,), 9, dtype=U16)}, ValueError, "batch size 5 entries, got 6"),
    ({"prefix_len_ptr": torch.zeros(5, 1, dtype=U32)}, ValueError, "prefix_len_ptr: needs a 1-D tensor"),
    (
        {"prefix_len_ptr": torch.tensor([5, 0, -7, 4, 6])},
        ValueError,
        r"prefix_len_ptr\[2\]: needs a length of 0 or more, got -7",
    ),
    (
        {"prefix_len_ptr": torch.tensor([2**31 + 5, 0, 7, 4, 6], dtype=U32)},
        ValueError,
        r"prefix_len_ptr\[0\]: needs a value that fits int32",
    ),
    (
        {"max_item_len_ptr": torch.tensor([4, 6, 8, 3, 0], dtype=U16)},
        ValueError,
        r"max_item_len_ptr\[2\]: needs at least 9, .* got 8",
    ),
    ({"token_pos_in_items_len": 12}, ValueError, "token_pos_in_items_len: needs at least 13, .* got 12"),
    ({"token_pos_in_items_len": 0}, ValueError, "token_pos_in_items_len: needs at least 13, .* got 0"),
    ({"token_pos_in_items_len": -1}, ValueError, "token_pos_in_items_len: needs at least 0"),
    ({"token_pos_in_items_len": 20.0}, TypeError, "token_pos_in_items_len: needs an int, got float"),
    ({"token_pos_in_items_len": torch.tensor([1, 2])}, TypeError, "token_pos_in_items_len: needs an int"),
    (
        {"token_pos_in_items_ptr": torch.zeros(52, dtype=U16)},
        ValueError,
        "token_pos_in_items_ptr: needs at least 53 entries .* got 52",
    ),
    ({"custom_mask": torch.ones(9, dtype=torch.bool)}, ValueError, "custom_mask: needs None with multi-item"),
    (
        {"packed_custom_mask": torch.ones(9, dtype=torch.uint8)},
        ValueError,
        "packed_custom_mask: needs None with multi-item",
    ),
]


@pytest.mark.parametrize(("changed", "error", "message"), WRONG)
def test_wrong_arguments_change_nothing(changed, error, message):
    p, q, q_lens = batch(REQUESTS)
    wrapper = paged_wrapper()
    plan(wrapper, p, q_lens, **given(REQUESTS))
    kept, want = Snapshot.of(wrapper), wrapper.run(q, p.cache)
    with pytest.raises(error, match=message):
        plan(wrapper, p, q_lens, **given(REQUESTS, **changed))
    kept.require(wrapper)
    assert same_bits(wrapper.run(q, p.cache), want)


def test_a_length_without_the_rest_is_refused_and_a_zero_is_not():
    p, _, q_lens = batch(REQUESTS)
    with pytest.raises(ValueError, match="token_pos_in_items_len: needs 0 without prefix_len_ptr"):
        plan(paged_wrapper(), p, q_lens, token_pos_in_items_len=3)
    plan(paged_wrapper(), p, q_lens, token_pos_in_items_len=torch.tensor(0))


def test_a_batch_without_requests_or_rows():
    wrapper = paged_wrapper()
    p, q, q_lens = batch([(5, [3], True, 0)])
    plan(wrapper, p, q_lens, **given([(5, [3], True, 0)]))
    assert wrapper.run(q, p.cache).shape == (0, 4, 8)
    p, q, q_lens = batch([])
    nothing = torch.zeros(0, dtype=U16)
    plan(wrapper, p, [], prefix_len_ptr=nothing, token_pos_in_items_ptr=nothing, max_item_len_ptr=nothing)
    assert wrapper.run(q, p.cache).shape == (0, 4, 8)
