"""Block-sparse attention is attention with the mask that the blocks spell out."""

import pytest
import torch

from attn_core.sparse import (
    BlockSparseAttentionWrapper,
    VariableBlockSparseAttentionWrapper,
    convert_bsr_mask_layout,
)

from .kit import bits, close, ints, offsets, oracle, packed, queries, workspace

F32 = {"q_data_type": torch.float32, "o_data_type": torch.float32}
INDPTR, INDICES = ints(0, 2, 2, 4), ints(3, 0, 1, 2)
SIZES = (5, 12, 2, 3, 4, 2, 8)  # M, N, R, C, query heads, key heads, head_dim: the last row of blocks is cut
ROWS = [2, 2, 1]


def keys(n=12, heads=2, dim=8, seed=3):
    return queries(n, heads, dim, seed=seed), queries(n, heads, dim, seed=seed + 1)


def dense(mask=None):
    """The mask of the blocks above as ``[5, 12]``, and the keys of each row of blocks in block order."""
    whole = torch.zeros(6, 12, dtype=torch.bool)
    block = 0
    for row in range(3):
        for _ in range(int(INDPTR[row + 1] - INDPTR[row])):
            at = int(INDICES[block])
            whole[2 * row : 2 * row + 2, 3 * at : 3 * at + 3] = True if mask is None else mask[block]
            block += 1
    return whole[:5]


def block_mask(seed=7):
    return torch.rand(4, 2, 3, generator=torch.Generator().manual_seed(seed)) < 0.6


@pytest.mark.parametrize("masked", [False, True])
def test_blocks_are_the_mask_they_spell_out(masked):
    q, (k, v), mask = queries(5, 4, 8), keys(), block_mask() if masked else None
    wrapper = BlockSparseAttentionWrapper(workspace())
    wrapper.plan(INDPTR, INDICES, *SIZES, mask=mask, **F32)
    out, lse = wrapper.run(q, k, v, return_lse=True)
    want, want_lse = oracle(q, [k], [v], [5], mask=[dense(mask)])
    close(out, want, 2e-6)
    close(lse, want_lse, 2e-6)
    assert out[2:4].count_nonzero() == 0  # a row of blocks without a block
    assert wrapper.backend == wrapper.route.backend.name == "reference"
    into = torch.full_like(out, 9.0)
    assert wrapper.run(q, k, v, out=into) is into
    assert torch.equal(bits(into), bits(out))


def test_a_mask_may_come_packed_and_keys_with_any_strides():
    q, (k, v), mask = queries(5, 4, 8), keys(), block_mask()
    wrapper = BlockSparseAttentionWrapper(workspace())
    wrapper.plan(INDPTR, INDICES, *SIZES, mask=mask, **F32)
    want = wrapper.run(q, k, v)
    flat = [mask[0:2].transpose(0, 1), mask[2:2], mask[2:4].transpose(0, 1)[:1]]
    wrapper.plan(INDPTR, INDICES, *SIZES, packed_mask=packed(flat), **F32)
    beside = torch.cat([k, v], -1)
    assert torch.equal(wrapper.run(q, beside[..., :8], beside[..., 8:]), want)


def test_causal_counts_the_keys_of_a_row_of_blocks():
    q, (k, v) = queries(5, 4, 8), keys()
    wrapper = BlockSparseAttentionWrapper(workspace())
    wrapper.plan(INDPTR, INDICES, *SIZES, causal=True, **F32)
    chosen = [torch.cat([torch.arange(3 * i, 3 * i + 3) for i in row]) for row in ((3, 0), (1, 2))]
    empty = torch.zeros(0, dtype=torch.int64)
    order = [chosen[0], empty, chosen[1]]
    want, _ = oracle(q, [k[i] for i in order], [v[i] for i in order], ROWS, causal=True)
    close(wrapper.run(q, k, v), want, 2e-6)


def test_forward_replaces_what_is_not_at_its_default_for_one_call():
    q, (k, v) = queries(5, 4, 8), keys()
    wrapper = BlockSparseAttentionWrapper(workspace())
    wrapper.begin_forward(INDPTR, INDICES, *SIZES, **F32)
    plain = wrapper.run(q, k, v)
    capped = wrapper.forward(q, k, v, logits_soft_cap=0.5)
    close(capped, oracle(q, [k], [v], [5], mask=[dense()], cap=0.5)[0], 2e-6)
    assert torch.equal(wrapper.forward(q, k, v), plain)
    wrapper.end_forward()


def test_bsr_layout():
    mask = block_mask()
    want = torch.cat([mask[0:2].transpose(0, 1).reshape(-1), mask[2:4].transpose(0, 1).reshape(-1)])
    assert torch.equal(convert_bsr_mask_layout(mask, INDPTR), want)
    assert convert_bsr_mask_layout(mask[:0], ints(0)).numel() == 0


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"indices": ints(3, 0, 1, 4)}, ValueError, "out of bound"),
        ({"indices": ints(3, 0, -1, 2)}, ValueError, "indices"),
        ({"indices": ints(3, 0, 1)}, ValueError, "indices"),
        ({"indptr": ints(0, 2, 4)}, ValueError, "indptr"),
        ({"indptr": None}, ValueError, "indptr"),
        ({"M": 7}, ValueError, "indptr"),
        ({"N": 11}, ValueError, "multiple of C"),
        ({"R": 0}, ValueError, "R: needs"),
        ({"C": 3.0}, TypeError, "C: needs"),
        ({"mask": torch.ones(4, 3, 2, dtype=torch.bool)}, ValueError, "mask"),
        ({"block_mask": torch.ones(1)}, ValueError, "block_mask"),
    ],
)
def test_wrong_blocks_are_refused_and_change_nothing(change, error, says):
    names = ("indptr", "indices", "M", "N", "R", "C", "num_qo_heads", "num_kv_heads", "head_dim")
    wrapper, right = BlockSparseAttentionWrapper(workspace()), (INDPTR, INDICES, *SIZES)
    wrapper.plan(*right, **F32)
    q, (k, v) = queries(5, 4, 8), keys()
    before = wrapper.run(q, k, v)
    with pytest.raises(error, match=says):
        wrapper.plan(**{**dict(zip(names, right, strict=True)), **F32, **change})
    assert torch.equal(wrapper.run(q, k, v), before)


