"""NVFP4: see `requant.kernels.nvfp4`."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from requant.kernels.floats import BF16, F16, Float, f32, u32
from requant.kernels.nvfp4 import E2M1_MAX, E4M3_MAX, GROUP, Global

from .floats import magnitude, narrow_row, widen
from .jit import bits_of, float_of, kernel, left, right, scratch, view

_PAIRS = GROUP // 2
# Groups handled at a time: what is computed between passes over them stays in the L1 cache.
_CHUNK = 128
_floats, _double_floats, _quad_floats, _pair_floats, _value_floats = (
    scratch(np.float32, _CHUNK * each) for each in (1, 2, 4, _PAIRS, GROUP)
)
_words, _double_words, _quad_words, _pair_words, _value_words = (
    scratch(np.uint32, _CHUNK * each) for each in (1, 2, 4, _PAIRS, GROUP)
)
_longs, _double_longs, _quad_longs = (scratch(np.uint64, _CHUNK * each) for each in (1, 2, 4))
u64 = np.uint64

_ONE = u32(127 << 23)
_E4M3_NORMAL = u32(121 << 23)  # 2^-6
_SCALES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_LARGEST_SCALE = u32(0x7E)
# What compressed-tensors puts in the place of a scale that rounds to zero.
_SCALE_OF_ZEROS = f32(0.125)

# A search tries the scale codes this far from that of amax, which comes first.
_STEPS = np.array([0, -1, 1, 2, 3, 4, 5], np.int32).view(np.uint32)
# Its float32 quotients are off by up to 2^-20 of a scale, so that an error E, in squared scales, is by less than
# 2^-10 * E + 2^-23. A scale replaces that of amax only where its error is less in spite of both.
_DOUBT = f32(2.0**-22)
_BEYOND_DOUBT = f32(1 - 2.0**-8)


@kernel
def _larger(a: Any, b: Any) -> Any:
    """Return the larger magnitude of two float32, all as bits."""
    return max(u32(a & u32(0x7FFFFFFF)), u32(b & u32(0x7FFFFFFF)))


@kernel
def _split(words: Any, dtype: Float, even: Any, odd: Any, largest: Any) -> None:
    """Write a chunk's even and odd columns as float32 bits, and of each pair the larger magnitude.

    ``words``: u32, a pair each (BF16, F16), or one value (F32).
    """
    if dtype.kind == BF16:
        for i in range(even.size):
            a, b = left(words[i], u32(16)), words[i] & u32(0xFFFF0000)
            even[i], odd[i], largest[i] = a, b, _larger(a, b)
    elif dtype.kind == F16:
        for i in range(even.size):
            high = right(words[i], u32(16))
            a = bits_of(magnitude(words[i], dtype)) | (left(words[i], u32(16)) & u32(0x80000000))
            b = bits_of(magnitude(high, dtype)) | (words[i] & u32(0x80000000))
            even[i], odd[i], largest[i] = a, b, _larger(a, b)
    else:
        for i in range(even.size):
            a, b = words[2 * i], words[2 * i + 1]
            even[i], odd[i], largest[i] = a, b, _larger(a, b)


@kernel
def _any_from(values: Any, least: Any) -> Any:
    largest = u32(0)
    for i in range(values.size):
        largest = max(largest, values[i])
    return largest >= least


@kernel
def _halve_by_max(values: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = max(values[2 * i], values[2 * i + 1])


@kernel
def _halve_by_sum(values: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = values[2 * i] + values[2 * i + 1]


@kernel
def _double(values: Any, out: Any) -> None:
    """Write each u32 twice, as one u64."""
    for i in range(values.size):
        out[i] = u64(values[i]) | (u64(values[i]) << u64(32))


@kernel
def _spread(values: Any, twice: Any, fourfold: Any, out: Any) -> None:
    """Write each u32 of ``values`` eight times, once for every pair of its group; all but ``values`` u64."""
    _double(values, twice)
    _double(view(twice, np.uint32), fourfold)
    _double(view(fourfold, np.uint32), out)


@kernel
def _scale_codes(wanted: Any, codes: Any) -> None:
    """Write the E4M3 codes of positive float32, at most 448, to the nearest, and put their values in their place."""
    for g in range(wanted.size):
        a = min(wanted[g], E4M3_MAX)
        # Adding 2^(e+20) leaves the multiple of 2^(e-3) in the low bits: see fp8.
        exponent = max(u32(bits_of(a) & u32(0x7F800000)), _E4M3_NORMAL)
        aligner = float_of(exponent + u32(20 << 23))
        codes[g] = u32(bits_of(a + aligner) + right(exponent - _E4M3_NORMAL, u32(20)))
        wanted[g] = (a + aligner) - aligner


@kernel
def _wanted_scales(amax: Any, scale: Global, rounding: Float, rounded: Any, wanted: Any) -> None:
    """Write the scale that makes each group's amax 6, before it is rounded to E4M3."""
    if scale.divides:
        for g in range(amax.size):
            wanted[g] = float_of(amax[g]) / E2M1_MAX
        if rounding.shift != u32(0):
            narrow_row(wanted, rounding, rounded)
            for g in range(amax.size):
                wanted[g] = magnitude(rounded[g], rounding)
        for g in range(amax.size):
            scaled = wanted[g] * scale.value
            wanted[g] = scaled if scaled > f32(2.0**-10) else _SCALE_OF_ZEROS
    else:
        sixfold = f32(scale.value * E2M1_MAX)
        for g in range(amax.size):
            scaled = float_of(amax[g]) / sixfold
            wanted[g] = max(scaled, f32(2.0**-9)) if scaled > f32(0) else f32(1)


