"""Mistral's own checkpoints (params.json), as vLLM reads them: which config counts, and what becomes of the rows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import requant
from parity.checkpoints import Source, Stored, read, write
from stored_values import array, stored, values

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    Arrays = dict[str, NDArray[Any]]

BF16, F8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
HIDDEN, HEAD, INNER = 256, 64, 384
HEADS = {"wq": 4, "wk": 2}
ROTATED = {f"layers.{layer}.attention.{leaf}" for layer in range(2) for leaf in HEADS}
PARAMS = {"dim": HIDDEN, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": HEAD, "hidden_dim": INNER}
FP8_STATIC = {"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}}


def normal(rng: np.random.Generator, *shape: int) -> NDArray[Any]:
    return rng.normal(0, 0.02, shape).astype(BF16)


def tensors(*, quantized: bool, inputs: bool = True) -> Arrays:
    """A small dense model that sees: Mistral-Small's names."""
    rng = np.random.default_rng(11)
    found = {
        "tok_embeddings.weight": normal(rng, 64, HIDDEN),
        "output.weight": normal(rng, 64, HIDDEN),
        "norm.weight": normal(rng, HIDDEN),
        "vision_encoder.transformer.layers.0.attention.wq.weight": normal(rng, 128, 128),
        "vision_language_adapter.w_in.weight": normal(rng, HIDDEN, 128),
    }
    shapes = {f"attention.{leaf}": (heads * HEAD, HIDDEN) for leaf, heads in {**HEADS, "wv": 2, "wo": 4}.items()}
    shapes |= {
        "feed_forward.w1": (INNER, HIDDEN),
        "feed_forward.w2": (HIDDEN, INNER),
        "feed_forward.w3": (INNER, HIDDEN),
    }
    for name, shape in ((f"layers.{n}.{leaf}", shape) for n in range(2) for leaf, shape in shapes.items()):
        if not quantized:
            # Every row has a size of its own: scales that lie in another order are not to be overlooked.
            found[f"{name}.weight"] = (normal(rng, *shape) * rng.uniform(0.1, 9, (shape[0], 1))).astype(BF16)
            continue
        found[f"{name}.weight"] = rng.normal(0, 60, shape).clip(-440, 440).astype(F8)
        found[f"{name}.qscale_weight"] = np.array(rng.uniform(1e-4, 2e-4), BF16)
        if inputs:
            found[f"{name}.qscale_act"] = np.array(2e-2, BF16)
    return found


