"""Whole weights through a format, as arrays of bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from requant.formats import NUMPY_BITS, Encoding, Format, ScaleRule, Tile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

VALUES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}


def allocate(format: Format, shape: tuple[int, int], dtype: str) -> list[Tile]:
    """Return room for a weight's parts, filled with ones, but for the shape: an encoder must write every bit."""
    parts = format.parts(shape, dtype)
    arrays = [np.empty(part.shape if part.rows else (1, *part.shape), NUMPY_BITS[part.dtype]) for part in parts]
    for array, part in zip(arrays, parts, strict=True):
        if part.is_shape:
            array[:] = shape
        else:
            array.view(np.uint8)[:] = 0xFF
    return [Tile(array, part.spells) for array, part in zip(arrays, parts, strict=True)]


def encode(
    format: Format,
    weight: NDArray[Any],
    dtype: str,
    *,
    reference: bool = True,
    scale: ScaleRule = "amax",
    errors: NDArray[np.float64] | None = None,
) -> list[Tile]:
    """Encode values of ``dtype``."""
    tiles = allocate(format, weight.shape, dtype if reference else "F32")
    how = Encoding(reference, scale, errors=errors)
    assert format.encode(Tile(weight.view(NUMPY_BITS[dtype]), dtype), tiles, how) == -1
    return tiles


def decode(format: Format, tiles: Sequence[Tile], shape: tuple[int, int], dtype: str) -> NDArray[Any]:
    """Return the values of a weight in ``dtype``."""
    out = np.empty(shape, NUMPY_BITS[dtype])
    format.decode(tiles, Tile(out, dtype))
    return out.view(VALUES[dtype])
