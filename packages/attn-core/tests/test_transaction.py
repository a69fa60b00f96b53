"""A plan() that fails, wherever and however it does, leaves its wrapper as it was: bit for bit."""

import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import attn_core
from attn_core import notices, options
from attn_core.backend import PlanResult
from attn_core.errors import Unsupported
from attn_core.reasons import Reason

from .fakes import BUILD, FakeBackend
from .kit import (
    Snapshot,
    decode_graph,
    decode_wrapper,
    ints,
    offsets,
    paged_wrapper,
    pages,
    prefill_graph,
    queries,
    ragged_graph,
    ragged_wrapper,
    random_mask,
    same_bits,
)

SOURCES = str(Path(attn_core.__file__).parent)


class Boom(BaseException):
    """Not an Exception: nothing in the package may catch it and carry on."""


@contextmanager
def each_line(found=None, bomb=None):
    """Note in ``found`` how often each line of attn_core runs, or raise at the ``bomb`` (line, time)."""
    seen = {}

    def line(frame, event, arg):
        if event == "line":
            key = (frame.f_code.co_filename, frame.f_lineno)
            seen[key] = seen.get(key, 0) + 1
            if bomb == (key, seen[key]):
                raise Boom
        return line

    def call(frame, event, arg):
        return line if frame.f_code.co_filename.startswith(SOURCES) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)
        if found is not None:
            found.update(seen)


def forget(wrapper):
    """Make the next plan() take the long way: no kept problem, no kept screening, nothing said."""
    options._make_problem.cache_clear()
    wrapper._screens.clear()
    notices.forget()


# ---- what is planned, and what is planned next: other lengths, and the pages in another order --------

OLD, NEW = [9, 3, 12], [5, 11, 8]


class Case:
    """A wrapper, the arguments of a good plan to lose, and those of another to fail with."""

    def __init__(self, wrapper, old, new):
        self.wrapper, self.old, self.new = wrapper, old, new

    def plan(self, arguments, **other):
        self.wrapper.plan(**{**arguments[0], **other})

    def run(self, arguments):
        return self.wrapper.run(*arguments[1], return_lse=True)


def decode_case(q_len, graph):
    def arguments(p):
        names = dict(zip(("indptr", "indices", "last_page_len"), p.table, strict=True))
        plan = {
            **names,
            "num_qo_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
            "page_size": 4,
            "q_data_type": "float32",
            "q_len_per_req": q_len,
            "seq_lens": ints(*p.kv_lens),
        }
        return plan, (queries(3 * q_len, 4, 8), p.cache)

    wrapper = decode_graph(3, 12) if graph else decode_wrapper()
    return Case(wrapper, arguments(pages(OLD)), arguments(pages(NEW, backwards=True)))


def prefill_case(graph):
    def arguments(p, q_lens):
        names = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        plan = {
            "qo_indptr": offsets(q_lens),
            **dict(zip(names, p.table, strict=True)),
            "num_qo_heads": 4,
            "num_kv_heads": 2,
            "head_dim_qk": 8,
            "page_size": 4,
            "q_data_type": "float32",
            "custom_mask": random_mask(q_lens, p.kv_lens)[0],
            "seq_lens_q": ints(*q_lens),
            "max_token_per_sequence": 5,
        }
        return plan, (queries(sum(q_lens), 4, 8), p.cache)

    wrapper = prefill_graph(3, 12, mask_bytes=64) if graph else paged_wrapper()
    return Case(wrapper, arguments(pages(OLD), [4, 0, 5]), arguments(pages(NEW, backwards=True), [2, 3, 1]))


def ragged_case(graph):
    def arguments(p, q_lens):
        plan = {
            "qo_indptr": offsets(q_lens),
            "kv_indptr": offsets(p.kv_lens),
            "num_qo_heads": 4,
            "num_kv_heads": 2,
            "head_dim_qk": 8,
            "causal": True,
            "q_data_type": "float32",
            "seq_lens": ints(*p.kv_lens),
        }
        return plan, (queries(sum(q_lens), 4, 8), torch.cat(p.keys), torch.cat(p.values))

    wrapper = ragged_graph(3) if graph else ragged_wrapper()
    return Case(wrapper, arguments(pages(OLD), [2, 6, 1]), arguments(pages(NEW), [3, 0, 4]))


CASES = {
    "decode": lambda: decode_case(1, graph=False),
    "decode graph": lambda: decode_case(1, graph=True),
    "verify": lambda: decode_case(3, graph=False),
    "verify graph": lambda: decode_case(3, graph=True),
    "prefill mask": lambda: prefill_case(graph=False),
    "prefill mask graph": lambda: prefill_case(graph=True),
    "ragged": lambda: ragged_case(graph=False),
    "ragged graph": lambda: ragged_case(graph=True),
}
MODULES = {"planner.py", "batch.py", "route.py", "arena.py", "state.py", "options.py", "reference.py"}


def same_results(a, b):
    return all(same_bits(x, y) for x, y in zip(a, b, strict=True))


