"""Which compiled module each path reaches through AITER's own Python layer, and with what."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .trees import require, script

ASSEMBLY = "module_fmha_v3_varlen_fwd"


def paged(dtype: str = "bf16", cap: str = "nlogits", mask: str = "mask", lse: str = "nlse") -> str:
    return f"mha_batch_prefill_{dtype}_{cap}_nbias_{mask}_{lse}_ndropout"


def dense(dtype: str = "bf16", cap: str = "nlogits", mask: str = "mask", lse: str = "nlse") -> str:
    return f"mha_varlen_fwd_{dtype}_{cap}_nbias_{mask}_{lse}_ndropout_nskip"


# The module's name spells the kernel variant. A change here is another kernel on a real machine.
REACHES = {
    "native": paged(),
    "native fp16 cap": paged("fp16", "logits"),
    "native lse": paged(lse="lse"),
    "native window": paged(),
    "native wide window": paged(),
    "native window, not causal": paged(),
    "native one row": paged(mask="nmask"),
    "native one row, window": paged(),
    "gather": ASSEMBLY,
    "gather head_dim 64, lse": dense(lse="lse"),
    "gather window": dense(),
    "gather fp16 cap": dense("fp16", "logits"),
    "varlen": ASSEMBLY,
    "varlen lse": ASSEMBLY,
    "varlen fp16": dense("fp16"),
    "varlen window": dense(),
    "varlen wide window": ASSEMBLY,
    "varlen window, not causal": dense(),
    "varlen fp16 cap, not causal": dense("fp16", "logits", "nmask"),
    "varlen window 0, head_dim 64": dense(),
    "varlen long": ASSEMBLY,
    "single": ASSEMBLY,
    "single fp16 window": dense("fp16"),
    "decode": "pa_v1 1",
    "decode fp16 cap": "pa_v1 1",
    "decode window": "pa_v1 1",
    "decode long": "pa_v1 2",
    "latent": "module_mla_asm",
    "latent, four rows": "module_mla_asm",
    "append": "module_cache",
}
REFUSED = {"varlen window 0": "aiter.window-zero", "varlen bf16 cap": "aiter.soft-cap"}
OP_OF = {
    "mha_batch": "mha_batch_prefill",
    "mha_varlen": "mha_varlen_fwd",
    "module_fmha": "fmha_v3_varlen_fwd",
    "pa_v1": "decode",
    "module_mla": "mla_decode_stage1_asm_fwd",
    "module_cache": "reshape_and_cache_flash",
}
GIVEN: dict[str, dict[str, Any]] = {
    "native": {"max_seqlen_q": 4, "max_seqlen_k": 40, "dropout_p": 0.0, "softmax_scale": 128**-0.5,
               "is_causal": True, "window_size_left": -1, "window_size_right": -1,
               "return_softmax_lse": False},
    "native fp16 cap": {"logits_soft_cap": 5.0},
    "native window": {"window_size_left": 7, "window_size_right": 0},
    "native window, not causal": {"is_causal": False, "window_size_left": 7, "window_size_right": -1},
    "native one row": {"max_seqlen_q": 1},
    "native lse": {"return_softmax_lse": True},
    "varlen": {"max_seqlen_q": 4, "max_seqlen_k": 40, "min_seqlen_q": 0, "dropout_p": 0.0,
               "softmax_scale": 128**-0.5, "logits_soft_cap": 0.0, "is_causal": True},
    "varlen wide window": {"window_size_left": -1},
    "varlen window": {"window_size_left": 7, "window_size_right": 0},
    "varlen fp16 cap, not causal": {"logits_soft_cap": 5.0, "is_causal": False},
    "gather window": {"window_size_left": 7, "max_seqlen_q": 4, "max_seqlen_k": 40, "min_seqlen_q": 0},
    "latent": {"max_seqlen_q": 1, "softmax_scale": 0.1},
    "latent, four rows": {"max_seqlen_q": 4, "softmax_scale": 0.1},
    "append": {"kv_cache_dtype": "auto"},
}  # fmt: skip


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, Any]]:
    """The answer of every case, by its name."""
    output = script("route_calls.py", str(require().root), "gfx942")
    found = (json.loads(line) for line in output.splitlines() if line.startswith("{"))
    return {answer.pop("case"): answer for answer in found}


def test_every_case_was_asked(answers) -> None:
    assert answers.keys() == REACHES.keys() | REFUSED.keys() | {"arguments"}


@pytest.mark.parametrize("case", REACHES)
def test_it_reaches_the_kernel_it_was_planned_for(answers, case: str) -> None:
    answer = answers[case]
    assert "raised" not in answer, answer["raised"]
    # The warm-up of plan(), then the run; the decode kernel is compiled at plan without a call.
    assert answer["modules"] == [REACHES[case]] * (1 if case.startswith("decode") else 2)
    assert answer["late"] == []  # nothing was compiled in run()
    assert answer["op"] == next(op for start, op in OP_OF.items() if REACHES[case].startswith(start))


@pytest.mark.parametrize("case", REACHES)
def test_the_answer_comes_back_whole(answers, case: str) -> None:
    """Order of the results, base and layout of the log-sum-exp, the memory of the output."""
    assert answers[case]["error"] < 2e-2


@pytest.mark.parametrize("case", GIVEN)
def test_the_scalars_arrive(answers, case: str) -> None:
    given = answers[case]["given"]
    assert {name: given.get(name) for name in GIVEN[case]} == pytest.approx(GIVEN[case])


@pytest.mark.parametrize("case", REFUSED)
def test_what_ends_in_a_wrong_kernel_is_refused(answers, case: str) -> None:
    assert f"[{REFUSED[case]}]" in answers[case]["raised"]


def test_the_decode_kernel_gets_what_aiters_own_function_passes(answers) -> None:
    found = answers["arguments"]
    assert found["variants"][0] == found["variants"][1]
    differ = {
        at for at, pair in enumerate(zip(found["ours"], found["theirs"], strict=True)) if len(set(pair)) > 1
    }
    assert differ == {1, 5, 7, 10, 11}  # our own workspace, page table, lengths and the two unit scales
    assert all(found["ours"][at] for at in differ)
