"""Microscaling: groups of 32 small floats along a row that share a power-of-two (E8M0) scale; how both are found."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import mx_bf16
from .floats import BF16, FLOATS, Float, f32, u32, widen
from .groups import GROUP, largest, spread, sum_of_squares
from .jit import bits_of, float_of, kernel, left, right

__all__ = ["E2M1", "E4M3", "GROUP", "Element", "encode"]


class Element(NamedTuple):
    """A small float as seen from float32; passed to kernels, so every field is a numpy scalar.

    ``largest`` is its largest value, ``smallest`` the bits of its smallest normal one, ``drop`` how many bits of a
    float32's significand it has not, ``offset`` the exponent of its largest power of two. Its sign is the bit
    ``sign``, where a float32's bits shifted right by ``sign_shift`` have it. ``mask`` covers its other bits.
    """

    largest: np.float32
    smallest: np.uint32
    drop: np.uint32
    offset: np.uint32
    sign_shift: np.uint32
    sign: np.uint32
    mask: np.uint32


E2M1 = Element(f32(6), u32(127 << 23), u32(22), u32(2), u32(28), u32(0x08), u32(0x07))
E4M3 = Element(f32(448), u32(121 << 23), u32(20), u32(8), u32(24), u32(0x80), u32(0x7F))

_CHUNK = 2048  # values whose intermediate forms stay in the first cache

# Added to a float32's bits, raises the exponent from 1.75 * 2^e on.
_QUARTER = u32(0x200000)

# The exponent of a group of zeros: 2^-127, which F16 cannot hold; compressed-tensors replaces that zero by 1.
_UNSCALED = {"BF16": u32(0), "F16": u32(127), "F32": u32(0)}


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
    least = np.empty(exponents.size, np.float64)
    best = exponents.copy()
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
def _encode(
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
    packed = payload.size < w.size
    wide = np.empty(_CHUNK, np.uint32)
    factors = np.empty(_CHUNK, np.float32)
    losses = np.empty(_CHUNK, np.float32)
    shifts = np.empty(_CHUNK, np.int16)
    codes = np.empty(_CHUNK, np.uint8)
    nearby = np.empty(_CHUNK // GROUP, np.uint8)
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
            _pack(out.view(np.uint16), payload[start // 2 : stop // 2])
    return -1


def encode(
    w: NDArray[Any],
    dtype: str,
    element: Element,
    vanishing: np.float32,
    search: bool,
    payload: NDArray[np.uint8],
    exponents: NDArray[np.uint8],
    errors: NDArray[np.float64] | None,
) -> int:
    """Encode a tile of bits of ``dtype`` [rows, cols], cols % 32 = 0, with compressed-tensors' arithmetic.

    ``exponent = floor(log2(amax))``, one more from 1.75 on, less ``element.offset``; codes of ``w / scale``, to
    nearest even, with the sign of what exceeds ``vanishing``. With ``search``, of the exponents one below to one
    above, that with the least squared error; the first on ties. ``errors`` [2] gets added the summed squared errors
    of the exponents from amax and of those chosen.
    Written: ``payload`` [rows, cols] or, two codes a byte, [rows, cols / 2], and ``exponents`` [rows, cols / 32].

    Returns the flat index of the first value that is NaN, infinite or too large for the rule (from 1.75 times the
    dtype's highest power of two on; the outputs are then meaningless), or -1.
    """
    flat = w.reshape(-1), payload.reshape(-1), exponents.reshape(-1)
    sums = np.zeros(2) if errors is None else errors
    return int(_encode(flat[0], FLOATS[dtype], element, _UNSCALED[dtype], vanishing, search, *flat[1:], sums))
