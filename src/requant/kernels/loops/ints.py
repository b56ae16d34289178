"""Integers of 8 or 4 bits: see `requant.kernels.ints`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from requant.kernels.floats import Float, f32, u32
from requant.kernels.ints import WHOLE, DecodeRoom, EncodeRoom, Integers, Rounding

from .floats import amax_bits, first_nonfinite, magnitude, narrow, narrow_row, widen
from .jit import bits_of, float_of, kernel, left, right, scratch, view

# float32 values from 2^23 to 2^24 lie 1 apart: the low bits of one are an integer, and adding one rounds to integers.
_2_23 = f32(2**23)
_2_23_BITS = u32(0x4B000000)

# float32 values from 512 to 1024 lie 2^-14 apart.
_512 = f32(512)
_512_BITS = u32(0x44000000)
_SUMMED = 256
"""As many multiples of 2^-14 below 512 do not overflow 32 bits when summed."""

_MOST_FACTORS = 16
_words, _floats = scratch(np.uint32, _MOST_FACTORS), scratch(np.float32, _MOST_FACTORS)


class _Candidates(NamedTuple):
    """Scales to choose from: their bits, their values, one over these, and the zero points that go with them."""

    bits: NDArray[np.uint32]
    scales: NDArray[np.float32]
    inverses: NDArray[np.float32]
    zeros: NDArray[np.float32]


@kernel
def _rounded(value: Any, rounding: Rounding) -> Any:
    bits = bits_of(value)
    return float_of(u32((bits + rounding.bias + (right(bits, rounding.drop) & rounding.odd)) & rounding.keep))


@kernel
def _clamped(value: Any, ints: Integers) -> Any:
    return max(min(value, ints.high), ints.low)


@kernel
def _code(value: Any, ints: Integers) -> Any:
    """Return the code of a float32 clamped and rounded to nearest even."""
    return np.uint8(bits_of(_clamped(value, ints) + ints.stored) & u32(0xFF))


@kernel
def _symmetric_codes(w: Any, scale: Any, dtype: Float, rounding: Rounding, ints: Integers, codes: Any) -> None:
    """Write the codes of ``rnd(value / scale)``. Bits of BF16 and F32 are moved to the top of a word."""
    for c in range(w.size):
        codes[c] = _code(_rounded(float_of(left(u32(w[c]), dtype.shift)) / scale, rounding), ints)


@kernel
def _offset_codes(w: Any, scale: Any, zero: Any, dtype: Float, rounding: Rounding, ints: Integers, codes: Any) -> None:
    """Write the codes of ``rnd(rnd(value / scale) + zero)``."""
    for c in range(w.size):
        quotient = _rounded(float_of(left(u32(w[c]), dtype.shift)) / scale, rounding)
        codes[c] = _code(_rounded(f32(quotient + zero), rounding), ints)


@kernel
def _codes(
    w: Any, scale: Any, zero: Any, symmetric: Any, dtype: Float, rounding: Rounding, ints: Integers, codes: Any
) -> None:
    if symmetric:
        _symmetric_codes(w, scale, dtype, rounding, ints, codes)
    else:
        _offset_codes(w, scale, zero, dtype, rounding, ints, codes)


@kernel
def _origin(ints: Integers) -> Any:
    """Return which bits of a code to flip, and the float32 of integer 0, where ``2^23 + code`` is that of any."""
    return np.uint8(0x80) if ints.stored == WHOLE else np.uint8(0), f32(_2_23 - ints.low)


@kernel
def _extremes(w: Any, signed: Any, dtype: Float) -> Any:
    """Return the bits of min(w, 0) and max(w, 0); ``signed`` are the bits ``w`` as signed integers.

    Sign and magnitude: as unsigned integers the least value is the largest, as signed ones the greatest is.
    """
    least, greatest = w.dtype.type(0), signed.dtype.type(0)
    for c in range(w.size):
        least = w[c] if w[c] > least else least
        greatest = signed[c] if signed[c] > greatest else greatest
    negative = u32(least) > dtype.magnitude
    return u32(least) if negative else u32(0), u32(greatest)


@kernel
def _or_eps(scale_bits: Any, scale_dtype: Float) -> Any:
    return scale_bits if scale_bits else narrow(scale_dtype.eps, scale_dtype)


@kernel
def _scale_and_zero(least: Any, greatest: Any, scale_dtype: Float, rounding: Rounding, ints: Integers) -> Any:
    """Return the bits of ``rnd(rnd(greatest - least) / levels)`` and the integer that stands for zero, as float32.

    Where the difference overflows the dtype it is not rounded.
    """
    width = narrow(f32(greatest - least), scale_dtype)
    if width < scale_dtype.infinity:
        exact = f32(magnitude(width, scale_dtype) / ints.levels)
    else:
        exact = f32(f32(f32(greatest * f32(0.5)) - f32(least * f32(0.5))) / ints.levels) * f32(2)
    bits = narrow(exact, scale_dtype)
    if bits == u32(0):
        return _or_eps(bits, scale_dtype), ints.high if least < f32(0) else f32(0)
    quotient = _rounded(f32(least / magnitude(bits, scale_dtype)), rounding)
    zero = _clamped(_rounded(f32(ints.low - quotient), rounding), ints)
    return bits, f32(f32(zero + WHOLE) - WHOLE)


@kernel
def _pack(codes: Any, bits: Any, payload: Any) -> None:
    """Write a row's codes, two a byte if they are of 4 bits."""
    if bits == u32(8):
        for i in range(payload.size):
            payload[i] = codes[i]
    else:
        pairs = view(codes, np.uint16)
        for i in range(payload.size):
            pair = u32(pairs[i])
            payload[i] = pair | right(pair, u32(4))


