"""AITER's own Python layer over recorders in the place of its compiled modules.

Imported in a process of its own: it changes ``sys.path``, the environment and torch's operators. A compiled
module is made up when AITER asks for it, and its functions answer with what the kernels are documented to
compute; which module was asked for, and with what, is kept.
"""

from __future__ import annotations

import ast
import enum
import importlib.abc
import importlib.machinery
import os
import sys
import tempfile
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROCM = {"hipconfig": "echo 7.1.25424", "hipcc": "exit 0", "rocminfo": 'echo "  Name: {arch}"'}
_COMPILED = "aiter.jit."
_AT_IMPORT = "module_aiter_enum"
"""Wanted while importing; holds two enumerations."""


@dataclass
class Call:
    """One call of a compiled function.

    Attributes:
        module: The compiled module, whose name spells the kernel variant.
        op: The function in it.
        given: Arguments by the names AITER's own declaration gives them.
    """

    module: str
    op: str
    given: dict[str, Any]


@dataclass
class Recorder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Serves ``aiter.jit.*`` modules that a machine with hipcc would have compiled.

    Attributes:
        parameters: Parameter names of every compiled function, by its name.
        answers: What a function returns, by its name; one that is not listed returns None.
        calls: All calls so far.
        asked: Modules imported so far: each is minutes of compilation on a real machine.
    """

    parameters: dict[str, list[str]]
    answers: dict[str, Callable[..., Any]] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Claim the compiled modules; ``core`` and ``utils`` are AITER's own files."""
        name = fullname.removeprefix(_COMPILED)
        if name == fullname or name.split(".")[0] in ("core", "utils", "aiter_"):
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: Any) -> types.ModuleType:
        """Make an empty module that says it has a file."""
        module = types.ModuleType(spec.name)
        module.__file__ = "<recorder>"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Give it every function one can ask for."""
        name = module.__name__.removeprefix(_COMPILED)
        if name == _AT_IMPORT:
            vars(module).update(ActivationType=_enumeration("ActivationType", ("No", "Silu", "Gelu")),
                                QuantType=_enumeration("QuantType", ("No", "per_Tensor", "per_Token",
                                "per_1x32", "per_1x128", "per_128x128")))  # fmt: skip
            return
        self.asked.append(name)

        def attribute(op: str) -> Callable[..., Any]:
            if op.startswith("__"):
                raise AttributeError(op)
            return self._function(name, op)

        module.__getattr__ = attribute  # type: ignore[method-assign]

    def _function(self, module: str, op: str) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            given = {**dict(zip(self.parameters[op], args, strict=False)), **kwargs}
            self.calls.append(Call(module, op, given))
            answer = self.answers.get(op)
            return None if answer is None else answer(**given)

        function.__doc__ = "Members:"  # AITER parses the signature pybind11 writes here, unless it says this
        return function


def _enumeration(name: str, members: tuple[str, ...]) -> type:
    made = enum.IntEnum(name, {member: at for at, member in enumerate(members)})
    made.__doc__ = "Members:"
    return made


def install(tree: Path, arch: str = "gfx942") -> Recorder:
    """Import AITER from ``tree`` and return the recorder its compiled modules come from."""
    place = Path(tempfile.mkdtemp(prefix="no-rocm-"))
    (place / "bin").mkdir()
    for name, text in ROCM.items():
        tool = place / "bin" / name
        tool.write_text(f"#!/bin/sh\n{text.format(arch=arch)}\n")
        tool.chmod(0o755)
    os.environ.update(
        ROCM_HOME=str(place), PATH=f"{place / 'bin'}:{os.environ.get('PATH', '')}", CU_NUM="304",
        HOME=str(place), GPU_ARCHS=arch, AITER_ROOT_DIR=str(place / "cache"),
    )  # fmt: skip
    if str(tree) not in sys.path:
        sys.path.insert(0, str(tree))
    recorder = Recorder(_declared(tree / "aiter" / "ops"))
    sys.meta_path.insert(0, recorder)
    importlib.import_module("aiter")
    recorder.asked.clear()
    return recorder


def _declared(folder: Path) -> dict[str, list[str]]:
    """Parameter names of every function decorated with ``compile_ops``, under its compiled name."""
    found = {}
    for file in folder.glob("*.py"):
        for node in ast.parse(file.read_bytes()).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "compile_ops":
                    renamed = [k.value for k in decorator.keywords if k.arg == "fc_name"]
                    name = node.name
                    if renamed and isinstance(renamed[0], ast.Constant):
                        name = str(renamed[0].value)
                    found[name] = [arg.arg for arg in node.args.args]
    return found
