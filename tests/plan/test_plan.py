"""Plans: the published sizes of the real model, and what a recipe converts, keeps and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import requant
from parity.checkpoints import Source, read, write
from requant import demo
from requant.engines.resolver import Resolver

if TYPE_CHECKING:
    from pathlib import Path

BF16 = np.dtype(ml_dtypes.bfloat16)


def plan(src: Path, tmp_path: Path, scheme: str = "FP8_BLOCK", **options: Any) -> dict[str, Any]:
    return requant.convert(src, tmp_path / "unused", scheme, dry_run=True, **options).to_json()


def codes(error: pytest.ExceptionInfo[requant.RequantError]) -> list[str]:
    return [problem.code for problem in error.value.problems]


def checkpoint(folder: Path, tensors: dict[str, Any], config: dict[str, Any] | None = None) -> Path:
    return write(Source({"model.safetensors": tensors}, config or {"model_type": "toy"}), folder)


def weight(*shape: int) -> Any:
    return np.ones(shape, BF16)


def full_size(src: Path, *options: str) -> dict[str, Any]:
    """Plan the conversion of the full-size Kimi-K3 in a process of its own, which must not take over 800 MB."""
    command = [sys.executable, "-m", "requant", "convert", str(src), "/unused", *options, "--dry-run", "--json"]
    script = (
        "import resource, subprocess, sys\n"
        "code = subprocess.call(sys.argv[1:])\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024, file=sys.stderr)\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *command], capture_output=True, text=True, check=True)
    assert int(done.stderr.split()[-1]) < 800e6
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["problems"] == []
    assert (found["bytes_in"], found["tensors_in"]) == (1_560_860_324_864, 497_220)
    return found


def test_full_size_kimi_k3_is_planned_to_its_published_size_in_bounded_memory(full_size_k3: Path) -> None:
    """The figures are the published result of this job: 2.82 TB, 247,759 weights."""
    ignore = [word for pattern in demo.IGNORE for word in ("--ignore", pattern)]
    found = full_size(full_size_k3, "--scheme", "FP8_BLOCK", *ignore)
    assert found["converted"] == {"FP8_BLOCK": 247_759}
    assert found["routes"] == {"exact": 247_296, "reference": 463}
    assert (found["bytes_out"], found["tensors_out"]) == (2_819_870_867_584, 497_683)


@pytest.mark.heavy
def test_full_size_kimi_k3s_experts_become_nvfp4(full_size_k3: Path) -> None:
    """The published W4A4 checkpoint has 1,645.9 GB."""
    found = full_size(full_size_k3, "--scheme", "NVFP4", "--target", r"re:.*\.experts\.\d+\.w[123]$")
    assert (found["converted"], found["routes"]) == ({"NVFP4": 247_296}, {"exact": 247_296})
    assert (found["bytes_out"], found["tensors_out"]) == (1_645_947_954_176, 991_812)


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("recipe", "converted", "kept"),
    [
        ("kimi-k3-fp8-attention-shared", {"FP8_DYNAMIC": 858}, 117),
        ("kimi-k3-fp8-block-vllm", {"FP8_BLOCK": 247_575}, 184),
    ],
)
def test_recipes_convert_what_the_published_checkpoints_do(
    full_size_k3: Path, recipe: str, converted: dict[str, int], kept: int
) -> None:
    """579 weights of attention, 279 of shared experts and the dense layer; or all but the latent projections."""
    found = full_size(full_size_k3, "--recipe", recipe)
    assert found["converted"] == converted
    with_reason = {reason: count for reason, count in found["kept_reasons"].items() if " " in reason}
    assert sum(count for reason, count in with_reason.items() if "ignored" not in reason) == kept


def test_reading_and_writing_add_up(small_k3: Path, tmp_path: Path) -> None:
    found = plan(small_k3, tmp_path, ignore=demo.IGNORE)
    requant.convert(small_k3, tmp_path / "dst", "FP8_BLOCK", ignore=demo.IGNORE)
    assert found["bytes_out"] == sum(len(tensor.data) for tensor in read(tmp_path / "dst").values())
    assert found["bytes_written"] + found["bytes_shared"] == found["bytes_out"]
    assert found["bytes_read"] < found["bytes_in"]
    weights = [name for name in read(small_k3) if name.endswith((".weight", ".weight_packed"))]
    assert found["kept"] + found["converted"]["FP8_BLOCK"] == len(weights)


DEFAULT_KEPT = {
    "model.embed_tokens.weight": "embedding",
    "lm_head.weight": "head",
    "model.layers.0.mlp.gate.weight": "router",
    "model.layers.0.mlp.shared_expert_gate.weight": "router",
    "model.layers.0.input_layernorm.weight": "norm",
    "model.layers.0.self_attn.q_conv1d.weight": "conv",
    "model.layers.0.mlp_res_proj.weight": "one-row",
    "model.layers.0.self_attn.indexer.weights_proj.weight": "indexer",
    "model.layers.1.eh_proj.weight": "mtp",
    "vision_tower.blocks.0.wqkv.weight": "vision",
    "mm_projector.proj.0.weight": "vision",
    "model.layers.0.table.weight": "not-2d",
}


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    tensors = {name: weight(8, 64) for name in DEFAULT_KEPT}
    tensors["model.layers.0.input_layernorm.weight"] = weight(64)
    tensors["model.layers.0.self_attn.q_conv1d.weight"] = weight(8, 1, 4)
    tensors["model.layers.0.mlp_res_proj.weight"] = weight(1, 64)
    tensors["model.layers.0.table.weight"] = weight(2, 8, 64)
    tensors["model.layers.0.self_attn.q_proj.weight"] = weight(64, 64)
    tensors["model.layers.0.mlp.gate_proj.weight"] = weight(16, 64)
    return checkpoint(tmp_path / "toy", tensors, {"model_type": "toy", "num_experts": 8})


def test_what_no_engine_quantizes_is_kept(toy: Path, tmp_path: Path) -> None:
    found = plan(toy, tmp_path)
    assert found["converted"] == {"FP8_BLOCK": 2}
    wanted: dict[str, int] = {}
    for reason in DEFAULT_KEPT.values():
        wanted[reason] = wanted.get(reason, 0) + 1
    assert found["kept_reasons"] == wanted


@pytest.mark.parametrize("target", ["lm_head", "re:.*lm_head"])
def test_a_target_overrides_the_default_keeps_and_says_so(toy: Path, tmp_path: Path, target: str) -> None:
    found = plan(toy, tmp_path, target=[target])
    assert found["converted"] == {"FP8_BLOCK": 1}
    assert any("head" in note for note in found["notes"])


def test_ignore_has_the_last_word(toy: Path, tmp_path: Path) -> None:
    found = plan(toy, tmp_path, target=["Linear", "lm_head"], ignore=["lm_head", "re:.*q_proj"])
    assert found["converted"] == {"FP8_BLOCK": 1}
    assert found["kept_reasons"]["ignore"] == 2


def test_a_router_is_told_by_its_rows(toy: Path, tmp_path: Path) -> None:
    """A `gate` whose rows are not the number of experts is half of a gated MLP."""
    config = json.loads((toy / "config.json").read_text())
    (toy / "config.json").write_text(json.dumps({**config, "num_experts": 16}))
    assert plan(toy, tmp_path)["converted"] == {"FP8_BLOCK": 3}


def test_an_ignore_that_matches_nothing_is_a_note(toy: Path, tmp_path: Path) -> None:
    found = plan(toy, tmp_path, ignore=["re:.*nowhere.*", "lm_head"])
    assert [note for note in found["notes"] if "matches nothing" in note] == ["ignore 're:.*nowhere.*' matches nothing"]


def test_an_ignore_shadowed_by_another_is_no_note(toy: Path, tmp_path: Path) -> None:
    assert not any("nothing" in note for note in plan(toy, tmp_path, ignore=["re:.*lm_.*", "lm_head"])["notes"])


def test_a_target_that_matches_nothing_is_a_problem(toy: Path, tmp_path: Path) -> None:
    with pytest.raises(requant.CheckpointError) as error:
        plan(toy, tmp_path, target=["re:.*q_proj", "nowhere"])
    assert codes(error) == ["target-matches-nothing"]


def test_a_literal_target_that_is_not_2d_is_a_problem(toy: Path, tmp_path: Path) -> None:
    with pytest.raises(requant.CheckpointError) as error:
        plan(toy, tmp_path, target=["Linear", "model.layers.0.table"])
    assert codes(error) == ["not-2d"]
    assert error.value.problems[0].module == "model.layers.0.table"


def test_every_bad_word_of_a_call_is_listed(toy: Path, tmp_path: Path) -> None:
    with pytest.raises(requant.CallError) as error:
        plan(toy, tmp_path, scheme="FP9", ignore=["re:(", "re:["], exact="perhaps")
    assert codes(error) == ["bad-option", "bad-option", "bad-pattern", "bad-pattern"]


def test_a_scale_rule_that_a_scheme_has_no_use_for_is_a_note(toy: Path, tmp_path: Path) -> None:
    def said(scheme: str, scale: str) -> bool:
        return any("--scale" in note for note in plan(toy, tmp_path, scheme, scale=scale, family="generic")["notes"])

    assert said("NVFP4", "pow2") and said("FP8", "mse")
    assert not said("NVFP4", "mse") and not said("FP8", "pow2") and not said("FP8_BLOCK", "mse")


@pytest.mark.parametrize(
    ("scheme", "dialect"), [("MXFP8A16", "modelopt"), ("FP8_DYNAMIC", "modelopt"), ("NVFP4", "fp8")]
)
def test_a_scheme_that_a_dialect_cannot_say_is_refused(toy: Path, tmp_path: Path, scheme: str, dialect: str) -> None:
    with pytest.raises(requant.CallError, match="has no way to write"):
        plan(toy, tmp_path, scheme, dialect=dialect)


def test_a_group_that_cannot_move_exactly_together_is_not_rounded_where_that_is_refused(tmp_path: Path) -> None:
    bytes_ = np.zeros((128, 32), np.uint8)
    tensors = {
        "model.layers.0.mlp.gate_proj.weight_packed": bytes_,
        "model.layers.0.mlp.gate_proj.weight_scale": bytes_[:, :2],
        "model.layers.0.mlp.up_proj.weight": weight(128, 64),
    }
    folder = checkpoint(tmp_path / "src", tensors, {"model_type": "llama"})
    assert plan(folder, tmp_path, "NVFP4")["routes"] == {"reference": 2}
    with pytest.raises(requant.CheckpointError, match="fused group") as error:
        plan(folder, tmp_path, "NVFP4", exact="required")
    assert [problem.module for problem in error.value.problems] == ["model.layers.0.mlp.gate_proj"]


def test_every_broken_weight_is_listed_at_once(tmp_path: Path) -> None:
    fp8 = np.zeros((128, 128), ml_dtypes.float8_e4m3fn)
    tensors = {
        "a.weight": fp8,
        "b.weight_scale": weight(4, 1),
        "c.weight_packed": np.zeros((4, 16), np.uint8),
        "d.weight_packed": np.zeros((4, 16), np.int32),
        "d.weight_scale": weight(4, 4),
        "d.weight_shape": np.zeros(2, np.int64),
        "fine.weight": weight(64, 64),
    }
    with pytest.raises(requant.CheckpointError) as error:
        plan(checkpoint(tmp_path / "src", tensors), tmp_path)
    found = {problem.module: problem.code for problem in error.value.problems}
    assert found == {"a": "missing-part", "b": "orphan-part", "c": "missing-part", "d": "unknown-format"}
    assert all("model.safetensors" in problem.message for problem in error.value.problems)


def test_a_columns_count_that_a_format_cannot_group_is_a_problem(tmp_path: Path) -> None:
    src = checkpoint(tmp_path / "src", {"m.a.weight": weight(8, 48), "m.b.weight": weight(8, 64)})
    with pytest.raises(requant.CheckpointError) as error:
        plan(src, tmp_path, scheme="MXFP4A16")
    assert [(problem.code, problem.module) for problem in error.value.problems] == [("indivisible", "m.a")]
    assert plan(src, tmp_path, scheme="MXFP4A16", ignore=["m.a"])["converted"] == {"MXFP4A16": 1}


def test_a_config_that_is_missing_or_broken_is_refused(tmp_path: Path) -> None:
    src = checkpoint(tmp_path / "src", {"m.a.weight": weight(8, 64)})
    for text in ("{", "[]", '{"a": 1, "a": 2}'):
        (src / "config.json").write_text(text)
        with pytest.raises(requant.CheckpointError):
            plan(src, tmp_path)
    (src / "config.json").unlink()
    with pytest.raises(requant.CheckpointError, match=r"config\.json"):
        plan(src, tmp_path)


def test_a_config_that_disagrees_with_the_tensors_is_a_note(small_k3: Path, tmp_path: Path) -> None:
    """Kimi-K3's own config forgets its latent projections, residual projections, routers and embeddings."""
    notes = plan(small_k3, tmp_path, ignore=demo.IGNORE)["notes"]
    assert any("config.json counts 24 weights as quantized that are stored unquantized" in note for note in notes)


