"""Float scales that are powers of two."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from requant.formats.base import Tile
from requant.formats.dense import VALUE_DTYPES
from requant.formats.exact import Pool

_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


def wide(scales: Tile) -> Tile:
    """Return float scales as F32."""
    return Tile(_values(scales).astype(np.float32).view(np.uint32), "F32")


def exponents_of(scales: Tile) -> NDArray[np.int32]:
    """Return floor(log2(scale)) of float scales, which must be positive."""
    exponents: NDArray[np.int32] = np.frexp(_values(scales))[1] - 1
    return exponents


def pool_of_powers(largest: int | None, part: int = 0) -> Pool:
    """Return the pool that finds 0 if every scale of a weight is a positive power of two, otherwise 1.

    With ``largest``, those outside 2^-largest to 2^largest do not count as such either. ``part`` is the place of
    the scales among a format's parts but the payload.
    """

    def odd(scales: Sequence[Tile]) -> float:
        mantissas, exponents = np.frexp(_values(scales[part]))
        power = mantissas == 0.5
        if largest is not None:
            power &= abs(exponents - 1) <= largest
        return float(not power.all())

    return Pool(bound=odd, of=lambda parts: odd(parts[1:]))


def _values(scales: Tile) -> NDArray[np.float64]:
    dtype = _E8M0 if scales.dtype == "F8_E8M0" else VALUE_DTYPES[scales.dtype]
    values: NDArray[np.float64] = scales.bits.view(dtype).astype(np.float64)
    return values
