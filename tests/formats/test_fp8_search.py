"""FP8 scales by search: never worse than the usual ones, and what that gains."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.fp8_weights import VALUES, decode, encode, regions, spread, weight
from parity import sources
from requant.formats import Encoding

shapes = st.tuples(st.integers(1, 260), st.integers(1, 260))


def squared_errors(name, w, codes, scales):
    """Summed over each region."""
    return regions(name, (w.astype(np.float64) - decode(name, codes, scales).astype(np.float64)) ** 2, np.sum)


@pytest.mark.parametrize("name", ["fp8-channel", "fp8-block"])
@pytest.mark.parametrize("dtype", sorted(VALUES))
@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize("kind", ["gauss", "t3"])
def test_a_search_is_never_worse_than_amax(name, dtype, reference, kind):
    w = weight((300, 700), dtype, 5, kind)
    w[3], w[4, 9], w[5, :] = 0, 100, w[5, 0]
    w[140:256] *= VALUES[dtype].type(2.0**-20)
    errors = np.zeros(2)
    found = encode(name, w, dtype, Encoding(reference, "mse", errors=errors))
    usual = encode(name, w, dtype, Encoding(reference))
    sums = [
        regions(name, (w.astype(np.float64) - decode(name, *parts).astype(np.float64)) ** 2, np.sum)
        for parts in (usual, found)
    ]
    assert (sums[1] <= sums[0] * (1 + 1e-12)).all()
    np.testing.assert_allclose(errors, [sums[0].sum(), sums[1].sum()], rtol=1e-10)
    assert np.isfinite(found[1]).all()
    assert (found[1] > 0).all()


@pytest.mark.parametrize(("name", "kind", "gain"), [
    ("fp8-channel", "gauss", 0.25), ("fp8-channel", "t3", 0.4), ("fp8-block", "gauss", 0.14), ("fp8-block", "t3", 0.25),
])  # fmt: skip
def test_what_a_search_gains(name, kind, gain):
    """In dB, over LLM Compressor's bytes of a BF16 weight."""
    rng = np.random.default_rng(0)
    shape = (512, 2048)
    w = (0.02 * (rng.standard_t(3, shape) if kind == "t3" else rng.standard_normal(shape))).astype(VALUES["BF16"])
    errors = np.zeros(2)
    encode(name, w, "BF16", Encoding(True, "mse", errors=errors))
    assert 10 * np.log10(errors[0] / errors[1]) >= gain


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["fp8-channel", "fp8-block"]), shapes, st.sampled_from(sorted(VALUES)), st.booleans(),
    st.sampled_from(["gauss", "t3"]), st.integers(0, 2**32),
)  # fmt: skip
def test_nothing_of_a_grid_of_32_scales_an_octave_is_better(name, shape, dtype, reference, kind, seed):
    w = weight(shape, dtype, seed, kind)
    found = squared_errors(name, w, *encode(name, w, dtype, Encoding(reference, "mse")))
    amax = regions(name, abs(w.astype(np.float32)), np.max)
    for step in range(32):
        scales = (amax * np.float32(2 ** (step / 32)) / np.float32(448)).astype(VALUES[dtype if reference else "F32"])
        scales = scales.astype(np.float32)
        divisors = spread(name, np.where(scales == 0, np.float32(1), scales), shape)
        codes = np.clip(w.astype(np.float32) / divisors, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        grid = squared_errors(name, w, codes.view(np.uint8), scales)
        # Clipped, where the scale is a subnormal that has been rounded down: not tried.
        tried = scales * np.float32(464) >= amax
        assert (found <= grid * (1 + 1e-5))[tried].all()


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("name", ["fp8-channel", "fp8-block"])
@pytest.mark.parametrize("dtype", sorted(VALUES))
@pytest.mark.parametrize("reference", [True, False])
def test_a_search_among_awkward_values(name, dtype, reference):
    """Subnormal and vanishing scales, outliers, zeros, the largest values that there are."""
    rng = np.random.default_rng(9)
    for kind in sources.KINDS:
        w = kind(rng, (130, 140), VALUES[dtype]).astype(VALUES[dtype])
        usual = encode(name, w, dtype, Encoding(reference))
        found = encode(name, w, dtype, Encoding(reference, "mse"))
        assert np.isfinite(found[1]).all()
        assert (found[1] > 0).all()
        np.testing.assert_array_equal(found[0] >> 7, np.signbit(w.astype(np.float32)))
        assert (squared_errors(name, w, *found) <= squared_errors(name, w, *usual) * (1 + 1e-12)).all()
