"""Activation scales that are stored beside the weights: a value for every weight that needs one, one per layer."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import requant
from parity.checkpoints import Source, read, write

if TYPE_CHECKING:
    from pathlib import Path

BF16 = np.dtype(ml_dtypes.bfloat16)
EXPERTS = ["re:.*experts\\.\\d+\\.w[123]"]
LAYER = "model.layers.{}.block_sparse_moe."
K3_LAYER = "language_model.model.layers.{}."


def checkpoint(folder: Path, *, experts: int = 3, layers: int = 2) -> Path:
    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {}
    for layer in range(layers):
        for name in ("q", "k", "v", "o"):
            tensors[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = rng.standard_normal((32, 64))
        tensors[LAYER.format(layer) + "gate.weight"] = rng.standard_normal((experts, 64))
        for expert in range(experts):
            for name in ("w1", "w2", "w3"):
                tensors[f"{LAYER.format(layer)}experts.{expert}.{name}.weight"] = rng.standard_normal((64, 64))
    config = {"model_type": "mixtral", "num_local_experts": experts}
    return write(Source({"model.safetensors": {n: t.astype(BF16) for n, t in tensors.items()}}, config), folder)


@pytest.fixture
def src(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "src")


def scales(folder: Path) -> dict[str, float]:
    """Return what is stored of activations, by module; never 0, Inf or NaN, one F32 of the dialect's shape."""
    found = {}
    for name, stored in read(folder).items():
        module, _, suffix = name.rpartition(".")
        if suffix.startswith("input_"):
            assert stored.dtype == "F32" and stored.shape in ((1,), ())
            value = float(np.frombuffer(stored.data, np.float32)[0])
            assert value > 0 and np.isfinite(value)
            found[module] = value
    return found


def quantized(folder: Path) -> set[str]:
    return {name.rpartition(".")[0] for name in read(folder) if name.endswith(".weight_scale")}


@pytest.mark.parametrize(
    ("scheme", "dialect", "given", "stored"),
    [
        ("NVFP4", "compressed-tensors", None, 1.0),
        ("NVFP4", "modelopt", None, 1.0),
        ("FP8", "compressed-tensors", None, 1.0),
        ("FP8", "modelopt", None, 1.0),
        ("NVFP4", "compressed-tensors", "constant:64", 64.0),  # compressed-tensors' number: a divisor
        ("NVFP4", "modelopt", "constant:64", 1 / 64),
        ("FP8", "compressed-tensors", "constant:0.25", 0.25),  # a multiplier in either
        ("FP8", "modelopt", "constant:0.25", 0.25),
    ],
)
def test_a_constant_is_stored_beside_every_weight(
    src: Path, tmp_path: Path, scheme: str, dialect: str, given: str | None, stored: float
) -> None:
    options = {} if given is None else {"input_scale": given}
    requant.convert(src, tmp_path / "dst", scheme, dialect=dialect, **options)
    found = scales(tmp_path / "dst")
    assert set(found) == quantized(tmp_path / "dst") and len(found) == 26
    assert set(found.values()) == {np.float32(stored)}
    assert requant.verify(tmp_path / "dst", "data").ok