def lines_of(case, arguments):
    """How often each line of the package runs in a plan that takes the long way."""
    found = {}
    forget(case.wrapper)
    with each_line(found=found):
        case.plan(arguments)
    assert {Path(file).name for file, _ in found} >= MODULES
    assert len(found) > 200
    return found


@pytest.mark.parametrize("name", CASES)
def test_an_exception_at_any_line_changes_nothing(name):
    case, probe = CASES[name](), CASES[name]()
    case.plan(case.old)
    want, kept = case.run(case.old), Snapshot.of(case.wrapper)
    probe.plan(probe.old)
    for key, times in lines_of(probe, probe.new).items():
        for time in range(1, times + 1):
            forget(case.wrapper)
            with pytest.raises(Boom), each_line(bomb=(key, time)):
                case.plan(case.new)
            kept.require(case.wrapper)
    assert same_results(case.run(case.old), want)

    case.plan(case.new)
    assert same_results(case.run(case.new), probe.run(probe.new))
    assert case.wrapper._arena is kept.arena


@pytest.mark.parametrize("name", ["decode graph", "prefill mask graph", "verify"])
def test_an_exception_at_any_line_of_the_first_plan_leaves_no_plan(name):
    case, probe = CASES[name](), CASES[name]()
    kept = Snapshot.of(case.wrapper)
    assert kept.state is None
    for key in lines_of(probe, probe.old):
        forget(case.wrapper)
        with pytest.raises(Boom), each_line(bomb=(key, 1)):
            case.plan(case.old)
        kept.require(case.wrapper)
    with pytest.raises(ValueError, match=r"call plan\(\) first"):
        case.run(case.old)
    case.plan(case.old)
    assert same_results(case.run(case.old), probe.run(probe.old))


# ---- plans that fail by themselves ------------------------------------------------------------------

PAGED = {  # arguments that fail in every paged plan, with what the message must name
    "q dtype": ({"q_data_type": "int8"}, "int8"),
    "kv dtype": ({"kv_data_type": torch.int32}, "int32"),
    "dtype name": ({"q_data_type": "float17"}, "float17"),
    "heads": ({"num_qo_heads": 5}, "num_qo_heads"),
    "page size": ({"page_size": 0}, "page_size"),
    "encoding": ({"pos_encoding_mode": "ROPE"}, "pos_encoding_mode"),
    "window": ({"window_left": -2}, "window_left"),
    "cap": ({"logits_soft_cap": -1.0}, "logits_soft_cap"),
    "scale": ({"sm_scale": float("nan")}, "sm_scale"),
    "unsupported": ({"block_tables": torch.zeros(1)}, "block_tables"),
}
DECODE = {
    "indptr falls": ({"indptr": ints(0, 3, 2, 6)}, r"indptr\[2\].*3.*got 2"),
    "indptr start": ({"indptr": ints(1, 3, 4, 6)}, r"indptr\[0\]"),
    "indptr size": ({"indptr": ints(0, 3, 6)}, "indptr"),
    "few indices": ({"indices": ints(0, 1)}, "indices"),
    "page id": ({"indices": ints(5, 4, 3, -1, 1, 0, 6)}, r"indices\[3\].*-1"),
    "last page": ({"last_page_len": ints(1, 5, 1)}, r"last_page_len\[1\].*got 5"),
    "empty last page": ({"last_page_len": ints(1, 1, 0)}, r"last_page_len\[2\].*got 0"),
    "float indices": ({"indices": torch.zeros(9)}, "indices"),
    "seq_lens over": ({"seq_lens": ints(5, 12, 8)}, r"seq_lens\[1\].*11.*got 12"),
    "seq_lens few": ({"seq_lens": ints(5, 11)}, "seq_lens"),
    "q_len": ({"q_len_per_req": 0}, "q_len_per_req"),
    "too long to verify": ({"q_len_per_req": 6}, "q_len_per_req"),
}
GRAPH = {
    "another q_len": ({"q_len_per_req": 2}, "q_len_per_req.*frozen"),
    "another head count": ({"num_qo_heads": 8}, "num_qo_heads is frozen at 4, asked for 8"),
    "another type": ({"q_data_type": "float16"}, "q_dtype is frozen"),
    "another cap": ({"logits_soft_cap": 1.0}, "logits_soft_cap is frozen"),
    "another batch": (
        {"indptr": ints(0, 2, 3), "last_page_len": ints(1, 4), "seq_lens": None},
        "batch size.*3.*got 2",
    ),
    "capacity": ({"indptr": ints(0, 2, 5, 13), "indices": torch.arange(13)}, "kv_indices.*12.*got 13"),
}
PREFILL = {
    "mask size": ({"custom_mask": torch.ones(70, dtype=torch.bool)}, "custom_mask.*got shape"),
    "mask type": ({"custom_mask": torch.ones(71)}, "custom_mask"),
    "packed size": (
        {"custom_mask": None, "packed_custom_mask": torch.zeros(3, dtype=torch.uint8)},
        "packed_custom",
    ),
    "q lengths": ({"seq_lens_q": ints(2, 3, 2)}, r"seq_lens_q\[2\].*1.*got 2"),
    "longest": ({"max_token_per_sequence": 2}, "max_token_per_sequence.*3"),
    "longest keys": ({"max_sequence_kv": 10}, "max_sequence_kv.*11"),
    "qo_indptr falls": ({"qo_indptr": ints(0, 3, 2, 6)}, r"qo_indptr\[2\]"),
}
PREFILL_GRAPH = {
    "no mask": ({"custom_mask": None}, "mask is frozen"),
    "rows": (
        {"qo_indptr": ints(0, 4, 8, 10), "custom_mask": torch.ones(80, dtype=torch.bool), "seq_lens_q": None},
        "rows.*9.*got 10",
    ),
}
EVERY_FAILURE = [
    *(
        (name, key, how)
        for name in ("decode", "decode graph", "verify", "verify graph")
        for table in (PAGED, DECODE)
        for key, how in table.items()
    ),
    *((name, key, how) for name in ("decode graph", "verify graph") for key, how in GRAPH.items()),
    *(
        (name, key, how)
        for name in ("prefill mask", "prefill mask graph")
        for table in (PAGED, PREFILL)
        for key, how in table.items()
    ),
    *(("prefill mask graph", key, how) for key, how in PREFILL_GRAPH.items()),
]


