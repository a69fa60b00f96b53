"""The native module of this process: found or built once, by the first plan and never by an import."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import threading
import time
from pathlib import Path
from typing import Any

from attn_core.reasons import Reason

from . import build, cache, codes, isa

LOGGER = logging.getLogger("attn_hip")
CANDIDATE = "fa2"


class Host:
    """Loads native modules and remembers what failed, so that a broken build costs its time once."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._modules: dict[str, Any] = {}
        self._failed: dict[str, Reason] = {}

    def module(self, name: str | None = None) -> Any:
        """Return a module that :meth:`prepare` has loaded; ``name`` defaults to the chosen instruction set.

        Raises:
            RuntimeError: It has not.
        """
        found = self._modules.get(name or isa.chosen())
        if found is None:
            raise RuntimeError("attn_hip: needs prepare() before plan(), got none [fa2.not-prepared]")
        return found

    def unavailable(self) -> Reason | None:
        """Say why nothing can be loaded or built here, or None. Runs no program."""
        try:
            name = isa.chosen()
        except ValueError:
            return None  # prepare() says so
        if name in self._modules or name in self._failed or build.compiler_command() is not None:
            return None
        try:
            if build.existing(name) is not None:
                return None
        except cache.CacheError:
            pass  # prepare() says so
        return Reason(codes.COMPILER, CANDIDATE, build.compiler_wanted(), build.NOTHING)

    def prepare(self, name: str | None = None, progress: build.Progress | None = None) -> Reason | None:
        """Load the module, building it if the cache has none; a failure is remembered.

        Raises:
            ValueError: ``ATTN_CPU_ISA`` names what this CPU cannot run.
        """
        name = name or isa.chosen()
        if name in self._modules:
            return None
        with self._lock:
            if name not in self._modules and name not in self._failed:
                self._load(name, progress)
            return self._failed.get(name)

    def _load(self, name: str, progress: build.Progress | None) -> None:
        try:
            self._modules[name] = load(obtain(name, progress))
        except build.NoCompiler as err:
            self._failed[name] = Reason(codes.COMPILER, CANDIDATE, build.compiler_wanted(), err.got)
        except build.BuildError as err:
            self._failed[name] = Reason(codes.BUILD, CANDIDATE, None, err)
        except cache.CacheError as err:
            self._failed[name] = Reason(codes.CACHE, CANDIDATE, err.wanted, err.got)

    def forget(self) -> None:
        """Forget failures, so that the next plan tries again. What is loaded stays."""
        with self._lock:
            self._failed.clear()

    def state(self) -> dict[str, object]:
        """Return facts for ``attn doctor``: instruction set, compiler, cache, build."""
        rows: dict[str, object] = {"supported": ", ".join(isa.supported())}
        try:
            name = isa.chosen()
        except ValueError as err:
            return {**rows, "isa": str(err)}
        command = build.compiler_command()
        rows |= {"isa": name, "compiler": " ".join(command) if command else "not found"}
        try:
            rows["cache"] = str(cache.root())
            built = build.existing(name)
            rows["built"] = "no, on first use" if built is None else str(built)
        except cache.CacheError as err:
            rows["cache"] = str(err)
        if name in self._failed:
            rows["failed"] = self._failed[name].text
        return rows


def obtain(name: str, progress: build.Progress | None = None) -> Path:
    """Return the shared object of an instruction set; announces a build on the logger.

    Raises:
        build.BuildError: The build failed, or there is nothing to build with.
        cache.CacheError: The cache directory cannot be used.
    """
    start = time.monotonic()
    begun = False

    def step(done: int, total: int, text: str) -> None:
        nonlocal begun
        if not begun:
            LOGGER.info("building the %s CPU kernels in %s, once; about a minute", name, cache.root())
            begun = True
        if progress is not None:
            progress(done, total, text)

    found = build.ensure(name, step)
    if begun:
        LOGGER.info("built the %s CPU kernels in %.1f s: %s", name, time.monotonic() - start, found)
    return found


def load(path: Path) -> Any:
    """Load a native module from its file.

    Raises:
        build.BuildError: The dynamic linker refuses it.
    """
    loader = importlib.machinery.ExtensionFileLoader(f"attn_hip.{build.MODULE}", str(path))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as err:
        raise build.BuildError(f"{path} does not load: {err}") from err
    return module