@pytest.mark.parametrize("scheme", ["NVFP4A16", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP4", "W8A8", "BF16"])
def test_other_schemes_store_none(src: Path, tmp_path: Path, scheme: str) -> None:
    requant.convert(src, tmp_path / "dst", scheme, input_scale="constant:3")
    assert scales(tmp_path / "dst") == {}


@pytest.mark.parametrize("text", ["constant:0", "constant:-1", "constant:nan", "constant:inf", "constant:1e99", "x:1"])
def test_a_constant_that_is_no_scale_is_refused(src: Path, tmp_path: Path, text: str) -> None:
    with pytest.raises(requant.CallError):
        requant.convert(src, tmp_path / "dst", "NVFP4", input_scale=text)


def amax_of(layer: int, name: str) -> float:
    """Make up an amax for every module, another for each expert; in the largest expert of a layer w3 is above w1."""
    return 1 + layer + {"w1": 0.25, "w2": 0.5, "w3": 0.75, "q_": 0.1, "k_": 0.3, "v_": 0.2, "o_": 0.9}[name[:2]]


def calibrated(expert_weight: float = 2.0) -> dict[str, float]:
    table = {}
    for layer in range(2):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            table[f"model.layers.{layer}.self_attn.{name}"] = amax_of(layer, name)
        for expert in range(3):
            for name in ("w1", "w2", "w3"):
                module = f"{LAYER.format(layer)}experts.{expert}.{name}"
                table[module] = amax_of(layer, name) * expert_weight**expert
    return table


def wanted_amax() -> dict[str, float]:
    """Return what is to be stored: of a fused group, and of all experts of a layer, the largest."""
    table = {}
    for module in calibrated():
        layer = int(module.split(".")[2])
        leaf = module.rpartition(".")[2]
        source = {"q_proj": "k_proj", "v_proj": "k_proj", "w1": "w3"}.get(leaf, leaf)
        table[module] = amax_of(layer, source) * (4.0 if "experts" in module else 1.0)
    return table


def check_calibrated(folder: Path, reach: float, divisor: bool) -> None:
    found = scales(folder)
    wanted = {module: reach / amax if divisor else amax / reach for module, amax in wanted_amax().items()}
    assert found.keys() == wanted.keys()
    for module, value in wanted.items():
        assert found[module] == pytest.approx(value, rel=1e-6), module


CASES = [
    ("NVFP4", "compressed-tensors", 2688.0, True),
    ("NVFP4", "modelopt", 2688.0, False),
    ("FP8", "compressed-tensors", 448.0, False),
    ("FP8", "modelopt", 448.0, False),
]


@pytest.mark.parametrize(("scheme", "dialect", "reach", "divisor"), CASES)
def test_amax_from_a_json_file(
    src: Path, tmp_path: Path, scheme: str, dialect: str, reach: float, divisor: bool
) -> None:
    path = tmp_path / "amax.json"
    path.write_text(json.dumps(calibrated()))
    requant.convert(src, tmp_path / "dst", scheme, dialect=dialect, input_scale=path)
    check_calibrated(tmp_path / "dst", reach, divisor)


@pytest.mark.parametrize(("scheme", "dialect", "reach", "divisor"), CASES)
@pytest.mark.parametrize("theirs", ["compressed-tensors", "modelopt"])
def test_amax_from_another_checkpoint(
    src: Path, tmp_path: Path, scheme: str, dialect: str, reach: float, divisor: bool, theirs: str
) -> None:
    other = calibrated_checkpoint(tmp_path / "other", theirs)
    requant.convert(src, tmp_path / "dst", scheme, dialect=dialect, input_scale=other)
    check_calibrated(tmp_path / "dst", reach, divisor)


def calibrated_checkpoint(folder: Path, dialect: str) -> Path:
    """Write an NVFP4 checkpoint with a calibrated scale of its own for every module, none shared."""
    requant.convert(checkpoint(folder.with_name("uncalibrated")), folder, "NVFP4", dialect=dialect)
    path = folder / "model.safetensors"
    arrays = {
        name: np.frombuffer(stored.data, {"BF16": BF16, "U8": "u1", "F32": "<f4"}.get(stored.dtype, "u1")).reshape(
            stored.shape
        )
        for name, stored in read(path).items()
    }
    float8 = np.dtype(ml_dtypes.float8_e4m3fn)
    for name, stored in read(path).items():
        if stored.dtype == "F8_E4M3":
            arrays[name] = arrays[name].view(float8)
        module, _, suffix = name.rpartition(".")
        if suffix.startswith("input_"):
            amax = calibrated()[module]
            value = 2688 / amax if suffix == "input_global_scale" else amax / 2688
            arrays[name] = np.full(stored.shape, value, np.float32)
    shutil.rmtree(folder.with_name("uncalibrated"))
    config = json.loads((folder / "config.json").read_text())
    shutil.rmtree(folder)
    return write(Source({"model.safetensors": arrays}, config), folder)


def test_names_that_another_tool_has_for_the_modules_are_found(src: Path, tmp_path: Path) -> None:
    spelled = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    table = {}
    for module, amax in calibrated().items():
        parent, _, leaf = module.replace("block_sparse_moe", "mlp").rpartition(".")
        table[f"language_model.{parent}.{spelled.get(leaf, leaf)}"] = amax
    path = tmp_path / "amax.json"
    path.write_text(json.dumps(table))
    requant.convert(src, tmp_path / "dst", "NVFP4", input_scale=str(path))
    check_calibrated(tmp_path / "dst", 2688.0, True)


def test_modules_that_are_missing_are_all_named_before_anything_is_written(src: Path, tmp_path: Path) -> None:
    table = calibrated()
    gone = sorted(module for module in table if module.endswith(("o_proj", "experts.1.w2")))
    path = tmp_path / "amax.json"
    path.write_text(json.dumps({module: amax for module, amax in table.items() if module not in gone}))
    for dry_run in (True, False):
        with pytest.raises(requant.CheckpointError) as caught:
            requant.convert(src, tmp_path / "dst", "NVFP4", input_scale=path, dry_run=dry_run)
        assert sorted(problem.module for problem in caught.value.problems) == gone
        assert {problem.code for problem in caught.value.problems} == {"missing-part"}
        assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize(
    "text", ["[1, 2]", "{", '{"a": "x"}', '{"a": 0}', '{"a": -1}', '{"a": NaN}', '{"a": Infinity}']
)
def test_a_file_that_is_no_table_of_amax_is_refused(src: Path, tmp_path: Path, text: str) -> None:
    path = tmp_path / "amax.json"
    path.write_text(text)
    with pytest.raises(requant.CallError) as caught:
        requant.convert(src, tmp_path / "dst", "NVFP4", input_scale=path)
    assert str(path) in caught.value.problems[0].message


def test_a_checkpoint_without_scales_is_refused(src: Path, tmp_path: Path) -> None:
    with pytest.raises(requant.CallError):
        requant.convert(src, tmp_path / "dst", "NVFP4", input_scale=src)


def test_a_calibrated_checkpoint_keeps_its_scales_when_it_is_respelled(tmp_path: Path) -> None:
    original = calibrated_checkpoint(tmp_path / "original", "modelopt")
    requant.convert(original, tmp_path / "ct", "NVFP4")
    requant.convert(tmp_path / "ct", tmp_path / "back", "NVFP4", dialect="modelopt")
    first, second, third = scales(original), scales(tmp_path / "ct"), scales(tmp_path / "back")
    assert first.keys() == second.keys() == third.keys()
    for module, value in first.items():
        assert second[module] == pytest.approx(1 / value, rel=1e-6)
        assert third[module] == pytest.approx(value, rel=1e-6)


def test_weight_only_and_back(tmp_path: Path) -> None:
    original = calibrated_checkpoint(tmp_path / "original", "compressed-tensors")
    requant.convert(original, tmp_path / "a16", "NVFP4A16")
    assert scales(tmp_path / "a16") == {}
    requant.convert(tmp_path / "a16", tmp_path / "a4", "NVFP4", input_scale="constant:7")
    found = scales(tmp_path / "a4")
    assert found.keys() == scales(original).keys() and set(found.values()) == {7.0}
    bits = read(original)
    for folder in ("a16", "a4"):
        for name, stored in read(tmp_path / folder).items():
            assert name.endswith("input_global_scale") or stored == bits[name]


@pytest.mark.parametrize("dialect", ["compressed-tensors", "modelopt"])
def test_a_path_replaces_the_scales_that_weights_have_a_constant_does_not(tmp_path: Path, dialect: str) -> None:
    original = calibrated_checkpoint(tmp_path / "original", "compressed-tensors")
    path = tmp_path / "amax.json"
    path.write_text(json.dumps(dict.fromkeys(calibrated(), 21.0)))
    requant.convert(original, tmp_path / "new", "NVFP4", dialect=dialect, input_scale=path)
    wanted = np.float32(2688 / 21 if dialect == "compressed-tensors" else 21 / 2688)
    assert set(scales(tmp_path / "new").values()) == {wanted}
    requant.convert(tmp_path / "new", tmp_path / "same", "NVFP4", dialect=dialect, input_scale="constant:3")
    assert set(scales(tmp_path / "same").values()) == {wanted}


def test_a_scale_that_is_missing_beside_one_that_is_there(tmp_path: Path) -> None:
    """The gap is filled with what the fused group has, not with a constant."""
    weights = {
        f"model.layers.0.mlp.{name}.{part}": array
        for name in ("gate_proj", "up_proj", "down_proj")
        for part, array in (
            ("weight", np.zeros((32, 64), ml_dtypes.float8_e4m3fn)),
            ("weight_scale", np.ones(1, np.float32)),
        )
    }
    weights["model.layers.0.mlp.up_proj.input_scale"] = np.full(1, 0.5, np.float32)
    src = write(Source({"model.safetensors": weights}, {"model_type": "llama"}), tmp_path / "src")
    requant.convert(src, tmp_path / "dst", "NVFP4", input_scale="constant:8")
    found = {module.rpartition(".")[2]: value for module, value in scales(tmp_path / "dst").items()}
    assert found == {"gate_proj": 2688 / 224, "up_proj": 2688 / 224, "down_proj": 8.0}


def test_a_table_that_has_changed_is_another_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    src = checkpoint(tmp_path / "src")
    path = tmp_path / "amax.json"
    path.write_text(json.dumps(calibrated()))
    with monkeypatch.context() as patch:
        patch.setattr("requant.execute.job.commit", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            requant.convert(src, tmp_path / "dst", "NVFP4", input_scale=path)
    path.write_text(json.dumps(calibrated(expert_weight=3.0)))
    with pytest.raises(requant.CallError):
        requant.convert(src, tmp_path / "dst", "NVFP4", input_scale=path)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_a_scale_on_disk_that_is_none_is_a_problem_not_a_value(tmp_path: Path, bad: float) -> None:
    original = calibrated_checkpoint(tmp_path / "original", "compressed-tensors")
    arrays = {
        "model.layers.0.self_attn.o_proj.weight": np.zeros((32, 64), ml_dtypes.float8_e4m3fn),
        "model.layers.0.self_attn.o_proj.weight_scale": np.ones(1, np.float32),
        "model.layers.0.self_attn.o_proj.input_scale": np.array([bad], np.float32),
    }
    write(Source({"model.safetensors": arrays}, {"model_type": "llama"}), tmp_path / "bad")
    for source, options in ((tmp_path / "bad", {}), (original, {"input_scale": tmp_path / "bad"})):
        with pytest.raises(requant.CheckpointError) as caught:
            requant.convert(source, tmp_path / "dst", "NVFP4", **options)
        assert caught.value.problems[0].code == "nan-or-inf"
        assert not (tmp_path / "dst").exists()


# --input-scale bound


def k3_inputs(folder: Path, layer: int) -> float:
    """Return the largest |x| that the experts of a layer can see: of D(g * u) with u of mean square 1."""
    stored = read(folder)

    def matrix(name: str) -> Any:
        tensor = stored[K3_LAYER.format(layer) + name]
        return np.frombuffer(tensor.data, BF16).astype(np.float64).reshape(tensor.shape)

    down, gain = matrix("block_sparse_moe.routed_expert_down_proj.weight"), matrix("post_attention_layernorm.weight")
    largest = 0.0
    for row in down * gain:  # the worst u points along the row
        worst = row / np.linalg.norm(row) * np.sqrt(row.size)
        assert np.mean(worst**2) == pytest.approx(1)
        largest = max(largest, float(row @ worst))
    return largest


@pytest.mark.parametrize(("scheme", "dialect", "reach", "divisor"), CASES)
def test_bound_of_kimi_k3(
    small_k3: Path, tmp_path: Path, scheme: str, dialect: str, reach: float, divisor: bool
) -> None:
    options: dict[str, Any] = {"target": EXPERTS, "dialect": dialect, "input_scale": "bound"}
    requant.convert(small_k3, tmp_path / "dst", scheme, **options)
    found = scales(tmp_path / "dst")
    assert len(found) == 4 * 8 * 3
    for layer in range(1, 5):
        for expert in range(8):
            module = f"{K3_LAYER.format(layer)}block_sparse_moe.experts.{expert}."
            for name in ("w1", "w2", "w3"):
                amax = 100.0 if name == "w2" else k3_inputs(small_k3, layer)
                wanted = reach / amax if divisor else amax / reach
                assert found[module + name] == pytest.approx(wanted, rel=1e-5)
    if divisor:
        assert found[module + "w2"] == np.float32(26.88)


def test_no_input_exceeds_the_bound(small_k3: Path, tmp_path: Path) -> None:
    requant.convert(small_k3, tmp_path / "dst", "NVFP4", target=EXPERTS, input_scale="bound")
    scale = scales(tmp_path / "dst")[K3_LAYER.format(1) + "block_sparse_moe.experts.0.w1"]
    stored = read(small_k3)
    down, gain = (
        np.frombuffer(tensor.data, BF16).astype(np.float64).reshape(tensor.shape)
        for tensor in (
            stored[K3_LAYER.format(1) + "block_sparse_moe.routed_expert_down_proj.weight"],
            stored[K3_LAYER.format(1) + "post_attention_layernorm.weight"],
        )
    )
    hidden = np.random.default_rng(0).standard_t(2, (2000, gain.size))
    normed = hidden / np.sqrt(np.mean(hidden**2, axis=1, keepdims=True) + 1e-5) * gain
    assert np.abs(normed @ down.T).max() < 2688 / scale


def test_bound_is_refused_where_nothing_is_bounded(src: Path, small_k3: Path, tmp_path: Path) -> None:
    for dry_run in (True, False):
        with pytest.raises(requant.CheckpointError) as caught:
            requant.convert(src, tmp_path / "dst", "NVFP4", input_scale="bound", dry_run=dry_run)
        assert "Kimi-K3" in caught.value.problems[0].message
        with pytest.raises(requant.CheckpointError) as caught:
            requant.convert(small_k3, tmp_path / "dst", "NVFP4", input_scale="bound", dry_run=dry_run)
        modules = {problem.module for problem in caught.value.problems}
        assert K3_LAYER.format(1) + "self_attn.q_proj" in modules
        assert not any("experts.0" in module for module in modules)
        assert not (tmp_path / "dst").exists()


def test_bound_needs_the_tensors_that_it_is_made_of(small_k3: Path, tmp_path: Path) -> None:
    src = tmp_path / "src"
    requant.convert(small_k3, src, "FP8_BLOCK", target=["re:.*layers\\.2\\..*routed_expert_down_proj"])
    with pytest.raises(requant.CheckpointError) as caught:
        requant.convert(src, tmp_path / "dst", "NVFP4", target=EXPERTS, input_scale="bound")
    (problem,) = caught.value.problems
    assert problem.module == K3_LAYER.format(2) + "block_sparse_moe.routed_expert_down_proj.weight"


def test_a_bound_that_is_no_number_is_a_problem(small_k3: Path, tmp_path: Path) -> None:
    src = tmp_path / "src"
    shutil.copytree(small_k3, src)
    ruin(src, K3_LAYER.format(3) + "post_attention_layernorm.weight", np.array([np.nan], BF16).tobytes())
    with pytest.raises(requant.CheckpointError) as caught:
        requant.convert(src, tmp_path / "dst", "NVFP4", target=EXPERTS, input_scale="bound")
    assert caught.value.problems[0].code == "nan-or-inf"
    assert not (tmp_path / "dst").exists()


def ruin(folder: Path, name: str, data: bytes) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    with open(folder / index["weight_map"][name], "r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        start = json.loads(file.read(size))[name]["data_offsets"][0]
        file.seek(8 + size + start)
        file.write(data)


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1e-38}',
        '{"a": 1e300}',
        '{"a": true}',
        '{"a": "3"}',
        '{"a": NaN}',
        '{"a": 1, "a": 2}',
        '{"a": ' + "9" * 400 + "}",
        "[" * 100_000,
        "[]",
    ],
)
def test_a_table_that_no_scale_can_be_made_of_is_refused(tmp_path: Path, text: str) -> None:
    table = tmp_path / "amax.json"
    table.write_text(text)
    weight = {"a.0.up_proj.weight": np.ones((16, 32), np.dtype(ml_dtypes.bfloat16))}
    src = write(Source({"model.safetensors": weight}, {"model_type": "llama"}), tmp_path / "src")
    for dry_run in (True, False):
        with pytest.raises(requant.CallError, match="input-scale"):
            requant.convert(src, tmp_path / "dst", "NVFP4", input_scale=str(table), dry_run=dry_run)


@pytest.mark.parametrize("text", ["", "constant:1_0", "constant:１", "constant:-1", "constant:", "a" * 300, "a\0b"])
def test_what_is_no_source_of_scales_is_refused_at_once(tmp_path: Path, text: str) -> None:
    with pytest.raises(requant.CallError, match="input-scale"):
        requant.convert(tmp_path, tmp_path / "dst", "NVFP4", input_scale=text)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(requant.CallError, match="input-scale"):
        requant.convert(tmp_path, tmp_path / "dst", "NVFP4", input_scale=str(pipe))


@pytest.mark.parametrize("family", ["", "a" * 300, "a\0b"])
def test_a_family_that_can_be_no_file_is_refused(tmp_path: Path, family: str) -> None:
    with pytest.raises(requant.CallError, match="family"):
        requant.convert(tmp_path, tmp_path / "dst", "NVFP4", family=family)
