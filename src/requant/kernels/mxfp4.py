"""MXFP4: groups of 32 FP4 E2M1 values along a row that share a power-of-two (E8M0) scale; and its way to FP8."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from . import mx
from .floats import DTYPES, f32, u32
from .jit import kernel, left
from .mx import GROUP

BLOCK = 128
_BYTES = GROUP // 2
_WORDS = GROUP // 8
u64 = np.uint64

_E2M1 = np.outer([1, -1], [0, 0.5, 1, 1.5, 2, 3, 4, 6]).ravel()
# [byte, 2]: the even column is the low nibble.
_PAIRS = _E2M1[np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=-1)]

# MXFP4 to E4M3: a group's *depth* is how many binades its 0.5 lies below 2^8, the top binade of a scaled region.
# Down to depth 14 every nonzero code becomes a normal E4M3 number. Below, row d - 15 has e2m1 * 2^(9 - d), two codes
# per byte, rounded to nearest even; at depth 22 everything is zero.
_LAST_NORMAL_DEPTH = 14
_LAST_DEPTH = 22
_TARGETS = _PAIRS * 2.0 ** (9 - np.arange(_LAST_NORMAL_DEPTH + 1, _LAST_DEPTH + 1))[:, None, None]
_ROUNDED = _TARGETS.astype(ml_dtypes.float8_e4m3fn)
_DEEP_CODES = _ROUNDED.view(np.uint16)[:, :, 0]
_DEEP_INEXACT = np.any(_ROUNDED.astype(np.float64) != _TARGETS, axis=-1)
# Groups whose exponents are at most this far apart cannot lose anything; nor can a group down to this depth, where
# 0.5 becomes E4M3's smallest number.
_SAFE_RANGE = 14
_SAFE_DEPTH = 17
_ALL_ZERO = -1000
_UNKNOWN = 1000


@kernel
def _unpack(packed: Any, pairs: Any) -> None:
    """Spread a row's bytes to uint16 whose bytes hold one code each, the even column first."""
    for i in range(packed.size):
        pair = u32(packed[i])
        pairs[i] = (pair | left(pair, u32(4))) & u32(0x0F0F)


@cache
def _decoded(dtype: str) -> NDArray[Any]:
    """Return [exponent, byte] the two values of a byte of codes, as a word of their bits in ``dtype``."""
    scales = 2.0 ** (np.arange(256) - 127.0)
    scales[255] = np.nan
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.multiply.outer(scales, _PAIRS).astype(np.float32)  # exact, or Inf
        words: NDArray[Any] = values.astype(DTYPES[dtype]).view(np.uint64 if dtype == "F32" else np.uint32)
    return words[..., 0]


@kernel
def _decode(packed: Any, exponents: Any, decoded: Any, out: Any) -> None:
    for g in range(exponents.size):
        row = decoded[exponents[g]]
        for i in range(g * _BYTES, g * _BYTES + _BYTES):
            out[i] = row[packed[i]]


def decode(packed: NDArray[np.uint8], exponents: NDArray[np.uint8], out: NDArray[Any], out_dtype: str) -> None:
    """Write ``e2m1 * 2^(byte - 127)`` to ``out`` [rows, cols] as bits of ``out_dtype``.

    ``packed`` [rows, cols / 2], even column in the low nibble; ``exponents`` E8M0 [rows, cols / 32]. Exact in
    float32 and BF16 up to byte 252; F16 rounds to nearest even.
    """
    decoded = _decoded(out_dtype)
    _decode(packed.reshape(-1), exponents.reshape(-1), decoded, out.reshape(-1).view(decoded.dtype))


# The largest magnitude that rounds to zero: half the smallest subnormal. A zero has no sign.
_VANISHING = {"BF16": f32(2.0**-134), "F16": f32(2.0**-25), "F32": f32(0)}


def encode(
    w: NDArray[Any],
    dtype: str,
    packed: NDArray[np.uint8],
    exponents: NDArray[np.uint8],
    search: bool = False,
    errors: NDArray[np.float64] | None = None,
) -> int:
    """Encode a tile; see `mx.encode`. A negative value that its code cannot hold keeps its sign, -0.0 does not.

    Written: ``packed`` [rows, cols / 2], even column in the low nibble, and ``exponents`` [rows, cols / 32].
    """
    return mx.encode(w, dtype, mx.E2M1, _VANISHING[dtype], search, packed, exponents, errors)


