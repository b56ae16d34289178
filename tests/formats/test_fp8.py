"""The FP8 formats against numpy and ml_dtypes, and against what LLM Compressor and ModelOpt wrote."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from formats.fp8_weights import VALUES, decode, encode, regions, spread, weight
from requant.formats import EXACT_ROUTES, FORMATS, NUMPY_BITS, Encoding, Tile

E4M3 = ml_dtypes.float8_e4m3fn
NAMES = ("fp8-channel", "fp8-block", "fp8-tensor")
GOLDEN = Path(__file__).parent.parent / "golden"
shapes = st.tuples(st.integers(1, 260), st.integers(1, 260))


@settings(max_examples=30, deadline=None)
@given(shapes, st.sampled_from(sorted(VALUES)), st.booleans(), st.sampled_from([None, "F32"]), st.integers(0, 2**32))
def test_tensor_of_any_shape(shape, dtype, reference, scale_dtype, seed):
    w = weight(shape, dtype, seed)
    codes, scale = encode("fp8-tensor", w, dtype, Encoding(reference), scale_dtype)
    arithmetic = VALUES[dtype if reference else "F32"]
    stored = VALUES["F32"] if scale_dtype else arithmetic
    amax = abs(w.astype(np.float32)).max()
    want = (amax / np.float32(448)).astype(stored) if amax else ml_dtypes.finfo(stored).eps
    assert scale == want.astype(np.float32)
    quotient = (w.astype(np.float32) / scale).astype(arithmetic).astype(np.float32)
    np.testing.assert_array_equal(codes, np.clip(quotient, -448, 448).astype(E4M3).view(np.uint8))
    np.testing.assert_array_equal(decode("fp8-tensor", codes, scale), codes.view(E4M3).astype(np.float32) * scale)


@pytest.mark.parametrize("dtype", sorted(VALUES))
def test_a_tensor_of_zeros(dtype):
    codes, scale = encode("fp8-tensor", np.array([[0.0, -0.0]], VALUES[dtype]), dtype, Encoding(True))
    assert codes.tolist() == [[0x00, 0x80]]
    assert scale == ml_dtypes.finfo(VALUES[dtype]).eps.astype(np.float32)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", sorted(VALUES))
@pytest.mark.parametrize("scale", ["amax", "mse", "pow2"])
def test_the_first_value_that_is_not_finite_is_located(name, dtype, scale):
    for bad in (np.nan, -np.inf):
        w = np.ones((128, 300), VALUES[dtype])
        w[97, 40] = w[90, 299] = w[90, 5] = bad
        parts = [np.zeros(p.shape, NUMPY_BITS[p.dtype]) for p in FORMATS[name].parts(w.shape, dtype)]
        tiles = [Tile(parts[0], "F8_E4M3"), Tile(parts[1], dtype)]
        how = Encoding(True, scale, 1.0)
        assert FORMATS[name].encode(Tile(w.view(NUMPY_BITS[dtype]), dtype), tiles, how) == 90 * 300 + 5


# Powers of two


def power_of_two(amax, dtype):
    """2^ceil(log2(amax / 448)), by the mantissa of amax."""
    if not amax:
        return 1.0
    mantissa, exponent = np.frexp(np.float64(amax))
    lowest = -24 if dtype == "F16" else -126
    return 2.0 ** max(exponent - 9 + (mantissa > 0.875), lowest)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(NAMES), shapes, st.sampled_from(sorted(VALUES)), st.booleans(), st.integers(-130, 9),
    st.integers(0, 2**32),
)  # fmt: skip
def test_powers_of_two(name, shape, dtype, reference, shift, seed):
    w = weight(shape, dtype, seed)
    w[: shape[0] // 2] = 0
    w = (w.astype(np.float64) * 2.0 ** max(shift, -20 if dtype == "F16" else shift)).astype(VALUES[dtype])
    codes, scales = encode(name, w, dtype, Encoding(reference, "pow2"))
    exact = w.astype(np.float64)
    of = lambda region: power_of_two(abs(region).max(), dtype if reference else "F32")  # noqa: E731
    np.testing.assert_array_equal(scales, regions(name, exact, of))
    quotient = exact / spread(name, scales.astype(np.float64), shape)
    assert abs(quotient).max() <= 448
    np.testing.assert_array_equal(codes, quotient.astype(E4M3).view(np.uint8))


@pytest.mark.parametrize("dtype", sorted(VALUES))
@pytest.mark.parametrize("name", NAMES)
def test_powers_of_two_around_their_edges(name, dtype):
    info = ml_dtypes.finfo(VALUES[dtype])
    ulp = float(info.eps)
    for amax in (1.75, 1.75 + ulp, 1.75 - ulp / 2, 1, 2 - ulp, 448, float(info.max), float(info.smallest_subnormal), 0):
        codes, scales = encode(name, np.array([[-amax, 0]], VALUES[dtype]), dtype, Encoding(True, "pow2"))
        assert scales.ravel()[0] == power_of_two(VALUES[dtype].type(amax), dtype)
        assert codes[0, 1] == 0


# What vLLM does to blocks when it loads them for DeepGEMM


def deep_gemm(values):
    """Re-quantize decoded float32 blocks as vLLM does for DeepGEMM's E8M0 scales; return what is then computed with."""
    one = np.float32(1)
    out = np.empty_like(values)
    for top in range(0, values.shape[0], 128):
        for left in range(0, values.shape[1], 128):
            block = values[top : top + 128, left : left + 128]
            amax = max(abs(block).max(), np.float32(1e-4))
            scale = np.exp2(np.ceil(np.log2(amax / np.float32(448)))).astype(np.float32)
            codes = np.clip(block * (one / scale), -448, 448).astype(E4M3)
            out[top : top + 128, left : left + 128] = codes.astype(np.float32) * scale
    return out


