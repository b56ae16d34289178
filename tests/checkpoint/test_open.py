"""Opening a checkpoint: which files it is, what the index must agree with, all problems at once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.numpy import load_file, save

from checkpoint.folders import Arrays, noise, write_checkpoint
from requant.checkpoint.checkpoint import Checkpoint, open_checkpoint
from requant.checkpoint.header import TensorRef
from requant.errors import CallError, CheckpointError, Problem, SurroundingsError

if TYPE_CHECKING:
    from pathlib import Path

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
SHARDS: dict[str, Arrays] = {
    FIRST: {"a.weight": noise("BF16", (8, 8), 1), "a.bias": noise("F32", (8,), 2)},
    SECOND: {"b.weight": noise("BF16", (8, 8), 3), "router": noise("F32", ()), "none": noise("U8", (0,))},
}


def problems(folder: Path) -> tuple[Problem, ...]:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    return caught.value.problems


def told(folder: Path) -> set[tuple[str, str]]:
    return {(problem.code, problem.module) for problem in problems(folder)}


def tensors(checkpoint: Checkpoint) -> dict[str, TensorRef]:
    return {ref.name: ref for shard in checkpoint.shards for ref in shard.tensors}


def weight_map(**changes: str | None) -> dict[str, str]:
    places = {name: shard for shard, tensors in SHARDS.items() for name in tensors} | changes
    return {name: shard for name, shard in places.items() if shard is not None}


def test_every_tensor_is_found_where_the_index_says(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, SHARDS)
    with open_checkpoint(folder) as checkpoint:
        assert [header.shard for header in checkpoint.shards] == [FIRST, SECOND]
        assert set(tensors(checkpoint)) == {name for held in SHARDS.values() for name in held}
        for ref in tensors(checkpoint).values():
            assert checkpoint.store.read(ref.shard, ref.offset, ref.nbytes) == SHARDS[ref.shard][ref.name].tobytes()
        assert checkpoint.index is not None
        assert (checkpoint.index.file, checkpoint.index.metadata) == ("model.safetensors.index.json", {})
        assert checkpoint.config == b'{"model_type": "toy"}'
        assert checkpoint.notes == ()


@pytest.mark.parametrize("name", ["model.safetensors", "other.safetensors"])
def test_a_single_file_needs_no_index(tmp_path: Path, name: str) -> None:
    with open_checkpoint(str(write_checkpoint(tmp_path, {name: SHARDS[FIRST]}))) as checkpoint:
        assert checkpoint.index is None
        assert set(tensors(checkpoint)) == set(load_file(tmp_path / name))


def test_a_checkpoint_may_lack_its_config(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SHARDS)
    (tmp_path / "config.json").unlink()
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.config is None


def test_files_of_a_cache_are_followed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "blobs", SHARDS)
    (tmp_path / "snapshot").mkdir()
    for path in (tmp_path / "blobs").iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(f"../blobs/{path.name}")
    with open_checkpoint(tmp_path / "snapshot") as checkpoint:
        assert checkpoint.tensor_count == 5


def test_metadata_of_the_index_is_kept(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SHARDS, metadata={"total_size": 324, "total_parameters": 200, "by": {"who": "us"}})
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.index is not None
        assert checkpoint.index.metadata == {"total_parameters": 200, "by": {"who": "us"}}


@pytest.mark.parametrize("total", [1, "1", 1.5])
def test_a_wrong_total_is_a_note(tmp_path: Path, total: Any) -> None:
    write_checkpoint(tmp_path, SHARDS, metadata={"total_size": total})
    with open_checkpoint(tmp_path) as checkpoint:
        (note,) = checkpoint.notes
        assert "total_size" in note


def test_weights_that_the_index_does_not_name_are_noted_and_not_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SHARDS)
    (tmp_path / "consolidated.safetensors").write_bytes(b"not even safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "old.safetensors").write_bytes(b"")
    with open_checkpoint(tmp_path) as checkpoint:
        (note,) = checkpoint.notes
        assert "consolidated.safetensors, pytorch_model.bin" in note
        assert "old" not in note


def test_no_folder_is_the_caller_s_fault(tmp_path: Path) -> None:
    with pytest.raises(CallError):
        open_checkpoint(tmp_path / "gone")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CallError):
        open_checkpoint(tmp_path / "file")


def test_a_folder_without_weights(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path)
    assert (problem.code, problem.module) == ("index-mismatch", str(tmp_path))


def test_several_files_without_an_index(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SHARDS)
    (tmp_path / "model.safetensors.index.json").unlink()
    (problem,) = problems(tmp_path)
    assert problem.code == "index-mismatch"
    assert FIRST in problem.message
    assert SECOND in problem.message


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", "\ufffe", "[" * 99_999, '{"weight_map": []}', '{"weight_map": {}}'),
        *('{"weight_map": {"a": 1}}', '{"weight_map": {"a": "m.safetensors", "a": "m.safetensors"}}'),
    ],
)
def test_an_index_that_is_none(tmp_path: Path, text: str) -> None:
    write_checkpoint(tmp_path, SHARDS)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert told(tmp_path) == {("index-mismatch", "model.safetensors.index.json")}


@pytest.mark.parametrize(
    "shard",
    [
        *("../m.safetensors", "a/../../m.safetensors", "/etc/m.safetensors", "a\\m.safetensors", "m\0.safetensors"),
        *("", ".", "./m.safetensors", "a//m.safetensors", "m.bin", "m", "config.json", "m.safetensors/"),
    ],
)
def test_shards_outside_the_folder_are_never_opened(tmp_path: Path, shard: str) -> None:
    (tmp_path / "m.safetensors").write_bytes(save(SHARDS[FIRST]))
    folder = write_checkpoint(tmp_path / "in", SHARDS, weight_map=weight_map(evil=shard))
    (problem,) = problems(folder)
    assert problem.code == "name-hostile"
    assert repr(shard) in problem.message


def test_index_and_shards_must_agree_and_all_differences_are_told(tmp_path: Path) -> None:
    extra = {"b.weight": SHARDS[SECOND]["b.weight"], "surplus": noise("U8", (4,))}
    shards = {FIRST: SHARDS[FIRST] | extra, SECOND: SHARDS[SECOND]}
    places = weight_map(gone=FIRST, elsewhere="model-00009-of-00002.safetensors", router=FIRST)
    write_checkpoint(tmp_path, shards, weight_map=places)
    found = {problem.module: problem.message for problem in problems(tmp_path)}
    assert set(found) == {"b.weight", "surplus", "gone", "model-00009-of-00002.safetensors", "router"}
    assert "more than one shard" in found["b.weight"]
    assert "not in the index" in found["surplus"]
    assert SECOND in found["router"]
    assert FIRST in found["router"]


def test_damage_in_several_files_is_told_at_once(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SHARDS)
    (tmp_path / FIRST).write_bytes((tmp_path / FIRST).read_bytes()[:-1])
    (tmp_path / SECOND).write_bytes(b"<html>404</html>")
    found = told(tmp_path)
    assert {code for code, _ in found} == {"header-invalid"}
    assert {("header-invalid", "a.weight"), ("header-invalid", SECOND)} <= found


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SHARDS)
    (tmp_path / SECOND).unlink()
    assert told(tmp_path) == {("index-mismatch", SECOND)}


def test_a_download_that_is_not_finished_is_told(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SHARDS)
    (tmp_path / SECOND).unlink()
    (tmp_path / SECOND).symlink_to("../blobs/gone")
    with pytest.raises(SurroundingsError, match=SECOND):
        open_checkpoint(tmp_path)


def test_a_header_longer_than_the_first_read(tmp_path: Path) -> None:
    many = {f"model.layers.{i}.mlp.experts.{i}.down_proj.weight": noise("U8", (1,)) for i in range(12_000)}
    write_checkpoint(tmp_path, {"model.safetensors": many})
    assert (tmp_path / "model.safetensors").stat().st_size > 1 << 20
    with open_checkpoint(tmp_path) as checkpoint:
        assert tensors(checkpoint).keys() == many.keys()


def test_thousands_of_differences_are_counted(tmp_path: Path) -> None:
    places = weight_map() | {f"gone.{i}": FIRST for i in range(3000)}
    write_checkpoint(tmp_path, SHARDS, weight_map=places)
    found = problems(tmp_path)
    assert len(found) == 51
    assert "2,950 more" in found[-1].message


def test_the_index_may_name_files_in_folders(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"model.safetensors": SHARDS[FIRST]})
    (tmp_path / "sub").mkdir()
    (tmp_path / "model.safetensors").rename(tmp_path / "sub" / "m.safetensors")
    index = {"weight_map": dict.fromkeys(SHARDS[FIRST], "sub/m.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with open_checkpoint(tmp_path) as checkpoint:
        assert {ref.shard for ref in tensors(checkpoint).values()} == {"sub/m.safetensors"}


@pytest.mark.parametrize("folder", [".requant", ".git", ".cache"])
def test_a_shard_in_a_tool_s_folder_is_hostile(tmp_path: Path, folder: str) -> None:
    """What lies there is not copied, and .requant is removed at the end of a job."""
    write_checkpoint(tmp_path, {"model.safetensors": SHARDS[FIRST]})
    (tmp_path / folder).mkdir()
    (tmp_path / "model.safetensors").rename(tmp_path / folder / "m.safetensors")
    index = {"weight_map": dict.fromkeys(SHARDS[FIRST], f"{folder}/m.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert {problem.code for problem in problems(tmp_path)} == {"name-hostile"}


def test_a_dangling_link_in_a_tool_s_folder_is_nobody_s_business(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, {"model.safetensors": SHARDS[FIRST]})
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "gone").symlink_to(tmp_path / "nowhere")
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.tensor_count == len(SHARDS[FIRST])
