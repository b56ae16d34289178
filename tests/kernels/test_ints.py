"""Integer kernels against numpy's float32 arithmetic, rounded by ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from requant.kernels import ints

VALUES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
BITS = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}
# What overflows, vanishes or is 0 / 0 on the way is what some of these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def bits_of(values):
    return values.view(BITS[{2: "BF16", 4: "F32"}[values.itemsize]])


def packed(codes, bits):
    """Codes [rows, n] as words [rows, ceil(n * bits / 32)], the first lowest."""
    per_word = 32 // bits
    rows, n = codes.shape
    padded = np.zeros((rows, -(-n // per_word), per_word), np.uint64)
    padded.reshape(rows, -1)[:, :n] = codes
    return (padded << (np.arange(per_word, dtype=np.uint64) * np.uint64(bits))).sum(2).astype(np.uint32)


def expected(w, bits, group, symmetric, dtype):
    """Integers [rows, cols], scales and zero points [rows, groups] of float32 ``w`` in the arithmetic of ``dtype``."""
    target = VALUES[dtype]
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1

    def rnd(values):
        return values.astype(target).astype(np.float32)

    regions = w.reshape(w.shape[0], -1, group)
    least, greatest = np.minimum(regions.min(2), 0), np.maximum(regions.max(2), 0)
    if symmetric:
        scale = rnd(np.maximum(-least, greatest) / np.float32(high + 0.5))
        zero = np.zeros_like(scale)
    else:
        width = rnd(greatest - least)
        # In float64 where the difference overflows; no scale may be infinite.
        exact = greatest.astype(np.float64) - least
        scale = rnd(np.where(np.isinf(width), exact, width).astype(np.float64) / (high - low))
        scale = np.where(np.isinf(width), scale, rnd(width / np.float32(high - low)))
        zero = np.rint(np.clip(rnd(low - rnd(least / scale)), low, high))
        zero[(scale == 0) & (least == 0)] = 0
    scale[scale == 0] = ml_dtypes.finfo(target).eps
    quotient = rnd(regions / scale[:, :, None])
    integer = np.rint(np.clip(rnd(quotient + zero[:, :, None]), low, high))
    return integer.reshape(w.shape).astype(np.int64), scale.astype(target), zero.astype(np.int64)


def encode(w, bits, group, symmetric, dtype, reference, **search):
    rows, cols = w.shape
    per_word = 32 // bits
    words = np.full((rows, -(-cols // per_word)), 0xFFFFFFFF, np.uint32)
    scales = np.full((rows, cols // group), 0xFFFF, BITS[dtype] if reference else np.uint32)
    zeros = None if symmetric else np.full((-(-rows // per_word), cols // group), 0xFFFFFFFF, np.uint32)
    assert ints.encode(w.view(BITS[dtype]), dtype, reference, ints.PACKED[bits], words, scales, zeros, **search) == -1
    return words, scales, zeros


def check(w, bits, group, symmetric, dtype, reference):
    arithmetic = dtype if reference else "F32"
    words, scales, zeros = encode(w, bits, group, symmetric, dtype, reference)
    integers, want_scales, want_zeros = expected(w.astype(np.float32), bits, group, symmetric, arithmetic)
    offset = 2 ** (bits - 1)
    np.testing.assert_array_equal(scales.view(VALUES[arithmetic]), want_scales)
    np.testing.assert_array_equal(words, packed(integers + offset, bits))
    if not symmetric:
        np.testing.assert_array_equal(zeros, packed((want_zeros + offset).T, bits).T)


def random_weight(shape, group, dtype, seed):
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((shape[0], shape[1] // group, group))
    w *= 2.0 ** rng.integers(-14, 8, (*w.shape[:2], 1))
    w += rng.choice([0, 0, 3, -3], (*w.shape[:2], 1))
    w[rng.random(w.shape) < 0.05] = -0.0
    w[rng.random(w.shape[:2]) < 0.1] = 0
    return w.reshape(shape).astype(VALUES[dtype])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 140),
    st.integers(1, 4),
    st.sampled_from([1, 3, 8, 32, 128]),
    st.sampled_from([4, 8]),
    st.booleans(),
    st.sampled_from(sorted(VALUES)),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_weights_of_any_shape(rows, groups, group, bits, symmetric, dtype, reference, seed):
    check(random_weight((rows, groups * group), group, dtype, seed), bits, group, symmetric, dtype, reference)


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_every_pattern(dtype, bits, symmetric):
    """Rows of every finite pattern up to some amax, the smallest and the largest among them, as one region each."""
    patterns = np.arange(65536, dtype=np.uint16)
    patterns = patterns[np.isfinite(patterns.view(VALUES[dtype]).astype(np.float32))]
    positive = patterns[patterns < 0x8000]
    amax = np.concatenate([positive[:3], positive[-3:], np.random.default_rng(0).choice(positive, 20)])
    w = ((patterns & 0x8000) | np.minimum(patterns & 0x7FFF, amax[:, None])).astype(np.uint16)
    check(w.view(VALUES[dtype]), bits, w.shape[1], symmetric, dtype, reference=True)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_float32_at_every_midpoint(bits, symmetric):
    half = 2 ** (bits - 1)
    middles = (np.arange(-half, half) + 0.5).astype(np.float32)
    near = np.concatenate([middles, np.nextafter(middles, np.float32(-1e9)), np.nextafter(middles, np.float32(1e9))])
    near = np.clip(near, -half + 0.5, half - 0.5)  # scale 1
    for power in (-126, 0, 100):
        check((near * np.float32(2.0**power))[None], bits, near.size, symmetric, "F32", reference=True)


@pytest.mark.parametrize("dtype", sorted(VALUES))
@pytest.mark.parametrize("bits", [4, 8])
def test_ends_of_the_range(dtype, bits):
    limits = ml_dtypes.finfo(VALUES[dtype])
    tiny, huge = float(limits.smallest_subnormal), float(limits.max)
    rows = [[0, -0.0], [tiny, 0], [-tiny, 0], [tiny, -tiny], [7 * tiny, -9 * tiny], [huge, huge], [-huge, 0], [huge, 1]]
    w = np.array(rows).astype(VALUES[dtype])
    for symmetric in (True, False):
        check(w, bits, 2, symmetric, dtype, reference=True)
        check(w, bits, 2, symmetric, dtype, reference=False)


@pytest.mark.parametrize("dtype", sorted(VALUES))
@pytest.mark.parametrize("bits", [4, 8])
def test_a_range_that_overflows_has_a_finite_scale(dtype, bits):
    huge = float(ml_dtypes.finfo(VALUES[dtype]).max)
    w = np.array([[0.75 * huge, -0.75 * huge, huge / 2, 0]]).astype(VALUES[dtype])
    for search in (False, True):
        words, scales, zeros = encode(w, bits, 4, False, dtype, True, search=search)
        scale = scales.view(VALUES[dtype]).astype(np.float64)
        np.testing.assert_allclose(scale, 1.5 * huge / (2**bits - 1), rtol=0.06 if search else 0.01)
        out = np.empty(w.shape, np.uint32)
        ints.decode(words, scales, dtype, ints.PACKED[bits], out, "F32", zeros)
        np.testing.assert_allclose(out.view(np.float32), w.astype(np.float64), atol=float(scale[0, 0]), rtol=0)


@pytest.mark.parametrize("dtype", sorted(VALUES))
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("symmetric", [True, False])
def test_first_nonfinite_weight_is_located(dtype, bad, symmetric):
    w = np.ones((300, 256), VALUES[dtype])
    w[200, 3] = w[150, 255] = w[150, 100] = bad
    words, scales = np.empty((300, 32), np.uint32), np.empty((300, 2), BITS[dtype])
    zeros = None if symmetric else np.empty((38, 2), np.uint32)
    for search in (False, True):
        found = ints.encode(w.view(BITS[dtype]), dtype, True, ints.PACKED[4], words, scales, zeros, search)
        assert found == 150 * 256 + 100


@pytest.mark.parametrize("scale_dtype", sorted(VALUES))
@pytest.mark.parametrize("out_dtype", sorted(VALUES))
@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True), (8, False)])
def test_decode_of_every_code(scale_dtype, out_dtype, bits, symmetric):
    rng = np.random.default_rng(2)
    rows, half = 69, 2 ** (bits - 1)
    codes = np.tile(np.arange(2 * half), (rows, 2))
    scales = (2.0 ** rng.uniform(-30, 8, (rows, 2))).astype(VALUES[scale_dtype])
    zeros = rng.integers(0, 2 * half, (rows, 2)) if not symmetric else np.full((rows, 2), half)
    out = np.empty(codes.shape, BITS[out_dtype])
    stored_zeros = None if symmetric else np.ascontiguousarray(packed(zeros.T, bits).T)
    ints.decode(packed(codes, bits), bits_of(scales), scale_dtype, ints.PACKED[bits], out, out_dtype, stored_zeros)
    integers = (codes - zeros.repeat(2 * half, 1)).astype(np.float32)
    product = integers * scales.astype(np.float32).repeat(2 * half, 1)
    if out_dtype != "F32":
        product = product.astype(VALUES[scale_dtype])
    want = product.astype(VALUES[out_dtype])
    np.testing.assert_array_equal(out.view(VALUES[out_dtype]).astype(np.float32), want.astype(np.float32))


def test_int8_codes_are_twos_complement():
    w = np.array([[127.5, -127.5, 31.6, -0.0]], np.float32)
    codes, scales = np.empty((1, 4), np.uint8), np.empty((1, 1), np.uint32)
    assert ints.encode(w.view(np.uint32), "F32", True, ints.INT8, codes, scales) == -1
    assert codes.view(np.int8).tolist() == [[127, -128, 32, 0]]
    out = np.empty((1, 4), np.uint32)
    ints.decode(codes, scales, "F32", ints.INT8, out, "F32")
    np.testing.assert_array_equal(out.view(np.float32), [[127, -128, 32, 0]])


def squared_errors(w, words, scales, zeros, bits, group, dtype):
    """Per region, in float64."""
    out = np.empty(w.shape, np.uint32)
    ints.decode(words, scales, dtype, ints.PACKED[bits], out, "F32", zeros)
    errors = (w.astype(np.float64) - out.view(np.float32)) ** 2
    return errors.reshape(w.shape[0], -1, group).sum(2)


DISTRIBUTIONS = {
    "gauss": lambda rng, shape: rng.standard_normal(shape),
    "t3": lambda rng, shape: rng.standard_t(3, shape),
}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "gain"),
    [
        (4, 128, True, 0.66),
        (4, 32, True, 0.58),
        (4, 1024, True, 1.0),
        (4, 128, False, 0.3),
        (8, 128, True, 0.18),
        (8, 128, False, 0.15),
        (8, 4096, True, 0.08),
    ],
)
def test_search_gains_and_is_never_worse(distribution, reference, bits, group, symmetric, gain):
    rng = np.random.default_rng(3)
    w = (0.02 * DISTRIBUTIONS[distribution](rng, (128, 4096))).astype(ml_dtypes.bfloat16)
    dtype = "BF16" if reference else "F32"
    usual = squared_errors(w, *encode(w, bits, group, symmetric, "BF16", reference), bits, group, dtype)
    reported = np.array([1.0, 2.0])
    found = encode(w, bits, group, symmetric, "BF16", reference, search=True, errors=reported)
    least = squared_errors(w, *found, bits, group, dtype)
    assert np.all(least <= usual * (1 + 1e-6))
    assert 10 * np.log10(usual.sum() / least.sum()) > gain
    np.testing.assert_allclose(reported - [1, 2], [usual.sum(), least.sum()], rtol=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([4, 8]), st.booleans(), st.sampled_from(sorted(VALUES)), st.integers(0, 2**32))
def test_search_is_never_worse_on_awkward_values(bits, symmetric, dtype, seed):
    rng = np.random.default_rng(seed)
    limits = ml_dtypes.finfo(VALUES[dtype])
    w = random_weight((6, 160), 16, dtype, seed).astype(np.float64).reshape(60, 16)
    w[::7] = rng.integers(-3, 4, w[::7].shape) * float(limits.smallest_subnormal)
    w[1::7] = rng.uniform(-1, 1, w[1::7].shape) * float(limits.max)
    w = w.reshape(6, 160).astype(VALUES[dtype])
    usual = squared_errors(w, *encode(w, bits, 16, symmetric, dtype, True), bits, 16, dtype)
    found = encode(w, bits, 16, symmetric, dtype, True, search=True)
    assert np.isfinite(found[1].view(VALUES[dtype]).astype(np.float32)).all()
    assert np.all(squared_errors(w, *found, bits, 16, dtype) <= usual * (1 + 1e-6))


def test_mxfp4_becomes_integers_without_loss():
    rng = np.random.default_rng(4)
    packed_codes = rng.integers(0, 256, (5, 51 * 5, 16)).astype(np.uint8)
    packed_codes[rng.random(packed_codes.shape[:2]) < 0.1] &= 0x88
    packed_codes = packed_codes.reshape(5, -1)
    exponents = np.tile(np.arange(255, dtype=np.uint8), (5, 1))
    nibbles = np.stack([packed_codes & 15, packed_codes >> 4], -1).reshape(5, -1)
    scales = exponents.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    exact = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64) * scales.repeat(32, 1)
    for dtype in ("BF16", "F32"):
        words = np.empty((5, packed_codes.shape[1] // 2), np.uint32)
        out_scales = np.empty(exponents.shape, BITS[dtype])
        ints.from_mxfp4(packed_codes, exponents, words, out_scales, dtype)
        out = np.empty(exact.shape, np.uint32)
        ints.decode(words, out_scales, dtype, ints.PACKED[8], out, "F32")
        np.testing.assert_array_equal(out.view(np.float32), exact.astype(np.float32))
        empty = (exact == 0).reshape(5, -1, 32).all(2)
        assert empty.any()
        assert (out_scales.view(VALUES[dtype])[empty] == 1).all()
