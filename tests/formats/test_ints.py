"""Integer formats: their names and arrays, tiles of rows, exact routes, and compressed-tensors' bytes as recorded."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from formats.encoded import VALUES, allocate, decode, encode
from requant.formats import EXACT_ROUTES, FORMATS, NUMPY_BITS, Encoding, PackedInt, Tile, format_named

GOLDEN = Path(__file__).parents[1] / "golden" / "ints.safetensors"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("int4-g128", PackedInt(4, 128)),
        ("int4-g32", PackedInt(4, 32)),
        ("int8-g128", PackedInt(8, 128)),
        ("int4-g128-asym", PackedInt(4, 128, symmetric=False)),
        ("int8-g7-asym", PackedInt(8, 7, symmetric=False)),
        ("int4-channel", PackedInt(4, -1)),
        ("int8-channel-asym", PackedInt(8, -1, symmetric=False)),
        ("int8-channel-packed", PackedInt(8, -1)),
    ],
)
def test_names_of_packed_integers(name, kind):
    assert kind.name == name
    assert format_named(name) == PackedInt.named(name) == kind


def test_names_of_the_registry_come_first():
    assert all(format_named(name) is kind for name, kind in FORMATS.items())


@pytest.mark.parametrize(
    "name", ["", "int4", "int4-g0", "int4-g032", "int5-g128", "int4-g-1", "int4-g128-sym", "int4-channel-packed", "fp8"]
)
def test_other_names_are_unknown(name):
    assert PackedInt.named(name) is None
    with pytest.raises(KeyError):
        format_named(name)


def test_arrays():
    def arrays(name, shape):
        return [(part.dtype, part.shape, part.rows) for part in format_named(name).parts(shape, "BF16")]

    assert arrays("int8-channel", (10, 37)) == [("I8", (10, 37), 1), ("BF16", (10, 1), 1)]
    assert arrays("int4-g128", (10, 256)) == [("I32", (10, 32), 1), ("BF16", (10, 2), 1), ("I64", (2,), 0)]
    assert arrays("int8-g128-asym", (10, 256)) == [
        ("I32", (10, 64), 1),
        ("BF16", (10, 2), 1),
        ("I32", (3, 2), 4),
        ("I64", (2,), 0),
    ]
    assert arrays("int4-channel-asym", (10, 37))[0:3:2] == [("I32", (10, 5), 1), ("I32", (2, 1), 8)]


@pytest.mark.parametrize("name", ["int8-channel", "int4-g32", "int4-g32-asym", "int8-g32-asym"])
@pytest.mark.parametrize("scale", ["amax", "mse"])
def test_tiles_make_up_the_weight(name, scale):
    kind, shape = format_named(name), (300, 96)
    weight = np.random.default_rng(0).standard_normal(shape).astype(ml_dtypes.bfloat16)
    whole = encode(kind, weight, "BF16", scale=scale)
    tiled = allocate(kind, shape, "BF16")
    for first in (0, 128, 256):
        last = min(first + 128, shape[0])
        rows = [
            Tile(tile.bits[first // part.rows : -(-last // part.rows)] if part.rows else tile.bits, tile.dtype)
            for tile, part in zip(tiled, kind.parts(shape, "BF16"), strict=True)
        ]
        how = Encoding(True, scale)
        assert kind.encode(Tile(weight[first:last].view(np.uint16), "BF16"), rows, how) == -1
        out = np.empty((last - first, shape[1]), np.uint16)
        kind.decode(rows, Tile(out, "BF16"))
        np.testing.assert_array_equal(out, decode(kind, whole, shape, "BF16").view(np.uint16)[first:last])
    for one, other in zip(whole, tiled, strict=True):
        np.testing.assert_array_equal(one.bits, other.bits)


@pytest.mark.parametrize("scale_dtype", ["BF16", "F32"])
def test_mxfp4_to_integers_is_exact(scale_dtype):
    rng = np.random.default_rng(1)
    source = [
        Tile(rng.integers(0, 256, (8, 64)).astype(np.uint8), "F4"),
        Tile(rng.integers(0, 253, (8, 4)).astype(np.uint8), "F8_E8M0"),
    ]
    source[1].bits[0] = [0, 1, 2, 252]
    route, kind = EXACT_ROUTES["mxfp4", "int8-g32"], format_named("int8-g32")
    target = allocate(kind, (8, 128), scale_dtype)
    assert route.transcode(source, target, 0.0) == route.over_span(source, 0.0) == 0
    assert not route.suspects(source[1:], 0.0).any()
    want = decode(FORMATS["mxfp4"], source, (8, 128), "F32")
    np.testing.assert_array_equal(decode(kind, target, (8, 128), "F32"), want)


def test_bytes_and_values_of_compressed_tensors():
    with safe_open(GOLDEN, framework="np") as file:
        cases = json.loads(file.metadata()["cases"])
        for case, (name, dtype, shape) in cases.items():
            kind = format_named(name)
            weight = file.get_tensor(f"{case}.source").view(VALUES[dtype])
            ours = encode(kind, weight, dtype)
            for index, (tile, part) in enumerate(zip(ours, kind.parts(tuple(shape), dtype), strict=True)):
                theirs = file.get_tensor(f"{case}.part{index}")
                assert theirs.shape == part.shape
                np.testing.assert_array_equal(tile.bits.reshape(part.shape), theirs, err_msg=case)
            values = decode(kind, ours, tuple(shape), dtype).view(NUMPY_BITS[dtype])
            np.testing.assert_array_equal(values, file.get_tensor(f"{case}.value"), err_msg=case)
