"""MXFP4 as NVFP4: see `requant.kernels.mxfp4_to_nvfp4`."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from requant.kernels.mxfp4_to_nvfp4 import GROUP

from .jit import kernel, view

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
def transcode(packed: Any, words: Any, exponents: Any, kmax: int, out: Any, scales: Any, deep: Any) -> Any:
    """Encode into a copy of the codes, or with empty ``scales`` only count; flat arrays, ``scales`` uint16 a pair.

    Returns the number of groups of 16 that lost something; written to ``deep`` [1], of those with a scale below 2^-6.
    """
    halves = view(scales, np.uint8)
    write = scales.size > 0
    top = np.uint8(kmax + 127)
    lost = below = 0
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
                below += depth > _LAST_NORMAL_DEPTH
                if write:
                    halves[2 * g + half] = _power(depth)
                    for i in range(start, start + GROUP // 2):
                        out[i] = _HALVED_PAIRS[times, packed[i]]
    deep[0] = below
    return lost


@kernel
def largest_exponent(words: Any, exponents: Any) -> Any:
    """Return the largest exponent of a group that holds more than zeros, or -1."""
    largest: Any = -1
    for g in range(exponents.size):
        if exponents[g] > largest and (words[2 * g] | words[2 * g + 1]) & _MAGNITUDES:
            largest = np.int64(exponents[g])
    return largest
