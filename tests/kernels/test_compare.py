from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from requant.kernels.compare import accumulate, first_nonfinite


def test_sums_against_numpy():
    rng = np.random.default_rng(5)
    a = rng.standard_normal((37, 1001)).astype(np.float32)
    b = np.where(rng.random(a.shape) < 0.3, a * np.float32(1.01), a)
    difference = accumulate(a, b)
    a64, b64 = a.astype(np.float64), b.astype(np.float64)
    assert difference.differing == (a != b).sum()
    assert difference.sum_sq_a == pytest.approx((a64**2).sum(), rel=1e-12)
    assert difference.sum_sq_diff == pytest.approx(((a64 - b64) ** 2).sum(), rel=1e-12)
    assert difference.max_rel == pytest.approx((abs(a64 - b64) / abs(a64)).max(), rel=1e-6)


@pytest.mark.parametrize(
    ("a", "b", "differing", "sum_sq_diff", "max_rel"),
    [
        (0.0, -0.0, 0, 0, 0),
        (math.nan, math.nan, 0, 0, 0),
        (math.inf, math.inf, 0, 0, 0),
        (2.0, 1.0, 1, 1, 0.5),
        (0.0, 1.0, 1, 1, math.inf),
        (1.0, math.nan, 1, math.inf, math.inf),
        (math.nan, 1.0, 1, math.inf, math.inf),
        (math.inf, -math.inf, 1, math.inf, math.inf),
        (1.0, math.inf, 1, math.inf, math.inf),
    ],
)
def test_single_values(a, b, differing, sum_sq_diff, max_rel):
    ones = np.ones(700, np.float32)
    x, y = ones.copy(), ones.copy()
    x[600], y[600] = a, b
    result = accumulate(x, y)
    assert result == (differing, 699 + (a * a if math.isfinite(a) else 0), sum_sq_diff, max_rel)


def test_empty():
    empty = np.empty(0, np.float32)
    assert accumulate(empty, empty) == (0, 0, 0, 0)
    assert first_nonfinite(np.empty((0, 4), np.uint16), "BF16") == -1


@pytest.mark.parametrize(
    ("dtype", "numpy_dtype"),
    [
        ("BF16", ml_dtypes.bfloat16),
        ("F16", np.float16),
        ("F8_E4M3", ml_dtypes.float8_e4m3fn),
        ("F8_E8M0", ml_dtypes.float8_e8m0fnu),
    ],
)
def test_first_nonfinite_of_every_pattern(dtype, numpy_dtype):
    bits = np.dtype(f"u{np.dtype(numpy_dtype).itemsize}")
    patterns = np.arange(2 ** (8 * bits.itemsize), dtype=bits)
    good = np.isfinite(patterns.view(numpy_dtype).astype(np.float32))
    assert first_nonfinite(patterns[good], dtype) == -1
    for bad in patterns[~good]:
        assert first_nonfinite(np.array([[good[0], bad]], bits), dtype) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_first_nonfinite_is_the_first(bad):
    w = np.full((100, 300), np.finfo(np.float32).max, np.float32)
    w[90, 7] = w[91, 0] = bad
    assert first_nonfinite(w.view(np.uint32), "F32") == 90 * 300 + 7
