"""MXFP4, and MXFP4 to FP8: see `requant.kernels.mxfp4`."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from requant.kernels import mxfp4
from requant.kernels.floats import u32
from requant.kernels.mx import GROUP
from requant.kernels.mxfp4 import ALL_ZERO, PAIRS, SAFE_DEPTH, UNKNOWN, Room

from .jit import kernel, left, scratch, view

_BYTES = GROUP // 2
_WORDS = GROUP // 8
u64 = np.uint64

# MXFP4 to E4M3: a group's *depth* is how many binades its 0.5 lies below 2^8, the top binade of a scaled region.
# Down to depth 14 every nonzero code becomes a normal E4M3 number. Below, row d - 15 has e2m1 * 2^(9 - d), two codes
# per byte, rounded to nearest even; at depth 22 everything is zero.
_LAST_NORMAL_DEPTH = 14
_LAST_DEPTH = 22
_TARGETS = PAIRS * 2.0 ** (9 - np.arange(_LAST_NORMAL_DEPTH + 1, _LAST_DEPTH + 1))[:, None, None]
_ROUNDED = _TARGETS.astype(ml_dtypes.float8_e4m3fn)
_DEEP_CODES = _ROUNDED.view(np.uint16)[:, :, 0]
_DEEP_INEXACT = np.any(_ROUNDED.astype(np.float64) != _TARGETS, axis=-1)
# Groups whose exponents are at most this far apart cannot lose anything.
_SAFE_RANGE = 14
_CHUNK = 64  # groups
_codes, _half_words = scratch(np.uint8, _CHUNK * GROUP), scratch(np.uint64, _CHUNK * _WORDS)
_scale_exponent = kernel(mxfp4.scale_exponent)


@kernel
def _unpack(packed: Any, pairs: Any) -> None:
    """Spread a row's bytes to uint16 whose bytes hold one code each, the even column first."""
    for i in range(packed.size):
        pair = u32(packed[i])
        pairs[i] = (pair | left(pair, u32(4))) & u32(0x0F0F)


@kernel
def decode(packed: Any, exponents: Any, decoded: Any, out: Any) -> None:
    """Look up every byte of flat arrays in ``decoded`` [exponent, byte]."""
    for g in range(exponents.size):
        row = decoded[exponents[g]]
        for i in range(g * _BYTES, g * _BYTES + _BYTES):
            out[i] = row[packed[i]]


@kernel
def _group_log2(words: Any) -> Any:
    """Return floor(log2(largest magnitude)) of the 32 codes in two uint64, or -2 if all are zero."""
    a, b = words[0], words[1]
    codes = a | b
    if ((a & (a << u64(1))) | (b & (b << u64(1)))) & u64(0x4444444444444444):
        return 2
    if codes & u64(0x4444444444444444):
        return 1
    if codes & u64(0x2222222222222222):
        return 0
    return -1 if codes & u64(0x1111111111111111) else -2


@kernel
def _band_range(exponents: Any, low: Any, high: Any) -> None:
    """Write the least and the largest byte of each column of groups."""
    low[:] = 255
    high[:] = 0
    for r in range(exponents.shape[0]):
        row = exponents[r]
        for g in range(row.size):
            low[g] = row[g] if row[g] < low[g] else low[g]
            high[g] = row[g] if row[g] > high[g] else high[g]


@kernel
def _range(low: Any, high: Any) -> Any:
    """Return the least and the largest of all bytes."""
    least, largest = np.uint8(255), np.uint8(0)
    for g in range(low.size):
        if low[g] < least:
            least = low[g]
        if high[g] > largest:
            largest = high[g]
    return np.int64(least), np.int64(largest)


@kernel
def log2_amax(words: Any, exponents: Any, largest: int) -> Any:
    """Return floor(log2(amax)) of a region, or ALL_ZERO.

    ``words`` uint64 [rows, groups, 2], ``exponents`` [rows, groups], of which ``largest`` is the largest.
    """
    top = ALL_ZERO
    for r in range(exponents.shape[0]):
        for g in range(exponents.shape[1]):
            k = np.int64(exponents[r, g]) - 127
            if k + 2 > top:
                log2 = _group_log2(words[r, g])
                if log2 > -2:
                    top = max(top, k + log2)
        if top == largest - 127 + 2:
            break
    return top


@kernel
def _depth(exponent: Any, scale_exponent: Any) -> Any:
    """Return a group's depth, within 0 (above lie zeros only) and the last."""
    return min(max(9 + scale_exponent - (np.int64(exponent) - 127), 0), _LAST_DEPTH)