@kernel
def _log2_amax(words: Any) -> Any:
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
def _top(words: Any, exponents: Any, largest: Any) -> Any:
    """Return floor(log2(amax)) of a region, or _ALL_ZERO.

    ``words`` uint64 [rows, groups, 2], ``exponents`` [rows, groups], of which ``largest`` is the largest.
    """
    top = _ALL_ZERO
    for r in range(exponents.shape[0]):
        for g in range(exponents.shape[1]):
            k = np.int64(exponents[r, g]) - 127
            if k + 2 > top:
                log2 = _log2_amax(words[r, g])
                if log2 > -2:
                    top = max(top, k + log2)
        if top == largest - 127 + 2:
            break
    return top


@kernel
def _scale_exponent(top: Any) -> Any:
    """Return the exponent of the FP8 scale of a region with this floor(log2(amax)).

    It puts amax into E4M3's top binade, 2^8, and is at least that of BF16's smallest normal; 0 if all is zero.
    """
    return 0 if top == _ALL_ZERO else max(top - 8, -126)


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
def _rescale_row(e2m1: Any, halves: Any, codes: Any) -> None:
    """Write E4M3 codes of E2M1 ``codes`` [cols]; ``halves`` [cols] is the E4M3 code of 0.5, a normal number."""
    for c in range(e2m1.size):
        a = np.uint8(e2m1[c] & np.uint8(7))
        # 0.5 is E2M1's subnormal: the step to its code is 4 less than the three bits would say.
        base = halves[c] if a > np.uint8(1) else np.uint8(halves[c] - np.uint8(4))
        code = np.uint8(np.uint8(a << np.uint8(2)) + base) if a > np.uint8(0) else np.uint8(0)
        codes[c] = code | np.uint8((e2m1[c] & np.uint8(8)) << np.uint8(4))


