"""What a plan holds: its own copies, its mask, its workspace, and what forward() borrows."""

import functools

import pytest
import torch

from attn_core.backend import PlanResult

from .fakes import FakeBackend
from .kit import (
    SIZES,
    Snapshot,
    close,
    decode_graph,
    decode_wrapper,
    ints,
    offsets,
    oracle,
    packed,
    paged_wrapper,
    pages,
    planned,
    prefill_graph,
    queries,
    ragged_wrapper,
    random_mask,
    same_bits,
    workspace,
)


def scribble(*tensors):
    for t in tensors:
        t.fill_(1 if t.dtype in (torch.bool, torch.uint8) else 3)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_index_arrays_may_be_reused_once_plan_returns(index):
    p = pages([9, 3, 12])
    tables = [t.to(index) for t in p.table]
    q_lens = offsets([2, 1, 3]).to(index)
    flat, shaped = random_mask([2, 1, 3], p.kv_lens)
    bits = packed(shaped)
    q = queries(6, 4, 8)
    plain, masked, with_bits, decode = paged_wrapper(), paged_wrapper(), paged_wrapper(), decode_wrapper()
    plain.plan(q_lens, *tables, *SIZES, q_data_type="float32", causal=True)
    masked.plan(q_lens, *tables, *SIZES, q_data_type="float32", custom_mask=flat)
    with_bits.plan(q_lens, *tables, *SIZES, q_data_type="float32", packed_custom_mask=bits)
    seq_lens = ints(9, 3, 12)
    decode.plan(*tables, *SIZES, q_data_type="float32", seq_lens=seq_lens)
    scribble(q_lens, *tables, flat, bits, seq_lens)
    close(plain.run(q, p.cache), oracle(q, p.keys, p.values, [2, 1, 3], causal=True)[0], 2e-6)
    want = oracle(q, p.keys, p.values, [2, 1, 3], mask=shaped)[0]
    close(masked.run(q, p.cache), want, 2e-6)
    close(with_bits.run(q, p.cache), want, 2e-6)
    close(decode.run(q[:3], p.cache), oracle(q[:3], p.keys, p.values, [1] * 3)[0], 2e-6)
    capped = oracle(q, p.keys, p.values, [2, 1, 3], mask=shaped, cap=4.0)[0]
    close(
        masked.forward(q, p.cache, logits_soft_cap=4.0), capped, 2e-6
    )  # the same batch, from the plan's own copy


def test_a_mask_does_not_outlive_its_plan():
    p, q_lens = pages([9, 3]), [2, 3]
    q, (k, v) = queries(5, 4, 8), (torch.cat(rows) for rows in (p.keys, p.values))
    flat, shaped = random_mask(q_lens, p.kv_lens)
    wrapper = ragged_wrapper()
    for mask, causal in ((flat, False), (None, True), (flat, True), (None, False)):
        wrapper.plan(
            offsets(q_lens),
            offsets(p.kv_lens),
            4,
            2,
            8,
            q_data_type="float32",
            custom_mask=mask,
            causal=causal,
        )
        want = oracle(q, p.keys, p.values, q_lens, causal=causal, mask=None if mask is None else shaped)
        close(wrapper.run(q, k, v), want[0], 2e-6)


