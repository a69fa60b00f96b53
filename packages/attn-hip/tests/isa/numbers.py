"""Arithmetic of the vector unit: pure functions of arrays, and the table of what each mnemonic computes.

A signature names the result's type, then the operands' (see ``operands.TYPES``).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Array = np.ndarray
_U32, _U64, _I64 = np.uint32, np.uint64, np.int64


def bf16_bits(x: Array) -> Array:
    """Round float32 to bfloat16, nearest even; a NaN stays one."""
    bits = np.asarray(x, np.float32).view(_U32)
    rounded = (bits + (_U32(0x7FFF) + ((bits >> _U32(16)) & _U32(1)))) >> _U32(16)
    return np.where(np.isnan(x), (bits >> _U32(16)) | _U32(0x40), rounded)


def bf16_float(bits: Array) -> Array:
    return (np.asarray(bits).astype(_U32) << _U32(16)).view(np.float32)


def _cut_half_bits(x: np.ndarray) -> np.ndarray:
    """Round towards zero to a half."""
    near = np.asarray(x).astype(np.float16)
    beyond = np.abs(near.astype(np.float32)) > np.abs(x)  # the next code towards zero is one less
    return near.view(np.uint16).astype(_U32) - beyond.astype(_U32)


def _half_bits(x: Array) -> Array:
    return np.asarray(x).astype(np.float16).view(np.uint16).astype(_U32)


def _flush(x: Array) -> Array:
    """Take denormals for zero, as transcendental instructions do."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x).astype(np.float32)


def _fma32(a: Array, b: Array, c: Array) -> Array:
    return (a.astype(np.float64) * b + c).astype(np.float32)  # rounds twice: off by a bit in rare ties


def _fma64(a: Array, b: Array, c: Array) -> Array:
    """Fused in extended precision, which has 11 bits more than a product's low half needs at worst."""
    return (a.astype(np.longdouble) * b + c).astype(np.float64)


def _to_int(kind: type) -> Callable[[Array], Array]:
    low, high = np.iinfo(kind).min, np.iinfo(kind).max

    def convert(x: Array) -> Array:
        return np.clip(np.nan_to_num(np.trunc(np.asarray(x, np.float64)), nan=0.0), low, high).astype(kind)

    return convert


def permute_bytes(a: Array, b: Array, selector: Array) -> Array:
    """v_perm_b32: byte i of the result is byte ``selector[i]`` of b (0..3) or a (4..7), or a constant."""
    both = (np.asarray(a).astype(_U64) << _U64(32)) | np.asarray(b).astype(_U64)
    out = _U32(0)
    for i in range(4):
        pick = (np.asarray(selector, _U32) >> _U32(8 * i)) & _U32(255)
        at = np.minimum(pick, 7).astype(_U64) * _U64(8)
        byte = (both >> at) & _U64(255)
        # 8 to 11: the sign of one of the four halves, eight times.
        half = ((np.minimum(pick, 11).astype(_U64) & _U64(3)) * _U64(16)) + _U64(15)
        sign = ((both >> half) & _U64(1)) * _U64(255)
        byte = np.where(pick < 8, byte, np.where(pick < 12, sign, np.where(pick == 12, _U64(0), _U64(255))))
        out = out | (byte.astype(_U32) << _U32(8 * i))
    return out


def bit_op3(a: Array, b: Array, c: Array, table: int) -> Array:
    out = _U32(0)
    for i in range(8):
        if table >> i & 1:
            out = out | ((a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c))
    return out


def _reverse(x: Array) -> Array:
    out = np.asarray(x, _U32)
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF)):
        out = ((out >> _U32(shift)) & _U32(mask)) | ((out & _U32(mask)) << _U32(shift))
    return (out >> _U32(16)) | (out << _U32(16))


def _leading(x: Array) -> Array:
    """v_ffbh_u32: zeros above the highest one, all ones for 0."""
    exact = np.asarray(x, _U32)
    _, exponent = np.frexp(exact.astype(np.float64))
    return np.where(exact == 0, _U32(0xFFFFFFFF), (32 - exponent).astype(_U32))


