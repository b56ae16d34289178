"""NVFP4 against what compressed-tensors and ModelOpt themselves wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from requant.formats import FORMATS, NUMPY_BITS, Encoding, Tile

GOLDEN = np.load(Path(__file__).parent.parent / "golden" / "nvfp4.npz")
CASES = sorted({name.rsplit("/", 1)[0] for name in GOLDEN.files if "/" in name})
WRITERS = {"nvfp4": "ct", "nvfp4-scale2": "mo"}


def parts_of(fmt, shape, dtype):
    return [Tile(np.empty(p.shape, NUMPY_BITS[p.dtype]), p.dtype) for p in fmt.parts(shape, dtype)]


def encode(name, bits, dtype, how):
    fmt = FORMATS[name]
    parts = parts_of(fmt, bits.shape, dtype)
    assert fmt.encode(Tile(bits, dtype), parts, how) == -1
    return parts


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("case", CASES)
def test_bytes(case, name):
    dtype, writer = case.split("/")[0], WRITERS[name]
    bits, amax = GOLDEN[f"{case}/bits"], float(GOLDEN[f"{case}/amax"])
    packed, scales, whole = encode(name, bits, dtype, Encoding(True, amax=amax))
    assert whole.bits.view(np.float32) == GOLDEN[f"{case}/{writer}-global"]
    np.testing.assert_array_equal(scales.bits, GOLDEN[f"{case}/{writer}-scale"])
    np.testing.assert_array_equal(packed.bits, GOLDEN[f"{case}/{writer}-packed"])
    # compressed-tensors decodes to BF16; ModelOpt to the weight's dtype, and gives zeros no sign.
    to = "BF16" if writer == "ct" else dtype
    out = np.empty(bits.shape, NUMPY_BITS[to])
    FORMATS[name].decode([packed, scales, whole], Tile(out, to))
    if writer == "mo":
        out[(out & np.iinfo(out.dtype).max >> 1) == 0] = 0
    np.testing.assert_array_equal(out, GOLDEN[f"{case}/{writer}-decoded"])


@pytest.mark.parametrize("name", WRITERS)
def test_parts(name):
    payload, scales, whole = FORMATS[name].parts((3, 64), "BF16")
    assert payload == ("U8", (3, 32), 1, "F4")
    assert scales == ("F8_E4M3", (3, 4), 1, "F8_E4M3")
    assert whole == ("F32", (1,), 0, "F32")


@pytest.mark.parametrize("name", WRITERS)
def test_tiles_are_as_the_whole(name):
    rng = np.random.default_rng(3)
    w = (rng.standard_normal((300, 48)) * 0.1).astype(np.float32)
    how = Encoding(True, amax=float(abs(w).max()))
    whole = encode(name, w.view(np.uint32), "F32", how)
    for rows in (slice(0, 128), slice(128, 256), slice(256, 300)):
        tile = encode(name, w[rows].view(np.uint32), "F32", how)
        np.testing.assert_array_equal(tile[0].bits, whole[0].bits[rows])
        np.testing.assert_array_equal(tile[1].bits, whole[1].bits[rows])
        np.testing.assert_array_equal(tile[2].bits, whole[2].bits)


def test_float32_replaces_a_reference_that_overflows():
    ct, mo = FORMATS["nvfp4"], FORMATS["nvfp4-scale2"]
    assert ct.replaces_reference(0.041015625, "F16")
    assert not ct.replaces_reference(0.0411, "F16")
    assert not ct.replaces_reference(0.0, "F16")
    assert ct.replaces_reference(1e-37, "BF16")
    assert ct.replaces_reference(1e-37, "F32")
    assert not ct.replaces_reference(1e-35, "BF16")
    assert not mo.replaces_reference(1e-37, "F16")


@pytest.mark.parametrize("name", WRITERS)
def test_mse_adds_its_errors(name):
    rng = np.random.default_rng(3)
    w = (rng.standard_normal((64, 256)) * 0.1).astype(np.float32).view(np.uint32)
    amax, errors = float(abs(w.view(np.float32)).max()), np.zeros(2)
    found = encode(name, w, "F32", Encoding(False, "mse", amax, errors))
    assert 0 < errors[1] < errors[0]
    before = errors.copy()
    again = encode(name, w, "F32", Encoding(False, "mse", amax))
    np.testing.assert_array_equal(again[0].bits, found[0].bits)
    encode(name, w, "F32", Encoding(False, "amax", amax, errors))
    np.testing.assert_array_equal(errors, before)
