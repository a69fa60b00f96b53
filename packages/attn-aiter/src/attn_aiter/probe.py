"""Look at an amd-aiter installation without importing it.

``import aiter`` compiles code, prints, changes ``sys.path`` and can end the process, so whether it would work
is read from the outside: the module's place, the distribution's version, and the syntax trees of the few
files that hold the functions this package calls. What is found decides by signature, not by version alone.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from attn_core.reasons import Code

from . import codes
from .versions import Version, parse_version, version

FLOOR = "0.1.20"
"""Oldest release served unless ``min_version`` says otherwise: the one every reported figure is about."""

NONE = "none"
_DISTRIBUTION = "amd-aiter"
_MODULE = "aiter"
_PA_TEMPLATE = "csrc/cpp_itfs/pa/pa_v1.cpp.jinja"

# key -> places to look, newest first: (file below site-packages, module, function)
_PLACES: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "batch_prefill": (("aiter/ops/mha.py", "aiter.ops.mha", "mha_batch_prefill_func"),),
    "varlen": (("aiter/ops/mha.py", "aiter.ops.mha", "flash_attn_varlen_func"),),
    "paged_attention_v1": (("aiter/ops/attention.py", "aiter.ops.attention", "paged_attention_v1"),),
    "append": (("aiter/ops/cache.py", "aiter.ops.cache", "reshape_and_cache_flash"),),
    "mla_decode": (("aiter/mla.py", "aiter.mla", "mla_decode_fwd"),),
    "unified": tuple(
        (f"{at}/unified_attention.py", f"{at.replace('/', '.')}.unified_attention", "unified_attention")
        for at in ("aiter/ops/triton/attention", "aiter/ops/triton")
    ),
    "pa_v1_compile": (("csrc/cpp_itfs/pa/pa_v1.py", "csrc.cpp_itfs.pa.pa_v1", "compile"),),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Function:
    """One AITER function as its source declares it.

    Attributes:
        module: Where to import it from.
        name: Its name there.
        parameters: Names in order, each with the text of its default or None.
    """

    module: str
    name: str
    parameters: tuple[tuple[str, str | None], ...]

    def __contains__(self, parameter: object) -> bool:
        return any(name == parameter for name, _ in self.parameters)

    def default(self, parameter: str) -> str | None:
        """Return the text of a parameter's default, None if it has none or does not exist."""
        return next((default for name, default in self.parameters if name == parameter), None)


@dataclass(frozen=True, slots=True, eq=False)
class AiterApi:
    """What an installation offers.

    Attributes:
        release: Its version.
        text: The version as the metadata spells it.
        functions: The functions found, by this package's key.
        pa_v1_arguments: ``type name`` of each C argument of the decode kernel's entry, in order.
        assumed: Recorded for another machine rather than read from this one.
    """

    release: Version
    text: str
    functions: Mapping[str, Function]
    pa_v1_arguments: tuple[str, ...]
    assumed: bool = False


@dataclass(frozen=True, slots=True)
class Install:
    """Where amd-aiter is and which version, or the cause it cannot be used for.

    Attributes:
        text: Version as spelled, or None.
        release: Version, or None.
        root: Directory that holds the module, or None.
        cause: Code, limit and observation when unusable.
        assumed: Stated by the configuration instead of found.
    """

    text: str | None = None
    release: Version | None = None
    root: Path | None = None
    cause: tuple[Code, object, object] | None = None
    assumed: bool = False


def look(assume: str | None = None, floor: str = FLOOR) -> Install:
    """Find amd-aiter; imports nothing and costs about a millisecond.

    Args:
        assume: A version to pretend, ``none`` for no installation, or None to look.
        floor: Oldest version to accept.

    Raises:
        ValueError: ``assume`` or ``floor`` names no version.
    """
    least = version(floor)
    if assume is not None:
        if assume == NONE:
            return Install(cause=(codes.NOT_INSTALLED, floor, "none"), assumed=True)
        release = version(assume)
        cause = (codes.TOO_OLD, floor, assume) if release < least else None
        return Install(assume, release, None, cause, assumed=True)
    root = _module_root()
    if root is None:
        return Install(cause=(codes.NOT_INSTALLED, floor, "none"))
    text = _version_text()
    if text is None:
        foreign = _owner(root)
        if foreign is not None:
            return Install(root=root, cause=(codes.FOREIGN, _DISTRIBUTION, foreign))
        return Install(root=root, cause=(codes.VERSION_UNKNOWN, floor, "no metadata"))
    found = parse_version(text)
    if found is None:
        return Install(text, None, root, (codes.VERSION_UNKNOWN, floor, repr(text)))
    return Install(text, found, root, (codes.TOO_OLD, floor, text) if found < least else None)


