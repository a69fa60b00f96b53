"""The kit's own test: backends that compute right and behave wrong, or claim what is not so."""

import os
from dataclasses import replace

import pytest
import torch

from attn_core.backend import Path
from attn_core.problem import MaskMode, Op
from attn_core.reasons import Code, Reason, Stage
from attn_core.rules import Rule
from attn_core.testing import checks, failures
from attn_core.testing.mini import CAPABILITY, Launch, Mini

ORACLE = "matches_the_oracle"


class Polite(Mini):
    """Root of this file's faults, so that they can be listed."""


class WritesTheCache(Polite):
    caught_by = "writes_only_outputs"

    def scratch(self, io):
        bits = io.k.view(torch.uint8 if io.k.dtype.itemsize == 1 else torch.int32)
        bits.bitwise_xor_(1)  # the last bit of every element


class WritesTheIndexArrays(Polite):
    caught_by = "writes_only_outputs"

    def run(self, launch, image, io):
        super().run(launch, image, io)
        image["kv_len"].add_(1)


class WritesBehindTheWorkspace(Polite):
    caught_by = "writes_only_outputs"

    def scratch(self, io):
        io.workspace.as_strided((65,), (1,)).zero_()


class WritesBetweenRowsOfOut(Polite):
    caught_by = "writes_only_outputs"

    def store(self, io, rows, out, lse):
        super().store(io, rows, out, lse)
        if io.out._base is not None:
            io.out._base.view(-1)[-1:] = 0


class ReadsTheWorkspaceUnwritten(Polite):
    caught_by = "is_a_function_that_keeps_nothing"

    def scratch(self, io):
        pass

    def attend(self, p, q, k, v, hidden, io):
        out, lse = super().attend(p, q, k, v, hidden, io)
        return out + io.workspace[:4].view(torch.float32).nan_to_num(1e-3), lse


class AsksForValuesAndClaimsGpus(Polite):
    caught_by = "is_a_function_that_keeps_nothing"
    paths = (replace(Mini.paths[0], capability=replace(CAPABILITY, archs=None)),)


class KeepsATensor(Polite):
    caught_by = "is_a_function_that_keeps_nothing"

    def kv_heads(self, p):
        self.kept = super().kv_heads(p)
        return self.kept


class SharedRangeEditedInPlace(Polite):
    caught_by = "plan_is_deterministic_and_comparable"
    ROWS = torch.arange(64, dtype=torch.int32)

    def image(self, query, batch):
        starts = self.ROWS[: batch.shape.batch_size].mul_(batch.shape.max_q_len + 1)
        return {**super().image(query, batch), "starts": starts.clone()}


class UnhashableLaunch(Polite):
    caught_by = "plan_is_deterministic_and_comparable"

    def launch(self, query, batch):
        return Launch(query.problem, [1])


class LaunchHoldsATensor(Polite):
    caught_by = "plan_is_deterministic_and_comparable"

    def launch(self, query, batch):
        return Launch(query.problem, (batch.kv_len,))


class Int64Image(Polite):
    caught_by = "plan_is_deterministic_and_comparable"

    def image(self, query, batch):
        return {"order": torch.arange(batch.shape.batch_size)}


class TakesANameOfTheCore(Polite):
    caught_by = "plan_is_deterministic_and_comparable"

    def image(self, query, batch):
        return {**super().image(query, batch), "kv_len": batch.kv_len + 1}


class EditsTheCallersArrays(Polite):
    caught_by = "plan_leaves_the_batch_alone"

    def launch(self, query, batch):
        batch.kv_len.sub_(1)
        return super().launch(query, batch)


class ReadsPageIdsUnannounced(Polite):
    caught_by = "plan_needs_no_page_ids"

    def launch(self, query, batch):
        return Launch(query.problem, None if batch.kv_indices is None else tuple(batch.kv_indices.tolist()))


class LaunchDependsOnTheBatchUnderCapture(Polite):
    caught_by = "launch_depends_on_the_capacities_only"

    def launch(self, query, batch):
        return Launch(query.problem, query.batch.max_kv_len)


class ImageDependsOnTheBatchUnderCapture(Polite):
    caught_by = "launch_depends_on_the_capacities_only"

    def image(self, query, batch):
        return {
            **super().image(query, batch),
            "tiles": torch.zeros(query.batch.max_kv_len, dtype=torch.int32),
        }


class RemembersLengthsByLaunch(Polite):
    caught_by = "replays_later_plans"

    def __init__(self):
        self.lengths = {}

    def kv_len(self, p, n, image):
        return self.lengths.setdefault((p, n, image["kv_len"].numel()), super().kv_len(p, n, image))


class ReadsTheRotaryPartAsValues(Polite):
    caught_by = "attends_with_values_inside_keys"

    def run(self, launch, image, io):
        if launch.problem.latent:
            io.v = io.k[..., -io.v.shape[-1] :]
        super().run(launch, image, io)


class ClaimsToFitAndDoesNot(Polite):
    caught_by = "fits_a_smaller_workspace"

    def plan(self, query, path, batch):
        found = super().plan(query, path, batch)
        told = query.workspace_bytes is not None
        return replace(found, launch=Launch(query.problem, "short"), workspace_bytes=0) if told else found

    def run(self, launch, image, io):
        io.workspace = torch.empty(64, dtype=torch.uint8)
        super().run(launch, image, io)
        if launch.extra == "short":
            io.out[:1] = 0


