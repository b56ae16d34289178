"""What an engine reads from the configs of the dialects modelopt and fp8, and of mixed schemes.

The readers here follow vLLM's rules: ``ignore`` is matched as globs and as parts of names, a fused layer is asked for
by its own name, routed experts by that of their block.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import requant
from parity.checkpoints import Source, read, write
from requant.checkpoint.checkpoint import open_checkpoint
from requant.engines.names import name_variants
from requant.engines.resolver import Resolver
from requant.plan.plan import make_plan
from requant.recipe.patterns import compile_patterns
from requant.recipe.recipe import Recipe, Rule
from requant.schemes import SCHEMES

if TYPE_CHECKING:
    from pathlib import Path

EXPERTS = r"re:.*experts\.\d+\..*"
KDA = ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj")
MLA = ("q_a_proj", "kv_a_proj_with_mqa", "g_proj")
LAYERS = {
    # what vLLM asks for below a layer of the small Kimi-K3 → the modules on disk that it is made of
    0: {"self_attn.in_proj_qkvgfab": KDA, "mlp.gate_up_proj": ("gate_proj", "up_proj"), "mlp.down_proj": ()},
    1: {"self_attn.in_proj_qkvgfab": KDA, "self_attn.f_b_proj": (), "self_attn.o_proj": ()},
    3: {
        "self_attn.fused_qkv_a_g_proj": MLA,
        "self_attn.q_b_proj": (),
        "self_attn.kv_b_proj": (),
        "self_attn.o_proj": (),
    },
}
MOE = {
    "gate": (),
    "experts": ("experts.0.w1",),
    "routed_expert_down_proj": (),
    "shared_experts.gate_up_proj": ("gate_proj", "up_proj"),
    "shared_experts.down_proj": (),
}
ROOTS = ("language_model.model.", "model.", "layers.", "language_model.", "model.language_model.")


@pytest.fixture(scope="module")
def bf16_k3(small_k3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bf16") / "k3"
    requant.convert(small_k3, folder, "BF16")
    return folder


def questions() -> Iterator[tuple[str, str]]:
    """Yield the names by which an engine asks for a layer, and a module on disk that is in it."""
    for number, layers in LAYERS.items():
        asked = dict(layers)
        if number:
            asked |= {f"block_sparse_moe.{name}": members for name, members in MOE.items()}
        for name, members in asked.items():
            parent, _, leaf = name.rpartition(".")
            disk = f"{parent}.{members[0] if members else leaf}"
            for root in ROOTS:
                for container in ("block_sparse_moe", "mlp"):
                    path = f"layers.{number}.{name.replace('block_sparse_moe', container)}"
                    prefix = "" if root == "layers." else root
                    yield prefix + path, f"language_model.model.layers.{number}.{disk}"
    for head in ("lm_head", "language_model.lm_head"):
        yield head, "language_model.lm_head"
    for name in ("mm_projector.proj.0", "mm_projector.linear_1"):
        yield name, "mm_projector.proj.0"
    yield "vision_tower.encoder.blocks.0.wqkv", "vision_tower.encoder.blocks.0.wqkv"


def modelopt_reader(config: Mapping[str, Any], asked: str) -> str | None:
    """Return the algorithm that vLLM gives a layer."""
    for exclude in config.get("ignore", config.get("exclude_modules")):
        if exclude in asked or fnmatchcase(asked, exclude):
            return None
    if config["quant_algo"] != "MIXED_PRECISION":
        return str(config["quant_algo"])
    layers = config["quantized_layers"]
    return layers[asked]["quant_algo"] if asked in layers else None


def check_modelopt(folder: Path, algorithms: Mapping[str, str]) -> dict[str, Any]:
    """Ask both forms of a config for everything; the tensors on disk say what is right. Return the new form."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    legacy = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    assert {"quant_algo", "kv_cache_quant_algo", "exclude_modules"} <= legacy.keys()
    suffixes: dict[str, set[str]] = {}
    for name in read(folder):
        module, _, suffix = name.rpartition(".")
        suffixes.setdefault(module, set()).add(suffix)
    asked = 0
    for name, module in questions():
        parts = suffixes[module]
        stored = "NVFP4" if "weight_scale_2" in parts else "FP8" if "weight_scale" in parts else None
        wanted = algorithms[stored] if stored else None
        assert modelopt_reader(config, name) == wanted, name
        assert modelopt_reader(legacy, name) == wanted, name
        asked += 1
    assert asked > 200
    for module, parts in suffixes.items():
        if "weight" in parts and ".experts." not in module:
            for name in name_variants(module):
                excluded = any(fnmatchcase(name, glob) for glob in config["ignore"])
                assert not (excluded and "weight_scale" in parts), name
    return config


