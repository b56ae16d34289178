"""``upgrade``: part of a checkpoint converted in place, whatever interrupts it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import requant
from parity.checkpoints import Source, read, write
from requant.checkpoint import rehearsal

from .folders import contents

if TYPE_CHECKING:
    from pathlib import Path

BF16 = ml_dtypes.bfloat16
RECIPE = """\
description: attention in FP8, the rest as it is
rules:
  - scheme: {scheme}
    modules: ['re:.*self_attn.*']
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return written_recipe(tmp_path, "FP8_DYNAMIC")


def written_recipe(folder: Path, scheme: str) -> Path:
    file = folder / f"{scheme}.yaml"
    file.write_text(RECIPE.format(scheme=scheme))
    return file


def checkpoint(folder: Path) -> Path:
    """Three shards: attention in the first two, q apart from k and v; in the third there is nothing to do."""
    rng = np.random.default_rng(1)

    def weight(rows: int) -> Any:
        return rng.normal(0, 0.02 * rows / 64, (rows, 64)).astype(BF16)

    attention = "model.layers.0.self_attn"
    shards = {
        "model-00001-of-00003.safetensors": {
            f"{attention}.q_proj.weight": weight(128),
            "model.layers.0.mlp.up_proj.weight": weight(256),
            "model.layers.0.input_layernorm.weight": rng.normal(1, 0.1, 64).astype(BF16),
        },
        "model-00002-of-00003.safetensors": {
            f"{attention}.k_proj.weight": weight(64),
            f"{attention}.v_proj.weight": weight(32),
            "model.layers.0.extra": np.arange(7, dtype=np.float32),
        },
        "model-00003-of-00003.safetensors": {"lm_head.weight": weight(512), "model.embed_tokens.weight": weight(512)},
    }
    write(Source(shards, {"model_type": "llama", "hidden_size": 64}), folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def killed(folder: Path, recipe: Path, kind: str, number: int) -> bool:
    """Upgrade in a process that dies at a step; tell whether it did."""
    child = os.fork()
    if child == 0:
        try:
            rehearsal._KIND, rehearsal._LEFT[0] = kind, number
            requant.upgrade(folder, recipe=recipe, workers=1)
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


@pytest.mark.parametrize("scheme", ["NVFP4", pytest.param("FP8_DYNAMIC", marks=pytest.mark.heavy)])
@pytest.mark.parametrize("kind", ["write", "fsync", "rename", "index", "config"])
def test_whatever_step_it_dies_at(tmp_path: Path, kind: str, scheme: str) -> None:
    """NVFP4's q, k and v share a scale and lie in two shards: what the first one gave is not lost with it."""
    recipe = written_recipe(tmp_path, scheme)
    source = checkpoint(tmp_path / "source")
    wanted = shutil.copytree(source, tmp_path / "wanted")
    requant.upgrade(wanted, recipe=recipe)
    undisturbed = contents(wanted)
    number, deaths = 0, 0
    while True:
        number += 1
        folder = shutil.copytree(source, tmp_path / f"{number}")
        if not killed(folder, recipe, kind, number):
            break
        deaths += 1
        state = requant.verify(folder, "headers").state
        assert state in ("complete", "in-progress")
        if state == "complete":
            # Before it began, or after it was done: one whole checkpoint, never a mix.
            assert {name: data for name, data in contents(folder).items() if ".requant" not in name} in (
                contents(source),
                undisturbed,
            )
        before = {name for file in folder.glob("*.safetensors") for name in read(file)}
        assert {name.rpartition(".")[0] for name in before} == {name.rpartition(".")[0] for name in read(source)}
        requant.upgrade(folder, recipe=recipe)
        assert contents(folder) == undisturbed
        shutil.rmtree(folder)
    assert deaths == number - 1 and deaths >= 1


def test_what_is_upgraded_and_what_is_not(tmp_path: Path, recipe: Path) -> None:
    source = checkpoint(tmp_path / "source")
    folder = shutil.copytree(source, tmp_path / "upgraded")
    untouched = (folder / "model-00003-of-00003.safetensors").stat()
    result = requant.upgrade(folder, recipe=recipe).to_json()
    assert result["converted"] == {"FP8_DYNAMIC": 3} and result["shards_rewritten"] == 2
    assert (folder / "model-00003-of-00003.safetensors").stat().st_ino == untouched.st_ino
    requant.convert(source, tmp_path / "converted", recipe=recipe)
    assert read(folder) == read(tmp_path / "converted")
    for name in ("config.json", "model.safetensors.index.json"):
        assert (folder / name).read_bytes() == (tmp_path / "converted" / name).read_bytes()
    assert (folder / "config.json.before-requant").read_bytes() == (source / "config.json").read_bytes()
    assert requant.verify(folder, "data", against=source).ok
    again = requant.upgrade(folder, recipe=recipe).to_json()
    assert any("nothing to do" in note for note in again["notes"])
    assert not (folder / ".requant").exists()


def test_two_upgrades_are_one(small_k3: Path, tmp_path: Path) -> None:
    requant.convert(small_k3, tmp_path / "one", recipe="kimi-k3-nvfp4-w4a4")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    requant.upgrade(tmp_path / "one", recipe="kimi-k3-fp8-attention-shared")
    requant.upgrade(tmp_path / "two", recipe="kimi-k3-fp8-attention")
    requant.upgrade(tmp_path / "two", recipe="kimi-k3-fp8-shared-experts")
    assert read(tmp_path / "one") == read(tmp_path / "two")
    texts = [(tmp_path / name / "config.json").read_text() for name in ("one", "two")]
    assert texts[0] == texts[1]
    groups = json.loads(texts[0])["quantization_config"]["config_groups"]
    assert {group["format"] for group in groups.values()} == {"float-quantized", "nvfp4-pack-quantized"}


def test_native_experts_get_the_activations_that_engines_want(small_k3: Path, tmp_path: Path) -> None:
    """vLLM takes its own MXFP4 path with MXFP8 activations declared; TensorRT-LLM wants none."""
    text = requant.api.recipe_text("kimi-k3-fp8-attention").replace("vllm>=0.28", "TensorRT-LLM>=1.3")
    (tmp_path / "trt.yaml").write_text(text)
    folder = shutil.copytree(small_k3, tmp_path / "trt")
    requant.upgrade(folder, recipe=tmp_path / "trt.yaml")
    groups = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]
    assert [g["input_activations"] for g in groups.values() if g["format"] == "mxfp4-pack-quantized"] == [None]
    folder = shutil.copytree(small_k3, tmp_path / "k3")
    requant.upgrade(folder, recipe="kimi-k3-fp8-attention")
    groups = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]
    [experts] = [group for group in groups.values() if group["format"] == "mxfp4-pack-quantized"]
    assert experts["input_activations"]["num_bits"] == 8 and experts["input_activations"]["group_size"] == 32


