"""FP8 E4M3: see `requant.kernels.fp8`."""

from __future__ import annotations

from typing import Any

import numpy as np

from requant.kernels.floats import Float, f32, u32
from requant.kernels.fp8 import BLOCK, Rounding

from .floats import (
    amax_bits,
    first_nonfinite,
    first_nonfinite_from,
    magnitude,
    narrow,
    narrow_row,
    widen,
)
from .jit import bits_of, float_of, kernel, left, right, scratch

_MAX = f32(448)
_SMALLEST_NORMAL = u32(121 << 23)  # 2^-6
_ONE = u32(127 << 23)
_NAN = u32(0x7FC00000)
_CHUNK = 8192  # what fits the innermost cache
_DECODED = 2048
_values, _words = scratch(np.float32, _DECODED), scratch(np.uint32, _DECODED)


@kernel
def quotient_of(magnitude: Any, scale: Any, rounding: Rounding) -> Any:
    """Return ``rnd(magnitude / scale)``, clamped to 448, of a float32 magnitude's bits."""
    quotient = bits_of(min(float_of(magnitude) / scale, _MAX))
    tie = right(quotient, rounding.drop) & rounding.odd
    return float_of(u32((quotient + rounding.bias + tie) & rounding.keep))


@kernel
def exponent_of(a: Any) -> Any:
    """Return the exponent bits of a magnitude, those of E4M3's smallest normal for what lies below."""
    return max(u32(bits_of(a) & u32(0x7F800000)), _SMALLEST_NORMAL)


@kernel
def anchor_of(exponent: Any) -> Any:
    """Return 2^(e+20) for exponent bits e: added to a value of that exponent, it rounds it to a multiple of 2^(e-3)."""
    return float_of(u32(exponent + u32(20 << 23)))


@kernel
def code_of(anchored: Any, exponent: Any) -> Any:
    """Return the E4M3 code of a magnitude to which its anchor has been added.

    That leaves its multiple of 2^(e-3) in the low byte, 8 at 2^e and 16 at 2^(e+1): the code, but for 8 per binade
    above the smallest normal.
    """
    return u32(bits_of(anchored) + right(exponent - _SMALLEST_NORMAL, u32(20)))


@kernel
def _signed_code(bits: Any, scale: Any, dtype: Float, rounding: Rounding) -> Any:
    """Return the E4M3 code of ``rnd(value / scale)``, clamped to +-448, rounded to nearest even.

    ``bits`` are BF16 or F32: moved to the top of a word they are the float32 of the same value.
    """
    pattern = left(u32(bits), dtype.shift)
    a = quotient_of(pattern & u32(0x7FFFFFFF), scale, rounding)
    exponent = exponent_of(a)
    code = code_of(a + anchor_of(exponent), exponent)
    return np.uint8(code | (right(pattern, u32(24)) & u32(0x80)))


@kernel
def _value(code: Any) -> Any:
    """Return the float32 value of an E4M3 code."""
    a = u32(code) & u32(0x7F)
    sign = left(u32(code) & u32(0x80), u32(24))
    # A subnormal is read one binade up as 2^-6 + m * 2^-9.
    normal = a >= u32(8)
    base = u32(120 << 23) if normal else _SMALLEST_NORMAL
    surplus = f32(0) if normal else f32(2**-6)
    value = bits_of(float_of(u32(left(a, u32(20)) + base)) - surplus)
    return float_of(sign | (value if a < u32(0x7F) else _NAN))


@kernel
def _raise_to(amax_bits: Any, w: Any, dtype: Float) -> None:
    """Raise each column's largest magnitude pattern so far to that of the row ``w``."""
    mask = w.dtype.type(dtype.magnitude)
    for c in range(w.size):
        pattern = w.dtype.type(w[c] & mask)
        amax_bits[c] = pattern if pattern > amax_bits[c] else amax_bits[c]


