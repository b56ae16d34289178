"""Unquantized weights: BF16, F16 and F32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from requant.formats.base import Encoding, Part, ScaleRule, Tile

if TYPE_CHECKING:
    from requant.formats.grid import Grid

VALUE_DTYPES: Mapping[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}


class Dense:
    """``weight`` in a float dtype."""

    name = "dense"
    packing = 1
    multiple = 1
    pools_amax = False
    scale_rules: tuple[ScaleRule, ...] = ()

    def parts(self, shape: tuple[int, int], dtype: str) -> tuple[Part, ...]:
        """Return the single part, of ``dtype``."""
        return (Part(dtype, shape, 1, dtype),)

    def decode(self, parts: Sequence[Tile], out: Tile) -> None:
        """Convert to ``out.dtype``, rounding to nearest even where it is narrower."""
        _convert(parts[0], out)

    def grid(self, parts: Sequence[Tile], dtype: str) -> Grid:
        """Return all values of the dtype."""
        from requant.formats.grid import dense

        return dense(parts[0])

    def encode(self, weight: Tile, parts: Sequence[Tile], how: Encoding) -> int:
        """Convert to the part's dtype; there is no scale to find, and the two arithmetics are one.

        A value that F16 or BF16 rounds to infinity is too large.
        """
        from requant.kernels import compare

        _convert(weight, parts[0])
        return compare.first_nonfinite(parts[0].bits, parts[0].dtype)


def _convert(source: Tile, out: Tile) -> None:
    if source.dtype != out.dtype and "F16" in (source.dtype, out.dtype):  # where numpy is slow
        from requant.kernels import dense

        dense.convert(source.bits, source.dtype, out.bits, out.dtype)
        return
    values = source.bits.view(VALUE_DTYPES[source.dtype])
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(out.bits.view(VALUE_DTYPES[out.dtype]), values, casting="unsafe")
