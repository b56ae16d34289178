"""Values against the grid of their codes: see `requant.kernels.bounds`."""

from __future__ import annotations

from typing import Any

import numpy as np

from requant.kernels.bounds import Allowance
from requant.kernels.floats import f32, u32

from .jit import bits_of, float_of, kernel

# A product of a code and a scale is rounded: its quotient may be a hair on the wrong side of a power of two, or of
# the end of the grid.
_UP, _DOWN = f32(1 + 2.0**-20), f32(1 - 2.0**-20)
_TINY = f32(2.0**-149)
_CHUNK = 128  # what is looked at more closely for one value that needs it


@kernel
def _raise_to(largest: Any, values: Any) -> None:
    """Raise each column's largest magnitude so far."""
    for c in range(values.size):
        a = abs(values[c])
        largest[c] = a if a > largest[c] else largest[c]


@kernel
def _largest_of(values: Any) -> Any:
    """Return the bits of the largest magnitude."""
    largest = u32(0)
    for c in range(values.size):
        a = u32(bits_of(values[c]) & u32(0x7FFFFFFF))
        if a > largest:  # max() would compare in 64 bits
            largest = a
    return largest


@kernel
def _fill(scale: Any, half: Any, s: Any, half_gap: Any) -> None:
    for c in range(scale.size):
        scale[c] = s
        half[c] = half_gap


@kernel
def _allowed(value: Any, stored: Any, scale: Any, half: Any, allow: Allowance) -> Any:
    """Return how far a value may be from ``stored``; ``half`` is that of the region's smallest gap.

    Below a power of two codes lie closer than above it.
    """
    a, b = abs(value), abs(stored)
    hair = max(b - _TINY, f32(0)) * _DOWN if a < b else (b + _TINY) * _UP
    power = float_of(bits_of(f32(hair / scale)) & u32(0x7F800000)) * scale
    apart = max(f32(power * allow.relative), half)
    rounded = max(power, half) * allow.rounding + scale * allow.offset
    return f32(apart + rounded + a * allow.source + allow.smallest)


@kernel
def _is_cut(value: Any, stored: Any, scale: Any, low: Any, high: Any, allow: Allowance) -> Any:
    """Tell whether a value lies beyond the end of the grid, not too far, and is stored as that end."""
    beyond = scale * allow.clip + allow.cut + abs(value) * allow.source + allow.smallest
    above = (f32(stored * _UP) >= high) & (stored >= f32(0)) & (value > stored) & (value <= f32(high + beyond))
    below = (f32(stored * _UP) <= low) & (stored <= f32(0)) & (value < stored) & (value >= f32(low - beyond))
    return above | below


@kernel
def _is_bad(value: Any, stored: Any, scale: Any, half: Any, low: Any, high: Any, allow: Allowance) -> Any:
    distance = abs(value - stored)
    near = (distance <= _allowed(value, stored, scale, half, allow)) & (distance < f32(np.inf))
    same = (value == stored) | ((value != value) & (stored != stored))
    return not (near | same | _is_cut(value, stored, scale, low, high, allow))


@kernel
def _all_near(value: Any, stored: Any, scale: Any, half: Any, allow: Allowance) -> Any:
    """Tell whether no value needs a closer look."""
    far = u32(0)
    for c in range(value.size):
        near = abs(value[c] - stored[c]) < _allowed(value[c], stored[c], scale[c], half[c], allow)
        far |= u32(0) if near else u32(1)
    return far == u32(0)


@kernel
def beyond(
    values: Any,
    stored: Any,
    height: int,
    width: int,
    scales: Any,
    low: Any,
    high: Any,
    amax: Any,
    allow: Allowance,
    room: Any,
    found: Any,
) -> Any:
    """Return how many values are beyond their bound; write the worst's flat index and its bound to ``found`` [2].

    ``room``, float32 [3, cols], holds for a row what each column has.
    """
    rows, cols = values.shape
    largest, scale, half = room[0], room[1], room[2]
    count, worst = 0, f32(0)
    for band in range(scales.shape[0]):
        top, bottom = band * height, min(band * height + height, rows)
        largest[:] = amax
        for r in range(top, bottom):
            _raise_to(largest, values[r])
        for b in range(scales.shape[1]):
            start, stop = b * width, min(b * width + width, cols)
            region_amax = float_of(_largest_of(largest[start:stop]))
            s = max(scales[band, b], _TINY)
            finest = s if region_amax <= allow.vanishing else min(s, f32(region_amax * allow.coarsest))
            half_gap = finest * allow.least
            _fill(scale[start:stop], half[start:stop], s, half_gap)
        for r in range(top, bottom):
            for start in range(0, cols, _CHUNK):
                stop = min(start + _CHUNK, cols)
                chunk = slice(start, stop)
                if _all_near(values[r, chunk], stored[r, chunk], scale[chunk], half[chunk], allow):
                    continue
                for c in range(start, stop):
                    x, y, b = values[r, c], stored[r, c], c // width
                    if _is_bad(x, y, scale[c], half[c], low[band, b], high[band, b], allow):
                        count += 1
                        allowed = _allowed(x, y, scale[c], half[c], allow)
                        excess = f32(abs(x - y) / allowed)
                        if not (excess <= worst):
                            worst = excess if excess == excess else f32(np.inf)
                            found[0], found[1] = r * cols + c, allowed
    return count