@pytest.mark.parametrize("name", dict.fromkeys(name for name, _, _ in EVERY_FAILURE))
def test_a_plan_that_is_refused_changes_nothing(name):
    case = CASES[name]()
    case.plan(case.old)
    want, kept = case.run(case.old), Snapshot.of(case.wrapper)
    for key, (other, message) in ((key, how) for of, key, how in EVERY_FAILURE if of == name):
        with pytest.raises((ValueError, TypeError, NotImplementedError), match=message) as caught:
            case.plan(case.new, **other)
        assert "[core." in str(caught.value), key
        kept.require(case.wrapper)
    assert same_results(case.run(case.old), want)
    case.plan(case.new)
    assert not same_results(case.run(case.old if "prefill" not in name else case.new), want)


def test_a_capped_graph_refuses_longer_sequences_than_it_promised():
    wrapper = decode_graph(3, 12, max_seq_len=12)
    p, longer = pages(OLD), pages([5, 13, 8])
    wrapper.plan(*p.table, 4, 2, 8, 4)
    kept = Snapshot.of(wrapper)
    with pytest.raises(ValueError, match=r"kv length.*max_seq_len 12.*got 13"):
        wrapper.plan(*longer.table, 4, 2, 8, 4)
    kept.require(wrapper)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(
    "failure",
    [
        ValueError("bad"),
        TypeError("bad"),
        MemoryError("bad"),
        OSError("bad"),
        KeyboardInterrupt("bad"),
        Unsupported(Reason(BUILD, "fake/p", "bad")),
        PlanResult("launch", workspace_bytes=65),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_a_backend_that_fails_late_changes_nothing(failure, graph, use):
    """The plan of a backend is the last thing that can go wrong: after every check of arguments."""
    fake = use(FakeBackend(), reference=False)
    case = decode_case(3, graph)
    case.plan(case.old)
    want, kept = case.run(case.old), Snapshot.of(case.wrapper)
    fake.does["plan"] = failure
    kind = type(failure) if isinstance(failure, BaseException) else ValueError
    if isinstance(failure, Unsupported) and not graph:
        kind = NotImplementedError  # nothing else can serve it
    with pytest.raises(kind, match=r"bad|float_workspace_buffer: needs 65 bytes, got 64"):
        case.plan(case.new)
    kept.require(case.wrapper)
    assert same_results(case.run(case.old), want)
    del fake.does["plan"]
    case.plan(case.new)
    assert case.wrapper._state.revision == 1


@pytest.mark.parametrize("what", ["prepare", "unavailable"])
def test_a_backend_that_fails_to_build_changes_nothing(what, use):
    fake = use(FakeBackend(), reference=False)
    case = decode_case(3, graph=False)
    case.plan(case.old)
    kept = Snapshot.of(case.wrapper)
    fake.does[what] = RuntimeError("no compiler")
    with pytest.raises(RuntimeError, match="no compiler"):
        case.plan(case.new, window_left=3)
    kept.require(case.wrapper)
    fake.does.clear()
    case.plan(case.new, window_left=4)
    assert case.wrapper._state.query.problem.window_left == 4


def test_rows_of_the_old_plan_stay_right_after_a_failed_one_of_another_length():
    """plan(q_len 4), a failing plan(q_len 2), run(4 rows each): upstream then walked rows 2 apart."""
    p, q = pages([9, 6, 12]), queries(12, 4, 8)
    wrapper = decode_wrapper()
    wrapper.plan(*p.table, 4, 2, 8, 4, q_data_type="float32", q_len_per_req=4)
    want = wrapper.run(q, p.cache)
    with pytest.raises(NotImplementedError):
        wrapper.plan(*p.table, 4, 2, 8, 4, q_data_type="int8", q_len_per_req=2)
    out = torch.full_like(want, float("nan"))
    assert same_bits(wrapper.run(q, p.cache, out=out), want)
    assert wrapper._qo_indptr_buf.tolist() == [0, 4, 8, 12]
    assert wrapper.q_len_per_req == 4
