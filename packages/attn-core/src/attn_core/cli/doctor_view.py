"""The facts of ``attn doctor`` as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from .output import grid, heading, styled

_LEFT = 18
_LEFT_MOST = 30  # a longer name wraps
Facts = Mapping[str, Any]


def render(facts: Facts) -> RenderableType:
    """Return the text; ``facts`` as made by ``doctor.facts``."""
    sections = (
        ("Versions", _pairs((name, value or "not installed") for name, value in facts["versions"].items())),
        ("Devices", _devices(facts)),
        ("Build tools", _tools(facts["tools"])),
        ("Backends, in the order of 'auto'", _backends(facts)),
        ("torch.compile", _pairs(facts["compile"].items())),
        ("Settings", _settings(facts)),
        ("Commands of other packages", _commands(facts["commands"])),
    )
    parts: list[RenderableType] = []
    for title, body in sections:
        parts += [heading(title), Padding(body, (0, 0, 1, 2))]
    return Group(*parts, _verdict(facts))


def _pairs(rows: Iterable[tuple[str, object]]) -> RenderableType:
    rows = list(rows)
    table = grid(min(max((len(name) for name, _ in rows), default=0), _LEFT_MOST) + 2, None)
    for name, value in rows:
        table.add_row(styled(name, "dim"), value if isinstance(value, Text) else Text(str(value)))
    return table


def _devices(facts: Facts) -> RenderableType:
    rows: list[tuple[str, object]] = []
    for device in facts["devices"]:
        label = device["arch"] if device["kind"] == "cpu" else f"{device['kind']}:{device['index']}"
        units = f"{device['num_cus']} {'threads' if device['kind'] == 'cpu' else 'compute units'}"
        arch = "" if device["kind"] == "cpu" else f"{device['arch']}, "
        rows.append((label, f"{arch}{units}, {device['name']}"))
    if facts["device_error"]:
        rows.append(("fault", styled(facts["device_error"], "red")))
    if facts["known_archs"]:
        rows.append(("also known", f"{', '.join(facts['known_archs'])} (attn explain --arch)"))
    return _pairs(rows)


def _tools(tools: Iterable[Facts]) -> RenderableType:
    rows: list[tuple[str, object]] = []
    for tool in tools:
        if tool["error"]:
            rows.append((tool["name"], styled(f"{tool['path']}: {tool['error']}", "yellow")))
        elif tool["version"] is None and tool["path"] is None:
            rows.append((tool["name"], styled("not found", "dim")))
        else:
            rows.append((tool["name"], tool["version"] or f"{tool['path']}, version not stated"))
    return _pairs(rows)


def _backends(facts: Facts) -> RenderableType:
    parts: list[RenderableType] = []
    for backend in facts["backends"]:
        source = f", from {backend['source']}" if backend["source"] else ""
        parts.append(Text.assemble((backend["name"], "bold"), f"  rank {backend['rank']}{source}"))
        for names, where in _alike(backend["paths"]):
            parts.append(Padding(_path(names, where), (0, 0, 0, 2)))
        table = grid(_LEFT, None)
        for name, value in backend["notes"].items():
            table.add_row(styled(name, "dim"), Text(str(value)))
        if backend["error"]:
            table.add_row(styled("fault", "red"), styled(backend["error"], "red"))
        parts.append(Padding(table, (0, 0, 0, 2)))
    for broken in facts["broken"]:
        parts.append(
            Text.assemble((broken["name"], "bold"), ("  plugin is broken: ", "red"), broken["error"])
        )
    return Group(*parts)


def _path(names: list[str], where: Text) -> RenderableType:
    """A path beside what it says of the devices, or several above what they all say."""
    if len(names) > 1:
        return Group(Text(", ".join(names)), Padding(where, (0, 0, 0, _LEFT + 2)))
    row = grid(_LEFT, None)
    row.add_row(Text(names[0]), where)
    return row


def _alike(paths: Iterable[Facts]) -> Iterable[tuple[list[str], Text]]:
    """Paths of one backend in order, neighbours of equal availability together."""
    found: list[tuple[list[str], Text]] = []
    for path in paths:
        name, where = path["candidate"].partition("/")[2], _availability(path["targets"])
        if found and found[-1][1].plain == where.plain:
            found[-1][0].append(name)
        else:
            found.append(([name], where))
    return found


def _availability(targets: Iterable[Facts]) -> Text:
    """One line per device of this machine; equal devices share one."""
    lines: dict[tuple[str, str | None], Text] = {}
    for row in targets:
        key = (row["arch"], row["missing"])
        if row["missing"] is None:
            lines[key] = Text.assemble(f"on {row['arch']}: ", ("available", "green"))
        else:
            text = f"on {row['arch']}: {row['missing']} "
            lines[key] = Text.assemble(text, (f"[{row['code']}]", "dim"))
    return Text("\n").join(lines.values())


def _settings(facts: Facts) -> RenderableType:
    config, overlay = facts["config"], facts["thresholds"]
    rows: list[tuple[str, object]] = [
        ("cache", _cache(facts["cache"])),
        ("config file", _stated(config, "none (ATTN_CONFIG is not set)")),
        ("thresholds", _stated(overlay, "none of your own (ATTN_THRESHOLDS is not set)")),
    ]
    if overlay["path"] and not overlay["error"]:
        rows[-1] = ("thresholds", f"{overlay['path']} ({overlay['rows']} rows)")
    rows.append(("tuned", _tuned(facts["tuned"])))
    rows += [(name, value) for name, value in facts["environment"].items()]
    return _pairs(rows)


def _cache(cache: Facts) -> str:
    if cache["path"] is None:
        return "none: this user has no home directory; set ATTN_CACHE_DIR"
    state = "exists" if cache["exists"] else "will be created"
    writable = "writable" if cache["writable"] else "NOT writable"
    return f"{cache['path']} ({state}, {writable})"


def _commands(commands: Iterable[Facts]) -> RenderableType:
    rows = [(f"attn {command['name']}", f"from {command['source']}") for command in commands]
    return _pairs(rows or [("none", "")])


def _tuned(fact: Facts) -> Text:
    """The file of attn tune, and a line for everything measured."""
    if fact["error"]:
        return styled(fact["error"], "red")
    if not fact["exists"]:
        return Text(
            "off (ATTN_TUNED is empty, or there is no home directory)"
            if fact["path"] is None
            else f"{fact['path']} (none yet)"
        )
    lines = [Text(fact["path"])]
    for row in fact["rows"]:
        lines.append(Text(f"{row['code']} on {row['arch']}: {row['limit']}, measured"))
    for pair in fact["pairs"]:
        facts = f"{pair['op']} on {pair['arch']}, heads {pair['heads']}, {pair['dtype']}"
        line = Text(f"{' against '.join(pair['candidates'])}: {facts}, measured {pair['date']}")
        if pair["outdated"]:
            line.append(f"; with {', '.join(pair['outdated'])}, so tune again", "yellow")
        lines.append(line)
    return Text("\n").join(lines)


def _stated(fact: Facts, otherwise: str) -> Text:
    if fact["error"]:
        return styled(fact["error"], "red")
    return Text(fact["path"] or otherwise)


def _verdict(facts: Facts) -> Text:
    usable = [backend["name"] for backend in facts["backends"] if backend["usable"]]
    if usable:
        return styled(f"This machine can run attention with: {', '.join(usable)}.", "bold")
    return styled("No backend can run on this machine.", "bold red")
