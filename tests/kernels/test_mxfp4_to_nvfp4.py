"""MXFP4 as NVFP4 against values in float64: nothing changes that NVFP4 can hold."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from requant.formats import EXACT_ROUTES, FORMATS, Tile
from requant.kernels import mxfp4_to_nvfp4

E4M3, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn


def unpack(packed):
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
    return codes.view(E2M1).astype(np.float64)


def mx_values(packed, exponents):
    return unpack(packed) * 2.0 ** np.repeat(exponents.astype(np.int64) - 127, 32, axis=1)


def run(target, packed, exponents, pooled=None):
    """Returns the values lost, the target's parts, and the values that they decode to."""
    route, fmt = EXACT_ROUTES["mxfp4", target], FORMATS[target]
    rows, groups = exponents.shape
    source = [Tile(packed, "U8"), Tile(exponents, "F8_E8M0")]
    if pooled is None:
        pooled = route.pool.of(source)
        assert route.pool.bound(source[1:]) >= pooled
    shapes = fmt.parts((rows, groups * 32), "BF16")
    parts = [Tile(np.empty(p.shape, np.uint32 if p.dtype == "F32" else np.uint8), p.dtype) for p in shapes]
    lost = route.transcode(source, parts, pooled)
    assert route.over_span(source, pooled) == lost
    suspects = route.suspects(source[1:], pooled)
    assert suspects.shape == parts[1].bits.shape
    scale = float(parts[2].bits.view(np.float32)[0])
    scales = parts[1].bits.view(E4M3).astype(np.float64) * (1 / scale if target == "nvfp4" else scale)
    return lost, parts, unpack(parts[0].bits) * np.repeat(scales, 16, axis=1), suspects


def nearest(values, step):
    """To the nearest E2M1 multiple of ``step``, ties to even."""
    return (values / step).astype(np.float32).astype(E2M1).astype(np.float64) * step


def check(target, packed, exponents, pooled=None):
    want = mx_values(packed, exponents)
    lost, parts, got, suspects = run(target, packed, exponents, pooled)
    scale = float(parts[2].bits.view(np.float32)[0])
    step = (1 / scale if target == "nvfp4" else scale) * 2.0**-9
    assert np.isfinite(scale)
    assert np.frexp(scale)[0] == 0.5
    counted = 0
    groups = (want.reshape(-1, 16), got.reshape(-1, 16), suspects.ravel(), parts[1].bits.ravel())
    for values, result, suspect, code in zip(*groups, strict=True):
        scaled = values / step
        if (scaled * 2 == np.round(scaled * 2)).all():  # all multiples of the least value that NVFP4 has
            np.testing.assert_array_equal(result, values)
        else:
            np.testing.assert_array_equal(result, nearest(values, step))
            assert suspect
            assert code == 1
            counted += 16
        np.testing.assert_array_equal(np.signbit(result), np.signbit(values))
        if not values.any():
            assert code >= 8
    assert counted == lost
    return parts, lost


def weight(rows, groups, low, high, seed, zero_groups=0.1):
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (rows, groups * 16), np.uint8)
    coarse = rng.random((rows, groups * 2)) < 0.3
    packed.reshape(rows, -1, 8)[coarse] &= 0xEE  # halves once, mostly
    packed.reshape(rows, -1, 8)[rng.random((rows, groups * 2)) < zero_groups] &= 0x88
    return packed, rng.integers(low, high, (rows, groups), np.uint8, endpoint=True)


@pytest.mark.parametrize("target", ["nvfp4", "nvfp4-scale2"])
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20), st.integers(1, 9), st.integers(0, 254), st.integers(0, 40), st.integers(0, 2**32))
def test_any_shape_and_range(target, rows, groups, low, spread, seed):
    check(target, *weight(rows, groups, low, min(low + spread, 254), seed))


