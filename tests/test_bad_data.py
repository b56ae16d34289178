"""Bad data: a NaN or Inf stops a conversion and is named, and no scale made of small weights or zeros is one."""

from __future__ import annotations

import json
import math
import os
import shutil
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import requant
from parity.checkpoints import Source, write
from parity.sources import CONFIG_NAMES, DTYPES
from requant.dialects import OUTPUT_DIALECTS
from requant.schemes import SCHEMES, can_write
from stored_values import stored

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

MODULE, PARTNER = "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"
SHAPE, PLACE = (140, 256), (133, 77)

TARGETS = [
    (scheme.name, dialect.name)
    for dialect in OUTPUT_DIALECTS.values()
    for scheme in SCHEMES.values()
    if scheme.name != "BF16" and can_write(dialect, scheme)
]


@pytest.fixture(scope="module", autouse=True)
def unsynced() -> Iterator[None]:
    """Leave out what only guards against a crash of the machine: most of the time of so many small conversions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _descriptor: None)
        yield


def weights(dtype: str, amax: float = 0.1) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(4)
    return {f"{module}.weight": (rng.uniform(-amax, amax, SHAPE)).astype(DTYPES[dtype]) for module in (MODULE, PARTNER)}


def checkpoint(arrays: dict[str, NDArray[Any]], dtype: str, folder: Path) -> Path:
    return write(Source({"model.safetensors": arrays}, {"model_type": "llama", "dtype": CONFIG_NAMES[dtype]}), folder)


def assert_refused(src: Path, dst: Path, scheme: str, dialect: str = "compressed-tensors") -> requant.Problem:
    """Assert that the conversion fails over NaN or Inf and leaves nothing that passes for a checkpoint."""
    with pytest.raises(requant.CheckpointError) as error:
        requant.convert(src, dst, scheme, dialect=dialect)
    (problem,) = error.value.problems
    assert (problem.code, problem.module) == ("nan-or-inf", MODULE)
    assert not (dst / "config.json").exists()
    if dst.exists():
        assert requant.verify(dst).state != "complete"
    return problem


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("scheme", "dialect"), TARGETS)
def test_a_nan_or_inf_in_a_weight(scheme: str, dialect: str, dtype: str, bad: float, tmp_path: Path) -> None:
    arrays = weights(dtype)
    arrays[f"{MODULE}.weight"][PLACE] = bad
    problem = assert_refused(checkpoint(arrays, dtype, tmp_path / "src"), tmp_path / "dst", scheme, dialect)
    assert f"{list(PLACE)} of {list(SHAPE)} ({MODULE}.weight in model.safetensors)" in problem.message


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a checkpoint in each of some schemes, and modelopt's NVFP4."""
    root = tmp_path_factory.mktemp("bad")
    src = checkpoint(weights("BF16"), "BF16", root / "src")
    for scheme in ("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP4A16", "MXFP8A16", "NVFP4A16", "W8A8", "W4A16"):
        requant.convert(src, root / scheme, scheme)
    requant.convert(src, root / "modelopt", "NVFP4A16", dialect="modelopt")
    return {folder.name: folder for folder in root.iterdir()}


def spoiled(folder: Path, name: str, place: tuple[int, ...], bits: int, to: Path) -> Path:
    """Return a copy of a checkpoint with the bits of one element replaced."""
    shutil.copytree(folder, to)
    file = to / "model.safetensors"
    data = bytearray(file.read_bytes())
    data_start = 8 + int.from_bytes(data[:8], "little")
    tensor = json.loads(data[8:data_start])[name]
    first, last = (data_start + offset for offset in tensor["data_offsets"])
    size = (last - first) // math.prod(tensor["shape"])
    at = first + size * sum(index * math.prod(tensor["shape"][n + 1 :]) for n, index in enumerate(place))
    data[at : at + size] = bits.to_bytes(size, "little")
    file.write_bytes(data)
    return to


SPOILED = [
    ("MXFP4A16", "weight_scale", (133, 5), 0xFF),
    ("MXFP8A16", "weight_scale", (133, 5), 0xFF),
    ("NVFP4A16", "weight_scale", (133, 9), 0x7F),
    ("NVFP4A16", "weight_global_scale", (0,), 0x7F800000),
    ("NVFP4A16", "weight_global_scale", (0,), 0x7FC00000),
    ("modelopt", "weight_scale_2", (), 0x7F800000),
    ("FP8", "weight_scale", (0,), 0x7FC0),
    ("FP8_DYNAMIC", "weight_scale", (133, 0), 0x7F80),
    ("FP8_BLOCK", "weight_scale", (1, 1), 0xFF80),
    ("W8A8", "weight_scale", (133, 0), 0x7FC0),
    ("W4A16", "weight_scale", (133, 1), 0x7F80),
]


