"""Kimi-K3 to try things on: full size with sparse data, or small with real weights, and the main job on it."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from requant import api
from requant.checkpoint.dtypes import payload_bytes
from requant.checkpoint.header import encode_header
from requant.checkpoint.layout import TensorSpec
from requant.errors import CallError, Problem, SurroundingsError
from requant.formats import FORMATS, Encoding, Tile
from requant.formats.dense import VALUE_DTYPES
from requant.recipe.recipe import Exact

IGNORE = (
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
"""What the published Kimi-K3-FP8-BLOCK leaves as it is."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes that Kimi-K3's tensors follow from; the defaults are the model's own."""

    layers: int = 93
    experts: int = 896
    hidden: int = 7168
    latent: int = 3584
    expert_inner: int = 3072
    dense_inner: int = 33792
    heads: int = 96
    q_rank: int = 1536
    kv_rank: int = 512
    vocabulary: int = 163840
    vision_blocks: int = 27
    vision_hidden: int = 1024
    shards: int = 96


FULL = Geometry()
SMALL = Geometry(
    layers=5,
    experts=8,
    hidden=512,
    latent=256,
    expert_inner=384,
    dense_inner=640,
    heads=2,
    q_rank=96,
    kv_rank=64,
    vocabulary=1024,
    vision_blocks=2,
    vision_hidden=64,
    shards=3,
)

_Row = tuple[str, str, tuple[int, ...]]
"""Name, dtype and shape of a tensor."""


def tensors(g: Geometry) -> Iterator[_Row]:
    """Yield every tensor of a Kimi-K3 of these sizes, module by module."""
    text = "language_model."
    yield text + "model.embed_tokens.weight", "BF16", (g.vocabulary, g.hidden)
    for layer in range(g.layers):
        prefix = f"{text}model.layers.{layer}."
        for norm in (
            "input_layernorm",
            "post_attention_layernorm",
            "self_attention_res_norm",
            "mlp_res_norm",
        ):
            yield f"{prefix}{norm}.weight", "BF16", (g.hidden,)
        for projection in ("self_attention_res_proj", "mlp_res_proj"):
            yield f"{prefix}{projection}.weight", "BF16", (1, g.hidden)
        latent_attention = layer % 4 == 3 or layer == g.layers - 1
        yield from (_mla if latent_attention else _kda)(prefix + "self_attn.", g)
        yield from _moe(prefix + "block_sparse_moe.", g) if layer else _dense_mlp(prefix + "mlp.", g)
    yield text + "model.norm.weight", "BF16", (g.hidden,)
    yield text + "model.output_attn_res_norm.weight", "BF16", (g.hidden,)
    yield text + "model.output_attn_res_proj.weight", "BF16", (1, g.hidden)
    yield text + "lm_head.weight", "BF16", (g.vocabulary, g.hidden)
    yield from _vision(g)


def _mla(prefix: str, g: Geometry) -> Iterator[_Row]:
    """Yield a layer of multi-head latent attention."""
    for name, shape in (
        ("q_a_proj", (g.q_rank, g.hidden)),
        ("q_a_layernorm", (g.q_rank,)),
        ("q_b_proj", (g.heads * 192, g.q_rank)),
        ("kv_a_proj_with_mqa", (g.kv_rank + 64, g.hidden)),
        ("kv_a_layernorm", (g.kv_rank,)),
        ("kv_b_proj", (g.heads * 256, g.kv_rank)),
        ("g_proj", (g.heads * 128, g.hidden)),
        ("o_proj", (g.hidden, g.heads * 128)),
    ):
        yield f"{prefix}{name}.weight", "BF16", shape


def _kda(prefix: str, g: Geometry) -> Iterator[_Row]:
    """Yield a layer of Kimi delta attention."""
    inner = g.heads * 128
    for name in "qkvg":
        yield f"{prefix}{name}_proj.weight", "BF16", (inner, g.hidden)
    yield prefix + "f_a_proj.weight", "BF16", (128, g.hidden)
    yield prefix + "f_b_proj.weight", "BF16", (inner, 128)
    yield prefix + "b_proj.weight", "BF16", (g.heads, g.hidden)
    for name in "qkv":
        yield f"{prefix}{name}_conv1d.weight", "F32", (inner, 1, 4)
    yield prefix + "A_log", "F32", (128,)
    yield prefix + "dt_bias", "F32", (inner,)
    yield prefix + "o_norm.weight", "F32", (128,)
    yield prefix + "o_proj.weight", "BF16", (g.hidden, inner)


