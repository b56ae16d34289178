"""Checkpoints that keep all experts of a layer in one tensor, with their models' real names, written from the facts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import requant
from parity.checkpoints import Source, read, write
from stored_values import array, stored

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    Arrays = dict[str, NDArray[Any]]

BF16, F8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
EXPERTS, HIDDEN, INNER = 4, 128, 192
SHARD = "model.safetensors"


def normal(seed: int, *shape: int) -> NDArray[Any]:
    return np.random.default_rng(seed).normal(0, 0.02, shape).astype(BF16)


def write_one(folder: Path, tensors: Arrays, config: dict[str, Any]) -> Path:
    return write(Source({SHARD: tensors}, config), folder)


def qwen(folder: Path) -> tuple[Path, Arrays, str]:
    """Qwen3.5 MoE: [E, 2I, H] and [E, H, I], without a suffix; returns the experts' weights one by one."""
    layer = "model.language_model.layers.0"
    gate_up, down = normal(1, EXPERTS, 2 * INNER, HIDDEN), normal(2, EXPERTS, HIDDEN, INNER)
    tensors = {
        f"{layer}.mlp.experts.gate_up_proj": gate_up,
        f"{layer}.mlp.experts.down_proj": down,
        f"{layer}.mlp.gate.weight": normal(3, EXPERTS, HIDDEN),
        f"{layer}.mlp.shared_expert.gate_proj.weight": normal(4, INNER, HIDDEN),
        f"{layer}.mlp.shared_expert.up_proj.weight": normal(5, INNER, HIDDEN),
        f"{layer}.mlp.shared_expert_gate.weight": normal(6, 1, HIDDEN),
        f"{layer}.linear_attn.conv1d.weight": normal(7, HIDDEN, 1, 4),
        f"{layer}.linear_attn.A_log": np.arange(16, dtype=np.float32),
        "mtp.layers.0.mlp.experts.gate_up_proj": gate_up,
        "mtp.layers.0.mlp.experts.down_proj": down,
    }
    config = {
        "model_type": "qwen3_5_moe",
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            "hidden_size": HIDDEN,
            "moe_intermediate_size": INNER,
            "shared_expert_intermediate_size": INNER,
            "num_experts": EXPERTS,
        },
    }
    experts: Arrays = {}
    for parent in (f"{layer}.mlp.experts", "mtp.layers.0.mlp.experts"):
        for e in range(EXPERTS):
            experts[f"{parent}.{e}.gate_proj"] = gate_up[e, :INNER]
            experts[f"{parent}.{e}.up_proj"] = gate_up[e, INNER:]
            experts[f"{parent}.{e}.down_proj"] = down[e]
    return write_one(folder, tensors, config), experts, layer


def llama(folder: Path) -> tuple[Path, Arrays, str]:
    """Llama-4: [E, H, 2I] and [E, I, H], both [in, out]."""
    layer = "language_model.model.layers.0"
    gate_up, down = normal(1, EXPERTS, HIDDEN, 2 * INNER), normal(2, EXPERTS, INNER, HIDDEN)
    tensors = {
        f"{layer}.feed_forward.experts.gate_up_proj": gate_up,
        f"{layer}.feed_forward.experts.down_proj": down,
        f"{layer}.feed_forward.router.weight": normal(3, EXPERTS, HIDDEN),
        f"{layer}.feed_forward.shared_expert.gate_proj.weight": normal(4, INNER, HIDDEN),
        f"{layer}.feed_forward.shared_expert.up_proj.weight": normal(5, INNER, HIDDEN),
        f"{layer}.self_attn.q_proj.weight": normal(6, HIDDEN, HIDDEN),
    }
    config = {
        "model_type": "llama4",
        "text_config": {
            "model_type": "llama4_text",
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "intermediate_size_mlp": 2 * INNER,
            "num_local_experts": EXPERTS,
        },
    }
    experts: Arrays = {}
    for e in range(EXPERTS):
        experts[f"{layer}.feed_forward.experts.{e}.gate_proj"] = gate_up[e, :, :INNER].T
        experts[f"{layer}.feed_forward.experts.{e}.up_proj"] = gate_up[e, :, INNER:].T
        experts[f"{layer}.feed_forward.experts.{e}.down_proj"] = down[e].T
    return write_one(folder, tensors, config), experts, layer


