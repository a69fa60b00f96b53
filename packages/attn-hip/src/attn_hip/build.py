"""Builds the native module of one instruction set: planner, thread pool, kernels and binding.

What is built is decided by content: the key of a build is a hash of the bytes of every source and header,
the flags, the compiler and its version, and Python's ABI. Times of files do not matter.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from . import cache, isa

COMPILER_VARIABLE = "ATTN_CXX"
FLAGS_VARIABLE = "ATTN_CXXFLAGS"
MODULE = "native"
COMPILERS = ("g++", "c++", "clang++")
NOTHING = "none that can be run"
FLAGS = (
    "-std=c++17", "-O2", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off",
    "-fvisibility=hidden", "-fPIC", "-pthread", f"-DATTN_MODULE={MODULE}",
)  # fmt: skip
UNITS = ("kernels_cpu.cpp", "bind.cpp", "planner.cpp", "pool.cpp", "gpu_launch.cpp")
"""Translation units, the slowest first."""

_SOURCES = Path(__file__).parent / "csrc"
_INCLUDE = re.compile(rb'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
_VERSION_TIMEOUT_S = 20.0
_QUOTED = 300
"""Characters of the compiler's message that an error quotes."""
_FIRST_ERROR = re.compile(r"\b(?:fatal )?error\b|undefined reference|undefined symbol", re.IGNORECASE)
_STEP = re.compile(r"^\[(\d+)/(\d+)\] (.*)")

Progress = Callable[[int, int, str], None]
"""Called with steps done, steps in all and what is being done."""


class BuildError(Exception):
    """A build failed; the text quotes the compiler's first error and names the log."""


class NoCompiler(BuildError):
    """There is no compiler to build with.

    Attributes:
        got: What there is instead.
    """

    def __init__(self, wanted: str, got: str) -> None:
        super().__init__(f"needs {wanted}, got {got}")
        self.got = got


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler.

    Attributes:
        command: Program and leading arguments.
        version: What ``--version`` says.
    """

    command: tuple[str, ...]
    version: str


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the bytes of a build, apart from the compiler.

    Attributes:
        isa: Instruction set.
        sources: File name to bytes.
        flags: Compiler flags.
    """

    isa: str
    sources: Mapping[str, bytes]
    flags: tuple[str, ...]

    @property
    def content(self) -> str:
        """Hash of the recipe and of Python's ABI."""
        import pybind11

        about = (self.isa, self.flags, sysconfig.get_config_var("SOABI"), pybind11.__version__)
        return content_of(about, self.sources)

    def key(self, compiler: Compiler | None) -> str:
        """Name of the cache entry; without a compiler, the pattern of the builds of any."""
        return entry_of(self.isa, self.content, compiler)


class Asked(Protocol):
    """A compiler, of host or device code, and what it answered."""

    @property
    def command(self) -> tuple[str, ...]:
        """Program and leading arguments."""

    @property
    def version(self) -> str:
        """What ``--version`` says."""


def content_of(about: object, sources: Mapping[str, bytes]) -> str:
    """Return the hash of sources and of what else decides a build; ``about`` must have a stable ``repr``."""
    digest = hashlib.sha256(repr(about).encode())
    for name, data in sorted(sources.items()):
        digest.update(f"\n{name} {len(data)}\n".encode() + data)
    return digest.hexdigest()


def entry_of(what: str, content: str, compiler: Asked | None) -> str:
    """Return the name of a cache entry; without a compiler, the pattern of the builds of any."""
    front = f"{what}-{content[:24]}"
    if compiler is None:
        return f"{front}-*"
    made = repr((compiler.command, compiler.version)).encode()
    return f"{front}-{hashlib.sha256(made).hexdigest()[:12]}"


def recipe(name: str) -> Recipe:
    """Read the sources, and every header they include, as they are now. ``name`` is an instruction set."""
    extra = shlex.split(os.environ.get(FLAGS_VARIABLE, ""))
    return Recipe(name, gather(UNITS), (*FLAGS, *isa.FLAGS[name], *extra))


def gather(units: Iterable[str]) -> dict[str, bytes]:
    """Return the bytes of sources and of every header that they include, by file name."""
    sources: dict[str, bytes] = {}
    wanted = list(units)
    while wanted:
        file = wanted.pop()
        if file not in sources:
            sources[file] = (_SOURCES / file).read_bytes()
            wanted += (included.decode() for included in _INCLUDE.findall(sources[file]))
    return sources


def compiler_command() -> tuple[str, ...] | None:
    """Return the compiler that would be used, without running it.

    ``ATTN_CXX`` is binding: if it names nothing that can be run there is no compiler. Else the first of
    ``CXX``, g++, c++ and clang++ that is on the PATH.
    """
    stated = shlex.split(os.environ.get(COMPILER_VARIABLE, ""))
    if stated:
        return _resolved(stated)
    others = (shlex.split(os.environ.get("CXX", "")), *([name] for name in COMPILERS))
    return next((found for words in others if words and (found := _resolved(words))), None)


def _resolved(words: list[str]) -> tuple[str, ...] | None:
    path = shutil.which(words[0])
    return None if path is None else (os.path.realpath(path) if len(words) == 1 else path, *words[1:])


def compiler_wanted() -> str:
    """Say which compiler is looked for."""
    stated = os.environ.get(COMPILER_VARIABLE)
    return f"{COMPILER_VARIABLE}={stated}" if stated else f"a C++17 compiler ({', '.join(COMPILERS)})"


