"""FP8 E4M3 with one scale per channel (row) or per 128 x 128 block: ``W = code * scale``."""

from __future__ import annotations

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


class _Rounding(NamedTuple):
    """Rounding a positive float32 to nearest even by its bits: ``(b + bias + ((b >> drop) & odd)) & keep``."""

    drop: np.uint32
    bias: np.uint32
    odd: np.uint32
    keep: np.uint32


def _rounding(dtype: Float) -> _Rounding:
    """Round to the significand of ``dtype``; F16's subnormals do not matter here: all of them have code 0."""
    drop = int(dtype.shift)
    return _Rounding(u32(drop), u32(max((1 << drop) // 2 - 1, 0)), u32(drop > 0), u32(0x100000000 - (1 << drop)))


@kernel
def _code(bits: Any, scale: Any, dtype: Float, rounding: _Rounding) -> Any:
    """Return the E4M3 code of ``rnd(value / scale)``, clamped to +-448, rounded to nearest even.

    ``bits`` are BF16 or F32: moved to the top of a word they are the float32 of the same value.
    """
    pattern = left(u32(bits), dtype.shift)
    quotient = bits_of(min(float_of(pattern & u32(0x7FFFFFFF)) / scale, _MAX))
    tie = right(quotient, rounding.drop) & rounding.odd
    a = u32((quotient + rounding.bias + tie) & rounding.keep)
    # Adding 2^(e+20) to a value of exponent e leaves its multiple of 2^(e-3) in the low byte, 8 at 2^e and 16 at
    # 2^(e+1): the code, but for 8 per binade above the smallest normal.
    exponent = max(u32(a & u32(0x7F800000)), _SMALLEST_NORMAL)
    aligned = bits_of(float_of(a) + float_of(u32(exponent + u32(20 << 23))))
    code = u32(aligned + right(exponent - _SMALLEST_NORMAL, u32(20)))
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
def _scale_bits(amax_bits: Any, dtype: Float, scale_dtype: Float) -> Any:
    """Return the bits of ``rnd(amax / 448)``, or of the dtype's eps where that is zero."""
    bits = narrow(f32(magnitude(amax_bits, dtype) / _MAX), scale_dtype)
    return bits if bits else narrow(scale_dtype.eps, scale_dtype)


@kernel
def _encode_channel(w: Any, dtype: Float, scale_dtype: Float, rounding: _Rounding, codes: Any, scales: Any) -> Any:
    rows, cols = w.shape
    for r in range(rows):
        largest = amax_bits(w[r], dtype)
        if u32(largest) >= dtype.infinity:
            return r * cols + first_nonfinite(w[r], dtype)
        scales[r, 0] = _scale_bits(largest, dtype, scale_dtype)
        scale = magnitude(scales[r, 0], scale_dtype)
        for c in range(cols):
            codes[r, c] = _code(w[r, c], scale, dtype, rounding)
    return -1


@kernel
def _encode_block(w: Any, dtype: Float, scale_dtype: Float, rounding: _Rounding, codes: Any, scales: Any) -> Any:
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
            scales[top // BLOCK, b] = _scale_bits(largest, dtype, scale_dtype)
            divisors[start:stop] = magnitude(scales[top // BLOCK, b], scale_dtype)
        for r in range(top, bottom):
            for c in range(cols):
                codes[r, c] = _code(w[r, c], divisors[c], dtype, rounding)
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
    """Return what `_code` takes: F16 goes through F32, so that the loop that matters, BF16's, has no step for it."""
    if dtype == "F16":
        wide = np.empty(w.shape, np.uint32)
        widen_tile(w, FLOATS[dtype], wide)
        return wide, FLOATS["F32"]
    return w, FLOATS[dtype]


def encode_channel(w: NDArray[Any], dtype: str, reference: bool, codes: NDArray[np.uint8], scales: NDArray[Any]) -> int:
    """Encode a tile with one scale per row.

    ``w``: bits of ``dtype`` ("BF16", "F16", "F32") [rows, cols]; written: ``codes`` E4M3 [rows, cols] and
    ``scales`` [rows, 1]. ``reference``: compressed-tensors' arithmetic, ``scale = rnd(amax / 448)`` and
    ``code = e4m3(clamp(rnd(w / scale)))`` with rnd() to ``dtype``, which is also the dtype of ``scales``; else
    the same in float32 throughout, ``scales`` F32. A zero scale becomes the eps of its dtype.

    Returns the flat index of the first NaN or infinity in ``w`` (the outputs are then meaningless), or -1.
    """
    arithmetic = FLOATS[dtype if reference else "F32"]
    return int(_encode_channel(*_operand(w, dtype), arithmetic, _rounding(arithmetic), codes, scales))


def encode_block(w: NDArray[Any], dtype: str, reference: bool, codes: NDArray[np.uint8], scales: NDArray[Any]) -> int:
    """Encode a tile with one scale per 128 x 128 block; the tile starts at a block's first row.

    As `encode_channel`, with ``scales`` [ceil(rows / 128), ceil(cols / 128)]; blocks at the right and lower edge
    may be smaller.
    """
    arithmetic = FLOATS[dtype if reference else "F32"]
    return int(_encode_block(*_operand(w, dtype), arithmetic, _rounding(arithmetic), codes, scales))


def decode(
    codes: NDArray[np.uint8],
    scales: NDArray[Any],
    scale_dtype: str,
    block: tuple[int, int],
    out: NDArray[Any],
    out_dtype: str,
) -> None:
    """Write ``codes * scales`` to ``out`` [rows, cols] as bits of ``out_dtype``.

    ``scales``: bits of ``scale_dtype``, one per ``block`` (height, width) of the tile. For BF16 and F16 the product
    is first rounded to ``scale_dtype``, as compressed-tensors' ``dequantize`` does; for F32 it is not rounded on
    the way.
    """
    height, width = block
    through = FLOATS["F32" if out_dtype in ("F32", scale_dtype) else scale_dtype]
    _decode(codes, scales, FLOATS[scale_dtype], height, width, through, out, FLOATS[out_dtype])
