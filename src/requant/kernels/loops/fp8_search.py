"""FP8 scales by search: see `requant.kernels.fp8_search`."""

from __future__ import annotations

from typing import Any

import numpy as np

from requant.kernels.floats import FLOATS, Float, f32, u32
from requant.kernels.fp8 import Rounding, rounding_to
from requant.kernels.fp8_search import Room

from .floats import amax_bits, first_nonfinite_from, magnitude, narrow
from .fp8 import anchor_of, code_of, exponent_of, quotient_of, scale_bits
from .jit import bits_of, kernel, scratch

f64 = np.float64

_STEPS = 64  # an octave
_COARSE = 2
_FIRST = -_COARSE
_FACTORS = np.exp2(np.arange(_FIRST, _STEPS) / _STEPS).astype(np.float32)
_MAX = f32(448)
_CLIPPED = f32(464)  # rounds to more than 448
_LANES = 512
_lanes, _wide_lanes = scratch(np.float32, _LANES), scratch(np.float64, _LANES)
_FLOAT32 = FLOATS["F32"]
_NEAREST = rounding_to(_FLOAT32)


@kernel
def _add_errors(x: Any, inverse: Any, lanes: Any) -> None:
    for i in range(x.size):
        scaled = x[i] * inverse
        anchor = anchor_of(exponent_of(scaled))
        error = scaled - ((scaled + anchor) - anchor)
        lanes[i] += error * error


@kernel
def _estimate(x: Any, inverse: Any, lanes: Any) -> Any:
    """Return the squared error of ``x * inverse`` rounded to E4M3, if nothing is clipped.

    Sums in an order that is the same on every machine, so that the choice is.
    """
    lanes[:] = 0
    for start in range(0, x.size, _LANES):
        chunk = x[start : start + _LANES]
        _add_errors(chunk, inverse, lanes)
    return _sum(lanes)


@kernel
def _sum(lanes: Any) -> Any:
    """Sum up _LANES numbers, in place."""
    half = _LANES // 2
    while half > 0:
        for i in range(half):
            lanes[i] += lanes[half + i]
        half //= 2
    return f64(lanes[0])


@kernel
def _search(x: Any, amax: Any, dtype: Float, lanes: Any) -> Any:
    """Return the bits of the best scale of ``dtype`` for magnitudes ``x``, or 0 if there is none of the grid."""
    best_bits, best_error, best_step = u32(0), f64(np.inf), 0
    for coarse in range(0, _FACTORS.size, _COARSE):
        bits, error = _try(x, amax, coarse, dtype, lanes)
        if error < best_error:
            best_bits, best_error, best_step = bits, error, coarse
    for step in (best_step - 1, best_step + 1):
        if 0 <= step < _FACTORS.size:
            bits, error = _try(x, amax, step, dtype, lanes)
            if error < best_error:
                best_bits, best_error = bits, error
    return best_bits


@kernel
def _try(x: Any, amax: Any, step: Any, dtype: Float, lanes: Any) -> Any:
    """Return the bits of a scale and an estimate of its error, infinite if it clips or has no reciprocal."""
    bits = narrow(f32(f32(amax * _FACTORS[step]) / _MAX), dtype)
    scale = magnitude(bits, dtype)
    inverse = f32(f32(1) / scale)
    if not amax * inverse <= _CLIPPED:
        return bits, f64(np.inf)
    return bits, _estimate(x, inverse, lanes) * f64(scale) * f64(scale)


@kernel
def _encode_chunk(x: Any, scale: Any, rounding: Rounding, codes: Any, errors: Any) -> None:
    for i in range(x.size):
        quotient = quotient_of(bits_of(x[i]), scale, rounding)
        exponent = exponent_of(quotient)
        anchor = anchor_of(exponent)
        anchored = quotient + anchor
        codes[i] = code_of(anchored, exponent)
        errors[i] = x[i] - (anchored - anchor) * scale


@kernel
def _add_squares(errors: Any, lanes: Any) -> None:
    for i in range(errors.size):
        error = f64(errors[i])
        lanes[i] += error * error


@kernel
def _encode_region(x: Any, scale: Any, rounding: Rounding, codes: Any, errors: Any, lanes: Any) -> Any:
    """Write the codes of magnitudes; return their squared error. ``errors`` float32 and ``lanes`` float64 [_LANES]."""
    lanes[:] = 0
    for start in range(0, x.size, _LANES):
        chunk = slice(start, start + _LANES)
        part = errors[: x[chunk].size]
        _encode_chunk(x[chunk], scale, rounding, codes[chunk], part)
        _add_squares(part, lanes)
    return _sum(lanes)


@kernel
def _magnitudes(w: Any, dtype: Float, x: Any) -> None:
    for i in range(w.size):
        x[i] = magnitude(w[i], dtype)


@kernel
def _with_signs(w: Any, dtype: Float, magnitudes: Any, codes: Any) -> None:
    for i in range(w.size):
        codes[i] = magnitudes[i] | np.uint8((u32(w[i]) >> dtype.sign_shift) & u32(0x80))


@kernel
def encode(
    w: Any,
    dtype: Float,
    rounding: Rounding,
    height: int,
    width: int,
    room: Room,
    codes: Any,
    scales: Any,
    scale_dtype: Float,
    errors: Any,
) -> Any:
    """Return where the first NaN or infinity is, or -1."""
    rows, cols = w.shape
    lanes, sums = _lanes(), _wide_lanes()
    for i in range(scales.shape[0]):
        top, bottom = i * height, min(i * height + height, rows)
        for j in range(scales.shape[1]):
            left, right = j * width, min(j * width + width, cols)
            across = right - left
            x = room.magnitudes[: (bottom - top) * across]
            largest = w.dtype.type(0)
            for r in range(top, bottom):
                row = w[r, left:right]
                largest = max(largest, amax_bits(row, dtype))
                _magnitudes(row, dtype, x[(r - top) * across : (r - top + 1) * across])
            if u32(largest) >= dtype.infinity:
                return first_nonfinite_from(w, top, dtype)
            amax = magnitude(largest, dtype)
            bits = scale_bits(amax, scale_dtype, False)
            chosen = room.usual[: x.size]
            least = _encode_region(x, magnitude(bits, scale_dtype), rounding, chosen, lanes, sums)
            errors[0] += least
            other = _search(x, amax, scale_dtype, lanes)
            if other:
                found = room.found[: x.size]
                error = _encode_region(x, magnitude(other, scale_dtype), _NEAREST, found, lanes, sums)
                if error < least:
                    least, bits, chosen = error, other, found
            errors[1] += least
            scales[i, j] = bits
            for r in range(top, bottom):
                part = chosen[(r - top) * across : (r - top + 1) * across]
                _with_signs(w[r, left:right], dtype, part, codes[r, left:right])
    return -1
