"""Every check that the interpreter makes, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from .asm import HEAD, TAIL, program, run
from .isa import Divergence, Memory, OutOfBounds, Program, Race, Undefined, Unknown, Unwaited, launch

U = np.uint32
A, B = np.random.default_rng(7).integers(0, 2**32, (2, 64), U)


def test_global_accesses_stay_in_their_buffers() -> None:
    with pytest.raises(OutOfBounds, match=r"load of 4 bytes at byte 256 of inputs, which has 256"):
        run("global_load_dword v10, v100, s[4:5] offset:4", [A])
    with pytest.raises(OutOfBounds, match="load of 4 bytes at byte -4 of inputs"):
        run("global_load_dword v10, v100, s[4:5] offset:-4", [A])
    with pytest.raises(OutOfBounds, match="read-only"):
        run("global_store_dword v100, v1, s[4:5]", [A])
    with pytest.raises(OutOfBounds, match="kernarg"):
        run("s_load_dword s10, s[0:1], 0x10", [A])


def test_shared_accesses_stay_in_what_was_declared() -> None:
    with pytest.raises(OutOfBounds, match="shared memory: 4 bytes at 252 of 252"):
        run("ds_write_b32 v100, v1", [A], lds=252)
    with pytest.raises(OutOfBounds, match="not aligned"):
        run("ds_write_b64 v100, v[1:2]", [A, B], lds=1024)


HAND_OVER = """
    ds_write_b32 v100, v1
    {first}
    v_xor_b32_e32 v101, 0x100, v100
    ds_read_b32 v10, v101
    {second}
    ds_write_b32 v100, v10
"""


def test_waves_need_barriers_between_them() -> None:
    body = HAND_OVER.format(first="s_barrier", second="s_barrier")
    got = run(body, [np.arange(128, dtype=U)], lds=512, threads=128)[0]
    assert got.tolist() == [n ^ 64 for n in range(128)]
    with pytest.raises(Race, match=r"reads byte .* wrote since the last barrier"):
        run(HAND_OVER.format(first="", second="s_barrier"), [np.arange(128, dtype=U)], lds=512, threads=128)
    with pytest.raises(Race, match=r"writes byte .* read since the last barrier"):
        run(HAND_OVER.format(first="s_barrier", second=""), [np.arange(128, dtype=U)], lds=512, threads=128)
    with pytest.raises(Race, match=r"writes byte .* wrote since"):
        run(
            "v_and_b32_e32 v101, 0xff, v100\nds_write_b32 v101, v1\nv_mov_b32_e32 v10, 0",
            [np.arange(128, dtype=U)],
            lds=256,
            threads=128,
        )


def test_blocks_do_not_meet_in_one_launch() -> None:
    with pytest.raises(Race, match=r"block \d writes byte 0 of results, which block \d wrote in this launch"):
        run("v_mov_b32_e32 v10, v1", [A], blocks=2)


def test_undefined_values_are_followed_to_where_they_matter() -> None:
    with pytest.raises(Undefined, match="a stored value depends on v10"):
        run("v_add_u32_e32 v10, v1, v50", [A])
    with pytest.raises(Undefined, match="an address depends on v50"):
        run("global_load_dword v10, v50, s[4:5]", [A])
    with pytest.raises(Undefined, match="a branch depends on scc"):
        run("s_cmp_eq_u32 s50, 0\ns_cbranch_scc1 .L\n.L:\nv_mov_b32_e32 v10, 0", [A])
    with pytest.raises(Undefined, match="the exec mask depends on exec"):
        run("v_cmp_gt_u32_e32 vcc, v50, v1\ns_and_saveexec_b64 s[10:11], vcc\nv_mov_b32_e32 v10, 0", [A])
    with pytest.raises(Undefined, match="stored value"):
        run("ds_read_b32 v10, v100", [A], lds=256)
    with pytest.raises(Undefined, match="stored value"):
        run("v_cmp_gt_u32_e32 vcc, 8, v0\nv_cndmask_b32_e32 v10, v1, v50, vcc", [A])


def test_undefined_bits_that_do_not_matter_are_let_pass() -> None:
    np.testing.assert_array_equal(run("v_and_b32_e32 v20, 0, v50\nv_or_b32_e32 v10, v20, v1", [A])[0], A)
    np.testing.assert_array_equal(
        run("v_cmp_gt_u32_e64 vcc, 99, v0\nv_cndmask_b32_e32 v10, v50, v1, vcc", [A])[0], A
    )
    np.testing.assert_array_equal(
        run("v_lshl_or_b32 v20, v50, 16, v1\nv_and_b32_e32 v10, 0xffff, v20", [A])[0], A & U(0xFFFF)
    )
    body = (
        "v_mov_b32_e32 v20, v1\nv_mad_u64_u32 v[30:31], s[10:11], v20, v20, v[20:21]\nv_mov_b32_e32 v10, v30"
    )
    np.testing.assert_array_equal(run(body, [A])[0], A * A + A)


COPY = """
    s_mov_b32 m0, 0
    global_load_lds_dword v100, s[4:5]
    {wait}
    ds_read_b32 v10, v100
