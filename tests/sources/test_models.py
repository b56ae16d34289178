"""What the big models ship: small checkpoints with their real names, read, decoded, and taken to other formats."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import requant
from parity.checkpoints import Source, read, write
from stored_values import array, stored

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    Arrays = dict[str, NDArray[Any]]

BF16, F8, E8M0 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
HIDDEN, INNER, EXPERTS = 256, 384, 3


class Model(NamedTuple):
    """A checkpoint, and what inspect is to say of it: format by weights, and the family."""

    tensors: Arrays
    config: Mapping[str, Any]
    formats: Mapping[str, int]


def normal(rng: np.random.Generator, *shape: int) -> NDArray[Any]:
    return rng.normal(0, 0.02, shape).astype(BF16)


def fp8_block(rng: np.random.Generator, name: str, rows: int, columns: int, suffix: str, dtype: Any) -> Arrays:
    """FP8 codes and a scale for every 128 x 128, which multiplies whatever it is called."""
    blocks = -(-rows // 128), -(-columns // 128)
    scales = 2.0 ** rng.integers(-16, -12, blocks) if dtype is E8M0 else rng.uniform(1e-5, 2e-4, blocks)
    codes = rng.normal(0, 60, (rows, columns)).clip(-440, 440).astype(F8)
    return {f"{name}.weight": codes, f"{name}.{suffix}": scales.astype(dtype)}


def mx(rng: np.random.Generator, rows: int, columns: int, bits: int) -> tuple[NDArray[Any], NDArray[Any]]:
    exponents = rng.integers(112, 122, (rows, columns // 32), np.uint8)
    if bits == 4:
        return rng.integers(0, 256, (rows, columns // 2), np.uint8), exponents
    return rng.normal(0, 60, (rows, columns)).clip(-440, 440).astype(F8), exponents


def nvfp4(rng: np.random.Generator, name: str, rows: int, columns: int) -> Arrays:
    """ModelOpt's parts: multipliers, 0-d."""
    return {
        f"{name}.weight": rng.integers(0, 256, (rows, columns // 2), np.uint8),
        f"{name}.weight_scale": rng.uniform(20, 400, (rows, columns // 16)).astype(F8),
        f"{name}.weight_scale_2": np.array(3.1e-5, np.float32),
        f"{name}.input_scale": np.array(2.5e-3, np.float32),
    }


def latent_attention(layer: str) -> list[tuple[str, int, int]]:
    return [
        (f"{layer}.self_attn.q_a_proj", 192, HIDDEN),
        (f"{layer}.self_attn.q_b_proj", 384, 192),
        (f"{layer}.self_attn.kv_a_proj_with_mqa", 144, HIDDEN),
        (f"{layer}.self_attn.kv_b_proj", 256, 128),
        (f"{layer}.self_attn.o_proj", HIDDEN, 256),
    ]


def expert_names(parent: str) -> list[tuple[str, int, int]]:
    sizes = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
    return [(f"{parent}.{e}.{leaf}", *size) for e in range(EXPERTS) for leaf, size in sizes.items()]


def deepseek_v3(dtype: Any) -> Model:
    rng = np.random.default_rng(3)
    tensors: Arrays = {"model.embed_tokens.weight": normal(rng, 64, HIDDEN), "lm_head.weight": normal(rng, 64, HIDDEN)}
    weights = 0
    for layer in ("model.layers.3", "model.layers.61"):  # 61 is the MTP layer
        for name, rows, columns in latent_attention(layer) + expert_names(f"{layer}.mlp.experts"):
            tensors |= fp8_block(rng, name, rows, columns, "weight_scale_inv", dtype)
            weights += 1
        tensors[f"{layer}.mlp.gate.weight"] = normal(rng, EXPERTS, HIDDEN)
        tensors[f"{layer}.mlp.gate.e_score_correction_bias"] = rng.normal(0, 1, EXPERTS).astype(np.float32)
        tensors[f"{layer}.input_layernorm.weight"] = normal(rng, HIDDEN)
    tensors["model.layers.61.eh_proj.weight"] = normal(rng, HIDDEN, 2 * HIDDEN)
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    config = {"model_type": "deepseek_v3", "n_routed_experts": EXPERTS, "quantization_config": quantization}
    return Model(tensors, config, {"fp8-block": weights})


def deepseek_v4() -> Model:
    """FP4 experts labelled I8, everything else FP8; E8M0 scales called scale; no model. in front of the names."""
    rng = np.random.default_rng(4)
    tensors: Arrays = {"embed.weight": normal(rng, 64, HIDDEN), "head.weight": normal(rng, 64, HIDDEN)}
    four, eight = 0, 0
    for layer in ("layers.2", "mtp.0"):
        for e in range(EXPERTS):
            for leaf, rows, columns in (("w1", INNER, HIDDEN), ("w2", HIDDEN, INNER), ("w3", INNER, HIDDEN)):
                codes, exponents = mx(rng, rows, columns, 4)
                tensors[f"{layer}.ffn.experts.{e}.{leaf}.weight"] = codes.view(np.int8)
                tensors[f"{layer}.ffn.experts.{e}.{leaf}.scale"] = exponents.view(E8M0)
                four += 1
        for name, rows, columns in (
            ("ffn.shared_experts.w1", INNER, HIDDEN),
            ("ffn.shared_experts.w2", HIDDEN, INNER),
            ("ffn.shared_experts.w3", INNER, HIDDEN),
            ("attn.wq_a", 192, HIDDEN),
            ("attn.wkv", 128, HIDDEN),
            ("attn.wq_b", 512, 192),
            ("attn.wo_a", 256, 128),
            ("attn.wo_b", HIDDEN, 256),
            ("attn.indexer.wq_b", 256, 192),
        ):
            tensors |= fp8_block(rng, f"{layer}.{name}", rows, columns, "scale", E8M0)
            eight += 1
        tensors[f"{layer}.ffn.gate.weight"] = normal(rng, EXPERTS, HIDDEN)
        tensors[f"{layer}.ffn.gate.bias"] = rng.normal(0, 1, EXPERTS).astype(np.float32)
        tensors[f"{layer}.ffn.gate.tid2eid"] = rng.integers(0, EXPERTS, (64, 2)).astype(np.int64)
        tensors[f"{layer}.attn.attn_sink"] = rng.normal(0, 1, 8).astype(np.float32)
        tensors[f"{layer}.attn.indexer.weights_proj.weight"] = normal(rng, 8, HIDDEN)
        tensors[f"{layer}.hc_attn_base"] = rng.normal(0, 1, 24).astype(np.float32)
        tensors[f"{layer}.hc_attn_fn"] = rng.normal(0, 1, (24, HIDDEN)).astype(np.float32)
        tensors[f"{layer}.hc_attn_scale"] = rng.normal(0, 1, 3).astype(np.float32)
        tensors[f"{layer}.attn_norm.scale"] = rng.normal(0, 1, HIDDEN).astype(np.float32)
        tensors[f"{layer}.attn_norm.weight"] = normal(rng, HIDDEN)
        tensors[f"{layer}.gain.scale"] = rng.normal(0, 1, 5).astype(np.float32)
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    }
    config = {"model_type": "deepseek_v4", "n_routed_experts": EXPERTS, "quantization_config": quantization}
    return Model(tensors, config, {"mxfp4": four, "fp8-block": eight})


def minimax_m3() -> Model:
    rng = np.random.default_rng(5)
    tensors: Arrays = {"model.embed_tokens.weight": normal(rng, 64, HIDDEN)}
    names = [
        (f"model.layers.0.block_sparse_moe.experts.{e}.{leaf}", *size)
        for e in range(EXPERTS)
        for leaf, size in {"w1": (INNER, HIDDEN), "w2": (HIDDEN, INNER), "w3": (INNER, HIDDEN)}.items()
    ]
    names += [(f"model.layers.0.self_attn.{leaf}_proj", 256, HIDDEN) for leaf in ("q", "k", "v", "index_q")]
    for name, rows, columns in names:
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"] = mx(rng, rows, columns, 8)
    tensors["model.layers.0.block_sparse_moe.gate.weight"] = normal(rng, EXPERTS, HIDDEN).astype(np.float32)
    tensors["model.layers.0.block_sparse_moe.e_score_correction_bias"] = rng.normal(0, 1, EXPERTS).astype(np.float32)
    config = {
        "model_type": "minimax_m3",
        "num_local_experts": EXPERTS,
        "quantization_config": {"quant_method": "mxfp8"},
    }
    return Model(tensors, config, {"mxfp8": len(names)})


def kimi_k2() -> Model:
    """INT4, offset-binary, the first column in the lowest bits; groups of 32, BF16 scales."""
    rng = np.random.default_rng(6)
    tensors: Arrays = {"language_model.model.layers.1.self_attn.o_proj.weight": normal(rng, HIDDEN, HIDDEN)}
    names = expert_names("language_model.model.layers.1.mlp.experts")
    for name, rows, columns in names:
        tensors[f"{name}.weight_packed"] = rng.integers(-(2**31), 2**31, (rows, columns // 8)).astype(np.int32)
        tensors[f"{name}.weight_scale"] = rng.uniform(1e-3, 4e-3, (rows, columns // 32)).astype(BF16)
        tensors[f"{name}.weight_shape"] = np.array([rows, columns], np.int64)
    arguments = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": arguments, "input_activations": None}},
        "ignore": ["lm_head", "re:.*self_attn.*"],
    }
    config = {"model_type": "kimi_k25", "n_routed_experts": EXPERTS, "quantization_config": quantization}
    return Model(tensors, config, {"int4-g32": len(names)})


def nemotron() -> Model:
    """ModelOpt, mixed: NVFP4 experts without a gate, FP8 per tensor in the mixers, blocks with 4-D scales."""
    rng = np.random.default_rng(7)
    mixer = "backbone.layers.1.mixer"
    tensors: Arrays = {"backbone.embeddings.weight": normal(rng, 64, HIDDEN)}
    for e in range(EXPERTS):
        tensors |= nvfp4(rng, f"{mixer}.experts.{e}.up_proj", INNER, HIDDEN)
        tensors |= nvfp4(rng, f"{mixer}.experts.{e}.down_proj", HIDDEN, INNER)
    for leaf, rows in (("in_proj", 512), ("out_proj", HIDDEN)):
        name = f"backbone.layers.0.mixer.{leaf}"
        tensors[f"{name}.weight"] = rng.normal(0, 60, (rows, HIDDEN)).clip(-440, 440).astype(F8)
        tensors[f"{name}.weight_scale"] = np.array(1.7e-4, np.float32)
        tensors[f"{name}.input_scale"] = np.array(2e-2, np.float32)
    block = fp8_block(rng, "backbone.layers.2.mixer.o_proj", HIDDEN, 384, "weight_scale", np.float32)
    block["backbone.layers.2.mixer.o_proj.weight_scale"] = block["backbone.layers.2.mixer.o_proj.weight_scale"][
        :, None, :, None
    ]
    tensors |= block
    tensors[f"{mixer}.gate.weight"] = normal(rng, EXPERTS, HIDDEN)
    tensors[f"{mixer}.gate.e_score_correction_bias"] = rng.normal(0, 1, EXPERTS).astype(np.float32)
    tensors["backbone.layers.0.mixer.conv1d.weight"] = normal(rng, 64, 1, 4)
    tensors["backbone.layers.0.mixer.A_log"] = rng.normal(0, 1, 8).astype(np.float32)
    tensors["backbone.norm_f.weight"] = normal(rng, HIDDEN)
    config = {
        "model_type": "nemotron_h",
        "n_routed_experts": EXPERTS,
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
    }
    return Model(tensors, config, {"nvfp4-scale2": 2 * EXPERTS, "fp8-tensor": 2, "fp8-block": 1})


def mistral_large() -> Model:
    """Mistral's own names and params.json; FP8 per tensor, static."""
    rng = np.random.default_rng(8)
    tensors: Arrays = {"tok_embeddings.weight": normal(rng, 64, HIDDEN), "output.weight": normal(rng, 64, HIDDEN)}
    names = [
        ("layers.1.attention.wq_a", 192, HIDDEN),
        ("layers.1.attention.wq_b", 384, 192),
        ("layers.1.attention.wkv_a_with_mqa", 144, HIDDEN),
        ("layers.1.attention.wkv_b", 256, 128),
        ("layers.1.attention.wo", HIDDEN, 256),
        ("layers.0.feed_forward.w1", INNER, HIDDEN),
        ("layers.0.feed_forward.w3", INNER, HIDDEN),
        ("layers.1.shared_experts.w2", HIDDEN, INNER),
    ]
    for e in range(EXPERTS):
        for leaf, rows, columns in (("w1", INNER, HIDDEN), ("w2", HIDDEN, INNER), ("w3", INNER, HIDDEN)):
            names.append((f"layers.1.experts.{e}.{leaf}", rows, columns))
    for name, rows, columns in names:
        tensors[f"{name}.weight"] = rng.normal(0, 60, (rows, columns)).clip(-440, 440).astype(F8)
        tensors[f"{name}.qscale_weight"] = np.array(rng.uniform(1e-4, 2e-4), np.float32)
        tensors[f"{name}.qscale_act"] = np.array(2e-2, np.float32)
    tensors["layers.1.gate.weight"] = normal(rng, EXPERTS, HIDDEN)
    tensors["layers.1.attention.kv_fake_quantizer.qscale_act"] = np.array(0.1, np.float32)
    tensors["norm.weight"] = normal(rng, HIDDEN)
    config = {
        "dim": HIDDEN,
        "n_layers": 2,
        "moe": {"num_experts": EXPERTS, "num_shared_experts": 1},
        "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"},
    }
    return Model(tensors, config, {"fp8-tensor": len(names)})


MODELS: dict[str, Callable[[], Model]] = {
    "deepseek-v3": lambda: deepseek_v3(np.float32),
    "deepseek-v3-bf16": lambda: deepseek_v3(BF16),
    "deepseek-v3-e8m0": lambda: deepseek_v3(E8M0),
    "deepseek-v4": deepseek_v4,
    "minimax-m3": minimax_m3,
    "kimi-k2": kimi_k2,
    "nemotron-3": nemotron,
    "mistral-large-3": mistral_large,
}


def written(model: Model, folder: Path) -> Path:
    if "quantization" not in model.config:
        return write(Source({"model.safetensors": model.tensors}, model.config), folder)
    write(Source({"consolidated.safetensors": model.tensors}, model.config), folder)
    (folder / "config.json").rename(folder / "params.json")
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    [file] = [folder / name for name in ("config.json", "params.json") if (folder / name).exists()]
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def quantized_modules(model: Model) -> set[str]:
    scales = ("weight_scale", "weight_scale_inv", "scale", "qscale_weight")
    found = {name.rpartition(".")[0] for name in model.tensors if name.rpartition(".")[2] in scales}
    return {module for module in found if {f"{module}.weight", f"{module}.weight_packed"} & model.tensors.keys()} - {
        module for module in found if model.tensors.get(f"{module}.weight", np.zeros(0)).dtype == BF16
    }


def assert_rest_kept(source: Path, output: Path, modules: set[str]) -> None:
    before, after = read(source), read(output)
    for name, tensor in before.items():
        if name.rpartition(".")[0] not in modules:
            assert after.get(name) == tensor, name


@pytest.mark.parametrize("name", MODELS)
def test_inspect(tmp_path: Path, name: str) -> None:
    model = MODELS[name]()
    found = requant.inspect(written(model, tmp_path / "source")).to_json()
    quantized = {kind: share["weights"] for kind, share in found["formats"].items() if kind.islower()}
    assert quantized == model.formats
    assert found["family"] == model.config.get("model_type", "mistral")
    assert found["classes"]["expert"]["weights"] >= EXPERTS
    assert requant.verify(tmp_path / "source", "data").ok


@pytest.mark.parametrize("name", MODELS)
def test_bf16(tmp_path: Path, name: str) -> None:
    model = MODELS[name]()
    source = written(model, tmp_path / "source")
    requant.convert(source, tmp_path / "out", "BF16")
    before, after = stored(source), stored(tmp_path / "out")
    modules = quantized_modules(model)
    assert len(modules) == sum(model.formats.values())
    for module in modules:
        # Products of float32 scales are rounded once more, to float32, before they are to BF16.
        np.testing.assert_allclose(
            after[module], before[module].astype(BF16).astype(np.float64), 2**-7, 0, err_msg=module
        )
        exact = before[module].astype(np.float32).astype(BF16).astype(np.float64)
        assert np.mean(after[module] != exact) < 1e-3, module
    assert_rest_kept(source, tmp_path / "out", modules)
    assert requant.verify(tmp_path / "out", against=source).problems == []
    assert not config_of(tmp_path / "out").keys() & {"quantization_config", "quantization"}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("scheme", "decibels"), [("FP8_BLOCK", 28.0), ("NVFP4", 16.5)])
def test_to_other_formats(tmp_path: Path, name: str, scheme: str, decibels: float) -> None:
    model = MODELS[name]()
    source = written(model, tmp_path / "source")
    family = "generic" if name.startswith("nemotron") else None
    result = requant.convert(source, tmp_path / "out", scheme, family=family).to_json()
    before, after = stored(source), stored(tmp_path / "out")
    modules = quantized_modules(model)
    for module in modules:
        noise = np.sum((after[module] - before[module]) ** 2)
        assert noise <= np.sum(before[module] ** 2) * 10 ** (-decibels / 10), module
    converted = {name for name, tensor in read(source).items() if read(tmp_path / "out").get(name) != tensor}
    assert_rest_kept(source, tmp_path / "out", {name.rpartition(".")[0] for name in converted})
    assert all(model.tensors[name].ndim == 2 or name.rpartition(".")[0] in modules for name in converted), (
        "only weights change"
    )
    assert result["converted"][scheme] >= len(modules)
    assert requant.verify(tmp_path / "out", "data", against=source).problems == []


def test_deepseek_v4_experts_are_exact_in_nvfp4(tmp_path: Path) -> None:
    model = deepseek_v4()
    source = written(model, tmp_path / "source")
    result = requant.convert(source, tmp_path / "out", "NVFP4", target=[r"re:.*\.experts\."], exact="required")
    assert result.to_json()["routes"] == {"exact": model.formats["mxfp4"]}
    before, after = stored(source), stored(tmp_path / "out")
    for module in quantized_modules(model):
        np.testing.assert_array_equal(after[module], before[module], module)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["expert_dtype"] == "fp4"


def test_deepseek_v4_exponents_stay_exponents(tmp_path: Path) -> None:
    """Experts that stay FP4 take the names and the labels of compressed-tensors; no byte of theirs changes."""
    model = deepseek_v4()
    source = written(model, tmp_path / "source")
    requant.convert(source, tmp_path / "out", "FP8_BLOCK", ignore=[r"re:.*\.experts\."])
    before, after = read(source), read(tmp_path / "out")
    expert, dense = "layers.2.ffn.experts.1.w2", "layers.2.attn.wq_a"
    assert after[f"{expert}.weight_packed"] == before[f"{expert}.weight"]._replace(dtype="U8")
    assert after[f"{expert}.weight_scale"] == before[f"{expert}.scale"]._replace(dtype="U8")
    assert after[f"{dense}.weight_scale"] == before[f"{dense}.scale"]
    assert json.loads((tmp_path / "out" / "config.json").read_text())["expert_dtype"] == "fp4"
    requant.convert(source, tmp_path / "fp8", "FP8_BLOCK")
    assert json.loads((tmp_path / "fp8" / "config.json").read_text())["expert_dtype"] == "fp8"


def test_e8m0_scales_that_a_dialect_cannot_hold(tmp_path: Path) -> None:
    source = written(deepseek_v4(), tmp_path / "source")
    with pytest.raises(requant.CheckpointError) as caught:
        requant.convert(source, tmp_path / "out", "NVFP4", target=[r"re:.*\.experts\."], dialect="modelopt")
    assert {problem.code for problem in caught.value.problems} == {"unknown-format"}


@pytest.mark.parametrize("name", MODELS)
def test_a_part_that_is_missing_or_left_over(tmp_path: Path, name: str) -> None:
    model = MODELS[name]()
    module = min(module for module in quantized_modules(model) if ".experts." in module)
    payload = next(
        f"{module}.{suffix}" for suffix in ("weight", "weight_packed") if f"{module}.{suffix}" in model.tensors
    )
    scale = next(
        part
        for part in model.tensors
        if part.startswith(f"{module}.") and part.endswith(("scale", "_inv", "qscale_weight"))
    )
    for gone, code in ((scale, "missing-part"), (payload, "orphan-part")):
        left = {tensor: value for tensor, value in model.tensors.items() if tensor != gone}
        folder = written(model._replace(tensors=left), tmp_path / code)
        with pytest.raises(requant.CheckpointError) as caught:
            requant.convert(folder, tmp_path / "out", "FP8_BLOCK")
        assert (code, module) in {(problem.code, problem.module) for problem in caught.value.problems}


def test_minimax_exponents_are_read_as_such(tmp_path: Path) -> None:
    """Byte 120 means 2^-7, not 120."""
    model = minimax_m3()
    source = written(model, tmp_path / "source")
    requant.convert(source, tmp_path / "out", "MXFP8")
    name = "model.layers.0.self_attn.q_proj"
    before, after = read(source), read(tmp_path / "out")
    assert after[f"{name}.weight_scale"] == before[f"{name}.weight_scale_inv"]
    assert np.array_equal(array(after[f"{name}.weight"]).view(np.uint8), array(before[f"{name}.weight"]).view(np.uint8))


def test_params_json_is_the_last_file_and_says_what_there_is(tmp_path: Path) -> None:
    source = written(mistral_large(), tmp_path / "source")
    requant.convert(source, tmp_path / "out", "FP8_BLOCK", ignore=["re:.*attention.*"])
    params = json.loads((tmp_path / "out" / "params.json").read_text())
    assert not (tmp_path / "out" / "config.json").exists()
    assert {key: params[key] for key in ("dim", "n_layers", "moe")} == {
        key: mistral_large().config[key] for key in ("dim", "n_layers", "moe")
    }
    assert params["quantization"]["quant_method"] == "compressed-tensors"
    after = read(tmp_path / "out")
    assert after["layers.1.attention.wo.weight_scale"].shape == (1,)
    assert "layers.1.attention.kv_fake_quantizer.qscale_act" in after
    requant.convert(source, tmp_path / "blocks", "FP8_BLOCK")
    ignore = json.loads((tmp_path / "blocks" / "params.json").read_text())["quantization"]["ignore"]

    import re

    def ignored(name: str) -> bool:
        return any(re.match(p[3:], name) if p.startswith("re:") else p == name for p in ignore)

    # The names that vLLM has for them: its mistral_large_3.py maps each.
    assert all(map(ignored, ("lm_head", "model.layers.1.mlp.gate")))
    assert not any(
        map(
            ignored,
            (
                "model.layers.1.self_attn.o_proj",
                "model.layers.1.mlp.experts.0.gate_proj",
                "model.layers.1.mlp.shared_experts.down_proj",
                "model.layers.0.mlp.up_proj",
            ),
        )
    )


@pytest.mark.parametrize("make", [deepseek_v4, lambda: deepseek_v3(E8M0)])
def test_e8m0_blocks_are_not_mislabelled(tmp_path: Path, make: Callable[[], Model]) -> None:
    """FP8 blocks that stay as they are have scales that modelopt has no dtype for."""
    source = written(make(), tmp_path / "source")
    with pytest.raises(requant.CheckpointError) as caught:
        requant.convert(source, tmp_path / "out", "FP8_BLOCK", dialect="modelopt")
    assert {problem.code for problem in caught.value.problems} == {"unknown-format"}
    assert all("compressed-tensors" in problem.remedy for problem in caught.value.problems)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dialect", ["compressed-tensors", "fp8", "modelopt"])
def test_a_vector_called_scale_beside_a_weight_stays_one(tmp_path: Path, dialect: Any) -> None:
    rng = np.random.default_rng(1)
    tensors = {"layers.0.attn.x.weight": normal(rng, 128, 128), "layers.0.attn.x.scale": normal(rng, 128)}
    source = written(Model(tensors, {"model_type": "deepseek_v4"}, {}), tmp_path / "source")
    requant.convert(source, tmp_path / "out", "FP8_BLOCK", dialect=dialect)
    assert read(tmp_path / "out")["layers.0.attn.x.scale"] == read(source)["layers.0.attn.x.scale"]
    assert requant.verify(tmp_path / "out", "data", against=source).ok
    requant.convert(tmp_path / "out", tmp_path / "back", "BF16")
    assert read(tmp_path / "back").keys() == read(source).keys()
