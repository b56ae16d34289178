"""Fused groups by the names that real checkpoints of each family have."""

from __future__ import annotations

from pathlib import Path

import pytest

from requant.errors import CallError
from requant.families.family import families, family_named, family_of, fused_groups

LAYER = "model.layers.3."
DENSE_MLP = "mlp.gate_proj mlp.up_proj"
EXPERT = "mlp.experts.7.gate_proj mlp.experts.7.up_proj"
QKV = "self_attn.q_proj self_attn.k_proj self_attn.v_proj"
MLA = "self_attn.q_a_proj self_attn.kv_a_proj_with_mqa"
ALONE = "self_attn.o_proj self_attn.q_b_proj self_attn.kv_b_proj mlp.down_proj mlp.gate mlp.experts.7.down_proj"
KDA = " ".join(f"self_attn.{name}_proj" for name in ("q", "k", "v", "g", "f_a", "b"))
W = "block_sparse_moe.experts.7.w1 block_sparse_moe.experts.7.w3"

GROUPS = [
    # model_type, the fused groups of a layer, modules that are layers by themselves
    ("deepseek_v3", [MLA, DENSE_MLP, EXPERT, "mlp.shared_experts.gate_proj mlp.shared_experts.up_proj"], ALONE),
    ("deepseek_v32", [MLA, EXPERT], "self_attn.indexer.wq_b self_attn.indexer.wk self_attn.o_proj"),
    (
        "deepseek_v4",
        ["attn.wq_a attn.wkv", "attn.compressor.wkv attn.compressor.wgate", "ffn.experts.7.w1 ffn.experts.7.w3"],
        "attn.wq_b attn.wo_a attn.wo_b attn.indexer.wq_b ffn.experts.7.w2",
    ),
    ("glm4_moe", [QKV, EXPERT, DENSE_MLP], "self_attn.o_proj"),
    ("glm_moe_dsa", [MLA, EXPERT], "self_attn.q_b_proj self_attn.indexer.wk"),
    ("gpt_oss", [QKV], "self_attn.o_proj mlp.router"),
    ("kimi_k2", [MLA, EXPERT, DENSE_MLP], ALONE),
    ("kimi_k3", [KDA, DENSE_MLP], "self_attn.f_b_proj self_attn.o_proj mlp.down_proj"),
    (
        "kimi_k3",
        [
            f"{MLA} self_attn.g_proj",
            W,
            "block_sparse_moe.shared_experts.gate_proj block_sparse_moe.shared_experts.up_proj",
        ],
        "self_attn.q_b_proj self_attn.kv_b_proj self_attn.o_proj block_sparse_moe.routed_expert_down_proj "
        "block_sparse_moe.experts.7.w2",
    ),
    (
        "kimi_linear",  # the low-rank gate's g_a_proj is no part of in_proj_qkvgfab
        [" ".join(f"self_attn.{name}_proj" for name in ("q", "k", "v", "f_a", "b")), W],
        "self_attn.g_a_proj self_attn.g_b_proj self_attn.f_b_proj",
    ),
    ("kimi_linear", [W], "self_attn.q_proj self_attn.kv_a_proj_with_mqa self_attn.kv_b_proj"),
    ("llama", [QKV, DENSE_MLP], "self_attn.o_proj mlp.down_proj"),
    ("mixtral", [QKV, W], "self_attn.o_proj block_sparse_moe.experts.7.w2 block_sparse_moe.gate"),
    ("minimax_m2", [QKV, W], "self_attn.o_proj"),
    ("minimax_m3_vl", [f"{QKV} self_attn.index_q_proj self_attn.index_k_proj", W], "self_attn.o_proj"),
    ("qwen3", [QKV, DENSE_MLP], "self_attn.o_proj"),
    ("qwen3_moe", [QKV, EXPERT], "self_attn.o_proj mlp.gate"),
    (
        "qwen3_5_moe",
        [
            "linear_attn.in_proj_qkv linear_attn.in_proj_z",
            "linear_attn.in_proj_b linear_attn.in_proj_a",
            "mlp.shared_expert.gate_proj mlp.shared_expert.up_proj",
            EXPERT,
        ],
        "linear_attn.out_proj linear_attn.conv1d mlp.shared_expert_gate",
    ),
]


@pytest.mark.parametrize(("model_type", "groups", "alone"), GROUPS)
@pytest.mark.parametrize("root", [LAYER, "language_model.model.layers.3.", "layers.3."])
def test_the_groups_of_a_family(model_type: str, groups: list[str], alone: str, root: str) -> None:
    family = family_of([model_type])
    assert family is not None
    wanted = {frozenset(root + name for name in group.split()) for group in groups}
    modules = [root + name for name in [*" ".join(groups).split(), *alone.split()]]
    found: dict[str, set[str]] = {}
    for module, group in fused_groups(modules, family).items():
        found.setdefault(group, set()).add(module)
    assert set(map(frozenset, found.values())) == wanted


@pytest.mark.parametrize("missing", ["self_attn.v_proj", "self_attn.q_proj", "self_attn.k_proj"])
def test_a_missing_member_is_no_error(missing: str) -> None:
    rest = [LAYER + name for name in QKV.split() if name != missing]
    groups = fused_groups(rest, families()["llama"])
    assert set(groups) == set(rest) and len(set(groups.values())) == 1


def test_the_same_leaves_of_two_parents_are_two_groups() -> None:
    modules = [f"model.layers.{layer}.{name}" for layer in range(3) for name in QKV.split()]
    assert len(set(fused_groups(modules, families()["qwen3"]).values())) == 3


def test_the_model_type_of_a_part_counts_where_the_models_own_is_unknown() -> None:
    family = family_of(["some_wrapper", "deepseek_v3"])
    assert family is not None and family.name == "deepseek_v3"
    kimi = family_of(["kimi_k3", "kimi_linear", "moonvit3d"])
    assert kimi is not None and kimi.name == "kimi_k3"
    assert family_of(["unheard_of"]) is None


def test_no_model_type_is_of_two_families() -> None:
    types = [name for family in families().values() for name in family.model_types]
    assert len(types) == len(set(types))


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("model_types: [a]\nfused:\n  - [q_proj\n", 4, "expected"),
        ("model_types: [a]\nfussed: []\n", 2, "'fussed'"),
        ("model_types: a\n", 1, "list"),
        ("model_types: [a]\nfused:\n  - [q, k]\n  - q_proj\n", 4, "list"),
        ("fused:\n  - [q_proj, 7]\n", 2, "name"),
        ("fused:\n  - [q_proj]\n", 2, "two"),
        ("fused:\n  - [q, k]\n  - [w1, w1]\n", 3, "two"),
        ("fused: [[q, k]]\nfused: [[a, b]]\n", 2, "twice"),
        ("- q_proj\n", 1, "mapping"),
        ("", 1, "mapping"),
    ],
)
def test_a_malformed_file_is_refused_with_its_line(tmp_path: Path, text: str, line: int, what: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(CallError) as caught:
        family_named(str(path))
    (problem,) = caught.value.problems
    assert f"{path}, line {line}:" in problem.message and what in problem.message


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for raw in (b"\xff\xfe\x00", b"fused: \x00"):
        path.write_bytes(raw)
        with pytest.raises(CallError) as caught:
            family_named(str(path))
        assert str(path) in caught.value.problems[0].message


def test_a_name_that_is_no_family_lists_those_there_are() -> None:
    with pytest.raises(CallError) as caught:
        family_named("kimi_k9")
    assert "kimi_k3" in caught.value.problems[0].remedy
