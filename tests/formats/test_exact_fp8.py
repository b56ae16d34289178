"""The exact routes to and from FP8 per tensor, by the values before and after."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from requant.formats import EXACT_ROUTES, FORMATS, NUMPY_BITS, Tile

E4M3 = ml_dtypes.float8_e4m3fn
FROM_MXFP4 = EXACT_ROUTES["mxfp4", "fp8-tensor"]


def mxfp4(rows, groups, low, high, seed):
    """Tiles of MXFP4; some groups are zeros under any byte."""
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (rows, groups, 16)).astype(np.uint8)
    packed[rng.random((rows, groups)) < 0.3] &= rng.choice(np.array([0x99, 0xBB, 0x88], np.uint8))
    exponents = rng.integers(low, high + 1, (rows, groups)).astype(np.uint8)
    empty = rng.random((rows, groups)) < 0.1
    packed[empty] &= 0x88
    exponents[empty] = rng.integers(0, 255, empty.sum())
    return Tile(packed.reshape(rows, -1), "F4"), Tile(exponents, "F8_E8M0")


def values(source):
    """Float64 values of MXFP4 tiles."""
    packed, exponents = source[0].bits, source[1].bits
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    scales = exponents.view(ml_dtypes.float8_e8m0fnu).astype(np.float64).repeat(32, axis=1)
    return codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64) * scales


def in_bands(source):
    return [[Tile(t.bits[top : top + 128], t.dtype) for t in source] for top in range(0, len(source[0].bits), 128)]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 300), st.integers(1, 6), st.integers(0, 254), st.integers(0, 30), st.sampled_from(["BF16", "F32"]),
    st.integers(0, 2**32),
)  # fmt: skip
def test_mxfp4_to_one_scale(rows, groups, low, spread, scale_dtype, seed):
    source = mxfp4(rows, groups, low, min(low + spread, 254), seed)
    exact = values(source)
    amax = abs(exact).max()
    bands = in_bands(source)
    assert FROM_MXFP4.pool is not None
    pooled = max(FROM_MXFP4.pool.of(band) for band in bands)
    assert pooled == (np.frexp(amax)[1] - 1 if amax else -np.inf)
    scale = 2.0 ** max(pooled - 8, -126) if amax else 1.0
    for top, band in zip(range(0, rows, 128), bands, strict=True):
        assert FROM_MXFP4.pool.bound(band[1:]) >= FROM_MXFP4.pool.of(band)
        part = exact[top : top + 128]
        codes, scales = np.empty(part.shape, np.uint8), np.zeros(1, NUMPY_BITS[scale_dtype])
        target = Tile(codes, "F8_E4M3"), Tile(scales, scale_dtype)
        counted = FROM_MXFP4.transcode(band, target, pooled)
        nearest = (part / scale).astype(E4M3)
        np.testing.assert_array_equal(codes, nearest.view(np.uint8))
        assert (int(scales[0]) << (16 if scale_dtype == "BF16" else 0)) == np.float32(scale).view(np.uint32)
        rounded = (nearest.astype(np.float64) * scale != part).any(axis=1, keepdims=True)
        assert counted == rounded.sum() * part.shape[1] == FROM_MXFP4.over_span(band, pooled)
        suspects = FROM_MXFP4.suspects(band[1:], pooled)
        assert suspects.shape == rounded.shape
        assert suspects[rounded].all()


def test_mxfp4_of_one_range_has_no_suspects():
    source = mxfp4(64, 8, 110, 124, 3)
    packed = source[0].bits | np.uint8(0x77)  # no zeros, and the largest code everywhere
    exponents = np.clip(source[1].bits, 110, 124)
    band = Tile(packed, "F4"), Tile(exponents, "F8_E8M0")
    assert FROM_MXFP4.pool is not None
    assert not FROM_MXFP4.suspects(band[1:], FROM_MXFP4.pool.of(band)).any()


@pytest.mark.parametrize("target", ["fp8-channel", "fp8-block"])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_one_scale_to_many(target, dtype):
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 256, (300, 200)).astype(np.uint8)
    scale = np.array([0x1234], NUMPY_BITS[dtype])
    arrays = [np.zeros(part.shape, NUMPY_BITS[part.dtype]) for part in FORMATS[target].parts(codes.shape, dtype)]
    route = EXACT_ROUTES["fp8-tensor", target]
    source = Tile(codes, "F8_E4M3"), Tile(scale, dtype)
    assert not route.suspects(source[1:], 0.0).any()
    assert route.over_span(source, 0.0) == 0
    assert route.transcode(source, (Tile(arrays[0], "F8_E4M3"), Tile(arrays[1], dtype)), 0.0) == 0
    before, after = (np.empty(codes.shape, NUMPY_BITS[dtype]) for _ in range(2))
    FORMATS["fp8-tensor"].decode(source, Tile(before, dtype))
    FORMATS[target].decode((Tile(arrays[0], "F8_E4M3"), Tile(arrays[1], dtype)), Tile(after, dtype))
    np.testing.assert_array_equal(before, after)
