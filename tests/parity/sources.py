"""The checkpoints on which requant and LLM Compressor are compared: small, and full of awkward values."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from parity.checkpoints import Source

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    Array = NDArray[np.generic]
    Shape = tuple[int, ...]
    Kind = Callable[[np.random.Generator, Shape, np.dtype[Any]], NDArray[np.floating[Any]]]

DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}
CONFIG_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}

E4M3_MAX = 448.0


# Kinds of values. Each has a largest magnitude that leads the scale amax / 448 somewhere else.


def gaussian(rng: np.random.Generator, shape: Shape, _dtype: np.dtype[Any]) -> Any:
    return rng.normal(0, 0.02, shape)


def heavy_tailed(rng: np.random.Generator, shape: Shape, _dtype: np.dtype[Any]) -> Any:
    return np.clip(0.02 * rng.standard_t(2, shape), -1e3, 1e3)


def outlier(rng: np.random.Generator, shape: Shape, _dtype: np.dtype[Any]) -> Any:
    """One large value: most of the others underflow, and the negative ones keep their sign."""
    values = rng.normal(0, 1e-4, shape)
    values[0, -1] = 50.0
    return values


def midpoints(rng: np.random.Generator, shape: Shape, _dtype: np.dtype[Any]) -> Any:
    """Scale one, and values half-way between two codes."""
    codes = np.arange(0x7E, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    between = (codes[:-1] + codes[1:]) / 2
    values = rng.choice(between, shape) * rng.choice([-1.0, 1.0], shape)
    values[-1, 0] = E4M3_MAX
    return values


def zeros(_rng: np.random.Generator, shape: Shape, _dtype: np.dtype[Any]) -> Any:
    return np.zeros(shape)


def signed_zeros(rng: np.random.Generator, shape: Shape, _dtype: np.dtype[Any]) -> Any:
    return rng.choice([0.0, -0.0, 0.5, -0.5], shape)


def subnormal_scale(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> Any:
    """Values that are normal, over a scale that is not."""
    return rng.uniform(-100, 100, shape) * float(ml_dtypes.finfo(dtype).smallest_normal)


def vanishing_scale(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> Any:
    """Values that are not all zero, over a scale that rounds to zero."""
    return rng.integers(-100, 101, shape) * float(ml_dtypes.finfo(dtype).smallest_subnormal)


def huge(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> Any:
    """Values up to the largest that there is."""
    values = rng.uniform(-1, 1, shape)
    values[0, 0] = -1.0
    return values * float(ml_dtypes.finfo(dtype).max)


def halves(rng: np.random.Generator, shape: Shape, _dtype: np.dtype[Any]) -> Any:
    """A power of two as scale, and values half-way between two integers."""
    largest = rng.choice([7.5, 127.5], (shape[0], 1))
    values = rng.integers(-128, 128, shape) + rng.choice([0, 0.5, -0.5], shape)
    values = np.clip(values, -largest, largest)
    values[:, 0] = largest[:, 0]
    return values * 2.0 ** rng.integers(-12, 3)


def one_sided(rng: np.random.Generator, shape: Shape, _dtype: np.dtype[Any]) -> Any:
    return abs(rng.standard_normal(shape) + 3) * rng.choice([-0.02, 0.02])


def vanishing_one_sided(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> Any:
    return rng.integers(0, 4, shape) * float(ml_dtypes.finfo(dtype).smallest_subnormal) * rng.choice([-1, 1])


def huge_one_sided(rng: np.random.Generator, shape: Shape, dtype: np.dtype[Any]) -> Any:
    return abs(huge(rng, shape, dtype)) * rng.choice([-1, 1])


KINDS: tuple[Kind, ...] = (
    gaussian,
    zeros,
    huge,
    midpoints,
    vanishing_scale,
    heavy_tailed,
    signed_zeros,
    subnormal_scale,
    outlier,
)

INTEGER_KINDS: tuple[Kind, ...] = (*KINDS, halves, one_sided, vanishing_one_sided, huge_one_sided, heavy_tailed)


def mosaic(
    rng: np.random.Generator,
    shape: tuple[int, int],
    dtype: np.dtype[Any],
    tile: tuple[int, int],
    kinds: Sequence[Kind] = KINDS,
) -> Array:
    """Fill a weight tile by tile, each with values of the next kind."""
    upcoming = cycle(kinds)
    weight = np.zeros(shape)
    for row in range(0, shape[0], tile[0]):
        for column in range(0, shape[1], tile[1]):
            part = weight[row : row + tile[0], column : column + tile[1]]
            part[:] = next(upcoming)(rng, part.shape, dtype)
    return weight.astype(dtype)


def dense(dtype: str, shapes: Mapping[str, tuple[int, int]], kinds: Sequence[Kind] = KINDS, seed: int = 0) -> Source:
    """A checkpoint of float weights: every shape as a mosaic of rows and as one of blocks, and what is kept."""
    rng, numpy_dtype = np.random.default_rng(seed), DTYPES[dtype]
    arrays: dict[str, Array] = {}
    for layer, (name, shape) in enumerate(shapes.items()):
        prefix = f"model.layers.{layer}"
        arrays[f"{prefix}.mlp.{name}_rows.weight"] = mosaic(rng, shape, numpy_dtype, (1, shape[1]), kinds)
        arrays[f"{prefix}.mlp.{name}_blocks.weight"] = mosaic(rng, shape, numpy_dtype, (128, 128), kinds)
        arrays[f"{prefix}.mlp.{name}_blocks.bias"] = rng.normal(0, 1, shape[0]).astype(numpy_dtype)
        arrays[f"{prefix}.input_layernorm.weight"] = np.ones(shape[1], numpy_dtype)
    arrays["model.embed_tokens.weight"] = rng.normal(0, 1, (16, 32)).astype(numpy_dtype)
    arrays["lm_head.weight"] = rng.normal(0, 1, (16, 32)).astype(numpy_dtype)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": CONFIG_NAMES[dtype]}
    return Source({"model.safetensors": arrays}, config, ("lm_head", "re:.*embed_tokens$"))


LAYERS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "llama": {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")},
    "qwen3_moe": {
        "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
        "mlp.experts.0": ("gate_proj", "up_proj", "down_proj"),
        "mlp.experts.1": ("gate_proj", "up_proj", "down_proj"),
    },
    "deepseek_v3": {
        "self_attn": ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj"),
        "mlp": ("gate_proj", "up_proj", "down_proj"),
        "mlp.experts.0": ("gate_proj", "up_proj", "down_proj"),
        "mlp.shared_experts": ("gate_proj", "up_proj", "down_proj"),
    },
    "minimax_m2": {
        "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
        "block_sparse_moe.experts.0": ("w1", "w2", "w3"),
        "block_sparse_moe.experts.1": ("w1", "w2", "w3"),
    },
}
"""Model type → the linear modules of a layer: below a parent, the leaves."""


def layers(dtype: str, model_type: str, kinds: Sequence[Kind], missing: Sequence[str] = ()) -> Source:
    """A checkpoint in one shard, a layer for each kind of values; no two members of a fused group reach as far.

    ``missing`` names leaves that the model does not have.
    """
    rng, numpy_dtype = np.random.default_rng(3), DTYPES[dtype]
    largest = float(ml_dtypes.finfo(numpy_dtype).max)
    arrays: dict[str, Array] = {}
    for layer, kind in enumerate(kinds):
        for parent, leaves in LAYERS[model_type].items():
            for place, leaf in enumerate(leaves):
                if leaf not in missing:
                    values = kind(rng, (16 + 24 * place, 96), numpy_dtype) * (1, 4, 0, 2)[(layer + place) % 4]
                    weight = values.clip(-largest, largest).astype(numpy_dtype)
                    arrays[f"model.layers.{layer}.{parent}.{leaf}.weight"] = weight
        arrays[f"model.layers.{layer}.input_layernorm.weight"] = np.ones(96, numpy_dtype)
    arrays["lm_head.weight"] = rng.normal(0, 1, (16, 32)).astype(numpy_dtype)
    config = {"model_type": model_type, "dtype": CONFIG_NAMES[dtype]}
    return Source({"model.safetensors": arrays}, config, ("lm_head",))


K3_IGNORE = (
    "re:.*embed_tokens.*",
    "re:.*self_attn.*",
    r"re:.*block_sparse_moe\.gate.*",
    "re:.*self_attention_res_proj.*",
    "re:.*mlp_res_proj.*",
    "re:.*output_attn_res_proj.*",
    "re:.*lm_head.*",
    "re:.*vision_tower.*",
    "re:.*mm_projector.*",
)
"""The list with which RedHatAI/Kimi-K3-FP8-BLOCK was made, as its model card gives it."""

K3_MXFP4 = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "float",
                "symmetric": True,
                "strategy": "group",
                "group_size": 32,
                "dynamic": False,
                "observer": "minmax",
                "scale_dtype": "torch.uint8",
                "zp_dtype": None,
                "actorder": None,
                "block_structure": None,
            },
        }
    },
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
}
"""Kimi-K3's own quantization_config: what it ignores is less than what is in fact not quantized."""


