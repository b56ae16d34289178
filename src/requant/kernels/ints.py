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
_FIRST_WHOLE = u32(0x4B000000)  # the bits of 2^23
_WHOLE = f32(1.5 * 2**23)  # keeps apart from the ends on both sides


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
    # From 1.5 * 2^23 on, to 2^24, the gap between float32 values is 1.
    half = 2 ** (bits - 1)
    return Integers(u32(bits), f32(-half), f32(half - 1), f32(2 * half - 1), f32(1.5 * 2**23 + offset))


INT8 = _integers(8, 0)
PACKED = {bits: _integers(bits, 2 ** (bits - 1)) for bits in (4, 8)}


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
def _codes(w: Any, scale: Any, dtype: Float, rounding: _Rounding, ints: Integers, codes: Any) -> None:
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
) -> Any:
    rows, cols = w.shape
    codes = _row_of_codes(payload, ints.bits)
    zeros_per_word = 32 // np.int64(ints.bits)
    zeros[:] = 0
    for r in range(rows):
        for g in range(scales.shape[1]):
            place = slice(g * group, g * group + group)
            values = w[r, place]
            if zeros.size == 0:
                largest = u32(amax_bits(values, dtype))
            else:
                least, greatest = _extremes(values, signed[r, place], dtype)
                largest = max(least & dtype.magnitude, greatest)
            if largest >= dtype.infinity:
                return r * cols + g * group + _first_nonfinite(values, dtype)
            if zeros.size == 0:
                bits = narrow(f32(magnitude(largest, dtype) / f32(ints.levels * f32(0.5))), scale_dtype)
                scales[r, g] = _or_eps(bits, scale_dtype)
                _codes(values, magnitude(scales[r, g], scale_dtype), dtype, rounding, ints, codes[place])
            else:
                bits, zero = _scale_and_zero(widen(least, dtype), widen(greatest, dtype), scale_dtype, rounding, ints)
                scales[r, g] = bits
                shift = u32(ints.bits * u32(r % zeros_per_word))
                zeros[r // zeros_per_word, g] |= left(u32(_code(zero, ints)), shift)
                scale = magnitude(bits, scale_dtype)
                _offset_codes(values, scale, zero, dtype, rounding, ints, codes[place])
        _pack(codes, ints.bits, payload[r])
    return -1


@kernel
def _values(codes: Any, flip: Any, zero: Any, scale: Any, values: Any) -> None:
    for c in range(codes.size):
        values[c] = f32(float_of(u32(codes[c] ^ flip) | _FIRST_WHOLE) - zero) * scale


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
    # Codes without an offset are two's complement: with the sign flipped they have one.
    unsigned = u32(bits_of(ints.stored) & mask) != u32(0)
    flip = np.uint8(0) if unsigned else np.uint8(0x80)
    for r in range(rows):
        _unpack(payload[r], ints.bits, codes)
        for g in range(scales.shape[1]):
            zero = -ints.low
            if zeros.size:
                word = zeros[r // zeros_per_word, g]
                zero = f32(right(word, u32(ints.bits * u32(r % zeros_per_word))) & mask)
            place = slice(g * group, g * group + group)
            _values(codes[place], flip, f32(_2_23 + zero), widen(scales[r, g], scale_dtype), values[place])
        if through.shift != u32(0):
            narrow_row(values, through, rounded)
            for c in range(cols):
                values[c] = widen(rounded[c], through)
        narrow_row(values, out_dtype, out[r])


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
    zeros: NDArray[np.uint32] = _NO_ZEROS,
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
    return int(_encode(w, signed, FLOATS[dtype], arithmetic, rounding, ints, group, _bytes(payload), scales, zeros))


def decode(
    payload: NDArray[Any],
    scales: NDArray[Any],
    scale_dtype: str,
    ints: Integers,
    out: NDArray[Any],
    out_dtype: str,
    zeros: NDArray[np.uint32] = _NO_ZEROS,
) -> None:
    """Write ``(integer - zero) * scale`` to ``out`` [rows, cols] as bits of ``out_dtype``.

    For BF16 and F16 the product is first rounded to ``scale_dtype``, as compressed-tensors' ``dequantize`` does;
    for F32 it is not rounded on the way.
    """
    through = FLOATS["F32" if out_dtype in ("F32", scale_dtype) else scale_dtype]
    group = out.shape[1] // max(1, scales.shape[1])
    _decode(_bytes(payload), scales, FLOATS[scale_dtype], zeros, ints, group, through, out, FLOATS[out_dtype])
