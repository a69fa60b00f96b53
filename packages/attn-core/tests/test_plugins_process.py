"""Backends of the process: found once, left out, given options; and the tracer that a package brings."""

import importlib.metadata
import textwrap

import pluggy
import pytest
import torch

from attn_core import hookspecs, plugins, tracing

from .fakes import FakeBackend
from .kit import decode_wrapper, pages
from .plugin_kit import Entry, discover, gives, names


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
