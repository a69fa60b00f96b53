"""``attn explain --assume``: backends made anew, as if another version of their library were here."""

import sys
import types
from importlib.metadata import EntryPoint

import pytest

from attn_core import hookspecs, plugins
from attn_core.capability import Capability
from attn_core.problem import Op
from attn_core.reasons import Reason

from .cli_kit import answer, refused
from .fakes import ABSENT, FakeBackend

DECODES = Capability(archs=None, ops=frozenset({Op.DECODE}))


@pytest.fixture
def plugin(monkeypatch):
    """Install a plugin whose backend ``lib`` serves from version 2 of its library on; it is not here."""

    def offer(look):
        module = types.ModuleType("plugin_of_lib")

        def attn_backends(api_version, config):
            version = look(config.get("lib", {}))
            if version == "bad":
                raise ValueError("assume_version: needs digits, got bad")
            able = version not in ("none", "1")
            missing = None if able else Reason(ABSENT, "lib", "lib 2", version)
            return [FakeBackend("lib", paths=[("p", DECODES)], unavailable=missing)]

        module.attn_backends = hookspecs.hookimpl(attn_backends)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        point = EntryPoint("libplugin", module.__name__, plugins.GROUP)
        monkeypatch.setattr(plugins, "_installed", lambda: [point])

    offer(lambda options: options.get("assume_version", "none"))
    return offer


def lib(*args):
    return answer("--op", "decode", "--arch", "gfx942", *args)


def test_assumed_version_reaches_the_backend(plugin):
    assert lib("--assume", "lib=2")["chosen"] == "lib/p"
    assert lib("--assume", "lib=2")["query"]["assumed"] == {"lib": "2"}
    said = lib("--assume", "lib=1")
    assert said["chosen"] == "reference/torch"
    assert said["candidates"][0]["refusals"][0]["got"] == "1"
    assert lib("--assume", "lib=none")["candidates"][0]["refusals"][0]["got"] == "none"


def test_assumption_leaves_the_processes_backends_alone(plugin):
    before = plugins.registry()
    assert lib("--assume", "lib=2")["chosen"] == "lib/p"
    assert plugins.registry() is before


def test_assumption_keeps_the_other_options(plugin, monkeypatch, tmp_path):
    file = tmp_path / "attn.toml"
    file.write_text('[backend.lib]\nassume_version = "1"\nspeed = 3\n')
    monkeypatch.setenv("ATTN_CONFIG", str(file))
    seen = []
    plugin(lambda options: seen.append(dict(options)) or options["assume_version"])
    assert lib("--assume", "lib=2")["chosen"] == "lib/p"
    assert seen == [{"assume_version": "2", "speed": 3}]


def test_aiter_is_a_shorthand(plugin):
    assert refused("--op", "decode", "--aiter", "0.1.20") == (
        "--assume: needs one of lib, reference, got 'aiter' [cli.assume]"
    )


def test_unread_assumption_is_refused(plugin):
    plugin(lambda options: "2")
    told = "--assume: needs a backend that reads assume_version, got lib, which takes no assumed version"
    assert refused("--op", "decode", "--assume", "lib=2") == f"{told} [cli.assume]"


def test_malformed_assumption_is_told_with_the_backends_words(plugin):
    told = refused("--op", "decode", "--assume", "lib=bad")
    assert told == (
        "--assume: needs a backend 'lib' that loads (plugin libplugin), got "
        "ValueError: assume_version: needs digits, got bad [cli.assume]"
    )


def test_the_fault_of_the_plugin_of_that_name_is_told(plugin, monkeypatch):
    points = [
        *plugins._installed(),
        *(EntryPoint(name, f"no_{name}", plugins.GROUP) for name in ("a", "aiter")),
    ]
    monkeypatch.setattr(plugins, "_installed", lambda: points)
    assert refused("--op", "decode", "--aiter", "1").startswith(
        "--assume: needs a backend 'aiter' that loads (plugin aiter), got ModuleNotFoundError: "
    )