def exponents(rng: np.random.Generator, expert: int, shape: tuple[int, int]) -> NDArray[np.uint8]:
    """E8M0 bytes ``[out, in / 32]``: as trained, spread far beyond FP8's range, and at both ends of BF16's."""
    low, high = ((116, 123), (90, 130), (0, 8), (245, 253))[expert % 4]
    return rng.integers(low, high, shape).astype(np.uint8)


def mxfp4(rng: np.random.Generator, expert: int, shape: tuple[int, int]) -> dict[str, NDArray[np.uint8]]:
    """The two parts of an MXFP4 weight ``[out, in]``: some groups all zero, some with byte 0 as a mark of it."""
    rows, columns = shape
    packed = rng.integers(0, 256, (rows, columns // 32, 16)).astype(np.uint8)
    scale = exponents(rng, expert, (rows, columns // 32))
    empty = rng.random(scale.shape) < 0.1
    packed[empty] &= 0x88
    scale[empty & (rng.random(scale.shape) < 0.5)] = 0
    return {"weight_packed": packed.reshape(rows, columns // 2), "weight_scale": scale}


def kimi_k3(
    seed: int = 0,
    *,
    layers: tuple[int, ...] = (0, 1, 3),
    experts: int = 4,
    hidden: int = 256,
    latent: int = 256,
    inter: int = 128,
    dense_inter: int = 384,
    bystanders: int = 40,
) -> Source:
    """A checkpoint with Kimi-K3's names, dtypes and nesting, one shard per layer.

    Layer 0 is dense, the others mixtures of MXFP4 experts ``[inter, latent]`` and ``[latent, inter]``; each
    fourth attends in full, the others by linear attention. ``bystanders`` is the size of all that the ignore
    list keeps.
    """
    rng = np.random.default_rng(seed)

    def bf16(*shape: int) -> Array:
        return rng.normal(0, 0.02, shape).astype(ml_dtypes.bfloat16)

    def f32(*shape: int) -> Array:
        return rng.normal(0, 1, shape).astype(np.float32)

    def attention(prefix: str, full: bool) -> dict[str, Array]:
        width = bystanders
        names = ("q_a", "q_b", "kv_b", "g", "o") if full else ("q", "k", "v", "g", "f_a", "f_b", "b", "o")
        parts = {f"{prefix}{name}_proj.weight": bf16(width, hidden) for name in names}
        if full:
            parts[f"{prefix}kv_a_proj_with_mqa.weight"] = bf16(width, hidden)
            parts |= {f"{prefix}{name}_a_layernorm.weight": bf16(width) for name in ("q", "kv")}
        else:
            parts |= {f"{prefix}{name}_conv1d.weight": f32(width, 1, 4) for name in "qkv"}
            parts |= {f"{prefix}A_log": f32(128), f"{prefix}dt_bias": f32(width), f"{prefix}o_norm.weight": f32(128)}
        return parts

    def feed_forward(prefix: str, width: int) -> dict[str, Array]:
        return {
            f"{prefix}gate_proj.weight": mosaic(rng, (width, hidden), DTYPES["BF16"], (1, hidden)),
            f"{prefix}up_proj.weight": mosaic(rng, (width, hidden), DTYPES["BF16"], (128, 128)),
            f"{prefix}down_proj.weight": bf16(hidden, width),
        }

    def mixture(prefix: str) -> dict[str, Array]:
        parts: dict[str, Array] = {
            f"{prefix}gate.weight": bf16(experts, hidden),
            f"{prefix}gate.e_score_correction_bias": f32(experts),
            f"{prefix}routed_expert_down_proj.weight": bf16(latent, hidden),
            f"{prefix}routed_expert_up_proj.weight": bf16(hidden, latent),
            f"{prefix}routed_expert_norm.weight": bf16(latent),
        }
        parts |= feed_forward(f"{prefix}shared_experts.", 2 * inter)
        for expert in range(experts):
            for name, shape in (("w1", (inter, latent)), ("w2", (latent, inter)), ("w3", (inter, latent))):
                for part, array in mxfp4(rng, expert, shape).items():
                    parts[f"{prefix}experts.{expert}.{name}.{part}"] = array
        return parts

    def block(layer: int) -> dict[str, Array]:
        prefix = f"language_model.model.layers.{layer}."
        norms = ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm")
        parts = {f"{prefix}{name}.weight": bf16(hidden) for name in norms}
        parts |= {f"{prefix}{name}_res_proj.weight": bf16(1, hidden) for name in ("self_attention", "mlp")}
        parts |= attention(f"{prefix}self_attn.", layer % 4 == 3)
        parts |= mixture(f"{prefix}block_sparse_moe.") if layer else feed_forward(f"{prefix}mlp.", dense_inter)
        return parts

    def ends() -> dict[str, Array]:
        text, vision = "language_model.", "vision_tower."
        parts = {
            f"{text}model.embed_tokens.weight": bf16(bystanders, hidden),
            f"{text}lm_head.weight": bf16(bystanders, hidden),
            f"{text}model.norm.weight": bf16(hidden),
            f"{text}model.output_attn_res_norm.weight": bf16(hidden),
            f"{text}model.output_attn_res_proj.weight": bf16(1, hidden),
            f"{vision}encoder.final_layernorm.weight": bf16(16),
            f"{vision}patch_embed.proj.weight": bf16(16, 3, 2, 2),
            f"{vision}patch_embed.pos_emb.weight": bf16(4, 4, 16),
            "mm_projector.proj.0.weight": bf16(16, 16),
            "mm_projector.proj.2.weight": bf16(hidden, 16),
            "mm_projector.post_norm.weight": bf16(hidden),
        }
        for name, shape in (("wqkv", (48, 16)), ("wo", (16, 16)), ("mlp.fc0", (32, 16)), ("mlp.fc1", (16, 32))):
            parts[f"{vision}encoder.blocks.0.{name}.weight"] = bf16(*shape)
        parts |= {f"{vision}encoder.blocks.0.{name}.weight": bf16(16) for name in ("norm0", "norm1")}
        return parts

    contents = [*(block(layer) for layer in layers), ends()]
    shards = {f"model-{i:05}-of-{len(contents):06}.safetensors": part for i, part in enumerate(contents, 1)}
    text_config = {
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "num_experts": experts,
        "quantization_config": K3_MXFP4,
    }
    config = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "tie_word_embeddings": False,
        "text_config": text_config,
        "vision_config": {"model_type": "moonvit3d"},
    }
    return Source(shards, config, K3_IGNORE)
