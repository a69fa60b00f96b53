"""Keys shared in levels: a level each, merged, is attention over all of a request's keys."""

import pytest
import torch

import attn_core
from attn_core.cascade import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
)

from .kit import close, ints, offsets, oracle, pages, queries, same_bits, workspace

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 8, 4
Q_LENS = [2, 3, 1]


class Tree:
    """Three levels over one cache: all rows, the first two requests and the last, each request."""

    def __init__(self, lengths=(9, 5, 6, 3, 7, 4), q_lens=Q_LENS, order="NHD", seed=0):
        self.cache = pages(list(lengths), page_size=PAGE, heads=KV_HEADS, dim=DIM, order=order, seed=seed)
        self.q_lens = q_lens
        a, b, c = q_lens
        self.groups = [[a + b + c], [a + b, c], [a, b, c]]
        self.members = [[0], [1, 2], [3, 4, 5]]

    @property
    def tables(self):
        """The four lists that plan() takes."""
        c = self.cache
        held = [c.indptr[n + 1] - c.indptr[n] for n in range(6)]
        return (
            [offsets(rows) for rows in self.groups],
            [offsets([int(held[n]) for n in mine]) for mine in self.members],
            [torch.cat([c.indices[c.indptr[n] : c.indptr[n + 1]] for n in mine]) for mine in self.members],
            [c.last[mine] for mine in self.members],
        )

    def want(self, q, causal):
        """Attention of each request over its path; the mask knows that only the last part is causal."""
        paths = [(0, 1, 3), (0, 1, 4), (0, 2, 5)]
        keys = [torch.cat([self.cache.keys[n] for n in path]) for path in paths]
        values = [torch.cat([self.cache.values[n] for n in path]) for path in paths]
        return oracle(q, keys, values, self.q_lens, causal=causal)[0]


def plan(wrapper, tree, **options):
    wrapper.plan(*tree.tables, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.float32, **options)


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [False, True])
def test_levels_together_are_attention_over_all_keys(causal, order):
    tree = Tree(order=order)
    wrapper = MultiLevelCascadeAttentionWrapper(3, workspace(), order)
    plan(wrapper, tree, causal=causal)
    q = queries(sum(Q_LENS), HEADS, DIM)
    out = wrapper.run(q, tree.cache.cache)
    assert out.dtype is torch.float32
    close(out, tree.want(q, causal), 2e-6)


def test_one_level_is_the_paged_wrapper():
    cache = pages([9, 4], page_size=PAGE, heads=KV_HEADS, dim=DIM)
    q, qo = queries(5, HEADS, DIM), offsets([3, 2])
    wrapper = MultiLevelCascadeAttentionWrapper(1, workspace())
    wrapper.plan([qo], *([t] for t in cache.table), HEADS, KV_HEADS, DIM, PAGE, True, window_left=3,
                 q_data_type="float32", pos_encoding_mode="ROPE_LLAMA")  # fmt: skip
    alone = attn_core.BatchPrefillWithPagedKVCacheWrapper(workspace())
    alone.plan(qo, *cache.table, HEADS, KV_HEADS, DIM, PAGE, causal=True, window_left=3,
               q_data_type="float32", pos_encoding_mode="ROPE_LLAMA")  # fmt: skip
    assert same_bits(wrapper.run(q, cache.cache), alone.run(q, cache.cache))


def test_a_level_without_keys_adds_nothing():
    tree = Tree(lengths=(0, 5, 0, 3, 7, 4))
    wrapper = MultiLevelCascadeAttentionWrapper(3, workspace())
    plan(wrapper, tree)
    q = queries(sum(Q_LENS), HEADS, DIM)
    close(wrapper.run(q, tree.cache.cache), tree.want(q, False), 2e-6)


def test_graph_mode_keeps_buffers_over_plans():
    first, second = Tree(), Tree(lengths=(5, 8, 2, 6, 1, 9), q_lens=[1, 3, 2], seed=3)
    rows = [ints(*([-7] * (n + 1))) for n in (1, 2, 3)]
    pointers = [t.clone() for t in rows]
    ids = [ints(*([-7] * 12)) for _ in range(3)]
    lasts = [ints(*([-7] * n)) for n in (1, 2, 3)]
    wrapper = MultiLevelCascadeAttentionWrapper(3, workspace(), "NHD", True, rows, pointers, ids, lasts)
    assert wrapper.is_cuda_graph_enabled
    for tree in (first, second, first):
        plan(wrapper, tree)
        q = queries(sum(tree.q_lens), HEADS, DIM)
        close(wrapper.run(q, tree.cache.cache), tree.want(q, False), 2e-6)
        assert [t.tolist() for t in rows] == [t.tolist() for t in tree.tables[0]]


@pytest.mark.parametrize("graph", [False, True])
def test_a_plan_that_fails_in_the_last_level_changes_no_level(graph):
    tree, other = Tree(), Tree(lengths=(5, 8, 2, 6, 1, 9), seed=3)
    buffers = ()
    if graph:
        buffers = tuple(
            [ints(*([0] * (n + extra))) for n in sizes]
            for sizes, extra in (((1, 2, 3), 1), ((1, 2, 3), 1), ((12, 12, 12), 0), ((1, 2, 3), 0))
        )
    wrapper = MultiLevelCascadeAttentionWrapper(3, workspace(), "NHD", graph, *buffers)
    plan(wrapper, tree)
    q = queries(sum(Q_LENS), HEADS, DIM)
    before, states = wrapper.run(q, tree.cache.cache), [level._state for level in wrapper.levels]
    bad = list(other.tables)
    bad[3] = [*bad[3][:2], ints(1, PAGE + 1, 1)]
    with pytest.raises(ValueError, match=r"kv_last_page_len\[1\].*\[core\.last-page\]"):
        wrapper.plan(*bad, HEADS, KV_HEADS, DIM, PAGE, q_data_type=torch.float32)
    assert [level._state for level in wrapper.levels] == states
    assert same_bits(wrapper.run(q, tree.cache.cache), before)


