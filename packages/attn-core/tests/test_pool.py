"""Several shapes of captured decode in one object, each with small buffers of its own."""

import pytest
import torch

from attn_core.capability import Capability, GraphSupport
from attn_core.pool import DecodePlanPool
from attn_core.problem import Op

from .fakes import FakeBackend
from .kit import SIZES, Snapshot, close, oracle, pages, queries, replay, workspace


def test_every_shape_has_a_plan_of_its_own():
    pool = DecodePlanPool(workspace(), max_pages=16)
    states = {}
    for step in range(2):
        for batch, q_len in ((2, 1), (2, 3), (3, 1), (1, 4), (2, 1)):
            p = pages([7 + step, 5, 9][:batch], seed=batch + step)
            q = queries(batch * q_len, 4, 8, seed=q_len)
            wrapper = pool.plan(*p.table, *SIZES, q_data_type="float32", q_len_per_req=q_len)
            assert wrapper is pool[batch, q_len]
            state = states.setdefault((batch, q_len), wrapper._state)
            want = oracle(q, p.keys, p.values, [q_len] * batch, causal=q_len > 1)[0]
            close(replay(state, q, p.cache)[0], want, 2e-6)
            close(wrapper.run(q, p.cache), want, 2e-6)
    assert pool.keys == [(1, 4), (2, 1), (2, 3), (3, 1)]
    assert len(pool) == 4
    assert (2, 3) in pool
    assert (3, 3) not in pool
    with pytest.raises(KeyError, match=r"\(3, 3\).*\(1, 4\), \(2, 1\)"):
        pool[3, 3]


def test_twenty_batch_sizes_own_index_buffers_only():
    """Upstream's wrappers took 72 MB each."""
    pool = DecodePlanPool(workspace(1 << 16), max_pages=512, max_seq_len=64)
    one_by_one = []
    for batch in range(1, 21):
        pool.plan(*pages([9] * batch).table, *SIZES)
        one_by_one.append(pool.owned_bytes)
    assert one_by_one == sorted(set(one_by_one))
    member = pool[20, 1]
    distinct = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in member._state.image.values()
    }
    assert member.owned_bytes == sum(distinct.values())
    # two page tables (the caller's kind of buffer and the landing place of the upload) and 9 short arrays
    assert member.owned_bytes <= 4 * (2 * 512 + 9 * 24)
    assert pool.owned_bytes == sum(pool[key].owned_bytes for key in pool.keys)
    assert pool.owned_bytes < 20 * 5000


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"q_data_type": "int8"}, NotImplementedError),
        ({"q_len_per_req": 0}, ValueError),
        ({"q_len_per_req": 8}, ValueError),
        ({"window_left": "x"}, TypeError),
        ({"no_such": 1}, TypeError),
    ],
)
def test_a_failing_first_plan_leaves_no_member(options, error):
    pool, p = DecodePlanPool(workspace(), max_pages=16), pages([7, 5])
    with pytest.raises(error):
        pool.plan(*p.table, *SIZES, **options)
    assert (len(pool), pool.keys, pool.owned_bytes) == (0, [], 0)
    pool.plan(*p.table, *SIZES)
    kept = Snapshot.of(pool[2, 1])
    with pytest.raises(error):
        pool.plan(*p.table, *SIZES, **options)
    kept.require(pool[2, 1])
    assert pool.keys == [(2, 1)]


def test_members_are_routed_on_their_own(use):
    kind = Capability(archs=None, ops=frozenset({Op.VERIFY}), graph=GraphSupport.UNIFORM_BATCH)
    use(FakeBackend(paths=[("p", kind)]))
    pool, p = DecodePlanPool(workspace(), max_pages=16), pages([7, 5])
    assert pool.plan(*p.table, *SIZES).backend == "reference"
    assert pool.plan(*p.table, *SIZES, q_len_per_req=2).backend == "fake"
    named = DecodePlanPool(workspace(), max_pages=16, backend="fake")
    with pytest.raises(NotImplementedError, match=r"core.op"):
        named.plan(*p.table, *SIZES)
    assert len(named) == 0


def test_limits_hold_for_every_member():
    pool = DecodePlanPool(workspace(), max_pages=4, max_seq_len=10)
    with pytest.raises(ValueError, match=r"at most 4 entries.*got 5"):
        pool.plan(*pages([9, 8]).table, *SIZES)
    with pytest.raises(ValueError, match="max_seq_len 10 tokens, got 11"):
        pool.plan(*pages([11]).table, *SIZES)
    assert len(pool) == 0
    with pytest.raises(TypeError, match="last_page_len: needs an int32 tensor, got list"):
        pool.plan([0, 1], [0], [1], *SIZES)
    for bad, error in ((0, ValueError), (-1, ValueError), (True, TypeError), (2.0, TypeError)):
        with pytest.raises(error, match="max_pages"):
            DecodePlanPool(workspace(), max_pages=bad)


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_layout_reaches_the_members(order):
    pool = DecodePlanPool(workspace(), 16, order)
    p, q = pages([7, 5], order=order, dtype=torch.float16), queries(2, 4, 8, torch.float16)
    out = pool.plan(*p.table, *SIZES).run(q, p.cache)
    close(out, oracle(q, p.keys, p.values, [1, 1])[0], 1e-3)


def test_one_row_may_go_to_a_path_that_takes_no_matrix_route(use):
    rows = Capability(
        archs=None, ops=frozenset({Op.DECODE}), tensor_cores=False, graph=GraphSupport.UNIFORM_BATCH
    )
    tile = Capability(archs=None, ops=frozenset({Op.VERIFY}), graph=GraphSupport.UNIFORM_BATCH)
    use(FakeBackend("fake", paths=(("rows", rows), ("tile", tile))))
    pool = DecodePlanPool(workspace(), max_pages=16, backend="fake")
    p = pages([7, 5])
    for q_len, path in ((1, "fake/rows"), (3, "fake/tile")):
        wrapper = pool.plan(*p.table, *SIZES, q_data_type="float32", q_len_per_req=q_len)
        assert wrapper.route.candidate == path
