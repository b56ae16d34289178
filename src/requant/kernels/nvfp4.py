"""NVFP4: FP4 E2M1 codes, one E4M3 scale per 16 columns, one float scale per weight (or fused group of weights).

compressed-tensors stores that float as a divisor G: ``W = e2m1 * (s / G)``; ModelOpt as a multiplier, scale_2:
``W = e2m1 * (s * scale_2)``. Groups never straddle rows, so a tile is handled as one flat run of groups.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .floats import FLOATS, Float, f32, first_nonfinite, magnitude, narrow_row, u32, widen
from .jit import bits_of, float_of, kernel, left, right

GROUP = 16
_PAIRS = GROUP // 2
# Groups handled at a time: what is computed between passes over them stays in the L1 cache.
_CHUNK = 128
u64 = np.uint64

_BF16, _F16 = FLOATS["BF16"].kind, FLOATS["F16"].kind
_E2M1_MAX, _E4M3_MAX = f32(6), f32(448)
_ONE = u32(127 << 23)
_E4M3_NORMAL = u32(121 << 23)  # 2^-6
_SCALES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_LARGEST_SCALE = u32(0x7E)
# What compressed-tensors puts in the place of a scale that rounds to zero.
_SCALE_OF_ZEROS = f32(0.125)
# The largest G whose reciprocal every engine can represent; for weights so small that 2688 / amax overflows.
_LARGEST_DIVISOR = f32(2.0**126)

# A search tries the scale codes this far from that of amax, which comes first.
_STEPS = np.array([0, -1, 1, 2, 3, 4, 5], np.int32).view(np.uint32)
# Its float32 quotients are off by up to 2^-20 of a scale, so that an error E, in squared scales, is by less than
# 2^-10 * E + 2^-23. A scale replaces that of amax only where its error is less in spite of both.
_DOUBT = f32(2.0**-22)
_BEYOND_DOUBT = f32(1 - 2.0**-8)
# Beyond, float32 may not have a scale's inverse: the scale of amax stays.
_LARGEST_SEARCHED = 2.0**100


class _Global(NamedTuple):
    """The float scale of a weight: a divisor, or a multiplier."""

    value: np.float32
    divides: np.bool_


def reference_divisor(amax: float, dtype: str) -> float:
    """Return compressed-tensors' G, ``rnd(rnd(1 / amax) * 2688)`` in ``dtype``, or inf where that overflows."""
    rounded = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}[dtype]
    with np.errstate(divide="ignore", over="ignore"):
        reciprocal = rounded(f32(1) / f32(amax)).astype(np.float32)
        return float(rounded(reciprocal * (_E2M1_MAX * _E4M3_MAX)))


def divisor(amax: float, dtype: str) -> tuple[float, str]:
    """Return G for a weight or fused group of this amax, and the dtype in whose arithmetic to encode it.

    compressed-tensors replaces a G that overflows in ``dtype`` by 1, and loses the weight; here it is then computed
    in float32, and is at most 2^126. Zeros, and what has no finite amax, have G = 1.
    """
    if not 0 < amax < np.inf:
        return 1.0, dtype
    g = reference_divisor(amax, dtype)
    if np.isfinite(g):
        return g, dtype
    return min(reference_divisor(amax, "F32"), float(_LARGEST_DIVISOR)), "F32"


def multiplier(amax: float) -> float:
    """Return ModelOpt's scale_2, ``amax / 2688`` in float32, but at least its smallest normal; 1 for zeros."""
    if not 0 < amax < np.inf:
        return 1.0
    return float(max(f32(amax) / (_E2M1_MAX * _E4M3_MAX), np.finfo(np.float32).tiny))


@kernel
def _larger(a: Any, b: Any) -> Any:
    """Return the larger magnitude of two float32, all as bits."""
    return max(u32(a & u32(0x7FFFFFFF)), u32(b & u32(0x7FFFFFFF)))


@kernel
def _split(words: Any, dtype: Float, even: Any, odd: Any, largest: Any) -> None:
    """Write a chunk's even and odd columns as float32 bits, and of each pair the larger magnitude.

    ``words``: u32, a pair each (BF16, F16), or one value (F32).
    """
    if dtype.kind == _BF16:
        for i in range(even.size):
            a, b = left(words[i], u32(16)), words[i] & u32(0xFFFF0000)
            even[i], odd[i], largest[i] = a, b, _larger(a, b)
    elif dtype.kind == _F16:
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
    _double(twice.view(np.uint32), fourfold)
    _double(fourfold.view(np.uint32), out)


