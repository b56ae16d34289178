"""Weights told from their parts: what is data (a shape), what is missing, what lies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import requant
from parity.checkpoints import Source, write

if TYPE_CHECKING:
    from pathlib import Path

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def checkpoint(folder: Path, tensors: dict[str, Any]) -> Path:
    return write(Source({"model.safetensors": tensors}, {"model_type": "llama"}), folder)


def packed(module: str, words: int, groups: int, shape: tuple[int, int]) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        f"{module}.weight_packed": rng.integers(-(2**31), 2**31 - 1, (8, words), dtype=np.int32),
        f"{module}.weight_scale": np.full((8, groups), 0.01, BF16),
        f"{module}.weight_shape": np.array(shape, np.int64),
    }


@pytest.mark.parametrize("turned", [False, True])
def test_every_packed_weight_has_the_shape_that_lies_beside_it(tmp_path: Path, turned: bool) -> None:
    """The arrays are of one shape: INT4 of 256 columns, INT8 of 128; and 32 columns, of which 29 are used."""
    parts = [packed("a.0.up_proj", 32, 2, (8, 256)), packed("a.1.up_proj", 32, 2, (8, 128))]
    parts += [packed("a.2.up_proj", 4, 1, (8, 32)), packed("a.3.up_proj", 4, 1, (8, 29))]
    tensors: dict[str, Any] = {}
    for part in reversed(parts) if turned else parts:
        tensors |= part
    requant.convert(checkpoint(tmp_path / "src", tensors), tmp_path / "dst", "BF16")
    found = load_file(tmp_path / "dst" / "model.safetensors")
    assert [found[f"a.{n}.up_proj.weight"].shape for n in range(4)] == [(8, 256), (8, 128), (8, 32), (8, 29)]


@pytest.mark.parametrize("shape", [(9, 256), (0, 256), (8, -256), (8, 0), (8, 2**62), (8, 255)])
def test_a_shape_that_lies_is_no_known_format(tmp_path: Path, shape: tuple[int, int]) -> None:
    src = checkpoint(tmp_path / "src", packed("a.0.up_proj", 32, 2, shape))
    with pytest.raises(requant.CheckpointError, match="unknown-format"):
        requant.convert(src, tmp_path / "dst", "BF16")


@pytest.mark.parametrize(
    ("tensors", "missing"),
    [
        ({"weight_packed": np.zeros((8, 32), np.int32)}, "weight_scale"),
        ({"weight": np.zeros((8, 32), E4M3)}, "weight_scale"),
        ({"weight_packed": np.zeros((8, 32), np.int32), "weight_scale": np.ones((8, 2), BF16)}, "weight_shape"),
        ({"weight_packed": np.zeros((8, 16), np.uint8), "weight_scale": np.ones((8, 2), E4M3)}, "weight_global_scale"),
    ],
)
def test_a_missing_part_is_named(tmp_path: Path, tensors: dict[str, Any], missing: str) -> None:
    src = checkpoint(tmp_path / "src", {f"a.0.up_proj.{suffix}": array for suffix, array in tensors.items()})
    (problem,) = requant.verify(src).problems
    assert (problem.code, problem.module) == ("missing-part", "a.0.up_proj")
    assert problem.remedy == f"restore a.0.up_proj.{missing}"
