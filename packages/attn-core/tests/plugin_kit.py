"""Packages that exist in a test only."""

from types import ModuleType

from attn_core import plugins
from attn_core.hookspecs import hookimpl


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
