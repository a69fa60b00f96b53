"""Who serves a captured wrapper, and what a backend may not change under it."""

import pytest
import torch

from attn_core.backend import PlanResult
from attn_core.capability import Capability, GraphSupport
from attn_core.errors import NoRoute, Unsupported
from attn_core.problem import Op
from attn_core.reasons import Reason
from attn_core.rules import Rule

from .fakes import BUILD, SLOW, WRONG, FakeBackend
from .kit import SIZES, Snapshot, decode_graph, decode_wrapper, ints, offsets, pages, prefill_graph, queries

LENGTHS = [[9, 3, 12], [3, 16, 5], [12, 12, 12], [4, 4, 4], [16, 3, 7]]


def slow_above(rows):
    return Rule(
        SLOW, frozenset(Op), frozenset({"p"}), lambda q: (rows, 1) if q.batch.max_kv_len > rows else None
    )


def wrong_above(rows):
    return Rule(
        WRONG, frozenset(Op), frozenset({"p"}), lambda q: (rows, 1) if q.batch.max_kv_len > rows else None
    )


def test_a_graph_keeps_its_candidate_whatever_auto_would_now_prefer(use):
    fake = use(FakeBackend(rules=[slow_above(10)]))
    short, long = pages([9, 3, 4]), pages([9, 3, 12])
    first_fake, first_reference = decode_graph(3, 12), decode_graph(3, 12)
    first_fake.plan(*short.table, *SIZES)
    assert first_fake.route.candidate == "fake/p"
    first_fake.plan(*long.table, *SIZES)
    assert first_fake.route.candidate == "fake/p"
    first_reference.plan(*long.table, *SIZES)
    assert first_reference.backend_fallback_reason is not None
    first_reference.plan(*short.table, *SIZES)
    assert first_reference.route.candidate == "reference/torch"
    assert fake.count("plan") == 2


def test_a_graph_never_runs_what_is_wrong(use):
    use(FakeBackend(rules=[wrong_above(10)]))
    short, long = pages([9, 3, 4]), pages([9, 3, 12])
    wrapper = decode_graph(3, 12)
    wrapper.plan(*short.table, *SIZES)
    kept = Snapshot.of(wrapper)
    with pytest.raises(NoRoute, match=r"fake.wrong"):
        wrapper.plan(*long.table, *SIZES)
    kept.require(wrapper)
    wrapper.plan(*short.table, *SIZES)


def test_a_graph_is_not_demoted_by_a_late_refusal(use):
    fake = use(FakeBackend())
    p, wrapper = pages([9, 3, 12]), decode_graph(3, 12)
    wrapper.plan(*p.table, *SIZES)
    kept = Snapshot.of(wrapper)
    fake.does["plan"] = Unsupported(Reason(BUILD, "fake/p", "more"))
    with pytest.raises(Unsupported):
        wrapper.plan(*p.table, *SIZES)
    kept.require(wrapper)


@pytest.mark.parametrize(
    ("level", "decode", "prefill"),
    [
        (GraphSupport.NEVER, "reference", "reference"),
        (GraphSupport.UNIFORM_BATCH, "fake", "reference"),
        (GraphSupport.ALWAYS, "fake", "fake"),
    ],
)
def test_what_cannot_be_captured_is_not_chosen(level, decode, prefill, use):
    kind = Capability(archs=None, ops=frozenset(Op), graph=level)
    use(FakeBackend(paths=[("p", kind)]))
    p = pages([9, 3, 12])
    one, two, eager = decode_graph(3, 12), prefill_graph(3, 12), decode_wrapper()
    one.plan(*p.table, *SIZES)
    two.plan(offsets([1, 2, 3]), *p.table, *SIZES)
    eager.plan(*p.table, *SIZES)
    assert (one.backend, two.backend, eager.backend) == (decode, prefill, "fake")


def test_a_launch_or_an_array_that_grows_with_the_batch_is_refused(use):
    """A graph replays the first launch: a backend that makes another has broken the contract."""
    fake = use(FakeBackend(plan=lambda query, path, batch: PlanResult(batch.shape.max_kv_len)))
    short, long = pages([9, 3, 4]), pages([9, 3, 12])
    wrapper = decode_graph(3, 12)
    wrapper.plan(*short.table, *SIZES)
    kept = Snapshot.of(wrapper)
    with pytest.raises(ValueError, match="launch is frozen"):
        wrapper.plan(*long.table, *SIZES)
    kept.require(wrapper)
    fake.does["plan"] = lambda query, path, batch: PlanResult(
        "launch", image={"tiles": torch.arange(batch.shape.max_kv_len, dtype=torch.int32)}
    )
    wrapper = decode_graph(3, 12)
    wrapper.plan(*short.table, *SIZES)
    kept = Snapshot.of(wrapper)
    with pytest.raises(ValueError, match="layout is frozen"):
        wrapper.plan(*long.table, *SIZES)
    kept.require(wrapper)


def test_arrays_of_a_backend_live_at_fixed_addresses_too(use):
    seen = []
    use(
        FakeBackend(
            plan=lambda query, path, batch: PlanResult(
                "l", image={"tiles": batch.kv_len * 10, "flag": ints(7)}
            ),
            run=lambda launch, image, io: seen.append((image["tiles"].tolist(), image["tiles"].data_ptr())),
        )
    )
    wrapper, q = decode_graph(3, 12), queries(3, 4, 8, torch.float16)
    for kv_lens in LENGTHS:
        p = pages(kv_lens, dtype=torch.float16)
        wrapper.plan(*p.table, *SIZES)
        wrapper.run(q, p.cache)
        assert wrapper._state.image["flag"].tolist() == [7]
    assert [tiles for tiles, _ in seen] == [[10 * n for n in kv_lens] for kv_lens in LENGTHS]
    assert len({at for _, at in seen}) == 1
