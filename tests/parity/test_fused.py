"""Fused layers under NVFP4: one global scale for all members, as LLM Compressor's wherever it knows the group.

It does not know per-expert and shared gate/up, nor q_a/kv_a: there it runs on a copy in which they are called w1/w3.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import pytest

import requant
from parity import sources
from parity.checkpoints import Source, Stored, assert_same_meaning, differences, read, write

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from types import ModuleType

pytestmark = pytest.mark.parity

KINDS = [
    kind for kind in sources.KINDS if kind not in (sources.vanishing_scale, sources.subnormal_scale)
]  # LLM Compressor makes nothing of these: test_a_small_weight_in_f16

LAST_MEMBERS = ("v_proj.weight", "w3.weight")

_PAIRS = (
    (re.compile(r"experts((?:\.\d+)?)\.gate_proj\b"), r"experts\1.w1"),
    (re.compile(r"experts((?:\.\d+)?)\.up_proj\b"), r"experts\1.w3"),
    (re.compile(r"\bq_a_proj\b"), "w1"),
    (re.compile(r"\bkv_a_proj_with_mqa\b"), "w3"),
)
_WITHOUT_V = ((re.compile(r"\bq_proj\b"), "w1"), (re.compile(r"\bk_proj\b"), "w3"))


def renamed(source: Source, pairs: tuple[tuple[re.Pattern[str], str], ...] = _PAIRS) -> tuple[Source, dict[str, str]]:
    """Return a source with members called as LLM Compressor knows them, and each new module's old name."""
    back: dict[str, str] = {}

    def new(name: str) -> str:
        again = name
        for pattern, replacement in pairs:
            again = pattern.sub(replacement, again)
        back[again.rpartition(".")[0]] = name.rpartition(".")[0]
        return again

    shards = {shard: {new(name): array for name, array in arrays.items()} for shard, arrays in source.shards.items()}
    return source._replace(shards=shards), back


def names_back(tensors: Mapping[str, Stored], back: Mapping[str, str]) -> dict[str, Stored]:
    found = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        found[f"{back[module]}.{suffix}"] = tensor
    return found


def spread(source: Source) -> Source:
    """Deal the tensors out to two shards, so that every group lies in both."""
    (arrays,) = source.shards.values()
    names = sorted(arrays)
    halves = [{name: arrays[name] for name in names[start::2]} for start in (0, 1)]
    return source._replace(shards={f"model-0000{n}-of-00002.safetensors": half for n, half in enumerate(halves, 1)})


@pytest.mark.parametrize("model_type", sources.LAYERS)
@pytest.mark.parametrize("dtype", sources.DTYPES)
def test_members_share_a_scale(oracle: ModuleType, dtype: str, model_type: str, tmp_path: Path) -> None:
    source = sources.layers(dtype, model_type, KINDS)
    as_known, back = renamed(source)
    theirs = oracle.quantize(write(as_known, tmp_path / "known"), tmp_path / "theirs", "NVFP4A16", source.ignore)
    expected = names_back(read(theirs), back)
    for name, shards in (("one", source), ("two", spread(source))):
        src = write(shards, tmp_path / f"{name}-src")
        requant.convert(src, tmp_path / name, "NVFP4A16", ignore=source.ignore)
        assert differences(read(tmp_path / name), expected) == []
        assert_same_meaning(oracle, tmp_path / name, theirs)
    shared = {tensor.data for tensor in expected.values() if tensor.shape == (1,)}
    assert len(shared) < sum(tensor.shape == (1,) for tensor in expected.values())


@pytest.mark.parametrize("model_type", sources.LAYERS)
def test_a_group_cut_in_two_as_llm_compressor_has_it(oracle: ModuleType, model_type: str, tmp_path: Path) -> None:
    """It fetches the members from the other shard; with more than one group cut it fails."""
    source, back = renamed(sources.layers("BF16", model_type, KINDS))
    (arrays,) = source.shards.values()
    names = sorted(arrays)
    middle = next(place for place, name in enumerate(names) if name.endswith(LAST_MEMBERS) and ".layers.3." in name)
    halves = {"model-1.safetensors": names[:middle], "model-2.safetensors": names[middle:]}
    source = source._replace(shards={shard: {name: arrays[name] for name in half} for shard, half in halves.items()})
    src = write(source, tmp_path / "src")
    theirs = read(oracle.quantize(src, tmp_path / "theirs", "NVFP4A16", source.ignore))
    requant.convert(src, tmp_path / "ours", "NVFP4A16", ignore=source.ignore, family="generic")
    assert differences(names_back(read(tmp_path / "ours"), back), names_back(theirs, back)) == []


def test_a_missing_member_is_no_error(oracle: ModuleType, tmp_path: Path) -> None:
    """Without v_proj LLM Compressor fails; q_proj and k_proj still share a scale."""
    source = sources.layers("BF16", "llama", KINDS, missing=["v_proj"])
    as_known, back = renamed(source, _WITHOUT_V)
    theirs = oracle.quantize(write(as_known, tmp_path / "known"), tmp_path / "theirs", "NVFP4A16", source.ignore)
    requant.convert(write(source, tmp_path / "src"), tmp_path / "ours", "NVFP4A16", ignore=source.ignore)
    assert differences(read(tmp_path / "ours"), names_back(read(theirs), back)) == []


def test_a_small_weight_in_f16(oracle: ModuleType, tmp_path: Path) -> None:
    """Its global scale overflows F16: LLM Compressor writes 1 and zeros, requant what it would write of an F32 copy."""
    largest = {0: 0.041015625, 1: 0.01, 2: 0.041046142578125}
    rng = np.random.default_rng(0)
    arrays = {}
    for layer, amax in largest.items():
        for leaf in ("gate_proj", "up_proj"):
            values = rng.normal(0, amax / 5, (40, 64)).clip(-amax, amax)
            values[3, 7] = amax
            arrays[f"model.layers.{layer}.mlp.{leaf}.weight"] = values.astype(np.float16)
    config = {"model_type": "llama", "dtype": "float16"}
    source = Source({"model.safetensors": arrays}, config)
    src = write(source, tmp_path / "src")
    requant.convert(src, tmp_path / "ours", "NVFP4A16")
    wide = {name: array.astype(np.float32) for name, array in arrays.items()}
    wide_src = write(source._replace(shards={"model.safetensors": wide}), tmp_path / "wide")
    ours = read(tmp_path / "ours")
    from_f16 = read(oracle.quantize(src, tmp_path / "f16", "NVFP4A16", ()))
    from_f32 = read(oracle.quantize(wide_src, tmp_path / "f32", "NVFP4A16", ()))
    for name, tensor in ours.items():
        small = ".layers.2." not in name
        assert tensor.data == (from_f32 if small else from_f16)[name].data, name
        if small and name.endswith("global_scale"):
            assert np.frombuffer(from_f16[name].data, np.float32) == 1
