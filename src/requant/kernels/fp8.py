"""FP8 E4M3 with one scale per channel (row), per 128 x 128 block, or per tensor: ``W = code * scale``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .floats import (
    FLOATS,
    Float,
    amax_bits,
    f32,
    first_nonfinite,
    magnitude,
    narrow,
    narrow_row,
    u32,
    widen,
    widen_tile,
)
from .jit import bits_of, float_of, kernel, left, right

BLOCK = 128
_MAX = f32(448)
_SMALLEST_NORMAL = u32(121 << 23)  # 2^-6
_NAN = u32(0x7FC00000)
_ONE = u32(127 << 23)
_CHUNK = 8192  # what fits the innermost cache


class Rounding(NamedTuple):
    """Rounding a positive float32 to nearest even by its bits: ``(b + bias + ((b >> drop) & odd)) & keep``."""

    drop: np.uint32
    bias: np.uint32
    odd: np.uint32
    keep: np.uint32


def rounding_to(dtype: Float) -> Rounding:
    """Round to the significand of ``dtype``; F16's subnormals do not matter here: all of them have code 0."""
    drop = int(dtype.shift)
    return Rounding(u32(drop), u32(max((1 << drop) // 2 - 1, 0)), u32(drop > 0), u32(0x100000000 - (1 << drop)))


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
def _encode_channel(
    w: Any, dtype: Float, rounding: Rounding, power_of_two: bool, codes: Any, scales: Any, scale_dtype: Float
) -> Any:
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
def _encode_block(
    w: Any, dtype: Float, rounding: Rounding, power_of_two: bool, codes: Any, scales: Any, scale_dtype: Float
) -> Any:
    rows, cols = w.shape
    column_amax = np.empty(cols, w.dtype)
    divisors = np.empty(cols, np.float32)
    for top in range(0, rows, BLOCK):
        bottom = min(top + BLOCK, rows)
        column_amax[:] = 0
        for r in range(top, bottom):
            _raise_to(column_amax, w[r], dtype)
        for b in range(scales.shape[1]):
            start, stop = b * BLOCK, min(b * BLOCK + BLOCK, cols)
            largest = amax_bits(column_amax[start:stop], dtype)
            if u32(largest) >= dtype.infinity:
                return top * cols + first_nonfinite(w[top:bottom].reshape(-1), dtype)
            scales[top // BLOCK, b] = scale_bits(magnitude(largest, dtype), scale_dtype, power_of_two)
            divisors[start:stop] = magnitude(scales[top // BLOCK, b], scale_dtype)
        for r in range(top, bottom):
            for c in range(cols):
                codes[r, c] = _signed_code(w[r, c], divisors[c], dtype, rounding)
    return -1


@kernel
def _encode_tensor(
    w: Any,
    dtype: Float,
    rounding: Rounding,
    power_of_two: bool,
    codes: Any,
    scales: Any,
    scale_dtype: Float,
    amax: Any,
) -> Any:
    """Encode ``w`` [1, values]."""
    scales[0] = scale_bits(amax, scale_dtype, power_of_two)
    scale = magnitude(scales[0], scale_dtype)
    for start in range(0, w.size, _CHUNK):
        chunk = w[0, start : start + _CHUNK]
        if u32(amax_bits(chunk, dtype)) >= dtype.infinity:
            return start + first_nonfinite(chunk, dtype)
        for i in range(start, start + chunk.size):
            codes[0, i] = _signed_code(w[0, i], scale, dtype, rounding)
    return -1


@kernel
def _decode(
    codes: Any,
    scales: Any,
    scale_dtype: Float,
    height: int,
    width: int,
    through: Float,
    out: Any,
    out_dtype: Float,
) -> None:
    rows, cols = codes.shape
    factors = np.empty(cols, np.float32)
    values = np.empty(cols, np.float32)
    rounded = np.empty(cols, np.uint32)
    for r in range(rows):
        if r % height == 0:
            for b in range(scales.shape[1]):
                factors[b * width : b * width + width] = widen(scales[r // height, b], scale_dtype)
        for c in range(cols):
            values[c] = _value(codes[r, c]) * factors[c]
        if through.shift != u32(0):
            narrow_row(values, through, rounded)
            for c in range(cols):
                values[c] = widen(rounded[c], through)
        narrow_row(values, out_dtype, out[r])


def _operand(w: NDArray[Any], dtype: str) -> tuple[NDArray[Any], Float]:
    """Return what `code_of` takes: F16 goes through F32, so that the loop that matters, BF16's, has no step for it."""
    if dtype == "F16":
        wide = np.empty(w.shape, np.uint32)
        widen_tile(w, FLOATS[dtype], wide)
        return wide, FLOATS["F32"]
    return w, FLOATS[dtype]


def _run(
    kernel: Callable[..., Any],
    w: NDArray[Any],
    dtype: str,
    reference: bool,
    codes: NDArray[np.uint8],
    scales: NDArray[Any],
    scale_dtype: str | None,
    power_of_two: bool,
    *amax: np.float32,
) -> int:
    arithmetic = FLOATS[dtype if reference else "F32"]
    stored = arithmetic if scale_dtype is None else FLOATS[scale_dtype]
    bits, operand = _operand(w, dtype)
    return int(kernel(bits, operand, rounding_to(arithmetic), power_of_two, codes, scales, stored, *amax))


def encode_channel(
    w: NDArray[Any],
    dtype: str,
    reference: bool,
    codes: NDArray[np.uint8],
    scales: NDArray[Any],
    scale_dtype: str | None = None,
    power_of_two: bool = False,
) -> int:
    """Encode a tile with one scale per row.

    ``w``: bits of ``dtype`` ("BF16", "F16", "F32") [rows, cols]; written: ``codes`` E4M3 [rows, cols] and
    ``scales`` [rows, 1], bits of ``scale_dtype``. ``reference``: compressed-tensors' arithmetic,
    ``scale = rnd(amax / 448)`` and ``code = e4m3(clamp(rnd(w / scale)))`` with rnd() to ``dtype``; else the same in
    float32 throughout. The scale is rounded to ``scale_dtype``, which is that of the arithmetic unless told
    otherwise; a zero scale becomes its eps.

    ``power_of_two``: ``scale = 2^ceil(log2(amax / 448))`` instead, not below the dtype's smallest normal number (F16:
    its smallest subnormal), and 1 where amax is zero. Every quotient is then exact.

    Returns the flat index of the first NaN or infinity in ``w`` (the outputs are then meaningless), or -1.
    """
    return _run(_encode_channel, w, dtype, reference, codes, scales, scale_dtype, power_of_two)


def encode_block(
    w: NDArray[Any],
    dtype: str,
    reference: bool,
    codes: NDArray[np.uint8],
    scales: NDArray[Any],
    scale_dtype: str | None = None,
    power_of_two: bool = False,
) -> int:
    """Encode a tile with one scale per 128 x 128 block; the tile starts at a block's first row.

    As `encode_channel`, with ``scales`` [ceil(rows / 128), ceil(cols / 128)]; blocks at the right and lower edge
    may be smaller.
    """
    return _run(_encode_block, w, dtype, reference, codes, scales, scale_dtype, power_of_two)


def encode_tensor(
    w: NDArray[Any],
    dtype: str,
    reference: bool,
    amax: float,
    codes: NDArray[np.uint8],
    scales: NDArray[Any],
    scale_dtype: str | None = None,
    power_of_two: bool = False,
) -> int:
    """Encode a tile with the scale of the whole weight, whose largest magnitude is ``amax``.

    As `encode_channel`, with a single scale in ``scales`` [1].
    """
    flat, flat_codes = w.reshape(1, -1), codes.reshape(1, -1)
    return _run(_encode_tensor, flat, dtype, reference, flat_codes, scales, scale_dtype, power_of_two, f32(amax))


def decode(
    codes: NDArray[np.uint8],
    scales: NDArray[Any],
    scale_dtype: str,
    block: tuple[int, int],
    out: NDArray[Any],
    out_dtype: str,
) -> None:
    """Write ``codes * scales`` to ``out`` [rows, cols] as bits of ``out_dtype``.

    ``scales``: bits of ``scale_dtype``, one per ``block`` (height, width) of the tile; E8M0 exponents are read as
    F32, 2^(byte - 127), 255 as NaN. For BF16 and F16 the product is first rounded to ``scale_dtype``, as
    compressed-tensors' ``dequantize`` does; for F32 it is not rounded on the way.
    """
    if scale_dtype == "F8_E8M0":
        scales, scale_dtype = _powers(scales), "F32"
    height, width = block
    through = FLOATS["F32" if out_dtype in ("F32", scale_dtype) else scale_dtype]
    _decode(codes, scales, FLOATS[scale_dtype], height, width, through, out, FLOATS[out_dtype])


def _powers(exponents: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Return the F32 bits of E8M0 exponents; 2^-127 is a subnormal."""
    bits = exponents.astype(np.uint32) << u32(23)
    bits[exponents == 0] = u32(1 << 22)
    bits[exponents == 255] = _NAN
    return bits