@kernel
def _scale_codes(wanted: Any, codes: Any) -> None:
    """Write the E4M3 codes of positive float32, at most 448, to the nearest, and put their values in their place."""
    for g in range(wanted.size):
        a = min(wanted[g], _E4M3_MAX)
        # Adding 2^(e+20) leaves the multiple of 2^(e-3) in the low bits: see fp8.
        exponent = max(u32(bits_of(a) & u32(0x7F800000)), _E4M3_NORMAL)
        aligner = float_of(exponent + u32(20 << 23))
        codes[g] = u32(bits_of(a + aligner) + right(exponent - _E4M3_NORMAL, u32(20)))
        wanted[g] = (a + aligner) - aligner


@kernel
def _wanted_scales(amax: Any, scale: _Global, rounding: Float, rounded: Any, wanted: Any) -> None:
    """Write the scale that makes each group's amax 6, before it is rounded to E4M3."""
    if scale.divides:
        for g in range(amax.size):
            wanted[g] = float_of(amax[g]) / _E2M1_MAX
        if rounding.shift != u32(0):
            narrow_row(wanted, rounding, rounded)
            for g in range(amax.size):
                wanted[g] = magnitude(rounded[g], rounding)
        for g in range(amax.size):
            scaled = wanted[g] * scale.value
            wanted[g] = scaled if scaled > f32(2.0**-10) else _SCALE_OF_ZEROS
    else:
        sixfold = f32(scale.value * _E2M1_MAX)
        for g in range(amax.size):
            scaled = float_of(amax[g]) / sixfold
            wanted[g] = max(scaled, f32(2.0**-9)) if scaled > f32(0) else f32(1)


@kernel
def _apply_global(scales: Any, scale: _Global) -> None:
    """Make of each scale what its group's E2M1 values are multiplied by, ``s / G`` or ``s * scale_2``."""
    if scale.divides:
        for g in range(scales.size):
            scales[g] = scales[g] / scale.value
    else:
        for g in range(scales.size):
            scales[g] = scales[g] * scale.value


@kernel
def _group_scales(codes: Any, scale: _Global, out: Any) -> None:
    """Write what the E2M1 values of each group are multiplied by, given its scale's code."""
    for g in range(codes.size):
        out[g] = _SCALES[codes[g]]
    _apply_global(out, scale)


@kernel
def _code(quotient: Any) -> Any:
    """Return the E2M1 magnitude code of a float32 in the low 3 bits of a word; ties go to even codes."""
    a = min(abs(quotient), _E2M1_MAX)
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
        a, b = min(low, _E2M1_MAX), min(high, _E2M1_MAX)
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
    even: Any, odd: Any, scale: _Global, twice: Any, fourfold: Any, spread: Any, work: _Search, codes: Any, found: Any
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
        _spread(inverses.view(np.uint32), twice, fourfold, spread)
        _round_errors(even, odd, spread.view(np.float32), pairs)
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
def _encode(
    words: Any, dtype: Float, rounding: Float, scale: _Global, search: bool, packed: Any, scales: Any, errors: Any
) -> Any:
    """Return -1, or the first group of the chunk in which a value is not finite."""
    even = np.empty(_CHUNK * _PAIRS, np.float32)
    odd = np.empty(_CHUNK * _PAIRS, np.float32)
    largest = np.empty(_CHUNK * _PAIRS, np.uint32)
    halves = np.empty(_CHUNK * 4, np.uint32)
    quarters = np.empty(_CHUNK * 2, np.uint32)
    amax = np.empty(_CHUNK, np.uint32)
    factors = np.empty(_CHUNK, np.float32)
    twice = np.empty(_CHUNK, np.uint64)
    fourfold = np.empty(_CHUNK * 2, np.uint64)
    spread = np.empty(_CHUNK * 4, np.uint64)
    room = _CHUNK if search else 0
    work = _Search(
        np.empty(room, np.float32),
        np.empty(room, np.float32),
        np.empty(room, np.float32),
        np.empty(room * _PAIRS, np.float32),
        np.empty(room * 4, np.float32),
        np.empty(room * 2, np.float32),
        np.empty(room, np.float32),
    )
    infinity = bits_of(magnitude(dtype.infinity, dtype))
    words_per_group = GROUP if dtype.shift == u32(0) else _PAIRS
    for first in range(0, scales.size, _CHUNK):
        n = min(scales.size - first, _CHUNK)
        pairs = n * _PAIRS
        low, high, larger = even[:pairs], odd[:pairs], largest[:pairs]
        chunk = words[first * words_per_group : (first + n) * words_per_group]
        _split(chunk, dtype, low.view(np.uint32), high.view(np.uint32), larger)
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
        _spread(by.view(np.uint32), twice[:n], fourfold[: n * 2], spread[: n * 4])
        _codes(low, high, spread[: n * 4].view(np.float32), larger)
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
def _decode(packed: Any, scales: Any, scale: _Global, through: Float, out: Any, out_dtype: Float) -> None:
    factors = np.empty(_CHUNK, np.float32)
    twice = np.empty(_CHUNK, np.uint64)
    fourfold = np.empty(_CHUNK * 2, np.uint64)
    spread = np.empty(_CHUNK * 4, np.uint64)
    values = np.empty(_CHUNK * GROUP, np.float32)
    rounded = np.empty(_CHUNK * GROUP, np.uint32)
    for first in range(0, scales.size, _CHUNK):
        n = min(scales.size - first, _CHUNK)
        _group_scales(scales[first : first + n], scale, factors[:n])
        _spread(factors[:n].view(np.uint32), twice[:n], fourfold[: n * 2], spread[: n * 4])
        by = spread[: n * 4].view(np.float32)
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