MODELOPT = [
    ("NVFP4", [], "NVFP4"),
    ("NVFP4A16", ["re:.*self_attn.*"], "W4A16_NVFP4"),
    ("NVFP4", [EXPERTS], "NVFP4"),
    ("FP8", ["re:.*shared_experts.*", "re:.*layers.0.mlp.*"], "FP8"),
    ("FP8_BLOCK", ["re:.*(o|kv_b)_proj"], "FP8_PB_WO"),
    ("MXFP8", ["re:.*routed_expert_.*"], "MXFP8"),
    ("NVFP4", [r"re:.*layers\.[13]\..*"], "NVFP4"),  # a template that is converted in some layers only
    ("NVFP4", [r"re:.*layers\.[13]\..*experts\.\d+\..*"], "NVFP4"),
]


@pytest.mark.parametrize(("scheme", "ignore", "algorithm"), MODELOPT)
def test_modelopt_of_one_algorithm(
    bf16_k3: Path, tmp_path: Path, scheme: str, ignore: list[str], algorithm: str
) -> None:
    requant.convert(bf16_k3, tmp_path / "dst", scheme, ignore=ignore, dialect="modelopt")
    config = check_modelopt(tmp_path / "dst", {"NVFP4": algorithm, "FP8": algorithm})
    assert config["quant_method"] == "modelopt"
    assert config["quant_algo"] == algorithm
    assert config.get("group_size") == {"NVFP4": 16, "W4A16_NVFP4": 16, "MXFP8": 32}.get(algorithm)


@pytest.mark.parametrize(
    ("scheme", "target", "algorithm"),
    [
        ("FP8_BLOCK", "re:.*self_attn.*_proj", "FP8_PB_WO"),
        ("FP8", "re:.*self_attn.*_proj", "FP8"),
        ("FP8", "re:.*shared_experts.*", "FP8"),
        ("FP8_BLOCK", r"re:.*layers\.3\..*self_attn.*_proj", "FP8_PB_WO"),
    ],
)
def test_modelopt_of_kept_nvfp4_and_new_fp8_is_mixed(
    small_k3: Path, tmp_path: Path, scheme: str, target: str, algorithm: str
) -> None:
    requant.convert(small_k3, tmp_path / "nvfp4", "NVFP4", target=[EXPERTS], dialect="modelopt")
    requant.convert(tmp_path / "nvfp4", tmp_path / "dst", scheme, target=[target], dialect="modelopt")
    config = check_modelopt(tmp_path / "dst", {"NVFP4": "NVFP4", "FP8": algorithm})
    assert (config["quant_method"], config["quant_algo"]) == ("modelopt_mixed", "MIXED_PRECISION")
    assert config["group_size"] == 16
    layers = config["quantized_layers"]
    for root in ("language_model.model.", "model.", ""):
        for container in ("block_sparse_moe", "mlp"):
            for name in ("experts", "experts.0.w1", "experts.0.gate_proj", "experts.0.down_proj"):
                assert layers[f"{root}layers.1.{container}.{name}"] == {"quant_algo": "NVFP4", "group_size": 16}
    assert requant.verify(tmp_path / "dst", "data").ok


def test_modelopt_mixes_mxfp8_and_fp8(bf16_k3: Path, tmp_path: Path) -> None:
    requant.convert(bf16_k3, tmp_path / "mxfp8", "MXFP8", target=["re:.*shared_experts.*"], dialect="modelopt")
    requant.convert(tmp_path / "mxfp8", tmp_path / "dst", "FP8", target=["re:.*o_proj"], dialect="modelopt")
    config = json.loads((tmp_path / "dst" / "config.json").read_text())["quantization_config"]
    layers = config["quantized_layers"]
    assert config["quant_method"] == "modelopt_mixed" and "group_size" not in config
    shared = "model.layers.1.mlp.shared_experts."
    assert layers[shared + "gate_up_proj"] == layers[shared + "up_proj"] == {"quant_algo": "MXFP8", "group_size": 32}
    assert layers["model.layers.1.self_attn.o_proj"] == {"quant_algo": "FP8"}


def test_block_scales_have_four_dimensions_in_modelopt(bf16_k3: Path, tmp_path: Path) -> None:
    for dialect in ("modelopt", "compressed-tensors"):
        requant.convert(bf16_k3, tmp_path / dialect, "FP8_BLOCK", dialect=dialect, arithmetic="float32")
    ours, plain = read(tmp_path / "modelopt"), read(tmp_path / "compressed-tensors")
    scales = [name for name in ours if name.endswith("weight_scale")]
    for name in scales:
        rows, columns = plain[name].shape
        assert ours[name].dtype == "F32" and ours[name].shape == (rows, 1, columns, 1)
        assert ours[name].data == plain[name].data
    assert len(scales) > 100


