"""Fused groups in a plan: what is refused, and one global scale for all members wherever they lie."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import requant
from execute.folders import contents
from parity.checkpoints import Source, Stored, read, write

if TYPE_CHECKING:
    from pathlib import Path

BF16 = np.dtype(ml_dtypes.bfloat16)
ATTENTION = "model.layers.0.self_attn."
MLP = "model.layers.0.mlp."


def tensors(*, names: str = "q k v", seed: int = 0) -> dict[str, Any]:
    """A layer whose members have an amax of their own each."""
    rng = np.random.default_rng(seed)
    modules = [f"{ATTENTION}{name}_proj" for name in (*names.split(), "o")]
    modules += [f"{MLP}{name}_proj" for name in ("gate", "up", "down")]
    return {
        f"{module}.weight": (rng.standard_normal((64, 64)) * 0.01 * (place + 1)).astype(BF16)
        for place, module in enumerate(modules)
    }


def checkpoint(folder: Path, model_type: str = "qwen3", **options: Any) -> Path:
    return write(Source({"model.safetensors": tensors(**options)}, {"model_type": model_type}), folder)


def problems(error: pytest.ExceptionInfo[requant.RequantError]) -> list[tuple[str, str, str]]:
    return [(problem.code, problem.message, problem.remedy) for problem in error.value.problems]


def test_nvfp4_of_an_unknown_family_is_refused_with_a_way_out(tmp_path: Path) -> None:
    src = checkpoint(tmp_path / "src", "toy")
    for scheme in ("NVFP4", "NVFP4A16"):
        with pytest.raises(requant.CheckpointError) as caught:
            requant.convert(src, tmp_path / "dst", scheme)
        ((code, message, remedy),) = problems(caught)
        assert code == "fused-split"
        assert "'toy'" in message
        assert "--family generic" in remedy and "requant family init" in remedy
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize("scheme", ["FP8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP4A16", "W4A16_G32", "BF16"])
def test_what_shares_no_number_needs_no_family(tmp_path: Path, scheme: str) -> None:
    src = checkpoint(tmp_path / "src", "toy")
    assert requant.convert(src, tmp_path / "dst", scheme, ignore=["re:.*q_proj"], dry_run=True).to_json()["ok"]


def test_a_family_by_name_and_by_file(tmp_path: Path) -> None:
    known = checkpoint(tmp_path / "known", "qwen3")
    unknown = checkpoint(tmp_path / "unknown", "toy")
    own = tmp_path / "own.yaml"
    own.write_text("fused:\n  - [k_proj, v_proj]\n")
    requant.convert(known, tmp_path / "a", "NVFP4A16")
    requant.convert(unknown, tmp_path / "b", "NVFP4A16", family="generic")
    requant.convert(unknown, tmp_path / "c", "NVFP4A16", family=str(own))
    requant.convert(known, tmp_path / "d", "NVFP4A16", family=str(own))  # the user's word counts
    assert read(tmp_path / "a") == read(tmp_path / "b")
    assert read(tmp_path / "c") == read(tmp_path / "d")
    assert len(global_scales(read(tmp_path / "a"), "q k v")) == 1
    assert len(global_scales(read(tmp_path / "c"), "k v")) == 1
    assert len(global_scales(read(tmp_path / "c"), "q k v")) == 2


def global_scales(stored: dict[str, Stored], names: str) -> set[bytes]:
    return {stored[f"{ATTENTION}{name}_proj.weight_global_scale"].data for name in names.split()}


def test_the_shared_scale_is_that_of_the_largest_member(tmp_path: Path) -> None:
    src = checkpoint(tmp_path / "src")
    requant.convert(src, tmp_path / "dst", "NVFP4A16", arithmetic="float32")
    largest = max(float(np.abs(t.astype(np.float32)).max()) for n, t in tensors().items() if n[len(ATTENTION)] in "qkv")
    (scale,) = global_scales(read(tmp_path / "dst"), "q k v")
    assert np.frombuffer(scale, np.float32)[0] == pytest.approx(2688 / largest, rel=1e-6)


@pytest.mark.parametrize("scheme", ["NVFP4", "NVFP4A16", "FP8_BLOCK", "FP8_DYNAMIC", "MXFP4A16", "W4A16_G32"])
def test_a_group_that_is_torn_apart_is_named(tmp_path: Path, scheme: str) -> None:
    src = checkpoint(tmp_path / "src")
    with pytest.raises(requant.CheckpointError) as caught:
        requant.convert(src, tmp_path / "dst", scheme, ignore=["re:.*q_proj", "re:.*up_proj"])
    found = sorted(problems(caught), key=lambda problem: "gate_proj" in problem[1])
    assert [code for code, _, _ in found] == ["fused-split"] * 2
    assert f"k_proj: {scheme}, q_proj: unquantized, v_proj: {scheme}" in found[0][1]
    assert f"gate_proj: {scheme}, up_proj: unquantized" in found[1][1]


def test_a_group_that_no_rule_reaches_may_be_as_it_is(tmp_path: Path) -> None:
    """Somebody else's split group is no business of a job that leaves it alone."""
    stored = tensors()
    del stored[f"{ATTENTION}q_proj.weight"]
    stored[f"{ATTENTION}q_proj.weight_packed"] = np.zeros((64, 32), np.uint8)
    stored[f"{ATTENTION}q_proj.weight_scale"] = np.full((64, 2), 120, np.uint8)
    src = write(Source({"model.safetensors": stored}, {"model_type": "qwen3"}), tmp_path / "src")
    result = requant.convert(src, tmp_path / "dst", "FP8_BLOCK", target=["re:.*mlp.*"], dry_run=True).to_json()
    assert result["ok"] and result["converted"] == {"FP8_BLOCK": 3}
    with pytest.raises(requant.CheckpointError) as caught:
        requant.convert(src, tmp_path / "dst", "FP8_BLOCK", target=["re:.*[kv]_proj"], dry_run=True)
    assert "q_proj: MXFP4A16" in problems(caught)[0][1]


