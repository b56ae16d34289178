"""Every preset of LLM Compressor that needs no calibration, run side by side on the same weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import requant
from parity import sources
from parity.checkpoints import assert_same_meaning, differences, read, write

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import ModuleType

pytestmark = pytest.mark.parity

# Near the dtype's largest value LLM Compressor writes zeros (MX), or scales of Inf (a range that overflows).
MX_KINDS = [kind for kind in sources.KINDS if kind is not sources.huge]
ASYMMETRIC_KINDS = [kind for kind in sources.INTEGER_KINDS if kind is not sources.huge]

ANY_WIDTH = {"square": (384, 384), "ragged": (300, 200), "tall": (4000, 136), "wide": (5, 4000), "tiny": (2, 3)}
GROUPS_OF_16 = {"square": (256, 256), "tall": (300, 144), "wide": (5, 4000), "tiny": (9, 16)}
GROUPS_OF_32 = {"square": (384, 384), "tall": (300, 160), "wide": (5, 4000), "tiny": (2, 32)}
GROUPS_OF_128 = {"square": (256, 256), "tall": (301, 128), "wide": (5, 3968)}

PRESETS: dict[str, tuple[dict[str, tuple[int, int]], Sequence[sources.Kind]]] = {
    "FP8_DYNAMIC": (ANY_WIDTH, sources.KINDS),
    "FP8_BLOCK": (ANY_WIDTH, sources.KINDS),
    "NVFP4A16": (GROUPS_OF_16, sources.KINDS),
    "MXFP4": (GROUPS_OF_32, MX_KINDS),
    "MXFP4A16": (GROUPS_OF_32, MX_KINDS),
    "MXFP8": (GROUPS_OF_32, MX_KINDS),
    "MXFP8A16": (GROUPS_OF_32, MX_KINDS),
    "W8A8": (ANY_WIDTH, sources.INTEGER_KINDS),
    "INT8": (ANY_WIDTH, sources.INTEGER_KINDS),
    "W8A16": (GROUPS_OF_128, sources.INTEGER_KINDS),
    "W4A16": (GROUPS_OF_128, sources.INTEGER_KINDS),
    "W4A16_ASYM": (GROUPS_OF_128, ASYMMETRIC_KINDS),
}

PACKED = {"W4A8": "int", "W4AFP8": "float"}
"""W4A16's weights, with activations of this type. LLM Compressor writes a byte per code and calls it int-quantized."""

CALIBRATED = {"FP8": (ANY_WIDTH, sources.KINDS), "NVFP4": (GROUPS_OF_16, sources.KINDS)}
"""Presets that store a scale of the activations, which LLM Compressor finds by running the model only."""


@pytest.mark.parametrize("scheme", PRESETS)
@pytest.mark.parametrize("dtype", sources.DTYPES)
def test_the_same_bytes_config_and_values(oracle: ModuleType, dtype: str, scheme: str, tmp_path: Path) -> None:
    source = sources.dense(dtype, *PRESETS[scheme])
    src = write(source, tmp_path / "src")
    theirs = oracle.quantize(src, tmp_path / "theirs", scheme, source.ignore)
    requant.convert(src, tmp_path / "ours", scheme=scheme, ignore=source.ignore)
    assert differences(read(tmp_path / "ours"), read(theirs)) == []
    assert_same_meaning(oracle, tmp_path / "ours", theirs)


@pytest.mark.parametrize("scheme", CALIBRATED)
@pytest.mark.parametrize("dtype", sources.DTYPES)
def test_the_same_weights_beside_scales_of_activations(
    oracle: ModuleType, dtype: str, scheme: str, tmp_path: Path
) -> None:
    source = sources.dense(dtype, *CALIBRATED[scheme])
    src = write(source, tmp_path / "src")
    theirs = read(oracle.quantize(src, tmp_path / "theirs", oracle.weight_only(scheme), source.ignore))
    requant.convert(src, tmp_path / "ours", scheme=scheme, ignore=source.ignore)
    ours = read(tmp_path / "ours")
    weights = {
        name: tensor for name, tensor in ours.items() if not name.endswith(("input_scale", "input_global_scale"))
    }
    assert differences(weights, theirs) == []
    assert len(ours) - len(weights) == sum(name.endswith("weight_scale") for name in theirs)


@pytest.mark.parametrize("scheme", PACKED)
@pytest.mark.parametrize("dtype", sources.DTYPES)
def test_four_bits_are_packed_whatever_the_activations(
    oracle: ModuleType, dtype: str, scheme: str, tmp_path: Path
) -> None:
    """The same scales and codes as LLM Compressor's, in the layout of W4A16 (vLLM's W4A8 kernels read no other)."""
    source = sources.dense(dtype, GROUPS_OF_128, sources.INTEGER_KINDS)
    src = write(source, tmp_path / "src")
    bytewise = oracle.quantize(src, tmp_path / "bytewise", scheme, source.ignore)
    packed = oracle.quantize(src, tmp_path / "packed", "W4A16", source.ignore)
    requant.convert(src, tmp_path / "ours", scheme=scheme, ignore=source.ignore)
    ours, theirs = read(tmp_path / "ours"), read(bytewise)
    assert differences(ours, read(packed)) == []
    config = json.loads((tmp_path / "ours" / "config.json").read_text())["quantization_config"]
    their_config = json.loads((bytewise / "config.json").read_text())["quantization_config"]
    assert (config["format"], their_config["format"]) == ("pack-quantized", "int-quantized")
    for name in theirs:
        if name.endswith(".weight_scale"):
            module = name.removesuffix(".weight_scale")
            values = oracle.decode(ours, module, config), oracle.decode(theirs, module, their_config)
            assert oracle.torch.equal(*values), module
    (group,) = oracle.quantization_config(tmp_path / "ours").config_groups.values()
    (their_group,) = oracle.quantization_config(bytewise).config_groups.values()
    assert group.input_activations.type == PACKED[scheme]
    assert group.input_activations == their_group.input_activations


@pytest.mark.parametrize("scheme", [*PRESETS, *CALIBRATED])
@pytest.mark.parametrize("dtype", sources.DTYPES)
def test_the_same_values_are_read(oracle: ModuleType, dtype: str, scheme: str, tmp_path: Path) -> None:
    """requant makes of every quantized weight the BF16 that compressed-tensors does, through the model's dtype."""
    shapes, kinds = {**PRESETS, **CALIBRATED}[scheme]
    # Where a scale was rounded up, the largest codes decode to Inf, which requant refuses to write.
    smaller = [kind for kind in kinds if kind not in (sources.huge, sources.huge_one_sided)]
    source = sources.dense(dtype, shapes, smaller)
    requant.convert(write(source, tmp_path / "src"), tmp_path / "ours", scheme, ignore=source.ignore)
    requant.convert(tmp_path / "ours", tmp_path / "bf16", "BF16", exact="off")
    stored, decoded = read(tmp_path / "ours"), read(tmp_path / "bf16")
    config: dict[str, Any] = json.loads((tmp_path / "ours" / "config.json").read_text())["quantization_config"]
    modules = [name.removesuffix(".weight_scale") for name in stored if name.endswith(".weight_scale")]
    assert len(modules) == 2 * len(shapes)
    for module in modules:
        values = oracle.decode(stored, module, config).to(getattr(oracle.torch, sources.CONFIG_NAMES[dtype]))
        theirs = values.bfloat16().contiguous().view(oracle.torch.uint8).numpy().tobytes()
        assert decoded[f"{module}.weight"].data == theirs, module
