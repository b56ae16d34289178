"""MXFP4 and MXFP8: encoding by amax and by search, against the rule in float64, and LLM Compressor's recorded bytes."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from requant.formats import FORMATS, NUMPY_BITS, Encoding, Tile

VALUES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
NAMES = ("mxfp4", "mxfp8")
GOLDEN = Path(__file__).parents[1] / "golden"


def blank(name, shape):
    return [Tile(np.empty(p.shape, NUMPY_BITS[p.dtype]), p.dtype) for p in FORMATS[name].parts(shape, "BF16")]


def encode(name, w, dtype, scale="amax", reference=True, errors=None):
    parts = blank(name, w.shape)
    how = Encoding(reference, scale, errors=errors)
    bad = FORMATS[name].encode(Tile(np.ascontiguousarray(w).view(NUMPY_BITS[dtype]), dtype), parts, how)
    return bad, *(part.bits for part in parts)


def unpacked(name, payload):
    if name == "mxfp8":
        return payload.view(ml_dtypes.float8_e4m3fn)
    codes = np.stack([payload & 15, payload >> 4], axis=-1).reshape(len(payload), -1)
    return codes.view(ml_dtypes.float4_e2m1fn)


def decoded(name, payload, exponents):
    return unpacked(name, payload).astype(np.float64) * 2.0 ** (exponents.repeat(32, axis=1) - 127.0)


def codes_at(name, w, dtype, exponents):
    """The codes of ``w`` under these exponents: the quotient rounded to ``dtype``, then to the nearest code."""
    scales = 2.0 ** (exponents.repeat(32, axis=1) - 127.0)
    with np.errstate(over="ignore", under="ignore"):
        quotient = (w.astype(np.float64) / scales).astype(VALUES[dtype]).astype(np.float64)
    if name == "mxfp8":
        return np.clip(quotient, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    magnitudes = abs(np.clip(quotient, -6, 6)).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    return (magnitudes | (quotient < 0) << 3).astype(np.uint8).view(ml_dtypes.float4_e2m1fn)


def expected_exponents(name, w, dtype):
    offset, subnormal = (2, 2.0**-14) if name == "mxfp4" else (8, 2.0**-14)
    amax = abs(w.astype(np.float64)).reshape(len(w), -1, 32).max(-1)
    mantissas, exponents = np.frexp(amax)
    bytes_ = np.maximum(exponents - 1 + (mantissas >= 0.875) - offset + 127, 0)
    bytes_[amax == 0] = 0
    if dtype == "F16":  # a power of two that is subnormal counts as none, and a scale of zero becomes 1
        bytes_ = np.where(amax < subnormal, np.where(amax >= 0.75 * subnormal, 127 - 14 - offset, 127), bytes_)
    return bytes_.astype(np.uint8)


def awkward(name, rows, groups, dtype, seed):
    """Groups of every size: gaussian, half-way between codes, zeros of both signs, tiny beside large."""
    rng = np.random.default_rng(seed)
    shape = (rows * groups, 32)
    element = ml_dtypes.float4_e2m1fn if name == "mxfp4" else ml_dtypes.float8_e4m3fn
    count = 8 if name == "mxfp4" else 127
    levels = np.arange(count, dtype=np.uint8).view(element).astype(np.float64)
    middles = (levels[1:] + levels[:-1]) / 2
    signs = rng.choice([-1.0, 1.0], shape)
    w = rng.standard_normal(shape)
    kind = rng.integers(0, 5, len(w))
    midway = rng.choice(middles, shape) * (1 + rng.integers(-1, 2, shape) * float(ml_dtypes.finfo(VALUES[dtype]).eps))
    midway[:, 0] = levels[-1]
    w[kind == 1] = (midway * signs)[kind == 1]
    w[kind == 2] = 0.0 * signs[kind == 2]
    w[kind == 3] *= 2.0 ** -rng.integers(0, 30, shape)[kind == 3]
    top = 12 if dtype == "F16" else 122
    low = -26 if dtype == "F16" else -140
    w *= 2.0 ** rng.integers(low, top - (8 if name == "mxfp8" else 2), (len(w), 1))
    with np.errstate(under="ignore"):
        return w.reshape(rows, -1).astype(VALUES[dtype])


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(NAMES), st.sampled_from(sorted(VALUES)), st.integers(1, 20), st.integers(1, 9), st.integers(0, 999)
)
def test_encode(name, dtype, rows, groups, seed):
    w = awkward(name, rows, groups, dtype, seed)
    bad, payload, exponents = encode(name, w, dtype)
    assert bad == -1
    np.testing.assert_array_equal(exponents, expected_exponents(name, w, dtype))
    want = codes_at(name, w, dtype, exponents)
    np.testing.assert_array_equal(unpacked(name, payload).view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", sorted(VALUES))
def test_encode_of_every_pattern_beside_every_amax(name, dtype):
    """16-bit patterns in groups of neighbours and of strangers; a chunk's border falls anywhere."""
    rng = np.random.default_rng(7)
    every = np.arange(65536, dtype=np.uint16)
    kind = "BF16" if dtype == "F32" else dtype
    every = every[(every & 0x7FFF) <= {"BF16": 0x7F5F, "F16": 0x7AFF}[kind]]
    every = every[: every.size // 96 * 96]
    w = np.concatenate([every, *(rng.permutation(every) for _ in range(6))]).view(VALUES[kind]).astype(VALUES[dtype])
    # Strangers that are small together, too.
    small = rng.integers(1, 0x0800, 96 * 64).astype(np.uint16).view(VALUES[kind]).astype(VALUES[dtype])
    w = np.concatenate([w, small]).reshape(-1, 96)
    bad, payload, exponents = encode(name, w, dtype)
    assert bad == -1
    np.testing.assert_array_equal(exponents, expected_exponents(name, w, dtype))
    want = codes_at(name, w, dtype, exponents)
    np.testing.assert_array_equal(unpacked(name, payload).view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("exponent", [0, 3, 4, 5, 10, 11, 12, 60, 118, 127, 128, 246])
def test_encode_of_every_bf16_pattern_under_every_amax_of_a_binade(name, exponent):
    """One exponent throughout: 16-bit integers alone, or float32 alone, must do."""
    top = exponent + (2 if name == "mxfp4" else 8)  # the amax's own
    largest = np.arange(max(top - 1, 0) << 7 | 0x60, (top << 7) | 0x60, dtype=np.uint16)  # 1.75 to 3.5
    amax = largest if exponent else largest[::7]
    below = np.arange(0 if top < 60 else (top - 40) << 7, 0x8000, dtype=np.uint16)[: 41 << 7]
    groups = np.empty((amax.size, -(-below.size // 31), 32), np.uint16)
    groups[:, :, 0] = amax[:, None]
    values = np.minimum(np.resize(below, groups[0, :, 1:].size).reshape(1, -1, 31), amax[:, None, None])
    groups[:, :, 1:] = values | np.random.default_rng(0).integers(0, 2, values.shape).astype(np.uint16) << 15
    zeros = np.zeros_like(groups[:, :2])
    zeros[:, 1] = 0x8000
    w = np.concatenate([groups, zeros], axis=1).reshape(amax.size, -1).view(VALUES["BF16"])
    bad, payload, exponents = encode(name, w, "BF16")
    assert bad == -1
    assert (exponents[:, :-2] == exponent).all()
    assert (exponents[:, -2:] == 0).all()
    want = codes_at(name, w, "BF16", exponents)
    np.testing.assert_array_equal(unpacked(name, payload).view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("dtype", sorted(VALUES))
def test_mxfp8_in_float32_is_that_of_the_same_values_in_f32(dtype):
    w = awkward("mxfp8", 20, 9, dtype, 0)
    ours, wide = encode("mxfp8", w, dtype, reference=False), encode("mxfp8", w.astype(np.float32), "F32")
    for a, b in zip(ours, wide, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("dtype", "amax", "mxfp4", "mxfp8"),
    [
        *((d, a, x, x - 6) for d in VALUES for a, x in [(1, 125), (1.4, 125), (1.5, 125), (1.74, 125), (1.75, 126)]),
        ("BF16", 0, 0, 0),
        ("F32", 0, 0, 0),
        ("F16", 0, 127, 127),
        ("F16", 2.0**-15, 127, 127),
        ("F16", 0.75 * 2.0**-14, 111, 105),
    ],
)
def test_published_exponents(dtype, amax, mxfp4, mxfp8):
    w = np.zeros((1, 32), VALUES[dtype])
    w[0, 31] = -amax
    assert [encode(name, w, dtype)[2].item() for name in NAMES] == [mxfp4, mxfp8]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", sorted(VALUES))
@pytest.mark.parametrize("scale", ["amax", "mse"])
def test_values_that_have_no_encoding_are_located(name, dtype, scale):
    top = 15 if dtype == "F16" else 127
    for bad in (np.nan, -np.inf, 1.75 * 2.0**top):
        w = np.ones((70, 96), VALUES[dtype])
        w[63, 41] = w[69, 0] = bad
        assert encode(name, w, dtype, scale)[0] == 63 * 96 + 41


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(NAMES), st.sampled_from(sorted(VALUES)), st.integers(1, 20), st.integers(1, 9), st.integers(0, 999)
)
def test_search_takes_the_least_squared_error(name, dtype, rows, groups, seed):
    w = awkward(name, rows, groups, dtype, seed)
    errors = np.array([1.0, 2.0])
    bad, payload, exponents = encode(name, w, dtype, "mse", errors=errors)
    assert bad == -1
    first = expected_exponents(name, w, dtype)

    def loss(candidate):
        codes = codes_at(name, w, dtype, candidate).astype(np.float64)
        scales = 2.0 ** (candidate.repeat(32, axis=1) - 127.0)
        return ((w.astype(np.float64) - codes * scales) ** 2).reshape(rows, -1, 32).sum(-1)

    losses = [loss(first), *(loss(np.clip(first.astype(int) + step, 0, 254).astype(np.uint8)) for step in (-1, 1))]
    chosen = loss(exponents)
    np.testing.assert_allclose(chosen, np.min(losses, axis=0), rtol=1e-12)
    assert (chosen <= losses[0]).all()
    tied = losses[0] <= np.minimum(losses[1], losses[2])
    np.testing.assert_array_equal(exponents[tied], first[tied])
    np.testing.assert_array_equal(
        unpacked(name, payload).view(np.uint8), codes_at(name, w, dtype, exponents).view(np.uint8)
    )
    np.testing.assert_allclose(errors, [1 + losses[0].sum(), 2 + chosen.sum()], rtol=1e-12)


@pytest.mark.parametrize(("draw", "least_gain"), [("gauss", 0.05), ("t3", 0.05)])
def test_what_a_search_gains(draw, least_gain):
    rng = np.random.default_rng(0)
    w = 0.02 * (rng.standard_normal((256, 1024)) if draw == "gauss" else rng.standard_t(3, (256, 1024)))
    w = w.astype(VALUES["BF16"])
    gains = {}
    for name in NAMES:
        errors = np.zeros(2)
        _, payload, exponents = encode(name, w, "BF16", "mse", errors=errors)
        error = ((w.astype(np.float64) - decoded(name, payload, exponents)) ** 2).sum()
        assert error == pytest.approx(errors[1], rel=1e-12)
        gains[name] = 10 * np.log10(errors[0] / errors[1])
    assert gains["mxfp4"] >= least_gain
    assert gains["mxfp8"] >= 0


@pytest.mark.parametrize("dtype", sorted(VALUES))
def test_decode_of_every_mxfp8_code_and_exponent(dtype):
    codes = np.tile(np.arange(256, dtype=np.uint8), (255, 1))
    exponents = np.arange(255, dtype=np.uint8).repeat(8).reshape(255, 8)
    out = np.empty(codes.shape, NUMPY_BITS[dtype])
    FORMATS["mxfp8"].decode([Tile(codes, "F8_E4M3"), Tile(exponents, "U8")], Tile(out, dtype))
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        want = decoded("mxfp8", codes, exponents).astype(np.float32).astype(VALUES[dtype])
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(out[numbers], want.view(out.dtype)[numbers])
    assert np.isnan(out.view(VALUES[dtype])[~numbers]).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", sorted(VALUES))
def test_golden(name, dtype):
    stored = load_file(GOLDEN / f"mx-{dtype.lower()}.safetensors")
    bad, payload, exponents = encode(name, stored["weight"], dtype)
    assert bad == -1
    np.testing.assert_array_equal(payload, stored[f"{name}.payload"].view(np.uint8))
    np.testing.assert_array_equal(exponents, stored[f"{name}.exponents"])
    out = np.empty(stored["weight"].shape, np.uint16)
    parts = [Tile(payload, FORMATS[name].parts((1, 32), "BF16")[0].dtype), Tile(exponents, "U8")]
    FORMATS[name].decode(parts, Tile(out, "BF16"))
    np.testing.assert_array_equal(out, stored[f"{name}.decoded"])
