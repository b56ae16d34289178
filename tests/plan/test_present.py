"""``requant config``: what the tensors on disk call for, whatever config.json says."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

import requant
from requant import demo

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("options", "damage"),
    [
        ({"scheme": "FP8_BLOCK", "ignore": demo.IGNORE}, "gone"),
        ({"scheme": "FP8_BLOCK", "ignore": demo.IGNORE}, "wrong"),
        ({"recipe": "kimi-k3-nvfp4-w4a4"}, "gone"),
        ({"scheme": "NVFP4", "target": [r"re:.*\.experts\."], "dialect": "modelopt"}, "gone"),
        ({"scheme": "FP8_BLOCK", "ignore": demo.IGNORE, "dialect": "fp8"}, "wrong"),
    ],
)
def test_a_lost_or_wrong_config_is_mended(small_k3: Path, tmp_path: Path, options: dict[str, str], damage: str) -> None:
    folder = tmp_path / "out"
    requant.convert(small_k3, folder, **options)
    right = (folder / "config.json").read_bytes()
    assert requant.config(folder).files == {}
    broken = json.loads(right)
    for scope in (broken, *(part for part in broken.values() if isinstance(part, dict))):
        if "quantization_config" in scope:
            if damage == "gone":
                del scope["quantization_config"]
            else:
                scope["quantization_config"] = {"quant_method": "compressed-tensors", "config_groups": {}}
    (folder / "config.json").write_text(json.dumps(broken, indent=2))
    found = requant.config(folder)
    assert found.quantization_config == json.loads(right)["quantization_config"]
    assert json.loads((folder / "config.json").read_text()) == broken  # only shown so far
    requant.config(folder, write=True)
    mended = json.loads((folder / "config.json").read_text())
    assert mended["quantization_config"] == json.loads(right)["quantization_config"]
    assert json.loads((folder / "config.json.before-requant").read_text()) == broken
    assert requant.config(folder).files == {}
    assert requant.verify(folder).ok and not (folder / ".requant").exists()


def test_what_is_not_quantized_needs_no_config(small_k3: Path, tmp_path: Path) -> None:
    requant.convert(small_k3, tmp_path / "out", "BF16")
    assert requant.config(tmp_path / "out").quantization_config is None
