"""Write the goldens of MXFP4 and MXFP8: weights, what LLM Compressor makes of them, and how it reads that (BF16).

Run by hand where the extra [parity] is installed: ``PYTHONPATH=tests python tests/golden/make_mx.py``.
"""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from parity import checkpoints, oracle, sources

FOLDER = Path(__file__).parent
SCHEMES = {"mxfp4": ("MXFP4A16", "weight_packed"), "mxfp8": ("MXFP8A16", "weight")}
KINDS = [kind for kind in sources.KINDS if kind is not sources.huge]


def main() -> None:
    made_by = {"made_by": " ".join(f"{package}=={version(package)}" for package in ("llmcompressor", "torch"))}
    for dtype, numpy_dtype in sources.DTYPES.items():
        weight = sources.mosaic(np.random.default_rng(5), (33, 192), numpy_dtype, (1, 32), KINDS)
        config = {"architectures": ["LlamaForCausalLM"], "dtype": sources.CONFIG_NAMES[dtype]}
        source = checkpoints.Source({"model.safetensors": {"model.layers.0.mlp.up_proj.weight": weight}}, config, ())
        golden = {}
        with tempfile.TemporaryDirectory() as scratch:
            src = checkpoints.write(source, Path(scratch) / "src")
            golden["weight"] = load_file(src / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
            for name, (scheme, payload) in SCHEMES.items():
                out = oracle.quantize(src, Path(scratch) / name, scheme, ())
                made = load_file(out / "model.safetensors")
                parts = {key.rpartition(".")[2]: tensor for key, tensor in made.items()}
                golden[f"{name}.payload"] = parts[payload].view(torch.uint8)
                golden[f"{name}.exponents"] = parts["weight_scale"]
                config = oracle.quantization_config(out).model_dump()
                golden[f"{name}.decoded"] = oracle.decompress(parts, config).to(torch.bfloat16).view(torch.uint16)
        save_file(golden, FOLDER / f"mx-{dtype.lower()}.safetensors", metadata=made_by)


if __name__ == "__main__":
    main()
