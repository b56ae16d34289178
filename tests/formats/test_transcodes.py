"""Exact routes between microscaled, FP8 and unquantized weights, against float64 values of the stored bits."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from requant.formats import EXACT_ROUTES, FORMATS, NUMPY_BITS, TO_DENSE, Tile

VALUES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
E4M3, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn
CODES = np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF])


def float_scales(exponents, dtype):
    return Tile((2.0 ** exponents.astype(np.float64)).astype(VALUES[dtype]).view(NUMPY_BITS[dtype]), dtype)


def spread(scales, region, shape):
    return scales.repeat(region[0], axis=0).repeat(region[1], axis=1)[: shape[0], : shape[1]]


def values_of(name, parts):
    """The float64 values of a tile, and the shape of the regions that share a scale."""
    payload, scales = parts
    if name == "mxfp4":
        codes = np.stack([payload.bits & 15, payload.bits >> 4], axis=-1).reshape(len(payload.bits), -1).view(E2M1)
    else:
        codes = payload.bits.view(E4M3)
    region = {"fp8-block": (128, 128), "fp8-channel": (1, codes.shape[1])}.get(name, (1, 32))
    if name.startswith("fp8"):
        factors = scales.bits.view(VALUES[scales.dtype]).astype(np.float64)
    else:
        factors = 2.0 ** (scales.bits - 127.0)
    return codes.astype(np.float64) * spread(factors, region, codes.shape), region


def blank(name, shape, dtype="BF16"):
    return [Tile(np.empty(p.shape, NUMPY_BITS[p.dtype]), p.dtype) for p in FORMATS[name].parts(shape, dtype)]


def same(a, b):
    return np.array_equal(a, b) and np.array_equal(np.signbit(a), np.signbit(b))


def mx(name, rows, groups, low, high, seed, zero_groups=0.2):
    rng = np.random.default_rng(seed)
    if name == "mxfp4":
        payload = rng.integers(0, 256, (rows, groups, 16)).astype(np.uint8)
        zeros = np.uint8(0x88)
    else:
        payload = rng.choice(CODES, (rows, groups, 32))
        zeros = np.uint8(0x80)
    exponents = rng.integers(low, high + 1, (rows, groups)).astype(np.uint8)
    empty = rng.random((rows, groups)) < zero_groups
    payload[empty] &= zeros
    exponents[empty] = rng.integers(0, 255, empty.sum())
    return Tile(payload.reshape(rows, -1), "U8" if name == "mxfp4" else "F8_E4M3"), Tile(exponents, "U8")


def fp8(name, shape, low, high, scale_dtype, seed):
    rng = np.random.default_rng(seed)
    part = FORMATS[name].parts(shape, scale_dtype)[1]
    return Tile(rng.choice(CODES, shape), "F8_E4M3"), float_scales(rng.integers(low, high + 1, part.shape), scale_dtype)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 7), st.integers(0, 254), st.integers(0, 30), st.integers(0, 99))
def test_mxfp4_to_mxfp8_loses_nothing(rows, groups, low, span, seed):
    source = mx("mxfp4", rows, groups, low, min(low + span, 254), seed)
    target = blank("mxfp8", (rows, groups * 32))
    route = EXACT_ROUTES["mxfp4", "mxfp8"]
    assert route.transcode(source, target, 0.0) == route.over_span(source, 0.0) == 0
    assert not route.suspects(source[1:], 0.0).any()
    np.testing.assert_array_equal(target[1].bits, source[1].bits - np.minimum(source[1].bits, 6))
    assert same(values_of("mxfp8", target)[0], values_of("mxfp4", source)[0])


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["fp8-block", "fp8-channel"]), st.integers(1, 300), st.integers(1, 9), st.integers(0, 99))
def test_fp8_to_mxfp8_gives_every_group_its_scale(name, rows, groups, seed):
    source = fp8(name, (rows, groups * 32), -120, 120, "F32", seed)
    target = blank("mxfp8", (rows, groups * 32))
    route = EXACT_ROUTES[name, "mxfp8"]
    pooled = route.pool.of(source)
    assert route.holds(pooled)
    assert route.transcode(source, target, pooled) == 0
    assert same(values_of("mxfp8", target)[0], values_of(name, source)[0])


@pytest.mark.parametrize("scale", [3.0, -2.0, 0.0, np.nan, np.inf, 2.0**-128, 1.0000001])
@pytest.mark.parametrize("target", ["mxfp8", "BF16"])
def test_fp8_with_another_scale_does_not_qualify(scale, target):
    routes = EXACT_ROUTES["fp8-block", "mxfp8"], TO_DENSE["fp8-block", "BF16"]
    route = routes[target == "BF16"]
    codes, scales = fp8("fp8-block", (130, 160), -20, 0, "F32", seed=1)
    assert route.pool.bound([scales]) == route.pool.of((codes, scales)) == 0.0
    scales.bits.view(np.float32)[1, 0] = scale
    expected = scale == 2.0**-128 and target == "BF16"  # a power of two that only E8M0 lacks
    assert route.holds(route.pool.of((codes, scales))) == expected
    assert route.pool.bound([scales]) == route.pool.of((codes, scales))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 300), st.integers(1, 9), st.sampled_from(["BF16", "F32"]), st.integers(0, 99))
def test_mxfp8_to_fp8_block_where_the_exponents_of_a_block_agree(rows, groups, scale_dtype, seed):
    codes, exponents = mx("mxfp8", rows, groups, 0, 254, seed)
    target = blank("fp8-block", (rows, groups * 32), scale_dtype)
    shape = target[1].bits.shape
    one = np.random.default_rng(seed).integers(0, 255, shape).astype(np.uint8)
    zeros = (codes.bits.reshape(rows, groups, 32) & 0x7F == 0).all(-1)
    exponents = Tile(np.where(zeros, exponents.bits, spread(one, (128, 4), (rows, groups))), "U8")
    route = EXACT_ROUTES["mxfp8", "fp8-block"]
    pooled = route.pool.of((codes, exponents))
    assert route.holds(pooled)
    assert route.pool.bound([exponents]) >= pooled
    assert not route.suspects([exponents], pooled).any()
    assert route.transcode((codes, exponents), target, pooled) == 0
    assert same(values_of("fp8-block", target)[0], values_of("mxfp8", (codes, exponents))[0])
    if (~zeros[:128, :4]).sum() > 1:
        r, g = np.argwhere(~zeros[:128, :4])[-1]
        exponents.bits[r, g] ^= 1
        assert not route.holds(route.pool.of((codes, exponents)))
        assert route.pool.bound([exponents]) == 1.0


def test_mxfp8_blocks_of_zeros_get_scale_one():
    source = (
        Tile(np.full((130, 160), 0x80, np.uint8), "F8_E4M3"),
        Tile(np.arange(650, dtype=np.uint16).astype(np.uint8).reshape(130, 5) % 255, "U8"),
    )
    route = EXACT_ROUTES["mxfp8", "fp8-block"]
    assert (route.pool.bound(source[1:]), route.pool.of(source)) == (1.0, 0.0)
    codes, scales = blank("fp8-block", (130, 160))
    assert route.transcode(source, (codes, scales), 0.0) == 0
    assert (scales.bits.view(ml_dtypes.bfloat16) == 1).all()
    assert (codes.bits == 0x80).all()


def check_dense(name, source, dtype):
    """Count and result against float64; returns how many values lie in over-span regions."""
    want, (height, width) = values_of(name, source)
    route = TO_DENSE[name, dtype]
    with np.errstate(over="ignore", under="ignore"):
        nearest = want.astype(np.float32).astype(VALUES[dtype]) if dtype == "BF16" else want.astype(VALUES[dtype])
    suspects = route.suspects(source[1:], 0.0)
    count = 0
    for i, j in np.ndindex(*suspects.shape):
        place = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
        if not np.array_equal(nearest[place].astype(np.float64), want[place]):
            count += want[place].size
            assert suspects[i, j]
    out = Tile(np.empty(want.shape, NUMPY_BITS[dtype]), dtype)
    assert route.over_span(source, 0.0) == count
    assert route.transcode(source, [out], 0.0) == count
    assert same(out.bits.view(VALUES[dtype]), nearest)
    return count


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["mxfp4", "mxfp8"]),
    st.sampled_from(sorted(VALUES)),
    st.integers(1, 9),
    st.integers(1, 7),
    st.integers(0, 254),
    st.integers(0, 20),
    st.integers(0, 99),
)
def test_mx_to_dense(name, dtype, rows, groups, low, span, seed):
    check_dense(name, mx(name, rows, groups, low, min(low + span, 254), seed), dtype)


@pytest.mark.parametrize(("dtype", "low", "high"), [("BF16", 0, 252), ("F16", 104, 140), ("F32", 0, 252)])
def test_where_mxfp4_in_a_dtype_ends(dtype, low, high):
    # Every code under every exponent: one group each, and groups of zeros anywhere.
    packed = np.tile(np.arange(16, dtype=np.uint8)[:, None].repeat(16, axis=1).reshape(1, -1), (255, 1)) * 0x11
    exponents = np.arange(255, dtype=np.uint8)[:, None].repeat(16, axis=1)
    exact = slice(low, high + 1)
    assert check_dense("mxfp4", (Tile(packed[exact], "U8"), Tile(exponents[exact], "U8")), dtype) == 0
    outside = np.delete(np.arange(255), np.arange(low, high + 1))
    source = Tile(packed[outside], "U8"), Tile(exponents[outside], "U8")
    assert check_dense("mxfp4", source, dtype) > 0
    zeros = Tile(source[0].bits & 0x88, "U8"), source[1]
    assert check_dense("mxfp4", zeros, dtype) == 0


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["fp8-block", "fp8-channel"]),
    st.sampled_from(sorted(VALUES)),
    st.sampled_from(sorted(VALUES)),
    st.integers(1, 260),
    st.integers(1, 300),
    st.integers(0, 99),
)
def test_fp8_to_dense(name, dtype, scale_dtype, rows, cols, seed):
    low, high = {"BF16": (-133, 127), "F16": (-24, 15), "F32": (-149, 127)}[scale_dtype]
    check_dense(name, fp8(name, (rows, cols), low, high, scale_dtype, seed), dtype)


def test_nan_codes_stay_nan_and_do_not_count():
    source = Tile(np.full((1, 32), 0xFF, np.uint8), "F8_E4M3"), Tile(np.array([[254]], np.uint8), "U8")
    out = Tile(np.empty((1, 32), np.uint16), "BF16")
    assert TO_DENSE["mxfp8", "BF16"].transcode(source, [out], 0.0) == 0
    assert np.isnan(out.bits.view(ml_dtypes.bfloat16).astype(np.float32)).all()
