"""MXFP4 and MXFP8 against LLM Compressor: the bytes it writes, and the values compressed-tensors reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from parity import sources
from parity.checkpoints import read, write
from requant.formats import FORMATS, NUMPY_BITS, Encoding, Tile

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

pytestmark = pytest.mark.parity

SHAPES = {"square": (384, 384), "tall": (300, 160), "wide": (5, 4000), "one": (1, 32)}
SCHEMES = {"mxfp4": "MXFP4A16", "mxfp8": "MXFP8A16"}
# Near the dtype's largest value LLM Compressor writes zeros; requant refuses.
KINDS = [kind for kind in sources.KINDS if kind is not sources.huge]


def encoded(name: str, weight: Any, dtype: str, *, reference: bool = True) -> list[Any]:
    parts = FORMATS[name].parts(weight.shape, dtype)
    tiles = [Tile(np.empty(part.shape, NUMPY_BITS[part.dtype]), part.dtype) for part in parts]
    assert FORMATS[name].encode(Tile(weight.view(NUMPY_BITS[dtype]), dtype), tiles, Encoding(reference)) == -1
    return [tile.bits for tile in tiles]


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", sources.DTYPES)
def test_encode(oracle: ModuleType, dtype: str, name: str, tmp_path: Path) -> None:
    source = sources.dense(dtype, SHAPES, KINDS)
    rng = np.random.default_rng(1)
    weights = source.shards["model.safetensors"]
    weights["model.layers.9.mlp.groups.weight"] = sources.mosaic(rng, (90, 320), sources.DTYPES[dtype], (1, 32), KINDS)
    theirs = oracle.quantize(write(source, tmp_path / "src"), tmp_path / "theirs", SCHEMES[name], source.ignore)
    stored = read(theirs)
    compared = 0
    for tensor, weight in weights.items():
        module = tensor.removesuffix(".weight")
        if f"{module}.weight_scale" not in stored:
            continue
        for part, ours in zip(
            ("weight_packed" if name == "mxfp4" else "weight", "weight_scale"),
            encoded(name, weight, dtype),
            strict=True,
        ):
            assert ours.tobytes() == bytes(stored[f"{module}.{part}"].data), (module, part)
        compared += 1
    assert compared == 2 * len(SHAPES) + 1


@pytest.mark.parametrize("dtype", sources.DTYPES)
def test_decode_of_every_mxfp8_code_and_exponent(oracle: ModuleType, dtype: str) -> None:
    """Through BF16, as compressed-tensors' dequantizer goes; F32 is exact, and equal once rounded."""
    torch = oracle.torch
    codes = np.tile(np.arange(256, dtype=np.uint8), (255, 1))
    exponents = np.tile(np.arange(255, dtype=np.uint8)[:, None], (1, 8))
    weights = {**sources.K3_MXFP4["config_groups"]["group_0"]["weights"], "num_bits": 8}
    config = {
        "quant_method": "compressed-tensors",
        "format": "mxfp8-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    stored = {"weight": torch.from_numpy(codes).view(torch.float8_e4m3fn), "weight_scale": torch.from_numpy(exponents)}
    theirs = oracle.decompress(stored, config).to(getattr(torch, sources.CONFIG_NAMES[dtype])).float().numpy()
    ours = np.empty(codes.shape, NUMPY_BITS[dtype])
    FORMATS["mxfp8"].decode((Tile(codes, "F8_E4M3"), Tile(exponents, "U8")), Tile(ours, dtype))
    values = ours.view(sources.DTYPES[dtype])
    if dtype == "F32":
        values = values.astype(sources.DTYPES["BF16"])
    np.testing.assert_array_equal(values.astype(np.float32), theirs)
    numbers = ~np.isnan(theirs)
    np.testing.assert_array_equal(np.signbit(values)[numbers], np.signbit(theirs)[numbers])
