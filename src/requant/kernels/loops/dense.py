"""Between float dtypes: see `requant.kernels.dense`."""

from __future__ import annotations

from typing import Any

import numpy as np

from requant.kernels.floats import Float, u32

from .floats import narrow_row, widen
from .jit import bits_of, float_of, kernel, scratch

_CHUNK = 2048
_NAN = u32(0x7FC00000)
_room = scratch(np.float32, _CHUNK)


@kernel
def convert(w: Any, dtype: Float, out: Any, out_dtype: Float) -> None:
    """Write ``w`` [n] to ``out`` [n]."""
    values = _room()
    for start in range(0, w.size, _CHUNK):
        stop = min(start + _CHUNK, w.size)
        chunk = w[start:stop]
        for i in range(chunk.size):
            bits = bits_of(widen(chunk[i], dtype))
            # Rounding would carry some NaN to Inf or zero; this one stays what it is.
            nan = u32(bits & u32(0x7FFFFFFF)) > u32(0x7F800000)
            values[i] = float_of(_NAN if nan else bits)
        narrow_row(values[: stop - start], out_dtype, out[start:stop])
