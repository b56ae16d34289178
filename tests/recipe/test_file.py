"""Recipes as YAML files: the built-in ones, and those that people write."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest

import requant
from parity.checkpoints import read
from requant import demo
from requant.recipe.file import library, parse_recipe

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", library())
def test_every_recipe_parses_and_is_shown(name: str) -> None:
    recipe = parse_recipe(name, library()[name])
    assert recipe.name == name and any(rule.scheme for rule in recipe.rules)
    assert requant.api.recipes()[name] and requant.api.recipe_text(name) == library()[name]


def test_a_recipe_and_the_options_that_it_spells_out_make_the_same_bytes(small_k3: Path, tmp_path: Path) -> None:
    requant.convert(small_k3, tmp_path / "recipe", recipe="kimi-k3-fp8-block")
    requant.convert(small_k3, tmp_path / "options", "FP8_BLOCK", ignore=demo.IGNORE)
    assert read(tmp_path / "recipe") == read(tmp_path / "options")
    assert (tmp_path / "recipe" / "config.json").read_bytes() == (tmp_path / "options" / "config.json").read_bytes()


def test_scales_for_blackwell_are_powers_of_two(small_k3: Path, tmp_path: Path) -> None:
    requant.convert(small_k3, tmp_path / "out", recipe="kimi-k3-fp8-block-vllm")
    scales = [tensor for name, tensor in read(tmp_path / "out").items() if name.endswith("weight_scale")]
    assert len(scales) > 10
    for scale in scales:
        mantissas, _ = np.frexp(np.frombuffer(scale.data, ml_dtypes.bfloat16).astype(np.float64))
        assert scale.dtype == "BF16" and (mantissas == 0.5).all()


def test_ordered_rules_roles_and_reasons(small_k3: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "description: a test\n"
        "rules:\n"
        "  - keep: they are small\n"
        "    modules: ['re:.*o_proj$']\n"
        "  - scheme: FP8_DYNAMIC\n"
        "    roles: [attention]\n"
        "  - scheme: NVFP4\n"
        "    modules: ['re:.*experts.*w[123]$']\n"
        "    exact: required\n"
    )
    found = requant.convert(small_k3, tmp_path / "out", recipe=file).to_json()
    assert found["converted"].keys() == {"FP8_DYNAMIC", "NVFP4"}
    assert found["kept_reasons"]["they are small"] > 0
    after = read(tmp_path / "out")
    assert not any(name.endswith("o_proj.weight_scale") for name in after)
    assert any(name.endswith("q_proj.weight_scale") for name in after)


def test_weights_that_are_only_renamed_count_under_every_rule_of_their_scheme(small_k3: Path, tmp_path: Path) -> None:
    requant.convert(small_k3, tmp_path / "fp8", "FP8_BLOCK", ignore=demo.IGNORE, dialect="fp8")
    file = tmp_path / "mine.yaml"
    rules = (f"  - scheme: FP8_BLOCK\n    modules: ['re:.*experts.*{leaf}$']\n" for leaf in ("w1", "w2", "w3"))
    file.write_text("description: a test\nrules:\n" + "".join(rules))
    found = requant.convert(tmp_path / "fp8", tmp_path / "out", recipe=file).to_json()
    names = [name for name in read(tmp_path / "out") if name.endswith((".w1.weight", ".w2.weight", ".w3.weight"))]
    assert found["converted"] == {"FP8_BLOCK": len(names)}
    assert found["routes"] == {"exact": len(names)}


def test_options_go_before_what_a_recipe_says(small_k3: Path, tmp_path: Path) -> None:
    found = requant.convert(small_k3, tmp_path, recipe="kimi-k3-fp8-block", exact="off", dry_run=True).to_json()
    assert "exact" not in found["routes"]
    with pytest.raises(requant.CallError, match="dialect modelopt has no way"):
        requant.convert(small_k3, tmp_path, recipe="kimi-k3-fp8-attention", dialect="modelopt", dry_run=True)


def test_a_recipe_for_another_model_is_refused(small_k3: Path, tmp_path: Path) -> None:
    with pytest.raises(requant.CheckpointError, match="deepseek-v4-nvfp4-experts") as caught:
        requant.convert(small_k3, tmp_path / "out", recipe="deepseek-v4-nvfp4-experts")
    assert {problem.code for problem in caught.value.problems} == {"target-matches-nothing"}


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("rules:\n  - scheme: FP8\n    modules: [a]\n", 1, "description"),
        ("description: x\nrules:\n  - scheme: FP9\n    modules: [a]\n", 3, "FP9"),
        ("description: x\nrules:\n  - scheme: FP8\n    modules: ['re:(']\n", 3, "re:("),
        ("description: x\nrules:\n  - scheme: FP8\n    keep: y\n    modules: [a]\n", 3, "either"),
        ("description: x\nrules:\n  - scheme: FP8\n", 3, "modules or roles"),
        ("description: x\nrules:\n  - scheme: FP8\n    modules: [a]\n    exakt: off\n", 5, "exakt"),
        ("description: x\nrules: []\n", 2, "at least 1"),
        ("description: x\nscale: best\nrules:\n  - scheme: FP8\n    modules: [a]\n", 2, "mse"),
        ("description: x\ndescription: y\n", 2, "twice"),
        ("description: x\nrules:\n  - scheme: MXFP4\n    modules: [a]\ndialect: fp8\n", 3, "fp8"),
        ("description: x\ninput_scale: nope\nrules:\n  - scheme: FP8\n    modules: [a]\n", 2, "nope"),
        ("description: [\n", 2, ""),
        ("- a\n", 1, "mapping"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, text: str, line: int, word: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(requant.CallError) as caught:
        requant.convert(tmp_path, tmp_path / "out", recipe=file)
    assert any(f"bad.yaml, line {line}:" in str(problem) for problem in caught.value.problems), caught.value.problems
    assert any(word in str(problem) for problem in caught.value.problems)


def test_everything_wrong_is_listed_at_once(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("description: x\nrules:\n  - scheme: A\n    modules: [a]\n  - scheme: B\n    modules: [b]\n")
    with pytest.raises(requant.CallError) as caught:
        requant.convert(tmp_path, tmp_path / "out", recipe=file)
    assert len(caught.value.problems) == 2


def test_scheme_and_recipe_exclude_each_other(small_k3: Path, tmp_path: Path) -> None:
    with pytest.raises(requant.CallError):
        requant.convert(small_k3, tmp_path / "out", "FP8_BLOCK", recipe="fp8-dynamic")
    with pytest.raises(requant.CallError):
        requant.convert(small_k3, tmp_path / "out")
    with pytest.raises(requant.CallError, match="rules of its own"):
        requant.convert(small_k3, tmp_path / "out", recipe="fp8-dynamic", ignore=["lm_head"])
    with pytest.raises(requant.CallError, match="unknown recipe"):
        requant.convert(small_k3, tmp_path / "out", recipe="nope")
