"""Runs FlashInfer's own test files on this package, which they import under the name of ``flashinfer``.

No file of FlashInfer is part of this repository: the directory is ``tests`` of a checkout, or what an sdist
holds. It is copied, and nothing in it is changed. On a CPU device strings of the copy are rewritten, and
graphs are played by calling ``run()`` anew. Of the many cases of a parametrized test a few are drawn, the
same ones for the same seed. A test counts as refused where this package raised an error that says by name,
with a code, that what the test asks for is not here.

    python tools/upstream_tests.py DIRECTORY [FILE ...] [--device cpu] [--cases 6] [--backend fa3=fa2]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import json
import os
import random
import re
import resource
import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import attn_core
from attn_core.compat import install

CODE = re.compile(r"\[[a-z][a-z0-9]*\.[a-z0-9-]+\]")
NO_MEMORY = "you tried to allocate"
KINDS = ("passed", "refused", "failed", "skipped")
# The words that tests use for a device, and what the same test needs on a CPU.
ON_CPU = (
    (re.compile(r"""(["'])cuda(:\d+)?\1"""), '"cpu"'),
    (re.compile(r"\.to\(\s*0\s*\)"), '.to("cpu")'),
    (re.compile(r"\bdevice=0\b"), 'device="cpu"'),
    (re.compile(r"\.cuda\(\)"), ""),
    (re.compile(r"\btorch\.cuda\.is_available\(\)"), "True"),
    (re.compile(r"\bpin_memory=True\b"), "pin_memory=False"),
)
# Names of sizes in their tests, by what they multiply.
SIZES = (
    ("batch_size", "batch", "num_requests"),
    ("qo_len", "q_len", "append_len", "s_q"),
    ("kv_len", "seq_len", "s_kv", "shared_kv_len", "vocab_size", "num_elements", "M"),
    ("num_qo_heads", "num_heads", "num_kv_heads"),
    ("head_dim", "head_dim_qk", "N"),
)
SITE = "from attn_core.compat import install\ninstall()\n"
SITE_ON_CPU = "import torch\ntorch.cuda.synchronize = lambda *args: None\n"
CAPABILITY = (9, 0)
"""What a CPU says when tests ask which of their cases the GPU can run."""


def main() -> int:
    """Run the files that are named, or all, and print a table; return 1 where a test failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("files", nargs="*", help="names of test files in it; all if none is given")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cases", type=int, default=6, help="cases drawn of each test function")
    parser.add_argument("--cost", type=float, default=4e8, help="largest product of a case's sizes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory", type=float, default=8.0, help="GiB that the tests may take on a CPU")
    parser.add_argument(
        "--backend", action="append", default=[], metavar="[THEIRS=]OURS",
        help="what a backend that a test names stands for; without THEIRS= auto and fa2",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="write every outcome there")
    asked = parser.parse_args()
    root = install(backends=_backends(asked.backend))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as there:
        tests = Path(there) / "tests"
        shutil.copytree(asked.directory, tests)
        if asked.device == "cpu":
            limit = int(asked.memory * 2**30)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
            _to_cpu(tests)
            _play_graphs()
            _play_device(root)
        _found_in_subprocesses(Path(there), SITE + (SITE_ON_CPU if asked.device == "cpu" else ""))
        sys.path[:0] = [str(there), str(tests), str(tests / "test_helpers")]
        outcome = Outcome(asked.cases, asked.cost, asked.seed)
        found = [tests / name for name in asked.files] or sorted(tests.rglob("test_*.py"))
        options = [
            "-q",
            "--continue-on-collection-errors",
            "--no-header",
            "--tb=short",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-o",
            "addopts=",
        ]
        pytest.main(
            [*options, "--import-mode=importlib", "-c", os.devnull, "--rootdir", there, *map(str, found)],
            plugins=[outcome],
        )
    print(outcome.table(root.__version__))
    if asked.json:
        asked.json.write_text(json.dumps(outcome.told, indent=1))
    return int(any(told["kind"] == "failed" for told in outcome.told))


def _backends(given: list[str]) -> dict[str, str]:
    named: dict[str, str] = {}
    for text in given:
        theirs, _, ours = text.rpartition("=")
        named.update(dict.fromkeys([theirs] if theirs else ["auto", "fa2"], ours))
    return named


class Outcome:
    """A plugin of pytest: draws cases, and keeps what came of each."""

    def __init__(self, cases: int, cost: float, seed: int) -> None:
        self.cases, self.cost, self.seed = cases, cost, seed
        self.told: list[dict[str, str]] = []

    def pytest_configure(self, config: pytest.Config) -> None:
        """Take any mark as known: theirs are registered in files that are not here."""
        config.addinivalue_line("filterwarnings", "ignore::pytest.PytestUnknownMarkWarning")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep some cases of each test function, affordable ones if there are any."""
        by_test: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            by_test[item.nodeid.partition("[")[0]].append(item)
        kept: set[int] = set()
        for name, cases in by_test.items():
            fit = [case for case in cases if cost(case) <= self.cost] or [min(cases, key=cost)]
            draw = random.Random(f"{name} {self.seed}")
            kept.update(map(id, fit if len(fit) <= self.cases else draw.sample(fit, self.cases)))
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
        items[:] = [item for item in items if id(item) in kept]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, Any, Any]:
        """Note what came of a test, and why."""
        report: Any = yield
        if report.when == "call" or not report.passed:
            error = call.excinfo.value if call.excinfo else None
            kind = report.outcome if error is None else _kind(report.outcome, error)
            self._note(item.nodeid, kind, "" if error is None else f"{type(error).__name__}: {error}")
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that could not be imported."""
        if report.failed:
            lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E  ")]
            why = lines[-1][1:].strip() if lines else str(report.longrepr)
            self._note(report.nodeid, "refused" if CODE.search(why) else "failed", why)

    def _note(self, test: str, kind: str, why: str) -> None:
        self.told.append({"test": test.removeprefix("tests/"), "kind": kind, "why": why})

    def table(self, version: str) -> str:
        """Return the counts by file, and one line for each reason of what did not pass."""
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        reasons: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for told in self.told:
            name, _, test = told["test"].partition("::")
            counts[name][told["kind"]] += 1
            if told["kind"] in ("refused", "failed"):
                why = " ".join(told["why"].split())[:160]
                reasons[name, why][test.partition("[")[0]] += 1
        rows = [f"FlashInfer {version} API, {torch.__version__}", "", f"| File | {' | '.join(KINDS)} |"]
        rows.append("| --- |" + " ---: |" * len(KINDS))
        rows += [
            f"| {name} | {' | '.join(str(count[kind]) for kind in KINDS)} |" for name, count in counts.items()
        ]
        rows.append("")
        rows += [f"{name}: {dict(tests)}: {why}" for (name, why), tests in reasons.items()]
        return "\n".join(rows)


def _kind(outcome: str, error: BaseException) -> str:
    if outcome == "failed" and isinstance(error, NotImplementedError) and CODE.search(str(error)):
        return "refused"
    too_large = isinstance(error, MemoryError | torch.OutOfMemoryError) or NO_MEMORY in str(error)
    return "skipped" if outcome == "failed" and too_large else outcome


def cost(item: pytest.Item) -> float:
    """Return the product of a case's sizes, as far as its parameters tell them."""
    given = getattr(item, "callspec", None)
    params = given.params if given else {}
    product = 1.0
    for names in SIZES:
        product *= next((params[name] for name in names if isinstance(params.get(name), int)), 1)
    return product * (params["group_size"] if isinstance(params.get("group_size"), int) else 1)


