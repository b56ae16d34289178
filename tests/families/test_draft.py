"""`requant family init`: the draft of a family's YAML."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import yaml

import requant
from parity.checkpoints import Source, write

if TYPE_CHECKING:
    from pathlib import Path


def weight(*shape: int) -> Any:
    return np.ones(shape, ml_dtypes.bfloat16)


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A model of two kinds of layers, with leaves that only its engine could say more about."""
    tensors = {"embed_tokens.weight": weight(8, 64), "lm_head.weight": weight(8, 64)}
    for layer in range(2):
        root = f"backbone.layers.{layer}."
        tensors |= {f"{root}mixer.{leaf}_proj.weight": weight(16, 64) for leaf in ("q", "k", "v", "z")}
        tensors |= {f"{root}mixer.o_proj.weight": weight(64, 16), f"{root}norm.weight": weight(64)}
        tensors |= {f"{root}mlp.experts.{e}.{leaf}.weight": weight(16, 64) for e in range(3) for leaf in ("w1", "w3")}
        tensors[f"{root}mlp.gate.weight"] = weight(3, 64)
    tensors |= {f"backbone.layers.2.mixer.{leaf}.weight": weight(16, 64) for leaf in ("on", "in")}
    return write(Source({"model.safetensors": tensors}, {"model_type": "toy", "num_experts": 3}), tmp_path / "toy")


def test_the_draft_has_what_is_known_and_lists_what_might_be(toy: Path) -> None:
    draft = requant.family_init(toy)
    assert draft.model_types == ("toy",)
    assert draft.fused == {
        ("q_proj", "k_proj", "v_proj"): ["backbone.layers.*.mixer"],
        ("w1", "w3"): ["backbone.layers.*.mlp.experts.*"],
    }
    assert {frozenset(names): parents for names, parents in draft.candidates.items()} == {
        frozenset({"q_proj", "k_proj", "v_proj", "z_proj"}): ["backbone.layers.*.mixer"],
        frozenset({"on", "in"}): ["backbone.layers.*.mixer"],
    }


def test_the_draft_is_yaml_with_its_candidates_in_comments(toy: Path) -> None:
    text = requant.family_init(toy).to_yaml()
    assert yaml.safe_load(text) == {"model_types": ["toy"], "fused": [["q_proj", "k_proj", "v_proj"], ["w1", "w3"]]}
    uncommented = text.replace("#  - ", "  - ")
    assert ["in", "on"] in map(sorted, yaml.safe_load(uncommented)["fused"])  # names that YAML has other ideas about


def test_the_command_line_drafts_a_file_that_convert_takes(toy: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "requant", "family", "init", str(toy)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert text == requant.family_init(toy).to_yaml()
    document = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
    assert document["yaml"] == text
    assert document["fused"][0] == {"members": ["q_proj", "k_proj", "v_proj"], "parents": ["backbone.layers.*.mixer"]}
    draft = tmp_path / "toy.yaml"
    draft.write_text(text)
    with pytest.raises(requant.CheckpointError):
        requant.convert(toy, tmp_path / "out", "NVFP4A16", dry_run=True)
    requant.convert(toy, tmp_path / "out", "NVFP4A16", family=str(draft))
    assert requant.verify(tmp_path / "out", "data").ok


def test_a_known_family_drafts_as_itself(small_k3: Path) -> None:
    draft = requant.family_init(small_k3)
    assert draft.model_types == ("kimi_k3",)
    assert ("q_a_proj", "kv_a_proj_with_mqa", "g_proj") in draft.fused


def test_a_checkpoint_in_which_nothing_meets(tmp_path: Path) -> None:
    source = Source({"model.safetensors": {"layers.0.dense.weight": weight(16, 16)}}, {"model_type": "plain"})
    draft = requant.family_init(write(source, tmp_path / "src"))
    assert yaml.safe_load(draft.to_yaml()) == {"model_types": ["plain"], "fused": []}
