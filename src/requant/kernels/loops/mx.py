"""Microscaling: see `requant.kernels.mx`."""

from __future__ import annotations

from typing import Any

import numpy as np

from requant.kernels.floats import BF16, Float, f32, u32
from requant.kernels.mx import GROUP, Element

from . import mx_bf16
from .floats import widen
from .groups import largest, spread, sum_of_squares
from .jit import bits_of, float_of, kernel, left, right, scratch, view

_CHUNK = 2048  # values whose intermediate forms stay in the first cache
_words = scratch(np.uint32, _CHUNK)
_floats = scratch(np.float32, _CHUNK)
_shorts = scratch(np.int16, _CHUNK)
_bytes = scratch(np.uint8, _CHUNK)
_group_bytes = scratch(np.uint8, _CHUNK // GROUP)
_group_sums = scratch(np.float64, _CHUNK // GROUP)

# Added to a float32's bits, raises the exponent from 1.75 * 2^e on.
_QUARTER = u32(0x200000)


@kernel
def power(exponent: Any) -> Any:
    """Return 2^(byte - 127) as float32; byte 0 is a subnormal."""
    return float_of(left(u32(exponent), u32(23)) if exponent else u32(0x00400000))


@kernel
def _widen(w: Any, dtype: Float, out: Any) -> None:
    if dtype.rescale == f32(1):
        for i in range(w.size):
            out[i] = left(u32(w[i]), dtype.shift)
    else:
        for i in range(w.size):
            out[i] = bits_of(widen(w[i], dtype))


@kernel
def _step(a: Any, element: Element) -> Any:
    """Return (float32, with ``a`` >= 0) 2^(e + drop), e being the exponent of ``a``, or of the smallest normal.

    The sum of both is rounded to a multiple of the element's precision at ``a``.
    """
    return float_of(u32(max(u32(bits_of(a) & u32(0x7F800000)), element.smallest) + left(element.drop, u32(23))))


@kernel
def _codes(w: Any, factors: Any, vanishing: Any, element: Element, codes: Any) -> None:
    """Write the codes of ``value * factor``, ``w`` being F32 bits; ties go to even codes.

    Scaling by a power of two is exact but for results near zero. A value has a sign if its scaled magnitude is
    above ``vanishing``, whether or not the code can hold it.
    """
    for i in range(w.size):
        scaled = float_of(u32(w[i] & u32(0x7FFFFFFF))) * factors[i]
        a = min(scaled, element.largest)
        step = _step(a, element)
        # The low bits count multiples of the precision: 2^m at 2^e and twice that at 2^(e+1), m being the bits of
        # the element's significand. That is the code, but for 2^m per binade above the smallest normal.
        binades = u32(bits_of(step) - element.smallest - left(element.drop, u32(23)))
        code = u32(bits_of(a + step) + right(binades, element.drop)) & element.mask
        sign = right(w[i], element.sign_shift) & element.sign
        codes[i] = np.uint8(code | (sign if scaled > vanishing else u32(0)))


@kernel
def _losses(w: Any, factors: Any, element: Element, losses: Any) -> None:
    """Write what encoding takes from the magnitude of ``value * factor``, exactly."""
    for i in range(w.size):
        scaled = float_of(u32(w[i] & u32(0x7FFFFFFF))) * factors[i]
        a = min(scaled, element.largest)
        step = _step(a, element)
        losses[i] = scaled - ((a + step) - step)


@kernel
def _exponents(w: Any, dtype: Float, unscaled: Any, offset: Any, exponents: Any) -> Any:
    """Write each group's exponent; return the index of the first group that can have none, or -1."""
    for g in range(exponents.size):
        rounded = u32(u32(largest(w, g * GROUP)) + right(_QUARTER, dtype.shift))
        if rounded >= dtype.infinity:
            return g
        top = bits_of(widen(rounded & dtype.infinity, dtype))
        exponent = u32(max(right(top, u32(23)), offset) - offset)
        exponents[g] = exponent if top else unscaled
    return -1


@kernel
def _spread_factors(exponents: Any, factors: Any) -> None:
    for g in range(exponents.size):
        spread(factors, g * GROUP, power(u32(254) - u32(exponents[g])))


@kernel
def _search(w: Any, element: Element, exponents: Any, nearby: Any, factors: Any, losses: Any, errors: Any) -> None:
    """Replace each exponent by that of its neighbours which loses less, if any; add to ``errors`` [2]."""
    least, best = _group_sums(), _group_bytes()
    for change in (0, -1, 1):
        for g in range(exponents.size):
            nearby[g] = min(max(np.int64(exponents[g]) + change, 0), 254)
        _spread_factors(nearby, factors)
        _losses(w, factors, element, losses)
        for g in range(exponents.size):
            scale = np.float64(power(nearby[g]))
            error = sum_of_squares(losses, g * GROUP) * scale * scale
            if change == 0:
                errors[0] += error
            if change == 0 or error < least[g]:
                least[g] = error
                best[g] = nearby[g]
    for g in range(exponents.size):
        exponents[g] = best[g]
        errors[1] += least[g]


@kernel
def _first_above(w: Any, dtype: Float) -> Any:
    for c in range(w.size):
        if u32(u32(w[c]) & dtype.magnitude) + right(_QUARTER, dtype.shift) >= dtype.infinity:
            return c
    return -1


@kernel
def _pack(pairs: Any, packed: Any) -> None:
    """Write two codes a byte, of uint16 whose bytes hold one each; the first goes to the low nibble."""
    for i in range(packed.size):
        pair = u32(pairs[i])
        packed[i] = pair | right(pair, u32(4))


@kernel
def encode(
    w: Any,
    dtype: Float,
    element: Element,
    unscaled: Any,
    vanishing: Any,
    search: bool,
    payload: Any,
    exponents: Any,
    errors: Any,
) -> Any:
    """Encode flat arrays; return where the first value is that the rule cannot take, or -1."""
    packed = payload.size < w.size
    wide, factors, losses, shifts, codes, nearby = _words(), _floats(), _floats(), _shorts(), _bytes(), _group_bytes()
    for start in range(0, w.size, _CHUNK):
        stop = min(start + _CHUNK, w.size)
        chunk, patterns = w[start:stop], wide[: stop - start]
        scales = exponents[start // GROUP : stop // GROUP]
        bad = _exponents(chunk, dtype, unscaled, element.offset, scales)
        if bad >= 0:
            return start + bad * GROUP + _first_above(chunk[bad * GROUP :], dtype)
        if search:
            _widen(chunk, dtype, patterns)
            _search(patterns, element, scales, nearby, factors, losses, errors)
        out = codes[: stop - start] if packed else payload[start:stop]
        if dtype.kind != BF16 or not mx_bf16.write_codes(chunk, scales, packed, shifts, out):
            _widen(chunk, dtype, patterns)
            _spread_factors(scales, factors)
            _codes(patterns, factors, vanishing, element, out)
        if packed:
            _pack(view(out, np.uint16), payload[start // 2 : stop // 2])
    return -1
