"""Every public report that is replayed has a test: by its number here, or where its part is tested."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUMBERS = frozenset(range(1, 109)) - {
    *(6, 7, 8, 12, 15, 19, 23, 25, 27, 31, 32, 37, 39, 41, 45, 47, 50, 51, 55, 56, 60, 61, 66, 67, 71, 73),
    *(76, 80, 87, 91, 94, 98, 100, 101, 105, 107),
}
"""Public reports of other libraries that are replayed."""
BUILD, DEVICE, FA2 = (f"packages/attn-hip/tests/test_{name}.py" for name in ("build", "device_build", "fa2"))
GPU, MOCK = "packages/attn-hip/tests/test_gpu.py", "packages/attn-hip/tests/test_mock_runtime.py"
AITER, CORE, COMPILE = "packages/attn-aiter/tests", "packages/attn-core/tests", "packages/attn-compile/tests"
ELSEWHERE = {
    63: [f"{GPU}::test_captured_chain_sampling_follows_its_offset"],
    64: [f"{GPU}::test_replays_follow_the_plan_of_the_day"],
    65: [f"{GPU}::test_a_rejected_plan_leaves_the_replay_right"],
    68: [
        f"{GPU}::test_run_allocates_nothing_and_waits_for_nothing",
        "packages/attn-hip/tests/test_sampling.py::test_nothing_is_loaded_during_capture",
        f"{CORE}/test_capture.py::test_a_single_call_is_captured_after_one_with_its_shapes",
    ],
    69: [f"{GPU}::test_a_promised_longest_sequence_bounds_the_captured_grid"],
    72: [f"{GPU}::test_plans_do_not_overtake_runs_in_flight"],
    77: [
        f"{AITER}/test_batch_prefill.py::test_a_cache_beyond_32_bits_is_refused_where_offsets_are_narrow",
        f"{AITER}/test_batch_prefill.py::test_a_cache_across_4_gib_is_refused_where_pages_are_gathered",
    ],
    78: [
        f"{BUILD}::test_a_directory_of_mode_0555",
        f"{BUILD}::test_without_a_home_the_variable_is_named",
        f"{BUILD}::test_a_directory_that_cannot_be_made_is_named",
        f"{DEVICE}::test_a_packed_object_needs_no_compiler_until_the_sources_change",
    ],
    79: [
        f"{BUILD}::test_a_killed_build_is_in_nobodys_way",
        f"{BUILD}::test_a_damaged_entry_is_built_again",
        f"{BUILD}::test_two_processes_at_once",
    ],
    81: [
        f"{BUILD}::test_a_changed_header_rebuilds_whatever_its_time_says",
        f"{BUILD}::test_changed_flags_rebuild",
        f"{BUILD}::test_another_compiler_rebuilds",
        f"{DEVICE}::test_builds_once_and_again_for_other_sources",
    ],
    82: [
        f"{DEVICE}::test_other_sources_and_defines_are_other_code_objects",
        f"{MOCK}::test_code_for_another_arch_is_refused_by_the_runtime",
    ],
    83: [
        f"{AITER}/test_probe.py::test_version_decides",
        f"{AITER}/test_signatures.py::test_a_changed_c_argument_list_is_found",
        f"{AITER}/test_signatures.py::test_positions_differ_between_releases_where_names_do_not",
    ],
    84: [
        f"{CORE}/test_import.py::test_importing_starts_nothing_loads_no_plugin_and_touches_no_device",
        f"{CORE}/test_import.py::test_it_works_without_any_gpu_or_plugin",
        f"{AITER}/test_probe.py::test_discovery_imports_no_aiter",
    ],
    85: [
        f"{BUILD}::test_a_failed_build_quotes_the_first_error_and_is_not_repeated",
        f"{BUILD}::test_no_compiler_is_a_reason_unless_something_is_built",
        f"{FA2}::test_a_failed_build_falls_back_and_says_so",
    ],
    86: [
        f"{FA2}::test_a_build_is_announced_and_a_cached_one_is_not",
        f"{FA2}::test_nothing_runs_before_prepare",
        "packages/attn-hip/tests/test_command.py::test_builds_what_this_cpu_would_use",
    ],
    88: [
        f"{CORE}/test_plugins.py::test_one_bad_backend_of_a_package_leaves_its_others",
        f"{CORE}/test_plugins.py::test_hook_arguments_may_be_left_out",
        f"{AITER}/test_signatures.py::test_a_new_required_parameter_is_found",
    ],
    96: [f"{COMPILE}/test_matrix.py::test_a_cache_declared_written_turns_cells_red"],
    97: [
        f"{COMPILE}/test_matrix.py::test_a_disk_cache_of_another_declaration_is_found_by_plain_names_only",
        f"{COMPILE}/test_table.py::test_the_name_follows_the_declaration",
    ],
    99: [
        f"{COMPILE}/test_run.py::test_the_switch_gives_a_clear_error",
        f"{COMPILE}/test_run.py::test_compiled_decode_equals_eager_and_leaves_the_cache",
        f"{COMPILE}/test_plan.py::test_where_order_or_size_would_matter_plan_is_refused",
    ],
    102: [f"{COMPILE}/test_cuda_graphs.py::test_decode_is_captured_and_replays_equal_eager"],
    104: [
        f"{CORE}/test_plugins_process.py::test_a_wheel_with_an_entry_point_is_enough",
        f"{CORE}/test_plugins.py::test_hooks_get_the_version_and_the_options_and_may_name_devices",
        f"{CORE}/test_plugins.py::test_a_package_that_fails_is_a_fact_and_harms_no_other",
    ],
}
"""Reports about building, loading and compiling, and the halves of others that need a GPU."""


@cache
def functions(path: Path) -> frozenset[str]:
    """Return the names of a file's tests."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = (node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return frozenset(name for name in names if name.startswith("test_"))


@cache
def replayed() -> frozenset[int]:
    """Return the numbers in names of tests here."""
    here = (name for path in Path(__file__).parent.glob("test_*.py") for name in functions(path))
    found = (re.match(r"test_b(\d+)_", name) for name in here)
    return frozenset(int(match[1]) for match in found if match)


@pytest.mark.parametrize("number", sorted(NUMBERS))
def test_a_report_is_replayed(number: int) -> None:
    assert number in replayed() | set(ELSEWHERE)


@pytest.mark.parametrize("where", sorted({where for found in ELSEWHERE.values() for where in found}))
def test_what_is_named_exists(where: str) -> None:
    path, _, name = where.partition("::")
    assert name in functions(ROOT / path)


def test_no_replay_is_unlisted() -> None:
    assert len(NUMBERS) == 72
    assert replayed() | set(ELSEWHERE) == NUMBERS
