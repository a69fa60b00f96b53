"""Small kernels in assembly, run by the interpreter."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from .isa import Memory, Program, launch

HEAD = """\t.amdgcn_target "amdgcn-amd-amdhsa--{arch}"
k:
"""
TAIL = """
\ts_endpgm
.Lfunc_end0:
\t.amdhsa_kernel k
\t\t.amdhsa_group_segment_fixed_size {lds}
\t\t.amdhsa_private_segment_fixed_size 16
\t\t.amdhsa_user_sgpr_count 2
\t\t.amdhsa_user_sgpr_kernarg_segment_ptr 1
\t\t.amdhsa_system_sgpr_workgroup_id_x 1
\t.end_amdhsa_kernel
"""


def integers(rng: np.random.Generator, n: int = 64) -> np.ndarray:
    """Return random words, the special ones first."""
    special = np.array([0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFF, 0x10000], np.uint32)
    return np.concatenate([special, rng.integers(0, 2**32, n - len(special), np.uint32)])


def program(body: str, *, arch: str = "gfx942", lds: int = 0) -> Program:
    return Program.parse(HEAD.format(arch=arch) + body + TAIL.format(lds=lds), "k")


def run(
    body: str, inputs: Sequence[np.ndarray], results: int = 1, *, arch: str = "gfx942", lds: int = 0,
    threads: int = 64, blocks: int = 1, writable: bool = True,
) -> np.ndarray:  # fmt: skip
    """Run a body over one number per lane: v1, v2, ... hold the inputs; v10, v11, ... are the results.

    v100 is the lane's byte offset, s2 the block, s[4:5] the inputs' address and s[6:7] the results'.
    """
    data = (
        np.stack([np.broadcast_to(x, threads) for x in inputs]).view(np.uint32).copy()
        if inputs
        else np.zeros(1, np.uint32)
    )
    out = np.full((results, threads), 0xABABABAB, np.uint32)
    lines = ["s_load_dwordx4 s[4:7], s[0:1], 0x0", "v_lshlrev_b32_e32 v100, 2, v0"]
    lines += [
        f"global_load_dword v{n + 1}, v100, s[4:5] offset:{n * threads * 4}" for n in range(len(inputs))
    ]
    lines += body.strip().splitlines()
    lines += [f"global_store_dword v100, v{n + 10}, s[6:7] offset:{n * threads * 4}" for n in range(results)]
    memory = Memory()
    memory.add("inputs", data.ctypes.data, data.nbytes, writable=False)
    memory.add("results", out.ctypes.data, out.nbytes, writable=writable)
    arguments = struct.pack("<QQ", data.ctypes.data, out.ctypes.data)
    launch(program("\n".join(lines), arch=arch, lds=lds), (blocks, 1, 1), threads, arguments, memory)
    return out
