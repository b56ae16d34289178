"""NVFP4 kernels against ml_dtypes' conversions and numpy's float32 arithmetic."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from requant.kernels import nvfp4

E4M3, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn
VALUES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
BITS = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}
MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)


def values(bits, dtype):
    return bits.view(VALUES[dtype]).astype(np.float32)


def expected(w, rounding, scale, divides):
    """Codes and scales of float32 ``w`` by the published rules."""
    groups = w.reshape(w.shape[0], -1, 16)
    amax = abs(groups).max(-1)
    scale = np.float32(scale)
    if divides:
        sixth = (amax / np.float32(6)).astype(VALUES[rounding]).astype(np.float32)
        stored = np.minimum(sixth * scale, np.float32(448)).astype(E4M3)
        stored[stored == 0] = 0.125
        by = stored.astype(np.float32) / scale
    else:
        wanted = amax / (np.float32(6) * scale)
        wanted[wanted == 0] = 1
        stored = np.clip(wanted, np.float32(2**-9), np.float32(448)).astype(E4M3)
        by = stored.astype(np.float32) * scale
    quotient = np.clip(groups / by[..., None], np.float32(-6), np.float32(6))
    codes = abs(quotient).astype(E2M1).view(np.uint8) | (quotient < 0).astype(np.uint8) << 3
    pairs = codes.reshape(w.shape[0], -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4, stored.view(np.uint8)


def encode(w, dtype, rounding, scale, divides):
    packed = np.empty((w.shape[0], w.shape[1] // 2), np.uint8)
    scales = np.empty((w.shape[0], w.shape[1] // 16), np.uint8)
    return nvfp4.encode(w, dtype, rounding, scale, divides, False, packed, scales, None), packed, scales


def check(w, dtype, rounding, scale, divides):
    bad, packed, scales = encode(w, dtype, rounding, scale, divides)
    want_packed, want_scales = expected(values(w, dtype), rounding, scale, divides)
    assert bad == -1
    np.testing.assert_array_equal(scales, want_scales)
    np.testing.assert_array_equal(packed, want_packed)


def scale_for(w, dtype, rounding, divides):
    amax = float(abs(values(w, dtype)).max())
    return nvfp4.divisor(amax, rounding) if divides else (nvfp4.multiplier(amax), rounding)


@pytest.mark.parametrize("divides", [True, False])
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_encode_of_every_pattern(dtype, divides):
    patterns = np.arange(65536, dtype=np.uint16)
    infinity = 0x7F80 if dtype == "BF16" else 0x7C00
    rng = np.random.default_rng(3)
    for top in (infinity - 1, infinity - 0x300, 0x4000, 0x3C01, 0x3800):
        w = rng.permutation(patterns[(patterns & 0x7FFF) <= top])
        w = np.concatenate([w, np.sort(w)])[: w.size // 16 * 32].reshape(2, -1)
        for rounding in (dtype, "F32"):
            scale, rounded = scale_for(w, dtype, rounding, divides)
            check(w, dtype, rounded, scale, divides)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 20),
    st.integers(1, 300),
    st.sampled_from(sorted(VALUES)),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_encode_of_any_shape(rows, groups, dtype, reference, divides, seed):
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((rows, groups * 16)) * 2.0 ** rng.integers(-10, 6, (rows, 1))
    w *= 2.0 ** (0 if dtype == "F16" else rng.integers(-110, 110))
    w[rng.random(w.shape) < 0.1] = -0.0
    w[rng.random(w.shape[0]) < 0.2] = 0
    w = w.astype(VALUES[dtype]).view(BITS[dtype])
    scale, rounding = scale_for(w, dtype, dtype if reference else "F32", divides)
    check(w, dtype, rounding, scale, divides)


@pytest.mark.parametrize("divides", [True, False])
def test_midpoints_and_their_neighbours(divides):
    near = np.concatenate(
        [MIDPOINTS, np.nextafter(MIDPOINTS, 0, dtype=np.float32), np.nextafter(MIDPOINTS, 9, dtype=np.float32)]
    )
    w = np.zeros((2, 32 * 3), np.float32)
    w.reshape(2, 6, 16)[..., 0] = 6
    w.reshape(2, 6, 16)[..., 1:12] = np.resize(near, (2, 6, 11)) * np.float32([[[1]], [[-1]]])
    for exponent in range(-8, 9):
        check((w * np.float32(2.0**exponent)).view(np.uint32), "F32", "F32", 2.0**-exponent, divides)


@pytest.mark.parametrize("dtype", sorted(VALUES))
def test_values_that_are_not_finite_are_located(dtype):
    for bad in (np.nan, -np.inf, np.inf):
        w = np.ones((40, 96), VALUES[dtype])
        w[33, 41] = w[34, 0] = bad
        assert encode(w.view(BITS[dtype]), dtype, dtype, 2688.0, True)[0] == 33 * 96 + 41


def test_zeros():
    w = np.array([[0.0, -0.0] * 16], np.float32).view(np.uint32)
    assert nvfp4.divisor(0.0, "BF16") == (1.0, "BF16")
    assert nvfp4.multiplier(0.0) == 1.0
    for divides, code in ((True, 0x20), (False, 0x38)):
        _, packed, scales = encode(w, "F32", "F32", 1.0, divides)
        assert not packed.any()
        assert scales.tolist() == [[code, code]]


@pytest.mark.parametrize("amax", [2.0**-149, 1e-44, 1e-40, 2.0**-126, 1e-36, 1e-30, 1e-5, 1.0, 3e38])
def test_global_scales_are_finite_and_positive(amax):
    for dtype in VALUES:
        if dtype == "F16" and not 1e-7 < amax < 1e4:
            continue
        g, _ = nvfp4.divisor(amax, dtype)
        assert 0 < g < np.inf
    assert np.finfo(np.float32).tiny <= nvfp4.multiplier(amax) < np.inf


def test_small_f16_is_not_lost():
    # compressed-tensors' G overflows up to about 2688 / 65504, and becomes 1.
    edge = 0.041015625
    above = float(np.nextafter(np.float16(edge), np.float16(1)))
    assert nvfp4.divisor(edge, "F16")[1] == "F32"
    assert nvfp4.divisor(above, "F16")[1] == "F16"
    rng = np.random.default_rng(5)
    w = (rng.standard_normal((64, 256)) * 0.001).astype(np.float16)
    scale, rounding = scale_for(w.view(np.uint16), "F16", "F16", True)
    _, packed, scales = encode(w.view(np.uint16), "F16", rounding, scale, True)
    out = np.empty(w.shape, np.uint32)
    nvfp4.decode(packed, scales, scale, True, out, "F32")
    error = out.view(np.float32) - w.astype(np.float32)
    assert 10 * np.log10(np.square(w.astype(float)).sum() / np.square(error.astype(float)).sum()) > 19


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 300), st.booleans(), st.integers(-20, 20), st.integers(0, 2**32))
def test_decode(rows, groups, divides, exponent, seed):
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (rows, groups * 8), np.uint8)
    scales = rng.integers(0, 127, (rows, groups), np.uint8)
    scale = np.float32(rng.uniform(1, 2) * 2.0**exponent)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(rows, -1, 16)
    floats = scales.view(E4M3).astype(np.float32)
    by = floats / scale if divides else floats * scale
    want = (codes.view(E2M1).astype(np.float32) * by[..., None]).reshape(rows, -1)
    for dtype, target in VALUES.items():
        out = np.empty((rows, groups * 16), BITS[dtype])
        nvfp4.decode(packed, scales, float(scale), divides, out, dtype)
        with np.errstate(over="ignore"):
            narrow = want.astype(ml_dtypes.bfloat16) if divides and dtype == "F16" else want
            np.testing.assert_array_equal(out, narrow.astype(target).view(BITS[dtype]))


def errors_of(w, dtype, scale, divides, packed, scales):
    """Each group's summed squared error, in float64."""
    out = np.empty(w.shape, np.uint32)
    nvfp4.decode(packed, scales, scale, divides, out, "F32")
    difference = values(w, dtype).astype(np.float64) - out.view(np.float32)
    return np.square(difference).reshape(w.shape[0], -1, 16).sum(-1)


