"""The interpreter itself: arithmetic, packed and conversions, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from .asm import integers, run
from .isa import Unknown

RNG = np.random.default_rng(7)


def floats(n: int = 64) -> np.ndarray:
    special = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e30], np.float32)
    return np.concatenate([special, RNG.standard_normal(n - len(special)).astype(np.float32)])


U, S = np.uint32, np.int32
A, B, C = integers(RNG), RNG.permutation(integers(RNG)), RNG.permutation(integers(RNG))
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


def test_conversions_of_five_bits_of_exponent() -> None:
    import torch

    every = np.arange(256, dtype=U)
    for arch, kind in (("gfx942", torch.float8_e5m2fnuz), ("gfx950", torch.float8_e5m2)):
        table = torch.arange(256, dtype=torch.uint8).view(kind).float().numpy()
        back = run(
            "v_cvt_f32_bf8_sdwa v10, v1 src0_sel:BYTE_1\nv_cvt_pk_f32_bf8_sdwa v[12:13], v2 src0_sel:WORD_1\n"
            "v_mov_b32_e32 v11, v13",
            [every << U(8), every << U(24) | U(3)], 2, arch=arch, threads=256,
        )  # fmt: skip
        np.testing.assert_array_equal(back.view(np.float32), np.stack([table, table]))
    pairs = run(
        "v_cvt_scalef32_pk_bf16_bf8 v10, v1, 1.0\nv_cvt_scalef32_pk_f16_bf8 v11, v1, 1.0 op_sel:[1,0,0]",
        [every | every[::-1] << U(24)], 2, arch="gfx950", threads=256,
    )  # fmt: skip
    np.testing.assert_array_equal((pairs[0] << U(16)).view(np.float32), table)
    np.testing.assert_array_equal((pairs[1] >> U(16)).astype(np.uint16).view(np.float16), table[::-1])


def test_maxima_of_whole_halves() -> None:
    words = np.random.default_rng(4).integers(0, 2**32, 192, U)
    got = run("s_movk_i32 s20, 0x4000\nv_pk_max_u16 v10, v1, s20 op_sel_hi:[1,0]", [words], threads=192)[0]
    wanted = np.maximum(words.view(np.uint16), np.uint16(0x4000))
    np.testing.assert_array_equal(got.view(np.uint16), wanted)


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
