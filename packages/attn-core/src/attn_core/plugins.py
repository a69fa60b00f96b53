"""Find backend packages. A package that fails to load becomes a fact, not a crash."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from . import notices, tracing
from .backend import API_VERSION, AppendBackend, Backend, Path, SamplingBackend, SamplingPath
from .errors import needs
from .measured import NOTHING, Measured
from .problem import Op
from .target import DeviceTarget

if TYPE_CHECKING:
    import pluggy

# pluggy, tomllib and the reference backend are imported by discovery: importing attn_core stays quick.
GROUP = "attn.backends"
CONFIG_VARIABLE = "ATTN_CONFIG"
BLOCK_VARIABLE = "ATTN_DISABLE_PLUGINS"

Config = Mapping[str, Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class Broken:
    """A plugin, or one of its backends, that cannot be used, and why, on one line."""

    name: str
    error: str


@dataclass(frozen=True, slots=True, eq=False)
class Registry:
    """Result of discovery.

    Attributes:
        backends: Usable backends in the order ``auto`` tries them.
        broken: What could not be used.
        targets: Devices the packages know by name.
        sources: Distribution of each backend, ``name version``.
        measured: Candidates measured side by side on this machine.
    """

    backends: tuple[Backend, ...]
    broken: tuple[Broken, ...]
    targets: tuple[DeviceTarget, ...]
    sources: Mapping[str, str]
    measured: Measured = NOTHING


_options: dict[str, dict[str, object]] = {}
_registry: Registry | None = None
_lock = threading.Lock()


def configure(backend: str, **options: object) -> None:
    """Set options a backend will receive when it is created; call before the first wrapper.

    Args:
        backend: Backend name.
        **options: Passed to the plugin as given; they win over the ``ATTN_CONFIG`` file's.

    Raises:
        RuntimeError: Backends were already created.
    """
    with _lock:
        if _registry is not None:
            raise RuntimeError(
                needs("configure", "a call before the first use", "backends already exist", "core.configure")
            )
        _options.setdefault(backend, {}).update(options)


def registry() -> Registry:
    """Return the process's backends, discovering them on first use."""
    global _registry
    if _registry is None:
        with _lock:
            if _registry is None:
                _registry = discover()
                for broken in _registry.broken:
                    notices.warn_once(
                        ("broken", broken), f"plugin {broken.name} is unavailable: {broken.error}"
                    )
    return _registry


def use(new: Registry | None) -> Registry | None:
    """Replace the process's backends (for tests and hosts); None discovers again. Returns the old."""
    global _registry
    with _lock:
        old, _registry = _registry, new
    return old


def load_config() -> Config:
    """Merge the ``[backend.NAME]`` tables of the ``ATTN_CONFIG`` file with ``configure`` options.

    Raises:
        ValueError: The file the variable names cannot be read or is not valid TOML.
    """
    import tomllib

    merged: dict[str, dict[str, object]] = {}
    name = os.environ.get(CONFIG_VARIABLE)
    if name:
        try:
            tables = tomllib.loads(FilePath(name).read_text(encoding="utf-8")).get("backend", {})
        except (OSError, tomllib.TOMLDecodeError) as err:
            raise ValueError(
                needs(CONFIG_VARIABLE, "a readable TOML file", f"{name}: {err}", "core.config")
            ) from err
        if not isinstance(tables, dict) or not all(isinstance(t, dict) for t in tables.values()):
            raise ValueError(needs(CONFIG_VARIABLE, "[backend.NAME] tables", name, "core.config"))
        merged = {key: dict(table) for key, table in tables.items()}
    for backend, options in _options.items():
        merged.setdefault(backend, {}).update(options)
    return merged


