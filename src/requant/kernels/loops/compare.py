"""Comparing arrays: see `requant.kernels.compare`."""

from __future__ import annotations

from typing import Any

import numpy as np

from requant.kernels.floats import f32, u32

from .jit import bits_of, float_of, kernel, scratch

_CHUNK = 512
_lanes = scratch(np.float64, _CHUNK)


@kernel
def _accumulate_chunk(a: Any, b: Any, squares_a: Any, squares_diff: Any) -> Any:
    """Add to one sum per place in the chunk: the compiler may not reorder one long sum into vectors, nor may we."""
    differing: Any = 0
    max_rel = u32(0)
    for i in range(a.size):
        x, y = np.float64(a[i]), np.float64(b[i])
        size = abs(x)
        distance: Any = abs(x - y)
        equal = (x == y) | ((x != x) & (y != y))
        distance = 0.0 if equal else (distance if distance < np.inf else np.inf)
        differing += np.int64(distance > 0.0)
        squares_a[i] += size * size if size < np.inf else 0.0
        squares_diff[i] += distance * distance
        relative = distance / size
        relative = relative if (distance > 0.0) & (distance < np.inf) else distance
        max_rel = max(max_rel, bits_of(f32(relative)))
    return differing, max_rel


@kernel
def accumulate(a: Any, b: Any, found: Any) -> Any:
    """Write to ``found`` float64 [3] all of a `Difference` but the count, which is returned."""
    differing = 0
    max_rel = u32(0)
    squares_a, squares_diff = _lanes(), _lanes()
    squares_a[:] = 0
    squares_diff[:] = 0
    for start in range(0, a.size, _CHUNK):
        chunk = slice(start, start + _CHUNK)
        more, highest = _accumulate_chunk(a[chunk], b[chunk], squares_a, squares_diff)
        differing += more
        max_rel = max(max_rel, highest)
    found[0], found[1] = 0, 0
    for i in range(_CHUNK):
        found[0] += squares_a[i]
        found[1] += squares_diff[i]
    found[2] = float_of(max_rel)
    return differing


@kernel
def first_nonfinite(bits: Any, mask: Any) -> Any:
    """Return where all bits of the mask are set first, or -1."""
    for start in range(0, bits.size, _CHUNK):
        stop = min(start + _CHUNK, bits.size)
        found = False
        for i in range(start, stop):
            found |= (bits[i] & mask) == mask
        if found:
            for i in range(start, stop):
                if (bits[i] & mask) == mask:
                    return i
    return -1