def _to_cpu(tests: Path) -> None:
    for path in tests.rglob("*.py"):
        text = path.read_text()
        for words, instead in ON_CPU:
            text = words.sub(instead, text)
        path.write_text(text)


def _found_in_subprocesses(there: Path, site: str) -> None:
    """Let programs that a test starts find the same package."""
    (there / "site").mkdir()
    (there / "site" / "sitecustomize.py").write_text(site)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(there / "site"), before]))


def _replace(kind: type, name: str, method: Callable[..., Any]) -> None:
    setattr(kind, name, method)


class _Graph:
    """Stands for a CUDA graph on a CPU: replaying calls what was called, into the same tensors."""

    recording: _Graph | None = None

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[[], Any], Any]] = []

    def replay(self) -> None:
        for call, kept in self.calls:
            new = call()
            for old, made in zip(_tensors(kept), _tensors(new), strict=True):
                if old is not made:
                    old.copy_(made)


class _Stream:
    def wait_stream(self, *args: object) -> None: ...
    def synchronize(self) -> None: ...


def _tensors(result: Any) -> tuple[torch.Tensor, ...]:
    return () if result is None else result if isinstance(result, tuple) else (result,)


@contextlib.contextmanager
def _record(graph: _Graph, *args: object, **kwargs: object) -> Iterator[None]:
    _Graph.recording = graph
    try:
        yield
    finally:
        _Graph.recording = None


def _recorded(real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def call(*args: Any, **kwargs: Any) -> Any:
        graph, _Graph.recording = _Graph.recording, None  # what it calls in turn is part of it
        try:
            result = real(*args, **kwargs)
        finally:
            _Graph.recording = graph
        if graph is not None:
            graph.calls.append((functools.partial(real, *args, **kwargs), result))
        return result

    return call


def _play_graphs() -> None:
    """Put stand-ins where tests look for streams and graphs, and record what is called in one."""
    for name, instead in {
        "CUDAGraph": _Graph, "graph": _record, "Stream": _Stream, "current_stream": lambda *args: _Stream(),
        "stream": lambda stream: contextlib.nullcontext(), "synchronize": lambda *args: None,
    }.items():  # fmt: skip
        setattr(torch.cuda, name, instead)
    for name in attn_core.__all__:
        kind = getattr(attn_core, name)
        if isinstance(kind, type) and "run" in vars(kind):
            _replace(kind, "run", _recorded(vars(kind)["run"]))
        elif inspect.isfunction(kind):
            for module in (attn_core, sys.modules[kind.__module__]):
                setattr(module, name, _recorded(kind))


def _play_device(root: ModuleType) -> None:
    """Answer as a GPU that their tests of fa2 are for, so that they do not skip what runs here."""
    root.utils.get_compute_capability = lambda device: CAPABILITY
    torch.cuda.get_device_capability = lambda device=None: CAPABILITY


if __name__ == "__main__":
    raise SystemExit(main())
