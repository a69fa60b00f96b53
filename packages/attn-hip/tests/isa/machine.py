"""Runs a kernel: the waves of many blocks side by side, in lockstep where they stand at one instruction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from . import access, lanes, matrix, packed, scalar, vector
from .costs import Counts, bank_clocks
from .faults import Divergence, Fault, Unknown
from .memory import Memory, Shared
from .text import Instruction, Listing, parse
from .waves import EXEC, SCALAR_KEY, SCC, VCC, Waves

Step = Callable[[Waves], None]
_NOTHING = (
    "s_nop",
    "s_setprio",
    "s_sleep",
    "buffer_inv",
    "buffer_wbl2",
    "s_code_end",
    "s_icache_inv",
    "s_set_gpr_idx_off",
)
_MOST_WAVES = 64
_MOST_STEPS = 50_000_000
_TICKETS = 1 << 32
_OTHER_INPUTS = (
    "user_sgpr_dispatch_ptr", "user_sgpr_queue_ptr", "user_sgpr_dispatch_id",
    "user_sgpr_private_segment_size",
    "user_sgpr_kernarg_preload_length", "system_sgpr_workgroup_info", "uses_dynamic_stack",
    "user_sgpr_private_segment_buffer", "user_sgpr_flat_scratch_init",
)  # fmt: skip


class Machine:
    """What the instructions of one launch share.

    Attributes:
        memory: Global memory.
        shared: Shared memory of the blocks that run now.
        block_number: ``[waves]`` linear number of each wave's block in the grid.
        lane_block: The same for each lane; ``lane_slot`` is the block's place among those that run now,
            ``lane_wave`` the wave's number in the block.
    """

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self.memory = Memory()
        self.profile: Counts | None = None
        self.private_bytes = 0

    def place(self, waves: Waves, first: int, per_block: int, shared: Shared) -> None:
        """Take up the waves of the blocks from ``first`` on."""
        number = np.arange(waves.count)
        self.shared = shared
        self.per_block = per_block
        self.slot = number // per_block
        self.block_number = first + self.slot
        ones = np.ones((1, 64), np.int64)
        self.lane_block = self.block_number[:, None] * ones
        self.lane_slot = self.slot[:, None] * ones
        self.lane_wave = (number % per_block)[:, None] * ones
        self.issued = np.zeros(waves.count, np.int64)
        shape = (self.private_bytes // 4, 2, waves.count, 64)
        self.private = np.full(shape, 0xFFFFFFFF, np.uint32)  # words of each lane, and their undefined bits

    def count_memory(self, w: Waves) -> np.ndarray:
        """Number a vector memory access; returns a ticket per wave."""
        self.issued[w.selected] += 1
        return np.arange(w.count) * _TICKETS + self.issued

    def wait(self, w: Waves, outstanding: int) -> None:
        """Let the selected waves wait until at most so many of their vector memory accesses are under way."""
        tickets = self.shared.waiting()
        if len(tickets):
            wave, number = tickets // _TICKETS, tickets % _TICKETS
            here = w.selected[wave] & (number <= self.issued[wave] - outstanding)
            self.shared.arrive(tickets[here])

    def count_banks(self, w: Waves, address: np.ndarray, size: int, name: str) -> None:
        """Add an access to shared memory to the profile; ``address`` is of the active lanes."""
        if self.profile is None:
            return
        whole = np.zeros(w.active.shape, np.int64)
        whole[w.active] = address
        for n in np.flatnonzero(w.active.any(axis=1)):
            clocks, ideal = bank_clocks(whole[n], w.active[n], size, name, self.arch)
            self.profile.bank_clocks[name] += clocks
            self.profile.bank_ideal[name] += ideal


class Program:
    """A kernel, cut into stretches without branches that are decoded when they are first reached."""

    def __init__(self, listing: Listing, kernel: str) -> None:
        self.kernel = kernel
        self.arch = listing.arch
        self.listing = listing
        self.machine = Machine(listing.arch)
        self.shared_bytes = int(listing.descriptor["group_segment_fixed_size"])
        self.machine.private_bytes = int(listing.descriptor.get("private_segment_fixed_size", 0))
        self.argument_bytes = int(listing.descriptor.get("kernarg_size", 0))
        self._check_inputs()
        starts = {0, *listing.labels.values()}
        for n, ins in enumerate(listing.instructions):
            if ins.name.startswith(("s_cbranch", "s_branch", "s_endpgm", "s_barrier")):
                starts.add(n + 1)
        self._starts = sorted(s for s in starts if s < len(listing.instructions))
        self.number = {start: n for n, start in enumerate(self._starts)}
        self._decoded: dict[int, tuple[list[tuple[Step, str]], Callable[[Run], None], Counter[str]]] = {}

    @classmethod
    def parse(cls, text: str, kernel: str) -> Program:
        """Read one kernel of what a compiler's ``-S`` wrote.

        Raises:
            Unknown: It is not there, or wants inputs that are not modelled.
        """
        return cls(parse(text, kernel), kernel)

    def unknown(self) -> list[str]:
        """Return the lines that are not modelled."""
        lines = []
        for ins in self.listing.instructions:
            try:
                self._step(ins)
            except Unknown:
                lines.append(ins.text)
        return lines

    def stretch(self, n: int) -> tuple[list[tuple[Step, str]], Callable[[Run], None], Counter[str]]:
        """Return steps, what ends the stretch, and its instructions by mnemonic."""
        if n not in self._decoded:
            self._decoded[n] = self._decode(n)
        return self._decoded[n]

    def _decode(self, n: int) -> tuple[list[tuple[Step, str]], Callable[[Run], None], Counter[str]]:
        first = self._starts[n]
        last = self._starts[n + 1] if n + 1 < len(self._starts) else len(self.listing.instructions)
        body = self.listing.instructions[first:last]
        end = self._end(body[-1], n)
        steps = []
        for ins in body[:-1] if end is not None else body:
            step = self._step(ins)
            if step is not None:
                steps.append((step, ins.text))
        return steps, end or (lambda run: run.go(n + 1)), Counter(ins.name for ins in body)

    def _step(self, ins: Instruction) -> Step | None:
        if ins.name in _NOTHING or ins.name.startswith(("s_cbranch", "s_branch", "s_endpgm", "s_barrier")):
            return None
        if ins.name == "s_waitcnt":
            return self._wait(ins)
        machine = self.machine
        for found in (
            scalar.decode(ins, self.arch) if ins.name.startswith("s_") and "load" not in ins.name else None,
            lanes.decode(ins, self.arch) if ins.name.startswith("v_") else None,
            packed.decode(ins, self.arch)
            if ins.name.startswith(("v_pk", "v_cvt", "v_bitop3", "v_fma_mix"))
            else None,
            matrix.decode(ins, self.arch) if ins.name.startswith("v_mfma") else None,
            access.decode(ins, self.arch, machine),
        ):
            if found is not None:
                return found
        found = vector.decode(ins, self.arch) if ins.name.startswith("v_") else None
        if found is None:
            raise Unknown(ins.text)
        return found

    def _wait(self, ins: Instruction) -> Step | None:
        if "vmcnt" not in ins.options:
            return None
        outstanding = int(ins.options["vmcnt"])
        return lambda w: self.machine.wait(w, outstanding)

    def _end(self, ins: Instruction, n: int) -> Callable[[Run], None] | None:
        if ins.name == "s_endpgm":
            return lambda run: run.finish()
        if ins.name == "s_barrier":
            return lambda run: run.block(n + 1)
        if ins.name == "s_branch":
            target = self.number[self.listing.labels[ins.operands[0]]]
            return lambda run: run.go(target)
        if ins.name.startswith("s_cbranch_"):
            target = self.number[self.listing.labels[ins.operands[0]]]
            test = _TESTS[ins.name.removeprefix("s_cbranch_")]
            return lambda run: run.branch(test, target, n + 1)
        return None

    def _check_inputs(self) -> None:
        d = self.listing.descriptor
        wanted = {"user_sgpr_count": "2", "user_sgpr_kernarg_segment_ptr": "1"}
        for key, value in wanted.items():
            if d.get(key, value) != value:
                raise Unknown(f"{self.kernel}: {key} {d.get(key)}")
        for key in _OTHER_INPUTS:
            if d.get(key, "0") != "0":
                raise Unknown(f"{self.kernel}: {key} {d[key]}")


def _vcc(w: Waves) -> np.ndarray:
    w.require_scalar(VCC, 2, "a branch")
    return w.s64[VCC // 2] != 0


def _exec(w: Waves) -> np.ndarray:
    return w.s64[EXEC // 2] != 0


def _scc(w: Waves) -> np.ndarray:
    w.require_scalar(SCC, 1, "a branch")
    return w.s[SCC] != 0


_TESTS: dict[str, Callable[[Waves], np.ndarray]] = {
    "vccz": lambda w: ~_vcc(w), "vccnz": _vcc, "execz": lambda w: ~_exec(w), "execnz": _exec,
    "scc0": lambda w: ~_scc(w), "scc1": _scc,
}  # fmt: skip


class Run:
    """Blocks on their way through a program.

    The waves that stand farthest back go first, so that waves that parted meet again.
    """

    def __init__(self, program: Program, waves: Waves, executed: Counter[int]) -> None:
        self.program, self.waves, self.executed = program, waves, executed
        self.at = np.zeros(waves.count, np.int64)
        self.waiting = np.zeros(waves.count, bool)

    def run(self) -> None:
        """Run to the end of every wave."""
        w, steps_left = self.waves, _MOST_STEPS
        far = len(self.program.number) + 1
        while w.live.any():
            ready = w.live & ~self.waiting
            if not ready.any():
                self._release()
                continue
            n = int(np.where(ready, self.at, far).min())
            selected = ready & (self.at == n)
            if not np.array_equal(selected, w.selected):
                w.select(selected)
            steps, end, _ = self.program.stretch(n)
            text = ""
            try:
                for step, text in steps:  # noqa: B007 - named in the report of a fault
                    step(w)
                text = "the end of the stretch"
                end(self)
            except Fault as fault:
                raise type(fault)(f"{self.program.kernel}: {text}: {fault}") from fault
            except (ValueError, IndexError, TypeError, NotImplementedError, FloatingPointError) as err:
                raise Unknown(f"{self.program.kernel}: {text}: {err}") from err
            self.executed[n] += int(selected.sum())
            steps_left -= len(steps) + 1
            if steps_left < 0:
                raise Divergence(f"{self.program.kernel}: does not end")

    def go(self, target: int) -> None:
        self.at[self.waves.selected] = target

    def branch(self, test: Callable[[Waves], np.ndarray], target: int, otherwise: int) -> None:
        taken = test(self.waves)
        selected = self.waves.selected
        self.at[selected] = np.where(taken, target, otherwise)[selected]

    def block(self, after: int) -> None:
        """Let the selected waves stop at a barrier."""
        selected = self.waves.selected
        self.at[selected] = after
        self.waiting |= selected
        machine = self.program.machine
        if machine.per_block == 1 or bool((self.waiting | ~self.waves.live).all()):
            self._release()

    def finish(self) -> None:
        w = self.waves
        w.live = w.live & ~w.selected
        w.select(w.live.copy())

    def _release(self) -> None:
        """Let every block pass whose waves all wait."""
        machine = self.program.machine
        moved = False
        for slot in np.unique(machine.slot[self.waiting]):
            mine = machine.slot == slot
            if (self.waiting[mine] | ~self.waves.live[mine]).all():
                if not self.waves.live[mine].all():
                    raise Divergence(
                        f"{self.program.kernel}: a wave ended while others of its block wait at a barrier"
                    )
                at = np.unique(self.at[mine])
                if len(at) > 1:
                    raise Divergence(f"{self.program.kernel}: waves of a block wait at different barriers")
                machine.shared.barrier(int(slot))
                self.waiting[mine] = False
                moved = True
        if not moved and not (self.waves.live & ~self.waiting).any():
            raise Divergence(f"{self.program.kernel}: waves wait at a barrier that others never reach")


def launch(
    program: Program, grid: tuple[int, int, int], threads: int, kernarg: bytes, memory: Memory,
    *, shared_bytes: int = 0, profile: bool = False,
) -> Counts:  # fmt: skip
    """Run a kernel over a grid.

    Args:
        program: The kernel.
        grid: Blocks along x, y, z.
        threads: Threads of a block, a multiple of 64.
        kernarg: The argument block.
        memory: Buffers that the kernel may touch.
        shared_bytes: Shared memory beyond what the kernel states.
        profile: Whether bank conflicts are counted, which is slow.

    Returns:
        What was executed.

    Raises:
        Fault: The kernel did what it must not, or something is not modelled.
    """
    if threads % 64:
        raise ValueError(f"threads: needs a multiple of 64, got {threads}")
    per_block = threads // 64
    arguments = np.frombuffer(kernarg, np.uint8).copy()
    counts = Counts(program.arch)
    machine = program.machine
    machine.memory, machine.profile = memory, counts if profile else None
    memory.begin()
    memory.add("kernarg", arguments.ctypes.data, len(arguments), writable=False)
    executed: Counter[int] = Counter()
    blocks = grid[0] * grid[1] * grid[2]
    together = max(1, _MOST_WAVES // per_block)
    try:
        with np.errstate(all="ignore"):
            for first in range(0, blocks, together):
                here = min(together, blocks - first)
                waves = Waves(here * per_block)
                shared = Shared(here, program.shared_bytes + shared_bytes, per_block)
                machine.place(waves, first, per_block, shared)
                _start(program, waves, grid, arguments.ctypes.data)
                Run(program, waves, executed).run()
    finally:
        memory.remove("kernarg")
    for n, times in executed.items():
        for name, count in program.stretch(n)[2].items():
            counts.names[name] += count * times
    return counts


def _start(program: Program, w: Waves, grid: tuple[int, int, int], kernarg: int) -> None:
    """Set the registers that a kernel starts with."""
    machine, d = program.machine, program.listing.descriptor
    w.set_scalar64(0, np.uint64(kernarg))
    number = machine.block_number
    ids = {"x": number % grid[0], "y": number // grid[0] % grid[1], "z": number // (grid[0] * grid[1])}
    at = 2
    for axis, value in ids.items():
        if d.get(f"system_sgpr_workgroup_id_{axis}", "1" if axis == "x" else "0") == "1":
            w.set_scalar(at, value.astype(np.uint32))
            at += 1
    thread = (np.arange(w.count) % machine.per_block)[:, None] * 64 + np.arange(64)
    w.set_vector(0, thread.astype(np.uint32))
    w.set_vector_undefined(0, 0)
    assert SCALAR_KEY + EXEC not in w.bad