@kernel
def _unpack(payload: Any, bits: Any, codes: Any) -> None:
    """Undo `_pack`."""
    if bits == u32(8):
        for i in range(payload.size):
            codes[i] = payload[i]
    else:
        pairs = view(codes, np.uint16)
        for i in range(payload.size):
            pair = u32(payload[i])
            pairs[i] = (pair | left(pair, u32(4))) & u32(0x0F0F)


@kernel
def _squared_error(values: Any, codes: Any, zero: Any, scale: Any, ints: Integers, squares: Any) -> Any:
    """Return the float64 sum of ``(value - (code - zero) * scale)^2``; ``squares`` float64 is scratch.

    Its order is the same on every machine, however wide its vectors are.
    """
    flip, origin = _origin(ints)
    origin = f32(origin + zero)
    for i in range(values.size):
        integer = f32(float_of(u32(codes[i] ^ flip) | _2_23_BITS) - origin)
        error = np.float64(values[i]) - np.float64(f32(integer * scale))
        squares[i] = error * error
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    whole = values.size // 4 * 4
    for i in range(0, whole, 4):
        a += squares[i]
        b += squares[i + 1]
        c += squares[i + 2]
        d += squares[i + 3]
    for i in range(whole, values.size):
        a += squares[i]
    return a + b + (c + d)


@kernel
def _candidates(
    least: Any,
    greatest: Any,
    symmetric: Any,
    factors: Any,
    scale_dtype: Float,
    rounding: Rounding,
    ints: Integers,
    found: _Candidates,
) -> None:
    """Write the scales of a region of values from ``least`` to ``greatest`` shrunk by each of ``factors``."""
    levels = f32(ints.levels * f32(0.5)) if symmetric else ints.levels
    width = max(greatest, -least) if symmetric else f32(greatest - least)
    for i in range(factors.size):
        found.scales[i] = f32(width * factors[i]) / levels
    narrow_row(found.scales, scale_dtype, found.bits)
    for i in range(factors.size):
        found.scales[i] = magnitude(found.bits[i], scale_dtype)
        found.inverses[i] = f32(1) / found.scales[i]
        quotient = _rounded(f32(least * factors[i]) / found.scales[i], rounding)
        zero = f32(_clamped(_rounded(f32(ints.low - quotient), rounding), ints) + WHOLE) - WHOLE
        found.zeros[i] = f32(0) if symmetric else zero


@kernel
def _distance(values: Any, inverse: Any, low: Any, high: Any) -> Any:
    """Return about the sum of ``(value / scale - integer)^2``, for a comparison of scales.

    A sum of integers, multiples of 2^-14: it does not depend on its order, so that all machines choose alike.
    """
    total = np.int64(0)
    for start in range(0, values.size, _SUMMED):
        part = values[start : start + _SUMMED]
        subtotal = u32(0)
        for c in range(part.size):
            steps = part[c] * inverse
            error = f32(steps - f32(f32(max(min(steps, high), low) + WHOLE) - WHOLE))
            subtotal = u32(subtotal + bits_of(f32(error * error) + _512))
        total += np.int64(u32(subtotal - u32(part.size) * _512_BITS))
    return total


@kernel
def _best(values: Any, ints: Integers, found: Any) -> Any:
    """Return which candidate comes closest to float32 ``values``, or -1 where no scale is a positive number."""
    best, least = -1, np.inf
    for i in range(found.bits.size):
        if found.bits[i] != u32(0):
            low, high = f32(ints.low - found.zeros[i]), f32(ints.high - found.zeros[i])
            error = _distance(values, found.inverses[i], low, high) * np.float64(found.scales[i]) ** 2
            if error < least:
                best, least = i, error
    return best


