"""The contract, one function per promise; each raises AssertionError where it is broken.

``BACKEND`` checks take a backend and a device, the others a case of the kind they stand under.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...backend import Backend
from ...target import DeviceTarget
from ..cases import Case
from . import append, declared, direct, graph, latent, plan, run, sampling, workspace
from .expect import Violation

BACKEND: tuple[Callable[[Backend, DeviceTarget], object], ...] = (
    declared.is_well_formed,
    declared.answers_unavailable_without_side_effects,
    declared.rules_are_pure,
    workspace.fits_a_smaller_workspace,
    latent.attends_with_values_inside_keys,
    direct.a_direct_run_equals_a_checked_run,
    direct.a_direct_run_declines_what_is_wrong,
    direct.a_direct_run_stays_with_its_plan,
    sampling.samples_chains_bit_for_bit,
    sampling.samples_the_same_in_any_batch,
)
CASE: Mapping[str, tuple[Callable[[Case], None], ...]] = {
    "case": (
        plan.plan_is_deterministic_and_comparable,
        plan.plan_leaves_the_batch_alone,
        plan.an_older_plan_runs_as_before,
        run.matches_the_oracle,
        run.writes_only_outputs,
        run.never_reads_foreign_tokens,
        run.is_a_function_that_keeps_nothing,
    ),
    "device_pages_case": (plan.plan_needs_no_page_ids,),
    "plain_logits_case": (run.survives_extreme_logits,),
    "invariant_case": (run.does_not_depend_on_the_batch,),
    "graph_case": (
        graph.launch_depends_on_the_capacities_only,
        graph.replays_later_plans,
        graph.a_refused_replan_leaves_the_replay_unchanged,
    ),
    "append_case": (
        append.appends_exact_bytes,
        append.appends_the_same_when_called_directly,
    ),
}

__all__ = [
    "BACKEND",
    "CASE",
    "Violation",
    "append",
    "declared",
    "direct",
    "graph",
    "latent",
    "plan",
    "run",
    "sampling",
    "workspace",
]
