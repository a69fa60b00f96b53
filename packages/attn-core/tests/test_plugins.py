"""How backends come into the process: packages, faults, order, options."""

import importlib.metadata
import re
import textwrap
from types import ModuleType

import pluggy
import pytest
import torch

from attn_core import hookspecs, plugins, tracing
from attn_core.backend import API_VERSION
from attn_core.capability import Capability
from attn_core.hookspecs import hookimpl
from attn_core.problem import Op
from attn_core.target import DeviceTarget

from .fakes import FakeBackend
from .kit import decode_wrapper, pages


class Entry:
    """An entry point whose package is a module with hooks."""

    dist = None

    def __init__(self, name, fails=None, **hooks):
        self.name, self.fails = name, fails
        self.plugin = ModuleType(name)
        for hook, function in hooks.items():
            setattr(self.plugin, hook, hookimpl(function))

    def load(self):
        if self.fails is not None:
            raise self.fails
        return self.plugin


def gives(name, *backends, **hooks):
    return Entry(name, attn_backends=lambda api_version, config: backends, **hooks)


def discover(*entries, **config):
    return plugins.discover(list(entries), config=config)


def names(found):
    return [backend.name for backend in found.backends]


# ---- order -------------------------------------------------------------------------------------------


def test_rank_decides_then_the_name_and_not_the_order_of_packages():
    entries = [
        gives("z", FakeBackend("b", rank=5)),
        gives("a", FakeBackend("c", rank=1), FakeBackend("a", rank=5)),
    ]
    for order in (entries, entries[::-1]):
        assert names(discover(*order)) == ["c", "a", "b", "reference"]


@pytest.mark.parametrize(
    ("answer", "want"),
    [
        (("reference", "b"), ["reference", "b", "a"]),
        (("b",), ["b", "a", "reference"]),
        (None, ["a", "b", "reference"]),
        ((), ["a", "b", "reference"]),
        (("nobody", "b", "b"), ["b", "a", "reference"]),
    ],
)
def test_a_package_may_state_another_order(answer, want):
    asked = []

    def order(names):
        asked.append(names)
        return answer

    found = discover(
        gives("x", FakeBackend("a", rank=1), FakeBackend("b", rank=2)), Entry("y", attn_order=order)
    )
    assert names(found) == want
    assert asked == [("a", "b", "reference")]
    assert found.broken == ()


@pytest.mark.parametrize("answer", [7, RuntimeError("no idea")])
def test_a_broken_order_is_reported_and_rank_holds(answer):
    def order(names):
        if isinstance(answer, Exception):
            raise answer
        return answer

    found = discover(gives("x", FakeBackend("a"), attn_order=order))
    assert names(found) == ["a", "reference"]
    assert [b.name for b in found.broken] == ["attn_order"]


# ---- faults ------------------------------------------------------------------------------------------


class Part:
    """A backend without some member."""

    def __init__(self, missing):
        self._missing, self._whole = missing, FakeBackend("part")

    def __getattr__(self, name):
        if name.startswith("__") or name in (self._missing, "append"):
            raise AttributeError(name)
        return getattr(self._whole, name)


def with_(backend, **members):
    for name, value in members.items():
        setattr(backend, name, value)
    return backend