@kernel
def _inexact(packed: Any, exponents: Any, scale_exponent: Any) -> Any:
    """Tell whether a region holds a value that E4M3 cannot."""
    for r in range(exponents.shape[0]):
        for g in range(exponents.shape[1]):
            depth = _depth(exponents[r, g], scale_exponent)
            if depth > _LAST_NORMAL_DEPTH:
                for i in range(g * _BYTES, g * _BYTES + _BYTES):
                    if _DEEP_INEXACT[depth - _LAST_NORMAL_DEPTH - 1, packed[r, i]]:
                        return True
    return False


@kernel
def _rescale(e2m1: Any, halves: Any, codes: Any) -> None:
    """Write E4M3 codes of E2M1 ``codes`` [cols]; ``halves`` [cols] is the E4M3 code of 0.5, a normal number."""
    for c in range(e2m1.size):
        a = np.uint8(e2m1[c] & np.uint8(7))
        # 0.5 is E2M1's subnormal: the step to its code is 4 less than the three bits would say.
        base = halves[c] if a > np.uint8(1) else np.uint8(halves[c] - np.uint8(4))
        code = np.uint8(np.uint8(a << np.uint8(2)) + base) if a > np.uint8(0) else np.uint8(0)
        codes[c] = code | np.uint8((e2m1[c] & np.uint8(8)) << np.uint8(4))


@kernel
def to_fp8(
    packed: Any,
    words: Any,
    exponents: Any,
    known_top: int,
    height: int,
    width: int,
    room: Room,
    codes: Any,
    scales: Any,
) -> Any:
    """Encode, or with empty ``scales`` only count; returns the number of values in inexact regions.

    ``known_top`` is what `log2_amax` would return for every region, unless it is UNKNOWN.
    """
    rows, groups = exponents.shape
    low, high, scale_exponents = room.low, room.high, room.scale_exponents
    over_span = 0
    for i in range(-(-rows // height)):  # a step that is not a constant could be 0, for which range() raises
        top, bottom = i * height, min(i * height + height, rows)
        _band_range(exponents[top:bottom], low, high)
        for j in range(-(-groups // width)):
            first, last = j * width, min(j * width + width, groups)
            least, largest = _range(low[first:last], high[first:last])
            region = exponents[top:bottom, first:last]
            log2 = log2_amax(words[top:bottom, first:last], region, largest) if known_top == UNKNOWN else known_top
            scale_exponent = _scale_exponent(log2)
            scale_exponents[first:last] = scale_exponent
            bytes_ = packed[top:bottom, first * _BYTES : last * _BYTES]
            if _depth(least, scale_exponent) > SAFE_DEPTH and _inexact(bytes_, region, scale_exponent):
                over_span += (bottom - top) * (last - first) * GROUP
            if scales.size:
                scales[i, j] = (scale_exponent + 127) << 7
        if scales.size:
            for r in range(top, bottom):
                _encode_row(packed[r], exponents[r], scale_exponents, codes[r])
    return over_span


@kernel
def _encode_row(packed: Any, exponents: Any, scale_exponents: Any, codes: Any) -> None:
    e2m1, half_words = _codes(), _half_words()  # a byte for each code; written in words for speed
    for start in range(0, exponents.size, _CHUNK):
        stop = min(start + _CHUNK, exponents.size)
        groups = stop - start
        nibbles, out = packed[start * _BYTES : stop * _BYTES], codes[start * GROUP : stop * GROUP]
        chunk, chunk_scales = exponents[start:stop], scale_exponents[start:stop]
        _unpack(nibbles, view(e2m1, np.uint16))
        for g in range(groups):
            half = np.uint8(8 * (_LAST_NORMAL_DEPTH + 1 - _depth(chunk[g], chunk_scales[g])))
            for i in range(g * _WORDS, g * _WORDS + _WORDS):
                half_words[i] = u64(half) * u64(0x0101010101010101)
        _rescale(e2m1[: groups * GROUP], view(half_words, np.uint8), out)
        pairs = view(out, np.uint16)
        for g in range(groups):
            depth = _depth(chunk[g], chunk_scales[g])
            if depth > _LAST_NORMAL_DEPTH:
                for i in range(g * _BYTES, g * _BYTES + _BYTES):
                    pairs[i] = _DEEP_CODES[depth - _LAST_NORMAL_DEPTH - 1, nibbles[i]]


@kernel
def suspects(exponents: Any, height: int, width: int, room: Room, out: Any) -> None:
    """Tell which regions hold exponents so far apart that something may be lost."""
    low, high = room.low, room.high
    for i in range(out.shape[0]):
        _band_range(exponents[i * height : i * height + height], low, high)
        for j in range(out.shape[1]):
            region = slice(j * width, j * width + width)
            least, largest = _range(low[region], high[region])
            out[i, j] = largest - least > _SAFE_RANGE
