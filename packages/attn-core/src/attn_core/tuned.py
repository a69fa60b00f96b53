"""The file that ``attn tune`` writes: threshold rows and pairs measured on this machine.

It is TOML: ``format = 1``, ``[[row]]`` tables as in a backend's thresholds, and one ``[[pair]]`` per two
candidates and layer, with ``[[pair.bucket]]`` tables of steps and figures. It is a help, not a setting: one
that cannot be used is told of once and left out, and attention works as if it were not there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from . import notices
from .errors import needs
from .measured import NOTHING, Bucket, Cell, Measured, Pair, Scope
from .thresholds import PROVENANCE, Limit, Row, Thresholds

VARIABLE = "ATTN_TUNED"
FORMAT = 1
_FACTS = (*PROVENANCE, "device", "date")
_override: list[Path | None] = []


@dataclass(frozen=True, slots=True)
class Tuned:
    """Content of one file.

    Attributes:
        rows: Thresholds of routing rules.
        pairs: Candidates measured side by side.
        path: The file; None when there is none to be read.
        fault: Why it was left out, naming file and line; None when it is in force.
    """

    rows: Thresholds
    pairs: Measured
    path: Path | None = None
    fault: str | None = None


EMPTY = Tuned(Thresholds(()), NOTHING)


def location() -> Path | None:
    """Return where the file is: ``ATTN_TUNED``, else ``attn/tuned.toml`` in the user's config directory.

    None when the variable is set to nothing, which turns it off, or when there is no home directory.
    """
    if _override:
        return _override[-1]
    stated = os.environ.get(VARIABLE)
    if stated is not None:
        return Path(stated) if stated else None
    home = os.environ.get("XDG_CONFIG_HOME")
    try:
        return (Path(home) if home else Path.home() / ".config") / "attn" / "tuned.toml"
    except RuntimeError:
        return None


@contextmanager
def using(path: Path | None) -> Iterator[None]:
    """Read another file, or with None no file, while the body runs and discovers backends."""
    _override.append(path)
    try:
        yield
    finally:
        _override.pop()


def load() -> Tuned:
    """Return what this machine's file says; a file that cannot be used is told of once and says nothing."""
    path = location()
    if path is None:
        return EMPTY
    try:
        return read(path)
    except FileNotFoundError:
        if VARIABLE not in os.environ and not _override:
            return EMPTY
        fault = needs(VARIABLE, "a file, or nothing to go without", f"{path}: not found", "core.tuned")
    except OSError as err:
        fault = needs(str(path), "a readable file", err.strerror or err, "core.tuned")
    except ValueError as err:
        fault = str(err)
    notices.warn_once(("tuned", fault), f"left out, routing goes on without it: {fault}")
    return Tuned(EMPTY.rows, NOTHING, path, fault)