APPENDS = ("p", Capability(archs=None, ops=frozenset({Op.APPEND})))
FAULTS = {
    "import": (Entry("bad", fails=ImportError("no\nlibamdhip64.so")), "ImportError: no libamdhip64.so"),
    "exit": (Entry("bad", fails=SystemExit(3)), "SystemExit: 3"),
    "silent": (Entry("bad", fails=RuntimeError()), "RuntimeError: no message"),
    "raises": (Entry("bad", attn_backends=lambda api_version, config: 1 // 0), "ZeroDivisionError"),
    "exits": (Entry("bad", attn_backends=lambda api_version, config: exit(1)), "SystemExit"),
    "not a list": (Entry("bad", attn_backends=lambda api_version, config: 5), "TypeError.*int.*not iterable"),
    "no hook": (
        Entry("bad", attn_backend=lambda api_version, config: ()),
        "PluginValidationError.*attn_backend",
    ),
    "wrong argument": (
        Entry("bad", attn_backends=lambda api_versions: ()),
        "PluginValidationError.*api_versions",
    ),
    "targets": (gives("bad", FakeBackend("lost"), attn_targets=lambda: 1 // 0), "ZeroDivisionError"),
    "version": (
        gives("bad", with_(FakeBackend("old"), api_version=0)),
        rf"old: api_version.*{API_VERSION}.*got 0",
    ),
    "no version": (gives("bad", object()), "object: api_version.*got None"),
    "no run": (gives("bad", Part("run")), "part: needs every member.*got no run"),
    "no paths": (gives("bad", Part("paths")), "got no paths"),
    "no rules": (gives("bad", Part("rules")), "got no rules"),
    "capitals": (gives("bad", FakeBackend("FA2")), "name: needs a lower-case identifier.*'FA2'"),
    "slash": (gives("bad", FakeBackend("a/b")), "name: needs a lower-case identifier.*'a/b'"),
    "auto": (gives("bad", FakeBackend("auto")), "'auto'"),
    "number": (gives("bad", FakeBackend(3)), "got 3"),
    "rank": (gives("bad", FakeBackend("ranked", rank="high")), "ranked: rank: needs an int, got 'high'"),
    "paths alike": (
        gives("bad", FakeBackend("twice", paths=["p", "p"])),
        "twice: paths: needs names that differ",
    ),
    "append": (
        gives("bad", FakeBackend("app", paths=[APPENDS])),
        r"app: needs append\(\), which its capability claims",
    ),
    "taken": (
        gives("bad", FakeBackend("good")),
        "name: needs a name not in use, got 'good', taken by a-good",
    ),
    "reference": (gives("bad", FakeBackend("reference")), "'reference', taken by attn-core"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_package_that_fails_is_a_fact_and_harms_no_other(fault):
    entry, message = FAULTS[fault]
    found = discover(entry, gives("a-good", FakeBackend("good")), gives("z-good", FakeBackend("fine")))
    assert names(found) == ["fine", "good", "reference"]
    assert [b.name for b in found.broken] == ["bad"]
    assert "\n" not in found.broken[0].error
    assert re.search(message, found.broken[0].error)
    assert found.sources["good"] == "a-good"


def test_one_bad_backend_of_a_package_leaves_its_others():
    found = discover(gives("mixed", with_(FakeBackend("old"), api_version=9), FakeBackend("new")))
    assert names(found) == ["new", "reference"]
    assert len(found.broken) == 1


def test_no_hook_of_a_package_that_failed_is_called():
    called = []

    def order(names):
        called.append(names)

    broken = (
        Entry("bad1", attn_backends=lambda api_versions: (), attn_order=order),
        Entry("bad2", attn_order=order, attn_targets=lambda nonsense: ()),
        Entry("bad3", attn_order=order, attn_nonsense=lambda: ()),
        Entry("bad4", attn_order=order, attn_backends=lambda api_version, config: 1 // 0),
    )
    found = discover(*broken, gives("good", FakeBackend("good")))
    assert [b.name for b in found.broken] == ["bad1", "bad2", "bad3", "bad4"]
    assert called == []
    assert names(found) == ["good", "reference"]


def test_a_package_listed_twice_counts_once():
    entry = gives("one", FakeBackend("good"))
    again = Entry("two")
    again.plugin = entry.plugin
    found = discover(entry, again)
    assert names(found) == ["good", "reference"]
    assert [b.name for b in found.broken] == ["two"]


def test_an_interrupt_is_not_a_fault():
    with pytest.raises(KeyboardInterrupt):
        discover(Entry("bad", fails=KeyboardInterrupt()))


def test_hooks_get_the_version_and_the_options_and_may_name_devices():
    seen = []
    target = DeviceTarget("hip", "gfx942", 304, 64)

    def backends(api_version, config):
        seen.append((api_version, config))
        return [FakeBackend("good")]

    found = discover(
        Entry("x", attn_backends=backends, attn_targets=lambda: [target]), good={"cache": "/tmp"}
    )
    assert seen == [(API_VERSION, {"good": {"cache": "/tmp"}})]
    assert found.targets == (target,)


def test_hook_arguments_may_be_left_out():
    found = discover(Entry("x", attn_backends=lambda: [FakeBackend("good")]))
    assert names(found) == ["good", "reference"]


# ---- the process's own registry ----------------------------------------------------------------------


@pytest.fixture
def empty(monkeypatch):
    """A process that has not looked for backends yet, with no package and no options."""
    monkeypatch.setattr(plugins, "_options", {})
    for name in ("ATTN_CONFIG", "ATTN_DISABLE_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [])
    plugins.use(None)
    return monkeypatch


def install(monkeypatch, *entries):
    monkeypatch.setattr(
        plugins, "entry_points", lambda group: list(entries) if group == "attn.backends" else []
    )


def test_backends_are_found_once_and_a_broken_package_is_named_once(empty, caplog):
    loads = []
    good = gives("good", FakeBackend("good"))
    good.load = lambda: loads.append(1) or good.plugin
    install(empty, good, Entry("bad", fails=OSError("no such library")))
    p = pages([9, 3])
    for _ in range(3):
        wrapper = decode_wrapper()
        wrapper.plan(*p.table, 4, 2, 8, 4)
        assert wrapper.backend == "good"
    assert loads == [1]
    assert [r.getMessage() for r in caplog.records] == ["plugin bad is unavailable: OSError: no such library"]


def test_packages_can_be_left_out(empty):
    install(empty, gives("good", FakeBackend("good")), gives("other", FakeBackend("other")))
    for blocked, want in (
        ("", ["good", "other", "reference"]),
        ("good", ["other", "reference"]),
        (" good , other,", ["reference"]),
        ("nobody", ["good", "other", "reference"]),
    ):
        empty.setenv("ATTN_DISABLE_PLUGINS", blocked)
        plugins.use(None)
        assert names(plugins.registry()) == want
        assert plugins.registry().broken == ()


def test_options_come_from_the_file_and_configure_wins(empty, tmp_path):
    seen = []

    def backends(config):
        seen.append(config)
        return [FakeBackend("good")]

    install(empty, Entry("x", attn_backends=backends))
    file = tmp_path / "attn.toml"
    file.write_text(
        '[backend.good]\ncache = "/from/file"\nthreads = 4\n[backend.other]\nx = 1\n[unrelated]\ny = 2\n',
        encoding="utf-8",
    )
    empty.setenv("ATTN_CONFIG", str(file))
    plugins.configure("good", cache="/from/call", debug=True)
    plugins.configure("good", debug=False)
    plugins.registry()
    assert seen == [{"good": {"cache": "/from/call", "threads": 4, "debug": False}, "other": {"x": 1}}]
    with pytest.raises(RuntimeError, match="configure: needs a call before the first use"):
        plugins.configure("good", cache="/too/late")
    plugins.use(None)
    plugins.registry()
    assert seen[1] == seen[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "readable TOML file"),
        ("[backend", "readable TOML file"),
        ("backend = 3", r"\[backend.NAME\] tables"),
        ("[backend]\ngood = 3", r"\[backend.NAME\] tables"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_an_error(empty, tmp_path, text, message):
    file = tmp_path / "attn.toml"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    empty.setenv("ATTN_CONFIG", str(file))
    wrapper = decode_wrapper()
    for _ in range(2):
        with pytest.raises(ValueError, match=f"ATTN_CONFIG: needs .*{message}.*core.config"):
            wrapper.plan(*pages([9, 3]).table, 4, 2, 8, 4)
    empty.delenv("ATTN_CONFIG")
    wrapper.plan(*pages([9, 3]).table, 4, 2, 8, 4)


def test_a_wheel_with_an_entry_point_is_enough(empty, tmp_path):
    """A third party's package: a module and its metadata on the path, and nothing of ours edited."""
    (tmp_path / "toy_attention.py").write_text(
        textwrap.dedent("""
        from attn_core.backend import API_VERSION, Path, PlanResult
        from attn_core.capability import Capability
        from attn_core.hookspecs import hookimpl
        from attn_core.problem import Op

        class Toy:
            api_version, name, rank, rules = API_VERSION, "toy", 1, ()
            paths = (Path("p", Capability(archs=None, ops=frozenset({Op.DECODE}))),)
            def __init__(self, value): self.value = value
            def unavailable(self, target): return None
            def prepare(self, target, problem, path): return None
            def plan(self, query, path, batch): return PlanResult(self.value)
            def run(self, launch, image, io): io.out.fill_(launch)

        @hookimpl
        def attn_backends(api_version, config):
            return [Toy(config.get("toy", {}).get("value", 1.0))]
    """),
        encoding="utf-8",
    )
    info = tmp_path / "toy_attention-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: toy-attention\nVersion: 1.2\n", encoding="utf-8"
    )
    (info / "entry_points.txt").write_text("[attn.backends]\ntoy = toy_attention\n", encoding="utf-8")
    empty.syspath_prepend(tmp_path)

    def of_this_folder(group):
        found = importlib.metadata.distributions(path=[str(tmp_path)])
        return [ep for dist in found for ep in dist.entry_points if ep.group == group]

    empty.setattr(plugins, "entry_points", of_this_folder)
    plugins.configure("toy", value=4.0)
    p = pages([9, 3])
    for backend in ("auto", "toy", "toy/p"):
        wrapper = decode_wrapper(backend=backend)
        wrapper.plan(*p.table, 4, 2, 8, 4, q_data_type="float32")
        assert torch.equal(wrapper.run(torch.zeros(2, 4, 8), p.cache), torch.full((2, 4, 8), 4.0))
    assert plugins.registry().sources["toy"] == "toy-attention 1.2"
    assert plugins.registry().broken == ()
    wrapper = decode_wrapper()
    wrapper.plan(*p.table, 4, 2, 8, 4, q_len_per_req=2)
    assert wrapper.backend == "reference"


def test_hook_names_are_those_documented():
    manager = pluggy.PluginManager(hookspecs.NAME)
    manager.add_hookspecs(hookspecs)
    assert hookspecs.NAME == "attn"
    assert {"attn_backends", "attn_targets", "attn_order"} <= set(vars(manager.hook))


def test_a_look_at_other_plugins_leaves_the_tracer_alone(monkeypatch):
    mine = object()
    monkeypatch.setattr(tracing, "_tracer", mine)
    discover(gives("x", FakeBackend("a")))
    assert tracing.state() is mine


def _breaks():
    raise ZeroDivisionError("in its hook")


@pytest.mark.parametrize(
    ("tracer", "why"),
    [(lambda: "its switch is off", "its switch is off"), (_breaks, "ZeroDivisionError: in its hook")],
)
def test_why_there_is_no_tracer_is_told(tracer, why, monkeypatch):
    monkeypatch.setattr(tracing, "_tracer", object())
    monkeypatch.setattr(tracing, "_absent", "nobody said")
    discover(gives("x", FakeBackend("a"), attn_tracer=tracer))
    assert tracing.state() == why
    with pytest.raises(RuntimeError, match=why):
        tracing.tracer()