def step(folder: Path, *, quantized: bool = False) -> tuple[Path, Arrays, str]:
    """Step-3.5: [E, out, in] under moe; 3.7-FP8 has blocks of 128 with a 3-D weight_scale_inv."""
    layer, rng = "model.layers.3", np.random.default_rng(5)
    tensors: Arrays = {
        f"{layer}.moe.gate.weight": normal(3, EXPERTS, HIDDEN),
        f"{layer}.moe.router_bias": np.arange(EXPERTS, dtype=np.float32),
        f"{layer}.share_expert.gate_proj.weight": normal(4, INNER, HIDDEN),
        f"{layer}.share_expert.up_proj.weight": normal(5, INNER, HIDDEN),
    }
    experts: Arrays = {}
    for number, (leaf, rows, columns) in enumerate(
        [("gate_proj", INNER, HIDDEN), ("up_proj", INNER, HIDDEN), ("down_proj", HIDDEN, INNER)]
    ):
        weight: NDArray[Any] = normal(10 + number, EXPERTS, rows, columns)
        values = weight
        if quantized:
            weight = (weight.astype(np.float32) * 3000).astype(F8)
            scales = rng.uniform(1e-4, 2e-4, (EXPERTS, -(-rows // 128), -(-columns // 128))).astype(np.float32)
            tensors[f"{layer}.moe.{leaf}.weight_scale_inv"] = scales
            spread = scales.repeat(128, 1).repeat(128, 2)[:, :rows, :columns]
            values = (weight.astype(np.float64) * spread.astype(np.float64)).astype(BF16)
        tensors[f"{layer}.moe.{leaf}.weight"] = weight
        experts |= {f"{layer}.moe.experts.{e}.{leaf}": values[e] for e in range(EXPERTS)}
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    config = {
        "model_type": "step3p5",
        "hidden_size": HIDDEN,
        "intermediate_size": 4 * INNER,
        "moe_intermediate_size": INNER,
        "moe_num_experts": EXPERTS,
        **({"quantization_config": quantization} if quantized else {}),
    }
    return write_one(folder, tensors, config), experts, layer


def mistral4(folder: Path) -> tuple[Path, Arrays, str]:
    """Mistral-4: FP8, one scale for each expert's [2I, H], which gate and up share, and static activation scales."""
    layer, rng = "model.layers.0", np.random.default_rng(9)
    tensors: Arrays = {f"{layer}.mlp.gate.weight": normal(3, EXPERTS, HIDDEN)}
    experts: Arrays = {}
    for leaf, rows, columns in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
        codes = rng.normal(0, 60, (EXPERTS, rows, columns)).clip(-440, 440).astype(F8)
        scales = rng.uniform(1e-4, 2e-4, (EXPERTS, 1, 1)).astype(np.float32)
        tensors[f"{layer}.mlp.experts.{leaf}"] = codes
        tensors[f"{layer}.mlp.experts.{leaf}_scale_inv"] = scales
        tensors[f"{layer}.mlp.experts.{leaf}_activation_scale"] = rng.uniform(0.01, 0.02, EXPERTS).astype(np.float32)
        values = (codes.astype(np.float32) * scales).astype(BF16)
        for e in range(EXPERTS):
            if leaf == "down_proj":
                experts[f"{layer}.mlp.experts.{e}.down_proj"] = values[e]
            else:
                experts[f"{layer}.mlp.experts.{e}.gate_proj"] = values[e, :INNER]
                experts[f"{layer}.mlp.experts.{e}.up_proj"] = values[e, INNER:]
    attention = rng.normal(0, 60, (HIDDEN, HIDDEN)).clip(-440, 440).astype(F8)
    tensors[f"{layer}.self_attn.o_proj.weight"] = attention
    tensors[f"{layer}.self_attn.o_proj.weight_scale_inv"] = np.array(1.5e-4, np.float32)
    tensors[f"{layer}.self_attn.o_proj.activation_scale"] = np.array(1.5e-2, np.float32)
    experts[f"{layer}.self_attn.o_proj"] = (attention.astype(np.float32) * np.float32(1.5e-4)).astype(BF16)
    config = {
        "model_type": "mistral4",
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INNER,
        "n_routed_experts": EXPERTS,
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
    }
    return write_one(folder, tensors, config), experts, layer


def llama_fp8(folder: Path) -> tuple[Path, Arrays, str]:
    """Llama-4 in FP8: [E, in, out] codes and a scale for every output channel, [E, 1, out]."""
    layer, rng = "language_model.model.layers.0", np.random.default_rng(10)
    tensors: Arrays = {f"{layer}.feed_forward.router.weight": normal(3, EXPERTS, HIDDEN)}
    banks: Arrays = {}
    for leaf, inner, out in (("gate_up_proj", HIDDEN, 2 * INNER), ("down_proj", INNER, HIDDEN)):
        codes = rng.normal(0, 60, (EXPERTS, inner, out)).clip(-440, 440).astype(F8)
        scales = rng.uniform(1e-4, 2e-4, (EXPERTS, 1, out)).astype(np.float32)
        tensors[f"{layer}.feed_forward.experts.{leaf}"] = codes
        tensors[f"{layer}.feed_forward.experts.{leaf}_scale"] = scales
        banks[f"{layer}.feed_forward.experts.{leaf}"] = (codes.astype(np.float32) * scales).astype(BF16)
    config = {
        "model_type": "llama4_text",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_local_experts": EXPERTS,
        "quantization_config": {"quant_method": "fbgemm_fp8"},
    }
    return write_one(folder, tensors, config), banks, layer


def gpt_oss(folder: Path) -> tuple[Path, Arrays, str]:
    """gpt-oss: MXFP4 blocks [E, out, in/32, 16] with gate and up rows in turn; returns HF's banks in BF16."""
    layer, rng = "model.layers.0", np.random.default_rng(7)
    tensors: Arrays = {
        f"{layer}.mlp.router.weight": normal(3, EXPERTS, HIDDEN),
        f"{layer}.mlp.router.bias": normal(4, EXPERTS),
        f"{layer}.self_attn.q_proj.weight": normal(5, HIDDEN, HIDDEN),
        f"{layer}.self_attn.q_proj.bias": normal(6, HIDDEN),
        f"{layer}.self_attn.sinks": normal(7, 8),
    }
    banks: Arrays = {}
    for leaf, rows, columns in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
        blocks = rng.integers(0, 256, (EXPERTS, rows, columns // 32, 16), np.uint8)
        scales = rng.integers(115, 125, (EXPERTS, rows, columns // 32), np.uint8)
        tensors[f"{layer}.mlp.experts.{leaf}_blocks"] = blocks
        tensors[f"{layer}.mlp.experts.{leaf}_scales"] = scales
        tensors[f"{layer}.mlp.experts.{leaf}_bias"] = normal(8, EXPERTS, rows)
        nibbles = np.stack([blocks & 15, blocks >> 4], -1).reshape(EXPERTS, rows, columns // 32, 32)
        values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float64)
        values *= 2.0 ** (scales.astype(np.float64)[..., None] - 127)
        banks[f"{layer}.mlp.experts.{leaf}"] = values.reshape(EXPERTS, rows, columns).transpose(0, 2, 1)
    config = {
        "model_type": "gpt_oss",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_local_experts": EXPERTS,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    }
    return write_one(folder, tensors, config), banks, layer


def assert_others_kept(source: Path, output: Path) -> None:
    """Everything that is not a part of a converted weight has its bytes."""
    before, after = read(source), read(output)
    converted = {name.rpartition(".")[0] for name, tensor in after.items() if before.get(name) != tensor}
    for name, tensor in before.items():
        if ".experts." in name or ".moe." in name or name.rpartition(".")[0] in converted:
            continue
        assert after[name] == tensor, name


@pytest.mark.parametrize("make", [qwen, llama, step])
@pytest.mark.parametrize(("scheme", "decibels"), [("FP8_BLOCK", 30.0), ("NVFP4", 17.0), ("W4A16_G32", 19.0)])
def test_experts_become_weights_of_their_own(tmp_path: Path, make: Any, scheme: str, decibels: float) -> None:
    source, experts, _ = make(tmp_path / "source")
    result = requant.convert(source, tmp_path / "out", scheme)
    values = stored(tmp_path / "out")
    for module, weight in experts.items():
        exact = weight.astype(np.float64)
        noise = np.sum((values[module] - exact) ** 2)
        assert 10 * np.log10(np.sum(exact**2) / noise) > decibels, module
    assert result.to_json()["converted"][scheme] >= len(experts)
    assert not any("gate_up_proj" in name for name in read(tmp_path / "out"))
    assert_others_kept(source, tmp_path / "out")
    assert requant.verify(tmp_path / "out", "data", against=source).ok
    assert requant.compare(source, tmp_path / "out").unmatched == 0


@pytest.mark.parametrize("make", [qwen, llama, step, gpt_oss])
def test_what_a_bank_holds_is_shown_by_expert(tmp_path: Path, make: Any) -> None:
    source, experts, _ = make(tmp_path / "source")
    found = requant.inspect(source).to_json()
    count = len(experts) if make is not gpt_oss else 2 * EXPERTS
    assert found["classes"]["expert"]["weights"] - (2 if make is gpt_oss else 0) == count
    assert set(found["classes"]["expert"]["formats"]) == ({"mxfp4", "BF16"} if make is gpt_oss else {"BF16"})


def test_fp8_banks_are_decoded_and_respelled(tmp_path: Path) -> None:
    source, experts, _ = step(tmp_path / "source", quantized=True)
    requant.convert(source, tmp_path / "bf16", "BF16")
    values = stored(tmp_path / "bf16")
    for module, weight in experts.items():
        np.testing.assert_array_equal(values[module], weight.astype(np.float64), module)
    requant.convert(source, tmp_path / "block", "FP8_BLOCK", ignore=["re:.*share_expert.*"])
    distance = requant.compare(source, tmp_path / "block")
    assert (distance.total.differing, distance.unmatched) == (0, 0)
    before, after = read(source), read(tmp_path / "block")
    codes = array(before["model.layers.3.moe.up_proj.weight"])
    scales = array(before["model.layers.3.moe.up_proj.weight_scale_inv"])
    np.testing.assert_array_equal(
        array(after["model.layers.3.moe.experts.2.up_proj.weight"]).view(np.uint8), codes[2].view(np.uint8)
    )
    np.testing.assert_array_equal(array(after["model.layers.3.moe.experts.2.up_proj.weight_scale"]), scales[2])


def test_experts_with_one_scale_each(tmp_path: Path) -> None:
    source, weights, layer = mistral4(tmp_path / "source")
    requant.convert(source, tmp_path / "bf16", "BF16")
    values = stored(tmp_path / "bf16")
    for module, weight in weights.items():
        np.testing.assert_array_equal(values[module], weight.astype(np.float64), module)
    assert not any("scale" in name for name in read(tmp_path / "bf16"))
    requant.convert(source, tmp_path / "fp8", "FP8")  # the format they are in, under compressed-tensors' names
    before, after = read(source), read(tmp_path / "fp8")
    for leaf in ("gate_proj", "up_proj"):
        name = f"{layer}.mlp.experts.2.{leaf}"
        scale = array(before[f"{layer}.mlp.experts.gate_up_proj_scale_inv"])[2].ravel()
        np.testing.assert_array_equal(array(after[f"{name}.weight_scale"]), scale)
        own = array(before[f"{layer}.mlp.experts.gate_up_proj_activation_scale"])[2:3]
        np.testing.assert_array_equal(array(after[f"{name}.input_scale"]), own)
    assert requant.compare(source, tmp_path / "fp8").exact
    requant.convert(source, tmp_path / "nvfp4", "NVFP4")
    assert requant.verify(tmp_path / "nvfp4", "data", against=source).problems == []


def test_transposed_fp8_banks(tmp_path: Path) -> None:
    source, banks, layer = llama_fp8(tmp_path / "source")
    requant.convert(source, tmp_path / "bf16", "BF16")
    after = read(tmp_path / "bf16")
    for name, values in banks.items():
        np.testing.assert_array_equal(array(after[name]).astype(np.float64), values.astype(np.float64))
    requant.convert(source, tmp_path / "block", "FP8_BLOCK")
    up = stored(tmp_path / "block")[f"{layer}.feed_forward.experts.1.up_proj"]
    exact = banks[f"{layer}.feed_forward.experts.gate_up_proj"][1, :, INNER:].T.astype(np.float64)
    assert 10 * np.log10(np.sum(exact**2) / np.sum((up - exact) ** 2)) > 28
    assert requant.verify(tmp_path / "block", "data", against=source).problems == []
    assert requant.compare(source, tmp_path / "block").unmatched == 0
    # The format that they are in: turned over, code by code.
    result = requant.convert(source, tmp_path / "channel", "FP8_DYNAMIC", exact="off")
    assert result.to_json()["routes"] == {"exact": 3 * EXPERTS}
    assert requant.compare(source, tmp_path / "channel").exact
    codes = array(read(source)[f"{layer}.feed_forward.experts.down_proj"])[3].T
    turned = array(read(tmp_path / "channel")[f"{layer}.feed_forward.experts.3.down_proj.weight"])
    np.testing.assert_array_equal(turned.view(np.uint8), codes.view(np.uint8))


@pytest.mark.parametrize("make", [qwen, llama, step])
def test_a_bank_in_which_nothing_changes_is_copied(tmp_path: Path, make: Any) -> None:
    source, _, _ = make(tmp_path / "source")
    requant.convert(source, tmp_path / "out", "FP8_DYNAMIC", ignore=[r"re:.*\.experts\..*"])
    before, after = read(source), read(tmp_path / "out")
    banks = [name for name, tensor in before.items() if len(tensor.shape) == 3]
    assert banks and all(after[name] == before[name] for name in banks)


def test_experts_that_stay_are_copied_one_by_one(tmp_path: Path) -> None:
    source, experts, layer = qwen(tmp_path / "source")
    requant.convert(source, tmp_path / "out", "FP8_DYNAMIC", ignore=[r"re:.*experts\.1\."])
    after = read(tmp_path / "out")
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        module = f"{layer}.mlp.experts.1.{leaf}"
        np.testing.assert_array_equal(array(after[f"{module}.weight"]), experts[module])
        assert f"{module}.weight_scale" not in after


def test_transposed_experts_go_all_or_none(tmp_path: Path) -> None:
    source, _, _ = llama(tmp_path / "source")
    with pytest.raises(requant.CheckpointError) as caught:
        requant.convert(source, tmp_path / "out", "FP8_DYNAMIC", ignore=[r"re:.*experts\.1\."])
    assert {problem.code for problem in caught.value.problems} == {"fused-split"}
    assert not (tmp_path / "out").exists()


def test_unquantized_llama_experts_lie_in_banks_again(tmp_path: Path) -> None:
    source, _, layer = llama(tmp_path / "source")
    requant.convert(source, tmp_path / "fp8", "FP8_DYNAMIC")
    requant.convert(tmp_path / "fp8", tmp_path / "out", "BF16")
    before, after = read(source), read(tmp_path / "out")
    assert {name: t.shape for name, t in before.items()} == {name: t.shape for name, t in after.items()}
    fp8 = stored(tmp_path / "fp8")
    bank = array(after[f"{layer}.feed_forward.experts.gate_up_proj"])
    for e in range(EXPERTS):
        gate = fp8[f"{layer}.feed_forward.experts.{e}.gate_proj"].astype(BF16)
        up = fp8[f"{layer}.feed_forward.experts.{e}.up_proj"].astype(BF16)
        np.testing.assert_array_equal(bank[e], np.concatenate([gate, up]).T)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert requant.compare(tmp_path / "fp8", tmp_path / "out").unmatched == 0
    assert requant.verify(tmp_path / "out", against=tmp_path / "fp8").ok
    assert requant.verify(tmp_path / "fp8", against=source).ok


@pytest.mark.parametrize("scheme", ["BF16", "FP8_BLOCK", "NVFP4"])
def test_gpt_oss_is_decoded_into_the_banks_of_its_model(tmp_path: Path, scheme: str) -> None:
    source, banks, _ = gpt_oss(tmp_path / "source")
    result = requant.convert(source, tmp_path / "out", scheme, exact="required").to_json()
    before, after = read(source), read(tmp_path / "out")
    for name, values in banks.items():
        assert after[name].dtype == "BF16"
        np.testing.assert_array_equal(array(after[name]).astype(np.float64), values)
        assert after[f"{name}_bias"] == before[f"{name}_bias"]
        assert f"{name}_blocks" not in after and f"{name}_scales" not in after
    assert result["converted"]["BF16"] == 2 * EXPERTS
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    if scheme == "BF16":
        assert "quantization_config" not in config
    else:
        assert any("decoded" in note for note in result["notes"])
        assert any("experts" in pattern for pattern in config["quantization_config"]["ignore"])
    assert requant.verify(tmp_path / "out", "data", against=source).ok
    assert requant.compare(source, tmp_path / "out").unmatched == 0


def test_gpt_oss_experts_can_be_kept(tmp_path: Path) -> None:
    source, _, _ = gpt_oss(tmp_path / "source")
    requant.convert(source, tmp_path / "out", "FP8_BLOCK", ignore=["re:.*experts.*"])
    before, after = read(source), read(tmp_path / "out")
    kept = [name for name in before if ".experts." in name]
    assert kept and all(after[name] == before[name] for name in kept)
    assert requant.verify(tmp_path / "out", against=source).ok


@pytest.mark.parametrize("make", [qwen, llama, step, gpt_oss])
def test_a_wrong_value_in_a_bank_is_found_against_its_source(tmp_path: Path, make: Any) -> None:
    source, _, _ = make(tmp_path / "source")
    requant.convert(source, tmp_path / "out", "BF16" if make is gpt_oss else "FP8_DYNAMIC")
    arrays = {name: array(tensor).copy() for name, tensor in read(source).items()}
    name = next(name for name in arrays if "down_proj" in name and arrays[name].ndim >= 3)
    arrays[name].view(np.uint8)[2, 1] ^= 0x44
    other = write_one(tmp_path / "other", arrays, json.loads((source / "config.json").read_text()))
    found = [problem.module for problem in requant.verify(tmp_path / "out", against=other).problems]
    assert len(found) == 1
    assert ".experts.2.down_proj" in found[0]


def test_half_of_a_gpt_oss_layer_does_not_stay(tmp_path: Path) -> None:
    source, _, layer = gpt_oss(tmp_path / "source")
    with pytest.raises(requant.CheckpointError) as caught:
        requant.convert(source, tmp_path / "out", "BF16", ignore=["re:.*down_proj"])
    assert [(problem.code, problem.module) for problem in caught.value.problems] == [
        ("fused-split", f"{layer}.mlp.experts.down_proj")
    ]


def test_a_layout_that_the_sizes_leave_open_is_refused(tmp_path: Path) -> None:
    bank = normal(1, EXPERTS, 2 * HIDDEN, 2 * HIDDEN)
    config = {"model_type": "qwen3_5_moe", "hidden_size": 2 * HIDDEN, "moe_intermediate_size": HIDDEN}
    name = "model.layers.0.mlp.experts.gate_up_proj"
    folder = write_one(tmp_path / "square", {name: bank, "model.layers.0.a.weight": normal(2, 128, 128)}, config)
    with pytest.raises(requant.CheckpointError) as caught:
        requant.convert(folder, tmp_path / "out", "FP8_BLOCK")
    [problem] = caught.value.problems
    assert (problem.code, problem.module) == ("unknown-format", name)
    assert "both" in problem.message
    requant.convert(folder, tmp_path / "out", "FP8_BLOCK", ignore=[name])
    assert read(tmp_path / "out")[name] == read(folder)[name]


@pytest.mark.parametrize(
    ("change", "word"),
    [({"hidden_size": 96}, "neither"), ({"hidden_size": None}, "no sizes"), ({"num_experts": 8}, "numbers of experts")],
)
def test_a_bank_at_odds_with_the_config_is_refused(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": EXPERTS} | change
    name = "model.layers.0.mlp.experts.gate_up_proj"
    bank = {name: normal(1, EXPERTS, 2 * INNER, HIDDEN)}
    folder = write_one(tmp_path / "odd", bank, {"model_type": "qwen3_5_moe", **sizes})
    with pytest.raises(requant.CheckpointError, match=word):
        requant.convert(folder, tmp_path / "out", "FP8_BLOCK")


def test_gate_and_up_of_an_unknown_model_are_not_guessed(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    config = {"model_type": "new", "hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": EXPERTS}
    folder = write_one(tmp_path / "new", {name: normal(1, EXPERTS, 2 * INNER, HIDDEN)}, config)
    with pytest.raises(requant.CheckpointError, match="--family"):
        requant.convert(folder, tmp_path / "out", "FP8_BLOCK")
    requant.convert(folder, tmp_path / "out", "FP8_BLOCK", family="generic")
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in read(tmp_path / "out")


def test_a_family_given_does_not_make_halves_of_rows_that_alternate(tmp_path: Path) -> None:
    source, banks, _ = gpt_oss(tmp_path / "source")
    requant.convert(source, tmp_path / "out", "BF16", family="generic")
    after = read(tmp_path / "out")
    for name, values in banks.items():
        np.testing.assert_array_equal(array(after[name]).astype(np.float64), values)


def test_a_bank_with_biases_is_not_divided(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {name: normal(1, EXPERTS, 2 * INNER, HIDDEN), f"{name}_bias": normal(2, EXPERTS, 2 * INNER)}
    config = {"model_type": "qwen3_5_moe", "hidden_size": HIDDEN, "moe_intermediate_size": INNER}
    folder = write_one(tmp_path / "biased", tensors, config)
    with pytest.raises(requant.CheckpointError, match="bias"):
        requant.convert(folder, tmp_path / "out", "FP8_BLOCK")


def test_parts_of_banks_that_miss_each_other(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    blocks = np.zeros((EXPERTS, HIDDEN, INNER // 32, 16), np.uint8)
    config = {"model_type": "gpt_oss", "hidden_size": HIDDEN, "intermediate_size": INNER}
    lone = write_one(tmp_path / "lone", {f"{name}_blocks": blocks}, config)
    with pytest.raises(requant.CheckpointError) as caught:
        requant.convert(lone, tmp_path / "out", "BF16")
    assert ("missing-part", name) in {(problem.code, problem.module) for problem in caught.value.problems}
    stray = write_one(tmp_path / "stray", {f"{name}_scales": blocks[..., 0]}, config)
    with pytest.raises(requant.CheckpointError) as caught:
        requant.convert(stray, tmp_path / "out", "BF16")
    assert ("orphan-part", name) in {(problem.code, problem.module) for problem in caught.value.problems}


def test_an_expert_of_two_banks(tmp_path: Path) -> None:
    parent = "model.layers.0.mlp.experts"
    config = {"model_type": "qwen3_5_moe", "hidden_size": HIDDEN, "moe_intermediate_size": INNER}
    both = normal(1, EXPERTS, 2 * INNER, HIDDEN)
    tensors = {f"{parent}.gate_up_proj": both, f"{parent}.gate_proj": both[:, :INNER]}
    folder = write_one(tmp_path / "twice", tensors, config)
    with pytest.raises(requant.CheckpointError) as caught:
        requant.convert(folder, tmp_path / "out", "FP8_BLOCK")
    found = {(problem.code, problem.module) for problem in caught.value.problems}
    assert found == {("name-hostile", f"{parent}.{e}.gate_proj") for e in range(EXPERTS)}


def test_a_bank_with_the_same_part_twice(tmp_path: Path) -> None:
    name, scales = "model.layers.0.mlp.experts.down_proj", np.ones((EXPERTS, 1, 1), np.float32)
    config = {"model_type": "qwen3_5_moe", "hidden_size": HIDDEN, "moe_intermediate_size": INNER}
    tensors = {name: np.zeros((EXPERTS, HIDDEN, INNER), F8), f"{name}_scale": scales, f"{name}_scales": scales}
    folder = write_one(tmp_path / "twice", tensors, config)
    with pytest.raises(requant.CheckpointError) as caught:
        requant.convert(folder, tmp_path / "out", "FP8_BLOCK")
    assert {problem.code for problem in caught.value.problems} == {"unknown-format"}


@pytest.mark.parametrize("shape", [(0, HIDDEN, INNER), (10**15, 0, INNER), (10**15, HIDDEN, 0)])
def test_an_empty_bank_is_not_taken_apart(tmp_path: Path, shape: tuple[int, ...]) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    config = {"model_type": "gpt_oss", "hidden_size": HIDDEN, "intermediate_size": INNER}
    tensors: Arrays = {f"{name}_blocks": np.zeros((*shape[:2], shape[2] // 32, 16), np.uint8)}
    tensors |= {f"{name}_scales": np.zeros((*shape[:2], shape[2] // 32), np.uint8)}
    folder = write_one(tmp_path / "codes", tensors, config)
    with pytest.raises(requant.CheckpointError, match="empty"):
        requant.convert(folder, tmp_path / "out", "FP8_BLOCK")
    tensors = {name: np.zeros(shape, BF16), "model.layers.0.a.weight": normal(2, 128, 128)}
    folder = write_one(tmp_path / "values", tensors, config | {"model_type": "qwen3_5_moe"})
    with pytest.raises(requant.CheckpointError, match="empty"):
        requant.convert(folder, tmp_path / "out", "FP8_BLOCK")
    requant.convert(folder, tmp_path / "out", "FP8_BLOCK", ignore=[name])
    assert read(tmp_path / "out")[name] == read(folder)[name]


@pytest.mark.parametrize("shape", [(EXPERTS, 1, INNER), (EXPERTS, 1, 2), (EXPERTS, 1, 4 * INNER)])
def test_scales_that_do_not_fit_what_lies_transposed(tmp_path: Path, shape: tuple[int, ...]) -> None:
    source, _, layer = llama_fp8(tmp_path / "source")
    arrays = {name: array(tensor) for name, tensor in read(source).items()}
    bank = f"{layer}.feed_forward.experts.gate_up_proj"
    arrays[f"{bank}_scale"] = np.ones(shape, np.float32)
    odd = write_one(tmp_path / "odd", arrays, json.loads((source / "config.json").read_text()))
    with pytest.raises(requant.CheckpointError) as caught:
        requant.convert(odd, tmp_path / "out", "BF16")
    assert {(problem.code, problem.module) for problem in caught.value.problems} == {("unknown-format", bank)}


def test_transposed_codes_that_no_dialect_names_are_converted_or_nothing_is(tmp_path: Path) -> None:
    source, _, layer = llama_fp8(tmp_path / "source")
    arrays = {name: array(tensor) for name, tensor in read(source).items()}
    arrays[f"{layer}.self_attn.q_proj.weight"] = normal(4, HIDDEN, HIDDEN)
    more = write_one(tmp_path / "more", arrays, json.loads((source / "config.json").read_text()))
    with pytest.raises(requant.CheckpointError) as caught:
        requant.convert(more, tmp_path / "out", "FP8_BLOCK", ignore=["re:.*experts.*"])
    assert {(problem.code, problem.remedy) for problem in caught.value.problems} == {
        ("fused-split", "convert all experts of the layer")
    }


@pytest.mark.parametrize(
    ("make", "scheme"),
    [
        (make, scheme)
        for make in (llama, llama_fp8, gpt_oss)
        for scheme in ("FP8_BLOCK", "FP8_DYNAMIC", "NVFP4", "BF16")
        if (make, scheme) != (llama, "BF16")  # nothing is converted
    ],
)
def test_what_the_plan_says_is_held_is_held(
    tmp_path: Path, make: Any, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from requant.execute.scratch import Scratch

    source, _, _ = make(tmp_path / "source")
    held, tile = [0], Scratch.tile

    def recorded(self: Scratch, slot: str, dtype: str, rows: int, columns: int) -> Any:
        found = tile(self, slot, dtype, rows, columns)
        held.append(sum(buffer.nbytes for buffer in self._buffers.values()))
        return found

    monkeypatch.setattr(Scratch, "tile", recorded)
    result = requant.convert(source, tmp_path / "out", scheme, target=[r"re:.*\.experts\."], workers=1).to_json()
    [note] = [note for note in result["notes"] if "lie transposed" in note]
    said = int(note.split()[-2].replace(",", ""))
    assert max(held) <= said <= 1.3 * max(held)


@pytest.mark.parametrize("leaf", ["experts.down_proj", "o_proj.weight"])
def test_names_that_grow_beyond_what_a_header_may_have(tmp_path: Path, leaf: str) -> None:
    config = {"model_type": "qwen3_5_moe", "hidden_size": HIDDEN, "moe_intermediate_size": INNER}
    shape = (EXPERTS, HIDDEN, INNER) if "experts" in leaf else (HIDDEN, INNER)
    tensors = {f"{'m' * (510 - len(leaf))}.{leaf}": normal(1, *shape), "a.weight": normal(2, 128, 128)}
    folder = write_one(tmp_path / "long", tensors, config)
    with pytest.raises(requant.CheckpointError) as caught:
        requant.convert(folder, tmp_path / "out", "FP8_BLOCK")
    assert {problem.code for problem in caught.value.problems} == {"name-hostile"}
    requant.convert(folder, tmp_path / "out", "FP8_BLOCK", ignore=["re:mm"])
    assert requant.verify(tmp_path / "out", "data", against=folder).ok


@pytest.mark.parametrize("make", [qwen, llama])
def test_nan_in_one_expert_names_it_and_its_bank(tmp_path: Path, make: Any) -> None:
    source, _, _ = make(tmp_path / "source")
    arrays = {name: array(tensor).copy() for name, tensor in read(source).items()}
    bank = next(name for name in arrays if name.endswith(".experts.down_proj"))
    arrays[bank][2, 1, 5] = np.nan
    bad = write_one(tmp_path / "bad", arrays, json.loads((source / "config.json").read_text()))
    with pytest.raises(requant.CheckpointError) as caught:
        requant.convert(bad, tmp_path / "out", "FP8_BLOCK")
    [problem] = caught.value.problems
    assert (problem.code, problem.module) == ("nan-or-inf", bank.replace("experts.", "experts.2."))
    assert f"({bank} in {SHARD})" in problem.message
    assert {found.code for found in requant.verify(bad, "data").problems} == {"nan-or-inf"}


@pytest.mark.parametrize("shards", [1, 2])
def test_a_bank_of_a_name_that_is_taken(tmp_path: Path, shards: int) -> None:
    source, _, layer = llama(tmp_path / "source")
    requant.convert(source, tmp_path / "fp8", "FP8_DYNAMIC")
    arrays = {name: array(tensor) for name, tensor in read(tmp_path / "fp8").items()}
    name = f"{layer}.feed_forward.experts.down_proj"
    more: Arrays = {name: normal(1, 3, 5)}
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    files = {SHARD: arrays | more} if shards == 1 else {"a.safetensors": arrays, "b.safetensors": more}
    taken = write(Source(files, config), tmp_path / "taken")
    with pytest.raises(requant.CheckpointError) as caught:
        requant.convert(taken, tmp_path / "out", "BF16")
    assert {(problem.code, problem.module) for problem in caught.value.problems} == {("name-hostile", name)}
