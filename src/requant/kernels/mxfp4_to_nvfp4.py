"""MXFP4 as NVFP4: the codes stay, the exponents become E4M3 powers of two below one float scale.

With kmax the largest exponent of a group that holds more than zeros, the float scale is 2^(8 - kmax) as a divisor,
and a group of exponent k has the scale 2^(8 - depth), depth = kmax - k, twice: once for each 16 of its 32 values.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .jit import kernel

GROUP = 16
u64 = np.uint64

# E4M3's powers of two: normal down to 2^-6, at depth 14; the smallest is 2^-9, at depth 17. Some engines (vLLM's
# Marlin) take scales below 2^-6 for zero.
_LAST_NORMAL_DEPTH = 14
_LAST_DEPTH = 17
# Codes halved so many times all become zero.
_MOST_HALVINGS = 5
# Groups looked at together.
_CHUNK = 256
_MAGNITUDES = u64(0x7777777777777777)

_E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
# [times, code]: e2m1 / 2^times, to the nearest, ties to even. A zero keeps its sign.
_TARGETS = _E2M1 / np.float32(2.0) ** np.arange(_MOST_HALVINGS + 1)[:, None].astype(np.float32)
_HALVED = _TARGETS.astype(ml_dtypes.float4_e2m1fn)
_EXACT = _HALVED.astype(np.float32) == _TARGETS
_HALVED_CODES = _HALVED.view(np.uint8)
_CODES = np.arange(256)
# [times, byte]
_HALVED_PAIRS = (_HALVED_CODES[:, _CODES & 15] | _HALVED_CODES[:, _CODES >> 4] << 4).astype(np.uint8)
_EXACT_PAIRS = _EXACT[:, _CODES & 15] & _EXACT[:, _CODES >> 4]


@kernel
def _power(depth: Any) -> Any:
    """Return the E4M3 code of 2^(8 - depth)."""
    if depth <= _LAST_NORMAL_DEPTH:
        return np.uint8((_LAST_NORMAL_DEPTH + 1 - depth) << 3)
    return np.uint8(1 << (_LAST_DEPTH - depth))


@kernel
def _halves_exactly(packed: Any, start: int, times: Any) -> Any:
    exact = True
    for i in range(start, start + GROUP // 2):
        exact &= _EXACT_PAIRS[times, packed[i]]
    return exact


@kernel
def _choose(packed: Any, start: int, depth: Any) -> Any:
    """Return for the 16 codes from byte ``start`` on: their scale's depth, how often they are halved, if that is exact.

    Where halving brings the scale back to 2^-6 without loss, it is done although NVFP4 could do without.
    """
    if depth <= _LAST_NORMAL_DEPTH:
        return depth, 0, True
    times = depth - _LAST_NORMAL_DEPTH
    if depth <= _LAST_DEPTH:
        if _halves_exactly(packed, start, times):
            return _LAST_NORMAL_DEPTH, times, True
        return depth, 0, True
    times = min(depth - _LAST_DEPTH, _MOST_HALVINGS)
    return _LAST_DEPTH, times, _halves_exactly(packed, start, times)


@kernel
def _all_normal(exponents: Any, top: Any) -> Any:
    """Tell whether all exponent bytes lie within the depths of normal scales, ``top`` being that of depth 0."""
    deepest = np.uint16(0)
    for g in range(exponents.size):
        depth = np.uint16(np.uint16(top) - np.uint16(exponents[g]))  # what lies above wraps to far below
        if depth > deepest:
            deepest = depth
    return deepest <= _LAST_NORMAL_DEPTH


@kernel
def _normal_scales(exponents: Any, top: Any, scales: Any) -> None:
    """Write E4M3's normal powers of two, each twice; what is out of their range is written over later."""
    for g in range(exponents.size):
        code = np.uint16(np.uint16(_LAST_NORMAL_DEPTH + 1) - np.uint16(top) + np.uint16(exponents[g])) << np.uint16(3)
        scales[g] = np.uint16(code) | np.uint16(code) << np.uint16(8)