def test_masks_are_checked_and_two_forms_must_agree():
    p, q_lens = pages([9, 3]), [2, 3]
    flat, shaped = random_mask(q_lens, p.kv_lens)
    wrapper = paged_wrapper()
    plan = functools.partial(wrapper.plan, offsets(q_lens), *p.table, *SIZES, q_data_type="float32")
    plan(custom_mask=flat, packed_custom_mask=packed(shaped))
    plan(custom_mask=flat.to(torch.uint8))
    kept = Snapshot.of(wrapper)
    for options, message in (
        (
            {"custom_mask": flat, "packed_custom_mask": packed([~m for m in shaped])},
            "same mask as custom_mask",
        ),
        ({"custom_mask": flat.float()}, "custom_mask: needs a bool"),
        ({"custom_mask": flat[:-1]}, "custom_mask: needs 27 elements"),
        ({"custom_mask": flat.view(9, 3)}, "custom_mask: needs 27 elements"),
        ({"packed_custom_mask": packed(shaped)[:-1]}, "packed_custom_mask: needs 5 bytes"),
        ({"packed_custom_mask": packed(shaped).int()}, "packed_custom_mask: needs a uint8 tensor"),
        ({"custom_mask": flat.tolist()}, "custom_mask: needs a bool"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            plan(**options)
        kept.require(wrapper)


def test_a_tree_of_drafts_is_verified_with_a_mask():
    """Two branches after a shared token: each sees its own ancestors and the context, not its sibling."""
    p = pages([10])
    parents = [-1, 0, 0, 1, 2]  # the last five tokens of the sequence
    sees = torch.zeros(5, 10, dtype=torch.bool)
    sees[:, :5] = True
    for row in range(5):
        at = row
        while at >= 0:
            sees[row, 5 + at] = True
            at = parents[at]
    q, wrapper = queries(5, 4, 8), paged_wrapper()
    wrapper.plan(offsets([5]), *p.table, *SIZES, q_data_type="float32", custom_mask=sees)
    tree = wrapper.run(q, p.cache)
    close(tree, oracle(q, p.keys, p.values, [5], mask=[sees])[0], 2e-6)
    chain, _, _ = planned([10], q_len=5)
    differs = (chain.run(q, p.cache) - tree).abs().amax((1, 2)) > 1e-3
    assert differs.tolist() == [False, False, True, True, True]


def test_begin_forward_is_plan_and_end_forward_does_nothing():
    p, q = pages([9, 3, 12]), queries(3, 4, 8)
    wrapper = decode_wrapper()
    wrapper.begin_forward(*p.table, *SIZES, q_data_type="float32")
    want = wrapper.forward(q, p.cache)
    kept = Snapshot.of(wrapper)
    assert wrapper.end_forward() is None
    kept.require(wrapper)
    assert same_bits(wrapper.run(q, p.cache), want)
    out, lse = wrapper.run_return_lse(q, p.cache)
    both = wrapper.forward_return_lse(q, p.cache)
    assert same_bits(both[0], out)
    assert same_bits(both[1], lse)


def test_an_option_of_forward_is_never_dropped():
    """Upstream took logits_soft_cap here and ignored it: models ran uncapped."""
    wrapper, p, q = planned()
    for ask, options in (
        ({"logits_soft_cap": 1.0}, {"cap": 1.0}),
        ({"window_left": 2}, {"window": 2}),
        ({"sm_scale": 2.0, "pos_encoding_mode": "ALIBI"}, {"sm_scale": 2.0, "encoding": "ALIBI"}),
        (
            {"pos_encoding_mode": "ROPE_LLAMA", "rope_theta": 99.0},
            {"encoding": "ROPE_LLAMA", "rope_theta": 99.0},
        ),
        ({}, {}),
    ):
        close(wrapper.forward(q, p.cache, **ask), oracle(q, p.keys, p.values, [1] * 3, **options)[0], 2e-6)


def test_forward_of_prefill_takes_causal_and_keeps_a_custom_mask():
    p, q_lens = pages([9, 3]), [2, 3]
    q, (flat, shaped) = queries(5, 4, 8), random_mask([2, 3], [9, 3])
    wrapper, ragged = paged_wrapper(), ragged_wrapper()
    k, v = torch.cat(p.keys), torch.cat(p.values)
    for mask in (None, flat):
        kind = {"q_data_type": "float32", "custom_mask": mask}
        wrapper.plan(offsets(q_lens), *p.table, *SIZES, **kind)
        ragged.plan(offsets(q_lens), offsets(p.kv_lens), 4, 2, 8, **kind)
        want = oracle(
            q, p.keys, p.values, q_lens, causal=True, mask=None if mask is None else shaped, cap=2.0
        )
        close(wrapper.forward(q, p.cache, causal=True, logits_soft_cap=2.0), want[0], 2e-6)
        close(ragged.forward(q, k, v, causal=True, logits_soft_cap=2.0), want[0], 2e-6)
        both = wrapper.forward_return_lse(q, p.cache, causal=True, logits_soft_cap=2.0)
        close(both[1], want[1], 3e-6)


def test_forward_leaves_the_plan_as_plan_made_it():
    wrapper, p, q = planned()
    want, kept = wrapper.run(q, p.cache), Snapshot.of(wrapper)
    assert not torch.equal(wrapper.forward(q, p.cache, window_left=1), want)
    assert same_bits(wrapper.run(q, p.cache), want)
    assert kept.state.query.problem.window_left == wrapper._state.query.problem.window_left == -1


def test_workspaces_are_checked():
    with pytest.raises(TypeError, match="float_workspace_buffer: needs a tensor"):
        decode_wrapper(ws=[1])
    with pytest.raises(ValueError, match="contiguous"):
        decode_wrapper(ws=torch.zeros(8, 8)[:, ::2])
    with pytest.raises(ValueError, match="16-byte aligned"):
        decode_wrapper(ws=workspace(65)[1:])
    with pytest.raises(ValueError, match="kv_layout"):
        decode_wrapper(kv_layout="nhd")
    with pytest.raises(TypeError, match="backend: needs a string"):
        decode_wrapper(backend=None)
    with pytest.raises(ValueError, match="jit_args"):
        decode_wrapper(jit_args=[1])


def test_a_new_workspace_must_fit_the_plan_in_force(use):
    seen = []
    use(
        FakeBackend(
            plan=PlanResult("launch", workspace_bytes=64),
            run=lambda launch, image, io: seen.append(io.workspace),
        )
    )
    wrapper, p, q = planned()
    small, good = workspace(63), workspace(64)
    with pytest.raises(ValueError, match=r"needs 64 bytes, got 63.*workspace_size\(\)"):
        wrapper.reset_workspace_buffer(small, workspace())
    with pytest.raises(ValueError, match="float_workspace_buffer: needs a tensor on cpu"):
        wrapper.reset_workspace_buffer(workspace(device="meta"), workspace())
    with pytest.raises(TypeError, match="int_workspace_buffer"):
        wrapper.reset_workspace_buffer(good, None)
    old = wrapper._float_workspace_buffer
    wrapper.run(q, p.cache)
    wrapper.reset_workspace_buffer(good, workspace())
    wrapper.run(q, p.cache)
    assert [t is good for t in seen] == [False, True]
    assert seen[0] is old


@pytest.mark.parametrize("kind", ["decode", "paged"])
@pytest.mark.parametrize("graph", [False, True])
def test_workspace_size_tells_what_plan_needs_and_changes_nothing(kind, graph, use):
    use(
        FakeBackend(
            plan=lambda query, path, batch: PlanResult(
                "launch", image={"extra": torch.zeros(5, dtype=torch.int32)}, workspace_bytes=48
            )
        )
    )
    p = pages([9, 3, 12])
    if kind == "decode":
        wrapper, first = (decode_graph(3, 12) if graph else decode_wrapper()), p.table
    else:
        wrapper, first = (prefill_graph(3, 12) if graph else paged_wrapper()), (offsets([1, 2, 3]), *p.table)
    kept = Snapshot.of(wrapper)
    sizes = wrapper.workspace_size(*first, *SIZES)
    kept.require(wrapper)
    assert sizes[0] == 48
    wrapper.plan(*first, *SIZES)
    block = (wrapper._arena.staged if graph else wrapper._state.host).block
    assert sizes[1] == block.numel() * 4
    kept = Snapshot.of(wrapper)
    assert wrapper.workspace_size(*first, *SIZES) == sizes
    kept.require(wrapper)
    with pytest.raises(ValueError, match="page_size"):
        wrapper.workspace_size(*first, 4, 2, 8, 0)
