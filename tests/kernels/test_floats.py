"""What kernels know of float dtypes, against ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from requant.kernels.floats import amax

NUMPY = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}
BITS = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}


@pytest.mark.parametrize("dtype", NUMPY)
@settings(deadline=None)
@given(rows=st.integers(0, 3), cols=st.integers(0, 200), seed=st.integers(0, 2**32 - 1), wild=st.booleans())
def test_amax_is_the_largest_magnitude(dtype: str, rows: int, cols: int, seed: int, wild: bool) -> None:
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, np.iinfo(BITS[dtype]).max, (rows, cols), BITS[dtype], endpoint=True)
    if not wild:
        bits &= ~BITS[dtype](0x4000 if BITS[dtype] is np.uint16 else 0x40000000)  # below 2: all finite
    values: NDArray[np.float32] = bits.view(NUMPY[dtype]).astype(np.float32).ravel()
    bad = np.flatnonzero(~np.isfinite(values))
    largest = float(np.abs(values).max(initial=0))
    assert amax(bits, dtype) == ((np.inf, bad[0]) if bad.size else (largest, -1))