def test_a_stale_hf_quant_config_goes_and_a_new_one_comes(bf16_k3: Path, tmp_path: Path) -> None:
    requant.convert(bf16_k3, tmp_path / "nvfp4", "NVFP4", dialect="modelopt")
    stale = (tmp_path / "nvfp4" / "hf_quant_config.json").read_text()
    requant.convert(tmp_path / "nvfp4", tmp_path / "again", "FP8", dialect="modelopt")
    fresh = json.loads((tmp_path / "again" / "hf_quant_config.json").read_text())
    assert fresh["quantization"]["quant_algo"] == "FP8" and "NVFP4" in stale
    for place, (scheme, dialect) in enumerate(
        [("NVFP4", "compressed-tensors"), ("FP8_BLOCK", "fp8"), ("BF16", "compressed-tensors")]
    ):
        requant.convert(tmp_path / "nvfp4", tmp_path / str(place), scheme, dialect=dialect)
        assert not (tmp_path / str(place) / "hf_quant_config.json").exists()


@pytest.mark.parametrize(
    "ignore", [[], ["re:.*self_attn.*"], [EXPERTS], [r"re:.*layers\.[13]\..*"], ["re:.*shared_experts.*"]]
)
def test_fp8_lists_what_is_not_converted_by_every_name(bf16_k3: Path, tmp_path: Path, ignore: list[str]) -> None:
    requant.convert(bf16_k3, tmp_path / "dst", "FP8_BLOCK", dialect="fp8", ignore=ignore)
    config = json.loads((tmp_path / "dst" / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["weight_block_size"]) == ("fp8", [128, 128])
    kept = set(config["modules_to_not_convert"])
    stored = read(tmp_path / "dst")
    linears = 0
    for name, tensor in stored.items():
        module, _, suffix = name.rpartition(".")
        if suffix == "weight" and len(tensor.shape) == 2:
            converted = f"{module}.weight_scale_inv" in stored
            assert all((variant in kept) != converted for variant in name_variants(module)), module
            linears += 1
    assert linears > 100
    for number in (1, 2, 3, 4):  # vLLM looks for the experts' block within the listed names
        block = f"model.layers.{number}.block_sparse_moe.experts"
        converted = f"language_{block.replace('model.', 'model.model.', 1)}.0.w1.weight_scale_inv" in stored
        assert any(block in name for name in kept) != converted


def test_several_rules_make_one_mixed_config(small_k3: Path) -> None:
    """The published upgrade of Kimi-K3: NVFP4 experts, FP8 attention, the rest as it is."""
    attention = r"re:.*self_attn\.(q|k|v|g|b|f_a|f_b|q_a|q_b|kv_a)_proj(_with_mqa)?$"
    shared = r"re:.*(shared_experts|layers\.0\.mlp)\.(gate|up|down)_proj$"
    rules = (
        Rule(compile_patterns([EXPERTS]), SCHEMES["NVFP4"]),
        Rule(compile_patterns([attention]), SCHEMES["FP8_DYNAMIC"]),
        Rule(compile_patterns([shared]), SCHEMES["W4A16"]),
        Rule(compile_patterns(["Linear"]), None, reason="ignore"),
    )
    with open_checkpoint(small_k3) as checkpoint:
        plan = make_plan(checkpoint, Recipe(rules))
    assert plan.problems == []
    config = json.loads(plan.files["config.json"])
    quantization = config["quantization_config"]
    assert config["text_config"]["quantization_config"] == quantization
    assert quantization["format"] == "mixed-precision"
    formats = {name: group["format"] for name, group in quantization["config_groups"].items()}
    assert list(formats) == ["group_0", "group_1", "group_2"]
    assert set(formats.values()) == {"nvfp4-pack-quantized", "float-quantized", "pack-quantized"}
    resolve = Resolver(quantization)
    wanted = {"NVFP4": "nvfp4-pack-quantized", "FP8_DYNAMIC": "float-quantized", "W4A16": "pack-quantized"}
    converted = {job.weight.module: job.kind.target.scheme.name for job in plan.jobs()}
    assert len(converted) == 96 + 2 * 4 + 3 * 7 + 4 * 3 + 3
    with open_checkpoint(small_k3) as checkpoint:
        names = {tensor.name.rpartition(".")[0] for shard in checkpoint.shards for tensor in shard.tensors}
    for module in names:
        if module.endswith(("conv1d", "norm", "layernorm")) or "." not in module:
            continue
        for name in name_variants(module):
            group = resolve(name)
            assert (formats[group] if group else None) == wanted.get(converted.get(module, "")), name


def test_rules_that_tear_a_group_apart_are_a_problem(small_k3: Path) -> None:
    rules = (
        Rule(compile_patterns([r"re:.*self_attn\.q_proj$"]), SCHEMES["FP8_BLOCK"]),
        Rule(compile_patterns([r"re:.*self_attn\.(k|v|g|b|f_a)_proj$"]), SCHEMES["FP8_DYNAMIC"]),
    )
    with open_checkpoint(small_k3) as checkpoint:
        plan = make_plan(checkpoint, Recipe(rules))
    assert {problem.code for problem in plan.problems} == {"fused-split"}
    message = plan.problems[0].message
    assert "q_proj: FP8_BLOCK" in message and "k_proj: FP8_DYNAMIC" in message


# BF16


def test_bf16_takes_the_config_away_wherever_it_is(small_k3: Path, bf16_k3: Path, tmp_path: Path) -> None:
    config = json.loads((bf16_k3 / "config.json").read_text())
    assert "quantization_config" not in config and "quantization_config" not in config["text_config"]
    source = json.loads((small_k3 / "config.json").read_text())
    del source["text_config"]["quantization_config"]
    assert config == source
    assert {tensor.dtype for tensor in read(bf16_k3).values()} == {"BF16", "F32"}
    assert requant.compare(small_k3, bf16_k3).exact
    for scheme, dialect in (("NVFP4", "modelopt"), ("FP8_BLOCK", "fp8"), ("W8A8", "compressed-tensors")):
        requant.convert(bf16_k3, tmp_path / scheme, scheme, dialect=dialect)
        requant.convert(tmp_path / scheme, tmp_path / f"{scheme}.bf16", "BF16")
        assert "quantization_config" not in (tmp_path / f"{scheme}.bf16" / "config.json").read_text()
        assert requant.verify(tmp_path / f"{scheme}.bf16", "data").ok


@pytest.mark.parametrize("dialect", ["compressed-tensors", "modelopt"])
def test_bf16_of_a_part_leaves_a_config_for_the_rest(bf16_k3: Path, tmp_path: Path, dialect: str) -> None:
    requant.convert(bf16_k3, tmp_path / "nvfp4", "NVFP4", dialect=dialect)
    requant.convert(tmp_path / "nvfp4", tmp_path / "dst", "BF16", ignore=[EXPERTS], dialect=dialect)
    config = json.loads((tmp_path / "dst" / "config.json").read_text())["quantization_config"]
    if dialect == "modelopt":
        check_modelopt(tmp_path / "dst", {"NVFP4": "NVFP4"})
    else:
        resolve = Resolver(config)
        stored = read(tmp_path / "dst")
        for module in {name.rpartition(".")[0] for name in stored if name.endswith("_proj.weight")}:
            assert all(resolve(name) is None for name in name_variants(module)), module
        packed = {name.rpartition(".")[0] for name in stored if name.endswith(".weight_packed")}
        assert len(packed) == 96
        for module in packed:
            assert all(resolve(name) == "group_0" for name in name_variants(module)), module
        assert config["config_groups"]["group_0"]["input_activations"]["dynamic"] == "local"
    assert requant.verify(tmp_path / "dst", "data").ok


def test_bf16_by_one_member_of_a_group_is_refused(bf16_k3: Path, tmp_path: Path) -> None:
    requant.convert(bf16_k3, tmp_path / "fp8", "FP8_DYNAMIC")
    with pytest.raises(requant.CheckpointError) as caught:
        requant.convert(tmp_path / "fp8", tmp_path / "dst", "BF16", ignore=["re:.*shared_experts.gate_proj"])
    assert {problem.code for problem in caught.value.problems} == {"fused-split"}


def test_a_config_under_both_roots_and_with_f16_scales_goes_too(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        "model.layers.0.mlp.down_proj.weight": rng.standard_normal((32, 32)).astype(ml_dtypes.float8_e4m3fn),
        "model.layers.0.mlp.down_proj.weight_scale": np.ones((32, 1), np.float16),
    }
    stale = {"quant_method": "compressed-tensors", "config_groups": {}, "ignore": []}
    config = {
        "model_type": "llama",
        "quantization_config": stale,
        "text_config": {"quantization_config": stale, "a": 1},
    }
    src = write(Source({"model.safetensors": tensors}, config), tmp_path / "src")
    requant.convert(src, tmp_path / "dst", "BF16")
    assert json.loads((tmp_path / "dst" / "config.json").read_text()) == {
        "model_type": "llama",
        "text_config": {"a": 1},
    }
