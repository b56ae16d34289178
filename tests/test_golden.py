"""requant against LLM Compressor's own output, as ``golden/make.py`` recorded it; needs no torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open

import requant
from parity.checkpoints import differences, read
from requant.schemes import SCHEMES

GOLDEN = Path(__file__).parent / "golden"
CASES = [(dtype, scheme) for dtype in ("bf16", "f16", "f32") for scheme in ("FP8_DYNAMIC", "FP8_BLOCK")]
CASES += [("kimi-k3", "FP8_BLOCK")]
SAME_WEIGHTS = {
    "NVFP4": "NVFP4A16",
    "MXFP4": "MXFP4A16",
    "MXFP8": "MXFP8A16",
    "INT8": "W8A8",
    "W4A8": "W4A16",
    "W4AFP8": "W4A16",
}
"""Preset → the one that stores the same weights, and was recorded."""
FUSED = [name for name in SCHEMES if name not in ("BF16", "FP8_DYNAMIC", "FP8_BLOCK")]


def unpack(name: str, folder: Path) -> list[str]:
    """Turn a golden source into a checkpoint folder; return its ignore list."""
    folder.mkdir()
    shutil.copyfile(GOLDEN / f"{name}.safetensors", folder / "model.safetensors")
    with safe_open(folder / "model.safetensors", framework="np") as file:
        golden = json.loads(file.metadata()["golden"])
    (folder / "config.json").write_text(json.dumps(golden["config"]))
    ignore: list[str] = golden["ignore"]
    return ignore


@pytest.mark.parametrize(("name", "scheme"), CASES)
def test_output_equals_the_golden_byte_for_byte(name: str, scheme: str, tmp_path: Path) -> None:
    ignore = unpack(name, tmp_path / "src")
    requant.convert(tmp_path / "src", tmp_path / "dst", scheme=scheme, ignore=ignore, exact="off", workers=2)
    assert differences(read(tmp_path / "dst"), read(GOLDEN / f"{name}-{scheme}.safetensors")) == []


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("scheme", FUSED)
def test_every_preset_stores_the_golden_weights(scheme: str, dtype: str, tmp_path: Path) -> None:
    ignore = unpack(f"fused-{dtype}", tmp_path / "src")
    requant.convert(tmp_path / "src", tmp_path / "dst", scheme=scheme, ignore=ignore, workers=2)
    golden = read(GOLDEN / f"fused-{dtype}-{SAME_WEIGHTS.get(scheme, scheme)}.safetensors")
    ours = read(tmp_path / "dst")
    assert differences({name: tensor for name, tensor in ours.items() if name in golden}, golden) == []
    added = sorted(name.rpartition(".")[2] for name in ours.keys() - golden.keys())
    assert added == {"NVFP4": ["input_global_scale"] * 2, "FP8": ["input_scale"] * 2}.get(scheme, [])
