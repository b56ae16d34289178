"""verify: what it finds, and the state that it names."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import requant
from parity.checkpoints import Source, write

if TYPE_CHECKING:
    from pathlib import Path

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


@pytest.fixture
def tensors() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "m.a.weight": rng.standard_normal((8, 64)).astype(E4M3),
        "m.a.weight_scale": np.full((8, 1), 0.25, BF16),
        "m.b.weight_packed": rng.integers(0, 256, (8, 32), np.uint8),
        "m.b.weight_scale": np.full((8, 2), 120, np.uint8),
        "m.norm.weight": np.ones(64, BF16),
    }


CONFIG = {"model_type": "toy"}


def found(folder: Path, level: str) -> list[tuple[str, str]]:
    return [(problem.code, problem.module) for problem in requant.verify(folder, level).problems]


def test_a_whole_checkpoint_is_whole_at_every_level(tensors: dict[str, Any], tmp_path: Path) -> None:
    src = write(Source({"model.safetensors": tensors}, CONFIG), tmp_path / "src")
    for level in ("headers", "scales", "data"):
        result = requant.verify(src, level)
        assert result.ok
        assert result.state == "complete"
        assert any("declares no quantization" in note for note in result.notes)
    assert not requant.verify(src, strict=True).ok


@pytest.mark.parametrize(
    ("name", "index", "bits", "level"),
    [
        ("m.a.weight_scale", (3, 0), 0x7FC0, "scales"),
        ("m.a.weight_scale", (3, 0), 0xFF80, "scales"),
        ("m.b.weight_scale", (7, 1), 0xFF, "scales"),
        ("m.a.weight", (2, 5), 0x7F, "data"),
        ("m.a.weight", (2, 5), 0xFF, "data"),
        ("m.norm.weight", (9,), 0x7F80, "data"),
    ],
)
def test_a_nan_or_inf_is_found_where_it_is_looked_for(
    tensors: dict[str, Any], tmp_path: Path, name: str, index: tuple[int, ...], bits: int, level: str
) -> None:
    array = tensors[name]
    array.view(f"u{array.itemsize}")[index] = bits
    src = write(Source({"model.safetensors": tensors}, CONFIG), tmp_path / "src")
    assert found(src, "headers") == []
    assert found(src, level) == [("nan-or-inf", name)]
    assert found(src, "data") == [("nan-or-inf", name)]


@pytest.mark.parametrize(
    ("gone", "problem"),
    [
        ("m.a.weight_scale", ("missing-part", "m.a")),
        ("m.a.weight", ("orphan-part", "m.a")),
        ("m.b.weight_packed", ("orphan-part", "m.b")),
    ],
)
def test_a_lost_tensor_is_missed(tensors: dict[str, Any], tmp_path: Path, gone: str, problem: tuple[str, str]) -> None:
    del tensors[gone]
    src = write(Source({"model.safetensors": tensors}, CONFIG), tmp_path / "src")
    assert found(src, "headers") == [problem]


def test_a_truncated_shard_and_a_lying_index_are_problems(tensors: dict[str, Any], tmp_path: Path) -> None:
    shards = {"a.safetensors": tensors, "b.safetensors": {"x": np.ones(4, BF16)}}
    src = write(Source(shards, CONFIG), tmp_path / "src")
    index = json.loads((src / "model.safetensors.index.json").read_text())
    index["weight_map"]["x"] = "a.safetensors"
    (src / "model.safetensors.index.json").write_text(json.dumps(index))
    assert {code for code, _ in found(src, "headers")} == {"index-mismatch"}
    (src / "a.safetensors").write_bytes((src / "a.safetensors").read_bytes()[:-1])
    assert {code for code, _ in found(src, "headers")} == {"header-invalid"}


def test_a_folder_without_config_is_foreign(tensors: dict[str, Any], tmp_path: Path) -> None:
    src = write(Source({"model.safetensors": tensors}, CONFIG), tmp_path / "src")
    (src / "config.json").unlink()
    result = requant.verify(src)
    assert (result.state, result.ok) == ("foreign", False)
    (tmp_path / "empty").mkdir()
    assert requant.verify(tmp_path / "empty").state == "foreign"


@pytest.mark.parametrize("value", [0.0, -0.0, -256.0, 1e-40])
@pytest.mark.parametrize("part", ["weight_global_scale", "input_global_scale"])
def test_a_global_scale_that_cannot_divide_is_found(tmp_path: Path, part: str, value: float) -> None:
    nvfp4 = {
        "m.a.weight_packed": np.full((16, 16), 0x22, np.uint8),
        "m.a.weight_scale": np.ones((16, 2), E4M3),
        "m.a.weight_global_scale": np.ones(1, np.float32),
        "m.a.input_global_scale": np.ones(1, np.float32),
    }
    src = write(Source({"model.safetensors": nvfp4}, CONFIG), tmp_path / "good")
    assert found(src, "scales") == []
    spoiled = nvfp4 | {f"m.a.{part}": np.array([value], np.float32)}
    assert found(write(Source({"model.safetensors": spoiled}, CONFIG), tmp_path / "bad"), "scales") == [
        ("nan-or-inf", f"m.a.{part}")
    ]