def search(w, dtype, rounding, scale, divides):
    _, packed, scales = encode(w, dtype, rounding, scale, divides)
    found, sums = (np.empty_like(packed), np.empty_like(scales)), np.ones(2)
    assert nvfp4.encode(w, dtype, rounding, scale, divides, True, *found, sums) == -1
    before = errors_of(w, dtype, scale, divides, packed, scales)
    after = errors_of(w, dtype, scale, divides, *found)
    return before, after, sums - 1, scales.astype(int), found


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 200),
    st.sampled_from(sorted(VALUES)),
    st.booleans(),
    st.sampled_from(["gauss", "t2", "grid", "deep"]),
    st.integers(-3, 3),
    st.integers(0, 2**32),
)
def test_search_is_never_worse(rows, groups, dtype, divides, kind, exponent, seed):
    rng = np.random.default_rng(seed)
    shape = rows, groups * 16
    w = {
        "gauss": lambda: rng.standard_normal(shape),
        "t2": lambda: np.clip(rng.standard_t(2, shape), -1e3, 1e3),
        "grid": lambda: rng.choice([0, -0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -6], shape),
        "deep": lambda: rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 1, (rows, 1)),
    }[kind]()
    w = (w * 2.0**exponent).astype(VALUES[dtype]).view(BITS[dtype])
    scale, rounding = scale_for(w, dtype, dtype, divides)
    before, after, sums, first, found = search(w, dtype, rounding, scale, divides)
    assert (after <= before).all()
    steps = found[1] - first
    assert steps.min() >= -1
    assert steps.max() <= 5
    assert found[1].max() <= 0x7E
    np.testing.assert_allclose(
        sums, [before.sum(), after.sum()], rtol=1e-3, atol=np.square(values(w, dtype).astype(float)).sum() * 1e-10
    )
    # The codes are those of the scales taken.
    by = found[1].view(E4M3).astype(np.float32)
    by = by / np.float32(scale) if divides else by * np.float32(scale)
    quotient = np.clip(values(w, dtype).reshape(rows, -1, 16) / by[..., None], np.float32(-6), np.float32(6))
    codes = (abs(quotient).astype(E2M1).view(np.uint8) | (quotient < 0).astype(np.uint8) << 3).reshape(rows, -1, 2)
    np.testing.assert_array_equal(found[0], codes[..., 0] | codes[..., 1] << 4)


