"""The backend object: what attn-core asks, answered from the tables, the probe and the routes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, cast

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
            rows.UNIFIED: Unified(),
        }
        self._load = loader or load.function
        # A release assumed for another machine is decided about, never loaded.
        self._dry = self.install.assumed and loader is None and torch.version.hip is None
        self._functions: dict[str, Callable[..., Any]] = {}
        self._variants: dict[Variant, Callable[..., Any]] = {}
        self._prepared: dict[object, Reason | None] = {}
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
        """Import what the path calls and let AITER build the variant with one tiny call.

        Takes minutes the first time on a machine. ``ATTN_AITER_STRICT=1`` raises instead of passing over.

        Raises:
            RuntimeError: Strict, and the import or the build failed.
            ValueError: As AITER raised it: a mistake of the call, not of the installation.
            torch.OutOfMemoryError: As it was raised.
        """
        if self._dry:
            return None
        key = (target, path, warm.variant(problem))
        with self._lock:
            if key not in self._prepared:
                self._prepared[key] = self._prepare(target, problem, path)
            return self._prepared[key]

    def _prepare(self, target: DeviceTarget, problem: AttentionProblem, path: str) -> Reason | None:
        if problem.logits_soft_cap and path != rows.UNIFIED and warm.softsign():
            return Reason(codes.SOFTSIGN, f"{NAME}/{path}", warm.SOFTSIGN_VARIABLE, "1")
        call = self._append.call if path == rows.APPEND else self._routes[path].call
        declared = self.api.functions[call.key]
        try:
            self._functions[path] = self._load(declared.module, declared.name)
        except load.Failed as err:
            return self._failed(codes.IMPORT_FAILED, path, err)
        if path in (rows.PA_V1, rows.APPEND):
            return None  # plan() builds the one, whose variant depends on the capacity; the other is tiny
        try:
            warm.call(self, target, problem, path)
        except (ValueError, torch.OutOfMemoryError, KeyboardInterrupt):
            raise
        except BaseException as err:  # AITER ends the process when a build fails, up to 0.1.11
            return self._failed(codes.BUILD_FAILED, path, err)
        return None

    def _failed(self, code: Code, path: str, err: BaseException) -> Reason:
        text = str(err) if isinstance(err, load.Failed) else load.one_line(err)
        reason = Reason(code, f"{NAME}/{path}", None, text)
        if load.strict():
            raise RuntimeError(f"{reason}; {load.STRICT_VARIABLE} is set") from err
        return reason

    def plan(self, query: Query, path: str, batch: HostBatch) -> PlanResult:
        """See the route. For ``pa_v1`` AITER builds the variant of this capacity here.

        Raises:
            Unsupported: The route found, late, that it cannot serve the batch, or the build failed.
        """
        result = self._routes[path].plan(self.api, query, batch)
        if isinstance(result.launch, PaLaunch) and not self._dry:
            self._build(result.launch.variant)
        return result

    def _build(self, variant: Variant) -> None:
        if variant in self._variants:
            return
        with self._lock:
            compile_ = self._functions.get(rows.PA_V1)
            if compile_ is None:
                declared = self.api.functions[PagedAttentionV1.call.key]
                compile_ = self._functions[rows.PA_V1] = self._load(declared.module, declared.name)
            try:
                with warm.watched(f"{NAME}/{rows.PA_V1}"):
                    self._variants[variant] = compile_(**dict(variant))
            except (ValueError, torch.OutOfMemoryError, KeyboardInterrupt):
                raise
            except BaseException as err:
                raise Unsupported(self._failed(codes.BUILD_FAILED, rows.PA_V1, err)) from err

    @torch.no_grad()
    def run(self, launch: object, image: DeviceImage, io: RunIO) -> None:
        """See the route. Never to be traced: AITER's operators declare every tensor as written."""
        if launch is None:
            return
        planned = cast("Planned", launch)
        self._routes[planned.path].run(self._function(planned), planned, image, io)

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
        self._append.append(self.api, self._functions[path], io)
