"""The parameter blocks of ``params.h`` as ctypes, read from the header itself."""

from __future__ import annotations

import ctypes
import re
from functools import lru_cache

from .device import CSRC

_TYPES = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64, "float": ctypes.c_float}
_STRUCT = re.compile(r"struct (\w+) \{(.*?)\n\};", re.DOTALL)


@lru_cache(maxsize=1)
def structs() -> dict[str, type[ctypes.Structure]]:
    """Return the structs by name."""
    text = re.sub(r"//.*", "", (CSRC / "params.h").read_text())
    made: dict[str, type[ctypes.Structure]] = {}
    for name, body in _STRUCT.findall(text):
        fields = [field for declaration in body.split(";") for field in _fields(declaration.strip(), made)]
        made[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return made


def _fields(declaration: str, known: dict[str, type[ctypes.Structure]]) -> list[tuple[str, type]]:
    found = re.match(r"(?:const )?(\w+)(\s*\*)?\s+(.*)", declaration, re.DOTALL)
    if found is None:
        found = re.match(r"(?:const )?(\w+)(\*)\s*(.*)", declaration, re.DOTALL)
    if found is None:
        return []
    kind = ctypes.c_void_p if found[2] else _TYPES.get(found[1]) or known[found[1]]
    fields = []
    for name in found[3].split(","):
        array = re.match(r"\s*(\w+)\[(\d+)\]", name)
        fields.append((array[1], kind * int(array[2])) if array else (name.strip(), kind))
    return fields
