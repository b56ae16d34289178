"""verify --against: nothing that a conversion makes is reported, and everything that none makes is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import requant
from parity.checkpoints import Source, read, write

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
CONFIG = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
SCHEMES = ("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "MXFP4A16", "MXFP8A16", "W8A8", "W4A16", "W4A16_ASYM")
RULES = {"FP8": "pow2", "FP8_DYNAMIC": "mse", "FP8_BLOCK": "pow2"}
SHARD = "model.safetensors"


@pytest.fixture(scope="module", autouse=True)
def unsynced() -> Iterator[None]:
    """Leave out what only guards against a crash of the machine: most of the time of so many small conversions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _descriptor: None)
        yield


def weights(dtype: str, rng: np.random.Generator) -> dict[str, NDArray[Any]]:
    """Return weights of all kinds of sizes, gauss and heavy tails."""
    shape = 136, 256
    tiny = {"BF16": 1e-39, "F16": 3e-7, "F32": 1e-41}[dtype]
    huge = {"BF16": 1e37, "F16": 2e4, "F32": 1e37}[dtype]
    holes = rng.standard_normal(shape) * 0.02
    holes[:, :64], holes[3] = 0, 0
    found = {
        "gauss": rng.standard_normal(shape) * 0.02,
        "tails": rng.standard_t(2, shape) * 0.02,
        "wide": rng.standard_normal(shape) * np.exp(3 * rng.standard_normal(shape)) * 1e-3,
        "rows": rng.standard_normal(shape) * np.exp(rng.uniform(-12, 2, (shape[0], 1))),
        "tiny": rng.standard_normal(shape) * tiny,
        "small": rng.standard_normal(shape) * tiny * 2**10,
        "huge": np.clip(rng.standard_normal(shape), -2.5, 2.5) * huge,
        "holes": holes,
        "zero": np.zeros(shape),
        "positive": abs(rng.standard_normal(shape)) * 0.02,
        "shifted": rng.standard_normal(shape) * 0.01 + 0.05,
    }
    return {f"model.layers.{name}.mlp.gate_proj.weight": w.astype(DTYPES[dtype]) for name, w in found.items()}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("against")
    return {
        dtype: write(
            Source({SHARD: weights(dtype, np.random.default_rng(5))}, {"model_type": "llama", "dtype": CONFIG[dtype]}),
            root / dtype,
        )
        for dtype in DTYPES
    }


def said(folder: Path, source: Path) -> list[tuple[str, str]]:
    return [(problem.module, problem.message) for problem in requant.verify(folder, against=source).problems]


