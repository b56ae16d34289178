"""MXFP4 kernels against ml_dtypes' FP4, FP8 and E8M0 types in float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from requant.kernels import fp8, mxfp4

E2M1, E4M3, E8M0 = ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
VALUES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
BITS = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}


def unpack(packed):
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)


def exact_values(packed, exponents):
    """The float64 values of MXFP4 weights."""
    scales = exponents.view(E8M0).astype(np.float64)
    return unpack(packed).view(E2M1).astype(np.float64) * scales.repeat(32, axis=1)


def random_weight(rows, groups, low, high, seed, zero_groups=0.1):
    """Random codes with exponent bytes in [low, high]; some groups are zeros, with any byte but 255."""
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (rows, groups, 16)).astype(np.uint8)
    # Some groups without large codes: their amax lies in a lower binade.
    packed[rng.random((rows, groups)) < 0.2] &= 0x99
    packed[rng.random((rows, groups)) < 0.1] &= 0xBB
    exponents = rng.integers(low, high + 1, (rows, groups)).astype(np.uint8)
    empty = rng.random((rows, groups)) < zero_groups
    packed[empty] &= 0x88
    exponents[empty] = rng.integers(0, 255, empty.sum())
    return packed.reshape(rows, -1), exponents


@pytest.mark.parametrize("dtype", sorted(VALUES))
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_decode_of_every_byte_and_exponent(dtype):
    packed = np.tile(np.arange(256, dtype=np.uint8), (255, 1))
    exponents = np.arange(255, dtype=np.uint8).repeat(16).reshape(255, 16)
    out = np.empty((255, 512), BITS[dtype])
    mxfp4.decode(packed, exponents, out, dtype)
    want = exact_values(packed, exponents).astype(np.float32).astype(VALUES[dtype])
    np.testing.assert_array_equal(out, want.view(BITS[dtype]))


def expected_encoding(w, dtype):
    """compressed-tensors' rule in float64, for groups whose amax is a normal number of ``dtype``."""
    groups = w.view(VALUES[dtype]).astype(np.float64).reshape(len(w), -1, 32)
    mantissa, exponent = np.frexp(abs(groups).max(-1))
    exponents = np.maximum(exponent - 1 + (mantissa >= 0.875) - 2 + 127, 0)
    quotient = groups / 2.0 ** (exponents[..., None] - 127.0)
    quotient = quotient.astype(VALUES[dtype]).astype(np.float64)
    codes = abs(np.clip(quotient, -6, 6)).astype(E2M1).view(np.uint8) | (quotient < 0) << 3
    pairs = codes.reshape(len(w), -1, 2)
    return (pairs[..., 0] | pairs[..., 1] << 4).astype(np.uint8), exponents.astype(np.uint8)