def test_another_recipe_does_not_finish_it(tmp_path: Path, recipe: Path) -> None:
    folder = checkpoint(tmp_path / "k")
    assert killed(folder, recipe, "rename", 4)
    other = written_recipe(tmp_path, "NVFP4A16")
    with pytest.raises(requant.CallError, match="unfinished"):
        requant.upgrade(folder, recipe=other)
    with pytest.raises(requant.CallError, match="being upgraded"):
        requant.convert(checkpoint(tmp_path / "other"), folder, "FP8_DYNAMIC", restart=True)
    assert requant.verify(folder).state == "in-progress"
    requant.upgrade(folder, recipe=recipe)
    assert requant.verify(folder, "data").ok


def test_a_nan_is_found_before_anything_is_touched(tmp_path: Path, recipe: Path) -> None:
    folder = checkpoint(tmp_path / "k")
    file = folder / "model-00002-of-00003.safetensors"
    data = bytearray(file.read_bytes())
    data[-2:] = b"\xc0\x7f"  # the last value of the last tensor, a weight of attention
    file.write_bytes(data)
    before = contents(folder)
    with pytest.raises(requant.CheckpointError) as caught:
        requant.upgrade(folder, recipe=recipe)
    assert [problem.code for problem in caught.value.problems] == ["nan-or-inf"]
    assert contents(folder) == before


def test_links_into_a_cache_are_refused(tmp_path: Path, recipe: Path) -> None:
    source = checkpoint(tmp_path / "blobs")
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    with pytest.raises(requant.CheckpointError) as caught:
        requant.upgrade(folder, recipe=recipe)
    assert "cache-links" in {problem.code for problem in caught.value.problems}
    assert {path.name for path in folder.iterdir()} == {path.name for path in source.iterdir()}


