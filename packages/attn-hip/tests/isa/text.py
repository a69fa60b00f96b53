"""Reads what a compiler's ``-S`` writes: instructions, labels and the kernel's descriptor."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .faults import Unknown

_SPLIT = re.compile(r",(?![^\[]*\])")
_TARGET = re.compile(r'\.amdgcn_target\s+"[^"]*--(gfx\w+)')
_DESCRIPTOR = "\t.amdhsa_kernel "


@dataclass(frozen=True)
class Instruction:
    """One line of assembly.

    Attributes:
        name: Mnemonic without its encoding suffix (``_e32``, ``_e64``).
        operands: Operands as written.
        options: Modifiers behind the operands; a bare one has the value ``"1"``.
        text: The line.
    """

    name: str
    operands: tuple[str, ...]
    options: dict[str, str]
    text: str

    def number(self, option: str, default: int = 0) -> int:
        return int(self.options.get(option, default), 0) if option in self.options else default

    def bits(self, option: str, default: int, count: int) -> tuple[int, ...]:
        """Return an option such as ``op_sel:[0,1]`` as numbers."""
        found = [int(x) for x in re.findall(r"\d", self.options.get(option, ""))]
        return tuple(found[:count]) + (default,) * (count - len(found))

    def only(self, *allowed: str) -> None:
        """Refuse options other than these."""
        for name in self.options:
            if name not in allowed:
                raise Unknown(f"option {name} of {self.text}")


@dataclass
class Listing:
    """A kernel as text.

    Attributes:
        arch: Processor.
        instructions: In order.
        labels: Index of the instruction behind each label.
        descriptor: ``.amdhsa_`` values by name.
    """

    arch: str
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    descriptor: dict[str, str] = field(default_factory=dict)


def parse(text: str, kernel: str) -> Listing:
    """Read one kernel of an assembly file.

    Raises:
        Unknown: There is no such kernel.
    """
    target = _TARGET.search(text)
    if target is None or f"\n{kernel}:" not in text or f"{_DESCRIPTOR}{kernel}\n" not in text:
        raise Unknown(f"no kernel {kernel} in this text")
    listing = Listing(target[1])
    body = text.split(f"\n{kernel}:", 1)[1]
    for line in body.splitlines():
        stripped = line.split(";")[0].split("//")[0].strip()
        if not stripped:
            continue
        if stripped.endswith(":"):
            if stripped.startswith(".Lfunc_end"):
                break
            listing.labels[stripped[:-1]] = len(listing.instructions)
        elif stripped.startswith(".section"):
            break
        elif not stripped.startswith("."):
            listing.instructions.append(instruction(stripped))
    described = text.split(f"{_DESCRIPTOR}{kernel}\n", 1)[1].split(".end_amdhsa_kernel")[0]
    for line in described.splitlines():
        words = line.split(";")[0].split(None, 1)
        if len(words) == 2 and words[0].startswith(".amdhsa_"):
            listing.descriptor[words[0].removeprefix(".amdhsa_")] = words[1].strip()
    return listing


def instruction(line: str) -> Instruction:
    """Read one line."""
    name, _, rest = line.replace("\t", " ").partition(" ")
    name = re.sub(r"_e(32|64)(?=$|_)", "", name)
    if name == "s_waitcnt":
        return Instruction(name, (), dict(re.findall(r"(\w+)\((\d+)\)", rest)), line)
    operands = [part.strip() for part in _SPLIT.split(rest)] if rest.strip() else []
    options: dict[str, str] = {}
    if operands:
        words = _words(operands[-1])
        operands[-1] = words[0]
        for word in words[1:]:
            key, _, value = word.partition(":")
            options[key] = value or "1"
    return Instruction(name, tuple(operands), options, line)


def _words(text: str) -> list[str]:
    """Split at spaces outside brackets."""
    return re.findall(r"(?:\[[^\]]*\]|[^\s\[])+", text)