@pytest.mark.parametrize("scale", ["amax", "search"])
@pytest.mark.parametrize("arithmetic", ["reference", "float32"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "dtype", [dtype if dtype == "BF16" else pytest.param(dtype, marks=pytest.mark.heavy) for dtype in DTYPES]
)
def test_whatever_is_made_of_values_is_within_its_bound(
    sources: dict[str, Path], tmp_path: Path, dtype: str, scheme: str, arithmetic: Any, scale: str
) -> None:
    rule: Any = "amax" if scale == "amax" else RULES.get(scheme, "mse")
    requant.convert(sources[dtype], tmp_path / "out", scheme, arithmetic=arithmetic, scale=rule)
    assert said(tmp_path / "out", sources[dtype]) == []


@pytest.mark.parametrize("second", ["FP8_BLOCK", "NVFP4A16", "W4A16_ASYM", "MXFP8A16", "BF16"])
@pytest.mark.parametrize("first", ["FP8_DYNAMIC", "NVFP4A16", "W8A8", "W4A16_ASYM"])
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_whatever_is_made_of_quantized_values_is_within_its_bound(
    sources: dict[str, Path], tmp_path: Path, dtype: str, first: str, second: str
) -> None:
    ignore = ["re:.*huge.*"] if dtype == "F16" else []  # the decoded ones are beyond F16
    requant.convert(sources[dtype], tmp_path / "one", first, ignore=ignore)
    for exact in ("auto", "off"):
        requant.convert(tmp_path / "one", tmp_path / exact, second, ignore=ignore, exact=exact)
        assert said(tmp_path / exact, tmp_path / "one") == []


EXPERTS = [f"model.layers.0.mlp.experts.{e}.{leaf}" for e in range(2) for leaf in ("gate_proj", "up_proj", "down_proj")]
FIRST, OTHER = EXPERTS[0], EXPERTS[3]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(11)
    tensors: dict[str, Any] = {
        f"{module}.weight": (rng.standard_normal((256, 256)) * 0.02).astype(DTYPES["BF16"]) for module in EXPERTS
    }
    tensors |= {
        "model.embed_tokens.weight": rng.standard_normal((64, 32)).astype(DTYPES["BF16"]),
        "model.layers.0.self_attn.q_proj.bias": rng.standard_normal(64).astype(DTYPES["BF16"]),
        "model.layers.0.A_log": rng.standard_normal(3).astype(np.float32),
        "model.layers.0.table": rng.integers(0, 9, (4, 4)),
        "logit_scale": np.array(2.5, np.float32),
        "nothing": np.zeros((0, 5), np.float16),
        "blob": rng.integers(0, 256, 33, np.uint8),
        "codes": rng.standard_normal(8).astype(ml_dtypes.float8_e5m2),
    }
    config = {"model_type": "qwen3_moe", "num_experts": 2, "dtype": "bfloat16"}
    return write(Source({SHARD: tensors}, config), tmp_path_factory.mktemp("model") / "src")


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root, found = tmp_path_factory.mktemp("made"), {}

    def make(scheme: str) -> Path:
        if scheme not in found:
            requant.convert(model, root / scheme, scheme)
            found[scheme] = root / scheme
        return found[scheme]

    return make


def place(folder: Path, name: str) -> tuple[int, int]:
    """Return where a tensor lies in the only shard of a checkpoint."""
    raw = (folder / SHARD).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    start, stop = json.loads(raw[8 : 8 + size])[name]["data_offsets"]
    return 8 + size + start, 8 + size + stop


def spoil(folder: Path, copy: Path, change: Callable[[bytearray, Callable[[str], slice]], None]) -> Path:
    """Return a copy of a checkpoint with other bytes in its shard."""
    shutil.copytree(folder, copy)
    raw = bytearray((copy / SHARD).read_bytes())
    change(raw, lambda name: slice(*place(folder, name)))
    (copy / SHARD).write_bytes(bytes(raw))
    return copy


QUANTIZED = [scheme for scheme in SCHEMES if scheme != "FP8"]


def payload(scheme: str) -> str:
    return "weight_packed" if scheme.startswith(("NVFP4", "MXFP4", "W4A16")) else "weight"


@pytest.mark.parametrize("scheme", [*SCHEMES, "BF16"])
def test_a_conversion_is_accounted_for(model: Path, made: Callable[[str], Path], scheme: str) -> None:
    if scheme == "BF16":
        assert said(model, model) == []
    else:
        assert said(made(scheme), model) == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_bit_of_one_scale_is_found(model: Path, made: Callable[[str], Path], tmp_path: Path, scheme: str) -> None:
    """The lowest that rounded quotients do not hide: of a BF16 scale the second, under INT4 the fourth."""
    bit = 3 if scheme.startswith("W4") else 1 if scheme.startswith(("FP8", "W8")) else 0

    def change(raw: bytearray, at: Callable[[str], slice]) -> None:
        raw[at(f"{FIRST}.weight_scale").start] ^= 1 << bit

    assert [module for module, _ in said(spoil(made(scheme), tmp_path / "bad", change), model)] == [FIRST]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_flipped_sign_is_found_at_its_place(
    model: Path, made: Callable[[str], Path], tmp_path: Path, scheme: str
) -> None:
    """Of the last value of a row, whose magnitude is not small."""
    source = np.frombuffer(read(model)[f"{FIRST}.weight"].data, DTYPES["BF16"]).reshape(256, 256).astype(np.float32)
    row = int(abs(source[:, 255]).argmax())
    integers = scheme.startswith("W")

    def change(raw: bytearray, at: Callable[[str], slice]) -> None:
        where = at(f"{FIRST}.{payload(scheme)}")
        width = (where.stop - where.start) // 256
        raw[where.start + row * width + width - 1] ^= 0xFF if scheme == "W8A8" else 0x80

    [(module, message)] = said(spoil(made(scheme), tmp_path / "bad", change), model)
    assert module == FIRST
    assert "1 of 65,536 values" in message
    assert f"[{row}, 255]" in message
    assert SHARD in message
    assert integers or f"{source[row, 255]:.9g} in the source" in message


def swapped(raw: bytearray, one: slice, two: slice) -> None:
    raw[one], raw[two] = raw[two], raw[one]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_swapped_experts_are_both_found(model: Path, made: Callable[[str], Path], tmp_path: Path, scheme: str) -> None:
    def change(raw: bytearray, at: Callable[[str], slice]) -> None:
        for name in read(made(scheme)):
            if name.startswith(f"{FIRST}."):
                swapped(raw, at(name), at(name.replace(FIRST, OTHER)))

    found = [module for module, _ in said(spoil(made(scheme), tmp_path / "bad", change), model)]
    assert sorted(found) == [FIRST, OTHER]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_halves_swapped_rows_turned_and_nibbles_in_the_wrong_order_are_found(
    model: Path, made: Callable[[str], Path], tmp_path: Path, scheme: str
) -> None:
    def codes(raw: bytearray, at: Callable[[str], slice]) -> NDArray[np.uint8]:
        where = at(f"{FIRST}.{payload(scheme)}")
        return np.frombuffer(raw, np.uint8)[where].reshape(256, -1)

    def halves(raw: bytearray, at: Callable[[str], slice]) -> None:
        view = codes(raw, at)
        view[:] = np.concatenate([view[128:], view[:128]])

    def turned(raw: bytearray, at: Callable[[str], slice]) -> None:
        view = codes(raw, at)
        view[:, :128] = view[:, :128].reshape(128, 2, 128).transpose(1, 0, 2).reshape(256, 128)

    def nibbles(raw: bytearray, at: Callable[[str], slice]) -> None:
        view = codes(raw, at)
        view[:] = view >> 4 | view << 4

    for change in (halves, turned, *([nibbles] if "packed" in payload(scheme) else [])):
        folder = spoil(made(scheme), tmp_path / change.__name__, change)
        assert [module for module, _ in said(folder, model)] == [FIRST]


OTHERS = [
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.bias",
    "model.layers.0.A_log",
    "model.layers.0.table",
    "logit_scale",
    "blob",
    "codes",
]


@pytest.mark.parametrize("name", OTHERS)
def test_a_byte_of_a_kept_tensor_is_found(model: Path, made: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    def change(raw: bytearray, at: Callable[[str], slice]) -> None:
        raw[at(name).start] ^= 1

    found = said(spoil(made("FP8_BLOCK"), tmp_path / "bad", change), model)
    assert [module for module, _ in found] == [name.removesuffix(".weight")]


def test_a_changed_sign_of_zero_is_found(tmp_path: Path) -> None:
    one = write(Source({SHARD: {"norm.weight": np.zeros(4, np.float32)}}, {}), tmp_path / "one")
    two = write(Source({SHARD: {"norm.weight": -np.zeros(4, np.float32)}}, {}), tmp_path / "two")
    [(module, message)] = said(two, one)
    assert module == "norm"
    assert "other bytes" in message


def test_what_is_missing_added_or_of_another_shape_or_dtype_is_found(model: Path, tmp_path: Path) -> None:
    arrays = {
        name: np.frombuffer(t.data, {"I64": np.int64, "U8": np.uint8}.get(t.dtype, DTYPES.get(t.dtype))).reshape(
            t.shape
        )
        for name, t in read(model).items()
        if t.dtype != "F8_E5M2"
    }
    config = json.loads((model / "config.json").read_text())
    src = write(Source({SHARD: arrays}, config), tmp_path / "src")
    del arrays["nothing"]
    arrays["new"] = np.ones(3, np.float32)
    arrays["blob"] = arrays["blob"].reshape(3, 11)
    arrays["model.layers.0.A_log"] = arrays["model.layers.0.A_log"].astype(np.float16)
    arrays[f"{FIRST}.weight"] = arrays[f"{FIRST}.weight"].astype(np.float32)
    other = write(Source({SHARD: arrays}, config), tmp_path / "other")
    found = {(problem.code, problem.module) for problem in requant.verify(other, against=src).problems}
    assert found == {
        ("missing-part", "nothing"),
        ("orphan-part", "new"),
        ("differs", "blob"),
        ("differs", "model.layers.0.A_log"),
        ("differs", FIRST),
    }


def test_values_lost_to_a_global_scale_that_reaches_too_far_are_found(tmp_path: Path) -> None:
    """compressed-tensors writes 1 for a G that overflows in F16: every code is then the nearest, and zero."""
    name = "model.layers.0.mlp.up_proj"
    small = (np.random.default_rng(0).standard_normal((64, 64)) * 1e-3).astype(np.float16)
    src = write(Source({SHARD: {f"{name}.weight": small}}, {"model_type": "llama"}), tmp_path / "src")
    lost = {
        f"{name}.weight_packed": np.zeros((64, 32), np.uint8),
        f"{name}.weight_scale": np.full((64, 4), 0.125, ml_dtypes.float8_e4m3fn),
        f"{name}.weight_global_scale": np.ones(1, np.float32),
    }
    out = write(Source({SHARD: lost}, {"model_type": "llama"}), tmp_path / "out")
    [(module, message)] = said(out, src)
    assert module == name
    assert "global scale" in message


@pytest.mark.parametrize("scheme", ["FP8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP4A16", "W8A8", "W4A16"])
def test_a_scale_much_too_coarse_is_found_though_every_code_is_the_nearest(
    model: Path, made: Callable[[str], Path], tmp_path: Path, scheme: str
) -> None:
    """All codes zero, under a scale so large that nothing else is nearer."""
    before = read(made(scheme))

    def change(raw: bytearray, at: Callable[[str], slice]) -> None:
        scale, codes = at(f"{FIRST}.weight_scale"), at(f"{FIRST}.{payload(scheme)}")
        dtype = before[f"{FIRST}.weight_scale"].dtype
        count = scale.stop - scale.start
        raw[scale] = np.full(count // 2, 1e4, DTYPES["BF16"]).tobytes() if dtype == "BF16" else bytes([140]) * count
        raw[codes] = bytes([0x88 if scheme == "W4A16" else 0]) * (codes.stop - codes.start)

    assert [module for module, _ in said(spoil(made(scheme), tmp_path / "bad", change), model)] == [FIRST]


@pytest.mark.parametrize(
    ("scheme", "dialect"), [("FP8_BLOCK", "fp8"), ("FP8_BLOCK", "modelopt"), ("NVFP4", "modelopt")]
)
def test_a_respelled_weight_is_the_same_to_the_last_bit(model: Path, tmp_path: Path, scheme: str, dialect: str) -> None:
    requant.convert(model, tmp_path / "one", scheme, dialect=dialect)
    requant.convert(tmp_path / "one", tmp_path / "two", scheme)
    assert said(tmp_path / "two", tmp_path / "one") == []

    def change(raw: bytearray, at: Callable[[str], slice]) -> None:
        raw[at(f"{FIRST}.{'weight_packed' if scheme == 'NVFP4' else 'weight'}").start] ^= 0x01

    found = said(spoil(tmp_path / "two", tmp_path / "bad", change), tmp_path / "one")
    if scheme == "FP8_BLOCK":
        assert [module for module, _ in found] == [FIRST]


def test_a_nan_is_beyond_every_bound(model: Path, made: Callable[[str], Path], tmp_path: Path) -> None:
    def change(raw: bytearray, at: Callable[[str], slice]) -> None:
        raw[at(f"{FIRST}.weight").start] = 0x7F

    [(module, message)] = said(spoil(made("FP8_BLOCK"), tmp_path / "bad", change), model)
    assert module == FIRST
    assert "nan here" in message


def test_headers_alone_cannot_be_held_against_anything(model: Path) -> None:
    with pytest.raises(requant.CallError, match="bad-option"):
        requant.verify(model, "headers", against=model)
    with pytest.raises(requant.CallError, match="bad-source"):
        requant.verify(model, against=model / "nowhere")


def test_a_source_that_is_not_whole_is_named(model: Path, tmp_path: Path) -> None:
    src = write(Source({SHARD: {"m.weight": np.ones((4, 4), ml_dtypes.float8_e4m3fn)}}, {}), tmp_path / "src")
    with pytest.raises(requant.CheckpointError, match="missing-part"):
        requant.verify(model, against=src)


def test_the_command_exits_with_1_and_lists_all(model: Path, made: Callable[[str], Path], tmp_path: Path) -> None:
    def change(raw: bytearray, at: Callable[[str], slice]) -> None:
        for module in EXPERTS:
            raw[at(f"{module}.weight_scale").start + 1] ^= 0x01

    bad = spoil(made("FP8_BLOCK"), tmp_path / "bad", change)
    command = [sys.executable, "-m", "requant", "verify", str(bad), "--against", str(model), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert sorted(problem["module"] for problem in json.loads(done.stdout)["problems"]) == sorted(EXPERTS)
    good = subprocess.run(
        [*command[:4], str(made("FP8_BLOCK")), *command[5:]], capture_output=True, text=True, check=False
    )
    assert (good.returncode, json.loads(good.stdout)["ok"]) == (0, True)