def test_a_quantized_weight_that_stays_keeps_its_format_in_the_config(small_k3: Path, tmp_path: Path) -> None:
    result = requant.convert(
        small_k3, tmp_path / "unused", "FP8_DYNAMIC", ignore=["re:.*experts.[0-9].*", *demo.IGNORE], dry_run=True
    )
    config = json.loads(result.plan.files["config.json"])["quantization_config"]
    assert config["format"] == "mixed-precision"
    formats = {group["format"]: group["input_activations"] for group in config["config_groups"].values()}
    assert formats["mxfp4-pack-quantized"] is None
    assert formats["float-quantized"]["strategy"] == "token"


def test_a_3d_expert_bank_is_refused_unless_ignored_and_then_described(tmp_path: Path) -> None:
    """Kept in silence, it would be taken by engines for what the config says of every Linear."""
    bank = "model.layers.0.mlp.experts.gate_up_proj"
    src = checkpoint(tmp_path / "src", {bank: weight(4, 16, 64), "model.layers.0.o_proj.weight": weight(8, 64)})
    with pytest.raises(requant.CheckpointError) as error:
        plan(src, tmp_path)
    assert [(problem.code, problem.module) for problem in error.value.problems] == [("unknown-format", bank)]
    result = requant.convert(src, tmp_path / "unused", "FP8_BLOCK", ignore=["re:.*experts.*"], dry_run=True)
    config = json.loads(result.plan.files["config.json"])["quantization_config"]
    for expert in ("experts.0.gate_proj", "experts.3.up_proj"):
        assert Resolver(config)(f"model.layers.0.mlp.{expert}") is None
    assert Resolver(config)("model.layers.0.o_proj") == "group_0"