def test_wrong_tensors_are_refused():
    wrapper, q, (k, v) = BlockSparseAttentionWrapper(workspace()), queries(5, 4, 8), keys()
    with pytest.raises(ValueError, match="prior plan"):
        wrapper.run(q, k, v)
    wrapper.plan(INDPTR, INDICES, *SIZES, **F32)
    with pytest.raises(ValueError, match="k: needs shape"):
        wrapper.run(q, k[:9], v)
    with pytest.raises(TypeError, match="v: needs"):
        wrapper.run(q, k, None)
    with pytest.raises(NotImplementedError, match="scale_q"):
        wrapper.run(q, k, v, torch.ones(4))


# ---- blocks of any size ------------------------------------------------------------------------------

ROW_SIZES, COLUMN_SIZES = ints(1, 4, 3, 2, 0, 6).view(2, 3), ints(2, 5, 3, 6, 1, 3).view(2, 3)
KEPT = torch.tensor([[[1, 0, 1], [0, 0, 0], [0, 1, 1]], [[1, 1, 0], [1, 1, 1], [0, 0, 1]]])


def element_mask(head):
    rows = KEPT[head].bool().repeat_interleave(ROW_SIZES[head].long(), 0)
    return rows.repeat_interleave(COLUMN_SIZES[head].long(), 1)


@pytest.mark.parametrize("kept", [KEPT, KEPT.bool(), 3 * KEPT], ids=["int", "bool", "counts"])
def test_every_head_has_blocks_of_its_own(kept):
    q, (k, v) = queries(4, 8, 8), (t.transpose(0, 1) for t in keys(10))
    wrapper = VariableBlockSparseAttentionWrapper(workspace())
    wrapper.plan(kept, ROW_SIZES, COLUMN_SIZES.long(), 4, 2, 8, q_data_type=torch.float32)
    out, lse = wrapper.run(q, k, v, return_lse=True)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:2])
    for head in range(4):
        mine = slice(head // 2, head // 2 + 1)
        one = [t[mine].transpose(0, 1) for t in (k, v)]
        rows = q[head : head + 1].transpose(0, 1)
        want, want_lse = oracle(rows, one[:1], one[1:], [8], mask=[element_mask(head // 2)])
        close(out[head], want[:, 0], 2e-6)
        close(lse[head], want_lse[:, 0], 2e-6)
    into, lse_into = torch.full_like(out, 9.0), torch.full_like(lse, 9.0)
    assert wrapper.run(q, k, v, out=into, lse=lse_into) is into
    assert torch.equal(into, out)
    assert torch.equal(lse_into, lse)
    assert torch.equal(wrapper.forward(q, k, v), out)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"block_mask_map": KEPT[:, :2]}, ValueError, "block_mask_map"),
        ({"block_row_sz": ROW_SIZES.float()}, TypeError, "block_row_sz"),
        ({"block_row_sz": ROW_SIZES + ints(0, 1).view(2, 1)}, ValueError, "same sum"),
        ({"block_col_sz": COLUMN_SIZES[:1]}, ValueError, "block_col_sz"),
        ({"block_col_sz": COLUMN_SIZES - 2}, ValueError, "0 or more"),
        ({"num_qo_heads": 3}, ValueError, "num_qo_heads"),
        ({"num_kv_heads": 0}, ValueError, "num_kv_heads"),
    ],
)
def test_wrong_sizes_are_refused(change, error, says):
    right = {
        "block_mask_map": KEPT, "block_row_sz": ROW_SIZES, "block_col_sz": COLUMN_SIZES, "num_qo_heads": 4,
        "num_kv_heads": 2, "head_dim": 8,
    }  # fmt: skip
    with pytest.raises(error, match=says):
        VariableBlockSparseAttentionWrapper(workspace()).plan(**{**right, **change})


def test_an_output_of_another_shape_is_refused():
    wrapper = VariableBlockSparseAttentionWrapper(workspace())
    wrapper.plan(KEPT, ROW_SIZES, COLUMN_SIZES, 4, 2, 8, q_data_type=torch.float32)
    q, (k, v) = queries(4, 8, 8), (t.transpose(0, 1).contiguous() for t in keys(10))
    for wrong in ({"out": torch.empty(8, 4, 8)}, {"lse": torch.empty(4, 8, dtype=torch.float64)}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            wrapper.run(q, k, v, **wrong)
    with pytest.raises(ValueError, match="q: needs"):
        wrapper.run(q[:, :7], k, v)
    assert offsets(ROW_SIZES.reshape(-1).tolist())[-1] == 16
