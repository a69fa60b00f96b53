"""What `import attn_core` does not do, seen from a fresh process."""

import json
import os
import subprocess
import sys

import pytest

QUIET = ("-W", "ignore:Failed to initialize NumPy:UserWarning")
"""What torch itself prints on import where numpy is not installed."""

PROBE = """
import importlib.machinery, json, sys
spawned = []
sys.addaudithook(lambda event, args: spawned.append(event) if event in (
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect") else None)
import torch
known = set(sys.modules)
del spawned[:]

def use():
    found = {}
    import attn_core
    from attn_core import cascade, decode, page, plugins, prefill, quantization, sampling
    found["modules"] = sorted({m.split(".")[0] for m in set(sys.modules) - known})
    found["cuda"] = torch.cuda.is_initialized()
    found["looked for backends"] = [plugins._registry is not None]
    wrapper = attn_core.BatchDecodeWithPagedKVCacheWrapper(torch.empty(64, dtype=torch.uint8))
    found["looked for backends"].append(plugins._registry is not None)

    def plan(page_size=4, last=1):
        i32 = lambda *x: torch.tensor(x, dtype=torch.int32)
        wrapper.plan(i32(0, 1), i32(0), i32(last), 2, 1, 4, page_size, q_data_type="float32")

    plan()
    k, v = torch.ones(1, 4, 1, 4), torch.full((1, 4, 1, 4), 3.0)
    found["out"] = wrapper.run(torch.ones(1, 2, 4), (k, v)).unique().tolist()
    found["backend"] = wrapper.backend
    found["refused"] = []
    for call in (
        lambda: plan(page_size=0), lambda: plan(last=5), lambda: plan(last=-1),
        lambda: wrapper.run(torch.ones(2, 2, 4), (k, v)),
        lambda: wrapper.run(torch.ones(1, 2, 4), (k[:0], v[:0])),
        lambda: wrapper.run(torch.ones(1, 2, 4), (k.half(), v)),
    ):
        try:
            call()
        except ValueError as error:
            found["refused"].append(str(error))
    found["spawned"] = list(spawned)
    found["cuda after use"] = torch.cuda.is_initialized()
    return found

plain = use()
for name in [name for name in sys.modules if name.split(".")[0] == "attn_core"]:
    del sys.modules[name]

def optimised(self, name):
    path = self.get_filename(name)
    return compile(self.get_data(path), path, "exec", dont_inherit=True, optimize=2)

importlib.machinery.SourceFileLoader.get_code = optimised
print("FOUND" + json.dumps([plain, use()]))
"""


@pytest.fixture(scope="module")
def found():
    """The probe's findings: imported as usual, and again as under python -OO."""
    env = {**os.environ, "ATTN_DISABLE_PLUGINS": "hip,aiter,echo,compile", "CUDA_VISIBLE_DEVICES": ""}
    for name in ("ATTN_CONFIG", "ATTN_THRESHOLDS"):
        env.pop(name, None)
    done = subprocess.run(
        [sys.executable, *QUIET, "-c", PROBE],
        capture_output=True,
        text=True,
        env=env,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    before, _, text = done.stdout.partition("FOUND")
    assert before == ""  # importing and using the package prints nothing
    return json.loads(text)


def test_importing_starts_nothing_loads_no_plugin_and_touches_no_device(found):
    plain = found[0]
    assert plain["spawned"] == []
    assert (plain["cuda"], plain["cuda after use"]) == (False, False)
    assert plain["looked for backends"] == [False, False]
    assert "attn_core" in plain["modules"]
    unwanted = {
        "typer",
        "rich",
        "click",
        "numpy",
        "attn_hip",
        "attn_aiter",
        "attn_compile",
        "aiter",
        "triton",
    }
    assert not unwanted & set(plain["modules"])


def test_it_works_without_any_gpu_or_plugin(found):
    assert (found[0]["out"], found[0]["backend"]) == ([3.0], "reference")


def test_no_check_of_an_argument_is_an_assertion(found):
    """Under -O an assert is gone, and what it guarded would be computed from nonsense."""
    assert len(found[0]["refused"]) == 6
    assert found[1]["refused"] == found[0]["refused"]
    assert found[1]["out"] == [3.0]


LAZY = """
import json, sys
import attn_core
assert attn_core.__version__
found = {"torch": "torch" in sys.modules, "dir": dir(attn_core), "all": attn_core.__all__}
found["types"] = {name: type(getattr(attn_core, name)).__name__ for name in attn_core.__all__}
found["module"] = attn_core.sampling.__name__
found["kept"] = "DecodePlanPool" in vars(attn_core)
try:
    attn_core.nonsense
except AttributeError as error:
    found["error"] = str(error)
print("FOUND" + json.dumps(found))
"""


def test_importing_the_package_alone_loads_no_torch_and_every_name_is_there():
    done = subprocess.run(
        [sys.executable, *QUIET, "-c", LAZY], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.partition("FOUND")[2])
    assert found["torch"] is False
    assert set(found["all"]) <= set(found["dir"])
    assert found["types"]["CacheView"] == found["types"]["NoRoute"] == "type"
    assert {kind for name, kind in found["types"].items() if name[0].islower()} == {"function", "partial"}
    assert (found["module"], found["kept"]) == ("attn_core.sampling", True)
    assert found["error"] == "module 'attn_core' has no attribute 'nonsense'"
