"""Integer formats, bit for bit what compressed-tensors makes of the scales that LLM Compressor calibrates."""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING

import numpy as np
import pytest

from formats.encoded import decode, encode
from requant.formats import NUMPY_BITS, format_named

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.parity

CASES = [
    ("int8-channel", [(130, 37), (3, 1), (256, 4096)]),
    ("int8-channel-packed", [(130, 37), (3, 1), (9, 512)]),
    ("int8-channel-asym", [(131, 37), (3, 1)]),
    ("int4-channel", [(130, 37), (3, 1), (9, 512)]),
    ("int4-channel-asym", [(131, 37), (3, 1)]),
    ("int4-g128", [(131, 384), (1, 128), (300, 1024)]),
    ("int4-g128-asym", [(131, 384), (1, 128), (300, 1024)]),
    ("int8-g128", [(131, 384), (1, 128), (300, 1024)]),
    ("int8-g128-asym", [(131, 384), (1, 128), (300, 1024)]),
    ("int4-g32", [(50, 96)]),
    ("int8-g32-asym", [(50, 96)]),
    ("int4-g12-asym", [(130, 36)]),
    ("int4-g1", [(40, 5)]),
]


@pytest.fixture(scope="module")
def integers() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("parity.integers")


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize(("name", "shapes"), CASES)
def test_same_parts_and_same_values(integers: ModuleType, name: str, shapes: list[tuple[int, int]], dtype: str) -> None:
    kind = format_named(name)
    for seed, shape in enumerate(shapes):
        weight = integers.weight(dtype, shape, kind.multiple if "-g" in name else -1, "asym" not in name, seed)
        theirs = integers.compress(weight, dtype, kind)
        ours = encode(kind, weight, dtype)
        assert len(ours) == len(theirs)
        for mine, part, other in zip(ours, kind.parts(shape, dtype), theirs, strict=True):
            assert part.shape == tuple(other.shape)
            np.testing.assert_array_equal(mine.bits.reshape(part.shape), integers.bits(other))
        values = integers.decompress(theirs, kind)
        assert values.dtype == integers.TORCH[dtype]
        np.testing.assert_array_equal(decode(kind, ours, shape, dtype).view(NUMPY_BITS[dtype]), integers.bits(values))
