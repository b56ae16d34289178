"""Small random models that transformers makes and loads: to FP8_DYNAMIC, back to BF16, and into transformers again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import requant

if TYPE_CHECKING:
    from pathlib import Path

    import torch

pytestmark = pytest.mark.parity

_SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
_LATENT = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"intermediate_size": 256}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {"intermediate_size": 256, "moe_intermediate_size": 192, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **_LATENT,
            "num_key_value_heads": 4,
            "intermediate_size": 256,
            "moe_intermediate_size": 192,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
        },
    ),
    "gpt-oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {"intermediate_size": 192, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32},
    ),
    "llama-4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {"intermediate_size": 192, "intermediate_size_mlp": 256, "num_local_experts": 4, "head_dim": 32},
    ),
    "qwen3.5-moe": (
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        {
            **_DELTA,
            "moe_intermediate_size": 192,
            "shared_expert_intermediate_size": 192,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 32,
        },
    ),
}


def load(folder: Path) -> Any:
    """Load a model into transformers; every tensor must find its place, and every place its tensor."""
    import torch
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def log_probabilities(model: Any) -> torch.Tensor:
    import torch

    tokens = torch.arange(128).reshape(2, 64)
    with torch.no_grad():
        return torch.log_softmax(model(tokens).logits.float(), -1)


@pytest.mark.parametrize("name", MODELS)
def test_round_trip(tmp_path: Path, name: str) -> None:
    import torch
    import transformers

    config, architecture, sizes = MODELS[name]
    torch.manual_seed(0)
    configuration = getattr(transformers, config)(**{**_SIZES, **sizes})
    getattr(transformers, architecture)(configuration).to(torch.bfloat16).save_pretrained(tmp_path / "source")
    original = log_probabilities(load(tmp_path / "source"))

    requant.convert(tmp_path / "source", tmp_path / "fp8", "FP8_DYNAMIC")
    requant.convert(tmp_path / "fp8", tmp_path / "bf16", "BF16")
    back = log_probabilities(load(tmp_path / "bf16"))
    divergence = (original.exp() * (original - back)).sum(-1)
    assert 0 < divergence.mean() < 2e-3
    assert requant.verify(tmp_path / "bf16", "data").ok
    names = {tensor for shard in (tmp_path / "bf16").glob("*.safetensors") for tensor in _names(shard)}
    assert names == {tensor for shard in (tmp_path / "source").glob("*.safetensors") for tensor in _names(shard)}


def _names(shard: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(shard, "np") as file:
        return list(file.keys())
