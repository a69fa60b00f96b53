"""``attn doctor``: the facts of this installation. Every section survives a fault in what it asks."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, distributions, entry_points, version
from pathlib import Path as FilePath
from typing import TypeVar

import torch

from .. import plugins, thresholds, tracing, tuned
from ..backend import Backend, Path
from ..capability import ARCH
from ..plugins import Registry
from ..reasons import Reason
from ..target import DeviceTarget, target_of
from . import mount, tools
from .installed import installed
from .output import one_line, plain, told

CACHE_VARIABLE = "ATTN_CACHE_DIR"
Facts = dict[str, object]
T = TypeVar("T")
_NO_FACTS: Facts = {}
_NO_ROWS: list[Facts] = []


def facts(probe: bool = False) -> Facts:
    """Return everything ``attn doctor`` shows, as JSON can hold it; with ``probe`` torch.compile is tried.

    Loads the backend packages as the first plan() would; builds nothing and runs no kernel. The GPU
    runtime is asked only where torch says that there is a GPU.
    """
    devices = _attempt(_devices, [_device(torch.device("cpu"), "cpu")])
    targets = [target for target, _ in devices[0]]
    registry, fault = _registry()
    backends = [_backend(backend, registry, targets) for backend in registry.backends]
    return {
        "ok": any(row["usable"] for row in backends),
        "versions": _attempt(_versions, _NO_FACTS)[0],
        "devices": [_target(target, name) for target, name in devices[0]],
        "device_error": devices[1],
        "known_archs": sorted({target.arch for target in registry.targets}),
        "tools": tools.found(),
        "backends": backends,
        "broken": [{"name": b.name, "error": b.error} for b in registry.broken],
        "commands": [{"name": name, "source": mount.source(ep)} for name, ep in mount.mounted().items()],
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("ATTN_")},
        "config": {"path": os.environ.get(plugins.CONFIG_VARIABLE), "error": fault},
        "cache": _cache(),
        "thresholds": _thresholds(),
        "tuned": _tuned(registry),
        "compile": _compile(probe),
    }


def _attempt(ask: Callable[[], T], otherwise: T) -> tuple[T, str | None]:
    """Return what ``ask`` returns, or the other value and why."""
    try:
        return ask(), None
    except (Exception, SystemExit) as err:
        return otherwise, told(err)


def _registry() -> tuple[Registry, str | None]:
    """The backends; without the configuration when that cannot be read."""
    try:
        return installed(), None
    except ValueError as err:
        return plugins.discover(config={}), one_line(err)


def _versions() -> Facts:
    found: Facts = {"python": platform.python_version(), "platform": platform.platform()}
    found["torch"] = str(torch.__version__)
    found["torch built for"] = _torch_build()
    for name in ("triton", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    offered = {
        ep.dist.name for group in (plugins.GROUP, mount.GROUP) for ep in entry_points(group=group) if ep.dist
    }
    ours = {d.name: d.version for d in distributions() if d.name}
    found.update({n: v for n, v in sorted(ours.items()) if n.startswith("attn-") or n in offered})
    return found


def _torch_build() -> str:
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"


def device_name(device: torch.device) -> str:
    """Return what a device of this machine is called."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def _devices() -> list[tuple[DeviceTarget, str]]:
    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [_device(device, device_name(device)) for device in devices]


def _device(device: torch.device, name: str) -> tuple[DeviceTarget, str]:
    return target_of(device), name


def _target(target: DeviceTarget, name: str) -> Facts:
    return {
        "name": name,
        "kind": target.kind,
        "arch": target.arch,
        "num_cus": target.num_cus,
        "wave_size": target.wave_size,
        "index": target.index,
    }


def _backend(backend: Backend, registry: Registry, targets: list[DeviceTarget]) -> Facts:
    paths, error = _attempt(lambda: [_path(backend, path, targets) for path in backend.paths], _NO_ROWS)
    notes, note_error = _attempt(lambda: _notes(backend), _NO_FACTS)
    return {
        "name": backend.name,
        "rank": backend.rank,
        "source": registry.sources.get(backend.name),
        "usable": any(path["usable"] for path in paths),
        "paths": paths,
        "notes": {**notes, **({"doctor": note_error} if note_error else {})},
        "error": error,
    }