def encode(
    w: NDArray[Any],
    dtype: str,
    rounding: str,
    global_scale: float,
    divides: bool,
    search: bool,
    packed: NDArray[np.uint8],
    scales: NDArray[np.uint8],
    errors: NDArray[np.float64] | None,
) -> int:
    """Encode a tile of bits of ``dtype`` [rows, cols], cols % 16 = 0, whose float scale is given.

    If that ``divides`` (compressed-tensors), ``s = e4m3(G * rnd(amax / 6))`` with rnd() to ``rounding``, 0.125 for
    zero, and codes are those of ``w / (s / G)`` in float32. Otherwise (ModelOpt, without roundings to ``dtype``)
    ``s = e4m3(amax / (6 * scale_2))``, at least 2^-9, 1 for a group of zeros, and codes are those of
    ``w / (s * scale_2)``. Codes are rounded to nearest even; what is negative and rounds to zero keeps its sign.

    ``search``: of the scales from one E4M3 code below that to five above, take the one with the least squared error
    of its group; to ``errors``, float64 [2] if given, are added the sums for the first scales and for those taken.
    There is no search where the float scale is beyond 2^100 either way.

    Written: ``packed`` [rows, cols / 2], even column in the low nibble, and ``scales`` E4M3 [rows, cols / 16].

    Returns the flat index of the first NaN or infinity (the outputs are then meaningless), or -1.
    """
    flat = w.reshape(-1)
    scale = _Global(f32(global_scale), np.bool_(divides))
    words = flat.view(np.uint32)
    search = search and 1 / _LARGEST_SEARCHED < global_scale < _LARGEST_SEARCHED
    sums = np.zeros(2) if errors is None else errors
    flat_packed, flat_scales = packed.reshape(-1), scales.reshape(-1)
    chunk = _encode(words, FLOATS[dtype], FLOATS[rounding], scale, search, flat_packed, flat_scales, sums)
    if chunk < 0:
        return -1
    start = int(chunk) * GROUP
    return start + int(first_nonfinite(flat[start:], FLOATS[dtype]))


def decode(
    packed: NDArray[np.uint8],
    scales: NDArray[np.uint8],
    global_scale: float,
    divides: bool,
    out: NDArray[Any],
    out_dtype: str,
) -> None:
    """Write the values of ``packed`` [rows, cols / 2] and ``scales`` [rows, cols / 16] to ``out`` [rows, cols].

    ``global_scale`` is compressed-tensors' G if it ``divides``, else ModelOpt's scale_2. The group's scale, and its
    product with a code, are each rounded to float32: the stored values, for F32. compressed-tensors decodes to
    BF16, whatever is made of that afterwards: its F16 is rounded twice. ModelOpt's is not.
    """
    scale = _Global(f32(global_scale), np.bool_(divides))
    through = "BF16" if divides and out_dtype == "F16" else out_dtype
    _decode(packed.reshape(-1), scales.reshape(-1), scale, FLOATS[through], out.reshape(-1), FLOATS[out_dtype])