def encode(w, dtype):
    packed = np.empty((w.shape[0], w.shape[1] // 2), np.uint8)
    exponents = np.empty((w.shape[0], w.shape[1] // 32), np.uint8)
    return mxfp4.encode(w, dtype, packed, exponents), packed, exponents


@pytest.mark.parametrize(("dtype", "smallest", "largest"), [("BF16", 0x0080, 0x7F5F), ("F16", 0x0400, 0x7AFF)])
def test_encode_of_every_pattern(dtype, smallest, largest):
    # Groups of neighbours, whose amax takes every mantissa, and shuffled ones, with every ratio to amax.
    patterns = np.arange(65536, dtype=np.uint16)
    patterns = patterns[(patterns & 0x7FFF) <= largest]
    patterns = patterns[: patterns.size // 32 * 32]
    rng = np.random.default_rng(3)
    w = np.concatenate([patterns, *(rng.permutation(patterns) for _ in range(8))]).reshape(9, -1)
    groups = w.reshape(9, -1, 32) & 0x7FFF
    groups = np.where(groups.max(-1, keepdims=True) < smallest, smallest, w.reshape(groups.shape)).astype(np.uint16)
    w = groups.reshape(w.shape)
    bad, packed, exponents = encode(w, dtype)
    want_packed, want_exponents = expected_encoding(w, dtype)
    assert bad == -1
    np.testing.assert_array_equal(exponents, want_exponents)
    np.testing.assert_array_equal(packed, want_packed)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 20), st.integers(1, 9), st.sampled_from(sorted(VALUES)), st.integers(0, 2**32))
def test_encode_of_any_shape(rows, groups, dtype, seed):
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((rows, groups * 32)) * 2.0 ** rng.integers(-10, 10, (rows, 1))
    w = w.astype(VALUES[dtype]).view(BITS[dtype])
    bad, packed, exponents = encode(w, dtype)
    want_packed, want_exponents = expected_encoding(w, dtype)
    assert bad == -1
    np.testing.assert_array_equal(exponents, want_exponents)
    np.testing.assert_array_equal(packed, want_packed)


@pytest.mark.parametrize(
    ("dtype", "amax", "byte"),
    # The published table of compressed-tensors' results, and what becomes of subnormal groups.
    [
        *((d, a, b) for d in VALUES for a, b in [(1, 125), (1.4, 125), (1.74, 125), (1.75, 126), (1.9, 126)]),
        ("BF16", 0, 0),
        ("F32", 0, 0),
        ("F16", 0, 127),
        ("BF16", 2.0**-130, 0),
        ("F16", 2.0**-15, 127),
        ("F16", 0.75 * 2.0**-14, 111),
    ],
)
def test_exponent_bytes(dtype, amax, byte):
    w = np.zeros((1, 32), VALUES[dtype])
    w[0, 7] = -amax
    bad, _, exponents = encode(w.view(BITS[dtype]), dtype)
    assert (bad, exponents.tolist()) == (-1, [[byte]])


@pytest.mark.parametrize("dtype", sorted(VALUES))
def test_values_that_have_no_encoding_are_located(dtype):
    top = 15 if dtype == "F16" else 127
    for bad in (np.nan, -np.inf, 1.75 * 2.0**top):
        w = np.ones((5, 96), VALUES[dtype])
        w[3, 41] = w[4, 0] = bad
        assert encode(w.view(BITS[dtype]), dtype)[0] == 3 * 96 + 41


def to_fp8(packed, exponents, block):
    rows, groups = exponents.shape
    codes = np.empty((rows, groups * 32), np.uint8)
    shape = (-(-rows // 128), -(-groups // 4)) if block else (rows, 1)
    scales = np.empty(shape, np.uint16)
    route = mxfp4.to_fp8_block if block else mxfp4.to_fp8_channel
    return route(packed, exponents, codes, scales), codes, scales


def check_against_brute_force(packed, exponents, block):
    """Scale, codes and count of every region from float64 values; returns the number of over-span regions."""
    counted, codes, scales = to_fp8(packed, exponents, block)
    want = exact_values(packed, exponents)
    suspects = mxfp4.suspects(exponents, block)
    height, width = (128, 128) if block else (1, want.shape[1])
    over_span = regions = 0
    for i, top in enumerate(range(0, want.shape[0], height)):
        for j, left in enumerate(range(0, want.shape[1], width)):
            place = np.s_[top : top + height, left : left + width]
            amax = abs(want[place]).max()
            scale = 2.0 ** max(np.frexp(amax)[1] - 1 - 8, -126) if amax else 1.0
            assert scales[i, j].view(ml_dtypes.bfloat16) == scale
            scaled = want[place] / scale
            nearest = scaled.astype(E4M3)
            np.testing.assert_array_equal(codes[place], nearest.view(np.uint8))
            if (nearest.astype(np.float64) != scaled).any():
                over_span += scaled.size
                regions += 1
                assert suspects[i, j]
    assert suspects.shape == scales.shape
    assert counted == over_span
    assert mxfp4.over_span(packed, exponents, block) == over_span
    return regions


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 260), st.integers(1, 10), st.integers(0, 254), st.integers(0, 30), st.booleans(), st.integers(0, 99)
)
def test_to_fp8_of_any_shape_and_range(rows, groups, low, spread, block, seed):
    packed, exponents = random_weight(rows, groups, low, min(low + spread, 254), seed)
    check_against_brute_force(packed, exponents, block)


@pytest.mark.parametrize("block", [True, False])
def test_to_fp8_near_the_edge_of_the_exact_range(block):
    # One group stands apart by 10 to 24 binades and holds one code: every depth meets every code.
    regions = 0
    for apart in range(10, 25):
        for code in range(1, 16):
            for top in (1, 2, 4, 7):
                packed = np.zeros((2, 64), np.uint8)
                packed[0, 3] = top
                packed[1, 40] = packed[0, 20] = code << 4
                exponents = np.full((2, 4), 150 - apart, np.uint8)
                exponents[0, 0] = 150
                regions += check_against_brute_force(packed, exponents, block)
    assert regions > 0


def test_exact_route_keeps_every_value():
    packed, exponents = random_weight(384, 24, 118, 132, seed=4, zero_groups=0)
    lost, codes, scales = to_fp8(packed, exponents, block=True)
    assert lost == 0
    for dtype in VALUES:
        before, after = (np.empty(codes.shape, BITS[dtype]) for _ in range(2))
        mxfp4.decode(packed, exponents, before, dtype)
        fp8.decode(codes, scales, "BF16", (128, 128), after, dtype)
        np.testing.assert_array_equal(before, after)


def test_groups_of_zeros_never_count():
    packed = np.full((128, 64), 0x88, np.uint8)
    exponents = np.full((128, 4), 254, np.uint8)
    assert to_fp8(packed, exponents, block=True)[0] == 0
    packed[5, 16:32] = 0x21
    exponents[5, 1] = 3
    lost, codes, scales = to_fp8(packed, exponents, block=True)
    assert lost == 0
    assert scales.view(ml_dtypes.bfloat16)[0, 0] == 2.0**-126
    assert (codes[0] == 0x80).all()
    assert mxfp4.suspects(exponents, block=True).tolist() == [[True]]


def test_zero_regions_get_scale_one():
    packed = np.full((1, 16), 0x80, np.uint8)
    _, codes, scales = to_fp8(packed, np.zeros((1, 1), np.uint8), block=True)
    assert scales.view(ml_dtypes.bfloat16)[0, 0] == 1
    assert codes.tolist() == [[0x00, 0x80] * 16]