def test_a_tied_head_without_a_tensor_is_not_called_quantized(tmp_path: Path) -> None:
    """transformers builds an lm_head for it, and would wait for its scale."""
    src = checkpoint(tmp_path / "src", {"model.layers.0.o_proj.weight": weight(8, 64)})
    result = requant.convert(src, tmp_path / "unused", "FP8_BLOCK", dry_run=True)
    config = json.loads(result.plan.files["config.json"])["quantization_config"]
    assert Resolver(config)("lm_head") is None
    assert Resolver(config)("language_model.lm_head") is None
    assert Resolver(config)("model.layers.0.o_proj") == "group_0"


def int2_part(rows: int, columns: int) -> dict[str, Any]:
    return {
        "weight_packed": np.zeros((rows, columns // 16), np.int32),
        "weight_scale": weight(rows, columns // 32),
        "weight_g_idx": np.zeros(columns, np.int32),
    }


INT2_WEIGHTS = {"num_bits": 2, "type": "int", "strategy": "group", "group_size": 32}


def int2_checkpoint(folder: Path, quantization: dict[str, Any]) -> Path:
    expert = "model.layers.0.mlp.experts.0.up_proj"
    tensors = {f"{expert}.{name}": array for name, array in int2_part(8, 64).items()}
    tensors["model.layers.0.self_attn.q_proj.weight"] = weight(64, 64)
    return checkpoint(folder, tensors, {"model_type": "toy", "quantization_config": quantization})


@pytest.mark.parametrize("per_group", [True, False])
def test_a_weight_of_an_unknown_format_stays_with_the_group_that_its_source_gives_it(
    tmp_path: Path, per_group: bool
) -> None:
    group: dict[str, Any] = {"targets": ["re:.*experts.*"], "weights": INT2_WEIGHTS, "input_activations": None}
    quantization = {"quant_method": "compressed-tensors", "config_groups": {"int2": group}, "ignore": []}
    (group if per_group else quantization)["format"] = "pack-quantized"
    src = int2_checkpoint(tmp_path / "src", quantization)
    with pytest.raises(requant.CheckpointError, match="unknown-format"):
        plan(src, tmp_path)
    result = requant.convert(src, tmp_path / "unused", "FP8_BLOCK", ignore=["re:.*experts.*"], dry_run=True)
    config = json.loads(result.plan.files["config.json"])["quantization_config"]
    name = Resolver(config)("model.layers.0.mlp.experts.0.up_proj")
    assert name is not None
    assert config["config_groups"][name]["format"] == "pack-quantized"
    assert config["config_groups"][name]["weights"] == INT2_WEIGHTS


def test_a_weight_of_an_unknown_format_that_no_config_describes_cannot_stay(tmp_path: Path) -> None:
    src = int2_checkpoint(tmp_path / "src", {"quant_method": "other"})
    with pytest.raises(requant.CheckpointError) as error:
        plan(src, tmp_path, ignore=["re:.*experts.*"])
    assert codes(error) == ["unknown-format"]


@pytest.mark.parametrize(
    "broken",
    [
        [],
        {"ignore": "lm_head"},
        {"ignore": [1]},
        {"config_groups": [1]},
        {"config_groups": {"g": None}},
        {"config_groups": {"g": {"targets": [3]}}},
        {"config_groups": {"g": {"targets": ["Linear"], "weights": 8}}},
        {"config_groups": {"g": {"targets": ["re:("], "weights": {}}}},
    ],
)
def test_a_malformed_quantization_config_is_named_not_stumbled_over(tmp_path: Path, broken: Any) -> None:
    if isinstance(broken, dict):
        broken["quant_method"] = "compressed-tensors"
    config = {"model_type": "toy", "quantization_config": broken}
    src = checkpoint(tmp_path / "src", {"m.a.weight": weight(8, 64)}, config)
    with pytest.raises(requant.CheckpointError) as error:
        plan(src, tmp_path)
    assert codes(error) == ["header-invalid"]
    assert requant.inspect(src).tensors == 1
    assert not requant.verify(src).ok


def test_weights_that_are_selected_and_already_there_get_the_schemes_activations(tmp_path: Path) -> None:
    group = {"targets": ["Linear"], "weights": {}, "input_activations": None}
    quantization = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    tensors = {
        "layers.0.q_proj.weight": np.zeros((128, 128), ml_dtypes.float8_e4m3fn),
        "layers.0.q_proj.weight_scale": weight(1, 1),
        "layers.0.o_proj.weight": weight(8, 64),
    }
    src = checkpoint(tmp_path / "src", tensors, {"model_type": "toy", "quantization_config": quantization})
    for ignore, activations in (([], [True]), (["re:.*q_proj"], [True, False])):
        result = requant.convert(src, tmp_path / "unused", "FP8_BLOCK", ignore=ignore, dry_run=True)
        groups = json.loads(result.plan.files["config.json"])["quantization_config"]["config_groups"].values()
        assert sorted((g["input_activations"] is not None for g in groups), reverse=True) == activations


def test_the_text_model_says_in_which_dtype_a_model_computes(tmp_path: Path) -> None:
    tensors = {
        "layers.0.q_proj.weight": np.zeros((128, 128), ml_dtypes.float8_e4m3fn),
        "layers.0.q_proj.weight_scale": weight(128, 1),
    }
    config = {"vision_config": {"dtype": "float32"}, "text_config": {"dtype": "bfloat16"}}
    src = checkpoint(tmp_path / "src", tensors, config)
    requant.convert(src, tmp_path / "dst", "FP8_BLOCK")
    assert read(tmp_path / "dst")["layers.0.q_proj.weight_scale"].dtype == "BF16"


def test_a_dry_run_says_what_would_keep_the_job_from_starting(small_k3: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    notes = requant.convert(small_k3, tmp_path, "FP8_BLOCK", dry_run=True).to_json()["notes"]
    assert any("neither empty nor" in note for note in notes)


def test_tensors_of_other_dtypes_that_stay_anyway_are_no_obstacle(tmp_path: Path) -> None:
    tensors = {
        "ids.weight": np.arange(4),
        "model.norm.weight": np.ones(4, np.float64),
        "model.embed_tokens.weight": np.ones((4, 4), np.int8),
        "model.layers.0.o_proj.weight": weight(8, 64),
    }
    assert plan(checkpoint(tmp_path / "src", tensors), tmp_path)["converted"] == {"FP8_BLOCK": 1}
    tensors["model.layers.0.table.weight"] = np.ones((4, 4), np.int8)
    with pytest.raises(requant.CheckpointError, match="missing-part"):
        plan(checkpoint(tmp_path / "other", tensors), tmp_path)


@pytest.mark.parametrize("name", ["x." * 300 + "weight", "a" * 600 + ".weight"])
def test_names_without_end_are_hostile(tmp_path: Path, name: str) -> None:
    src = checkpoint(tmp_path / "src", {name: weight(8, 64)})
    with pytest.raises(requant.CheckpointError) as error:
        plan(src, tmp_path)
    assert codes(error) == ["name-hostile"]


def test_a_name_that_repeats_what_engines_rename_is_planned(tmp_path: Path) -> None:
    src = checkpoint(tmp_path / "src", {"layers.0." + "block_sparse_moe." * 24 + "x.weight": weight(8, 64)})
    assert plan(src, tmp_path)["converted"] == {"FP8_BLOCK": 1}


@pytest.mark.parametrize(
    "words", [{"ignore": [3]}, {"target": [None]}, {"scheme": ["FP8_BLOCK"]}, {"workers": 1.5}, {"workers": 0}]
)
def test_words_of_the_wrong_type_are_the_calls_fault(toy: Path, tmp_path: Path, words: dict[str, Any]) -> None:
    with pytest.raises(requant.CallError):
        plan(toy, tmp_path, **words)
    assert plan(toy, tmp_path, ignore=None, target=None)["ok"]


@pytest.mark.parametrize("kind", ["file", "below a file", "dangling link", "loop"])
def test_a_destination_that_can_never_be_a_folder(toy: Path, tmp_path: Path, kind: str) -> None:
    dst = tmp_path / "dst"
    if kind in ("file", "below a file"):
        dst.write_text("x")
        dst = dst / "below" if kind == "below a file" else dst
    else:
        dst.symlink_to(dst if kind == "loop" else tmp_path / "nowhere")
    assert any("bad-destination" in n for n in requant.convert(toy, dst, "FP8_BLOCK", dry_run=True).to_json()["notes"])
    with pytest.raises(requant.CallError, match="bad-destination"):
        requant.convert(toy, dst, "FP8_BLOCK")


@pytest.mark.parametrize("scheme", ["W4A16_G640", "W4A16_ASYM_G640"])
def test_integers_whose_group_is_the_whole_row_are_not_rounded_twice(tmp_path: Path, scheme: str) -> None:
    values = (np.random.default_rng(0).standard_normal((64, 640)) * 0.02).astype(BF16)
    src = checkpoint(tmp_path / "src", {"m.weight": values})
    requant.convert(src, tmp_path / "one", scheme, scale="mse")
    again = requant.convert(tmp_path / "one", tmp_path / "two", scheme).to_json()
    assert again["kept_reasons"] == {f"already-{scheme}": 1}
    assert read(tmp_path / "one") == read(tmp_path / "two")
