"""``--max-shard-size``: shards that have grown too large are split."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

import requant
from parity.checkpoints import Source, read, write

if TYPE_CHECKING:
    from pathlib import Path

BF16 = ml_dtypes.bfloat16


def checkpoint(folder: Path, shards: int = 1) -> Path:
    rng = np.random.default_rng(0)
    files: dict[str, dict[str, Any]] = {}
    names = (
        ["model.safetensors"]
        if shards == 1
        else [f"model-{n + 1:05}-of-{shards:05}.safetensors" for n in range(shards)]
    )
    for layer, name in enumerate(names * (6 // shards)):
        arrays = files.setdefault(name, {})
        for leaf, rows in (("q_proj", 256), ("k_proj", 64), ("v_proj", 64), ("o_proj", 256)):
            arrays[f"model.layers.{layer}.self_attn.{leaf}.weight"] = rng.normal(0, 0.02, (rows, 256)).astype(BF16)
            arrays[f"model.layers.{layer}.self_attn.{leaf}.bias"] = rng.normal(0, 0.02, rows).astype(BF16)
        arrays[f"model.layers.{layer}.input_layernorm.weight"] = rng.normal(0, 0.02, 256).astype(BF16)
    return write(Source(files, {"model_type": "llama"}), folder)


def loaded(folder: Path) -> dict[str, Any]:
    """Read every tensor as loaders do: through the index, with safetensors' own library."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in folder.glob("*.safetensors")}
    found = {}
    for name, shard in index["weight_map"].items():
        with safe_open(folder / shard, "np") as file:
            found[name] = file.get_slice(name).get_shape()
    sizes = [
        sum(len(tensor.data) for tensor in read(folder / shard).values()) for shard in set(index["weight_map"].values())
    ]
    assert index["metadata"]["total_size"] == sum(sizes)
    return found


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "NVFP4", "FP8", "BF16"])
def test_split_shards_hold_what_the_whole_ones_do(tmp_path: Path, shards: int, scheme: str) -> None:
    source = checkpoint(tmp_path / "source", shards)
    requant.convert(source, tmp_path / "whole", scheme)
    result = requant.convert(source, tmp_path / "split", scheme, max_shard_size="150KB").to_json()
    assert read(tmp_path / "split") == read(tmp_path / "whole")
    assert loaded(tmp_path / "split").keys() == read(tmp_path / "whole").keys()
    files = list((tmp_path / "split").glob("*.safetensors"))
    assert len(files) > shards
    assert all(sum(len(tensor.data) for tensor in read(file).values()) <= 150_000 for file in files)
    assert not any("max-shard-size" in note for note in result["notes"])
    assert requant.verify(tmp_path / "split", "data").ok
    assert requant.compare(tmp_path / "whole", tmp_path / "split").exact
    config = "config.json"
    assert (tmp_path / "split" / config).read_bytes() == (tmp_path / "whole" / config).read_bytes()