def _trailing(x: Array) -> Array:
    exact = np.asarray(x, _U32)
    return np.where(exact == 0, _U32(0xFFFFFFFF), _leading(exact & (~exact + _U32(1))) ^ _U32(31))


def _count_ones(x: Array, more: Array) -> Array:
    return np.bitwise_count(np.asarray(x, _U32)).astype(_U32) + more


def _fraction_field(x: Array, exponent: Array) -> Array:
    return np.ldexp(x, np.clip(exponent, -5000, 5000))


def _shift(x: Array, width: int) -> Array:
    return np.asarray(x) & (width - 1)


def _low24(x: Array) -> Array:
    return np.asarray(x).astype(_U64) & _U64(0xFFFFFF)


def _signed24(x: Array) -> Array:
    return (np.asarray(x).astype(_I64) << _I64(40)) >> _I64(40)


def _wrap(x: Array) -> Array:
    return (np.asarray(x) & 0xFFFFFFFF).astype(_U32)


def _align(bits: int) -> Callable[[Array, Array, Array], Array]:
    """v_alignbit_b32 and v_alignbyte_b32: 32 bits of a:b from a position."""

    def taken(a: Array, b: Array, at: Array) -> Array:
        both = (np.asarray(a).astype(_U64) << _U64(32)) | np.asarray(b).astype(_U64)
        return (both >> ((np.asarray(at) & _U32(31 if bits == 1 else 3)).astype(_U64) * _U64(bits))).astype(
            _U32
        )

    return taken


def _median(a: Array, b: Array, c: Array) -> Array:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def _extract(signed: bool) -> Callable[[Array, Array, Array], Array]:
    def field(x: Array, at: Array, width: Array) -> Array:
        at, width = np.asarray(at) & _U32(31), (np.asarray(width) & _U32(31)).astype(_I64)
        found = (np.asarray(x).astype(_I64) >> at.astype(_I64)) & ((_I64(1) << width) - _I64(1))
        if signed:
            found = np.where(
                (width > 0) & (found >> np.maximum(width - 1, 0) == 1), found - (1 << width), found
            )
        return (found & _I64(0xFFFFFFFF)).astype(_U32)

    return field


