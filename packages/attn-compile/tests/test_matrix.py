"""The matrix on this torch, and that it goes red when a declaration, a name or the repair is spoilt."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from attn_compile import defects, guard, ops, registry, schema
from attn_compile.rows import RUN
from attn_compile.testing import copies, matrix
from attn_compile.testing.stale import flipped, replay
from attn_core import tracing

BACKEND = "reference"


@pytest.mark.parametrize("cell", matrix.cells(), ids=str)
def test_a_cell_is_exact_or_refused_for_a_known_defect(cell):
    matrix.check(cell, BACKEND)


def test_the_cells_cover_every_choice():
    chosen, every = matrix.cells(), matrix.every()
    assert 55 <= len(chosen) <= 65
    for field in ("program", "layout", "grad"):
        assert {getattr(c, field) for c in chosen} == {getattr(c, field) for c in every}
    assert len({(c.program, c.layout, c.mode) for c in every}) == len(every) == 800
    assert len(matrix.probe()) == 10


def test_nothing_but_slices_made_in_the_graph_may_be_refused():
    for defect in defects.known():
        assert "given" not in defect.made
        assert defect.reference
        assert defect.effect
        assert defect.here
    assert defects.explains("given", "mixed", "automatic") is None
    old, new = (2, 11), (2, 13)
    by_name = {defect.name: defect for defect in defects.known()}
    assert by_name["as_strided-input-offset"].applies(old)
    assert not by_name["as_strided-input-offset"].applies(new)
    assert by_name["sym_storage_offset-lowering"].applies(new)


@pytest.fixture
def spoilt_run(monkeypatch):
    """Install a tracer whose run() declares arguments written that are not."""

    def install(*names):
        monkeypatch.setattr(registry, "validate", lambda row: row)
        tracer = ops.OpTracer()
        tracer._ops["run"] = registry.register(replace(flipped(RUN, *names), revision=len(names) + 100)).call
        tracing.install(tracer)

    old = tracing._tracer
    yield install
    tracing.install(old)


RED = {
    ("k",): [("read", "kv[i] inside", "dynamic"), ("read_append", "pool one inside", "static")],
    ("k", "v"): [
        ("read", "kv[i]", "dynamic"),
        ("read", "pool[1,i]", "static"),
        ("mixed", "kv[:,i]", "automatic"),
    ],
}


@pytest.mark.parametrize("names", RED, ids=lambda names: "+".join(names))
def test_a_cache_declared_written_turns_cells_red(spoilt_run, names):
    spoilt_run(*names)
    found = {cell: matrix.run(matrix.Cell(*cell), BACKEND) for cell in RED[names]}
    bad = {cell: outcome for cell, outcome in found.items() if outcome.verdict != "exact"}
    assert bad, found
    assert all(outcome.verdict in ("refused", "copied", "wrong") for outcome in bad.values()), found


def test_a_copied_cache_is_seen_where_the_guard_does_not_look():
    assert copies.watch()

    @torch.compile(fullgraph=True)
    def step(x):
        return (x * 2).view(torch.int32).clone(), torch.ops.aten.add_(x, 1)

    with copies.Allocations() as seen:
        step(torch.zeros(64, 64))
    assert seen.at_least(64 * 64 * 4)
    assert not seen.at_least(64 * 64 * 4 + 1)


@pytest.mark.parametrize("plain_names", [False, True], ids=["hashed", "unhashed"])
def test_a_disk_cache_of_another_declaration_is_found_by_plain_names_only(tmp_path, plain_names):
    found = replay(tmp_path, plain_names=plain_names, backend=BACKEND)
    if plain_names:
        assert (found["exact"], found["hits"] > 0) == (False, True)
    else:
        assert (found["exact"], found["hits"]) == (True, 0)


def run_cells(cells, **variables):
    code = f"""
import json, torch
from attn_compile.testing import matrix
torch.set_num_threads(1)
found = [matrix.run(matrix.Cell(*cell), {BACKEND!r}) for cell in {cells!r}]
print(json.dumps([(o.verdict, o.detail) for o in found]))
"""
    env = {**os.environ, **variables}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


SEVERAL = [("plain", "kv[i]", "dynamic"), ("append", "kv[:,i]", "automatic", "inference")]


def test_each_repair_makes_exact_what_is_named_or_stopped_without_it():
    for cell in SEVERAL:
        assert matrix.run(matrix.Cell(*cell), BACKEND).verdict == "exact", cell
    copied, stopped = run_cells(SEVERAL, ATTN_COMPILE_NO_FIXUPS="1")
    assert copied[0] == "refused"
    assert "compile.cache-copy" in copied[1]
    assert stopped[0] == "error"


def test_nothing_of_inductor_is_imported_before_a_region_is_traced():
    code = """
import sys, torch, attn_core as a
w = a.BatchDecodeWithPagedKVCacheWrapper(torch.empty(64, dtype=torch.uint8), backend="reference")
i = lambda *x: torch.tensor(x, dtype=torch.int32)
w.plan(i(0, 1), i(0), i(3), 2, 1, 8, 4, q_data_type=torch.float32)
w.run(torch.randn(1, 2, 8), torch.randn(1, 2, 4, 1, 8))
from attn_core import tracing
rows = tracing.state().doctor(False)
print("torch._inductor.lowering" in sys.modules, "torch._dynamo" in sys.modules, rows["scatter in place"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split(maxsplit=2) == ["False", "False", "installed when a region is first compiled\n"]


LAYER = [("append_read", "pool one inside", "dynamic"), ("mixed", "kv[i] inside", "automatic")]


def test_without_the_lowering_fix_there_are_errors_and_no_wrong_numbers():
    for verdict, detail in run_cells(LAYER, ATTN_COMPILE_NO_FIXUPS="1"):
        assert verdict == "refused"
        assert "compile.misplaced" in detail


def test_without_fix_and_guard_the_same_cells_are_wrong():
    found = run_cells(LAYER, ATTN_COMPILE_NO_FIXUPS="1", ATTN_COMPILE_NO_GUARD="1")
    assert {verdict for verdict, _ in found} <= {"wrong", "error"}


def test_the_guard_is_on_and_looked():
    guard.stats.clear()
    matrix.check(matrix.Cell("append_read", "one", "static"), BACKEND)
    assert guard.state() == "on"
    assert guard.stats["checked"] > 0


def test_a_refusal_says_what_and_what_to_do():
    found = matrix.run(matrix.Cell("append_read", "bytes inside", "static"), BACKEND)
    assert found.verdict == "refused"
    assert "append_to_one.cache: needs" in found.detail or "run.k: needs" in found.detail
    assert "compile.misplaced" in found.detail
    assert schema.REVISION