def read(path: Path) -> Tuned:
    """Return the content of a file.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not valid; the text names the file and the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as err:
        raise ValueError(needs(str(path), "UTF-8 text", err.reason, "core.tuned")) from err
    return parse(text, path)


def parse(text: str, path: Path) -> Tuned:
    """Return the content of a file's text.

    Raises:
        ValueError: It is not valid; the text names the file and the line.
    """
    import tomllib

    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as err:
        told = str(err).replace("at end of document", f"at line {len(text.splitlines())}")
        raise ValueError(needs(str(path), "valid TOML", told, "core.tuned")) from err
    if data.get("format") != FORMAT:
        at = _at(text, path, r"format\b")
        raise ValueError(needs(at, f"format = {FORMAT}", data.get("format", "none"), "core.tuned"))
    pairs = data.get("pair", [])
    if not isinstance(pairs, list):
        raise ValueError(needs(_at(text, path, r"pair\b"), "[[pair]] tables", "something else", "core.tuned"))
    found = []
    for number, pair in enumerate(pairs):
        where = _at(text, path, r"\[\[\s*pair\s*\]\]", number)
        try:
            found.append(_pair(pair, str(path)))
        except (KeyError, TypeError, ValueError) as err:
            got = f"no {err.args[0]!r}" if isinstance(err, KeyError) else err
            raise ValueError(needs(where, "a [[pair]] as attn tune writes it", got, "core.tuned")) from err
    return Tuned(_rows(text, path), Measured(found), path)


def _rows(text: str, path: Path) -> Thresholds:
    try:
        return Thresholds.load(text, str(path))
    except ValueError as err:
        named = re.search(r"row (\S+) (\S+)", str(err))
        code = rf'code\s*=\s*"{re.escape(named[1])}"' if named else r"\[\[\s*row"
        raise ValueError(f"{_at(text, path, code)}: {str(err).removeprefix(f'{path}: ')}") from err


def _at(text: str, path: Path, pattern: str, number: int = 0) -> str:
    """``FILE, line N`` of the n-th line that starts with a pattern."""
    lines = [at for at, line in enumerate(text.splitlines(), 1) if re.match(rf"\s*{pattern}", line)]
    return f"{path}, line {lines[number] if number < len(lines) else 1}"


def _pair(given: Mapping[str, Any], origin: str) -> Pair:
    candidates = _strings("candidates", given["candidates"])
    if len(candidates) != 2 or candidates[0] == candidates[1]:
        raise ValueError(f"candidates {candidates!r}, not two that differ")
    scope = {name: _typed(name, given[name], kind) for name, kind in _SCOPE.items()}
    facts = given["provenance"]
    provenance = tuple((name, str(facts[name])) for name in _FACTS)
    buckets = tuple(_bucket(bucket, candidates) for bucket in given["bucket"])
    if not buckets:
        raise ValueError("no bucket")
    return Pair(
        (candidates[0], candidates[1]),
        _typed("arch", given["arch"], str),
        _typed("num_cus", given["num_cus"], int),
        Scope(**scope),
        buckets,
        provenance,
        origin,
    )


_KINDS: dict[str, type] = {"str": str, "int": int, "float": float}
_SCOPE = {field.name: _KINDS[str(field.type)] for field in fields(Scope)}


def _bucket(given: Mapping[str, Any], candidates: list[str]) -> Bucket:
    steps = [(_typed("step", q_len, int), _typed("step", name, str)) for q_len, name in given["steps"]]
    unknown = [name for _, name in steps if name not in candidates]
    if unknown:
        raise ValueError(f"a step for {unknown[0]!r}, which is no candidate of the pair")
    cells = []
    rows: list[list[Any]] = given["cells"]
    for q_len, *us in rows:
        first, second = (1e-6 * _real("cell", value) for value in us)
        if not (first > 0 and second > 0):
            raise ValueError(f"times of {us} us, not two above 0")
        cells.append(Cell(_typed("cell", q_len, int), (first, second)))
    for name, lengths in (("steps", [q for q, _ in steps]), ("cells", [cell.q_len for cell in cells])):
        if not lengths or lengths[0] < 1 or lengths != sorted(set(lengths)):
            raise ValueError(f"{name} at q_len {lengths}, not ascending from 1 or more")
    sizes = {name: _typed(name, given[name], int) for name in ("batch_size", "kv_len")}
    if min(sizes.values()) < 1:
        raise ValueError(f"sizes {sizes}, not 1 or more")
    return Bucket(**sizes, steps=tuple(steps), cells=tuple(cells))


def _typed(name: str, value: Any, kind: type) -> Any:
    if kind is float:
        return _real(name, value)
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{name} = {value!r}, not {kind.__name__}")
    return value


def _real(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} = {value!r}, not a number")
    return float(value)


def _strings(name: str, value: Any) -> list[str]:
    if not isinstance(value, list):
        raise TypeError(f"{name} = {value!r}, not a list")
    return [_typed(name, item, str) for item in value]


_HEAD = """\
# Written by: attn tune. Measured on this machine; read by attn-core when backends are discovered.
# steps: [q_len, candidate], the faster one from that q_len on. cells: q_len, microseconds of both candidates.
# Delete the file, or set ATTN_TUNED= to nothing, to route as shipped.
"""


def text_of(rows: Iterable[Row], pairs: Iterable[Pair]) -> str:
    """Return a file's text; :func:`parse` gives the same content back."""
    parts = [_HEAD, f"format = {FORMAT}\n"]
    for row in rows:
        limit: object = row.verdict.value if isinstance(row.verdict, Limit) else "never"
        parts.append(_table("[[row]]", {"code": row.code, "arch": row.arch, "limit": limit}))
        parts.append(_table("[row.provenance]", {"kind": row.kind, **dict(row.provenance)}))
    for pair in pairs:
        head = {"candidates": list(pair.candidates), "arch": pair.arch, "num_cus": pair.num_cus}
        parts.append(_table("[[pair]]", {**head, **asdict(pair.scope)}))
        parts.append(_table("[pair.provenance]", dict(pair.provenance)))
        for b in pair.buckets:
            cells = [[c.q_len, *(round(s * 1e6, 3) for s in c.seconds)] for c in b.cells]
            sizes = {"batch_size": b.batch_size, "kv_len": b.kv_len}
            steps = [list(step) for step in b.steps]
            parts.append(_table("[[pair.bucket]]", {**sizes, "steps": steps, "cells": cells}))
    return "\n".join(parts)


def _table(name: str, values: Mapping[str, object]) -> str:
    return "\n".join([name, *(f"{key} = {_value(value)}" for key, value in values.items())]) + "\n"


def _value(value: object) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in escaped) + '"'
    if isinstance(value, list):
        return f"[{', '.join(_value(item) for item in value)}]"
    return repr(value)


def merged(old: Tuned, rows: Iterable[Row], pairs: Iterable[Pair]) -> tuple[list[Row], list[Pair]]:
    """Return the content of a file with new measurements in the place of old ones of the same thing."""
    return list(old.rows.overlaid(Thresholds(rows))), list(Measured([*old.pairs, *pairs]))


def save(path: Path, text: str) -> None:
    """Write a file as a whole or not at all; directories are made.

    Raises:
        OSError: It cannot be written; what was there before still is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8", newline="\n")
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise
