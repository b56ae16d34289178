"""Conversions: the values, the bytes that stay, and what is read, written and opened on the way."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import requant
from execute.folders import contents
from parity.checkpoints import Source, read, write
from requant import demo

if TYPE_CHECKING:
    from pathlib import Path

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
TOY = {"model_type": "toy", "dtype": "bfloat16"}


def mxfp4_values(packed: np.ndarray[Any, Any], exponents: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Decode MXFP4 by its definition, in float64."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)
    return E2M1[codes] * np.exp2(np.repeat(exponents.astype(np.float64) - 127, 32, axis=1))


def fp8_values(stored: dict[str, Any], module: str) -> np.ndarray[Any, Any]:
    """Decode FP8 with a scale per row or per 128x128 block, in float64."""
    weight, scale = stored[module + ".weight"], stored[module + ".weight_scale"]
    assert (weight.dtype, scale.dtype) == ("F8_E4M3", "BF16")
    codes = np.frombuffer(weight.data, E4M3).reshape(weight.shape).astype(np.float64)
    scales = np.frombuffer(scale.data, BF16).reshape(scale.shape).astype(np.float64)
    rows = 1 if scale.shape == (weight.shape[0], 1) else 128
    columns = weight.shape[1] if rows == 1 else 128
    spread = np.repeat(np.repeat(scales, rows, axis=0), columns, axis=1)
    return codes * spread[: weight.shape[0], : weight.shape[1]]


@pytest.mark.parametrize("scheme", ["FP8_BLOCK", "FP8_DYNAMIC"])
def test_mxfp4_becomes_fp8_without_changing_a_value(small_k3: Path, tmp_path: Path, scheme: str) -> None:
    result = requant.convert(small_k3, tmp_path / "dst", scheme, ignore=demo.IGNORE).to_json()
    before, after = read(small_k3), read(tmp_path / "dst")
    modules = [name.removesuffix(".weight_packed") for name in before if name.endswith(".weight_packed")]
    assert len(modules) == result["routes"]["exact"] == 4 * 8 * 3
    for module in modules:
        packed, exponents = before[module + ".weight_packed"], before[module + ".weight_scale"]
        wanted = mxfp4_values(
            np.frombuffer(packed.data, np.uint8).reshape(packed.shape),
            np.frombuffer(exponents.data, np.uint8).reshape(exponents.shape),
        )
        assert np.array_equal(fp8_values(after, module), wanted)
        assert np.array_equal(np.signbit(fp8_values(after, module)), np.signbit(wanted))
    assert result["values"]["over_span"] == 0
    compared = requant.compare(small_k3, tmp_path / "dst").to_json()
    assert compared["classes"]["expert"]["differing"] == 0
    assert compared["classes"]["expert"]["sqnr_db"] is None


def test_rounding_the_experts_costs_what_the_reference_costs(small_k3: Path, tmp_path: Path) -> None:
    """30 dB, by a comparison that is not requant's own."""
    requant.convert(small_k3, tmp_path / "dst", "FP8_BLOCK", ignore=demo.IGNORE, exact="off")
    before, after = read(small_k3), read(tmp_path / "dst")
    signal = noise = 0.0
    for name in [name for name in before if name.endswith(".weight_packed")]:
        module = name.removesuffix(".weight_packed")
        packed, exponents = before[name], before[module + ".weight_scale"]
        wanted = mxfp4_values(
            np.frombuffer(packed.data, np.uint8).reshape(packed.shape),
            np.frombuffer(exponents.data, np.uint8).reshape(exponents.shape),
        )
        signal += float(np.sum(wanted**2))
        noise += float(np.sum((wanted - fp8_values(after, module)) ** 2))
    sqnr = 10 * np.log10(signal / noise)
    assert 29.5 < sqnr < 32
    compared = requant.compare(small_k3, tmp_path / "dst").to_json()
    assert compared["classes"]["expert"]["sqnr_db"] == pytest.approx(sqnr, abs=1e-6)


def test_every_kept_tensor_is_there_byte_for_byte(small_k3: Path, tmp_path: Path) -> None:
    requant.convert(small_k3, tmp_path / "dst", "FP8_BLOCK", ignore=demo.IGNORE)
    before, after = read(small_k3), read(tmp_path / "dst")
    made = {name.rpartition(".")[0] for name in after if name.endswith(".weight_scale")}
    assert len(made) == 119
    kept = {name for name in before if name.rpartition(".")[0] not in made}
    assert {name: before[name] for name in kept} == {name: after[name] for name in kept}
    assert after.keys() == kept | {module + suffix for module in made for suffix in (".weight", ".weight_scale")}


def test_the_bytes_are_the_same_for_any_number_of_workers(small_k3: Path, tmp_path: Path) -> None:
    for workers in (1, 2, 5):
        requant.convert(small_k3, tmp_path / str(workers), "FP8_BLOCK", ignore=demo.IGNORE, workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "2") == contents(tmp_path / "5")


def test_exotic_tensors_and_side_files_come_through(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    tensors = {
        "model.layers.0.q_proj.weight": rng.standard_normal((130, 70)).astype(BF16),
        "model.layers.0.q_proj.bias": rng.standard_normal(130).astype(BF16),
        "model.layers.0.A_log": rng.standard_normal(3).astype(np.float32),
        "router.tid2eid": rng.integers(0, 9, (4, 4)),
        "logit_scale": np.array(2.5, np.float32),
        "nothing": np.zeros((0, 5), np.float16),
        "mask": np.array([True, False]),
        "table.weight": np.arange(8, dtype=np.int8).reshape(2, 4),
        "model.layers.0.empty_proj.weight": np.zeros((0, 64), BF16),
    }
    src = write(Source({"model.safetensors": tensors}, TOY), tmp_path / "src")
    (src / "tokenizer.json").write_text("{}")
    (src / "README.md").write_text("# base")
    (src / "code").mkdir()
    (src / "code" / "modeling.py").write_text("print('never run')")
    (src / "pytorch_model.bin").write_bytes(b"old")
    result = requant.convert(src, tmp_path / "dst", "FP8_BLOCK", ignore=["table"]).to_json()
    before, after = read(src), read(tmp_path / "dst")
    assert set(after) == {*before, "model.layers.0.q_proj.weight_scale"}
    assert all(after[name] == before[name] for name in before if name != "model.layers.0.q_proj.weight")
    assert result["tensors_out"] == len(after)
    files = set(contents(tmp_path / "dst"))
    assert files == {"model.safetensors", "config.json", "tokenizer.json", "BASE_README.md", "code/modeling.py"}


def test_parts_in_different_shards_find_each_other(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    packed = rng.integers(0, 256, (256, 64), np.uint8)
    exponents = rng.integers(118, 124, (256, 4), np.uint8)
    together = {"m.weight_packed": packed, "m.weight_scale": exponents, "n.weight": np.ones((4, 4), BF16)}
    one = write(Source({"model.safetensors": together}, TOY), tmp_path / "one")
    shards = {
        "model-1.safetensors": {"m.weight_scale": exponents},
        "model-2.safetensors": {"m.weight_packed": packed, "n.weight": together["n.weight"]},
    }
    two = write(Source(shards, TOY), tmp_path / "two")
    for src in (one, two):
        requant.convert(src, tmp_path / f"{src.name}-out", "FP8_BLOCK")
    assert read(tmp_path / "one-out") == read(tmp_path / "two-out")
    index = json.loads((tmp_path / "two-out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {"model-2.safetensors"}
    assert not (tmp_path / "one-out" / "model.safetensors.index.json").exists()
    assert requant.verify(tmp_path / "two-out", "data").ok


def test_the_index_tells_the_truth(small_k3: Path, tmp_path: Path) -> None:
    plan = requant.convert(small_k3, tmp_path / "dst", "FP8_BLOCK", ignore=demo.IGNORE).to_json()
    index = json.loads((tmp_path / "dst" / "model.safetensors.index.json").read_text())
    stored = read(tmp_path / "dst")
    assert index["metadata"]["total_size"] == sum(len(tensor.data) for tensor in stored.values()) == plan["bytes_out"]
    assert set(index["weight_map"]) == set(stored)
    for shard in set(index["weight_map"].values()):
        assert {name for name, file in index["weight_map"].items() if file == shard} == set(
            read(tmp_path / "dst" / shard)
        )


def test_a_shard_with_nothing_to_convert_is_copied_as_it_is(tmp_path: Path) -> None:
    shards = {
        "a.safetensors": {"lm_head.weight": np.ones((8, 8), BF16), "x": np.zeros(3, np.int64)},
        "b.safetensors": {"m.weight": np.ones((8, 8), BF16)},
    }
    src = write(Source(shards, TOY), tmp_path / "src")
    requant.convert(src, tmp_path / "dst", "FP8_BLOCK")
    assert (src / "a.safetensors").read_bytes() == (tmp_path / "dst" / "a.safetensors").read_bytes()


def test_what_is_already_there_is_left_alone(small_k3: Path, tmp_path: Path) -> None:
    requant.convert(small_k3, tmp_path / "once", "FP8_BLOCK", ignore=demo.IGNORE)
    twice = requant.convert(tmp_path / "once", tmp_path / "twice", "FP8_BLOCK", ignore=demo.IGNORE).to_json()
    assert twice["converted"] == {}
    assert twice["kept_reasons"]["already-FP8_BLOCK"] == 119
    assert read(tmp_path / "once") == read(tmp_path / "twice")
    config = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("once", "twice")]
    assert config[0] == config[1]


def over_span_weight() -> dict[str, Any]:
    """One 128x128 block whose groups lie 2^40 apart, beside one that a single scale holds."""
    packed = np.full((128, 128), 0x77, np.uint8)
    exponents = np.full((128, 8), 120, np.uint8)
    exponents[5, 2] = 80
    return {"m.weight_packed": packed, "m.weight_scale": exponents}


def test_an_over_span_region_is_rounded_and_counted_or_refused_beforehand(tmp_path: Path) -> None:
    src = write(Source({"model.safetensors": over_span_weight()}, TOY), tmp_path / "src")
    rounded = requant.convert(src, tmp_path / "rounded", "FP8_BLOCK").to_json()
    assert rounded["values"] == {"exact": 128 * 128, "rounded": 0, "over_span": 128 * 128}
    foretold = requant.convert(src, tmp_path / "unused", "FP8_BLOCK", dry_run=True, scan=True).to_json()
    assert foretold["values"] == rounded["values"]
    compared = requant.compare(src, tmp_path / "rounded").to_json()
    assert compared["differing"] == 32
    for refusal in ({"on_over_span": "refuse"}, {"exact": "required"}):
        with pytest.raises(requant.CheckpointError) as error:
            requant.convert(src, tmp_path / "refused", "FP8_BLOCK", **refusal)
        assert [(p.code, p.module) for p in error.value.problems] == [("over-span", "m")]
        assert not (tmp_path / "refused").exists()


def test_zero_groups_never_make_a_region_over_span(tmp_path: Path) -> None:
    tensors = over_span_weight()
    tensors["m.weight_packed"][5, 32:48] = 0x80  # the codes of the far group: +0 and -0
    src = write(Source({"model.safetensors": tensors}, TOY), tmp_path / "src")
    result = requant.convert(src, tmp_path / "dst", "FP8_BLOCK", exact="required").to_json()
    assert result["values"]["over_span"] == 0
    assert requant.compare(src, tmp_path / "dst").exact


def test_a_nan_scale_is_found_before_anything_is_written(tmp_path: Path) -> None:
    tensors = over_span_weight()
    tensors["m.weight_scale"][77, 3] = 255
    src = write(Source({"model.safetensors": tensors}, TOY), tmp_path / "src")
    for exact in ("auto", "off"):
        with pytest.raises(requant.CheckpointError) as error:
            requant.convert(src, tmp_path / "dst", "FP8_BLOCK", exact=exact)
        (problem,) = error.value.problems
        assert (problem.code, problem.module) == ("nan-or-inf", "m")
        assert "[77, 3]" in problem.message
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16), np.dtype(np.float32)])
def test_a_nan_or_inf_weight_is_named_with_its_place(tmp_path: Path, value: float, dtype: np.dtype[Any]) -> None:
    weight = np.ones((300, 200), dtype)
    weight[280, 131] = value
    src = write(Source({"model.safetensors": {"m.weight": weight}}, TOY), tmp_path / "src")
    for scheme in ("FP8_DYNAMIC", "FP8_BLOCK"):
        with pytest.raises(requant.CheckpointError) as error:
            requant.convert(src, tmp_path / scheme, scheme)
        (problem,) = error.value.problems
        assert (problem.code, problem.module) == ("nan-or-inf", "m")
        assert "[280, 131]" in problem.message
        assert not (tmp_path / scheme / "config.json").exists()


def test_float32_arithmetic_is_closer_to_the_weights(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    src = write(
        Source({"model.safetensors": {"m.weight": (rng.standard_normal((256, 512)) * 0.02).astype(BF16)}}, TOY),
        tmp_path / "src",
    )
    sqnr = {}
    for arithmetic in ("reference", "float32"):
        requant.convert(src, tmp_path / arithmetic, "FP8_BLOCK", arithmetic=arithmetic)
        sqnr[arithmetic] = requant.compare(src, tmp_path / arithmetic).to_json()["sqnr_db"]
    assert sqnr["float32"] > sqnr["reference"] > 30
    assert read(tmp_path / "float32")["m.weight_scale"].dtype == "F32"


class Traffic:
    """Counts what goes through the operating system's doors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, src: Path) -> None:
        self.opened: Counter[str] = Counter()
        self.read = self.written = self.copied = 0
        real_open, real_preadv, real_pwrite = os.open, os.preadv, os.pwrite
        real_copy = os.copy_file_range

        def counted_open(path: Any, *arguments: Any, **options: Any) -> int:
            if str(path).startswith(str(src)):
                self.opened[str(path)] += 1
            return real_open(path, *arguments, **options)

        def counted_preadv(fd: int, buffers: Any, offset: int, *flags: Any) -> int:
            done = real_preadv(fd, buffers, offset, *flags)
            self.read += done
            return done

        def counted_pwrite(fd: int, data: Any, offset: int) -> int:
            done = real_pwrite(fd, data, offset)
            self.written += done
            return done

        def counted_copy(*arguments: Any, **options: Any) -> int:
            done = real_copy(*arguments, **options)
            self.copied += done
            return done

        monkeypatch.setattr(os, "open", counted_open)
        monkeypatch.setattr(os, "preadv", counted_preadv)
        monkeypatch.setattr(os, "pwrite", counted_pwrite)
        monkeypatch.setattr(os, "copy_file_range", counted_copy)


def test_what_is_read_and_written_is_what_the_plan_says(
    small_k3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = requant.convert(small_k3, tmp_path / "dst", "FP8_BLOCK", ignore=demo.IGNORE, dry_run=True).to_json()
    scales = sum(len(t.data) for name, t in read(small_k3).items() if t.dtype == "U8" and "scale" in name)
    headers = sum(8 + int.from_bytes(shard.read_bytes()[:8], "little") for shard in small_k3.glob("*.safetensors"))
    json_files = sum(path.stat().st_size for path in small_k3.glob("*.json"))
    traffic = Traffic(monkeypatch, small_k3)
    requant.convert(small_k3, tmp_path / "dst", "FP8_BLOCK", ignore=demo.IGNORE)
    assert set(traffic.opened.values()) == {1}
    payload = plan["bytes_read"] + scales
    assert payload <= traffic.read <= payload + headers + json_files + 3 * (1 << 20)
    after = read(tmp_path / "dst")
    made = [name for name in after if name.rpartition(".")[0] + ".weight_scale" in after]
    kept = plan["bytes_out"] - sum(len(after[name].data) for name in made)
    assert traffic.copied == kept
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "dst").iterdir()}
    journal = 64 << 10
    assert sum(sizes.values()) <= traffic.written + traffic.copied <= sum(sizes.values()) + journal


PEAK = """
import sys
import requant
print(requant.convert(sys.argv[1], sys.argv[2], "FP8_BLOCK", workers=2).peak_rss)
"""


def test_peak_memory_does_not_depend_on_the_size_of_a_shard(tmp_path: Path) -> None:
    """A single weight of 1 GB in a single shard: the same peak as one of 64 MB, and far below it."""
    peaks = []
    for rows in (1 << 12, 1 << 16):
        src = tmp_path / f"src-{rows}"
        src.mkdir()
        spec = demo.TensorSpec("m.weight", "BF16", (rows, 8192), rows * 8192 * 2)
        header = demo.encode_header([spec], {})
        with open(src / "model.safetensors", "wb") as file:
            file.write(header)
            file.truncate(len(header) + spec.nbytes)
        (src / "config.json").write_text("{}")
        run = [sys.executable, "-c", PEAK, str(src), str(tmp_path / f"dst-{rows}")]
        peaks.append(int(subprocess.run(run, capture_output=True, text=True, check=True).stdout))
    assert peaks[1] < 500e6
    assert peaks[1] < peaks[0] * 1.25


def test_float32_arithmetic_stores_f32_scales_on_exact_routes_too(small_k3: Path, tmp_path: Path) -> None:
    requant.convert(small_k3, tmp_path / "dst", "FP8_BLOCK", ignore=demo.IGNORE, arithmetic="float32")
    scales = {tensor.dtype for name, tensor in read(tmp_path / "dst").items() if name.endswith(".weight_scale")}
    assert scales == {"F32"}
    assert requant.compare(small_k3, tmp_path / "dst").classes["expert"].differing == 0


def test_names_that_only_look_alike_when_escaped_stay_apart(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    long_name = "s" * 243 + ".safetensors"
    src = tmp_path / "src"
    shards = ["x/a.safetensors", "x%2Fa.safetensors", long_name]
    (src / "x").mkdir(parents=True)
    weights = {shard: (rng.standard_normal((300, 64))).astype(BF16) for shard in shards}
    for number, (shard, array) in enumerate(weights.items()):
        save_file({f"m.{number}.weight": array}, src / shard)
    index = {"weight_map": {f"m.{number}.weight": shard for number, shard in enumerate(shards)}}
    (src / "model.safetensors.index.json").write_text(json.dumps(index))
    (src / "config.json").write_text("{}")
    (src / ("t" * 250)).write_text("a side file")
    for _ in range(5):
        dst = tmp_path / "dst"
        requant.convert(src, dst, "FP8_BLOCK", workers=4)
        assert requant.verify(dst).ok
        assert requant.compare(src, dst).to_json()["sqnr_db"] > 30
        assert {str(path.relative_to(dst)) for path in dst.rglob("*.safetensors")} == set(shards)
        shutil.rmtree(dst)


def test_weights_too_small_for_the_references_global_scale_are_kept_and_noted(tmp_path: Path) -> None:
    """compressed-tensors writes 1 for a scale that overflows in F16, and all codes become zero."""
    small = (np.random.default_rng(0).standard_normal((64, 64)) * 1e-3).astype(np.float16)
    write(
        Source({"model.safetensors": {"model.layers.0.mlp.up_proj.weight": small}}, {"model_type": "llama"}),
        tmp_path / "src",
    )
    result = requant.convert(tmp_path / "src", tmp_path / "dst", "NVFP4A16")
    assert any("1 weights" in note and "float32" in note for note in result.to_json()["notes"])
    sqnr = requant.compare(tmp_path / "src", tmp_path / "dst").total.sqnr_db
    assert sqnr is not None
    assert sqnr > 18


@pytest.mark.parametrize("scheme", ["MXFP4A16", "MXFP8A16"])
def test_float32_keeps_groups_of_f16_subnormals(tmp_path: Path, scheme: str) -> None:
    """In F16 itself the reference's rule makes zeros of them."""
    tiny = (np.random.default_rng(0).standard_normal((64, 64)) * 1e-5).astype(np.float16)
    write(Source({"model.safetensors": {"model.layers.0.mlp.up_proj.weight": tiny}}, {}), tmp_path / "src")
    requant.convert(tmp_path / "src", tmp_path / "dst", scheme, arithmetic="float32")
    sqnr = requant.compare(tmp_path / "src", tmp_path / "dst").total.sqnr_db
    assert sqnr is not None
    assert sqnr > 15
