"""A published script for LLM Compressor, its two import lines changed and nothing else."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import requant
from card import SCRIPT
from parity.checkpoints import read

if TYPE_CHECKING:
    from pathlib import Path


def test_the_script_runs_and_loses_nothing_that_can_be_kept(small_k3: Path, tmp_path: Path) -> None:
    (tmp_path / "moonshotai").mkdir()
    (tmp_path / "moonshotai" / "Kimi-K3").symlink_to(small_k3)
    done = subprocess.run(
        [sys.executable, "-W", "ignore::SyntaxWarning", "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    output = tmp_path / "Kimi-K3-FP8-BLOCK"
    assert requant.verify(output, "data").ok
    assert sum(name.endswith("weight_scale") for name in read(output)) == 119
    assert requant.compare(small_k3, output).classes["expert"].differing == 0


def test_a_script_hears_what_was_not_needed(small_k3: Path, tmp_path: Path) -> None:
    from requant.compat import CompressedTensorsDequantizer, model_free_ptq

    converter = CompressedTensorsDequantizer(str(small_k3), ignore=())
    result = model_free_ptq(small_k3, tmp_path / "dst", "FP8_DYNAMIC", device="cuda:0", converter=converter)
    assert [note for note in result.to_json()["notes"] if "was not used" in note] == [
        "device is not needed here and was not used",
        "converter is not needed here and was not used",
    ]
