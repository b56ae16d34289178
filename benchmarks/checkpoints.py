"""Write a checkpoint to measure on: ``python benchmarks/checkpoints.py bf16|k3 FOLDER BYTES``."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from requant import demo
from requant.checkpoint.dtypes import payload_bytes
from requant.checkpoint.header import encode_header
from requant.checkpoint.layout import TensorSpec

HIDDEN, EXPERT_INNER, HEADS, KV_HEADS, LAYERS, VOCABULARY = 2048, 768, 32, 4, 4, 16384
"""Qwen3-30B-A3B's sizes, with fewer layers and a vocabulary in proportion."""

Shape = tuple[int, ...]


def qwen3_moe(experts: int) -> Iterator[tuple[str, Shape]]:
    """Yield the tensors of a Qwen3-MoE, all of them BF16."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (HIDDEN,)
        yield prefix + "self_attn.q_proj.weight", (HEADS * 128, HIDDEN)
        yield prefix + "self_attn.k_proj.weight", (KV_HEADS * 128, HIDDEN)
        yield prefix + "self_attn.v_proj.weight", (KV_HEADS * 128, HIDDEN)
        yield prefix + "self_attn.o_proj.weight", (HIDDEN, HEADS * 128)
        yield prefix + "self_attn.q_norm.weight", (128,)
        yield prefix + "self_attn.k_norm.weight", (128,)
        yield prefix + "post_attention_layernorm.weight", (HIDDEN,)
        yield prefix + "mlp.gate.weight", (experts, HIDDEN)
        for expert in range(experts):
            yield f"{prefix}mlp.experts.{expert}.gate_proj.weight", (EXPERT_INNER, HIDDEN)
            yield f"{prefix}mlp.experts.{expert}.up_proj.weight", (EXPERT_INNER, HIDDEN)
            yield f"{prefix}mlp.experts.{expert}.down_proj.weight", (HIDDEN, EXPERT_INNER)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def write_bf16(folder: Path, nbytes: int) -> None:
    """Write a Qwen3-MoE of at least ``nbytes``, a shard per layer."""

    def size(experts: int) -> int:
        return sum(2 * math.prod(shape) for _, shape in qwen3_moe(experts))

    experts = max(2, 1 + math.ceil((nbytes - size(1)) / (size(2) - size(1))))
    tensors = [TensorSpec(name, "BF16", shape, 2 * math.prod(shape)) for name, shape in qwen3_moe(experts)]
    rng = np.random.default_rng(0)
    # Speed does not depend on the values, so weights are windows into one pool of them.
    pool = (rng.standard_normal(1 << 26, np.float32) * 0.02).astype(ml_dtypes.bfloat16).view(np.uint16)
    shards = np.array_split(np.arange(len(tensors)), LAYERS)
    weight_map = {}
    folder.mkdir(parents=True)
    for number, members in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        specs = [tensors[index] for index in members]
        with open(folder / name, "wb") as file:
            file.write(encode_header(specs, {"format": "pt"}))
            for spec in specs:
                start = int(rng.integers(len(pool) - spec.nbytes // 2))
                file.write(pool[start : start + spec.nbytes // 2].data)
                weight_map[spec.name] = name
    index = {"metadata": {"total_size": size(experts)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "torch_dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "head_dim": 128,
        "moe_intermediate_size": EXPERT_INNER,
        "num_attention_heads": HEADS,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "tie_word_embeddings": False,
        "vocab_size": VOCABULARY,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_k3(folder: Path, nbytes: int) -> None:
    """Write a Kimi-K3 of about ``nbytes``: one layer whose experts have the model's own sizes, and little else."""

    def geometry(experts: int) -> demo.Geometry:
        return demo.Geometry(
            layers=2,
            experts=experts,
            dense_inner=1024,
            heads=2,
            vocabulary=1024,
            vision_blocks=1,
            vision_hidden=64,
            shards=4,
        )

    def size(experts: int) -> int:
        return sum(payload_bytes(dtype, shape) for _, dtype, shape in demo.tensors(geometry(experts)))

    experts = max(2, 1 + math.ceil((nbytes - size(1)) / (size(2) - size(1))))
    demo.write_small(folder, geometry(experts))


if __name__ == "__main__":
    kind, target, amount = sys.argv[1:]
    {"bf16": write_bf16, "k3": write_k3}[kind](Path(target), int(amount))
