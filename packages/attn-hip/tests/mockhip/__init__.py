"""A GPU runtime in place of ROCm's: what is launched runs in the interpreter, over a test's tensors."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attn_core.target import DeviceTarget
from attn_hip import build, codeobject, gpu, toolchain
from attn_hip.variants import Variant

if TYPE_CHECKING:  # the interpreter needs numpy, which need not be there
    from ..isa import Memory, Program

HERE = Path(__file__).parent
MACHINES = {"gfx942": 0x4C, "gfx950": 0x4F}
TARGETS = {
    # Few compute units: an interpreter runs one work item after the other.
    "gfx942": DeviceTarget("hip", "gfx942", 3, 64),
    "gfx950": DeviceTarget("hip", "gfx950", 3, 64),
}
_CALLBACK = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.c_uint,
    ctypes.c_uint,
    ctypes.c_uint,
    ctypes.c_void_p,
)


@cache
def program(variant: Variant, arch: str) -> Program:
    """Compile a variant to text with the flags of its code object, and read it."""
    from ..isa import Program

    compiler = toolchain.find(arch)
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        for name, data in build.gather((variant.source,)).items():
            (work / name).write_bytes(data)
        command = [
            *compiler.arguments(arch),
            *(f"-D{d}" for d in variant.defines),
            "-S",
            "-o",
            "k.s",
            variant.source,
        ]
        subprocess.run(command, cwd=work, env=compiler.environment(work), check=True, capture_output=True)
        return Program.parse((work / "k.s").read_text(encoding="utf-8"), variant.entry)


class Mock:
    """The runtime, and what its kernels may touch.

    Attributes:
        launched: ``(entry, blocks)`` of every launch.
        fault: What the interpreter raised in the last launch that failed.
    """

    def __init__(self, library: Path, arch: str) -> None:
        self.arch = arch
        self.launched: list[tuple[str, int]] = []
        self.fault: BaseException | None = None
        self._lib = ctypes.CDLL(str(library))
        self._variants = {v.entry: v for v in gpu.all_variants(arch)}
        self._memory: Memory | None = None
        self._callback = _CALLBACK(self._launch)  # kept for as long as the library may call it
        self._lib.mock_setup(self._callback, MACHINES[arch], 1)
        self._lib.mock_fail(0, 0)

    def fail(self, *, load: int = 0, launch: int = 0) -> None:
        """Make the next calls return error codes."""
        self._lib.mock_fail(load, launch)

    @contextmanager
    def over(self, read: Iterable[torch.Tensor], written: Iterable[torch.Tensor]) -> Iterator[None]:
        """Let kernels touch these tensors' memory and no other."""
        from ..isa import Memory

        memory = Memory()
        seen: set[tuple[int, int]] = set()
        for writable, tensors in ((True, written), (False, read)):
            for n, tensor in enumerate(tensors):
                place = _extent(tensor)
                if place not in seen:
                    seen.add(place)
                    memory.add(f"{'written' if writable else 'read'} {n}", *place, writable=writable)
        self._memory = memory
        try:
            yield
        finally:
            self._memory = None

    def _launch(self, image: int, name: bytes, blocks: int, threads: int, lds: int, argument: int) -> int:
        from ..isa import launch

        variant = self._variants[name.decode()]
        self.launched.append((variant.entry, blocks))
        try:
            assert self._memory is not None, "a launch outside Mock.over()"
            size = codeobject.resources(_file(image))[variant.entry].kernarg
            launch(
                program(variant, self.arch), (blocks, 1, 1), threads, ctypes.string_at(argument, size),
                self._memory, shared_bytes=lds,
            )  # fmt: skip
        except BaseException as err:  # a callback cannot raise through C
            self.fault = err
            return 719
        return 0


def _extent(t: torch.Tensor) -> tuple[int, int]:
    """Return address and bytes from the first to the last element of a tensor."""
    if t.numel() == 0:
        return t.data_ptr(), 0
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), (last + 1) * t.element_size()


def _file(image: int) -> bytes:
    """Return the ELF file at an address: its section table is its end."""
    head = ctypes.string_at(image, 64)
    table, size, count = (int.from_bytes(head[a:b], "little") for a, b in ((40, 48), (58, 60), (60, 62)))
    return ctypes.string_at(image, table + size * count)
