"""A torch whose private parts are not where they were: a warning or a refusal, never a wrong number."""

import json
import subprocess
import sys

import pytest

CELLS = [("append_read", "one", "static"), ("plain", "kv[i]", "dynamic")]
LOST = {
    "a function's arguments": (
        "import torch._dynamo, torch._functorch._aot_autograd.runtime_wrappers as r\n"
        "kept = r.merge_view_inputs\n"
        "r.merge_view_inputs = lambda inputs, *rest: kept(rest[0], inputs, *rest[1:])",
        ("base of written inputs", "compile.no-repair"),
        None,
    ),
    "the guard's place": (
        "import torch._inductor.lowering as r\n"
        "given = r.fallback_handler\n"
        "def moved(op, add_to_fallback_set=True):\n"
        "    if str(getattr(op, 'namespace', '')) == 'attn' and not add_to_fallback_set:\n"
        "        raise AttributeError('moved')\n"
        "    return given(op, add_to_fallback_set)\n"
        "r.fallback_handler = moved",
        ("placement guard", "compile.no-guard"),
        ["exact", "exact"],
    ),
}


@pytest.mark.parametrize("lost", LOST)
def test_a_torch_that_cannot_be_repaired_or_guarded_is_said_so(lost):
    break_it, (row, code), verdicts = LOST[lost]
    program = f"""
import json, warnings, torch
{break_it}
from attn_compile.testing import matrix
from attn_core import tracing
torch.set_num_threads(1)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    cells = {CELLS if verdicts else []!r}
    found = [matrix.run(matrix.Cell(*cell), "reference").verdict for cell in cells]
    if not cells:
        from attn_compile import fixups
        fixups.install()
rows = tracing.state().doctor(False) if cells else fixups.state()
print(json.dumps([found, rows[{row!r}], [str(w.message) for w in seen]]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found, state, warned = json.loads(done.stdout.splitlines()[-1])
    assert found == (verdicts or [])
    assert state.startswith("failed: ")
    assert len([text for text in warned if code in text]) == 1