def _path(backend: Backend, path: Path, targets: list[DeviceTarget]) -> Facts:
    missing = []
    for target in targets:
        reason, error = _attempt(lambda t=target: _why_not(backend, path, t), None)  # type: ignore[misc]
        text = error or (None if reason is None else reason.text)
        code = "cli.backend-raised" if error else None if reason is None else reason.code.slug
        missing.append({"arch": target.arch, "index": target.index, "missing": text, "code": code})
    return {
        "candidate": f"{backend.name}/{path.name}",
        "usable": any(row["missing"] is None for row in missing),
        "targets": missing,
    }


def _why_not(backend: Backend, path: Path, target: DeviceTarget) -> Reason | None:
    """The AVAILABILITY stage of a route, which needs no problem."""
    archs = path.capability.archs
    if archs is not None and target.arch not in archs:
        return Reason(ARCH, path.name, ", ".join(sorted(archs)), target.arch)
    return backend.unavailable(target)


def _notes(backend: Backend) -> Facts:
    """Rows of a backend's optional ``doctor()``."""
    ask = getattr(backend, "doctor", None)
    if ask is None:
        return {}
    rows = ask()
    if not isinstance(rows, Mapping):
        raise TypeError(f"doctor() returned {type(rows).__name__}, not a mapping")
    return {str(key): plain(value) for key, value in rows.items()}


def _cache() -> Facts:
    """Where built kernels are kept: ``ATTN_CACHE_DIR``, else ``attn`` in the user's cache directory.

    None where a user has no home, as in a container that runs under a number.
    """
    stated = os.environ.get(CACHE_VARIABLE)
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        place = (
            FilePath(stated).expanduser() if stated else FilePath(home or FilePath.home() / ".cache") / "attn"
        )
    except RuntimeError:
        return {"path": None, "exists": False, "writable": False}
    # os.path and not Path: one that this user may not look into is no error here.
    standing = next((p for p in (place, *place.parents) if os.path.exists(p)), place)
    return {
        "path": str(place),
        "exists": os.path.isdir(place),
        "writable": os.path.isdir(standing) and os.access(standing, os.W_OK | os.X_OK),
    }


def _compile(probe: bool) -> Facts:
    """What torch.compile does with traced calls here: rows of the tracer's optional ``doctor()``."""
    found = tracing.state()
    if isinstance(found, str):
        return {"operators": f"none: {found}"}
    ask = getattr(found, "doctor", None)
    rows, error = _attempt(lambda: dict(ask(probe)) if ask is not None else {}, _NO_FACTS)
    return {**{str(key): plain(value) for key, value in rows.items()}, **({"fault": error} if error else {})}


def _thresholds() -> Facts:
    rows, error = _attempt(lambda: len(thresholds.stated()), 0)
    return {"path": os.environ.get(thresholds.OVERLAY_VARIABLE), "rows": rows, "error": error}


def _tuned(registry: Registry) -> Facts:
    """What ``attn tune`` wrote, and which of it holds for versions other than those installed."""
    found = tuned.load()
    place = tuned.location()
    now = set(registry.sources.values()) | {f"torch {torch.__version__}"}
    names = {text.partition(" ")[0] for text in now}
    pairs: list[Facts] = []
    for pair in found.pairs:
        facts = dict(pair.provenance)
        then = facts["versions"].split(", ")
        pairs.append(
            {
                "candidates": list(pair.candidates),
                "arch": pair.arch,
                "op": pair.scope.op,
                "heads": f"{pair.scope.num_qo_heads}/{pair.scope.num_kv_heads}",
                "dtype": pair.scope.q_dtype,
                "device": facts["device"],
                "date": facts["date"],
                "outdated": [text for text in then if text.partition(" ")[0] in names and text not in now],
            }
        )
    return {
        "path": None if place is None else str(place),
        "exists": found.path is not None and found.fault is None,
        "rows": [
            {"code": row.code, "arch": row.arch, "limit": plain(getattr(row.verdict, "value", "never"))}
            for row in found.rows
        ],
        "pairs": pairs,
        "error": found.fault,
    }