@pytest.mark.parametrize("target", ["nvfp4", "nvfp4-scale2"])
def test_every_code_at_every_depth(target):
    total = 0
    for depth in range(30):
        packed = np.zeros((16, 48), np.uint8)
        packed[0, 0] = 1
        packed[:, 16] = packed[:, 24] = np.arange(16)
        packed[:, 25] = 0x64
        exponents = np.full((16, 3), 150 - depth, np.uint8)
        exponents[0, 0] = 150
        exponents[:, 2] = 200
        total += check(target, packed, exponents)[1]
    assert total


def test_halving_keeps_scales_at_or_above_two_to_minus_six():
    # Per group of 16, at depths 15, 16, 17: halved once, twice, thrice where every code can be.
    for depth, halves, stays in ((15, 0x7654, 0x3), (16, 0x7640, 0x5), (17, 0x6060, 0x7)):
        packed = np.zeros((1, 32), np.uint8)
        packed[0, 0] = 0x77
        packed[0, 16:18] = halves & 255, halves >> 8
        packed[0, 24] = stays
        exponents = np.array([[127, 127 - depth]], np.uint8)
        parts, lost = check("nvfp4", packed, exponents)
        assert lost == 0
        assert parts[1].bits[0].tolist()[:3] == [0x78, 0x78, 0x08]
        assert parts[1].bits[0, 3] == 1 << (17 - depth)
        assert mxfp4_to_nvfp4.count(packed, exponents, 0) == (0, 1)


@pytest.mark.parametrize(("target", "least"), [("nvfp4", -119), ("nvfp4-scale2", -118)])
def test_the_lowest_exponents(target, least):
    for byte in range(15):
        packed = np.full((2, 16), 0x97, np.uint8)
        parts, lost = check(target, packed, np.full((2, 1), byte, np.uint8))
        exponent = max(byte - 127, least)
        scale = float(parts[2].bits.view(np.float32)[0])
        assert scale == 2.0 ** (8 - exponent if target == "nvfp4" else exponent - 8)
        assert scale >= np.finfo(np.float32).tiny
        assert lost == 0


@pytest.mark.parametrize("target", ["nvfp4", "nvfp4-scale2"])
def test_zeros_alone(target):
    packed = np.full((2, 32), 0x80, np.uint8)
    parts, lost = check(target, packed, np.array([[0, 254], [127, 3]], np.uint8))
    assert lost == 0
    assert parts[2].bits.view(np.float32)[0] == 1
    np.testing.assert_array_equal(parts[0].bits, packed)


@pytest.mark.parametrize("target", ["nvfp4", "nvfp4-scale2"])
def test_zeros_far_above_the_rest(target):
    packed = np.full((1, 32), 0x80, np.uint8)
    packed[0, :16] = 0x21
    for byte in (0, 3, 8, 9, 20):
        for above in range(byte + 1, 255):
            check(target, packed, np.array([[byte, above]], np.uint8))


def test_pooled_over_a_fused_pair():
    packed, exponents = weight(8, 4, 120, 126, seed=1)
    parts, lost = check("nvfp4", packed, exponents, pooled=5.0)
    assert lost == 0
    assert parts[2].bits.view(np.float32)[0] == 8
    np.testing.assert_array_equal(parts[0].bits, packed)


@pytest.mark.parametrize("target", ["nvfp4", "nvfp4-scale2"])
def test_decodes_to_the_same_bits(target):
    packed, exponents = weight(256, 8, 112, 124, seed=4, zero_groups=0)
    _, parts, _, _ = run(target, packed, exponents)
    for dtype, bits in (("BF16", np.uint16), ("F16", np.uint16), ("F32", np.uint32)):
        before, after = (np.empty((256, 256), bits) for _ in range(2))
        FORMATS["mxfp4"].decode([Tile(packed, "U8"), Tile(exponents, "F8_E8M0")], Tile(before, dtype))
        FORMATS[target].decode(parts, Tile(after, dtype))
        np.testing.assert_array_equal(before, after)
