"""Unquantized weights: conversion between float dtypes, against numpy's and ml_dtypes' casts."""

from __future__ import annotations

from itertools import product

import ml_dtypes
import numpy as np
import pytest

from requant.formats import FORMATS, NUMPY_BITS, Encoding, Tile

VALUES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
PAIRS = list(product(VALUES, VALUES))
DENSE, HOW = FORMATS["dense"], Encoding(reference=True)


def patterns(dtype):
    """Every pattern of a 16-bit dtype; for F32 those at and next to what the others round, and random ones."""
    every = np.arange(65536, dtype=np.uint16)
    if dtype != "F32":
        return every.reshape(256, 256)
    halves = every.view(np.float16)
    with np.errstate(invalid="ignore"):
        f16 = halves.astype(np.float32).view(np.uint32).astype(np.int64)
    between = (f16 + np.roll(f16, -1)) // 2  # midpoints, mostly
    bf16 = every.astype(np.int64) << 16 | 0x8000
    random = np.random.default_rng(0).integers(0, 2**32, 65536)
    near = [bits + step for bits in (f16, between, bf16, random) for step in (-1, 0, 1)]
    return (np.concatenate(near) & 0xFFFFFFFF).astype(np.uint32).reshape(-1, 256)


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_value(source, target):
    bits = patterns(source)
    out = np.empty(bits.shape, NUMPY_BITS[target])
    DENSE.decode([Tile(bits, source)], Tile(out, target))
    with np.errstate(over="ignore", invalid="ignore"):
        want = bits.view(VALUES[source]).astype(np.float32).astype(VALUES[target])
        stayed_nan = np.isnan(out.view(VALUES[target]))
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(out[numbers], want.view(out.dtype)[numbers])
    np.testing.assert_array_equal(stayed_nan, ~numbers)


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_encode_reports_the_first_value_that_is_not_finite(source, target, bad):
    w = np.random.default_rng(0).standard_normal((7, 1000)).astype(VALUES[source])
    out = np.empty(w.shape, NUMPY_BITS[target])
    weight, parts = Tile(w.view(NUMPY_BITS[source]), source), [Tile(out, target)]
    assert DENSE.encode(weight, parts, HOW) == -1
    np.testing.assert_array_equal(out, w.astype(np.float32).astype(VALUES[target]).view(out.dtype))
    w[3, 5] = w[6, 0] = bad
    assert DENSE.encode(weight, parts, HOW) == 3005


@pytest.mark.parametrize(
    ("source", "target", "largest", "too_large"),
    [
        ("F32", "F16", 65519.996, 65520.0),
        ("BF16", "F16", 65280.0, 65536.0),
        ("F32", "BF16", (2 - 2**-8 - 2**-23) * 2.0**127, (2 - 2**-8) * 2.0**127),
    ],
)
def test_encode_reports_what_the_narrower_dtype_cannot_hold(source, target, largest, too_large):
    w = np.full((2, 40), largest, VALUES[source])
    out = np.empty(w.shape, NUMPY_BITS[target])
    assert DENSE.encode(Tile(w.view(NUMPY_BITS[source]), source), [Tile(out, target)], HOW) == -1
    w[1, 2] = -too_large
    assert DENSE.encode(Tile(w.view(NUMPY_BITS[source]), source), [Tile(out, target)], HOW) == 42
