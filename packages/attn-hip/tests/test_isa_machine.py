"""The interpreter itself: lanes, memory, matrix units and the flow of control, against numpy."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from .asm import integers, program, run
from .isa import Memory, Undefined, Unknown, launch

U = np.uint32
RNG = np.random.default_rng(7)
A, B = integers(RNG), RNG.permutation(integers(RNG))


def test_spilled_registers_come_back() -> None:
    body = """
    scratch_store_dwordx2 off, v[1:2], off offset:8
    v_mov_b32_e32 v1, 0
    scratch_load_dword v10, off, off offset:12
    scratch_load_dword v11, off, off offset:8
    """
    np.testing.assert_array_equal(run(body, [A, B], 2), [B, A])
    with pytest.raises(Undefined):
        run("scratch_load_dword v10, off, off offset:4", [A])
    with pytest.raises(Unknown):
        run("scratch_load_dword v10, off, off offset:16", [A])


@pytest.mark.parametrize(
    ("text", "lane", "kept"),
    [
        ("quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf", lambda n: n ^ 1, lambda n: True),
        ("row_shr:1 row_mask:0xf bank_mask:0xf", lambda n: n - 1, lambda n: n % 16 > 0),
        ("row_shl:3 row_mask:0xf bank_mask:0xf", lambda n: n + 3, lambda n: n % 16 < 13),
        ("row_ror:4 row_mask:0xf bank_mask:0xf", lambda n: n & ~15 | (n - 4) & 15, lambda n: True),
        ("row_bcast:15 row_mask:0xa bank_mask:0xf", lambda n: (n & ~15) - 1, lambda n: n // 16 in (1, 3)),
        ("row_newbcast:7 row_mask:0xf bank_mask:0x3", lambda n: n & ~15 | 7, lambda n: n // 4 % 4 < 2),
        ("row_half_mirror row_mask:0xf bank_mask:0xf", lambda n: n & ~7 | 7 - n & 7, lambda n: True),
    ],
)
def test_data_moves_between_lanes(text: str, lane: object, kept: object) -> None:
    got = run(f"v_mov_b32_e32 v10, v2\nv_add_u32_dpp v10, v1, v2 {text}", [A, B])[0]
    assert got.tolist() == [
        (int(A[lane(n)]) + int(B[n])) & 0xFFFFFFFF if kept(n) else int(B[n]) for n in range(64)
    ]
    zeros = run(f"v_mov_b32_e32 v10, v2\nv_add_u32_dpp v10, v1, v2 {text} bound_ctrl:1", [A, B])[0]
    if "row_mask:0xf bank_mask:0xf" in text:
        assert zeros.tolist() == [
            (int(A[lane(n)]) + int(B[n])) & 0xFFFFFFFF if kept(n) else int(B[n]) for n in range(64)
        ]


def test_exchanges_between_lanes() -> None:
    at = RNG.permutation(64).astype(U) * U(4)
    assert run("ds_bpermute_b32 v10, v1, v2", [at, A])[0].tolist() == A[at // 4].tolist()
    body = "v_readlane_b32 s10, v1, 5\nv_readfirstlane_b32 s11, v1\nv_mov_b32_e32 v10, s10\n"
    body += "v_writelane_b32 v10, s11, 9"
    wanted = np.full(64, A[5])
    wanted[9] = A[0]
    np.testing.assert_array_equal(run(body, [A])[0], wanted)
    body = "v_mov_b32_e32 v10, v1\nv_mov_b32_e32 v11, v2\nv_permlane32_swap_b32_e32 v10, v11"
    got = run(body, [A, B], 2, arch="gfx950")
    np.testing.assert_array_equal(got, [np.r_[A[:32], B[:32]], np.r_[A[32:], B[32:]]])
    got = run(body.replace("32_swap", "16_swap"), [A, B], 2, arch="gfx950")
    np.testing.assert_array_equal(got[0], np.r_[A[:16], B[:16], A[32:48], B[32:48]])


@pytest.mark.parametrize(
    ("text", "arch", "kind"),
    [
        ("v_mfma_f32_16x16x16_bf16 v[20:23], v[2:3], v[4:5], v[20:23]", "gfx942", "bf16"),
        ("v_mfma_f32_16x16x16_f16 v[20:23], v[2:3], v[4:5], v[20:23]", "gfx942", "f16"),
        ("v_mfma_f32_16x16x32_bf16 v[20:23], v[2:5], v[6:9], v[20:23]", "gfx950", "bf16"),
        ("v_mfma_f32_32x32x8_f16 a[0:15], v[2:3], v[4:5], 0", "gfx942", "f16"),
    ],
)
def test_matrix_instructions(text: str, arch: str, kind: str) -> None:
    import torch

    size = 32 if "32x32" in text else 16
    depth = int(text.split("x")[2].split("_")[0])
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16
    a, b = (torch.randn(size, depth).to(dtype) for _ in range(2))
    per = depth * size // 64
    lane = np.arange(64)

    def lanes(x: torch.Tensor) -> list[np.ndarray]:
        flat = x.view(torch.int16).numpy().view(np.uint16)
        mine = flat[lane % size][np.arange(64)[:, None], (lane // size)[:, None] * per + np.arange(per)]
        return list(np.ascontiguousarray(mine).view(U).T.copy())

    inputs = [np.zeros(64, U), *lanes(a), *lanes(b)]
    count = 16 if size == 32 else 4
    start = "\n".join(f"v_mov_b32_e32 v{20 + n}, 1.0" for n in range(4)) + "\n"
    source = "a" if size == 32 else "v"
    move = "v_accvgpr_read_b32" if size == 32 else "v_mov_b32_e32"
    end = "\n".join(f"{move} v{10 + n + 20}, {source}{n + (0 if size == 32 else 20)}" for n in range(count))
    more = "\n".join(f"v_mov_b32_e32 v{10 + n}, v{30 + n}" for n in range(count))
    got = run(start + text + "\n" + end + "\n" + more, inputs, count, arch=arch).view(np.float32)
    wanted = (a.float() @ b.float().T).numpy() + (0 if size == 32 else 1)
    row = [
        [n // 4 * 8 + (m // 32) * 4 + n % 4 if size == 32 else m // 16 * 4 + n for m in range(64)]
        for n in range(count)
    ]
    np.testing.assert_allclose(got, wanted[np.array(row), lane % size], rtol=1e-5, atol=1e-5)


def test_shared_memory_round_trip_and_transposed_read() -> None:
    body = "ds_write_b32 v100, v1 offset:16\nds_read_b32 v10, v100 offset:16"
    np.testing.assert_array_equal(run(body, [A], lds=272)[0], A)
    # two halves of a word from two places
    body = "ds_write_b32 v100, v1\nds_read_u16_d16 v10, v100\nds_read_u16_d16_hi v10, v100"
    np.testing.assert_array_equal(run(body, [A], lds=256)[0], (A & U(0xFFFF)) * U(0x10001))
    body = "v_lshlrev_b32_e32 v101, 1, v100\nds_write_b64 v101, v[1:2]\nds_read_b64_tr_b16 v[10:11], v101"
    got = run(body, [A, B], 2, arch="gfx950", lds=512)
    matrix = np.stack([A, B], 1).view(np.uint16).reshape(4, 4, 16)
    np.testing.assert_array_equal(got.T.copy().view(np.uint16).reshape(4, 16, 4), matrix.transpose(0, 2, 1))


def test_scalars_branches_and_loops() -> None:
    body = """
    s_mov_b32 s10, 0
    s_mov_b32 s11, 5