def discover(plugins: Sequence[EntryPoint] | None = None, *, config: Config | None = None) -> Registry:
    """Load every plugin, check it and collect its backends.

    Args:
        plugins: Entry points; by default all of group ``attn.backends`` that
            ``ATTN_DISABLE_PLUGINS`` (comma-separated entry point names) does not block.
        config: Options by backend name; by default those of :func:`load_config`.
    """
    import pluggy

    from . import hookspecs, tuned
    from .reference import ReferenceBackend

    options = load_config() if config is None else config
    found = _Collector()
    found.add("attn-core", ReferenceBackend(), "attn-core")
    manager = pluggy.PluginManager(hookspecs.NAME)
    manager.add_hookspecs(hookspecs)
    for ep in sorted(_installed() if plugins is None else plugins, key=lambda e: e.name):
        with found.guard(ep.name):
            _load(manager, ep, options, found)
    order = _order(manager, found)
    _install_tracer(manager, found)
    return Registry(
        tuple(order), tuple(found.broken), tuple(found.targets), dict(found.sources), tuned.load().pairs
    )


def _installed() -> list[EntryPoint]:
    blocked = {name.strip() for name in os.environ.get(BLOCK_VARIABLE, "").split(",")}
    return [ep for ep in entry_points(group=GROUP) if ep.name not in blocked]


class _Collector:
    """What discovery has so far; a failure inside ``guard`` becomes a Broken row."""

    def __init__(self) -> None:
        self.backends: dict[str, Backend] = {}
        self.sources: dict[str, str] = {}
        self.targets: list[DeviceTarget] = []
        self.broken: list[Broken] = []
        self._name = ""

    def guard(self, name: str) -> _Collector:
        self._name = name
        return self

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, err: BaseException | None, tb: object) -> bool:
        # SystemExit too: a package that gives up on import must not take the process with it.
        if not isinstance(err, Exception | SystemExit):
            return False
        text = " ".join(str(err).split()) or "no message"
        self.broken.append(Broken(self._name, f"{type(err).__name__}: {text}"))
        return True

    def add(self, plugin: str, backend: object, source: str) -> None:
        fault = _fault(backend)
        if fault is None and getattr(backend, "name", None) in self.backends:
            name = getattr(backend, "name", None)
            fault = needs(
                "name",
                "a name not in use",
                f"{name!r}, taken by {self.sources[str(name)]}",
                "core.plugin-name",
            )
        if fault is not None:
            self.broken.append(Broken(plugin, fault))
            return
        assert isinstance(backend, Backend)
        self.backends[backend.name], self.sources[backend.name] = backend, source


def _load(manager: pluggy.PluginManager, ep: EntryPoint, config: Config, found: _Collector) -> None:
    plugin = ep.load()
    try:
        manager.register(plugin, name=ep.name)
        manager.check_pending()
        hooks = manager.subset_hook_caller("attn_backends", _others(manager, plugin))
        given = _given(hooks(api_version=API_VERSION, config=config), hasattr(plugin, "attn_backends"))
        hooks = manager.subset_hook_caller("attn_targets", _others(manager, plugin))
        targets = [target for some in hooks() for target in some]
    except BaseException:
        if manager.get_plugin(ep.name) is plugin:  # register() itself may fail half way
            manager.unregister(plugin)
        raise
    # Only now: a package is taken as a whole or not at all.
    source = ep.name if ep.dist is None else f"{ep.dist.name} {ep.dist.version}"
    for backend in given:
        found.add(ep.name, backend, source)
    found.targets.extend(targets)


def _given(answers: Sequence[object], asked: bool) -> list[object]:
    """Return the backends of one plugin's hook.

    Without an answer, where the plugin has such a function, its ``return`` or ``@hookimpl`` was forgotten.
    """
    if asked and not answers:
        want = "@hookimpl, and a sequence of backends returned"
        raise TypeError(needs("attn_backends", want, "nothing", "core.plugin"))
    given: list[object] = []
    for some in answers:
        if not isinstance(some, Sequence):
            raise TypeError(needs("attn_backends", "a sequence of backends", repr(some), "core.plugin"))
        given += some
    return given


