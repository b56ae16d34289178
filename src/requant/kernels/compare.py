"""Comparing two arrays of decoded values, and finding values that are not finite."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .floats import f32, u32
from .jit import bits_of, float_of, kernel

_CHUNK = 512

# All of a mask's bits set: NaN or infinity.
_NONFINITE: Mapping[str, int] = MappingProxyType(
    {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000, "F8_E4M3": 0x7F, "F8_E8M0": 0xFF}
)

FLOATING = frozenset(_NONFINITE)
"""The dtypes that can spell a NaN or an infinity and that `first_nonfinite` knows."""


class Difference(NamedTuple):
    """How ``b`` differs from ``a``: a count, two sums of squares and the largest ``|a - b| / |a|``."""

    differing: int
    sum_sq_a: float
    sum_sq_diff: float
    max_rel: float


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
def _accumulate(a: Any, b: Any) -> Any:
    differing = 0
    max_rel = u32(0)
    squares_a = np.zeros(_CHUNK)
    squares_diff = np.zeros(_CHUNK)
    for start in range(0, a.size, _CHUNK):
        chunk = slice(start, start + _CHUNK)
        more, highest = _accumulate_chunk(a[chunk], b[chunk], squares_a, squares_diff)
        differing += more
        max_rel = max(max_rel, highest)
    return differing, squares_a.sum(), squares_diff.sum(), np.float64(float_of(max_rel))


def accumulate(a: NDArray[np.float32], b: NDArray[np.float32]) -> Difference:
    """Compare float32 arrays of one shape; sums are in float64.

    +0 equals -0 and NaN equals NaN. A value that is zero in ``a`` alone makes ``max_rel`` infinite; one that is NaN
    or infinite on one side alone makes ``sum_sq_diff`` infinite, too. ``sum_sq_a`` sums the finite values.
    """
    return Difference(*_accumulate(a.reshape(-1), b.reshape(-1)))


@kernel
def _first_nonfinite(bits: Any, mask: Any) -> Any:
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


def first_nonfinite(bits: NDArray[Any], dtype: str) -> int:
    """Return the flat index of the first NaN or infinity in ``bits`` (any shape), or -1.

    ``dtype``: "BF16", "F16", "F32", "F8_E4M3" or "F8_E8M0".
    """
    return int(_first_nonfinite(bits.reshape(-1), bits.dtype.type(_NONFINITE[dtype])))
