"""Write the goldens: small checkpoints, and what LLM Compressor makes of them.

Run by hand where the extra [parity] is installed: ``PYTHONPATH=tests python tests/golden/make.py``. The same
versions write the same bytes. A source NAME.safetensors carries its config.json and ignore list as metadata;
NAME-SCHEME.safetensors holds LLM Compressor's tensors.
"""

from __future__ import annotations

import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.numpy import save_file
from safetensors.torch import load_file
from safetensors.torch import save_file as save_torch_file

from parity import checkpoints, oracle, sources

if TYPE_CHECKING:
    from parity.checkpoints import Source

FOLDER = Path(__file__).parent
SHAPES = {"ragged": (130, 10), "wide": (2, 1160)}
GROUPED = ("FP8", "NVFP4A16", "MXFP4A16", "MXFP8A16", "W8A8", "W8A16", "W4A16", "W4A16_ASYM")
"""What the presets store; the others store the weights of one of these."""


def golden(name: str, source: Source, *schemes: str, decode_to: str | None = None) -> None:
    arrays = {tensor: array for shard in source.shards.values() for tensor, array in shard.items()}
    source = source._replace(shards={"model.safetensors": arrays})
    # One key: the order of several is safetensors' whim, and the bytes would differ from run to run.
    metadata = {"golden": json.dumps({"config": source.config, "ignore": source.ignore})}
    save_file(arrays, FOLDER / f"{name}.safetensors", metadata=metadata)
    made_by = {"made_by": " ".join(f"{package}=={version(package)}" for package in ("llmcompressor", "torch"))}
    with tempfile.TemporaryDirectory() as scratch:
        src = checkpoints.write(source, Path(scratch) / "src")
        for scheme in schemes:
            preset = oracle.weight_only(scheme) if scheme == "FP8" else scheme
            out = oracle.quantize(src, Path(scratch) / scheme, preset, source.ignore, decode_to=decode_to)
            tensors = load_file(out / "model.safetensors")
            save_torch_file(tensors, FOLDER / f"{name}-{scheme}.safetensors", metadata=made_by)


def fused(dtype: str) -> Source:
    """A dense layer whose gate_proj has a kind of values per row, and with up_proj shares NVFP4's global scale."""
    kinds = [kind for kind in sources.INTEGER_KINDS if kind not in (sources.huge, sources.huge_one_sided)]
    source = sources.dense(dtype, {"tall": (13, 128)}, kinds)
    names = {"tall_rows": "gate_proj", "tall_blocks": "up_proj"}
    (arrays,) = source.shards.values()
    for old, new in names.items():
        arrays = {name.replace(old, new): array for name, array in arrays.items()}
    return source._replace(shards={"model.safetensors": arrays})


def main() -> None:
    for dtype in sources.DTYPES:
        golden(dtype.lower(), sources.dense(dtype, SHAPES), "FP8_DYNAMIC", "FP8_BLOCK")
        golden(f"fused-{dtype.lower()}", fused(dtype), *GROUPED)
    tiny = sources.kimi_k3(layers=(1,), hidden=32, latent=64, inter=32, bystanders=8)
    golden("kimi-k3", tiny, "FP8_BLOCK", decode_to="bfloat16")


if __name__ == "__main__":
    main()
