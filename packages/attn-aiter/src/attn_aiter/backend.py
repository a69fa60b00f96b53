"""The backend object: what attn-core asks, answered from the tables, the probe and the routes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from attn_core.backend import API_VERSION, AppendIO, DeviceImage, PlanResult, RunIO
from attn_core.batch import HostBatch
from attn_core.errors import Unsupported, needs
from attn_core.problem import AttentionProblem
from attn_core.query import Query
from attn_core.reasons import Code, Reason
from attn_core.rules import Rule, Verdict
from attn_core.target import DeviceTarget

from . import codes, gates, load, probe, rows, tables, warm
from .routes.append import Append
from .routes.batch_prefill import BatchPrefill
from .routes.common import Planned, Route
from .routes.mla import Mla
from .routes.pa_v1 import Launch as PaLaunch
from .routes.pa_v1 import PagedAttentionV1, Variant
from .routes.unified import Unified
from .routes.varlen import Varlen

NAME = "aiter"
RANK = 50
"""Before the in-tree kernels: where a row says they are faster, a preference declines this backend."""

OPTIONS = ("assume_version", "min_version")
Loader = Callable[[str, str], Callable[..., Any]]


class AiterBackend:
    """AITER behind the backend contract.

    Args:
        options: ``assume_version``: a release to pretend (``none`` for no installation), so that decisions
            can be asked for on any machine; ``min_version``: the oldest release to serve, by default
            :data:`attn_aiter.probe.FLOOR`.
        loader: Stands in for :func:`attn_aiter.load.function`.

    Raises:
        ValueError: An unknown option, or one that names no version; a bad threshold overlay.
    """

    api_version = API_VERSION
    name = NAME
    rank = RANK
    codes = codes.CODES

    def __init__(self, options: Mapping[str, object] | None = None, loader: Loader | None = None) -> None:
        given = dict(options or {})
        unknown = sorted(given.keys() - set(OPTIONS))
        if unknown:
            want = f"options {', '.join(OPTIONS)}"
            raise ValueError(needs("aiter", want, unknown[0], "aiter.option"))
        assume, floor = given.get("assume_version"), given.get("min_version", probe.FLOOR)
        self.install = probe.look(None if assume is None else str(assume), str(floor))
        self.thresholds = tables.thresholds()
        self.paths = rows.paths(self.install.release)
        self._append = Append()
        self._routes: dict[str, Route] = {
            rows.NATIVE: BatchPrefill(),
            rows.GATHER: Varlen(rows.GATHER, gather=True),
            rows.VARLEN: Varlen(rows.VARLEN),
            rows.SINGLE: Varlen(rows.SINGLE),
            rows.PA_V1: PagedAttentionV1(),
            rows.MLA: Mla(),
            rows.UNIFIED: Unified(),
        }
        self._load = loader or load.function
        # A release assumed for another machine is decided about, never loaded.
        self._dry = self.install.assumed and loader is None and torch.version.hip is None
        self._functions: dict[str, Callable[..., Any]] = {}
        self._variants: dict[Variant, Callable[..., Any]] = {}
        self._verdicts: dict[object, Reason | None] = {}
        self._late: dict[object, Reason] = {}
        self._late_built: set[object] = set()
        self._missing: dict[str, Verdict] = {}
        self._read: probe.AiterApi | None = None
        self._lock = threading.RLock()
        self.rules = self._rules()

    @property
    def api(self) -> probe.AiterApi:
        """Signatures of the installation, read when first asked for."""
        if self._read is None:
            with self._lock:
                if self._read is None:
                    self._read = probe.read(self.install)
        return self._read

    def _rules(self) -> tuple[Rule, ...]:
        release = self.install.release
        if release is None:
            return ()
        return (
            *(gates.signature(path.name, self._lacks) for path in self.paths),
            *gates.wrong_answers(tables.defects(release)),
            *gates.preferences(release, self.thresholds),
        )

    def _lacks(self, path: str) -> Verdict:
        if path not in self._missing:
            route = self._append if path == rows.APPEND else self._routes[path]
            missing = route.missing(self.api)
            self._missing[path] = (", ".join(missing), self.api.text) if missing else None
        return self._missing[path]

    def unavailable(self, target: DeviceTarget) -> Reason | None:
        """Device first, then the package: a machine without an Instinct is not told to install anything."""
        if target.arch not in rows.ARCHS:
            return Reason(codes.WRONG_ARCH, NAME, ", ".join(sorted(rows.ARCHS)), target.arch)
        if self.install.cause is None:
            return None
        code, limit, got = self.install.cause
        return Reason(code, NAME, limit, got)

    def prepare(self, target: DeviceTarget, problem: AttentionProblem, path: str) -> Reason | None:
        """Import what the path calls; for an append, let AITER build it too.

        ``ATTN_AITER_STRICT=1`` raises instead of passing over.

        Raises:
            RuntimeError: Strict, and the import or the build failed.
            ValueError: As AITER raised it: a mistake of the call, not of the installation.
            torch.OutOfMemoryError: As it was raised.
        """
        if self._dry:
            return None
        if problem.logits_soft_cap and path != rows.UNIFIED and warm.softsign():
            return Reason(codes.SOFTSIGN, f"{NAME}/{path}", warm.SOFTSIGN_VARIABLE, "1")
        with self._lock:
            try:
                function = self._loaded(path)
            except load.Failed as err:
                return self._failed(codes.IMPORT_FAILED, path, err)
            if path != rows.APPEND:
                return None  # which kernel it takes follows from the batch: plan() has it built
            return self._built(
                (target, path),
                path,
                lambda: warm.append(self._append, self.api, function, target, problem),
            )

    def _loaded(self, path: str) -> Callable[..., Any]:
        found = self._functions.get(path)
        if found is None:
            call = self._append.call if path == rows.APPEND else self._routes[path].call
            declared = self.api.functions[call.key]
            found = self._functions[path] = self._load(declared.module, declared.name)
        return found

    def _built(self, key: object, path: str, first_call: Callable[[], object]) -> Reason | None:
        """Have AITER build a kernel, once per key; the verdict is kept, good or bad."""
        if key not in self._verdicts:
            try:
                first_call()
            except (ValueError, torch.OutOfMemoryError, KeyboardInterrupt):
                raise
            except BaseException as err:  # AITER ends the process when a build fails, up to 0.1.11
                self._verdicts[key] = self._failed(codes.BUILD_FAILED, path, err)
            else:
                self._verdicts[key] = None
        return self._verdicts[key]

    def _failed(self, code: Code, path: str, err: BaseException) -> Reason:
        text = str(err) if isinstance(err, load.Failed) else load.one_line(err)
        reason = Reason(code, f"{NAME}/{path}", None, text)
        if load.strict():
            raise RuntimeError(f"{reason}; {load.STRICT_VARIABLE} is set") from err
        return reason

    def plan(self, query: Query, path: str, batch: HostBatch) -> PlanResult:
        """See the route. AITER builds the kernel the runs will take here, which takes minutes once.

        Raises:
            Unsupported: The route found, late, that it cannot serve the batch, or the build failed.
            RuntimeError: As for :meth:`prepare`.
        """
        result = self._routes[path].plan(self.api, query, batch)
        if not self._dry and result.launch is not None:
            with self._lock:
                reason = self._build(query.target, path, result.launch)
            if reason is not None:
                raise Unsupported(reason)
        return result

    def _build(self, target: DeviceTarget, path: str, launch: Any) -> Reason | None:
        try:
            function = self._loaded(path)
        except load.Failed as err:
            return self._failed(codes.IMPORT_FAILED, path, err)
        if isinstance(launch, PaLaunch):
            return self._built(launch.variant, path, lambda: self._compile(function, launch.variant))
        if launch.empty:
            return None
        kind = warm.variant(launch)
        late = self._late.get(kind)
        if late is not None:
            return late
        route = self._routes[path]
        return self._built((target, kind), path, lambda: warm.call(route, self.api, function, target, launch))

    def _compile(self, compile_: Callable[..., Any], variant: Variant) -> None:
        with warm.watched(f"{NAME}/{rows.PA_V1}"):
            self._variants[variant] = compile_(**dict(variant))

    @torch.no_grad()
    def run(self, launch: object, image: DeviceImage, io: RunIO) -> None:
        """See the route. Never to be traced: AITER's operators declare every tensor as written.

        Raises:
            RuntimeError: The log-sum-exp was not planned for, and AITER could not build that kernel.
        """
        if launch is None:
            return
        planned: Any = launch
        route, function = self._routes[planned.path], self._function(planned)
        if io.lse is None or planned.problem.needs_lse:
            route.run(function, planned, image, io)
        else:
            self._run_unplanned_lse(route, function, planned, image, io)

    def _run_unplanned_lse(
        self, route: Route, function: Callable[..., Any], launch: Any, image: DeviceImage, io: RunIO
    ) -> None:
        """Run a kernel of another variant than plan() had built; AITER may compile now."""
        kind = warm.variant(launch, lse=True)
        try:
            route.run(function, launch, image, io)
        except (ValueError, NotImplementedError, torch.OutOfMemoryError, KeyboardInterrupt):
            raise
        except BaseException as err:
            if kind in self._late_built:
                raise
            reason = Reason(codes.BUILD_FAILED, f"{NAME}/{launch.path}", None, load.one_line(err))
            self._late[kind] = reason
            raise RuntimeError(f"{reason}; plan with needs_lse=True, and auto passes it over") from err
        self._late_built.add(kind)

    def _function(self, launch: Planned) -> Callable[..., Any]:
        found = (
            self._variants.get(launch.variant)
            if isinstance(launch, PaLaunch)
            else self._functions.get(launch.path)
        )
        if found is None:
            want = "a plan whose kernel was loaded"
            got = f"assume_version {self.install.text}" if self._dry else "one that was not prepared"
            raise RuntimeError(needs(f"{NAME}/{launch.path}: run", want, got, "aiter.not-loaded"))
        return found

    @torch.no_grad()
    def append(self, path: str, problem: AttentionProblem, io: AppendIO) -> None:
        """See :class:`attn_aiter.routes.append.Append`."""
        self._append.append(self.api, self._loaded(path), io)
