"""Comparing two arrays of decoded values, and finding values that are not finite."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .native import Kernel

_accumulate = Kernel("compare", "accumulate")
_first_nonfinite = Kernel("compare", "first_nonfinite")

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


def accumulate(a: NDArray[np.float32], b: NDArray[np.float32]) -> Difference:
    """Compare float32 arrays of one shape; sums are in float64.

    +0 equals -0 and NaN equals NaN. A value that is zero in ``a`` alone makes ``max_rel`` infinite; one that is NaN
    or infinite on one side alone makes ``sum_sq_diff`` infinite, too. ``sum_sq_a`` sums the finite values.
    """
    found = np.empty(3)
    return Difference(_accumulate(a.reshape(-1), b.reshape(-1), found), *found.tolist())


def first_nonfinite(bits: NDArray[Any], dtype: str) -> int:
    """Return the flat index of the first NaN or infinity in ``bits`` (any shape), or -1.

    ``dtype``: "BF16", "F16", "F32", "F8_E4M3" or "F8_E8M0".
    """
    return _first_nonfinite(bits.reshape(-1), bits.dtype.type(_NONFINITE[dtype]))
