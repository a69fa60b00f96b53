"""The declaration table: what it refuses, what it is named, and that every row is true."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from attn_compile import ops, schema
from attn_compile.plans import PLANS
from attn_compile.registry import register
from attn_compile.rows import APPEND, APPEND_ONE, MERGE, RUN
from attn_compile.rows import ROWS as FUNCTIONS
from attn_compile.testing.declared import faults
from attn_core import (
    BatchDecodeWithPagedKVCacheWrapper,
    BatchMLAPagedAttentionWrapper,
    plugins,
    tracing,
)
from attn_core.hookspecs import hookimpl
from attn_core.op_table import Arg, OpRow, Role

ROWS = (*FUNCTIONS, *PLANS)


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def row(*args, **changes):
    return OpRow("theirs", args, lambda *a: None, **changes)


BAD = {
    "two caches": (
        row(Arg("k", role=Role.CACHE), Arg("v", role=Role.CACHE)),
        r"theirs.v: needs at most one argument of role cache, got k and v \[compile.two-caches\].*split",
    ),
    "cache on an int": (row(Arg("k", "int", Role.CACHE)), r"theirs.k: needs a Tensor for role cache.*const"),
    "optional cache": (row(Arg("k", "Tensor?", Role.CACHE)), r"theirs.k: needs Tensor for role cache"),
    "scratch on a float": (
        row(Arg("w", "float", Role.SCRATCH)),
        r"theirs.w: needs a Tensor for role scratch",
    ),
    "an int that changes per plan": (
        row(Arg("max_kv_len", "int", Role.PLAN)),
        r"theirs.max_kv_len: needs a Tensor for role plan, got int \[compile.per-plan\].*int64 CPU tensor",
    ),
    "a tensor as const": (row(Arg("x", "Tensor", Role.CONST)), r"theirs.x: needs one of int.*role read"),
    "an int as read": (row(Arg("x", "int")), r"theirs.x: needs a Tensor for role read, got int"),
    "one name twice": (row(Arg("x"), Arg("x")), r"theirs.x: needs a name of its own, got 2"),
    "no fresh": (row(Arg("x"), Arg("o", role=Role.OUT)), r"theirs.fresh: needs a function"),
    "out in front": (
        row(Arg("o", role=Role.OUT), Arg("x"), fresh=lambda x: (x,)),
        r"theirs.o: needs arguments of role out last",
    ),
    "out and returned": (
        row(Arg("o", role=Role.OUT), fresh=lambda: (), returns=1),
        r"theirs.o: needs out arguments or returned tensors, got both",
    ),
    "into nothing": (row(Arg("x"), into=True), r"theirs.into: needs an argument of role out"),
    "no identifier": (OpRow("their-op", (), print), r"their-op.base: needs an identifier"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_row_that_cannot_be_exact_is_refused(case):
    bad, message = BAD[case]
    tracer = ops.OpTracer()
    with pytest.raises(ValueError, match=message):
        tracer.add([row(Arg("fine")), bad], "their-package")
    assert "theirs" not in tracer._calls


def test_a_name_can_be_taken_once():
    tracer = ops.OpTracer()
    with pytest.raises(
        ValueError, match=r"packbits: needs a name not in use, got one of attn-core .*their-pa"
    ):
        tracer.add([replace(row(Arg("x")), base="packbits")], "their-package")


def test_the_name_follows_the_declaration():
    k = RUN.args.index(Arg("k"))
    mutated = replace(RUN, args=(*RUN.args[:k], Arg("k", role=Role.CACHE), *RUN.args[k + 1 :]))
    assert len({schema.name(r) for r in (RUN, mutated, replace(RUN, revision=1))}) == 3
    assert schema.name(RUN).startswith("run__")
    assert "Tensor k," in schema.schema(RUN)
    assert "Tensor(a!) k," in schema.schema(mutated)


def test_a_package_adds_an_operator_through_the_hook():
    seen = []

    class Plugin:
        @staticmethod
        @hookimpl
        def attn_backends(api_version, config):
            return ()

        @staticmethod
        @hookimpl
        def attn_op_table():
            def twice(x):
                seen.append(tuple(x.shape))
                return x * 2

            return [OpRow("theirs_twice", (Arg("x"),), twice, lambda x: (torch.empty_like(x),), returns=1)]

    def entry(name, plugin):
        return SimpleNamespace(name=name, dist=None, load=lambda: plugin)

    from attn_compile import plugin as ours

    old = tracing._tracer
    try:
        found = plugins.discover([entry("ours", ours), entry("theirs", Plugin)], config={})
        assert not found.broken
        step = torch.compile(lambda x: tracing.call("theirs_twice", x + 1), fullgraph=True)
        assert torch.equal(step(torch.ones(3)), torch.full((3,), 4.0))
        assert seen == [(3,)]
        bad = type(
            "Bad", (Plugin,), {"attn_op_table": staticmethod(hookimpl(lambda: [BAD["two caches"][0]]))}
        )
        (broken,) = plugins.discover([entry("ours", ours), entry("theirs", bad)], config={}).broken
        assert broken.name == "theirs"
        assert "at most one argument of role cache" in broken.error
    finally:
        tracing.install(old)


def tables():
    """Two requests of 3 and 5 tokens, on pages 2 and 1, 0."""
    return i32(0, 0, 1), i32(1, 2, 4), i32(2, 1, 0), i32(0, 1, 3), i32(3, 1)


def append_args(cache, *front):
    batch, positions, indices, indptr, last = tables()
    return (*front, cache, batch, positions, indices, indptr, last, "NHD", "auto")


KEPT = []  # a graph does not keep its wrapper alive


def samples():
    torch.manual_seed(0)
    rows = torch.randn(3, 2, 8)
    pages = torch.randn(3, 4, 2, 8)
    states = torch.randn(5, 2, 8), torch.randn(5, 2), torch.randn(5, 2, 8), torch.randn(5, 2)
    _, _, indices, indptr, last = tables()
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(64, dtype=torch.uint8))
    wrapper.plan(indptr, indices, last, 4, 2, 8, 4, q_data_type=torch.float32)
    KEPT.append(wrapper)
    q, factors = torch.randn(2, 4, 8), (None, None, None, 1.0, 1.0, 1.0)
    single = (False, "NHD", "NONE", True, -1, None, None, None, None, "auto")
    probs = torch.rand(2, 3, 11).softmax(-1)
    ids = i32(3, 4, 1, 2).view(2, 2)
    seed = torch.tensor([5])
    yield "run", (
        wrapper._handle, q, pages, pages.clone(), *factors, torch.float32, True,
        torch.empty_like(q), torch.empty(2, 4),
    )  # fmt: skip
    table = (indptr, indices, last, None, 4, 2, 8, 4, "NONE", -1, None)
    types, rest = (torch.float32,) * 3, (None, None, None, None, False, 1, False)
    yield "plan_decode", (wrapper._handle, None, *table, *types, *rest)
    number = register(PLANS[0]).op(wrapper._handle, None, *table, *types, *rest)
    yield "run_planned", (
        number, wrapper._handle, q, pages, pages.clone(), *factors, torch.float32, True,
        torch.empty_like(q), torch.empty(2, 4),
    )  # fmt: skip
    latent = BatchMLAPagedAttentionWrapper(torch.empty(1024, dtype=torch.uint8))
    latent.plan(i32(0, 1, 2), indptr, indices, i32(3, 5), 4, 8, 4, 4, True, 0.3, torch.float32, torch.float32)
    KEPT.append(latent)
    yield "run_mla", (
        latent._handle, torch.randn(2, 4, 8), torch.randn(2, 4, 4), torch.randn(3, 4, 8),
        torch.randn(3, 4, 4),
        torch.float32, True, True, torch.empty(2, 4, 8), torch.empty(2, 4),
    )  # fmt: skip
    yield "add_sink", (*states[:2], torch.randn(2))
    yield "single", (
        q, *(torch.randn(6, 2, 8) for _ in "kv"), *factors, None, True, None, None, "prefill", *single,
        torch.empty_like(q), torch.empty(2, 4),
    )  # fmt: skip
    yield "append_paged_kv_cache", (
        rows, rows + 1, pages.repeat(2, 1, 1, 1, 1), [0, 0], [0, 1], *append_args(None)[1:],
    )  # fmt: skip
    yield "append_to_one", (rows, pages.clone(), 3, *append_args(None)[1:])
    yield "merge_state", states
    yield "merge_states", (states[0][:, None].repeat(1, 3, 1, 1), states[1][:, None].repeat(1, 3, 1))
    yield "merge_state_in_place", (*states, torch.tensor([1, 0, 1, 1, 0], dtype=torch.bool))
    yield "packbits", (torch.randint(2, (13,), dtype=torch.uint8), "big")
    yield "segment_packbits", (torch.randint(2, (13,), dtype=torch.uint8), i32(0, 5, 5, 13), "little")
    counts = torch.zeros(2, dtype=torch.int32)
    yield (
        "chain_speculative_sampling",
        (probs[:, :2], ids, probs, counts, None, True, "reference", seed, seed),
    )
    yield "get_batch_indices_positions", (i32(0, 2, 3), i32(3, 5), 4)
    yield "get_seq_lens", (indptr, last, 4)


SAMPLES = [name for name, _ in samples()]


def test_every_row_has_a_sample():
    assert {r.base for r in ROWS} == set(SAMPLES)


@pytest.fixture
def sample(request):
    args = dict(samples())[request.param]
    return {r.base: register(r) for r in ROWS}[request.param].op, args


@pytest.mark.parametrize("sample", SAMPLES, indirect=True)
def test_opcheck_finds_the_declaration_true(sample):
    op, args = sample
    tests = ["test_schema", "test_faketensor"]
    if not op.name().startswith("attn::plan_decode"):  # every plan has a number of its own
        tests.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(op, args, test_utils=tests)


@pytest.mark.parametrize("sample", SAMPLES, indirect=True)
def test_nothing_is_declared_written_that_is_not_and_no_byte_beside_is_written(sample):
    op, args = sample
    assert faults(op, [args]) == []


def _declared(base, role, kernel):
    args = (Arg("x", role=role), Arg("y"))
    op = register(replace(OpRow(base, args, kernel))).op
    return faults(op, [(torch.zeros(4), torch.ones(4)), (torch.zeros(2, 3).t(), torch.ones(3, 2))])


def test_the_declaration_check_finds_each_kind_of_untruth():
    assert _declared("t_fine", Role.CACHE, lambda x, y: x.copy_(y)) == []
    assert _declared("t_over", Role.CACHE, lambda x, y: None) == ["x: declared written, never changed"]
    assert "x: written, not declared" in _declared("t_under", Role.READ, lambda x, y: x.copy_(y))[0]
    beside = _declared("t_beside", Role.CACHE, lambda x, y: x.as_strided((1,), (1,), 0).fill_(3))
    assert beside[0] == "x: memory beside it written (sample 0)"


def test_the_append_rows_write_one_allocation_each():
    for each in (APPEND, APPEND_ONE):
        assert [arg.role for arg in each.args].count(Role.CACHE) == 1
    assert all("!" not in schema.schema(each) for each in MERGE)
