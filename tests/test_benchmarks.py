"""Benchmarks that need no GPU still run after a change of what they call."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_model_of_the_planner_runs():
    program = [sys.executable, ROOT / "benchmarks" / "planner.py", "--batches", "2"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "64 requests" in done.stdout
