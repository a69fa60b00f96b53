"""The interpreter itself: families of instructions against numpy."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from .asm import program, run
from .isa import Memory, Undefined, Unknown, launch

RNG = np.random.default_rng(7)


def integers(n: int = 64) -> np.ndarray:
    special = np.array([0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFF, 0x10000], np.uint32)
    return np.concatenate([special, RNG.integers(0, 2**32, n - len(special), np.uint32)])


def floats(n: int = 64) -> np.ndarray:
    special = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e30], np.float32)
    return np.concatenate([special, RNG.standard_normal(n - len(special)).astype(np.float32)])


U, S = np.uint32, np.int32
A, B, C = integers(), RNG.permutation(integers()), RNG.permutation(integers())
X, Y, Z = floats(), RNG.permutation(floats()), RNG.permutation(floats())
SMALL = RNG.integers(0, 32, 64, U)


@pytest.mark.parametrize(
    ("text", "operands", "wanted"),
    [
        ("v_add_u32_e32 v10, v1, v2", (A, B), A + B),
        ("v_subrev_u32_e32 v10, v1, v2", (A, B), B - A),
        ("v_xor_b32_e32 v10, 0x5a5a, v1", (A,), A ^ U(0x5A5A)),
        ("v_ashrrev_i32_e32 v10, v1, v2", (SMALL, B), (B.view(S) >> SMALL.view(S)).view(U)),
        ("v_mul_hi_u32 v10, v1, v2", (A, B), (A.astype(np.uint64) * B >> np.uint64(32)).astype(U)),
        ("v_mul_i32_i24_e32 v10, -3, v1", (SMALL,), (SMALL.view(S) * -3).view(U)),
        ("v_bfe_u32 v10, v1, 4, 7", (A,), (A >> U(4)) & U(127)),
        ("v_bfe_i32 v10, v1, 0, 8", (A,), (A.view(S) << 24 >> 24).view(U)),
        ("v_bfi_b32 v10, v1, v2, v3", (A, B, C), (A & B) | (~A & C)),
        ("v_perm_b32 v10, v1, v2, 0x01060c07", (A, B), 0),
        ("v_perm_b32 v10, v1, v2, 0x0a08000b", (A, B), (B & U(255)) << U(8)
         | np.where(A >> U(31), U(0xFF), U(0)) | np.where(B >> U(15) & U(1), U(0xFF0000), U(0))
         | np.where(A >> U(15) & U(1), U(0xFF000000), U(0))),
        ("v_alignbit_b32 v10, v1, v2, 12", (A, B), (B >> U(12)) | (A << U(20))),
        ("v_lshl_add_u32 v10, v1, 3, v2", (A, B), (A << U(3)) + B),
        ("v_and_or_b32 v10, v1, v2, v3", (A, B, C), (A & B) | C),
        ("v_med3_i32 v10, v1, v2, v3", (A, B, C), np.sort(np.stack([A, B, C]).view(S), 0)[1].view(U)),
        ("v_cndmask_b32_e64 v10, v1, v2, 0xff", (A, B), np.where(np.arange(64) < 8, B, A)),
        ("v_bfrev_b32_e32 v10, v1", (A,), [int(f"{int(a):032b}"[::-1], 2) for a in A]),
        ("v_bcnt_u32_b32 v10, v1, v2", (A, B), np.array([int(a).bit_count() for a in A], U) + B),
        ("v_ffbh_u32_e32 v10, v1", (A,), [32 - int(a).bit_length() if a else 2**32 - 1 for a in A]),
        ("v_ffbl_b32_e32 v10, v1", (A,),
         [(int(a) & -int(a)).bit_length() - 1 if a else 2**32 - 1 for a in A]),
        ("v_bitop3_b32 v10, v1, v2, v3 bitop3:0xca", (A, B, C), (A & B) | (~A & C)),
        ("v_mbcnt_lo_u32_b32 v10, -1, 0", (A,), np.minimum(np.arange(64), 32)),
        ("v_mbcnt_hi_u32_b32 v10, -1, 0", (A,), np.maximum(np.arange(64) - 32, 0)),
        ("v_or_b32_sdwa v10, v1, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:DWORD",
         (A, B), (A >> U(16)) | B),
        ("v_and_b32_sdwa v10, sext(v1), v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_1 "
         "src1_sel:DWORD", (A, B), (A.view(S) << 16 >> 24).view(U) & B),
        ("v_mov_b32_e32 v10, v1\nv_or_b32_sdwa v10, v2, v3 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE "
         "src0_sel:DWORD src1_sel:DWORD", (A, B, C), (A & U(0xFFFF)) | (((B | C) & U(0xFFFF)) << U(16))),
    ],
)  # fmt: skip
def test_integer_instructions(text: str, operands: tuple[np.ndarray, ...], wanted: object) -> None:
    arch = "gfx950" if "bitop3" in text else "gfx942"
    if "0x01060c07" in text:
        both = (A.astype(np.uint64) << np.uint64(32)) | B
        byte = [((both >> np.uint64(8 * n)) & np.uint64(255)).astype(U) for n in range(8)]
        wanted = byte[7] | (byte[6] << U(16)) | (byte[1] << U(24))
    np.testing.assert_array_equal(run(text, operands, arch=arch)[0], np.asarray(wanted).astype(U))


with np.errstate(all="ignore"):
    FLOAT_CASES = [
        ("v_mul_f32_e32 v10, v1, v2", (X, Y), X * Y),
        ("v_sub_f32_e64 v10, |v1|, -v2", (X, Y), np.abs(X) + Y),
        ("v_add_f32_e64 v10, v1, v2 clamp", (X, Y), np.fmin(np.fmax(X + Y, 0), 1)),
        ("v_mul_f32_e64 v10, v1, v2 mul:2", (X, Y), X * Y * 2),
        ("v_fma_f32 v10, v1, v2, -v3", (X, Y, Z), (X.astype(float) * Y - Z).astype(np.float32)),
        ("v_mov_b32_e32 v10, v3\nv_fmac_f32_e32 v10, 0.5, v2", (X, Y, Z),
         (0.5 * Y.astype(float) + Z).astype(np.float32)),
        ("v_max3_f32 v10, v1, v2, v3", (X, Y, Z), np.fmax(np.fmax(X, Y), Z)),
        ("v_exp_f32_e32 v10, v1", (X,), np.exp2(X)),
        ("v_log_f32_e32 v10, v1", (X,), np.log2(X)),
        ("v_ldexp_f32 v10, v1, 3", (X,), X * 8),
        ("v_rndne_f32_e32 v10, v1", (X,), np.rint(X)),
        ("v_cvt_f32_i32_e32 v10, v1", (A,), A.view(S).astype(np.float32)),
        ("v_cvt_f32_ubyte2_e32 v10, v1", (A,), (A >> U(16) & U(255)).astype(np.float32)),
        ("v_div_scale_f32 v20, vcc, v2, v2, v1\nv_div_fmas_f32 v21, v20, v20, v20\n"
         "v_div_fixup_f32 v10, v21, v2, v1", (X, Y), X / Y),
    ]  # fmt: skip


@pytest.mark.parametrize(("text", "operands", "wanted"), FLOAT_CASES)
def test_float_instructions(text: str, operands: tuple[np.ndarray, ...], wanted: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(run(text, operands)[0].view(np.float32), wanted.astype(np.float32))


def test_conversions_of_small_floats() -> None:
    import torch

    x = np.concatenate(
        [X, RNG.standard_normal(64).astype(np.float32) * 300, [448, 464, 465, 240, 248, 249, 2e-3, 1e-3]]
    )
    x = np.pad(x, (0, 192 - len(x))).astype(np.float32)
    for arch, kind in (("gfx942", torch.float8_e4m3fnuz), ("gfx950", torch.float8_e4m3fn)):
        got = run(
            "v_mov_b32_e32 v10, 0\nv_cvt_pk_fp8_f32 v10, v1, v1 op_sel:[0,0,1]", [x], arch=arch, threads=192
        )[0]
        assert not (got & U(0xFFFF)).any()
        codes = (got >> U(16) & U(255)).astype(np.uint8)
        np.testing.assert_array_equal(codes, (got >> U(24)).astype(np.uint8))
        # torch saturates nothing either: what is too large becomes NaN
        wanted = torch.from_numpy(x).to(kind).float().numpy()
        np.testing.assert_array_equal(torch.from_numpy(codes).view(kind).float().numpy(), wanted)
        every = np.arange(192, dtype=U)
        back = run(
            "v_cvt_f32_fp8_sdwa v10, v1 src0_sel:BYTE_1\nv_cvt_pk_f32_fp8_e32 v[12:13], v2\n"
            "v_mov_b32_e32 v11, v13",
            [every << U(8), every << U(8) | U(3)],
            2,
            arch=arch,
            threads=192,
        )
        table = torch.arange(192, dtype=torch.uint8).view(kind).float().numpy()
        np.testing.assert_array_equal(back.view(np.float32), np.stack([table, table]))
    cut = run("v_cvt_pkrtz_f16_f32 v10, v1, v1", [x], threads=192)[0].view(np.float16).reshape(192, 2)
    with np.errstate(over="ignore"):
        near = x.astype(np.float16)
    inward = np.abs(near.astype(np.float32)) > np.abs(x)
    back = np.where(inward, np.nextafter(near, np.float16(0)), near)
    np.testing.assert_array_equal(cut, np.stack([back, back], 1))
    words = np.random.default_rng(3).integers(0, 2**32, 192, U)
    pairs = run(
        "v_cvt_scalef32_pk_bf16_fp8 v10, v1, 1.0\nv_cvt_scalef32_pk_f16_fp8 v11, v1, 1.0 op_sel:[1,0,0]",
        [words], 2, arch="gfx950", threads=192,
    )  # fmt: skip
    codes = torch.from_numpy(words.view(np.uint8).reshape(-1, 2, 2)).view(torch.float8_e4m3fn).float()
    for half, kind in enumerate((torch.bfloat16, torch.float16)):
        got = torch.from_numpy(pairs[half].view(np.int16).reshape(-1, 2)).view(kind).float()
        torch.testing.assert_close(got, codes[:, half], rtol=0, atol=0, equal_nan=True)
    half = run("v_cvt_f16_f32_e32 v20, v1\nv_cvt_f32_f16_e32 v10, v20", [x], threads=192)[0].view(np.float32)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(half, x.astype(np.float16).astype(np.float32))
    brain = run(
        "v_cvt_pk_bf16_f32 v20, v1, v1\nv_and_b32_e32 v10, 0xffff0000, v20", [x], arch="gfx950", threads=192
    )[0]
    np.testing.assert_array_equal(brain.view(np.float32), torch.from_numpy(x).bfloat16().float().numpy())


def test_doubles_and_wide_integers() -> None:
    d = RNG.standard_normal(64)
    low, high = d.view(U)[::2].copy(), d.view(U)[1::2].copy()
    body = "v_mov_b32_e32 v20, v1\nv_mov_b32_e32 v21, v2\n{}\nv_mov_b32_e32 v10, v30\nv_mov_b32_e32 v11, v31"
    for text, wanted in (
        ("v_add_f64 v[30:31], v[20:21], 1.0", d + 1),
        ("v_mul_f64 v[30:31], v[20:21], -v[20:21]", -d * d),
        ("v_fma_f64 v[30:31], v[20:21], v[20:21], 0x3ff00000", d * d + 1),
        ("v_trunc_f64_e32 v[30:31], v[20:21]", np.trunc(d)),
    ):
        got = run(body.format(text), [low, high], 2)
        np.testing.assert_allclose(
            (got[1].astype(np.uint64) << np.uint64(32) | got[0]).view(float), wanted, rtol=2e-16
        )
    wide = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    for text, wanted in (
        ("v_lshl_add_u64 v[30:31], v[20:21], 3, v[20:21]", (wide << np.uint64(3)) + wide),
        ("v_lshrrev_b64 v[30:31], 7, v[20:21]", wide >> np.uint64(7)),
        ("v_mad_u64_u32 v[30:31], s[10:11], v20, v21, v[20:21]", low.astype(np.uint64) * high + wide),
        (
            "v_mad_i64_i32 v[30:31], s[10:11], v20, v21, 5",
            (low.view(S).astype(np.int64) * high.view(S) + 5).view(np.uint64),
        ),
        ("v_add_co_u32_e32 v30, vcc, v20, v20\nv_addc_co_u32_e32 v31, vcc, v21, v21, vcc", wide + wide),
    ):
        got = run(body.format(text), [low, high], 2)
        np.testing.assert_array_equal(got[1].astype(np.uint64) << np.uint64(32) | got[0], wanted)


def test_packed_pairs_choose_halves_and_signs() -> None:
    body = "v_mov_b32_e32 v20, v1\nv_mov_b32_e32 v21, v2\nv_mov_b32_e32 v22, v3\nv_mov_b32_e32 v23, v4\n"
    w = RNG.standard_normal((4, 64)).astype(np.float32)
    got = run(body + "v_pk_mul_f32 v[10:11], v[20:21], v[22:23]", list(w), 2).view(np.float32)
    np.testing.assert_array_equal(got, w[:2] * w[2:])
    got = run(
        body + "v_pk_add_f32 v[10:11], v[20:21], v[22:23] op_sel:[1,0] op_sel_hi:[0,1] neg_hi:[1,0]",
        list(w),
        2,
    )
    np.testing.assert_array_equal(got.view(np.float32), [w[1] + w[2], -w[0] + w[3]])
    got = run(body + "v_pk_mov_b32 v[10:11], v[20:21], v[22:23] op_sel:[1,0]", list(w), 2).view(np.float32)
    np.testing.assert_array_equal(got, [w[1], w[2]])
    with pytest.raises(Unknown, match="upper half"):
        run(body + "v_pk_mul_f32 v[10:11], v[20:21], 2.0", list(w), 2)


def test_packed_halves_choose_halves_and_signs() -> None:
    w = RNG.standard_normal((2, 64, 2)).astype(np.float16)
    a, b = (x.reshape(64, 2).copy().view(U)[:, 0] for x in w)

    def halves(text: str) -> np.ndarray:
        return run(text, [a, b])[0].view(np.float16).reshape(64, 2)

    np.testing.assert_array_equal(halves("v_pk_mul_f16 v10, v1, v2"), w[0] * w[1])
    np.testing.assert_array_equal(
        halves("v_pk_add_f16 v10, v1, v2 op_sel:[1,0] op_sel_hi:[0,1] neg_lo:[0,1]"),
        np.stack([w[0, :, 1] - w[1, :, 0], w[0, :, 0] + w[1, :, 1]], axis=1),
    )
    np.testing.assert_array_equal(halves("v_pk_mul_f16 v10, v1, 2.0 op_sel_hi:[1,0]"), w[0] * 2)
    signed = np.ascontiguousarray(w[0]).view(np.int16)
    np.testing.assert_array_equal(
        halves("v_pk_ashrrev_i16 v10, 3, v1 op_sel_hi:[0,1]").view(np.int16), signed >> 3
    )
    np.testing.assert_array_equal(halves("v_pk_mul_f16 v10, v1, 0x40004200"), w[0] * np.float16([3, 2]))
    with pytest.raises(Unknown, match=r"upper half of 2\.0"):
        halves("v_pk_mul_f16 v10, v1, 2.0")


def test_mixed_precision_sums() -> None:
    halves = RNG.standard_normal((64, 2)).astype(np.float16)
    packed, y = halves.copy().view(U)[:, 0], RNG.standard_normal(64).astype(np.float32)
    text = "v_fma_mix_f32 v10, v1, v2, -v2 op_sel:[1,0,0] op_sel_hi:[1,0,0]"
    wanted = (halves[:, 1].astype(float) * y - y).astype(np.float32)
    np.testing.assert_array_equal(run(text, [packed, y.view(U)])[0].view(np.float32), wanted)
    text = "v_fma_mixlo_f16 v10, v1, v2, 0 op_sel_hi:[1,0,0]\nv_fma_mixhi_f16 v10, v2, v2, 1.0"
    got = run(text, [packed, y.view(U)])[0].view(np.float16).reshape(64, 2)
    low, high = halves[:, 0].astype(np.float32) * y, (y.astype(float) * y + 1).astype(np.float32)
    np.testing.assert_array_equal(got, np.stack([low, high], axis=1).astype(np.float16))


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