@settings(max_examples=20, deadline=None)
@given(shapes, st.sampled_from(sorted(VALUES)), st.booleans(), st.integers(0, 2**32))
def test_powers_of_two_come_through_deep_gemm_unchanged(shape, dtype, reference, seed):
    w = weight(shape, dtype, seed)
    codes, scales = encode("fp8-block", w, dtype, Encoding(reference, "pow2"))
    values = decode("fp8-block", codes, scales)
    kept = spread("fp8-block", scales, shape) >= 2.0**-22
    np.testing.assert_array_equal(deep_gemm(values)[kept], values[kept])


def test_small_powers_of_two_come_through_deep_gemm_if_they_are_multiples_of_its_smallest():
    rng = np.random.default_rng(6)
    w = (rng.integers(-15, 16, (128, 256)) * 2.0**-31).astype(VALUES["BF16"])
    w[:, 128:] *= VALUES["BF16"].type(0.5)
    codes, scales = encode("fp8-block", w, "BF16", Encoding(True, "pow2"))
    assert scales.max() < 2.0**-22
    values = decode("fp8-block", codes, scales)
    np.testing.assert_array_equal(values, w.astype(np.float32))
    changed = deep_gemm(values) != values
    np.testing.assert_array_equal(changed, values % 2.0**-31 != 0)
    assert changed[:, 128:].any()


def test_usual_scales_lose_three_decibels_to_deep_gemm():
    w = (0.02 * np.random.default_rng(7).standard_normal((1024, 1024))).astype(VALUES["BF16"])
    exact = w.astype(np.float64)

    def sqnr(values):
        return 10 * np.log10((exact**2).sum() / ((exact - values) ** 2).sum())

    usual = decode("fp8-block", *encode("fp8-block", w, "BF16", Encoding(True)))
    powers = decode("fp8-block", *encode("fp8-block", w, "BF16", Encoding(True, "pow2")))
    assert 2.5 < sqnr(usual) - sqnr(deep_gemm(usual)) < 3.5
    assert sqnr(usual) - sqnr(powers) < 0.1
    assert sqnr(deep_gemm(powers)) == sqnr(powers)


def test_exact_blocks_of_mxfp4_come_through_deep_gemm_unchanged():
    """As long as exponents are at least 111; below, the smallest values are lost."""
    rng = np.random.default_rng(8)
    packed = rng.integers(0, 256, (256, 128)).astype(np.uint8)
    for lowest, unchanged in ((111, True), (90, False)):
        exponents = rng.integers(lowest, lowest + 12, (256, 8)).astype(np.uint8)
        codes, scales = np.empty((256, 256), np.uint8), np.empty((2, 2), np.uint32)
        source, target = (Tile(packed, "F4"), Tile(exponents, "F8_E8M0")), (Tile(codes, "F8_E4M3"), Tile(scales, "F32"))
        assert EXACT_ROUTES["mxfp4", "fp8-block"].transcode(source, target, 0.0) == 0
        values = decode("fp8-block", codes, scales.view(np.float32))
        assert (deep_gemm(values) == values).all() == unchanged


# Scales of other dtypes


@pytest.mark.parametrize("out_dtype", sorted(VALUES))
def test_e8m0_scales(out_dtype):
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 128)).reshape(256, 256 * 128)
    exponents = np.arange(512, dtype=np.uint16).astype(np.uint8).reshape(2, 256)
    out = np.empty(codes.shape, NUMPY_BITS[out_dtype])
    with np.errstate(over="ignore", invalid="ignore"):
        FORMATS["fp8-block"].decode((Tile(codes, "F8_E4M3"), Tile(exponents, "F8_E8M0")), Tile(out, out_dtype))
        scales = spread("fp8-block", exponents.view(ml_dtypes.float8_e8m0fnu).astype(np.float32), codes.shape)
        want = (codes.view(E4M3).astype(np.float32) * scales).astype(VALUES[out_dtype])
        np.testing.assert_array_equal(out.view(VALUES[out_dtype]).astype(np.float32), want.astype(np.float32))


# What others wrote


def test_tensors_as_llm_compressor_and_model_optimizer_write_them():
    golden = load_file(GOLDEN / "fp8-tensor.safetensors")
    names = sorted({key.rsplit(".", 2)[0] for key in golden})
    for name in names:
        dtype = name.split(".")[0]
        w = golden[f"{name}.source.weight"].view(VALUES[dtype])
        for maker, scale_dtype in (("llmcompressor", dtype), ("modelopt", "F32")):
            codes, scale = encode("fp8-tensor", w, dtype, Encoding(True), scale_dtype)
            np.testing.assert_array_equal(codes, golden[f"{name}.{maker}.weight"])
            want = golden[f"{name}.{maker}.scale"].view(VALUES[scale_dtype]).astype(np.float32)
            np.testing.assert_array_equal(scale, want)
    assert len(names) == 12
