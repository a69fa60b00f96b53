"""How backends come into the process: order of packages, and what is wrong with one."""

import re

import pytest

from attn_core.backend import API_VERSION
from attn_core.capability import Capability
from attn_core.problem import Op
from attn_core.target import DeviceTarget

from .fakes import FakeBackend
from .plugin_kit import Entry, discover, gives, names

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


def _bare(name):
    """A package whose function does not say that it is a hook."""
    entry = Entry(name)
    entry.plugin.attn_backends = lambda api_version, config: [FakeBackend("bare")]
    return entry


APPENDS = ("p", Capability(archs=None, ops=frozenset({Op.APPEND})))
FAULTS = {
    "import": (Entry("bad", fails=ImportError("no\nlibamdhip64.so")), "ImportError: no libamdhip64.so"),
    "exit": (Entry("bad", fails=SystemExit(3)), "SystemExit: 3"),
    "silent": (Entry("bad", fails=RuntimeError()), "RuntimeError: no message"),
    "raises": (Entry("bad", attn_backends=lambda api_version, config: 1 // 0), "ZeroDivisionError"),
    "exits": (Entry("bad", attn_backends=lambda api_version, config: exit(1)), "SystemExit"),
    "not a list": (
        Entry("bad", attn_backends=lambda api_version, config: 5),
        "attn_backends: needs a sequence of.*got 5",
    ),
    "no return": (
        Entry("bad", attn_backends=lambda api_version, config: None),
        "attn_backends: needs @hookimpl, and a sequence of backends returned, got nothing",
    ),
    "no hookimpl": (_bare("bad"), "attn_backends: needs @hookimpl, .*got nothing"),
    "a class": (
        gives("bad", FakeBackend),
        r"FakeBackend: needs an instance, got the class: write it with \(\)",
    ),
    "no Path": (
        gives("bad", with_(FakeBackend("texts"), paths=("p",))),
        r"texts: paths: needs a tuple of Path, got \('p',\)",
    ),
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
