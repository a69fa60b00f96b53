"""A machine without a compiler: the demo runs on the reference and says why."""

import json
import os
import subprocess
import sys
from pathlib import Path


def test_the_demo_runs_without_a_compiler_and_says_why(tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.py"
    prompt.write_text("def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return")
    hidden = ("CXX", "ATTN_CXX", "ATTN_CPU_ISA")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env |= {"PATH": str(tmp_path / "nothing"), "ATTN_CACHE_DIR": str(tmp_path / "cache")}
    command = [
        sys.executable,
        "-m",
        "attn_core.cli",
        "demo",
        "--tokens",
        "8",
        "--json",
        "--prompt",
        str(prompt),
    ]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout)
    assert said["identical"] is True
    assert said["backend"] == "reference"
    assert said["backend_fallback_reason"].startswith("fa2/cpu: needs a C++17 compiler (g++, c++, clang++)")
    assert said["backend_fallback_reason"].endswith("[fa2.compiler]")
    assert not (tmp_path / "cache").exists()
