"""Integers of 8 or 4 bits with one scale per channel (row) or per group along a row, one byte each or packed.

``W = (code - zero) * scale``. Symmetric formats have no zero points.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .floats import FLOATS, Float, amax_bits, f32, magnitude, narrow, narrow_row, u32, widen, widen_tile
from .jit import bits_of, float_of, kernel, left, right

# float32 values from 2^23 to 2^24 lie 1 apart: the low bits of one are an integer, and adding one rounds to integers.
_2_23 = f32(2**23)
_2_23_BITS = u32(0x4B000000)
_WHOLE = f32(1.5 * 2**23)  # half-way, for integers of both signs

# float32 values from 512 to 1024 lie 2^-14 apart.
_512 = f32(512)
_512_BITS = u32(0x44000000)
_SUMMED = 256
"""As many multiples of 2^-14 below 512 do not overflow 32 bits when summed."""


class Integers(NamedTuple):
    """The codes of a format; passed to kernels, so every field is a numpy scalar.

    ``low`` and ``high`` bound the integers, ``levels`` is how many steps lie between. A float32 integer added to
    ``stored`` leaves the code, integer plus offset, in the low byte.
    """

    bits: np.uint32
    low: np.float32
    high: np.float32
    levels: np.float32
    stored: np.float32


def _integers(bits: int, offset: int) -> Integers:
    half = 2 ** (bits - 1)
    return Integers(u32(bits), f32(-half), f32(half - 1), f32(2 * half - 1), f32(_WHOLE + offset))


INT8 = _integers(8, 0)
PACKED = {bits: _integers(bits, 2 ** (bits - 1)) for bits in (4, 8)}


class _Candidates(NamedTuple):
    """Scales to choose from: their bits, their values, one over these, and the zero points that go with them."""

    bits: NDArray[np.uint32]
    scales: NDArray[np.float32]
    inverses: NDArray[np.float32]
    zeros: NDArray[np.float32]


class _Rounding(NamedTuple):
    """Rounding a float32 to nearest even by its bits: ``(b + bias + ((b >> drop) & odd)) & keep``."""

    drop: np.uint32
    bias: np.uint32
    odd: np.uint32
    keep: np.uint32


def _rounding(dtype: Float) -> _Rounding:
    """Round to the significand of ``dtype``; F16's subnormals do not matter here: all of them become integer 0."""
    drop = int(dtype.shift)
    return _Rounding(u32(drop), u32(max((1 << drop) // 2 - 1, 0)), u32(drop > 0), u32(0x100000000 - (1 << drop)))


@kernel
def _rounded(value: Any, rounding: _Rounding) -> Any:
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
def _symmetric_codes(w: Any, scale: Any, dtype: Float, rounding: _Rounding, ints: Integers, codes: Any) -> None:
    """Write the codes of ``rnd(value / scale)``. Bits of BF16 and F32 are moved to the top of a word."""
    for c in range(w.size):
        codes[c] = _code(_rounded(float_of(left(u32(w[c]), dtype.shift)) / scale, rounding), ints)


@kernel
def _offset_codes(w: Any, scale: Any, zero: Any, dtype: Float, rounding: _Rounding, ints: Integers, codes: Any) -> None:
    """Write the codes of ``rnd(rnd(value / scale) + zero)``."""
    for c in range(w.size):
        quotient = _rounded(float_of(left(u32(w[c]), dtype.shift)) / scale, rounding)
        codes[c] = _code(_rounded(f32(quotient + zero), rounding), ints)


@kernel
def _codes(
    w: Any, scale: Any, zero: Any, symmetric: Any, dtype: Float, rounding: _Rounding, ints: Integers, codes: Any
) -> None:
    if symmetric:
        _symmetric_codes(w, scale, dtype, rounding, ints, codes)
    else:
        _offset_codes(w, scale, zero, dtype, rounding, ints, codes)


@kernel
def _origin(ints: Integers) -> Any:
    """Return which bits of a code to flip, and the float32 of integer 0, where ``2^23 + code`` is that of any."""
    return np.uint8(0x80) if ints.stored == _WHOLE else np.uint8(0), f32(_2_23 - ints.low)


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
def _first_nonfinite(w: Any, dtype: Float) -> Any:
    for i in range(w.size):
        if (u32(w[i]) & dtype.magnitude) >= dtype.infinity:
            return i
    return -1


@kernel
def _or_eps(scale_bits: Any, scale_dtype: Float) -> Any:
    return scale_bits if scale_bits else narrow(scale_dtype.eps, scale_dtype)


@kernel
def _scale_and_zero(least: Any, greatest: Any, scale_dtype: Float, rounding: _Rounding, ints: Integers) -> Any:
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
    return bits, f32(f32(zero + _WHOLE) - _WHOLE)


@kernel
def _pack(codes: Any, bits: Any, payload: Any) -> None:
    """Write a row's codes, two a byte if they are of 4 bits."""
    if bits == u32(8):
        for i in range(payload.size):
            payload[i] = codes[i]
    else:
        pairs = codes.view(np.uint16)
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
        pairs = codes.view(np.uint16)
        for i in range(payload.size):
            pair = u32(payload[i])
            pairs[i] = (pair | left(pair, u32(4))) & u32(0x0F0F)


@kernel
def _row_of_codes(payload: Any, bits: Any) -> Any:
    """Return room for a row's codes, all zero."""
    return np.zeros(payload.shape[1] * (8 // np.int64(bits)), np.uint8)


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
    rounding: _Rounding,
    ints: Integers,
    found: Any,
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
        zero = f32(_clamped(_rounded(f32(ints.low - quotient), rounding), ints) + _WHOLE) - _WHOLE
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
            error = f32(steps - f32(f32(max(min(steps, high), low) + _WHOLE) - _WHOLE))
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
def _encode(
    w: Any,
    signed: Any,
    dtype: Float,
    scale_dtype: Float,
    rounding: _Rounding,
    ints: Integers,
    group: int,
    payload: Any,
    scales: Any,
    zeros: Any,
    factors: Any,
    errors: Any,
) -> Any:
    rows, cols = w.shape
    codes = _row_of_codes(payload, ints.bits)
    other_codes = np.empty(group, np.uint8)
    values = np.empty(group, np.float32)
    squares = np.empty(group, np.float64)
    n = factors.size
    found = _Candidates(
        np.empty(n, np.uint32), np.empty(n, np.float32), np.empty(n, np.float32), np.empty(n, np.float32)
    )
    zeros_per_word = 32 // np.int64(ints.bits)
    symmetric = zeros.size == 0
    zeros[:] = 0
    for r in range(rows):
        for g in range(scales.shape[1]):
            place = slice(g * group, g * group + group)
            patterns = w[r, place]
            least, greatest = u32(0), u32(0)
            if symmetric:
                greatest = u32(amax_bits(patterns, dtype))
            else:
                least, greatest = _extremes(patterns, signed[r, place], dtype)
            if max(least & dtype.magnitude, greatest) >= dtype.infinity:
                return r * cols + g * group + _first_nonfinite(patterns, dtype)
            low, high = widen(least, dtype), widen(greatest, dtype)
            zero = f32(0)
            if symmetric:
                bits = _or_eps(narrow(f32(high / f32(ints.levels * f32(0.5))), scale_dtype), scale_dtype)
            else:
                bits, zero = _scale_and_zero(low, high, scale_dtype, rounding, ints)
            _codes(patterns, magnitude(bits, scale_dtype), zero, symmetric, dtype, rounding, ints, codes[place])
            if n:
                for c in range(group):
                    values[c] = float_of(left(u32(patterns[c]), dtype.shift))
                error = _squared_error(values, codes[place], zero, magnitude(bits, scale_dtype), ints, squares)
                errors[0] += error
                _candidates(low, high, symmetric, factors, scale_dtype, rounding, ints, found)
                best = _best(values, ints, found)
                if best >= 0:
                    scale, other_zero = found.scales[best], found.zeros[best]
                    _codes(patterns, scale, other_zero, symmetric, dtype, rounding, ints, other_codes)
                    other_error = _squared_error(values, other_codes, other_zero, scale, ints, squares)
                    if other_error < error:
                        error, bits, zero = other_error, found.bits[best], other_zero
                        codes[place] = other_codes
                errors[1] += error
            scales[r, g] = bits
            if not symmetric:
                shift = u32(ints.bits * u32(r % zeros_per_word))
                zeros[r // zeros_per_word, g] |= left(u32(_code(zero, ints)), shift)
        _pack(codes, ints.bits, payload[r])
    return -1


@kernel
def _values(codes: Any, flip: Any, zero: Any, scale: Any, values: Any) -> None:
    for c in range(codes.size):
        values[c] = f32(float_of(u32(codes[c] ^ flip) | _2_23_BITS) - zero) * scale


@kernel
def _decode(
    payload: Any,
    scales: Any,
    scale_dtype: Float,
    zeros: Any,
    ints: Integers,
    group: int,
    through: Float,
    out: Any,
    out_dtype: Float,
) -> None:
    rows, cols = out.shape
    codes = _row_of_codes(payload, ints.bits)
    values = np.empty(cols, np.float32)
    rounded = np.empty(cols, np.uint32)
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


_SHORT = 512
# By how much a search shrinks the range of a region, by bits and whether it is short: the longer it is, the more is to
# be gained at 4 bits by cutting off its extremes. At 8 bits the gain is that some scales happen to suit many values.
_FACTORS = {
    (4, True): np.linspace(0.7, 1.05, 10, dtype=np.float32),
    (4, False): np.linspace(0.4, 1.07, 16, dtype=np.float32),
    (8, True): np.linspace(0.97, 1.03, 12, dtype=np.float32),
    (8, False): np.linspace(0.97, 1.03, 12, dtype=np.float32),
}
_NO_FACTORS = np.empty(0, np.float32)
_NO_ZEROS = np.empty((0, 0), np.uint32)


def _bytes(payload: NDArray[Any]) -> NDArray[np.uint8]:
    return payload.view(np.uint8)


def encode(
    w: NDArray[Any],
    dtype: str,
    reference: bool,
    ints: Integers,
    payload: NDArray[Any],
    scales: NDArray[Any],
    zeros: NDArray[np.uint32] | None = None,
    search: bool = False,
    errors: NDArray[np.float64] | None = None,
) -> int:
    """Encode a tile.

    ``w``: bits of ``dtype`` ("BF16", "F16", "F32") [rows, cols]. Written: ``payload``, codes uint8 [rows, cols]
    (INT8) or words uint32 [rows, ceil(cols * bits / 32)], the first column lowest, unused bits zero; ``scales``
    [rows, groups], groups dividing the columns evenly; for an asymmetric format ``zeros``, packed likewise along
    the rows: uint32 [ceil(rows * bits / 32), groups].

    ``reference``: compressed-tensors' arithmetic, with rnd() to ``dtype``, which is also the dtype of ``scales``;
    else the same in float32 throughout, ``scales`` F32. Symmetric: ``scale = rnd(amax / (levels / 2))``,
    ``integer = rne(clamp(rnd(w / scale)))``. Asymmetric, over min(w, 0) and max(w, 0): ``scale = rnd(rnd(max - min) /
    levels)``, ``zero = rne(clamp(rnd(low - rnd(min / scale))))``, ``integer = rne(clamp(rnd(rnd(w / scale) + zero)))``.
    A zero scale becomes the eps of its dtype.

    ``search``: shrink (or stretch) the range of each region by several factors and take the scale that leaves the least
    squared error, rounded as it is stored; the usual one if none is better. ``errors`` float64 [2]: the summed squared
    errors of the usual scales and of those taken are added.

    Returns the flat index of the first NaN or infinity in ``w`` (the outputs are then meaningless), or -1.
    """
    arithmetic = FLOATS[dtype if reference else "F32"]
    if dtype == "F16":  # so that the loops that matter, BF16's, have no step for it
        wide = np.empty(w.shape, np.uint32)
        widen_tile(w, FLOATS[dtype], wide)
        w, dtype = wide, "F32"
    signed = w.view(np.dtype(f"i{w.itemsize}"))
    group = w.shape[1] // max(1, scales.shape[1])
    rounding = _rounding(arithmetic)
    zeros = _NO_ZEROS if zeros is None else zeros
    factors = _FACTORS[int(ints.bits), group <= _SHORT] if search else _NO_FACTORS
    return int(
        _encode(
            w,
            signed,
            FLOATS[dtype],
            arithmetic,
            rounding,
            ints,
            group,
            _bytes(payload),
            scales,
            zeros,
            factors,
            np.zeros(2) if errors is None else errors,
        )
    )


def decode(
    payload: NDArray[Any],
    scales: NDArray[Any],
    scale_dtype: str,
    ints: Integers,
    out: NDArray[Any],
    out_dtype: str,
    zeros: NDArray[np.uint32] | None = None,
) -> None:
    """Write ``(integer - zero) * scale`` to ``out`` [rows, cols] as bits of ``out_dtype``.

    For BF16 and F16 the product is first rounded to ``scale_dtype``, as compressed-tensors' ``dequantize`` does;
    for F32 it is not rounded on the way.
    """
    through = FLOATS["F32" if out_dtype in ("F32", scale_dtype) else scale_dtype]
    group = out.shape[1] // max(1, scales.shape[1])
    zeros = _NO_ZEROS if zeros is None else zeros
    _decode(_bytes(payload), scales, FLOATS[scale_dtype], zeros, ints, group, through, out, FLOATS[out_dtype])


# MXFP4's codes, two a byte, as twice their values: integers; and 2^(byte - 128), half their scales, as BF16.
_HALVES = np.outer([1, -1], [0, 1, 2, 3, 4, 6, 8, 12]).ravel() + 128
_BYTES = np.arange(256)
_INT8_PAIRS = (_HALVES[_BYTES & 15] | _HALVES[_BYTES >> 4] << 8).astype(np.uint16)
_HALVED_SCALES = (2.0 ** (_BYTES - 128)).astype(np.float32).view(np.uint32) >> 16
_ONE = u32(0x3F80)


@kernel
def _from_mxfp4(packed: Any, quads: Any, exponents: Any, pairs: Any, scales: Any, shift: Any) -> None:
    for r in range(packed.shape[0]):
        for i in range(packed.shape[1]):
            pairs[r, i] = _INT8_PAIRS[packed[r, i]]
        for g in range(exponents.shape[1]):
            codes = (quads[r, 2 * g] | quads[r, 2 * g + 1]) & np.uint64(0x7777777777777777)
            scale = _HALVED_SCALES[exponents[r, g]] if codes else _ONE
            scales[r, g] = left(scale, shift)


def from_mxfp4(
    packed: NDArray[np.uint8],
    exponents: NDArray[np.uint8],
    words: NDArray[np.uint32],
    scales: NDArray[Any],
    scale_dtype: str,
) -> None:
    """Rewrite MXFP4 as symmetric packed 8-bit integers with a scale per 32 columns, always without loss.

    ``packed`` [rows, cols / 2] and ``exponents`` E8M0 [rows, cols / 32] as in `mxfp4.decode`. Written: ``words``
    [rows, cols / 4], twice the values of the codes, and ``scales``, bits of BF16 or F32 [rows, cols / 32]:
    ``2^(byte - 128)``, 1 for a group of zeros.
    """
    shift = u32(16 if scale_dtype == "F32" else 0)  # BF16 is the upper half of an F32
    _from_mxfp4(packed, packed.view(np.uint64), exponents, words.view(np.uint16), scales, shift)
