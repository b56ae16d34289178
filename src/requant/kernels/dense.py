"""Unquantized weights from one float dtype to another."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .floats import FLOATS, Float, narrow_row, u32, widen
from .jit import bits_of, float_of, kernel

_CHUNK = 2048
_NAN = u32(0x7FC00000)


@kernel
def _convert(w: Any, dtype: Float, out: Any, out_dtype: Float) -> None:
    values = np.empty(_CHUNK, np.float32)
    for start in range(0, w.size, _CHUNK):
        stop = min(start + _CHUNK, w.size)
        chunk = w[start:stop]
        for i in range(chunk.size):
            bits = bits_of(widen(chunk[i], dtype))
            # Rounding would carry some NaN to Inf or zero; this one stays what it is.
            nan = u32(bits & u32(0x7FFFFFFF)) > u32(0x7F800000)
            values[i] = float_of(_NAN if nan else bits)
        narrow_row(values[: stop - start], out_dtype, out[start:stop])


def convert(w: NDArray[Any], dtype: str, out: NDArray[Any], out_dtype: str) -> None:
    """Write the values of ``w``, bits of ``dtype``, to ``out`` of the same shape as bits of ``out_dtype``.

    Rounds to nearest even, to infinity beyond the range; NaN stays NaN.
    """
    _convert(w.reshape(-1), FLOATS[dtype], out.reshape(-1), FLOATS[out_dtype])
