"""Builds device code: one code object per variant and arch, by whatever compiler there is.

A code object comes from the first of: the folder ``codeobjects`` of the installed package, if it was packed
from the sources that are here; the cache; a compiler. A compiler that the user names comes first. As for the
host module the content decides: a key is a hash of the bytes of the source and its headers, the flags and the
compiler.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from . import build as host_build
from . import cache, codeobject, toolchain
from .build import BuildError, NoCompiler
from .toolchain import DeviceCompiler
from .variants import Variant

LOGGER = logging.getLogger("attn_hip")
PACKED = Path(__file__).parent / "codeobjects"
"""Where an installed package carries code objects, ``<arch>/<variant>.co`` beside ``<arch>/index.json``."""
INDEX = "index.json"
_USAGE = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True, slots=True)
class Job:
    """One code object to build.

    Attributes:
        variant: What.
        arch: For which device.
        compiler: By which compiler; None for the first that can.
    """

    variant: Variant
    arch: str
    compiler: str | None = None


@dataclass(frozen=True, slots=True)
class Built:
    """A code object.

    Attributes:
        job: What was asked for.
        path: The file.
        compiler: Name of the compiler that made it.
    """

    job: Job
    path: Path
    compiler: str

    def row(self) -> dict[str, object]:
        """Return its resources: registers of a lane (a wave for ``sgpr``), bytes, and spilled registers.

        For NVIDIA ``vgpr`` counts the registers of a thread, ``lds`` the static shared memory, ``scratch``
        the stack and ``spills`` the bytes stored and loaded for want of registers.
        """
        names = {"variant": self.job.variant.name, "arch": self.job.arch, "compiler": self.compiler}
        if not toolchain.is_amd(self.job.arch):
            said = cache.manifest(self.path.parent).get("resources")
            return {**names, **(said if isinstance(said, dict) else {})}
        r = codeobject.resources(self.path.read_bytes())[self.job.variant.entry]
        return {
            **names, "vgpr": r.vgpr, "agpr": r.agpr, "sgpr": r.sgpr, "lds": r.lds, "scratch": r.scratch,
            "spills": r.vgpr_spills + r.sgpr_spills,
        }  # fmt: skip


def content(variant: Variant, arch: str, sources: Mapping[str, bytes] | None = None) -> str:
    """Return the hash of everything but the compiler that decides the bytes of a code object."""
    sources = host_build.gather((variant.source,)) if sources is None else sources
    flags = toolchain.AMD_FLAGS if toolchain.is_amd(arch) else toolchain.NVIDIA_FLAGS
    return host_build.content_of((arch, flags, variant.defines, variant.entry), sources)


def _key(variant: Variant, arch: str, hashed: str, compiler: DeviceCompiler | None) -> str:
    return host_build.entry_of(f"{arch}-{variant.name}", hashed, compiler)


def existing(variant: Variant, arch: str, sources: Mapping[str, bytes] | None = None) -> Path | None:
    """Return a code object of the present sources, packed or cached, or None; runs no program.

    Args:
        variant: What.
        arch: For which device.
        sources: What :func:`build.gather` returns for the variant, where that is known already.

    Raises:
        cache.CacheError: The cache directory belongs to somebody else.
    """
    hashed = content(variant, arch, sources)
    found = None if toolchain.stated(arch) else _packed(variant, arch, hashed)
    return found or cache.find(_key(variant, arch, hashed, None))


def _packed(variant: Variant, arch: str, hashed: str) -> Path | None:
    said = _index(PACKED / arch).get(variant.name)
    if not isinstance(said, dict) or said.get("content") != hashed:
        return None
    path = PACKED / arch / str(said.get("file"))
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return path if hashlib.sha256(data).hexdigest() == said.get("sha256") else None


def _index(folder: Path) -> Mapping[str, object]:
    try:
        read = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def ensure(variant: Variant, arch: str) -> Path:
    """Return a code object for this machine's use: packed, cached or built now.

    Raises:
        NoCompiler: Nothing is there and nothing can build it.
        BuildError: The build failed.
        cache.CacheError: The cache directory cannot be used.
    """
    if not toolchain.stated(arch):
        found = existing(variant, arch)
        if found is not None:
            return found
    return build(variant, arch).path


def build(variant: Variant, arch: str, compiler: str | None = None) -> Built:
    """Build one code object by one compiler, or find what it built earlier.

    Processes and threads may do this at once: each builds on its own and either result is the same.

    Args:
        variant: What.
        arch: For which device.
        compiler: A name of :func:`toolchain.compilers`; None for the first that can.

    Raises:
        NoCompiler: There is no such compiler.
        BuildError: The compiler failed; the text quotes its first error and names the log.
        cache.CacheError: The cache directory cannot be used.
    """
    chosen = toolchain.find(arch, compiler)
    sources = host_build.gather((variant.source,))
    key = _key(variant, arch, content(variant, arch, sources), chosen)
    found = cache.find(key) or _compile(key, variant, arch, chosen, sources)
    return Built(Job(variant, arch, compiler), found, chosen.name)


def _compile(
    key: str, variant: Variant, arch: str, compiler: DeviceCompiler, sources: Mapping[str, bytes]
) -> Path:
    LOGGER.info("building %s for %s in %s, once", variant.name, arch, cache.root())
    start = time.monotonic()
    with cache.workspace() as work:
        for name, data in sources.items():
            (work / name).write_bytes(data)
        out = work / f"kernel.{'co' if toolchain.is_amd(arch) else 'cubin'}"
        log = work / "build.log"
        command = [
            *compiler.arguments(arch),
            *(f"-D{d}" for d in variant.defines),
            "-o",
            str(out),
            variant.source,
        ]
        with log.open("wb") as sink:
            try:
                status = subprocess.run(
                    command, cwd=work, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
                    env=compiler.environment(work), check=False,
                ).returncode  # fmt: skip
            except OSError as err:
                raise BuildError(f"{compiler.name}: {err}") from err
        if status:
            first = host_build.first_error(log)
            raise BuildError(f"{variant.name} for {arch}: {first} (log: {cache.keep_log(key, log)})")
        facts = {
            "variant": variant.name, "arch": arch, "entry": variant.entry, "defines": list(variant.defines),
            "compiler": compiler.name, "compiler_version": compiler.version, "attn_hip": version("attn-hip"),
            "seconds": round(time.monotonic() - start, 2),
        }  # fmt: skip
        if not toolchain.is_amd(arch):
            facts["resources"] = _nvidia_usage(
                log.read_text(encoding="utf-8", errors="replace").partition(f"'{variant.entry}'")[2]
            )
        return cache.publish(key, out, facts)


def _nvidia_usage(log: str) -> dict[str, int]:
    """Read what ptxas says behind the name of a kernel."""
    used, stack = _USAGE.search(log), _STACK.search(log)
    registers, shared = (int(used[1]), int(used[2] or 0)) if used else (0, 0)
    frame, stores, loads = (int(stack[1]), int(stack[2]), int(stack[3])) if stack else (0, 0, 0)
    return {
        "vgpr": registers,
        "agpr": 0,
        "sgpr": 0,
        "lds": shared,
        "scratch": frame,
        "spills": stores + loads,
    }


Outcome = tuple[Job, Built | Exception]


def build_all(jobs: Sequence[Job], done: Callable[[Job], None] | None = None) -> list[Outcome]:
    """Build side by side, one compiler per CPU; a failure stops no other.

    Args:
        jobs: What to build.
        done: Told of every job that is through.

    Returns:
        A result or its exception for each job, in the order given.
    """
    results: dict[Job, Built | Exception] = {}
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        futures = {pool.submit(build, job.variant, job.arch, job.compiler): job for job in jobs}
        for future in as_completed(futures):
            job, failed = futures[future], future.exception()
            if failed is not None and not isinstance(failed, BuildError | cache.CacheError):
                raise failed
            results[job] = future.result() if failed is None else failed
            if done is not None:
                done(job)
    return [(job, results[job]) for job in jobs]


def pack(found: Iterable[Built], place: Path) -> list[Path]:
    """Copy code objects into ``place/<arch>`` with an index; returns the folders.

    ``place`` is meant to be the package's own ``codeobjects`` when a wheel is made.

    Raises:
        OSError: A file cannot be written.
    """
    by_arch: dict[str, dict[str, dict[str, str]]] = {}
    for one in found:
        variant, arch = one.job.variant, one.job.arch
        folder = place / arch
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"{variant.name}{one.path.suffix}"
        shutil.copyfile(one.path, target)
        by_arch.setdefault(arch, {})[variant.name] = {
            "file": target.name,
            "sha256": hashlib.sha256(target.read_bytes()).hexdigest(),
            "content": content(variant, arch),
            "compiler": one.compiler,
        }
    for arch, index in by_arch.items():
        text = json.dumps({**_index(place / arch), **index}, indent=2, sort_keys=True)
        (place / arch / INDEX).write_text(text + "\n", encoding="utf-8")
    return [place / arch for arch in by_arch]


def present(arch: str, variants: Iterable[Variant]) -> Iterator[bool]:
    """Say of each variant whether :func:`existing` finds it, in a usable cache; each source is read once."""
    read: dict[str, Mapping[str, bytes]] = {}
    for variant in variants:
        if variant.source not in read:
            read[variant.source] = host_build.gather((variant.source,))
        try:
            yield existing(variant, arch, read[variant.source]) is not None
        except cache.CacheError:
            yield False  # building says why


def missing(arch: str, variants: Iterable[Variant]) -> str | None:
    """Say what is needed to have these code objects on this machine, or None; runs no program."""
    return None if toolchain.commands(arch) or all(present(arch, variants)) else toolchain.wanted(arch)


__all__ = [
    "Built", "Job", "NoCompiler", "build", "build_all", "ensure", "existing", "missing", "pack", "present",
]  # fmt: skip