@kernel
def _to_fp8(
    packed: Any, words: Any, exponents: Any, known_top: int, height: int, width: int, codes: Any, scales: Any
) -> Any:
    """Encode, or with empty ``scales`` only count; returns the number of values in inexact regions.

    ``known_top`` is what `_top` would return for every region, unless it is _UNKNOWN.
    """
    rows, groups = exponents.shape
    low = np.empty(groups, np.uint8)
    high = np.empty(groups, np.uint8)
    scale_exponents = np.empty(groups, np.int64)
    e2m1 = np.empty(groups * GROUP, np.uint8)
    half_words = np.empty(groups * _WORDS, np.uint64)  # a byte for each code; written in words for speed
    over_span = 0
    for top in range(0, rows, height):
        bottom = min(top + height, rows)
        _band_range(exponents[top:bottom], low, high)
        for first in range(0, groups, width):
            last = min(first + width, groups)
            least, largest = _range(low[first:last], high[first:last])
            region = exponents[top:bottom, first:last]
            log2 = _top(words[top:bottom, first:last], region, largest) if known_top == _UNKNOWN else known_top
            scale_exponent = _scale_exponent(log2)
            scale_exponents[first:last] = scale_exponent
            bytes_ = packed[top:bottom, first * _BYTES : last * _BYTES]
            if _depth(least, scale_exponent) > _SAFE_DEPTH and _inexact(bytes_, region, scale_exponent):
                over_span += (bottom - top) * (last - first) * GROUP
            if scales.size:
                scales[top // height, first // width] = (scale_exponent + 127) << 7
        if not scales.size:
            continue
        for r in range(top, bottom):
            _unpack(packed[r], e2m1.view(np.uint16))
            for g in range(groups):
                half = np.uint8(8 * (_LAST_NORMAL_DEPTH + 1 - _depth(exponents[r, g], scale_exponents[g])))
                for i in range(g * _WORDS, g * _WORDS + _WORDS):
                    half_words[i] = u64(half) * u64(0x0101010101010101)
            _rescale_row(e2m1, half_words.view(np.uint8), codes[r])
            pairs = codes[r].view(np.uint16)
            for g in range(groups):
                depth = _depth(exponents[r, g], scale_exponents[g])
                if depth > _LAST_NORMAL_DEPTH:
                    for i in range(g * _BYTES, g * _BYTES + _BYTES):
                        pairs[i] = _DEEP_CODES[depth - _LAST_NORMAL_DEPTH - 1, packed[r, i]]
    return over_span


def _run(
    packed: NDArray[np.uint8],
    exponents: NDArray[np.uint8],
    block: bool,
    codes: NDArray[np.uint8],
    scales: NDArray[np.uint16],
    top: int = _UNKNOWN,
) -> int:
    rows, groups = exponents.shape
    height, width = (BLOCK, BLOCK // GROUP) if block else (1, groups)
    words = packed.view(np.uint64).reshape(rows, groups, 2)
    return int(_to_fp8(packed, words, exponents, top, height, width, codes, scales))


_NO_CODES = np.empty((0, 0), np.uint8)
_NO_SCALES = np.empty((0, 0), np.uint16)


def to_fp8_block(
    packed: NDArray[np.uint8],
    exponents: NDArray[np.uint8],
    codes: NDArray[np.uint8],
    scales: NDArray[np.uint16],
) -> int:
    """Rewrite MXFP4 as FP8 with one power-of-two scale per 128 x 128 block, without loss where E4M3 can hold it.

    Written: ``codes`` E4M3 [rows, cols] and ``scales``, BF16 bits [ceil(rows / 128), ceil(cols / 128)]:
    ``2^(floor(log2(amax)) - 8)``, at least 2^-126, 1 for a block of zeros. The tile starts at a block's first row.

    Returns the number of values in over-span blocks, those with a value that is no multiple of ``scale * 2^-9``
    (0: nothing was lost). Their values are rounded to nearest even.
    """
    return _run(packed, exponents, True, codes, scales)


def to_fp8_channel(
    packed: NDArray[np.uint8],
    exponents: NDArray[np.uint8],
    codes: NDArray[np.uint8],
    scales: NDArray[np.uint16],
) -> int:
    """As `to_fp8_block`, with one scale per row: ``scales`` [rows, 1]."""
    return _run(packed, exponents, False, codes, scales)


def to_fp8_tensor(
    packed: NDArray[np.uint8],
    exponents: NDArray[np.uint8],
    top: int | None,
    codes: NDArray[np.uint8],
    scale: NDArray[np.uint16],
) -> int:
    """As `to_fp8_block`, with the one scale [1] of a whole weight, of which this is a tile.

    ``top`` is floor(log2(amax)) of the weight, None if it is all zeros. A tile does not see all that shares the scale:
    the values counted are those of the rows that hold one that E4M3 cannot.
    """
    scales = np.empty((exponents.shape[0], 1), np.uint16)
    scale[0] = (_scale_exponent(_known(top)) + 127) << 7
    return _run(packed, exponents, False, codes, scales, _known(top))


def _known(top: int | None) -> int:
    return _ALL_ZERO if top is None else top


def over_span(packed: NDArray[np.uint8], exponents: NDArray[np.uint8], block: bool) -> int:
    """Return what `to_fp8_block` (or, not ``block``, `to_fp8_channel`) would return, and write nothing."""
    return _run(packed, exponents, block, _NO_CODES, _NO_SCALES)


def over_span_tensor(packed: NDArray[np.uint8], exponents: NDArray[np.uint8], top: int | None) -> int:
    """Return what `to_fp8_tensor` would return, and write nothing."""
    return _run(packed, exponents, False, _NO_CODES, _NO_SCALES, _known(top))


@kernel
def _log2_top(words: Any, exponents: Any, low: Any, high: Any) -> Any:
    _band_range(exponents, low, high)
    return _top(words, exponents, _range(low, high)[1])


def log2_amax(packed: NDArray[np.uint8], exponents: NDArray[np.uint8]) -> int | None:
    """Return floor(log2(largest magnitude)) of a tile, or None if all of it is zero."""
    rows, groups = exponents.shape
    low, high = np.empty((2, groups), np.uint8)
    top = int(_log2_top(packed.view(np.uint64).reshape(rows, groups, 2), exponents, low, high))
    return None if top == _ALL_ZERO else top


@kernel
def _suspects(exponents: Any, height: int, width: int, out: Any) -> None:
    rows, groups = exponents.shape
    low = np.empty(groups, np.uint8)
    high = np.empty(groups, np.uint8)
    for top in range(0, rows, height):
        _band_range(exponents[top : top + height], low, high)
        for b in range(out.shape[1]):
            region = slice(b * width, b * width + width)
            least, largest = _range(low[region], high[region])
            out[top // height, b] = largest - least > _SAFE_RANGE


def suspects(exponents: NDArray[np.uint8], block: bool) -> NDArray[np.bool_]:
    """Tell which regions may be over-span, judged by their exponents [rows, cols / 32] alone.

    Returns bool [ceil(rows / 128), ceil(cols / 128)], or [rows, 1] if not ``block``. Exponents within 14 of each
    other are always exact; a region beyond may still be (its outliers may be groups of zeros).
    """
    rows, groups = exponents.shape
    height, width = (BLOCK, BLOCK // GROUP) if block else (1, groups)
    out = np.empty((-(-rows // height), -(-groups // width)), np.bool_)
    _suspects(exponents, height, width, out)
    return out


def suspects_tensor(exponents: NDArray[np.uint8], top: int | None) -> NDArray[np.bool_]:
    """Tell which rows of a tile [rows, 1] may hold a value that `to_fp8_tensor` rounds, judged by their exponents."""
    deepest = _scale_exponent(_known(top)) + 9 - _SAFE_DEPTH + 127
    lowest: NDArray[np.bool_] = exponents.min(axis=1, keepdims=True, initial=255) < deepest
    return lowest