class AppendIgnoresRowStrides(Polite):
    caught_by = "appends_exact_bytes"

    def source(self, rows):
        _, heads, dim = rows.shape
        return rows.as_strided(rows.shape, (heads * dim, dim, 1))


class AppendWritesTheNextSlot(Polite):
    caught_by = "appends_exact_bytes"

    def slot(self, slot):
        return (slot + 1) % 4


class AppendRoundsThroughFloat16(Polite):
    caught_by = "appends_exact_bytes"

    def source(self, rows):
        return rows.to(torch.float16).to(rows.dtype)


class AppendFollowsSkippedRows(Polite):
    caught_by = "appends_exact_bytes"

    def append(self, path, problem, io):
        position = io.positions.where(io.batch_indices >= 0, 0)
        super().append(
            path, problem, replace(io, batch_indices=io.batch_indices.clamp(min=0), positions=position)
        )


class AppendAdds(Polite):
    caught_by = "appends_the_same_when_called_directly"

    def append(self, path, problem, io):
        io.key.view(torch.uint8).bitwise_xor_(1) if io.key.is_contiguous() and io.key.numel() else None
        super().append(path, problem, io)


# --- wrong claims -------------------------------------------------------------------------------------

_SLOW = Code("mini.slow", Stage.PREFERENCE, "wants more than {limit} rows")


def _rule(test):
    return Rule(_SLOW, frozenset(Op), frozenset({"torch"}), test)


class ImpureRule(Polite):
    caught_by = "rules_are_pure"

    def __init__(self):
        seen = set()

        def test(query):
            first, _ = query.batch.max_q_len not in seen, seen.add(query.batch.max_q_len)
            return (1, 1) if first else None

        self.rules = (_rule(test),)


class LimitDependsOnTheBatch(Polite):
    caught_by = "rules_are_pure"
    rules = (_rule(lambda query: (query.batch.max_q_len, 1)),)


class RuleAboutNobody(Polite):
    caught_by = "is_well_formed"
    rules = (Rule(_SLOW, frozenset(Op), frozenset({"fast"}), lambda query: None),)


class ClaimsWhatNobodyCanAsk(Polite):
    caught_by = "is_well_formed"
    paths = (Path("torch", replace(CAPABILITY, masks=frozenset({MaskMode.NONE}))),)


class UnavailableSetsTheEnvironment(Polite):
    caught_by = "answers_unavailable_without_side_effects"

    def unavailable(self, target):
        os.environ["MINI_WAS_ASKED"] = target.arch


class UnavailableRaisesElsewhere(Polite):
    caught_by = "answers_unavailable_without_side_effects"

    def unavailable(self, target):
        if target.kind == "hip":
            raise RuntimeError("no driver")


class PrepareRefusesWhatIsClaimed(Polite):
    caught_by = ORACLE

    def prepare(self, target, problem, path):
        return Reason(Code("mini.not-built", Stage.PREPARE, "needs a compiler"), "mini/torch")


FAULTS = sorted(Polite.__subclasses__(), key=lambda fault: fault.__name__)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    monkeypatch.setenv("MINI_WAS_ASKED", "")  # comes back afterwards
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_caught(fault):
    caught = next(failures(fault(), check=fault.caught_by), None)
    assert caught is not None, f"{fault.__name__} survived {fault.caught_by}"
    assert isinstance(caught.error, AssertionError), f"{fault.__name__} crashed: {caught!r}"


def test_every_check_has_caught_a_fault():
    named = {fault.caught_by for fault in FAULTS}
    # Wrong numbers are test_kit_faults.py's, plans and direct runs test_kit_direct.py's; for a refused replan
    # the core answers, not a backend.
    elsewhere = {
        "a_direct_run_equals_a_checked_run",
        "a_direct_run_declines_what_is_wrong",
        "a_direct_run_stays_with_its_plan",
        "an_older_plan_runs_as_before",
        "samples_chains_bit_for_bit",
        "samples_the_same_in_any_batch",
        "never_reads_foreign_tokens",
        "survives_extreme_logits",
        "does_not_depend_on_the_batch",
        "a_refused_replan_leaves_the_replay_unchanged",
    }
    every = {check.__name__ for group in (checks.BACKEND, *checks.CASE.values()) for check in group}
    assert every - named == elsewhere


def test_a_core_that_publishes_a_refused_plan_is_caught(monkeypatch):
    from attn_core import planner

    real = planner.check_capacity

    def late(limits, **batch):
        if batch["batch_size"] != limits.batch_size:
            for index in stages[-1].wrapper._graph.bound.values():
                index.add_(1)
        real(limits, **batch)

    stages = []
    stage = checks.graph.Stage
    monkeypatch.setattr(stage, "capture", lambda self, was=stage.capture: (stages.append(self), was(self)))
    monkeypatch.setattr(planner, "check_capacity", late)
    name = "a_refused_replan_leaves_the_replay_unchanged"
    assert next(failures(Mini(), check=name), None) is not None
    monkeypatch.undo()
    assert list(failures(Mini(), check=name, every=8)) == []