@kernel
def encode(
    w: Any,
    signed: Any,
    dtype: Float,
    scale_dtype: Float,
    rounding: Rounding,
    ints: Integers,
    room: EncodeRoom,
    payload: Any,
    scales: Any,
    zeros: Any,
    factors: Any,
    errors: Any,
) -> Any:
    """Return where the first NaN or infinity is, or -1; ``signed`` are the bits ``w`` as signed integers."""
    rows, cols = w.shape
    n = factors.size
    found = _Candidates(_words()[:n], _floats()[:n], _floats()[:n], _floats()[:n])
    group = room.values.size
    zeros_per_word = 32 // np.int64(ints.bits)
    symmetric = zeros.size == 0
    zeros[:] = 0
    for r in range(rows):
        for g in range(scales.shape[1]):
            place = slice(g * group, g * group + group)
            patterns, codes = w[r, place], room.codes[place]
            least, greatest = u32(0), u32(0)
            if symmetric:
                greatest = u32(amax_bits(patterns, dtype))
            else:
                least, greatest = _extremes(patterns, signed[r, place], dtype)
            if max(least & dtype.magnitude, greatest) >= dtype.infinity:
                return r * cols + g * group + first_nonfinite(patterns, dtype)
            low, high = widen(least, dtype), widen(greatest, dtype)
            zero = f32(0)
            if symmetric:
                bits = _or_eps(narrow(f32(high / f32(ints.levels * f32(0.5))), scale_dtype), scale_dtype)
            else:
                bits, zero = _scale_and_zero(low, high, scale_dtype, rounding, ints)
            _codes(patterns, magnitude(bits, scale_dtype), zero, symmetric, dtype, rounding, ints, codes)
            if n:
                values = room.values
                for c in range(group):
                    values[c] = float_of(left(u32(patterns[c]), dtype.shift))
                error = _squared_error(values, codes, zero, magnitude(bits, scale_dtype), ints, room.squares)
                errors[0] += error
                _candidates(low, high, symmetric, factors, scale_dtype, rounding, ints, found)
                best = _best(values, ints, found)
                if best >= 0:
                    scale, other_zero, other = found.scales[best], found.zeros[best], room.other_codes
                    _codes(patterns, scale, other_zero, symmetric, dtype, rounding, ints, other)
                    other_error = _squared_error(values, other, other_zero, scale, ints, room.squares)
                    if other_error < error:
                        error, bits, zero = other_error, found.bits[best], other_zero
                        for c in range(group):
                            codes[c] = other[c]
                errors[1] += error
            scales[r, g] = bits
            if not symmetric:
                shift = u32(ints.bits * u32(r % zeros_per_word))
                zeros[r // zeros_per_word, g] |= left(u32(_code(zero, ints)), shift)
        _pack(room.codes, ints.bits, payload[r])
    return -1


@kernel
def _values(codes: Any, flip: Any, zero: Any, scale: Any, values: Any) -> None:
    for c in range(codes.size):
        values[c] = f32(float_of(u32(codes[c] ^ flip) | _2_23_BITS) - zero) * scale


@kernel
def decode(
    payload: Any,
    scales: Any,
    scale_dtype: Float,
    zeros: Any,
    ints: Integers,
    group: int,
    room: DecodeRoom,
    through: Float,
    out: Any,
    out_dtype: Float,
) -> None:
    """Write the values of symmetric integers, or with ``zeros`` of asymmetric ones."""
    rows, cols = out.shape
    codes, values, rounded = room.codes, room.values, room.rounded
    zeros_per_word = 32 // np.int64(ints.bits)
    mask = u32((u32(1) << ints.bits) - u32(1))
    flip, origin = _origin(ints)
    for r in range(rows):
        _unpack(payload[r], ints.bits, codes)
        for g in range(scales.shape[1]):
            zero = origin
            if zeros.size:
                word = right(zeros[r // zeros_per_word, g], u32(ints.bits * u32(r % zeros_per_word)))
                zero = f32(_2_23 + f32(word & mask))
            place = slice(g * group, g * group + group)
            _values(codes[place], flip, zero, widen(scales[r, g], scale_dtype), values[place])
        if through.shift != u32(0):
            narrow_row(values, through, rounded)
            for c in range(cols):
                values[c] = widen(rounded[c], through)
        narrow_row(values, out_dtype, out[r])


# MXFP4's codes, two a byte, as twice their values: integers; and 2^(byte - 128), half their scales, as BF16.
_HALVES = np.outer([1, -1], [0, 1, 2, 3, 4, 6, 8, 12]).ravel() + 128
_BYTES = np.arange(256)
_INT8_PAIRS = (_HALVES[_BYTES & 15] | _HALVES[_BYTES >> 4] << 8).astype(np.uint16)
_HALVED_SCALES = (2.0 ** (_BYTES - 128)).astype(np.float32).view(np.uint32) >> 16
_ONE = u32(0x3F80)


@kernel
def from_mxfp4(packed: Any, quads: Any, exponents: Any, pairs: Any, scales: Any, shift: Any) -> None:
    """``quads`` are the bytes ``packed`` as uint64, ``pairs`` two 8-bit codes a word; scales go up by ``shift``."""
    for r in range(packed.shape[0]):
        for i in range(packed.shape[1]):
            pairs[r, i] = _INT8_PAIRS[packed[r, i]]
        for g in range(exponents.shape[1]):
            codes = (quads[r, 2 * g] | quads[r, 2 * g + 1]) & np.uint64(0x7777777777777777)
            scale = _HALVED_SCALES[exponents[r, g]] if codes else _ONE
            scales[r, g] = left(scale, shift)
