"""FP8 kernels against ml_dtypes' conversions and numpy's float32 arithmetic."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from requant.kernels import fp8

E4M3 = ml_dtypes.float8_e4m3fn
VALUES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
BITS = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}
shapes = st.tuples(st.integers(1, 300), st.integers(1, 300))


def values(bits, dtype):
    return bits.view(VALUES[dtype]).astype(np.float32)


def expected(w, amax, dtype):
    """Codes and scales of float32 ``w`` whose arithmetic is rounded to ``dtype``; ``amax`` broadcasts over ``w``."""
    target = VALUES[dtype]
    scale = (amax / np.float32(448)).astype(target)
    scale[scale == 0] = ml_dtypes.finfo(target).eps
    quotient = (w / scale.astype(np.float32)).astype(target).astype(np.float32)
    return np.clip(quotient, -448, 448).astype(E4M3).view(np.uint8), scale.view(BITS[dtype])


def every_pattern(dtype, rng):
    """Rows of every finite 16-bit pattern, each row's values limited to a different amax."""
    patterns = np.arange(65536, dtype=np.uint16)
    finite = np.isfinite(values(patterns, dtype))
    magnitudes = patterns[finite & (patterns < 0x8000)]
    amax = np.concatenate([magnitudes[:3], magnitudes[-3:], rng.choice(magnitudes, 58), [0x0400, 0x0080, 0x2000]])
    sign, magnitude = patterns[finite] & 0x8000, patterns[finite] & 0x7FFF
    return sign | np.minimum(magnitude, amax[:, None]).astype(np.uint16)


def encode_channel(w, dtype, reference):
    codes = np.empty(w.shape, np.uint8)
    scales = np.empty((w.shape[0], 1), BITS[dtype] if reference else np.uint32)
    assert fp8.encode_channel(w, dtype, reference, codes, scales) == -1
    return codes, scales