def test_a_kept_member_that_has_the_scheme_already_is_no_split(tmp_path: Path) -> None:
    src = checkpoint(tmp_path / "src")
    requant.convert(src, tmp_path / "fp8", "FP8_BLOCK")
    mixed = tmp_path / "mixed"
    halves = {**as_arrays(tmp_path / "fp8"), **{n: t for n, t in tensors().items() if "self_attn.k" in n}}
    del halves[f"{ATTENTION}k_proj.weight_scale"]
    write(Source({"model.safetensors": halves}, {"model_type": "qwen3"}), mixed)
    result = requant.convert(mixed, tmp_path / "dst", "FP8_BLOCK", target=["re:.*k_proj"]).to_json()
    assert result["converted"] == {"FP8_BLOCK": 1}
    assert read(tmp_path / "dst") == read(tmp_path / "fp8")


def test_a_member_that_has_a_global_scale_already_does_not_get_company(tmp_path: Path) -> None:
    """Its scale cannot be the one that the others find together."""
    src = checkpoint(tmp_path / "src")
    requant.convert(src, tmp_path / "nvfp4", "NVFP4A16")
    halves = {**as_arrays(tmp_path / "nvfp4"), **{n: t for n, t in tensors().items() if "self_attn.k" in n}}
    for suffix in ("weight_packed", "weight_scale", "weight_global_scale"):
        del halves[f"{ATTENTION}k_proj.{suffix}"]
    write(Source({"model.safetensors": halves}, {"model_type": "qwen3"}), tmp_path / "mixed")
    for options in ({}, {"target": ["re:.*k_proj"]}):
        with pytest.raises(requant.CheckpointError) as caught:
            requant.convert(tmp_path / "mixed", tmp_path / "dst", "NVFP4A16", **options)
        ((code, message, _),) = problems(caught)
        assert code == "fused-split" and "global scale" in message


def as_arrays(folder: Path) -> dict[str, Any]:
    dtypes = {"BF16": BF16, "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "U8": np.uint8, "F32": np.float32}
    return {
        name: np.frombuffer(stored.data, dtypes[stored.dtype]).reshape(stored.shape)
        for name, stored in read(folder).items()
    }


SPREAD = [
    ({"q": 1, "k": 1, "v": 2}, {"gate": 2, "up": 1}),
    ({"q": 3, "k": 1, "v": 2}, {"gate": 1, "up": 3}),
]


@pytest.mark.parametrize(("attention", "mlp"), SPREAD)
@pytest.mark.parametrize("dialect", ["compressed-tensors", "modelopt"])
def test_members_in_several_shards_have_the_bytes_of_those_in_one(
    tmp_path: Path, attention: dict[str, int], mlp: dict[str, int], dialect: str
) -> None:
    whole = checkpoint(tmp_path / "whole")
    spread = scatter(tmp_path / "spread", attention | mlp)
    for source in (whole, spread):
        requant.convert(source, source.with_suffix(".out"), "NVFP4", dialect=dialect, workers=2)
    assert read(tmp_path / "spread.out") == read(tmp_path / "whole.out")


def scatter(folder: Path, shard_of: dict[str, int]) -> Path:
    shards: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors().items():
        number = shard_of.get(name.split(".")[-2].removesuffix("_proj"), 1)
        shards.setdefault(f"model-{number}.safetensors", {})[name] = tensor
    return write(Source(shards, {"model_type": "qwen3"}), folder)


KILLED = """
import os, signal, sys
import requant
from requant.execute import journal

real, done = journal.Journal.mark_done, 0

def mark_done(self, name, values):
    global done
    real(self, name, values)
    done += 1
    if done == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

journal.Journal.mark_done = mark_done
requant.convert(sys.argv[1], sys.argv[2], "NVFP4", workers=1)
"""


@pytest.mark.parametrize("shards_done", [1, 2])
def test_a_kill_between_the_shards_of_a_group_changes_nothing(tmp_path: Path, shards_done: int) -> None:
    attention, mlp = SPREAD[1]
    requant.convert(checkpoint(tmp_path / "whole"), tmp_path / "whole.out", "NVFP4")
    src, dst = scatter(tmp_path / "spread", attention | mlp), tmp_path / "spread.out"
    command = [sys.executable, "-c", KILLED, str(src), str(dst), str(shards_done)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert "config.json" not in os.listdir(dst)
    result = requant.convert(src, dst, "NVFP4").to_json()
    assert any(f"continued: {shards_done} of 3" in note for note in result["notes"])
    assert read(dst) == read(tmp_path / "whole.out")
    assert not any(name.startswith(".requant") for name in contents(dst))
