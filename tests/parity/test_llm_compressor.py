"""requant against LLM Compressor, run side by side on the same checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import requant
from card import SCRIPT
from parity import sources
from parity.checkpoints import assert_same_meaning, differences, read, write
from requant.formats import FORMATS, Tile

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

pytestmark = pytest.mark.parity

SHAPES = {"square": (384, 384), "ragged": (300, 200), "tall": (4000, 136), "wide": (5, 4000), "tiny": (2, 3)}
SCHEMES = ("FP8_DYNAMIC", "FP8_BLOCK")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", sources.DTYPES)
def test_fp8_weights_decoded_first(oracle: ModuleType, dtype: str, scheme: str, tmp_path: Path) -> None:
    """From one FP8 scheme to the other, through the checkpoint's own dtype."""
    # Decoded, a code of 448 may overflow where the scale was rounded up; requant refuses an Inf, so no such.
    kinds = [kind for kind in sources.KINDS if kind is not sources.huge]
    source = sources.dense(dtype, SHAPES, kinds)
    # LLM Compressor's dequantizer looks for the scales of norms that are not ignored.
    ignore = (*source.ignore, "re:.*norm$")
    other = next(name for name in SCHEMES if name != scheme)
    src = oracle.quantize(write(source, tmp_path / "src"), tmp_path / other, other, ignore)
    decode_to = sources.CONFIG_NAMES[dtype]
    theirs = oracle.quantize(src, tmp_path / "theirs", scheme, ignore, decode_to=decode_to)
    requant.convert(src, tmp_path / "ours", scheme=scheme, ignore=ignore, exact="off")
    assert differences(read(tmp_path / "ours"), read(theirs)) == []
    assert_same_meaning(oracle, tmp_path / "ours", theirs)


@pytest.fixture(scope="module")
def kimi_k3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(sources.kimi_k3(), tmp_path_factory.mktemp("kimi") / "Kimi-K3")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_mxfp4_experts_rounded(oracle: ModuleType, kimi_k3: Path, scheme: str, tmp_path: Path) -> None:
    theirs = oracle.quantize(kimi_k3, tmp_path / "theirs", scheme, sources.K3_IGNORE, decode_to="bfloat16")
    requant.convert(kimi_k3, tmp_path / "ours", scheme=scheme, ignore=sources.K3_IGNORE, exact="off")
    assert differences(read(tmp_path / "ours"), read(theirs)) == []
    assert_same_meaning(oracle, tmp_path / "ours", theirs)


def test_kept_modules_that_the_source_config_claims_are_quantized(oracle: ModuleType, tmp_path: Path) -> None:
    """Kimi-K3's own ignore list misses its router, latent projections and embeddings: they stay as they are."""
    source = sources.kimi_k3(layers=(1,))
    ignore = [*source.ignore, "re:.*routed_expert.*"]
    src = write(source, tmp_path / "src")
    theirs = oracle.quantize(src, tmp_path / "theirs", "FP8_BLOCK", ignore, decode_to="bfloat16")
    requant.convert(src, tmp_path / "ours", scheme="FP8_BLOCK", ignore=ignore, exact="off")
    assert differences(read(tmp_path / "ours"), read(theirs)) == []
    assert_same_meaning(oracle, tmp_path / "ours", theirs)


def test_the_card_script_runs_and_loses_nothing(oracle: ModuleType, kimi_k3: Path, tmp_path: Path) -> None:
    """As LLM Compressor's, but for the experts that an exact scale holds: those keep their very values."""
    (tmp_path / "moonshotai").mkdir()
    (tmp_path / "moonshotai" / "Kimi-K3").symlink_to(kimi_k3)
    subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, check=True)
    theirs = oracle.quantize(kimi_k3, tmp_path / "theirs", "FP8_BLOCK", sources.K3_IGNORE, decode_to="bfloat16")
    ours, expected, original = read(tmp_path / "Kimi-K3-FP8-BLOCK"), read(theirs), read(kimi_k3)
    assert_same_meaning(oracle, tmp_path / "Kimi-K3-FP8-BLOCK", theirs)
    assert {name: t[:2] for name, t in ours.items()} == {name: t[:2] for name, t in expected.items()}
    others = [name for name in ours if ".experts." not in name]
    assert differences({n: ours[n] for n in others}, {n: expected[n] for n in others}) == []
    experts = [name.removesuffix(".weight_packed") for name in original if name.endswith(".weight_packed")]
    for module in experts:
        if ".experts.1." not in module:  # spread beyond what one FP8 scale holds
            before = oracle.decode(original, module, sources.K3_MXFP4)
            after = oracle.decode(ours, module, quantization_config(tmp_path / "Kimi-K3-FP8-BLOCK"))
            assert oracle.torch.equal(before, after), module


def quantization_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return config


def test_mxfp4_decodes_as_compressed_tensors_does(oracle: ModuleType) -> None:
    """Every pair of codes under every exponent but NaN; the largest overflow to Inf in both."""
    packed = np.tile(np.arange(256, dtype=np.uint8), (255, 1))
    exponents = np.tile(np.arange(255, dtype=np.uint8)[:, None], (1, 16))
    ours = np.empty((255, 512), np.uint16)
    FORMATS["mxfp4"].decode((Tile(packed, "U8"), Tile(exponents, "U8")), Tile(ours, "BF16"))
    parts = {"weight_packed": oracle.torch.from_numpy(packed), "weight_scale": oracle.torch.from_numpy(exponents)}
    theirs = oracle.decompress(parts, sources.K3_MXFP4)
    assert np.array_equal(theirs.view(oracle.torch.uint16).numpy(), ours)