def _dense_mlp(prefix: str, g: Geometry) -> Iterator[_Row]:
    yield prefix + "gate_proj.weight", "BF16", (g.dense_inner, g.hidden)
    yield prefix + "up_proj.weight", "BF16", (g.dense_inner, g.hidden)
    yield prefix + "down_proj.weight", "BF16", (g.hidden, g.dense_inner)


def _moe(prefix: str, g: Geometry) -> Iterator[_Row]:
    """Yield router, latent projections, shared experts, and the MXFP4 routed experts."""
    yield prefix + "gate.weight", "BF16", (g.experts, g.hidden)
    yield prefix + "gate.e_score_correction_bias", "F32", (g.experts,)
    yield prefix + "routed_expert_down_proj.weight", "BF16", (g.latent, g.hidden)
    yield prefix + "routed_expert_up_proj.weight", "BF16", (g.hidden, g.latent)
    yield prefix + "routed_expert_norm.weight", "BF16", (g.latent,)
    yield prefix + "shared_experts.gate_proj.weight", "BF16", (2 * g.expert_inner, g.hidden)
    yield prefix + "shared_experts.up_proj.weight", "BF16", (2 * g.expert_inner, g.hidden)
    yield prefix + "shared_experts.down_proj.weight", "BF16", (g.hidden, 2 * g.expert_inner)
    up, down = (g.expert_inner, g.latent), (g.latent, g.expert_inner)
    for expert in range(g.experts):
        for name, (rows, columns) in (("w1", up), ("w2", down), ("w3", up)):
            module = f"{prefix}experts.{expert}.{name}"
            yield module + ".weight_packed", "U8", (rows, columns // 2)
            yield module + ".weight_scale", "U8", (rows, columns // 32)


def _vision(g: Geometry) -> Iterator[_Row]:
    width = g.vision_hidden
    for block in range(g.vision_blocks):
        prefix = f"vision_tower.encoder.blocks.{block}."
        yield prefix + "norm0.weight", "BF16", (width,)
        yield prefix + "norm1.weight", "BF16", (width,)
        yield prefix + "wqkv.weight", "BF16", (width * 9 // 2, width)
        yield prefix + "wo.weight", "BF16", (width, width * 3 // 2)
        yield prefix + "mlp.fc0.weight", "BF16", (4 * width, width)
        yield prefix + "mlp.fc1.weight", "BF16", (width, 4 * width)
    yield "vision_tower.encoder.final_layernorm.weight", "BF16", (width,)
    yield "vision_tower.patch_embed.proj.weight", "BF16", (width, 3, 14, 14)
    yield "vision_tower.patch_embed.pos_emb.weight", "BF16", (64, 64, width)
    yield "mm_projector.proj.0.weight", "BF16", (4 * width, 4 * width)
    yield "mm_projector.proj.2.weight", "BF16", (g.hidden, 4 * width)
    yield "mm_projector.post_norm.weight", "BF16", (g.hidden,)


def config(g: Geometry) -> dict[str, Any]:
    """Return a config.json with Kimi-K3's keys, its quantization_config nested and its ignore list incomplete."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
        "dynamic": False,
        "scale_dtype": "torch.uint8",
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": {**group, "format": "mxfp4-pack-quantized"}},
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
            "re:.*vision_tower.*",
            "re:.*mm_projector.*",
        ],
    }
    text = {
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "hidden_size": g.hidden,
        "num_hidden_layers": g.layers,
        "num_attention_heads": g.heads,
        "num_key_value_heads": g.heads,
        "vocab_size": g.vocabulary,
        "intermediate_size": g.dense_inner,
        "first_k_dense_replace": 1,
        "num_experts": g.experts,
        "num_shared_experts": 2,
        "moe_intermediate_size": g.expert_inner,
        "routed_expert_hidden_size": g.latent,
        "hidden_act": "situ",
        "q_lora_rank": g.q_rank,
        "kv_lora_rank": g.kv_rank,
        "quantization_config": quantization,
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": {"model_type": "moonvit3d"},
    }


def write_full_size(folder: Path, g: Geometry = FULL) -> dict[str, Any]:
    """Write a Kimi-K3 whose headers and sizes are real and whose data are holes; reading them gives zeros."""
    shards = _shards(g)
    _begin(folder)
    for name, specs in shards.items():
        header = encode_header(specs, {"format": "pt"})
        with open(folder / name, "wb") as file:
            file.write(header)
            file.truncate(len(header) + sum(spec.nbytes for spec in specs))
    return _finish(folder, shards, g)


def write_small(folder: Path, g: Geometry = SMALL, seed: int = 0) -> dict[str, Any]:
    """Write a small Kimi-K3 with normally distributed weights, the routed experts in MXFP4."""
    shards = _shards(g)
    _begin(folder)
    rng = np.random.default_rng(seed)
    for name, specs in shards.items():
        with open(folder / name, "wb") as file:
            file.write(encode_header(specs, {"format": "pt"}))
            for payload in _payloads(specs, rng):
                file.write(payload.tobytes())
    return _finish(folder, shards, g)


def run() -> dict[str, Any]:
    """Convert a small Kimi-K3 to FP8_BLOCK exactly and with rounding; verify and compare both with the source."""
    ways: tuple[tuple[str, Exact], ...] = (("exact", "auto"), ("rounded", "off"))
    with tempfile.TemporaryDirectory(prefix="requant-demo-") as name:
        root = Path(name)
        source = write_small(root / "kimi-k3-small")
        runs = {}
        for label, exact in ways:
            output = root / label
            result = api.convert(root / "kimi-k3-small", output, "FP8_BLOCK", ignore=IGNORE, exact=exact)
            verified = api.verify(output, "data")
            compared = api.compare(root / "kimi-k3-small", output)
            runs[label] = {
                "converted": result.to_json(),
                "verified": verified.to_json(),
                "compared": compared.to_json(),
            }
    return {"ok": True, "source": source, **runs, "notes": []}


def _shards(g: Geometry) -> dict[str, list[TensorSpec]]:
    """Divide the tensors into shards of about one size; a module never straddles two."""
    specs = [TensorSpec(name, dtype, shape, payload_bytes(dtype, shape)) for name, dtype, shape in tensors(g)]
    target = sum(spec.nbytes for spec in specs) / g.shards
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if size >= target and len(shards) < g.shards and not spec.name.endswith("weight_scale"):
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.nbytes
    return {f"model-{n:05d}-of-{len(shards):06d}.safetensors": shard for n, shard in enumerate(shards, 1)}


def _begin(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SurroundingsError(Problem("io", f"{folder}: {error.strerror}")) from error
    if any(folder.iterdir()):
        raise CallError(Problem("bad-destination", f"{folder} is not empty", remedy="name a new folder"))


def _finish(folder: Path, shards: dict[str, list[TensorSpec]], g: Geometry) -> dict[str, Any]:
    """Write index and config, and return what has been written."""
    total = sum(spec.nbytes for specs in shards.values() for spec in specs)
    weight_map = {spec.name: name for name, specs in shards.items() for spec in specs}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config(g), indent=2) + "\n")
    return {"folder": str(folder), "shards": len(shards), "tensors": len(weight_map), "bytes": total}


def _payloads(specs: list[TensorSpec], rng: np.random.Generator) -> Iterator[NDArray[Any]]:
    """Yield the data of a shard's tensors; an MXFP4 weight's scale follows its codes."""
    exponents: NDArray[Any] | None = None
    for spec in specs:
        if exponents is not None:
            yield exponents
            exponents = None
        elif spec.name.endswith(".weight_packed"):
            rows, columns = spec.shape[0], spec.shape[1] * 2
            weight = (rng.standard_normal((rows, columns)) * 0.02).astype(np.float32).view(np.uint32)
            codes = np.empty(spec.shape, np.uint8)
            exponents = np.empty((rows, columns // 32), np.uint8)
            parts = Tile(codes, "U8"), Tile(exponents, "U8")
            FORMATS["mxfp4"].encode(Tile(weight, "F32"), parts, Encoding(reference=True))
            yield codes
        else:
            spread = 1.0 if "norm" in spec.name else 0.02
            yield (rng.standard_normal(math.prod(spec.shape)) * spread).astype(VALUE_DTYPES[spec.dtype])