"""


def test_copies_into_shared_memory_are_waited_for() -> None:
    np.testing.assert_array_equal(run(COPY.format(wait="s_waitcnt vmcnt(0)"), [A], lds=256)[0], A)
    with pytest.raises(Unwaited, match="before the copy into it was waited for"):
        run(COPY.format(wait="s_waitcnt lgkmcnt(0)"), [A], lds=256)
    with pytest.raises(Unwaited):
        run(COPY.format(wait="s_waitcnt vmcnt(1)"), [A], lds=256)
    later = "global_load_dword v12, v100, s[4:5]\ns_waitcnt vmcnt(1)"
    np.testing.assert_array_equal(run(COPY.format(wait=later), [A], lds=256)[0], A)


def test_barriers_that_some_waves_miss_are_reported() -> None:
    body = "v_readfirstlane_b32 s10, v0\ns_cmp_eq_u32 s10, 0\ns_cbranch_scc1 .L\n"
    body += "s_barrier\n.L:\nv_mov_b32_e32 v10, 0"
    with pytest.raises(Divergence):
        run(body, [np.arange(128, dtype=U)], threads=128)


@pytest.mark.parametrize(
    "text",
    [
        "v_frobnicate_b32 v10, v1",
        "v_add_f16_dpp v10, v1, v1 wave_shl:1",
        "v_mul_f16_e64 v10, v1, v1 op_sel:[1,0,0]",
        "v_mfma_f32_16x16x16_bf16 v[20:23], v[2:3], v[4:5], v[20:23] cbsz:1",
        "v_mfma_f32_16x16x4_f32 v[20:23], v2, v4, v[20:23]",
        "s_sendmsg sendmsg(MSG_INTERRUPT)",
        "ds_read_b32 v10, v100 gds",
        "buffer_load_dword v10, v1, s[8:11], 0 offen",
        "v_mov_b32_e32 v10, lds_direct",
        "s_mov_b64 s[10:11], 0xffffffff",
    ],
)
def test_what_is_not_modelled_is_refused(text: str) -> None:
    assert program(text).unknown() == [text]
    with pytest.raises(Unknown):
        run(f"v_mov_b32_e32 v10, 0\n{text}", [A])


def test_other_inputs_of_a_kernel_are_refused() -> None:
    with pytest.raises(Unknown, match="no kernel other"):
        Program.parse(HEAD.format(arch="gfx942") + TAIL.format(lds=0), "other")
    text = HEAD.format(arch="gfx942") + TAIL.format(lds=0)
    for was, now in (
        ("user_sgpr_count 2", "user_sgpr_dispatch_ptr 1"),
        ("sgpr_count 2", "sgpr_count 4"),
    ):
        with pytest.raises(Unknown):
            Program.parse(text.replace(was, now), "k")
    with pytest.raises(ValueError, match="multiple of 64"):
        launch(program(""), (1, 1, 1), 32, b"", Memory())