@kernel
def _apply_global(scales: Any, scale: Global) -> None:
    """Make of each scale what its group's E2M1 values are multiplied by, ``s / G`` or ``s * scale_2``."""
    if scale.divides:
        for g in range(scales.size):
            scales[g] = scales[g] / scale.value
    else:
        for g in range(scales.size):
            scales[g] = scales[g] * scale.value


@kernel
def _group_scales(codes: Any, scale: Global, out: Any) -> None:
    """Write what the E2M1 values of each group are multiplied by, given its scale's code."""
    for g in range(codes.size):
        out[g] = _SCALES[codes[g]]
    _apply_global(out, scale)


@kernel
def _code(quotient: Any) -> Any:
    """Return the E2M1 magnitude code of a float32 in the low 3 bits of a word; ties go to even codes."""
    a = min(abs(quotient), E2M1_MAX)
    exponent = max(u32(bits_of(a) & u32(0x7F800000)), _ONE)
    # Adding 2^(e+22) to a value of exponent e leaves its multiple of 2^(e-1), 2 to 4, in the low bits: the code, but
    # for 2 per binade above 1. That is what the exponent's bits add, less 2 (127 = -1 in 7 bits), made up for here.
    aligned = bits_of(a + float_of(exponent + u32((22 << 23) + 2)))
    return aligned + right(exponent, u32(22))


@kernel
def _codes(even: Any, odd: Any, scales: Any, pairs: Any) -> None:
    """Write each pair of codes to the low byte of a word. A quotient of zero has no sign."""
    for i in range(pairs.size):
        low, high = even[i] / scales[i], odd[i] / scales[i]
        signs = (u32(0x08) if low < f32(0) else u32(0)) | (u32(0x80) if high < f32(0) else u32(0))
        pairs[i] = signs | (_code(low) & u32(0x07)) | (left(_code(high), u32(4)) & u32(0x70))


@kernel
def _bytes(pairs: Any, packed: Any) -> None:
    # Narrowing in the loop above would be done on every operand there.
    for i in range(packed.size):
        packed[i] = pairs[i]


