"""What every backend must satisfy for everything its capability rows claim."""

from __future__ import annotations

from .. import checks
from ..cases import Case
from ..select import Subject


class TestBackend:
    """What a backend says of itself."""

    def test_is_well_formed(self, subject: Subject) -> None:
        """Names, ranks, rules and rows are sound, and every claim can be reached."""
        checks.declared.is_well_formed(*subject)

    def test_answers_unavailable_without_side_effects(self, subject: Subject) -> None:
        """Asked about any device, here or not, it imports, starts and sets nothing."""
        checks.declared.answers_unavailable_without_side_effects(*subject)

    def test_rules_are_pure(self, subject: Subject) -> None:
        """One answer to one query, whatever was asked before."""
        checks.declared.rules_are_pure(*subject)

    def test_fits_a_smaller_workspace(self, subject: Subject) -> None:
        """Told of less workspace, a plan fits and stays right, or asks for what it needs."""
        checks.workspace.fits_a_smaller_workspace(*subject)

    def test_attends_with_values_inside_keys(self, subject: Subject) -> None:
        """Latent attention, where a path does not decline it, from a joint cache and from two."""
        checks.latent.attends_with_values_inside_keys(*subject)

    def test_direct_runs_equal_checked_ones(self, subject: Subject) -> None:
        """Where the backend checks runs itself: the same bits, or nothing done."""
        checks.direct.a_direct_run_equals_a_checked_run(*subject)

    def test_direct_runs_decline_what_is_wrong(self, subject: Subject) -> None:
        """False and no exception, for whatever the wrapper refuses."""
        checks.direct.a_direct_run_declines_what_is_wrong(*subject)

    def test_direct_runs_stay_with_their_plan(self, subject: Subject) -> None:
        """Its arrays live as long as the function; newer plans change nothing."""
        checks.direct.a_direct_run_stays_with_its_plan(*subject)

    def test_samples_chains_bit_for_bit(self, subject: Subject) -> None:
        """Chain sampling, where the backend has it: tokens and counts are those documented."""
        checks.sampling.samples_chains_bit_for_bit(*subject)

    def test_samples_the_same_in_any_batch(self, subject: Subject) -> None:
        """With a seed per request, a request's tokens do not depend on the batch it is in."""
        checks.sampling.samples_the_same_in_any_batch(*subject)


class TestPlan:
    """plan() is a function."""

    def test_is_deterministic_and_comparable(self, case: Case) -> None:
        """Two plans of one batch are equal; the launch is hashable."""
        checks.plan.plan_is_deterministic_and_comparable(case)

    def test_leaves_the_batch_alone(self, case: Case) -> None:
        """Host arrays are inputs, and no device is touched."""
        checks.plan.plan_leaves_the_batch_alone(case)

    def test_an_older_plan_runs_as_before(self, case: Case) -> None:
        """Whatever was planned and run since."""
        checks.plan.an_older_plan_runs_as_before(case)

    def test_needs_no_page_ids(self, device_pages_case: Case) -> None:
        """Page ids may stay on a device unless the path says otherwise."""
        checks.plan.plan_needs_no_page_ids(device_pages_case)


class TestRun:
    """run() is right, complete, and touches only what it may."""

    def test_matches_the_oracle(self, case: Case) -> None:
        """Every element agrees with float64 attention, through the public entry point."""
        checks.run.matches_the_oracle(case)

    def test_writes_only_outputs(self, case: Case) -> None:
        """All other memory is bit-identical afterwards."""
        checks.run.writes_only_outputs(case)

    def test_never_reads_foreign_tokens(self, case: Case) -> None:
        """What lies in memory of no request never reaches a result."""
        checks.run.never_reads_foreign_tokens(case)

    def test_is_a_function_that_keeps_nothing(self, case: Case) -> None:
        """Equal calls give equal bits, and nothing they made outlives them."""
        checks.run.is_a_function_that_keeps_nothing(case)

    def test_survives_extreme_logits(self, plain_logits_case: Case) -> None:
        """No finite number stands for minus infinity."""
        checks.run.survives_extreme_logits(plain_logits_case)

    def test_does_not_depend_on_the_batch(self, invariant_case: Case) -> None:
        """A request alone gives the bits it gives in its batch, where that is claimed."""
        checks.run.does_not_depend_on_the_batch(invariant_case)


class TestGraph:
    """Under capture a replan changes index bytes and nothing else."""

    def test_launch_depends_on_the_capacities_only(self, graph_case: Case) -> None:
        """Unlike batches under equal limits give equal launches."""
        checks.graph.launch_depends_on_the_capacities_only(graph_case)

    def test_replays_later_plans(self, graph_case: Case) -> None:
        """One capture gives the answer of every later plan."""
        checks.graph.replays_later_plans(graph_case)

    def test_a_refused_replan_leaves_the_replay_unchanged(self, graph_case: Case) -> None:
        """A plan that raises changes no byte a replay reads."""
        checks.graph.a_refused_replan_leaves_the_replay_unchanged(graph_case)


class TestAppend:
    """append() writes the slots it was given and nothing else."""

    def test_appends_exact_bytes(self, append_case: Case) -> None:
        """The cache's memory is as a loop over the rows leaves it."""
        checks.append.appends_exact_bytes(append_case)

    def test_appends_the_same_when_called_directly(self, append_case: Case) -> None:
        """As the core calls it, and a second time without effect."""
        checks.append.appends_the_same_when_called_directly(append_case)