# Two integers go through 64 bits where numpy's own width would warn or overflow.
TABLE: dict[str, tuple[str, Callable[..., Array]]] = {
    "mov_b32": ("uu", lambda a: a),
    "accvgpr_write_b32": ("uu", lambda a: a),
    "accvgpr_read_b32": ("uu", lambda a: a),
    "accvgpr_mov_b32": ("uu", lambda a: a),
    "mov_b64": ("UU", lambda a: a),
    "not_b32": ("uu", np.invert),
    "bfrev_b32": ("uu", _reverse),
    "ffbh_u32": ("uu", _leading),
    "ffbl_b32": ("uu", _trailing),
    "bcnt_u32_b32": ("uuu", _count_ones),
    "exp_f32": ("ff", lambda a: _flush(np.exp2(_flush(a)))),
    "log_f32": ("ff", lambda a: np.log2(_flush(a))),
    "rcp_f32": ("ff", lambda a: _flush(np.float32(1) / _flush(a))),
    "rcp_iflag_f32": ("ff", lambda a: _flush(np.float32(1) / _flush(a))),
    "rsq_f32": ("ff", lambda a: np.float32(1) / np.sqrt(_flush(a))),
    "sqrt_f32": ("ff", np.sqrt),
    "rcp_f64": ("FF", lambda a: np.float64(1) / a),
    "floor_f32": ("ff", np.floor),
    "ceil_f32": ("ff", np.ceil),
    "trunc_f32": ("ff", np.trunc),
    "rndne_f32": ("ff", np.rint),
    "fract_f32": ("ff", lambda a: np.minimum(a - np.floor(a), np.float32(1 - 2.0**-24))),
    "floor_f64": ("FF", np.floor),
    "ceil_f64": ("FF", np.ceil),
    "trunc_f64": ("FF", np.trunc),
    "rndne_f64": ("FF", np.rint),
    "cvt_f32_u32": ("fu", lambda a: np.asarray(a).astype(np.float32)),
    "cvt_f32_i32": ("fi", lambda a: np.asarray(a).astype(np.float32)),
    "cvt_u32_f32": ("uf", _to_int(np.uint32)),
    "cvt_i32_f32": ("if", _to_int(np.int32)),
    "cvt_f64_i32": ("Fi", lambda a: np.asarray(a).astype(np.float64)),
    "cvt_f64_u32": ("Fu", lambda a: np.asarray(a).astype(np.float64)),
    "cvt_f64_f32": ("Ff", lambda a: np.asarray(a).astype(np.float64)),
    "cvt_f32_f64": ("fF", lambda a: np.asarray(a).astype(np.float32)),
    "cvt_i32_f64": ("iF", _to_int(np.int32)),
    "cvt_u32_f64": ("uF", _to_int(np.uint32)),
    "cvt_f16_f32": ("hf", lambda a: np.asarray(a).astype(np.float16)),
    "cvt_f32_f16": ("fh", lambda a: np.asarray(a).astype(np.float32)),
    "cvt_f32_bf16": ("fu", lambda a: bf16_float(np.asarray(a) & _U32(0xFFFF))),
    "cvt_f32_ubyte0": ("fu", lambda a: (np.asarray(a) & _U32(255)).astype(np.float32)),
    "cvt_f32_ubyte1": ("fu", lambda a: (np.asarray(a) >> _U32(8) & _U32(255)).astype(np.float32)),
    "cvt_f32_ubyte2": ("fu", lambda a: (np.asarray(a) >> _U32(16) & _U32(255)).astype(np.float32)),
    "cvt_f32_ubyte3": ("fu", lambda a: (np.asarray(a) >> _U32(24)).astype(np.float32)),
    "cvt_f16_u16": ("hs", lambda a: np.asarray(a).astype(np.float16)),
    "add_u32": ("uuu", np.add),
    "sub_u32": ("uuu", np.subtract),
    "subrev_u32": ("uuu", lambda a, b: b - a),
    "and_b32": ("uuu", np.bitwise_and),
    "or_b32": ("uuu", np.bitwise_or),
    "xor_b32": ("uuu", np.bitwise_xor),
    "lshlrev_b32": ("uuu", lambda a, b: b << _shift(a, 32)),
    "lshrrev_b32": ("uuu", lambda a, b: b >> _shift(a, 32)),
    "ashrrev_i32": ("iui", lambda a, b: b >> _shift(a, 32).astype(np.int32)),
    "lshlrev_b64": ("UuU", lambda a, b: b << _shift(a, 64).astype(_U64)),
    "lshrrev_b64": ("UuU", lambda a, b: b >> _shift(a, 64).astype(_U64)),
    "ashrrev_i64": ("IuI", lambda a, b: b >> _shift(a, 64).astype(_I64)),
    "lshlrev_b16": ("sss", lambda a, b: b << _shift(a, 16)),
    "lshrrev_b16": ("sss", lambda a, b: b >> _shift(a, 16)),
    "add_u16": ("sss", np.add),
    "sub_u16": ("sss", np.subtract),
    "mul_lo_u16": ("sss", np.multiply),
    "max_i16": ("jjj", np.maximum),
    "min_i16": ("jjj", np.minimum),
    "max_u16": ("sss", np.maximum),
    "min_u16": ("sss", np.minimum),
    "mul_f32": ("fff", np.multiply),
    "add_f32": ("fff", np.add),
    "sub_f32": ("fff", np.subtract),
    "subrev_f32": ("fff", lambda a, b: b - a),
    "max_f32": ("fff", np.fmax),
    "min_f32": ("fff", np.fmin),
    "ldexp_f32": ("ffi", _fraction_field),
    "add_f16": ("hhh", np.add),
    "sub_f16": ("hhh", np.subtract),
    "mul_f16": ("hhh", np.multiply),
    "max_f16": ("hhh", np.fmax),
    "min_f16": ("hhh", np.fmin),
    "add_f64": ("FFF", np.add),
    "mul_f64": ("FFF", np.multiply),
    "max_f64": ("FFF", np.fmax),
    "min_f64": ("FFF", np.fmin),
    "ldexp_f64": ("FFi", _fraction_field),
    "min_i32": ("iii", np.minimum),
    "max_i32": ("iii", np.maximum),
    "min_u32": ("uuu", np.minimum),
    "max_u32": ("uuu", np.maximum),
    "mul_u32_u24": ("uuu", lambda a, b: _wrap(_low24(a) * _low24(b))),
    "mul_i32_i24": ("uuu", lambda a, b: _wrap(_signed24(a) * _signed24(b))),
    "mul_lo_u32": ("uuu", np.multiply),
    "mul_hi_u32": ("uuu", lambda a, b: (np.asarray(a).astype(_U64) * b >> _U64(32)).astype(_U32)),
    "mul_hi_i32": ("uii", lambda a, b: _wrap(np.asarray(a).astype(_I64) * b >> _I64(32))),
    "bfm_b32": ("uuu", lambda a, b: ((_U32(1) << _shift(a, 32)) - _U32(1)) << _shift(b, 32)),
    "cvt_pk_bf16_f32": ("uff", lambda a, b: bf16_bits(a) | (bf16_bits(b) << _U32(16))),
    "cvt_pkrtz_f16_f32": ("uff", lambda a, b: _cut_half_bits(a) | (_cut_half_bits(b) << _U32(16))),
    "cvt_pk_f16_f32": ("uff", lambda a, b: _half_bits(a) | (_half_bits(b) << _U32(16))),
    "pack_b32_f16": (
        "uss",
        lambda a, b: np.asarray(a).astype(_U32) | (np.asarray(b).astype(_U32) << _U32(16)),
    ),
    "add3_u32": ("uuuu", lambda a, b, c: a + b + c),
    "xad_u32": ("uuuu", lambda a, b, c: (a ^ b) + c),
    "bfe_u32": ("uuuu", _extract(False)),
    "bfe_i32": ("uuuu", _extract(True)),
    "bfi_b32": ("uuuu", lambda a, b, c: (a & b) | (~a & c)),
    "perm_b32": ("uuuu", permute_bytes),
    "alignbit_b32": ("uuuu", _align(1)),
    "alignbyte_b32": ("uuuu", _align(8)),
    "fma_f32": ("ffff", _fma32),
    "fma_f64": ("FFFF", _fma64),
    "max3_f32": ("ffff", lambda a, b, c: np.fmax(np.fmax(a, b), c)),
    "min3_f32": ("ffff", lambda a, b, c: np.fmin(np.fmin(a, b), c)),
    "maximum3_f32": ("ffff", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "med3_f32": ("ffff", _median),
    "med3_i32": ("iiii", _median),
    "med3_u32": ("uuuu", _median),
    "max3_i32": ("iiii", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "min3_i32": ("iiii", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "max3_u32": ("uuuu", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "min3_u32": ("uuuu", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    "lshl_or_b32": ("uuuu", lambda a, b, c: (a << _shift(b, 32)) | c),
    "lshl_add_u32": ("uuuu", lambda a, b, c: (a << _shift(b, 32)) + c),
    "add_lshl_u32": ("uuuu", lambda a, b, c: (a + b) << _shift(c, 32)),
    "and_or_b32": ("uuuu", lambda a, b, c: (a & b) | c),
    "or3_b32": ("uuuu", lambda a, b, c: a | b | c),
    "lshl_add_u64": ("UUuU", lambda a, b, c: (a << np.asarray(b).astype(_U64)) + c),
    "mad_u32_u24": ("uuuu", lambda a, b, c: _wrap(_low24(a) * _low24(b)) + c),
    "mad_i32_i24": ("uuuu", lambda a, b, c: _wrap(_signed24(a) * _signed24(b)) + c),
    # The operands of a division come unscaled from v_div_scale here, so the quotient is made in one step.
    "div_fmas_f32": ("ffff", _fma32),
    "div_fmas_f64": ("FFFF", _fma64),
    "div_fixup_f32": ("ffff", lambda a, b, c: c / b),
    "div_fixup_f64": ("FFFF", lambda a, b, c: c / b),
}