@kernel
def _round_errors(even: Any, odd: Any, inverses: Any, out: Any) -> None:
    """Write each pair's sum of squared rounding errors, in units of its group's scale."""
    for i in range(out.size):
        low, high = abs(even[i]) * inverses[i], abs(odd[i]) * inverses[i]
        a, b = min(low, E2M1_MAX), min(high, E2M1_MAX)
        # As in `_code`, for the value instead of the code.
        aligner_a = float_of(max(u32(bits_of(a) & u32(0x7F800000)), _ONE) + u32(22 << 23))
        aligner_b = float_of(max(u32(bits_of(b) & u32(0x7F800000)), _ONE) + u32(22 << 23))
        error_a = low - ((a + aligner_a) - aligner_a)
        error_b = high - ((b + aligner_b) - aligner_b)
        out[i] = error_a * error_a + error_b * error_b


@kernel
def _candidates(codes: Any, step: Any, inverse_global: Any, values: Any, inverses: Any) -> None:
    """Write the scales ``step`` codes further (the same where E4M3 ends), and what divides by them."""
    for g in range(codes.size):
        code = u32(codes[g] + step)
        code = code if u32(code - u32(1)) < _LARGEST_SCALE else u32(codes[g])
        # A subnormal is read one binade up as 2^-6 + m * 2^-9: see fp8.
        normal = code >= u32(8)
        base = u32(120 << 23) if normal else _E4M3_NORMAL
        surplus = f32(0) if normal else f32(2.0**-6)
        values[g] = float_of(left(code, u32(20)) + base) - surplus
        inverses[g] = inverse_global / values[g]


@kernel
def _in_scales(errors: Any, values: Any) -> None:
    """Bring errors from squared scales to a unit that all scales of the weight share."""
    for g in range(errors.size):
        errors[g] = errors[g] * values[g] * values[g]


@kernel
def _keep_better(errors: Any, values: Any, best: Any, best_values: Any) -> None:
    for g in range(errors.size):
        square = values[g] * values[g]
        error = errors[g] * square
        better = error + _DOUBT * square < best[g]
        best[g] = error if better else best[g]
        best_values[g] = values[g] if better else best_values[g]


@kernel
def _sum(values: Any) -> Any:
    total = 0.0
    for g in range(values.size):
        total += np.float64(values[g])
    return total


class _Search(NamedTuple):
    """What `_search` works in, for one chunk."""

    values: NDArray[np.float32]
    inverses: NDArray[np.float32]
    best: NDArray[np.float32]
    pairs: NDArray[np.float32]
    halves: NDArray[np.float32]
    quarters: NDArray[np.float32]
    groups: NDArray[np.float32]


@kernel
def _search(
    even: Any, odd: Any, scale: Global, twice: Any, fourfold: Any, spread: Any, work: _Search, codes: Any, found: Any
) -> Any:
    """Write to ``found`` the scales, from those of q - 1 to q + 5, q in ``codes``, with the least squared errors.

    Returns the summed errors of the scales in ``codes`` and of those found.
    """
    n = codes.size
    values, inverses, best = work.values[:n], work.inverses[:n], work.best[:n]
    pairs, halves = work.pairs[: n * _PAIRS], work.halves[: n * 4]
    quarters, groups = work.quarters[: n * 2], work.groups[:n]
    inverse_global = scale.value if scale.divides else f32(1) / scale.value
    unit = 1 / np.float64(inverse_global)
    first = 0.0
    for attempt in range(_STEPS.size):
        _candidates(codes, _STEPS[attempt], inverse_global, values, inverses)
        _spread(view(inverses, np.uint32), twice, fourfold, spread)
        _round_errors(even, odd, view(spread, np.float32), pairs)
        _halve_by_sum(pairs, halves)
        _halve_by_sum(halves, quarters)
        _halve_by_sum(quarters, groups)
        if attempt:
            _keep_better(groups, values, best, found)
        else:
            _in_scales(groups, values)
            first = _sum(groups)
            for g in range(n):
                found[g] = values[g]
                best[g] = groups[g] * _BEYOND_DOUBT
    for g in range(n):
        # What nothing beat has its first error again.
        best[g] = best[g] / _BEYOND_DOUBT if found[g] == _SCALES[codes[g]] else best[g]
    return first * unit * unit, _sum(best) * unit * unit