def test_parts_of_a_weight_stay_together(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    requant.convert(source, tmp_path / "out", "NVFP4", max_shard_size="100kB")
    weight_map = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    homes: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        homes.setdefault(name.rpartition(".")[0], set()).add(shard)
        if name.endswith(("q_proj.weight_packed", "k_proj.weight_packed", "v_proj.weight_packed")):
            homes.setdefault(name.rpartition(".")[0].rpartition(".")[0] + ".qkv", set()).add(shard)
    weights = {module: shards for module, shards in homes.items() if "proj" in module or module.endswith("qkv")}
    with_bias = {module for module, shards in weights.items() if len(shards) > 1}
    assert all(f"{module}.bias" in weight_map for module in with_bias)
    assert all(len(shards) == 1 for module, shards in homes.items() if module.endswith("qkv"))


def test_what_cannot_be_divided_is_said(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source")
    result = requant.convert(source, tmp_path / "out", "FP8_DYNAMIC", max_shard_size=1000).to_json()
    assert any("more than --max-shard-size" in note for note in result["notes"])
    requant.convert(source, tmp_path / "whole", "FP8_DYNAMIC")
    assert read(tmp_path / "out") == read(tmp_path / "whole")


def test_small_shards_keep_their_names(tmp_path: Path) -> None:
    source = checkpoint(tmp_path / "source", 3)
    requant.convert(source, tmp_path / "out", "FP8_DYNAMIC", max_shard_size="1GB")
    assert {p.name for p in source.glob("*.safetensors")} == {p.name for p in (tmp_path / "out").glob("*.safetensors")}


def test_names_that_are_taken_are_not_used(tmp_path: Path) -> None:
    tensors = {f"model.layers.{n}.mlp.up_proj.weight": np.ones((64, 64), BF16) for n in range(4)}
    source = write(
        Source(
            {
                "model.safetensors": {name: tensors[name] for name in list(tensors)[:3]},
                "model-00001-of-00003.safetensors": {name: tensors[name] for name in list(tensors)[3:]},
            },
            {"model_type": "llama"},
        ),
        tmp_path / "source",
    )
    requant.convert(source, tmp_path / "out", "FP8_DYNAMIC", max_shard_size="5kB")
    assert len(read(tmp_path / "out")) == 8
    assert requant.verify(tmp_path / "out", "data").ok


@pytest.mark.parametrize("text", ["", "0", "-1GB", "5 apples", "1e3", "GB", "99999999999999999999TB", "9" * 400 + "GB"])
def test_sizes_that_are_none(tmp_path: Path, text: str) -> None:
    source = checkpoint(tmp_path / "source")
    with pytest.raises(requant.CallError, match="max-shard-size"):
        requant.convert(source, tmp_path / "out", "FP8_DYNAMIC", max_shard_size=text)


@pytest.mark.parametrize(
    ("text", "size"), [("1kB", 1000), ("2KiB", 2048), ("0.5MB", 500_000), ("7", 7), ("3 GiB", 3 << 30)]
)
def test_sizes(text: str, size: int) -> None:
    from requant.recipe.size import parse_size

    assert parse_size("max-shard-size", text) == size


def test_an_interrupted_split_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after the first pieces, run again: the rest is done, and the result is the undisturbed one's."""
    from requant.execute import journal

    source = checkpoint(tmp_path / "source")
    requant.convert(source, tmp_path / "whole", "NVFP4", max_shard_size="120kB")
    marked = journal.Journal.mark_done
    count = 0

    def interrupt(*args: Any) -> None:
        nonlocal count
        marked(*args)
        count += 1
        if count == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(journal.Journal, "mark_done", interrupt)
    with pytest.raises(KeyboardInterrupt):
        requant.convert(source, tmp_path / "out", "NVFP4", max_shard_size="120kB", workers=1)
    monkeypatch.undo()
    with pytest.raises(requant.CallError, match="fingerprint"):
        requant.convert(source, tmp_path / "out", "NVFP4", max_shard_size="130kB")
    again = requant.convert(source, tmp_path / "out", "NVFP4", max_shard_size="120kB").to_json()
    assert any("continued: 2 of" in note for note in again["notes"])
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir() if p.is_file()} == {
        p.name: p.read_bytes() for p in (tmp_path / "whole").iterdir() if p.is_file()
    }


def test_pieces_of_two_shards_have_no_name_in_common(tmp_path: Path) -> None:
    """Those of ``a`` cannot have the name of the second shard, and the next best is that of the third's."""
    names = ["a.safetensors", "a-00001-of-00002.safetensors", "a-split.safetensors"]
    rng = np.random.default_rng(1)
    files = {
        name: {f"{place}.{n}.weight": rng.normal(0, 1, (64, 64)).astype(BF16) for n in range(2)}
        for place, name in enumerate(names)
    }
    source = write(Source(files, {"model_type": "llama"}), tmp_path / "source")
    requant.convert(source, tmp_path / "out", "FP8_DYNAMIC", max_shard_size=5_000)
    assert len(loaded(tmp_path / "out")) == 12
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 6
    assert requant.verify(tmp_path / "out", against=source).ok