@pytest.mark.parametrize(("source", "part", "place", "bits"), SPOILED)
def test_a_nan_or_inf_among_scales(
    source: str, part: str, place: tuple[int, ...], bits: int, quantized: dict[str, Path], tmp_path: Path
) -> None:
    """Found before anything is written, whatever becomes of the weight."""
    name = f"{MODULE}.{part}"
    src = spoiled(quantized[source], name, place, bits, tmp_path / "src")
    assert [problem.module for problem in requant.verify(src).problems] == [name]
    for number, (scheme, dialect) in enumerate([*TARGETS, ("BF16", "compressed-tensors")]):
        converted = requant.convert(quantized[source], tmp_path / "dry", scheme, dialect=dialect, dry_run=True)
        if not converted.to_json()["bytes_read"]:
            continue  # it lies in this format already: its bits are copied
        problem = assert_refused(src, tmp_path / str(number), scheme, dialect)
        assert name in problem.message
        assert not (tmp_path / str(number)).exists()


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("source", ["FP8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8A16"])
def test_a_nan_among_codes(source: str, code: int, quantized: dict[str, Path], tmp_path: Path) -> None:
    src = spoiled(quantized[source], f"{MODULE}.weight", PLACE, code, tmp_path / "src")
    assert requant.verify(src).ok
    assert [problem.module for problem in requant.verify(src, "data").problems] == [f"{MODULE}.weight"]
    for number, (scheme, dialect) in enumerate([*TARGETS, ("BF16", "compressed-tensors")]):
        converted = requant.convert(quantized[source], tmp_path / "dry", scheme, dialect=dialect, dry_run=True)
        if converted.to_json()["bytes_read"]:
            problem = assert_refused(src, tmp_path / str(number), scheme, dialect)
            assert str(list(PLACE)) in problem.message


@pytest.mark.parametrize("divisor", [0.0, 1e-39])
def test_a_divisor_whose_reciprocal_is_inf(divisor: float, quantized: dict[str, Path], tmp_path: Path) -> None:
    bits = int(np.float32(divisor).view(np.uint32))
    src = spoiled(quantized["NVFP4A16"], f"{MODULE}.weight_global_scale", (0,), bits, tmp_path / "src")
    for number, (scheme, dialect) in enumerate([("NVFP4A16", "modelopt"), ("FP8_BLOCK", "compressed-tensors")]):
        assert_refused(src, tmp_path / str(number), scheme, dialect)


@pytest.mark.parametrize("multiplier", [0.0, 2.0**-140])
def test_a_multiplier_whose_reciprocal_is_inf(multiplier: float, quantized: dict[str, Path], tmp_path: Path) -> None:
    """ModelOpt's global scale of a weight of zeros is 0; a divisor cannot say that, codes of zero can."""
    bits = int(np.float32(multiplier).view(np.uint32))
    src = spoiled(quantized["modelopt"], f"{MODULE}.weight_scale_2", (), bits, tmp_path / "src")
    for scheme in ("NVFP4A16", "BF16", "FP8_DYNAMIC"):
        requant.convert(src, tmp_path / scheme, scheme)
        assert requant.verify(tmp_path / scheme, "data").ok
    assert not stored(tmp_path / "NVFP4A16")[MODULE].any()


@pytest.mark.parametrize("exact", ["auto", "off"])
def test_a_value_that_bf16_cannot_hold(exact: str, tmp_path: Path) -> None:
    """MXFP4 reaches 6 * 2^127; unquantized that would be Inf."""
    packed = np.zeros((140, 128), np.uint8)
    packed[133, 38] = 0x70  # 6 in the odd column
    scales = np.full((140, 8), 120, np.uint8)
    scales[133, 2] = 254
    arrays = {f"{MODULE}.weight_packed": packed, f"{MODULE}.weight_scale": scales}
    src = checkpoint(arrays, "BF16", tmp_path / "src")
    with pytest.raises(requant.CheckpointError) as error:
        requant.convert(src, tmp_path / "dst", "BF16", exact=exact)
    (problem,) = error.value.problems
    assert (problem.code, problem.module) == ("nan-or-inf", MODULE)
    assert str(list(PLACE)) in problem.message
    assert not (tmp_path / "dst" / "config.json").exists()


def test_an_fp8_weight_without_its_scale(tmp_path: Path) -> None:
    arrays = weights("BF16")
    arrays[f"{MODULE}.weight"] = np.ones(SHAPE, ml_dtypes.float8_e4m3fn)
    src = checkpoint(arrays, "BF16", tmp_path / "src")
    for scheme, dialect in TARGETS:
        with pytest.raises(requant.CheckpointError) as error:
            requant.convert(src, tmp_path / "dst", scheme, dialect=dialect)
        assert [(problem.code, problem.module) for problem in error.value.problems] == [("missing-part", MODULE)]
        assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize("amax", [1e-6, 1e-38, 0.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("scheme", "dialect"), TARGETS)
def test_zeros_in_a_tiny_tensor(scheme: str, dialect: str, dtype: str, amax: float, tmp_path: Path) -> None:
    arrays = weights(dtype, amax)
    for array in arrays.values():
        array[:128, :128] = 0
        array[135] = 0
    src = checkpoint(arrays, dtype, tmp_path / "src")
    requant.convert(src, tmp_path / "dst", scheme, dialect=dialect)
    result = requant.verify(tmp_path / "dst", "data")
    assert result.ok, result.problems
    for module, values in stored(tmp_path / "dst").items():
        assert np.isfinite(values).all()
        assert not values[:128, :128].any()
        assert not values[135].any()
        assert abs(values).max() <= 2 * abs(arrays[f"{module}.weight"].astype(np.float64)).max()