def read(install: Install) -> AiterApi:
    """Read the signatures of an installation; parses five files, up to half a second.

    Args:
        install: A result of :func:`look` that has a version.

    Raises:
        ValueError: The version is assumed and nothing is recorded for it or before it.
    """
    if install.release is None or install.text is None:
        raise ValueError("install: needs a version, got none [aiter.version]")
    if install.root is None:
        known = recorded(install.release)
        return AiterApi(install.release, install.text, known.functions, known.pa_v1_arguments, assumed=True)
    root = install.root
    meta = root / "aiter_meta" if (root / "aiter_meta").is_dir() else root
    functions = {}
    for key, places in _PLACES.items():
        for file, module, name in places:
            found = _declared((meta if file.startswith("csrc/") else root) / file, module, name)
            if found is not None:
                functions[key] = found
                break
    return AiterApi(install.release, install.text, functions, _c_arguments(meta / _PA_TEMPLATE))


@cache
def _recordings() -> tuple[AiterApi, ...]:
    folder = files(__package__) / "data" / "api"
    found = [_recording(item.read_text(encoding="utf-8")) for item in folder.iterdir()]
    return tuple(sorted(found, key=lambda api: api.release))


def recorded(release: Version) -> AiterApi:
    """Return the newest recorded signatures that are not newer than ``release``.

    Raises:
        ValueError: Every recording is newer.
    """
    older = [api for api in _recordings() if api.release <= release]
    if not older:
        first = _recordings()[0].text
        raise ValueError(f"assume_version: needs {first} or newer, got {release} [aiter.version]")
    return older[-1]


def recordings() -> tuple[AiterApi, ...]:
    """Return every recorded release, oldest first."""
    return _recordings()


def _recording(text: str) -> AiterApi:
    data = tomllib.loads(text)
    functions = {
        row["key"]: Function(row["module"], row["name"], tuple(map(_parameter, row["parameters"])))
        for row in data["function"]
    }
    stated = data["version"]
    return AiterApi(version(stated), stated, functions, tuple(data["pa_v1_arguments"]), assumed=True)


def _parameter(text: str) -> tuple[str, str | None]:
    name, given, default = text.partition("=")
    return name, default if given else None


def _module_root() -> Path | None:
    """Directory above the module ``aiter``, without importing it."""
    try:
        spec = find_spec(_MODULE)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).resolve().parent.parent


def _version_text() -> str | None:
    try:
        return metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return None


def _owner(root: Path) -> str | None:
    """Name the distribution that is called like the module, if it brought the module."""
    try:
        other = metadata.distribution(_MODULE)
    except metadata.PackageNotFoundError:
        return None
    return f"{_MODULE} {other.version}" if Path(str(other.locate_file(""))).resolve() == root else None


def _declared(file: Path, module: str, name: str) -> Function | None:
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return Function(module, name, _parameters(node.args))
    return None


def _parameters(args: ast.arguments) -> tuple[tuple[str, str | None], ...]:
    positional = [*args.posonlyargs, *args.args]
    bare = len(positional) - len(args.defaults)
    defaults = [None] * bare + [ast.unparse(default) for default in args.defaults]
    pairs = list(zip([arg.arg for arg in positional], defaults, strict=True))
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        pairs.append((arg.arg, None if default is None else ast.unparse(default)))
    return tuple(pairs)


def _c_arguments(template: Path) -> tuple[str, ...]:
    """Argument list of the first ``{{func_name}}(...)`` in the template, empty if there is none."""
    try:
        text = template.read_text(encoding="utf-8")
    except OSError:
        return ()
    found = re.search(r"\{\{\s*func_name\s*\}\}\s*\(([^)]*)\)", text)
    return () if found is None else tuple(" ".join(part.split()) for part in found.group(1).split(","))
