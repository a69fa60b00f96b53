"""Executes the compiled instructions of gfx942 and gfx950 on the CPU, with checks that hardware lacks.

It reads a compiler's ``-S`` text and runs whole blocks in numpy, one call per instruction for all waves that
stand there. An instruction that is not modelled raises; nothing is guessed. Checked on the way:

- every access to global memory lies in a registered buffer, and no two blocks write one place;
- shared memory is touched by one wave, or by readers only, between two barriers;
- no address, branch, exec mask or stored value depends on what was never written;
- copies into shared memory are waited for.

Not modelled: time, caches, hazards and waits of ordinary loads (the compiler's part), modes of rounding and
denormals (the kernels use the default ones), indexed scratch memory, v_div_scale (quotients come out exact).
"""

from .costs import BYTES_PER_CLOCK, Counts
from .faults import Divergence, Fault, OutOfBounds, Race, Undefined, Unknown, Unwaited
from .machine import Program, launch
from .memory import Memory

__all__ = [
    "BYTES_PER_CLOCK",
    "Counts",
    "Divergence",
    "Fault",
    "Memory",
    "OutOfBounds",
    "Program",
    "Race",
    "Undefined",
    "Unknown",
    "Unwaited",
    "launch",
]