def test_space_is_checked_first_and_hard_links_count(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from requant.execute import upgrade as module

    folder = checkpoint(tmp_path / "k")
    needed = []

    def free(_folder: Path) -> int:
        return 10_000

    monkeypatch.setattr(module, "free_space", free)
    before = contents(folder)
    with pytest.raises(requant.SurroundingsError) as caught:
        requant.upgrade(folder, recipe=recipe, workers=1)
    needed.append(caught.value.problems[0].message)
    assert [problem.code for problem in caught.value.problems] == ["no-space"]
    assert contents(folder) == before
    for shard in folder.glob("*.safetensors"):
        os.link(shard, tmp_path / shard.name)
    with pytest.raises(requant.SurroundingsError) as caught:
        requant.upgrade(folder, recipe=recipe, workers=1)
    assert caught.value.problems[0].message != needed[0]


def test_a_checkpoint_larger_than_the_free_disk(tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One shard at a time stands beside the old ones: that much has to be free, and no more."""
    from requant.execute import upgrade as module

    folder = checkpoint(tmp_path / "k")
    largest = max(path.stat().st_size for path in folder.glob("*-0000[12]-*.safetensors"))
    monkeypatch.setattr(module, "free_space", lambda _folder: largest)
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) > 2 * largest
    requant.upgrade(folder, recipe=recipe, workers=1)
    assert requant.verify(folder, "data").ok


@pytest.mark.heavy
def test_a_small_disk_that_is_full_of_it(tmp_path: Path, recipe: Path) -> None:
    """24 shards on a file system with room for two more. Where nothing can be mounted, the test above has to do."""
    rng = np.random.default_rng(3)
    files = [f"model-{n + 1:05}-of-00024.safetensors" for n in range(24)]
    shards = {
        file: {f"model.layers.{n}.self_attn.o_proj.weight": rng.normal(0, 1, (256, 2048)).astype(BF16)}
        for n, file in enumerate(files)
    }
    source = write(Source(shards, {"model_type": "llama"}), tmp_path / "source")
    disk = tmp_path / "disk"
    disk.mkdir()
    size = sum(path.stat().st_size for path in source.iterdir()) // 2**20 + 4
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}M", "tmpfs", str(disk)], capture_output=True, check=False
    )
    try:
        folder = shutil.copytree(source, disk / "served")
        if mounted.returncode == 0:
            assert shutil.disk_usage(disk).free < sum(path.stat().st_size for path in source.iterdir()) // 4
        requant.upgrade(folder, recipe=recipe, workers=1)
        assert requant.verify(folder, "data", against=source).ok
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", str(disk)], check=True)


def test_another_process_is_waited_for(tmp_path: Path, recipe: Path) -> None:
    import fcntl

    folder = checkpoint(tmp_path / "k")
    (folder / ".requant").mkdir()
    with (folder / ".requant" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(requant.SurroundingsError, match="another process"):
            requant.upgrade(folder, recipe=recipe)


@pytest.mark.heavy
def test_full_size_attention_upgrade_rewrites_little_where_files_share(full_size_k3: Path) -> None:
    found = requant.upgrade(full_size_k3, recipe="kimi-k3-fp8-attention", dry_run=True).to_json()
    assert found["converted"] == {"FP8_DYNAMIC": 579}
    assert found["bytes_written"] < 80e9
    assert 1.4e12 < found["bytes_shared"] + found["bytes_written"] < 1.56e12
    assert not (full_size_k3 / ".requant").exists()


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(3))
def test_real_kills_once_the_first_shard_has_changed(tmp_path: Path, recipe: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = {
        f"model.layers.{n}.self_attn.o_proj.weight": rng.normal(0, 1, (256, 4096)).astype(BF16) for n in range(24)
    }
    names = [f"model-{n + 1:05}-of-00024.safetensors" for n in range(24)]
    shards = {file: {name: weights[name]} for file, name in zip(names, weights, strict=True)}
    source = write(Source(shards, {"model_type": "llama"}), tmp_path / "source")
    wanted = shutil.copytree(source, tmp_path / "wanted")
    requant.upgrade(wanted, recipe=recipe)
    folder = shutil.copytree(source, tmp_path / "upgraded")
    before = (folder / names[0]).stat().st_ino
    for kills in range(1, 20):
        command = [sys.executable, "-m", "requant", "upgrade", str(folder), "--recipe", str(recipe), "--workers", "1"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and (folder / names[0]).stat().st_ino == before:
            time.sleep(0.001)
        time.sleep(float(rng.uniform(0, 0.05)))
        process.kill()
        if process.wait() == 0:
            break
        state = requant.verify(folder, "headers").state
        assert state == "in-progress" or not (folder / ".requant" / "journal.json").exists()
        if kills == 3:
            requant.upgrade(folder, recipe=recipe)
            break
    assert contents(folder) == contents(wanted)