@kernel
def _transcode(packed: Any, words: Any, exponents: Any, kmax: int, out: Any, scales: Any) -> Any:
    """Encode into a copy of the codes, or with empty ``scales`` only count; flat arrays, ``scales`` uint16 a pair.

    Returns the number of groups of 16 that lost something, and of those with a scale below 2^-6.
    """
    halves = scales.view(np.uint8)
    write = scales.size > 0
    top = np.uint8(kmax + 127)
    lost = deep = 0
    for first in range(0, exponents.size, _CHUNK):
        last = min(first + _CHUNK, exponents.size)
        if write:
            _normal_scales(exponents[first:last], top, scales[first:last])
        if _all_normal(exponents[first:last], top):
            continue
        for g in range(first, last):
            group_depth: Any = np.int64(top) - np.int64(exponents[g])
            if 0 <= group_depth <= _LAST_NORMAL_DEPTH:
                continue
            for half in range(2):
                start = g * GROUP + half * GROUP // 2
                if words[2 * g + half] & _MAGNITUDES == u64(0):
                    depth, times, exact = min(max(group_depth, 0), _LAST_NORMAL_DEPTH), 0, True
                else:
                    depth, times, exact = _choose(packed, start, group_depth)
                lost += not exact
                deep += depth > _LAST_NORMAL_DEPTH
                if write:
                    halves[2 * g + half] = _power(depth)
                    for i in range(start, start + GROUP // 2):
                        out[i] = _HALVED_PAIRS[times, packed[i]]
    return lost, deep


_NOTHING = np.empty(0, np.uint8), np.empty(0, np.uint16)


def _run(
    packed: NDArray[np.uint8],
    exponents: NDArray[np.uint8],
    kmax: int,
    out: NDArray[np.uint8],
    scales: NDArray[np.uint16],
) -> tuple[int, int]:
    flat = packed.reshape(-1)
    lost, deep = _transcode(flat, flat.view(np.uint64), exponents.reshape(-1), kmax, out, scales)
    return int(lost), int(deep)


def to_nvfp4(
    packed: NDArray[np.uint8],
    exponents: NDArray[np.uint8],
    kmax: int,
    out: NDArray[np.uint8],
    scales: NDArray[np.uint8],
) -> tuple[int, int]:
    """Rewrite MXFP4 as NVFP4 with the divisor 2^(8 - kmax), without loss where that can hold it.

    ``packed`` [rows, cols / 2] and ``exponents`` E8M0 [rows, cols / 32]; ``kmax`` at least every exponent less 127
    of a group with a code that is not zero. Written: ``out`` [rows, cols / 2] and ``scales`` E4M3 [rows, cols / 16].
    Codes are copied, or halved so often as brings a scale below 2^-6 back to it, where all of a group can be.
    Groups of zeros get a scale from 2^-6 to 2^8.

    Returns the number of groups of 16 that lost something (their values, below 2^-9 of the float scale's reach, are
    rounded to nearest even), and of those whose scale is below 2^-6.
    """
    np.copyto(out, packed)
    return _run(packed, exponents, kmax, out.reshape(-1), scales.reshape(-1).view(np.uint16))


def count(packed: NDArray[np.uint8], exponents: NDArray[np.uint8], kmax: int) -> tuple[int, int]:
    """Return what `to_nvfp4` would return, and write nothing."""
    return _run(packed, exponents, kmax, *_NOTHING)


@kernel
def _largest_exponent(words: Any, exponents: Any) -> Any:
    largest: Any = -1
    for g in range(exponents.size):
        if exponents[g] > largest and (words[2 * g] | words[2 * g + 1]) & _MAGNITUDES:
            largest = np.int64(exponents[g])
    return largest


def largest_exponent(packed: NDArray[np.uint8], exponents: NDArray[np.uint8]) -> int:
    """Return the largest exponent byte of a group with a code that is not zero, or -1."""
    return int(_largest_exponent(packed.reshape(-1).view(np.uint64), exponents.reshape(-1)))
