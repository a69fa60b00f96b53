"""Puts this package where a program that cannot be edited imports ``flashinfer`` from.

Beside the modules of attention there are those that such a program imports at its top: device queries and
builds (:mod:`attn_core.compat_modules`), and operators that are not here and say so when they are called
(:mod:`attn_core.not_here`). Modules that programs look for to learn whether a feature is installed
(``flashinfer.fused_moe``, ``flashinfer.comm``, ...) are not to be found.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType

import attn_core

from . import compat_fork, plugins
from .checking import OTHER_NAMES
from .compat_modules import SHARED, UTILS, Lookup, autotune, jit, no, traceable
from .errors import needs
from .not_here import NAMES, refusing
from .route import check_requested

VERSION = "0.6.18"
"""The release whose names and meanings these are."""

MODULES = (
    "attention", "cascade", "decode", "mla", "page", "pod", "prefill", "quantization", "sampling", "sparse",
)  # fmt: skip
"""Modules of upstream that this package has."""
PARTS = {"attention._core": "attention", "mla._core": "mla", "quantization.packbits": "quantization"}
"""Modules of upstream that hold names of another one here."""
_HIDDEN = ("packbits", "xqa")
"""Modules that are hidden by a function of their name, as upstream."""
_BUILDS = (
    "jit", "jit.attention", "jit.attention.modules", "jit.attention.pytorch", "jit.attention.utils",
    "jit.attention.variants", "jit.cascade", "jit.core", "jit.cpp_ext", "jit.cubin_loader", "jit.env",
    "jit.mla", "jit.page", "jit.quantization", "jit.rope", "jit.sampling", "jit.utils", "jit.xqa",
)  # fmt: skip
BACKENDS = (
    "aiter", "auto", "cudnn", "cute-dsl", "cutlass", "fa2", "fa3", "fmha_v2", "hip", "native", "sparse",
    "trtllm-gen", "trtllm-native", "vsa_sm100_blk128", "vsa_sm100_blk64", "vsa_sm120_blk64", "xqa",
)  # fmt: skip
"""What upstream and its AMD fork take as ``backend=``."""


def install(name: str = "flashinfer", *, backends: Mapping[str, str] | None = None) -> ModuleType:
    """Make ``import flashinfer`` find this package, for the rest of the process.

    Call it before anything imports that name. A name of upstream's API that is not here can be imported and
    raises NotImplementedError when it is called (see :mod:`attn_core.not_here`).

    Args:
        name: The name to be found under.
        backends: What a program's ``backend=`` stands for here, ``{"fa3": "fa2", "trtllm-gen": "auto"}``:
            names of upstream to ``auto``, a backend or a candidate ``backend/path`` of this machine. It holds
            for the process, ``import attn_core`` included, and for what is made or called from then on; a
            name that is not in it means itself. Given again it replaces the one before, ``{}`` takes it back.

    Returns:
        The module. Calling again returns the same one.

    Raises:
        ImportError: Another package was imported under that name.
        TypeError: ``backends`` is not a mapping of strings to strings.
        ValueError: ``backends`` has a name that upstream does not have, or one that is not here.
    """
    named = None if backends is None else _named(backends)
    root = _installed(name)
    if named is not None:
        OTHER_NAMES.clear()
        OTHER_NAMES.update(named)
    return root


def _named(backends: object) -> dict[str, str]:
    if not isinstance(backends, Mapping):
        want = "a mapping of names to names"
        raise TypeError(needs("backends", want, type(backends).__name__, "core.compat"))
    here = plugins.registry().backends
    paths = [f"{b.name}/{p.name}" for b in here for p in b.paths]
    for theirs, ours in backends.items():
        if not (isinstance(theirs, str) and isinstance(ours, str)):
            raise TypeError(needs("backends", "strings", f"{theirs!r}: {ours!r}", "core.compat"))
        if theirs not in BACKENDS:
            names = ", ".join(BACKENDS)
            raise ValueError(needs("backends", f"names of upstream ({names})", repr(theirs), "core.compat"))
        check_requested(ours, here, paths)
    return dict(backends)


def _installed(name: str) -> ModuleType:
    there = sys.modules.get(name)
    if isinstance(there, _Alias):
        return there
    if there is not None:
        raise ImportError(needs(name, "not to be imported yet", repr(there), "core.compat"))
    root = _Alias(name, _root)
    root.__dict__.update(
        __version__=VERSION, __git_version__="unknown", __git_commit__="unknown", __path__=[]
    )
    made = {name: root}
    for path, find in _lookups():
        made[f"{name}.{path}"] = _Alias(f"{name}.{path}", find)
    for path, alias in made.items():
        parent, _, last = path.rpartition(".")
        if parent:
            made[parent].__dict__["__path__"] = []
            if last not in _HIDDEN:
                made[parent].__dict__[last] = alias
    # Programs ask whether the package of prebuilt kernels is installed: there is nothing to build here.
    made[f"{name}_jit_cache"] = _Alias(f"{name}_jit_cache", _refused_of(""))
    sys.modules.update(made)
    sys.meta_path.append(_Absent(name))
    return root


class _Absent:
    """Tells who imports a module of upstream that is not here so; who only looks for it finds none."""

    def __init__(self, name: str) -> None:
        self._inside = f"{name}."

    def find_spec(self, wanted: str, path: object = None, target: object = None) -> None:
        """Raise ModuleNotFoundError for an import; return None otherwise.

        ``importlib.util.find_spec()`` must find nothing where nothing is: engines ask it what is installed.
        The import system asks a finder the same, so who asks is told by the function that called.
        """
        if wanted.startswith(self._inside) and sys._getframe(2).f_code.co_name == "_find_and_load_unlocked":
            instead = f"a module of attention: {', '.join(MODULES)} (of upstream no more is here)"
            raise ModuleNotFoundError(needs(wanted, instead, "an import", "core.not-here"), name=wanted)


class _Alias(ModuleType):
    """A module whose attributes are looked up when they are asked for, and kept."""

    def __init__(self, name: str, find: Lookup) -> None:
        super().__init__(name, f"attn-core under the name of {name}.")
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__dict__["_find"] = find

    def __getattr__(self, wanted: str) -> object:
        if wanted.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {wanted!r}")
        try:
            found: object = self.__dict__["_find"](wanted)
        except (AttributeError, KeyError):
            message = f"module {self.__name__!r} (attn_core) has no attribute {wanted!r}"
            raise AttributeError(message) from None
        setattr(self, wanted, found)
        return found


def _lookups() -> Iterator[tuple[str, Lookup]]:
    """Say what is looked up where, a parent before its parts."""
    yield from ((module, _attribute_of(module)) for module in MODULES)
    yield from ((path, _attribute_of(module)) for path, module in PARTS.items())
    yield from ((path, jit) for path in _BUILDS)
    for path, part in compat_fork.PARTS.items():
        yield path, compat_fork.lookup(_attribute_of(part) if part else None)
    yield "utils", UTILS.__getitem__
    yield from (
        (path, {"is_cuda_tile_available": no}.__getitem__) for path in ("cutile", "cutile.cutile_common")
    )
    yield "triton", dict[str, object]().__getitem__
    yield "triton.cascade", _merges
    rest = set(NAMES) - {"", "triton.cascade", *MODULES}
    yield from ((path, _refused_of(path)) for path in sorted(rest))


def _root(wanted: str) -> object:
    own = {
        "autotune": autotune,
        "use_torch_custom_ops_enabled": traceable,
        "next_positive_power_of_2": UTILS["next_positive_power_of_2"],
    }
    if wanted == "convert_bsr_mask_layout":  # at the top in the AMD fork alone
        return _attribute_of("sparse")(wanted)
    return own[wanted] if wanted in own else getattr(attn_core, wanted)


def _attribute_of(module: str) -> Lookup:
    def find(wanted: str) -> object:
        found = getattr(import_module(f"attn_core.{module}"), wanted, None)
        if found is not None:
            return found
        if wanted in NAMES.get(module, ()):
            return refusing(module, wanted)
        if wanted.startswith("gen_"):
            return jit(wanted)
        if module == "cascade" and wanted in compat_fork.CASCADE:
            return compat_fork.CASCADE[wanted]
        return UTILS[wanted] if wanted in SHARED else getattr(attn_core, wanted)

    return find


def _merges(wanted: str) -> object:
    found = getattr(import_module("attn_core.cascade"), wanted, None)
    return refusing("triton.cascade", wanted) if found is None else found


def _refused_of(module: str) -> Lookup:
    return lambda wanted: jit(wanted) if wanted.startswith("gen_") else refusing(module, wanted)
