"""The matching order of vLLM, case by case."""

from __future__ import annotations

import pytest

from requant.engines.resolver import Resolver
from requant.errors import CheckpointError

EXPERT = "model.layers.3.mlp.experts.0.gate_proj"


def config(*groups: list[str], ignore: list[str] | None = None) -> dict[str, object]:
    named = {f"group_{number}": {"targets": targets} for number, targets in enumerate(groups)}
    return {"config_groups": named, "ignore": ignore}


@pytest.mark.parametrize(
    ("groups", "ignore", "module", "group"),
    [
        pytest.param([["Linear"]], [], "a.q_proj", "group_0", id="class name"),
        pytest.param([["Linear"]], ["a.q_proj"], "a.q_proj", None, id="ignore comes first"),
        pytest.param([["a.q_proj"]], ["re:a"], "a.q_proj", None, id="ignore beats an exact target"),
        pytest.param([["Linear"]], ["Linear"], "a.q_proj", "group_0", id="ignore knows no class names"),
        pytest.param([["Linear"]], ["q_proj"], "a.q_proj", "group_0", id="a literal is the whole name"),
        pytest.param([["Linear"]], ["re:q_proj"], "a.q_proj", "group_0", id="a regex matches from the start"),
        pytest.param([["Linear"]], ["re:a.q"], "a.q_proj.x", None, id="a regex need not reach the end"),
        pytest.param([["Linear"]], ["re:.*b_proj$"], "a.kv_b_proj", None, id="loose regex hits more"),
        pytest.param([["re:.*proj"], ["a.q_proj"]], [], "a.q_proj", "group_0", id="first group in order"),
        pytest.param([["a.q_proj"], ["re:.*proj"]], [], "a.q_proj", "group_0", id="first group in order, too"),
        pytest.param([["x", "y"], ["y"]], [], "y", "group_1", id="same target twice: the last group"),
        pytest.param([["x", "re:y"], ["y", "x"]], [], "x", "group_1", id="same target twice, other order"),
        pytest.param([["Linear"], ["re:.*q_proj$"]], [], "a.q_proj", "group_1", id="names before classes"),
        pytest.param([["linear"]], [], "a", "group_0", id="class names in any case"),
        pytest.param([["near"]], [], "a", "group_0", id="class names by substring"),
        pytest.param([["QKVParallelLinear"]], [], "a", None, id="not every Linear is of that class"),
        pytest.param([["re:.*k_proj"]], [], "a.q_proj", None, id="nothing matches"),
        pytest.param([["Linear"]], [], EXPERT, "group_0", id="Linear stands for experts"),
        pytest.param([["RoutedExperts"], ["Linear"]], [], EXPERT, "group_0", id="experts have a class"),
        pytest.param([["Linear"], ["RoutedExperts"]], [], EXPERT, "group_1", id="which beats Linear"),
        pytest.param([["RoutedExperts"]], [], "model.layers.3.mlp.down_proj", None, id="a class of theirs"),
        pytest.param([[r"re:.*experts\.\d+\.w[123]$"]], [], EXPERT, None, id="vLLM does not say w1"),
    ],
)
def test_matching_order(groups: list[list[str]], ignore: list[str], module: str, group: str | None) -> None:
    assert Resolver(config(*groups, ignore=ignore))(module) == group


def test_published_mixed_config() -> None:
    """The hand-written configuration that vLLM itself was seen to resolve as intended."""
    resolver = Resolver(
        config(
            [
                r"re:.*self_attn\.(q|k|v|g|b|f_a|f_b|q_a|q_b)_proj$",
                r"re:.*self_attn\.kv_a_proj_with_mqa$",
                r"re:.*shared_experts\.(gate|up|down)_proj$",
                r"re:.*layers\.0\.mlp\.(gate|up|down)_proj$",
            ],
            [r"re:.*block_sparse_moe\.experts\.\d+\.(w1|w2|w3|gate_proj|up_proj|down_proj)$"],
            ignore=[
                r"re:.*self_attn\.o_proj$",
                r"re:.*self_attn\.kv_b_proj$",
                r"re:.*lm_head.*",
                r"re:.*vision_tower.*",
                r"re:.*block_sparse_moe\.gate$",
                r"re:.*routed_expert_(down|up)_proj$",
            ],
        )
    )
    layer = "language_model.model.layers.5"
    answers = {
        f"{layer}.self_attn.b_proj": "group_0",
        f"{layer}.self_attn.kv_b_proj": None,
        f"{layer}.self_attn.o_proj": None,
        f"{layer}.block_sparse_moe.shared_experts.up_proj": "group_0",
        f"{layer}.block_sparse_moe.experts.0.up_proj": "group_1",
        f"{layer}.block_sparse_moe.experts.895.w2": "group_1",
        f"{layer}.block_sparse_moe.gate": None,
        f"{layer}.block_sparse_moe.routed_expert_up_proj": None,
        "language_model.model.layers.0.mlp.up_proj": "group_0",
        "language_model.model.layers.1.mlp.up_proj": None,
        "vision_tower.encoder.blocks.0.wqkv": None,
    }
    assert {module: resolver(module) for module in answers} == answers


@pytest.mark.parametrize("quantization_config", [{}, {"config_groups": None, "ignore": None}, config([])])
def test_nothing_configured(quantization_config: dict[str, object]) -> None:
    assert Resolver(quantization_config)("a") is None


@pytest.mark.parametrize("field", ["targets", "ignore"])
def test_bad_pattern(field: str) -> None:
    bad = config(["re:("]) if field == "targets" else config(["Linear"], ignore=["re:("])
    with pytest.raises(CheckpointError) as caught:
        Resolver(bad)
    assert [problem.code for problem in caught.value.problems] == ["bad-pattern"]