@kernel
def encode(
    words: Any, dtype: Float, rounding: Float, scale: Global, search: bool, packed: Any, scales: Any, errors: Any
) -> Any:
    """Return -1, or the first group of the chunk in which a value is not finite."""
    even, odd, largest = _pair_floats(), _pair_floats(), _pair_words()
    halves, quarters, amax = _quad_words(), _double_words(), _words()
    factors, twice, fourfold, spread = _floats(), _longs(), _double_longs(), _quad_longs()
    work = _Search(_floats(), _floats(), _floats(), _pair_floats(), _quad_floats(), _double_floats(), _floats())
    infinity = bits_of(magnitude(dtype.infinity, dtype))
    words_per_group = GROUP if dtype.shift == u32(0) else _PAIRS
    for first in range(0, scales.size, _CHUNK):
        n = min(scales.size - first, _CHUNK)
        pairs = n * _PAIRS
        low, high, larger = even[:pairs], odd[:pairs], largest[:pairs]
        chunk = words[first * words_per_group : (first + n) * words_per_group]
        _split(chunk, dtype, view(low, np.uint32), view(high, np.uint32), larger)
        _halve_by_max(larger, halves[: n * 4])
        _halve_by_max(halves[: n * 4], quarters[: n * 2])
        _halve_by_max(quarters[: n * 2], amax[:n])
        if _any_from(amax[:n], infinity):
            return first
        codes, by = scales[first : first + n], factors[:n]
        _wanted_scales(amax[:n], scale, rounding, larger[:n], by)
        _scale_codes(by, codes)
        if search:
            before, after = _search(low, high, scale, twice[:n], fourfold[: n * 2], spread[: n * 4], work, codes, by)
            errors[0] += before
            errors[1] += after
            _scale_codes(by, codes)
        _apply_global(by, scale)
        _spread(view(by, np.uint32), twice[:n], fourfold[: n * 2], spread[: n * 4])
        _codes(low, high, view(spread[: n * 4], np.float32), larger)
        _bytes(larger, packed[first * _PAIRS : (first + n) * _PAIRS])
    return -1


@kernel
def _value(code: Any) -> Any:
    """Return the float32 value of the E2M1 code in the lowest 4 bits."""
    a = u32(code) & u32(7)
    # 0 and 0.5 are read one binade up as 1 + m / 2.
    normal = a >= u32(2)
    base = u32(126 << 23) if normal else _ONE
    surplus = f32(0) if normal else f32(1)
    value = bits_of(float_of(left(a, u32(22)) + base) - surplus)
    return float_of(value | left(u32(code) & u32(8), u32(28)))


@kernel
def decode(packed: Any, scales: Any, scale: Global, through: Float, out: Any, out_dtype: Float) -> None:
    """Decode flat arrays, rounding to ``through`` on the way."""
    factors, twice, fourfold, spread = _floats(), _longs(), _double_longs(), _quad_longs()
    values, rounded = _value_floats(), _value_words()
    for first in range(0, scales.size, _CHUNK):
        n = min(scales.size - first, _CHUNK)
        _group_scales(scales[first : first + n], scale, factors[:n])
        _spread(view(factors[:n], np.uint32), twice[:n], fourfold[: n * 2], spread[: n * 4])
        by = view(spread[: n * 4], np.float32)
        pairs = packed[first * _PAIRS : (first + n) * _PAIRS]
        for i in range(pairs.size):
            pair = u32(pairs[i])
            values[2 * i] = _value(pair) * by[i]
            values[2 * i + 1] = _value(right(pair, u32(4))) * by[i]
        chunk = values[: n * GROUP]
        if through.kind != out_dtype.kind:
            narrow_row(chunk, through, rounded[: n * GROUP])
            for c in range(chunk.size):
                chunk[c] = widen(rounded[c], through)
        narrow_row(chunk, out_dtype, out[first * GROUP : (first + n) * GROUP])
