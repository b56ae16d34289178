"""DeepSeek-V4-Pro at its full size is planned from its headers, within the figures of Kimi-K3."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from sources import v4_skeleton

if TYPE_CHECKING:
    from pathlib import Path

    from sources.v4_skeleton import Tensor


@pytest.fixture(scope="module")
def full_size(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Tensor]]:
    folder = tmp_path_factory.mktemp("deepseek") / "v4"
    return folder, v4_skeleton.write(folder)


def dry_run(folder: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "requant", "convert", str(folder), str(folder) + "-out", *options]
    done = subprocess.run([*command, "--dry-run", "--json"], capture_output=True, text=True, check=False)
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["ok"], found["problems"][:3]
    return found


def test_fp4_experts_become_nvfp4_exactly(full_size: tuple[Path, list[Tensor]]) -> None:
    folder, tensors = full_size
    found = dry_run(folder, "--scheme", "NVFP4", "--target", r"re:.*\.experts\.", "--exact", "required")
    experts = (v4_skeleton.LAYERS + v4_skeleton.MTP) * v4_skeleton.EXPERTS * 3
    values = experts * v4_skeleton.HIDDEN * v4_skeleton.INNER
    assert found["converted"] == {"NVFP4": experts} and found["routes"] == {"exact": experts}
    assert found["tensors_in"] == len(tensors)
    assert found["tensors_out"] == len(tensors) + 2 * experts  # global scales of weights and of activations
    rest = sum(tensor.nbytes for tensor in tensors if ".experts." not in tensor.name)
    assert found["bytes_in"] == rest + values // 2 + values // 32
    assert found["bytes_out"] == rest + values // 2 + values // 16 + 8 * experts
    assert found["peak_rss"] < 800e6


@pytest.mark.heavy
def test_all_of_it_becomes_fp8_blocks(full_size: tuple[Path, list[Tensor]]) -> None:
    folder, tensors = full_size
    found = dry_run(folder, "--scheme", "FP8_BLOCK", "--ignore", "re:.*compressor.*")
    quantized = [tensor for tensor in tensors if tensor.dtype in ("I8", "F8_E4M3")]
    assert found["converted"] == {"FP8_BLOCK": len(quantized)}
    rest = sum(tensor.nbytes for tensor in tensors if tensor.dtype not in ("I8", "F8_E4M3", "F8_E8M0"))
    written = 0
    for tensor in quantized:
        rows, columns = tensor.shape[0], tensor.shape[1] * (2 if tensor.dtype == "I8" else 1)
        blocks = math.ceil(rows / 128) * math.ceil(columns / 128)
        written += rows * columns + blocks * (2 if tensor.dtype == "I8" else 1)  # E8M0 stays where FP8 is
    assert found["bytes_out"] == rest + written