def find_compiler() -> Compiler:
    """Return the compiler with its version.

    Raises:
        NoCompiler: There is none, or it does not answer.
    """
    command = compiler_command()
    if command is None:
        raise NoCompiler(compiler_wanted(), NOTHING)
    return _asked(command, stamp(command[0]))


def stamp(path: str) -> tuple[int, int]:
    """Return what changes when a program is replaced."""
    facts = os.stat(path)
    return facts.st_mtime_ns, facts.st_size


@lru_cache(maxsize=8)
def _asked(command: tuple[str, ...], stamp: tuple[int, int]) -> Compiler:
    try:
        ran = subprocess.run(
            [*command, "--version"], stdin=subprocess.DEVNULL, capture_output=True, env=_environment(),
            timeout=_VERSION_TIMEOUT_S, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as err:
        said = " ".join(str(err).split())
        raise NoCompiler(compiler_wanted(), f"no version of {' '.join(command)}: {said}") from err
    return Compiler(command, ran.stdout.decode(errors="replace").strip())


def ensure(name: str, progress: Progress | None = None) -> Path:
    """Return the shared object of an instruction set, building it if the cache has none.

    Processes may do this at once: each builds on its own and either result is the same.

    Args:
        name: Instruction set.
        progress: Told of every step.

    Raises:
        NoCompiler: Nothing is built and there is no compiler.
        BuildError: The build failed.
        cache.CacheError: The cache directory cannot be used.
    """
    want = recipe(name)
    try:
        compiler = find_compiler()
    except NoCompiler:
        found = cache.find(want.key(None))
        if found is None:
            raise
        return found
    return cache.find(want.key(compiler)) or _build(want, compiler, progress)


def existing(name: str) -> Path | None:
    """Return a build of the present sources by whatever compiler, or None; runs no program.

    Raises:
        cache.CacheError: As for :func:`ensure`.
    """
    return cache.find(recipe(name).key(None))


def _build(want: Recipe, compiler: Compiler, progress: Progress | None) -> Path:
    key, start = want.key(compiler), time.monotonic()
    with cache.workspace() as work:
        _write_files(work, want, compiler)
        log = work / "build.log"
        status = _run_ninja(work, log, progress)
        if status:
            first = first_error(log)
            kept = cache.keep_log(key, log)
            raise BuildError(f"{first} (log: {kept})")
        facts = {
            "isa": want.isa,
            "flags": list(want.flags),
            "compiler": list(compiler.command),
            "compiler_version": compiler.version.splitlines()[:1],
            "attn_hip": version("attn-hip"),
            "seconds": round(time.monotonic() - start, 1),
        }
        return cache.publish(key, work / f"{MODULE}.so", facts)


def _write_files(work: Path, want: Recipe, compiler: Compiler) -> None:
    """Write the sources as they were hashed, so that an edit meanwhile cannot get under this key."""
    for name, data in want.sources.items():
        (work / name).write_bytes(data)
    (work / "build.ninja").write_text(_ninja_file(want, compiler), encoding="utf-8")


def _ninja_file(want: Recipe, compiler: Compiler) -> str:
    import pybind11

    includes = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"]
    objects = [f"{Path(unit).stem}.o" for unit in UNITS]
    lines = [
        f"cxx = {_shell(compiler.command)}",
        f"flags = {_shell((*want.flags, *includes))}",
        "rule compile",
        "  command = $cxx $flags -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = $in",
        "rule link",
        "  command = $cxx $flags -shared $in -o $out",
        "  description = $out",
        *(f"build {out}: compile {unit}" for out, unit in zip(objects, UNITS, strict=True)),
        f"build {MODULE}.so: link {' '.join(objects)}",
    ]
    return "\n".join(lines) + "\n"


def _shell(words: tuple[str, ...]) -> str:
    return " ".join(shlex.quote(word) for word in words).replace("$", "$$")


def _environment() -> dict[str, str]:
    """Environment of the tools: messages in English, and no library forced into them."""
    env = {**os.environ, "NINJA_STATUS": "[%f/%t] ", "LC_ALL": "C"}
    env.pop("LD_PRELOAD", None)  # a sanitizer in this process is no concern of the compiler
    return env


def _ninja() -> list[str]:
    found = shutil.which("ninja", path=os.path.dirname(sys.executable)) or shutil.which("ninja")
    return [found] if found else [sys.executable, "-m", "ninja"]


def _run_ninja(work: Path, log: Path, progress: Progress | None) -> int:
    """Run ninja with its output in ``log``; returns its exit status."""
    with (
        log.open("wb") as sink,
        subprocess.Popen(
            [*_ninja(), "-C", str(work)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environment(),
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                sink.write(line)
                step = _STEP.match(line.decode(errors="replace"))
                if step and progress:
                    progress(int(step[1]), int(step[2]), step[3].strip())
        except BaseException:
            process.terminate()  # ninja stops its compilers
            raise
    return process.returncode


def first_error(log: Path) -> str:
    """Return the first line of a log that states an error, else its last line."""
    last = "no output"
    with log.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.strip():
                last = line
            if _FIRST_ERROR.search(line) and not line.startswith(("[", "FAILED:", "ninja:")):
                break
    return " ".join(last.split())[:_QUOTED]