def checkpoint(folder: Path, arrays: Arrays, params: dict[str, Any], **others: dict[str, Any]) -> Path:
    """Write two shards and params.json; ``others`` are further JSON files."""
    names = sorted(arrays)
    halves = {1: names[: len(names) // 2], 2: names[len(names) // 2 :]}
    shards = {f"consolidated-{n:05}-of-00002.safetensors": {k: arrays[k] for k in half} for n, half in halves.items()}
    write(Source(shards, params), folder)
    (folder / "config.json").rename(folder / "params.json")
    (folder / "model.safetensors.index.json").rename(folder / "consolidated.safetensors.index.json")
    for name, value in others.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def dense(folder: Path, **params: Any) -> Path:
    return checkpoint(folder, tensors(quantized=False), {**PARAMS, **params})


def fp8(folder: Path) -> Path:
    return checkpoint(folder, tensors(quantized=True), {**PARAMS, **FP8_STATIC})


def config(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def reordered(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Put the first of all rotary pairs of a head before all second ones, as vLLM's maybe_remap_mistral does."""
    pairs = rows.reshape(heads, HEAD // 2, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def loaded(folder: Path) -> dict[str, NDArray[np.float64]]:
    """Return the values of the weights that vLLM sees: of wq and wk, it takes what is called weight in its order."""
    parts = read(folder)
    for module in ROTATED:
        weight = parts.get(f"{module}.weight")
        if weight is not None:
            rows = reordered(array(weight).view(np.uint8).reshape(weight.shape[0], -1), HEADS[module[-2:]])
            parts[f"{module}.weight"] = Stored(weight.dtype, weight.shape, rows.tobytes())
    return values(parts)


def refused(source: Path, scheme: str, **options: Any) -> set[str | None]:
    """Convert what engines refuse, and return the modules that are named for it."""
    with pytest.raises(requant.CheckpointError) as caught:
        requant.convert(source, source.parent / "refused", scheme, **options)
    assert {problem.code for problem in caught.value.problems} == {"engine-refuses"}
    return {problem.module for problem in caught.value.problems}


@pytest.mark.parametrize("scheme", ["FP8_BLOCK", "BF16", "FP8_DYNAMIC", "NVFP4A16", "MXFP4A16", "W4A16_G32", "W8A8"])
@pytest.mark.parametrize("make", [dense, fp8])
def test_what_vllm_reorders_has_the_values_of_the_source(tmp_path: Path, make: Any, scheme: str) -> None:
    source = make(tmp_path / "source")
    ignore: list[str] = []
    if scheme not in ("FP8_BLOCK", "BF16"):
        assert refused(source, scheme) == ROTATED
        ignore = [r"re:layers\.\d+\.attention\.w[qkv]$"]
    requant.convert(source, tmp_path / "out", scheme, ignore=ignore)
    found, wanted = loaded(tmp_path / "out"), stored(source)
    for module in ROTATED:
        expected = reordered(wanted[module], HEADS[module[-2:]])
        rows = np.abs(expected).max(axis=1, keepdims=True)
        assert np.all(np.abs(found[module] - expected) <= rows / 2), module
        # A row of another pair would be a stranger: not close to this one at all.
        similar = (found[module] * expected).sum(axis=1) / (expected**2).sum(axis=1)
        assert np.all(np.abs(similar - 1) < 0.1), module


def test_a_head_that_is_larger_than_a_block_is_refused(tmp_path: Path) -> None:
    assert refused(dense(tmp_path / "source", head_dim=256), "FP8_BLOCK") == ROTATED


@pytest.mark.parametrize(("dialect", "scheme"), [("fp8", "FP8_BLOCK"), ("modelopt", "FP8")])
def test_other_dialects_have_no_place_in_params_json(tmp_path: Path, dialect: str, scheme: str) -> None:
    source = dense(tmp_path / "source")
    assert refused(source, scheme, dialect=dialect) == {"params.json"}
    requant.convert(source, tmp_path / "out", "BF16", target=["re:layers.*"], dialect=dialect)
    assert config(tmp_path / "out", "params") == PARAMS


@pytest.mark.parametrize("scheme", ["FP8_BLOCK", "BF16"])
def test_params_json_counts_and_config_json_says_the_same(tmp_path: Path, scheme: str) -> None:
    """VLLM reads params.json beside such weights, and takes from config.json what is not in it."""
    beside = {"model_type": "mistral", "quantization_config": {"quant_method": "fp8"}}
    params = {**PARAMS, **FP8_STATIC}
    source = checkpoint(tmp_path / "source", tensors(quantized=True), params, config=beside)
    requant.convert(source, tmp_path / "out", scheme)
    new, other = config(tmp_path / "out", "params"), config(tmp_path / "out", "config")
    assert new.get("quantization") == other.get("quantization_config")
    assert new.get("quantization", {}).get("quant_method") == (None if scheme == "BF16" else "compressed-tensors")
    assert other["model_type"] == "mistral"
    assert requant.verify(tmp_path / "out", "data").ok


def test_config_json_counts_beside_weights_of_hugging_face(tmp_path: Path) -> None:
    weights = {"model.layers.0.self_attn.q_proj.weight": normal(np.random.default_rng(0), 128, 128)}
    source = write(Source({"model.safetensors": weights}, {"model_type": "mistral"}), tmp_path / "source")
    (source / "params.json").write_text("[not of this kind]")
    requant.convert(source, tmp_path / "out", "FP8_DYNAMIC")
    assert "quantization_config" in config(tmp_path / "out", "config")
    assert (tmp_path / "out" / "params.json").read_text() == "[not of this kind]"


def test_shards_and_index_keep_the_names_that_vllm_looks_for(tmp_path: Path) -> None:
    requant.convert(dense(tmp_path / "source"), tmp_path / "out", "BF16", target=["re:.*"], max_shard_size=200_000)
    index = config(tmp_path / "out", "consolidated.safetensors.index")["weight_map"]
    assert len(set(index.values())) > 2
    assert all(shard.startswith("consolidated-") for shard in index.values())
    assert stored(tmp_path / "out").keys() == stored(tmp_path / "source").keys()


def test_the_head_is_converted_where_a_target_names_it(tmp_path: Path) -> None:
    requant.convert(dense(tmp_path / "source"), tmp_path / "out", "FP8_BLOCK", target=["Linear", "output"])
    assert read(tmp_path / "out")["output.weight"].dtype == "F8_E4M3"


def test_kept_fp8_has_the_activations_that_params_json_said(tmp_path: Path) -> None:
    ignore = [r"re:.*\.attention\..*"]
    dynamic = {"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "NO_SCALES"}}
    arrays = tensors(quantized=True, inputs=False)
    for name, source, is_dynamic in (
        ("static", fp8(tmp_path / "source"), False),
        ("dynamic", checkpoint(tmp_path / "no-scales", arrays, {**PARAMS, **dynamic}), True),
    ):
        requant.convert(source, tmp_path / name, "NVFP4A16", ignore=ignore)
        groups = config(tmp_path / name, "params")["quantization"]["config_groups"].values()
        [kept] = [group for group in groups if group["weights"]["num_bits"] == 8]
        assert kept["weights"]["strategy"] == "tensor"
        assert kept["input_activations"]["dynamic"] is is_dynamic
        assert ("layers.0.attention.wq.input_scale" in read(tmp_path / name)) is not is_dynamic