def test_search_finds_the_best_of_its_candidates():
    rng = np.random.default_rng(11)
    w = (rng.standard_normal((64, 512)) * 0.02).astype(np.float32)
    scale, _ = scale_for(w.view(np.uint32), "F32", "F32", True)
    _, after, _, first, _ = search(w.view(np.uint32), "F32", "F32", scale, True)
    best = np.full(first.shape, np.inf)
    for step in range(-1, 6):
        by = np.clip(first + step, 1, 0x7E).astype(np.uint8).view(E4M3).astype(np.float32) / np.float32(scale)
        groups = w.reshape(64, -1, 16)
        quotient = np.clip(groups / by[..., None], -6, 6).astype(E2M1).astype(np.float32)
        best = np.minimum(best, np.square((quotient * by[..., None] - groups).astype(np.float64)).sum(-1))
    np.testing.assert_allclose(after, best, rtol=2.0**-7, atol=best.mean() * 1e-6)


@pytest.mark.parametrize(("kind", "gain"), [("gauss", 1.2), ("t3", 0.6)])
def test_search_gains(kind, gain):
    rng = np.random.default_rng(1)
    w = rng.standard_normal((256, 1024)) if kind == "gauss" else rng.standard_t(3, (256, 1024))
    w = (w * 0.02).astype(ml_dtypes.bfloat16).view(np.uint16)
    scale, rounding = scale_for(w, "BF16", "BF16", True)
    before, after, _, _, _ = search(w, "BF16", rounding, scale, True)
    assert 10 * np.log10(before.sum() / after.sum()) > gain


def test_search_of_extreme_weights():
    # The search may find nothing, but harms nothing.
    rng = np.random.default_rng(2)
    for exponent in (-140, -126, -100, 100, 124):
        w = (rng.standard_normal((8, 64)) * 2.0**exponent).astype(np.float32).view(np.uint32)
        for divides in (True, False):
            scale, _ = scale_for(w, "F32", "F32", divides)
            before, after, sums, _, _ = search(w, "F32", "F32", scale, divides)
            assert (after <= before).all()
            assert np.isfinite(sums).all()