def encode_block(w, dtype, reference):
    codes = np.empty(w.shape, np.uint8)
    scales = np.empty((-(-w.shape[0] // 128), -(-w.shape[1] // 128)), BITS[dtype] if reference else np.uint32)
    assert fp8.encode_block(w, dtype, reference, codes, scales) == -1
    return codes, scales


def weights(shape, dtype, seed):
    rng = np.random.default_rng(seed)
    w = rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 8, (shape[0], 1))
    w[rng.random(shape) < 0.05] = -0.0
    return w.astype(VALUES[dtype]).view(BITS[dtype])


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
@pytest.mark.parametrize("reference", [True, False])
def test_channel_codes_of_every_pattern(dtype, reference):
    w = every_pattern(dtype, np.random.default_rng(1))
    codes, scales = encode_channel(w, dtype, reference)
    w32 = values(w, dtype)
    want_codes, want_scales = expected(w32, abs(w32).max(1, keepdims=True), dtype if reference else "F32")
    np.testing.assert_array_equal(scales, want_scales)
    np.testing.assert_array_equal(codes, want_codes)


def test_channel_codes_of_float32_at_every_rounding_boundary():
    grid = np.arange(127, dtype=np.uint8).view(E4M3).astype(np.float32)
    halves = (grid[1:] + grid[:-1]) / 2
    near = np.concatenate([grid, halves, np.nextafter(halves, np.float32(0)), np.nextafter(halves, np.float32(500))])
    w = np.concatenate([near, -near, [448]]).astype(np.float32)[None]
    codes, scales = encode_channel(w.view(np.uint32), "F32", reference=True)
    assert scales.view(np.float32) == 1
    np.testing.assert_array_equal(codes, w.astype(E4M3).view(np.uint8))


@settings(max_examples=40, deadline=None)
@given(shapes, st.sampled_from(sorted(VALUES)), st.booleans(), st.integers(0, 2**32))
def test_blocks_of_any_shape(shape, dtype, reference, seed):
    w = weights(shape, dtype, seed)
    codes, scales = encode_block(w, dtype, reference)
    w32 = values(w, dtype)
    padded = np.zeros([-(-n // 128) * 128 for n in shape], np.float32)
    padded[: shape[0], : shape[1]] = w32
    blocks = padded.reshape(padded.shape[0] // 128, 128, -1, 128)
    amax = abs(blocks).max((1, 3), keepdims=True)
    want_codes, want_scales = expected(blocks, amax, dtype if reference else "F32")
    np.testing.assert_array_equal(scales, want_scales[:, 0, :, 0])
    np.testing.assert_array_equal(codes, want_codes.reshape(padded.shape)[: shape[0], : shape[1]])


@settings(max_examples=20, deadline=None)
@given(shapes, st.sampled_from(sorted(VALUES)), st.integers(0, 2**32))
def test_channels_of_any_shape(shape, dtype, seed):
    w = weights(shape, dtype, seed)
    codes, scales = encode_channel(w, dtype, reference=True)
    w32 = values(w, dtype)
    want_codes, want_scales = expected(w32, abs(w32).max(1, keepdims=True), dtype)
    np.testing.assert_array_equal(scales, want_scales)
    np.testing.assert_array_equal(codes, want_codes)


@pytest.mark.parametrize(("dtype", "eps"), [("BF16", 2**-7), ("F16", 2**-10), ("F32", 2**-23)])
@pytest.mark.parametrize("encode", [encode_channel, encode_block])
def test_zeros_get_a_finite_scale_and_keep_their_sign(dtype, eps, encode):
    w = np.array([[0.0, -0.0]], VALUES[dtype]).view(BITS[dtype])
    codes, scales = encode(w, dtype, reference=True)
    assert codes.tolist() == [[0x00, 0x80]]
    assert values(scales, dtype) == eps


@pytest.mark.parametrize("dtype", sorted(VALUES))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kernel", [fp8.encode_channel, fp8.encode_block])
def test_first_nonfinite_weight_is_located(dtype, bad, kernel):
    w = np.ones((300, 260), VALUES[dtype])
    w[200, 3] = w[150, 259] = w[150, 100] = bad
    codes, scales = np.empty(w.shape, np.uint8), np.empty((300, 3), BITS[dtype])
    assert kernel(w.view(BITS[dtype]), dtype, True, codes, scales) == 150 * 260 + 100


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("scale_dtype", sorted(VALUES))
@pytest.mark.parametrize("out_dtype", sorted(VALUES))
@pytest.mark.parametrize("block", ["channel", "block"])
def test_decode_of_every_code(scale_dtype, out_dtype, block):
    rng = np.random.default_rng(2)
    codes = np.tile(np.arange(256, dtype=np.uint8), (300, 1))
    if block == "channel":
        # Down to subnormal products and up to overflow.
        scales = 2.0 ** rng.uniform(-30, 15.9, (300, 1))
        spread, shape = np.broadcast_to(scales, codes.shape), (1, 256)
    else:
        scales = 2.0 ** rng.uniform(-16, 4, (3, 2))
        spread, shape = scales.repeat(128, 0)[:300].repeat(128, 1), (128, 128)
    scales, spread = scales.astype(VALUES[scale_dtype]), spread.astype(VALUES[scale_dtype])
    out = np.empty(codes.shape, BITS[out_dtype])
    fp8.decode(codes, scales.view(BITS[scale_dtype]), scale_dtype, shape, out, out_dtype)
    product = codes.view(E4M3).astype(np.float32) * spread.astype(np.float32)
    if out_dtype != "F32":
        product = product.astype(VALUES[scale_dtype])
    np.testing.assert_array_equal(values(out, out_dtype), product.astype(VALUES[out_dtype]).astype(np.float32))
    numbers = codes & 0x7F != 0x7F
    np.testing.assert_array_equal(np.signbit(values(out, out_dtype))[numbers], (codes >= 0x80)[numbers])