.LBB0_1:
    s_add_i32 s10, s10, s11
    s_add_i32 s11, s11, -1
    s_cmp_lg_u32 s11, 0
    s_cbranch_scc1 .LBB0_1
    s_mul_hi_u32 s12, s10, 0x40000000
    s_lshl_b64 s[14:15], s[10:11], 4
    v_mov_b32_e32 v10, s10
    v_mov_b32_e32 v11, s12
    v_mov_b32_e32 v12, s14
    v_cmp_gt_u32_e32 vcc, 8, v0
    s_and_saveexec_b64 s[20:21], vcc
    v_mov_b32_e32 v10, 7
    s_or_b64 exec, exec, s[20:21]
    """
    got = run(body, [A], 3)
    assert got[0].tolist() == [7] * 8 + [15] * 56
    assert (got[1] == 3).all()
    assert (got[2] == 240).all()


def test_lanes_that_left_come_back_and_waves_may_part() -> None:
    # Each lane counts to its own number; each of three waves to another.
    body = """
    v_mov_b32_e32 v10, 0
    s_mov_b64 s[10:11], 0
.LBB0_1:
    v_add_u32_e32 v10, 1, v10
    v_cmp_ge_u32_e32 vcc, v10, v1
    s_or_b64 s[10:11], vcc, s[10:11]
    s_andn2_b64 exec, exec, s[10:11]
    s_cbranch_execnz .LBB0_1
    s_mov_b64 exec, -1
    s_barrier
    """
    wanted = RNG.integers(1, 40, 192, U)
    wanted[64:128] += U(50)
    np.testing.assert_array_equal(run(body, [wanted], threads=192)[0], wanted)


def test_atomics_add_up() -> None:
    cell = np.zeros(2, U)
    memory = Memory()
    memory.add("cell", cell.ctypes.data, 8)
    body = """
    s_load_dwordx2 s[4:5], s[0:1], 0x0
    v_mov_b32_e32 v1, 0
    v_mov_b32_e32 v2, 2
    global_atomic_add v3, v1, v2, s[4:5] sc0
    global_atomic_umax v1, v3, s[4:5] offset:4
    """
    launch(program(body), (3, 1, 1), 128, struct.pack("<Q", cell.ctypes.data), memory)
    assert cell.tolist() == [768, 766]


def test_counts_are_of_what_ran() -> None:
    body = (
        "s_mov_b32 s10, 3\n.LBB0_1:\nv_exp_f32_e32 v10, v1\nv_add_u32_e32 v11, v1, v1\n"
        "s_add_i32 s10, s10, -1\ns_cmp_lg_u32 s10, 0\ns_cbranch_scc1 .LBB0_1\nds_write_b32 v0, v1 offset:0"
    )
    data = np.zeros(64, U)
    memory = Memory()
    memory.add("d", data.ctypes.data, data.nbytes)
    text = "v_mov_b32_e32 v1, 0\nv_lshlrev_b32_e32 v0, 7, v0\n" + body
    got = launch(program(text, lds=8192), (2, 1, 1), 64, bytes(8), memory, profile=True)
    assert (got.of("slow"), got.of("valu"), got.of("lds"), got.of("salu")) == (6, 10, 2, 22)
    assert got.vector_clocks == 6 * 16 + 10 * 4
    assert got.conflicts() == 32.0  # a stride of 128 bytes puts all lanes on one bank
    assert (got - got).of("valu") == 0