def test_a_failure_while_publishing_takes_every_level_back(monkeypatch):
    tree, other = Tree(), Tree(lengths=(5, 8, 2, 6, 1, 9), seed=3)
    wrapper = MultiLevelCascadeAttentionWrapper(3, workspace())
    plan(wrapper, tree)
    states = [level._state for level in wrapper.levels]
    publish = type(wrapper.levels[0])._publish

    def fails_on_the_last(self, *new):
        publish(self, *new)
        if self is wrapper.levels[2]:
            raise KeyboardInterrupt

    monkeypatch.setattr(type(wrapper.levels[0]), "_publish", fails_on_the_last)
    with pytest.raises(KeyboardInterrupt):
        plan(wrapper, other)
    assert [level._state for level in wrapper.levels] == states
    monkeypatch.undo()
    plan(wrapper, other)  # the locks are free again


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda t: (t[0][:2], *t[1:]), ValueError, "qo_indptr_arr: needs one tensor for each of 3 levels"),
        (lambda t: (t[0], t[1], t[2], t[3][0]), TypeError, "paged_kv_last_page_len: needs a list"),
        (lambda t: ([ints(0, 5), *t[0][1:]], *t[1:]), ValueError, "the same number of rows in every level"),
    ],
)
def test_wrong_lists_are_named(change, error, text):
    wrapper = MultiLevelCascadeAttentionWrapper(3, workspace())
    with pytest.raises(error, match=rf"{text}.*\[core\.cascade\]"):
        wrapper.plan(*change(Tree().tables), HEADS, KV_HEADS, DIM, PAGE)
    with pytest.raises(ValueError, match="prior plan"):
        wrapper.run(queries(6, HEADS, DIM), Tree().cache.cache)


@pytest.mark.parametrize("option", [{"pos_encoding_mode": "ALIBI"}, {"window_left": 4}])
def test_what_needs_positions_is_refused_with_several_levels(option):
    wrapper = MultiLevelCascadeAttentionWrapper(3, workspace())
    with pytest.raises(NotImplementedError, match=r"more than one level.*\[core\.cascade\]"):
        plan(wrapper, Tree(), **option)


@pytest.mark.parametrize(("levels", "error"), [(0, ValueError), (2.0, TypeError), (True, TypeError)])
def test_the_number_of_levels_is_checked(levels, error):
    with pytest.raises(error, match=r"num_levels.*\[core\.cascade\]"):
        MultiLevelCascadeAttentionWrapper(levels, workspace())


def test_a_workspace_is_replaced_for_all_levels_or_none():
    wrapper = MultiLevelCascadeAttentionWrapper(2, workspace())
    new, old = workspace(), wrapper.levels[0]._float_workspace_buffer
    with pytest.raises(ValueError, match="int_workspace_buffer must be 16-byte aligned"):
        wrapper.reset_workspace_buffer(new, [workspace(), workspace(80)[1:]])
    assert all(level._float_workspace_buffer is old for level in wrapper.levels)
    wrapper.reset_workspace_buffer(new, [workspace(), workspace()])
    assert all(level._float_workspace_buffer is new for level in wrapper.levels)


# ---- one prefix beside the cache ---------------------------------------------------------------------


def shared(length, order):
    k, v = (queries(length, KV_HEADS, DIM, seed=s) for s in (8, 9))
    return k, v, *((t.transpose(0, 1).contiguous() if order == "HND" else t) for t in (k, v))


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("length", [0, 11])
def test_decode_with_a_shared_prefix(order, length):
    cache = pages([9, 4, 1], page_size=PAGE, heads=KV_HEADS, dim=DIM, order=order)
    k, v, k_given, v_given = shared(length, order)
    wrapper = BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace(), order)
    wrapper.begin_forward(*cache.table, HEADS, KV_HEADS, DIM, PAGE, data_type=torch.float32)
    q = queries(3, HEADS, DIM)
    keys, values = ([torch.cat([s, own]) for own in each] for s, each in ((k, cache.keys), (v, cache.values)))
    want, _ = oracle(q, keys, values, [1, 1, 1])
    close(wrapper.forward(q, k_given, v_given, cache.cache), want, 2e-6)
    wrapper.end_forward()


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [False, True])
def test_prefill_with_a_shared_prefix(order, causal):
    cache = pages([9, 4, 3], page_size=PAGE, heads=KV_HEADS, dim=DIM, order=order)
    k, v, k_given, v_given = shared(11, order)
    wrapper = BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace(), order)
    table = offsets(Q_LENS), *cache.table
    wrapper.begin_forward(*table, HEADS, KV_HEADS, DIM, PAGE, q_data_type="float32")
    q = queries(sum(Q_LENS), HEADS, DIM)
    keys, values = ([torch.cat([s, own]) for own in each] for s, each in ((k, cache.keys), (v, cache.values)))
    for scale in (None, 0.2):
        want, _ = oracle(q, keys, values, Q_LENS, causal=causal, sm_scale=scale)
        out = wrapper.forward(q, k_given, v_given, cache.cache, causal=causal, sm_scale=scale)
        close(out, want, 2e-6)
    wrapper.reset_workspace_buffer(workspace(), workspace())
    close(wrapper.forward(q, k_given, v_given, cache.cache, causal=causal, sm_scale=0.2), want, 2e-6)