@kernel
def scale_bits(amax: Any, dtype: Float, power_of_two: bool) -> Any:
    """Return the bits of ``rnd(amax / 448)``, or of the dtype's eps where that is zero.

    ``power_of_two``: of ``2^ceil(log2(amax / 448))`` instead, not below the dtype's smallest normal number (F16: its
    smallest subnormal), and 1 where amax is zero.
    """
    if not power_of_two:
        bits = narrow(f32(amax / _MAX), dtype)
        return bits if bits else narrow(dtype.eps, dtype)
    # 448 is 1.75 * 2^8: rounded up unless the significand is at most 1.75.
    raised = right(u32(bits_of(amax) + u32(0x1FFFFF)), u32(23))
    power = left(u32(max(raised, u32(9)) - u32(8)), u32(23))
    bits = narrow(float_of(power if amax > f32(0) else _ONE), dtype)
    return bits if bits else u32(1)


@kernel
def encode_channel(
    w: Any, dtype: Float, rounding: Rounding, scale_dtype: Float, power_of_two: bool, codes: Any, scales: Any
) -> Any:
    """Return where the first NaN or infinity is, or -1, as the other encoders do."""
    rows, cols = w.shape
    for r in range(rows):
        largest = amax_bits(w[r], dtype)
        if u32(largest) >= dtype.infinity:
            return r * cols + first_nonfinite(w[r], dtype)
        scales[r, 0] = scale_bits(magnitude(largest, dtype), scale_dtype, power_of_two)
        scale = magnitude(scales[r, 0], scale_dtype)
        for c in range(cols):
            codes[r, c] = _signed_code(w[r, c], scale, dtype, rounding)
    return -1


@kernel
def encode_block(
    w: Any,
    dtype: Float,
    rounding: Rounding,
    scale_dtype: Float,
    power_of_two: bool,
    column_amax: Any,
    divisors: Any,
    codes: Any,
    scales: Any,
) -> Any:
    """``column_amax``, of the dtype of ``w``, and ``divisors``, float32, both [cols], are room to work in."""
    rows, cols = w.shape
    for top in range(0, rows, BLOCK):
        bottom = min(top + BLOCK, rows)
        column_amax[:] = 0
        for r in range(top, bottom):
            _raise_to(column_amax, w[r], dtype)
        for b in range(scales.shape[1]):
            start, stop = b * BLOCK, min(b * BLOCK + BLOCK, cols)
            largest = amax_bits(column_amax[start:stop], dtype)
            if u32(largest) >= dtype.infinity:
                return first_nonfinite_from(w, top, dtype)
            scales[top // BLOCK, b] = scale_bits(magnitude(largest, dtype), scale_dtype, power_of_two)
            divisors[start:stop] = magnitude(scales[top // BLOCK, b], scale_dtype)
        for r in range(top, bottom):
            for c in range(cols):
                codes[r, c] = _signed_code(w[r, c], divisors[c], dtype, rounding)
    return -1


@kernel
def encode_tensor(
    w: Any, dtype: Float, rounding: Rounding, scale_dtype: Float, power_of_two: bool, amax: Any, codes: Any, scales: Any
) -> Any:
    """Encode ``w`` [n] to ``codes`` [n]."""
    scales[0] = scale_bits(amax, scale_dtype, power_of_two)
    scale = magnitude(scales[0], scale_dtype)
    for start in range(0, w.size, _CHUNK):
        chunk = w[start : start + _CHUNK]
        if u32(amax_bits(chunk, dtype)) >= dtype.infinity:
            return start + first_nonfinite(chunk, dtype)
        for i in range(start, start + chunk.size):
            codes[i] = _signed_code(w[i], scale, dtype, rounding)
    return -1


@kernel
def decode(
    codes: Any,
    scales: Any,
    scale_dtype: Float,
    height: int,
    width: int,
    through: Float,
    factors: Any,
    out: Any,
    out_dtype: Float,
) -> None:
    """``factors``, float32 [cols], is room for what each code of a row is multiplied by."""
    rows, cols = codes.shape
    values, rounded = _values(), _words()
    for r in range(rows):
        if r % height == 0:
            for b in range(scales.shape[1]):
                factors[b * width : b * width + width] = widen(scales[r // height, b], scale_dtype)
        for start in range(0, cols, _DECODED):
            stop = min(start + _DECODED, cols)
            chunk, by = codes[r, start:stop], factors[start:stop]
            for c in range(chunk.size):
                values[c] = _value(chunk[c]) * by[c]
            if through.shift != u32(0):
                narrow_row(values[: chunk.size], through, rounded)
                for c in range(chunk.size):
                    values[c] = widen(rounded[c], through)
            narrow_row(values[: chunk.size], out_dtype, out[r, start:stop])
