"""The names under which engines know a module."""

from __future__ import annotations

import pytest

from requant.engines.names import name_variants

ROOTS = ("", "model.", "language_model.", "language_model.model.", "model.language_model.")


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("path", ["layers.7.self_attn.q_proj", "lm_head", "embed_tokens"])
def test_text_modules_hang_under_every_root(root: str, path: str) -> None:
    variants = list(name_variants(root + path))
    assert variants[0] == root + path
    assert sorted(variants) == sorted(before + path for before in ROOTS)


def test_expert_variants() -> None:
    variants = list(name_variants("model.layers.1.block_sparse_moe.experts.7.w2"))
    assert variants[0] == "model.layers.1.block_sparse_moe.experts.7.w2"
    assert len(variants) == len(set(variants)) == 20
    assert "model.layers.1.block_sparse_moe.experts.7.down_proj" in variants
    assert "layers.1.mlp.experts.7.down_proj" in variants
    assert "model.language_model.layers.1.mlp.experts.7.w2" in variants


@pytest.mark.parametrize(
    "module",
    [
        "vision_tower.encoder.layers.0.self_attn.q_proj",
        "model.visual.blocks.3.attn.qkv",
        "mtp.layers.0.self_attn.q_proj",
        "mm_projector.proj.0",
    ],
)
def test_other_modules_stay_where_they_are(module: str) -> None:
    assert list(name_variants(module)) == [module]


def test_w1_outside_of_experts_keeps_its_name() -> None:
    assert "layers.0.ffn.gate_proj" not in set(name_variants("layers.0.ffn.w1"))
