"""The three FP8 formats against compressed-tensors: encoded and decoded, byte for byte."""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING

import numpy as np
import pytest

from parity import sources
from requant.formats import FORMATS, NUMPY_BITS, Encoding, Tile

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.parity

PRESETS = {"fp8-channel": "FP8_DYNAMIC", "fp8-block": "FP8_BLOCK", "fp8-tensor": "FP8"}
SHAPES = ((384, 384), (300, 200), (5, 4000), (2, 3))


@pytest.fixture(scope="module")
def fp8() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("parity.fp8")


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("dtype", sources.DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_encoded_and_decoded(fp8: ModuleType, name: str, dtype: str, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(1)
    weights = [kind(rng, shape, sources.DTYPES[dtype]).astype(sources.DTYPES[dtype]) for kind in sources.KINDS]
    weights.append(sources.mosaic(rng, shape, sources.DTYPES[dtype], (128, 128)))
    for weight in weights:
        bits = weight.view(NUMPY_BITS[dtype])
        parts = FORMATS[name].parts(shape, dtype)
        ours = [np.zeros(part.shape, NUMPY_BITS[part.dtype]) for part in parts]
        tiles = [Tile(array, part.spells) for array, part in zip(ours, parts, strict=True)]
        how = Encoding(True, "amax", float(abs(weight.astype(np.float64)).max()))
        assert FORMATS[name].encode(Tile(bits, dtype), tiles, how) == -1
        theirs = fp8.compress(fp8.from_bits(bits, dtype), PRESETS[name])
        np.testing.assert_array_equal(ours[0], fp8.to_bits(theirs["weight"], "F8_E4M3"))
        np.testing.assert_array_equal(ours[1], fp8.to_bits(theirs["weight_scale"], dtype))
        decoded = np.zeros(shape, NUMPY_BITS[dtype])
        FORMATS[name].decode(tiles, Tile(decoded, dtype))
        np.testing.assert_array_equal(decoded, fp8.to_bits(fp8.decompress(theirs, PRESETS[name]), dtype))


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("scale_dtype", sources.DTYPES)
@pytest.mark.parametrize("out_dtype", sources.DTYPES)
def test_decoded_from_any_codes(fp8: ModuleType, name: str, scale_dtype: str, out_dtype: str) -> None:
    """Every code under scales of every size; what is not in the scale's dtype is converted from it."""
    rng = np.random.default_rng(2)
    codes = np.tile(np.arange(256, dtype=np.uint8), (300, 2))
    parts = FORMATS[name].parts(codes.shape, scale_dtype)
    values = 2.0 ** rng.uniform(-28, 15, parts[1].shape)
    scales = values.astype(sources.DTYPES[scale_dtype]).view(NUMPY_BITS[scale_dtype])
    ours = np.empty(codes.shape, NUMPY_BITS[out_dtype])
    FORMATS[name].decode((Tile(codes, "F8_E4M3"), Tile(scales, scale_dtype)), Tile(ours, out_dtype))
    stored = {"weight": fp8.from_bits(codes, "F8_E4M3"), "weight_scale": fp8.from_bits(scales, scale_dtype)}
    theirs = fp8.decompress(stored, PRESETS[name])
    if out_dtype == "F32":  # ours is exact, theirs rounded to the scale's dtype
        theirs_bits = fp8.to_bits(theirs, scale_dtype).view(sources.DTYPES[scale_dtype])
        values32 = ours.view(np.float32)
        with np.errstate(over="ignore"):
            rounded = values32.astype(sources.DTYPES[scale_dtype])
            np.testing.assert_array_equal(rounded.astype(np.float32), theirs_bits.astype(np.float32))
    else:
        theirs = theirs.to(fp8.VALUES[out_dtype])
        numbers = ~np.isnan(theirs.float().numpy())
        np.testing.assert_array_equal(ours[numbers], fp8.to_bits(theirs, out_dtype)[numbers])
        assert np.isnan(ours.view(sources.DTYPES[out_dtype]).astype(np.float32)[~numbers]).all()