def _install_tracer(manager: pluggy.PluginManager, found: _Collector) -> None:
    before = len(found.broken)
    tracer: tracing.Tracer | str | None = None
    with found.guard("attn_tracer"):
        tracer = manager.hook.attn_tracer()
    broken = "".join(b.error for b in found.broken[before:])
    if tracer is None and not broken:
        return  # these plugins bring none: that of the process's own stays
    if tracer is None or isinstance(tracer, str):
        tracing.install(None, tracer or broken)
        return
    tracing.install(tracer)
    for name, plugin in manager.list_name_plugin():
        with found.guard(name):
            hooks = manager.subset_hook_caller("attn_op_table", _others(manager, plugin))
            tracer.add([row for some in hooks() for row in some], name)


def _others(manager: pluggy.PluginManager, plugin: object) -> list[object]:
    return [other for other in manager.get_plugins() if other is not plugin]


def _fault(backend: object) -> str | None:
    """Return why an object is not a usable backend, or None."""
    if isinstance(backend, type):
        return needs(backend.__name__, "an instance", "the class: write it with ()", "core.plugin")
    name = getattr(backend, "name", type(backend).__name__)
    version = getattr(backend, "api_version", None)
    if version != API_VERSION:
        return needs(f"{name}: api_version", f"{API_VERSION} (this attn-core)", version, "core.api-version")
    members = ("name", "rank", "paths", "rules", "unavailable", "prepare", "plan", "run")
    missing = [member for member in members if not hasattr(backend, member)]
    if missing or not isinstance(backend, Backend):
        return needs(
            str(name), "every member of attn_core.backend.Backend", f"no {', '.join(missing)}", "core.plugin"
        )
    if not _is_name(backend.name):
        return needs(
            "name", "a lower-case identifier other than 'auto'", repr(backend.name), "core.plugin-name"
        )
    if isinstance(backend.rank, bool) or not isinstance(backend.rank, int):
        return needs(f"{name}: rank", "an int", repr(backend.rank), "core.plugin")
    return _paths_fault(backend) or _sampling_fault(backend)


def _paths_fault(backend: Backend) -> str | None:
    paths = backend.paths
    if not isinstance(paths, tuple) or not all(isinstance(path, Path) for path in paths):
        return needs(f"{backend.name}: paths", "a tuple of Path", repr(paths), "core.plugin")
    if len({path.name for path in paths}) != len(paths):
        names = ", ".join(path.name for path in paths)
        return needs(f"{backend.name}: paths", "names that differ", names, "core.plugin")
    appends = any(Op.APPEND in path.capability.ops for path in paths)
    if appends and not isinstance(backend, AppendBackend):
        return needs(backend.name, "append(), which its capability claims", "none", "core.plugin")
    return None


def _sampling_fault(backend: Backend) -> str | None:
    paths = getattr(backend, "sampling", ())
    if not isinstance(paths, tuple) or not all(isinstance(path, SamplingPath) for path in paths):
        return needs(
            f"{backend.name}: sampling", "a tuple of SamplingPath", type(paths).__name__, "core.plugin"
        )
    if paths and not isinstance(backend, SamplingBackend):
        want = "prepare_sampling() and sample(), as it has sampling paths"
        return needs(backend.name, want, "none", "core.plugin")
    if len({path.name for path in paths}) != len(paths):
        names = ", ".join(path.name for path in paths)
        return needs(f"{backend.name}: sampling", "names that differ", names, "core.plugin")
    return None


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier() and name == name.lower() and name != "auto"


def _order(manager: pluggy.PluginManager, found: _Collector) -> list[Backend]:
    ranked = sorted(found.backends.values(), key=lambda b: (b.rank, b.name))
    names = tuple(b.name for b in ranked)
    place: dict[str, int] = {}
    with found.guard("attn_order"):
        wanted: Sequence[str] | None = manager.hook.attn_order(names=names)
        place = {name: at for at, name in enumerate(dict.fromkeys(wanted or ()))}
    return sorted(ranked, key=lambda b: place.get(b.name, len(place)))
